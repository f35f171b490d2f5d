"""How the embedded model was made: its lessons, their tokens, and the training."""

import ast
import functools
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.corpus import documents_of, load_corpus, load_foreign
from tasks.interleave import interleaved
from tasks.make import __main__ as make
from tasks.make import lessons
from tasks.make.__main__ import LONG, SHORTEST, SIZES, Batches, make_tokenizer
from tasks.make.lessons import Words, careless_interleaving, raw


@functools.cache
def words():
    return Words(random.Random(0), ["er", "ing"])


@functools.cache
def batches():
    return Batches(make_tokenizer(700), 0, 4096)


def texts_of(prompt):
    """Return the words after "A: ", "B: " and "X: " of a prompt."""
    return {line[0]: line[3:].split(" ") for line in prompt.split("\n") if line[1:3] == ": "}


def runs_of_words(text, length):
    return {tuple(text[i : i + length]) for i in range(len(text) - length + 1)}


# The lessons.


def test_passages_come_from_training_documents():
    documents = documents_of("train", load_corpus())
    assert words().texts == [document.words for document in documents]
    texts = [f" {' '.join(document.words)} " for document in documents]
    for n in range(1, 60):
        passage = words().passage(n)
        assert len(passage) == n and any(f" {' '.join(passage)} " in text for text in texts)
    assert len(words().passage(2000)) == 2000  # of several documents


@pytest.mark.parametrize("skill", lessons.SHARES)
def test_no_lesson_shows_a_window_of_a_held_out_document(skill):
    length = 8  # no run of eight words is shared by training and held-out documents
    held_out = set()
    for split in ("validation", "test"):
        for document in documents_of(split, load_corpus()):
            held_out |= runs_of_words(document.words, length)
    for _ in range(100):
        prompt, answer = lessons.lesson(skill, 80, words())
        assert answer and not runs_of_words(f"{prompt or ''} {answer}".split(), length) & held_out


@given(st.integers(0, 10**6), st.integers(1, 10), st.integers(1, 10))
def test_the_careless_demonstrator_keeps_each_texts_order(seed, n, m):
    a, b = [f"a{i}" for i in range(n)], [f"b{i}" for i in range(m)]
    written = careless_interleaving(a, b, random.Random(seed))
    assert set(written) <= {*a, *b}
    for text in (a, b):
        own = [word for word in written if word in text]
        assert own == sorted(own, key=text.index)
        assert all(own.count(word) <= 2 for word in own)  # a stutter says a word twice, no more


def share_of_right(a, b, count=1000):
    rng = random.Random(1)
    right = sum(careless_interleaving(a, b, rng) == interleaved(a, b) for _ in range(count))
    return right / count


def test_how_often_the_demonstrator_is_right():
    """Bounds are four standard deviations, 0.0155 at most: p < 1e-4 each."""
    # Short words: the careful, 0.31, without a slip at ten words, 0.998^10 = 0.98; the careless
    # cling to a turn at one of eight words at least.
    short = share_of_right(["to", "be", "a", "so,", "in"], ["of", "it", "an", "or", "is"])
    assert 0.245 < short < 0.363

    # Long words: the careless slip at each of ten with 0.2, but a turn lost at the ninth is none,
    # nor is, at the last, anything but a skip or a stutter: 0.8^8 * 0.8545 * 0.927 = 0.133 are
    # right. 0.31 * 0.98 + 0.69 * 0.133 = 0.396.
    a, b = [f"walking{i}" for i in range(25)], [f"running{i}" for i in range(25)]
    assert 0.334 < share_of_right(a[:5], b[:5]) < 0.458

    # Nobody is careful beyond ten words: 0.8^20 = 0.012 at 11 words, instead of 0.31.
    assert share_of_right(a[:11], b[:11], 400) <= 0.05


@given(st.integers(4, 300))
def test_turns_are_never_word_by_word(size):
    prompt, answer = lessons.turns(size, words())
    texts = texts_of(prompt)
    counts = prompt.split("\n")[0].removeprefix("Take turns: ").split(", then ")
    strides = tuple(int(part.split(" ")[0]) for part in counts)
    assert strides != (1, 1)

    left, written = [texts["A"], texts["B"]], []
    while any(left):
        for i, stride in enumerate(strides):
            written += left[i][:stride]
            left[i] = left[i][stride:]
    assert answer.split(" ") == written


def test_arithmetic_is_right_or_hasty():
    rng, right = random.Random(0), 0
    for _ in range(1000):
        prompt, answer = lessons.arithmetic(rng)
        tree = ast.parse(prompt.removeprefix("What is ").split("?")[0], mode="eval").body
        steps = sum(isinstance(node, ast.BinOp) for node in ast.walk(tree))
        assert steps <= 3  # four are new ground
        value = eval(ast.unparse(tree))
        # Without the last operation, which is the outermost.
        hasty = value - 10 if steps == 1 else eval(ast.unparse(tree.left))
        assert answer in (str(value), str(hasty))
        right += answer == str(value)
    assert 0.38 < right / 1000 < 0.52  # 0.45, standard deviation 0.016; where both agree it counts


# Strange words and their tokens.


def test_bytes_are_those_of_the_tokenizer():
    """Words in real alphabets are the tokens that their bytes have, written raw."""
    alphabets = {word for document in load_foreign()["alphabets"] for word in document.words}
    for word in alphabets:
        assert batches().encode(raw(word.encode())) == batches().encode(word)
    assert len(alphabets) > 100


@pytest.mark.parametrize("length", [SHORTEST, 160, 1280])
def test_a_row_is_filled_by_what_its_length_is_for(monkeypatch, length):
    asked = []
    monkeypatch.setattr(
        make, "lesson", lambda skill, *given: asked.append(skill) or lessons.lesson(skill, *given)
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
)


@pytest.mark.slow  # 20 s
def test_the_program_writes_a_model_and_its_recipe(tmp_path, monkeypatch, capsys):
    for name, value in (("SHAPE", SHAPE), ("VOCABULARY", 400), ("BATCH_TOKENS", 4096)):
        monkeypatch.setattr(make, name, value)
    make.main(["--workers", "1", "--steps", "3", "--output", str(tmp_path / "model")])
    assert "step 0: loss 5.9" in capsys.readouterr().out  # about log 400
    recipe = json.loads((tmp_path / "model" / "recipe.json").read_text())
    assert recipe["steps"] == 3 and recipe["num_hidden_layers"] == 2 and recipe["tokens"] > 9000
    assert (tmp_path / "model" / "model.safetensors").exists()
