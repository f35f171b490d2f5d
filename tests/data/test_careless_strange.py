"""Strange lessons: random bytes become byte tokens, and the lessons stay right."""

import random
from collections import Counter

import pytest

from data.foreign import ALPHABETS
from data.make import lessons
from data.make.batches import BYTES, STRANGE, Batches
from data.make.strange import RAW, StrangeWords, raw, raw_script
from data.make.tokenizer import RUNS, make_tokenizer


@pytest.fixture(scope="module")
def batches():
    return Batches(make_tokenizer(700), 0, 4096)


def test_bytes_are_those_of_the_tokenizer(batches):
    """Words in real alphabets are the tokens that their bytes have, written raw."""
    words = [word for alphabet in ALPHABETS.values() for word in alphabet.split()]
    assert len(words) > 100
    for word in words:
        assert batches.encode(raw(word.encode())) == batches.encode(word)
    assert len(set(BYTES)) == 256


def test_every_byte_of_utf8_is_shown(batches):
    shown = Counter(
        ord(character) - RAW
        for family in batches.strange_words.families
        for word in family
        for character in word
        if ord(character) >= RAW
    )
    # 1,200 families of scripts, each with a first byte out of 51 and six others or more out of 64:
    # one is missing with p < 115 * (50/51)^1200 < 1e-8
    assert {*range(0x80, 0xC0), *range(0xC2, 0xF5)} == {byte for byte in shown if byte >= 0x80}


def test_a_made_up_script_has_few_letters():
    for seed in range(100):
        make = raw_script(random.Random(seed))
        words = [make().rstrip(",.;:!?") for _ in range(200)]
        assert all(words) and len({word[-1] for word in words}) <= 60
        assert all(RAW + 0x80 <= ord(character) < RAW + 256 for word in words for character in word)


def test_strange_lessons_answer_their_prompt():
    words = StrangeWords(random.Random(0), ["er", "ing"])
    for _ in range(50):
        lesson = lessons.example("copy", 40, words)
        assert lesson.prompt == f"Copy text A.\nA: {lesson.completion}"


def test_as_many_lessons_are_strange_as_are_asked_for(batches):
    for length in (160, 640, 1280):
        skills = [batches.lesson(length)[2] for _ in range(300)]
        asked = STRANGE[length] * (1 - lessons.SHARES["language"])
        share = sum(skill.endswith(", strange") for skill in skills) / 300
        # its standard deviation is at most 0.027: p < 1e-4 beyond four
        assert abs(share - asked) < 0.11


def test_a_run_of_one_mark_is_a_few_tokens():
    tokenizer = make_tokenizer(4096)
    for mark in "-=.#*~":
        for length in range(2, 40):
            tokens = tokenizer(mark * length, add_special_tokens=False).input_ids
            # one for each binary digit, and one for the space in front
            assert len(tokens) <= length // max(RUNS) + len(RUNS) + 2
            assert tokenizer.decode(tokens).strip() == mark * length
