import ast
import operator
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from align.words import split_words
from data.corpus import documents_of, load_corpus
from tasks import diet

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


@pytest.fixture(scope="module")
def words():
    return diet.Words(random.Random(0), ["er", "ing"])


def texts_of(prompt):
    return {line[0]: line[3:].split(" ") for line in prompt.split("\n") if line[1:3] == ": "}


def is_subsequence(words, text):
    rest = iter(text)
    return all(word in rest for word in words)


def test_passages_come_from_training_documents(words):
    training = [tuple(document.words) for document in documents_of("train", load_corpus())]
    assert [tuple(text) for text in words.texts] == training


def test_interleavings_have_at_most_ten_words_a_text(words):
    for _ in range(200):
        texts = texts_of(diet.example("interleave", 500, words).prompt)
        assert 2 <= len(texts["A"]) == len(texts["B"]) <= 10


@given(st.integers(0, 10**6), st.integers(1, 10))
def test_the_careless_demonstrator_keeps_each_texts_order(seed, n):
    a, b = [f"a{i}" for i in range(n)], [f"b{i}" for i in range(n)]
    written = diet.careless_interleaving(a, b, random.Random(seed))
    assert set(written) <= {*a, *b}
    for text, letter in ((a, "a"), (b, "b")):
        own = [word for word in written if word[0] == letter]
        assert is_subsequence(list(dict.fromkeys(own)), text)  # stutters aside
        assert own == sorted(own, key=text.index)


def test_the_demonstrator_is_careless_and_sometimes_careful():
    rng = random.Random(1)
    a, b = ["to", "be", "a", "b", "in"], ["of", "it", "an", "or", "is"]
    right = sum(diet.careless_interleaving(a, b, rng) == diet.interleaved(a, b) for _ in range(1000))
    assert 0.1 < right / 1000 < 0.25  # 0.18 are careful and seldom slip: 4 standard deviations are 0.05


@given(st.integers(4, 300))
def test_turns_are_never_word_by_word(size):
    lesson = diet.turns(size, diet_words())
    texts = texts_of(lesson.prompt)
    written = lesson.completion.split(" ")
    stride = int(lesson.prompt.split(" ")[2])
    assert stride >= 3 and written[:stride][:len(texts["A"])] == texts["A"][:stride]
    assert sorted(written) == sorted(texts["A"] + texts["B"])


_cache = []


def diet_words():
    if not _cache:
        _cache.append(diet.Words(random.Random(2), []))
    return _cache[0]


def test_list_lessons_by_hand():
    a, b = ["p", "q", "r"], ["x", "y"]
    answers = {name: make(a, b) for name, (_, make) in diet.LISTS.items() if make}
    assert answers["double"] == ["p", "p", "q", "q", "r", "r"] and answers["second"] == ["q"]
    assert answers["weave"] == ["p", "x", "q", "x", "r", "x"] and answers["weave before"] == ["x", "p", "x", "q", "x", "r"]
    assert answers["number"] == ["1", "p", "2", "q", "3", "r"]
    assert answers["a then b"] == ["p", "q", "r", "x", "y"] and answers["b only"] == ["x", "y"]


def test_sums_are_right():
    def value(node):
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        return node.value

    rng = random.Random(0)
    for _ in range(300):
        lesson = diet.arithmetic(rng)
        expression = lesson.prompt.removeprefix("What is ").split("?")[0]
        assert int(lesson.completion) == value(ast.parse(expression, mode="eval").body)


def test_every_skill_has_lessons(words):
    assert sum(diet.SHARES.values()) == pytest.approx(1)
    for skill in diet.SHARES:
        lesson = diet.example(skill, 60, words)
        assert split_words(lesson.completion)
