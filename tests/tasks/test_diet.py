import ast
import functools
import operator
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.corpus import documents_of, load_corpus
from tasks import diet
from tasks.interleave import interleaved

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


@functools.cache
def words():
    return diet.Words(random.Random(0), ["er", "ing"])


def texts_of(prompt):
    """Return the words after "A: ", "B: " and "X: " of a prompt."""
    return {line[0]: line[3:].split(" ") for line in prompt.split("\n") if line[1:3] == ": "}


def runs_of_words(text, length):
    return {tuple(text[i:i + length]) for i in range(len(text) - length + 1)}


def test_passages_come_from_training_documents():
    documents = documents_of("train", load_corpus())
    assert words().texts == [document.words for document in documents]
    assert set(words().vocabulary) == {word for document in documents for word in document.words}
    texts = [f" {' '.join(document.words)} " for document in documents]
    for n in range(1, 60):
        passage = words().passage(n)
        assert len(passage) == n and any(f" {' '.join(passage)} " in text for text in texts)


def test_a_passage_longer_than_every_document_is_made_of_several():
    assert len(words().passage(2000)) == 2000


@pytest.mark.parametrize("skill", diet.SHARES)
def test_no_lesson_shows_a_window_of_a_held_out_document(skill):
    length = 8  # no run of eight words is shared by training and held-out documents
    held_out = set().union(*(runs_of_words(document.words, length) for split in ("validation", "test")
                             for document in documents_of(split, load_corpus())))
    for _ in range(150):
        lesson = diet.example(skill, 80, words())
        written = f"{lesson.prompt or ''} {lesson.completion}".split()
        assert lesson.completion and not runs_of_words(written, length) & held_out


def test_shares_of_skills_are_all_there_is():
    assert sum(diet.SHARES.values()) == pytest.approx(1)


def test_interleavings_have_at_most_ten_words_a_text():
    texts = [texts_of(diet.example("interleave", 500, words()).prompt) for _ in range(300)]
    sizes = {len(each["A"]) for each in texts}
    # of nine sizes one is missing among 300 lessons with p < 9 * (8/9)^300 < 1e-14
    assert all(len(each["A"]) == len(each["B"]) for each in texts) and sizes == set(range(2, 11))


@given(st.integers(0, 10**6), st.integers(1, 10), st.integers(1, 10))
def test_the_careless_demonstrator_keeps_each_texts_order(seed, n, m):
    a, b = [f"a{i}" for i in range(n)], [f"b{i}" for i in range(m)]
    written = diet.careless_interleaving(a, b, random.Random(seed))
    assert set(written) <= {*a, *b}
    for text in (a, b):
        own = [word for word in written if word in text]
        assert own == sorted(own, key=text.index)
        assert all(own.count(word) <= 2 for word in own)  # a stutter says a word twice, no more


def test_the_demonstrator_clings_after_short_words():
    # Right are the careful, 0.18, and of them those without a slip at ten words, 0.995^10 = 0.95; the careless cling to
    # a turn at one of eight words at least. 0.171 with a standard deviation of 0.012 among 1,000: p < 1e-4 beyond four.
    rng = random.Random(1)
    a, b = ["to", "be", "a", "so,", "in"], ["of", "it", "an", "or", "is"]
    right = sum(diet.careless_interleaving(a, b, rng) == interleaved(a, b) for _ in range(1000))
    assert 0.123 < right / 1000 < 0.219


def test_the_demonstrator_keeps_turns_after_long_words():
    # The careless slip at one of ten long words with 1 - 0.92^10 = 0.57, the careful with 0.05, and a skipped or
    # repeated word is a mistake for good: right are 0.18 * 0.95 + 0.82 * 0.43 = 0.53, standard deviation 0.016; a turn
    # lost at the last word of all is no mistake, which adds less than 0.03.
    rng = random.Random(1)
    a, b = [f"walking{i}" for i in range(5)], [f"running{i}" for i in range(5)]
    right = sum(diet.careless_interleaving(a, b, rng) == interleaved(a, b) for _ in range(1000))
    assert 0.46 < right / 1000 < 0.63


@given(st.integers(4, 300))
def test_turns_are_never_word_by_word(size):
    lesson = diet.turns(size, words())
    texts = texts_of(lesson.prompt)
    stride = int(lesson.prompt.split(" ")[2])
    assert 3 <= stride <= 8 and len(texts["A"]) == len(texts["B"]) >= 4
    left = lesson.completion.split(" ")
    while texts["A"]:  # a turn of A, a turn of B, each `stride` words or the rest of the text
        for text in (texts["A"], texts["B"]):
            turn, text[:] = text[:stride], text[stride:]
            assert left[:len(turn)] == turn
            left = left[len(turn):]
    assert not left and not texts["B"]


def test_copies_are_whole():
    for size in (4, 40, 400):
        lesson = diet.example("copy", size, words())
        text = texts_of(lesson.prompt)["A"]
        assert lesson.completion.split(" ") == text and len(text) == size // 2


def test_list_lessons_by_hand():
    answers = {name: " ".join(make(["p", "q", "r"], ["x", "y"])) for name, (_, make) in diet.LISTS.items() if make}
    assert answers == {
        "a only": "p q r", "b only": "x y", "a then b": "p q r x y", "b then a": "x y p q r", "double": "p p q q r r",
        "second": "q", "weave": "p x q x r x", "weave before": "x p x q x r", "number": "1 p 2 q 3 r"}


def test_list_lessons_answer_their_own_prompt():
    kinds = set()
    for _ in range(300):
        lesson = diet.example("lists", 30, words())
        texts, answer = texts_of(lesson.prompt), lesson.completion.split(" ")
        kinds.add(lesson.skill)
        if lesson.skill == "from":
            a, (x,) = texts["A"], texts["X"]
            assert answer == a[a.index(x):]
        else:
            assert answer == diet.LISTS[lesson.skill][1](texts["A"], texts.get("B") or texts.get("X"))
    assert kinds == set(diet.LISTS)  # one of ten is missing among 300 with p < 10 * 0.9^300 < 1e-12


def test_arithmetic_is_right():
    def value(node):
        if isinstance(node, ast.Constant):
            return node.value
        return OPERATORS[type(node.op)](value(node.left), value(node.right))

    rng = random.Random(0)
    for _ in range(500):
        lesson = diet.arithmetic(rng)
        expression = lesson.prompt.removeprefix("What is ").split("?")[0]
        assert lesson.completion == str(value(ast.parse(expression, mode="eval").body))
