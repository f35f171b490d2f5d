"""How the embedded model was made: its lessons, their tokens, and the training."""

import functools
import hashlib
import random

import pytest

from grpo.data.corpus import documents_of, load_corpus, load_foreign
from grpo.tasks import make
from grpo.tasks.make import LONG, SHORTEST, SIZES, Batches, Words, make_tokenizer, raw


@functools.cache
def words():
    return Words(random.Random(0), ["er", "ing"])


@functools.cache
def batches():
    return Batches(make_tokenizer(700), 0, 4096)


def runs_of_words(text, length):
    return {tuple(text[i : i + length]) for i in range(len(text) - length + 1)}


# The lessons.


def test_the_lessons_are_those_of_the_embedded_model():
    """Byte for byte: of both kinds of text, in every skill."""
    digest = hashlib.sha256()
    supply = Words(random.Random(5), ["er", "ing"])
    for number in range(60):
        supply.is_strange = number % 2 == 1
        for skill in (*make.SHARES, "arithmetic"):
            digest.update(repr(make.lesson(skill, 4 + 3 * number, supply)).encode())
    assert digest.hexdigest()[:16] == "c54a36039bdba6b6"


@pytest.mark.parametrize("skill", make.SHARES)
def test_no_lesson_shows_a_window_of_a_held_out_document(skill):
    length = 8  # no run of eight words is shared by training and held-out documents
    held_out = set()
    for split in ("validation", "test"):
        for document in documents_of(split, load_corpus()):
            held_out |= runs_of_words(document.words, length)
    for _ in range(100):
        prompt, answer = make.lesson(skill, 80, words())
        assert answer and not runs_of_words(f"{prompt or ''} {answer}".split(), length) & held_out


# Strange words and their tokens.


def test_bytes_are_those_of_the_tokenizer():
    """Words in real alphabets are the tokens that their bytes have, written raw."""
    alphabets = {word for document in load_foreign()["alphabets"] for word in document.words}
    for word in alphabets:
        assert batches().encode(raw(word.encode())) == batches().encode(word)
    assert len(alphabets) > 100


@pytest.mark.parametrize("length", [SHORTEST, 160, 1280])
def test_a_row_is_filled_by_what_its_length_is_for(monkeypatch, length):
    batches()  # its tokenizer is made once, of lessons too
    asked, lesson = [], make.lesson
    monkeypatch.setattr(
        make, "lesson", lambda skill, *given: asked.append(skill) or lesson(skill, *given)
    )
    for _ in range(25):
        tokens, start = batches().row(length)
        assert len(tokens) <= length and start < len(tokens)
        if length > LONG and asked[-1] != "interleave":
            assert len(tokens) >= SIZES[True][0] * length
    assert (set(asked) == {"arithmetic"}) == (length == SHORTEST)


# The training.

SHAPE = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    tie_word_embeddings=True,
)


@pytest.mark.slow  # 20 s
def test_the_program_writes_a_model(tmp_path, monkeypatch, capsys):
    for name, value in (("SHAPE", SHAPE), ("VOCABULARY", 400), ("BATCH_TOKENS", 4096)):
        monkeypatch.setattr(make, name, value)
    make.train(tmp_path / "model", steps=3, workers=1, seed=0)
    assert "step 0: loss 5.9" in capsys.readouterr().out  # about log 400
    assert (tmp_path / "model" / "model.safetensors").exists()
