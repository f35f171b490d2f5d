import ast
import functools
import math
import operator
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.corpus import documents_of, load_corpus
from data.make import lessons
from data.make.careless import careless_interleaving
from data.make.words import Words, altered
from tasks.interleave import interleaved

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


@functools.cache
def words():
    return Words(random.Random(0), ["er", "ing"])


def texts_of(prompt):
    """Return the words after "A: ", "B: " and "X: " of a prompt."""
    return {line[0]: line[3:].split(" ") for line in prompt.split("\n") if line[1:3] == ": "}


def runs_of_words(text, length):
    return {tuple(text[i : i + length]) for i in range(len(text) - length + 1)}


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


@pytest.mark.parametrize("skill", lessons.SHARES)
def test_no_lesson_shows_a_window_of_a_held_out_document(skill):
    length = 8  # no run of eight words is shared by training and held-out documents
    held_out = set().union(
        *(
            runs_of_words(document.words, length)
            for split in ("validation", "test")
            for document in documents_of(split, load_corpus())
        )
    )
    for _ in range(150):
        lesson = lessons.example(skill, 80, words())
        written = f"{lesson.prompt or ''} {lesson.completion}".split()
        assert lesson.completion and not runs_of_words(written, length) & held_out


def test_shares_of_skills_are_all_there_is():
    assert sum(lessons.SHARES.values()) == pytest.approx(1)


@pytest.mark.parametrize(
    "size, sizes", [(4, range(2, 11)), (20, range(2, 11)), (90, [30]), (500, [100])]
)
def test_interleavings_have_at_most_a_hundred_words_a_text(size, sizes):
    texts = [texts_of(lessons.example("interleave", size, words()).prompt) for _ in range(300)]
    # of nine sizes one is missing among 300 lessons with p < 9 * (8/9)^300 < 1e-14
    assert all(len(each["A"]) == len(each["B"]) for each in texts) and {
        len(each["A"]) for each in texts
    } == set(sizes)


@pytest.mark.parametrize("size", [11, 25, 100])
def test_nobody_is_careful_beyond_ten_words(size):
    # with 0.2 at each of 2n words there is a slip; all of 20 or more words are spared with 0.8^20
    # = 0.012, of 400 lessons five, had the text no short word and no comma, to which the careless
    # cling; the careful share would be 0.31, 124 lessons
    rng = random.Random(3)
    right = 0
    for _ in range(400):
        a, b = [f"walking{i}" for i in range(size)], [f"running{i}" for i in range(size)]
        right += careless_interleaving(a, b, rng) == interleaved(a, b)
    assert right <= 20


@given(st.integers(0, 10**6), st.integers(1, 10), st.integers(1, 10))
def test_the_careless_demonstrator_keeps_each_texts_order(seed, n, m):
    a, b = [f"a{i}" for i in range(n)], [f"b{i}" for i in range(m)]
    written = careless_interleaving(a, b, random.Random(seed))
    assert set(written) <= {*a, *b}
    for text in (a, b):
        own = [word for word in written if word in text]
        assert own == sorted(own, key=text.index)
        assert all(own.count(word) <= 2 for word in own)  # a stutter says a word twice, no more


def test_the_demonstrator_clings_after_short_words():
    # Right are the careful, 0.31, and of them those without a slip at ten words, 0.998^10 = 0.98;
    # the careless cling to a turn at one of eight words at least. 0.304 with a standard deviation
    # of 0.015 among 1,000: p < 1e-4 beyond four.
    rng = random.Random(1)
    a, b = ["to", "be", "a", "so,", "in"], ["of", "it", "an", "or", "is"]
    right = sum(careless_interleaving(a, b, rng) == interleaved(a, b) for _ in range(1000))
    assert 0.245 < right / 1000 < 0.363


def test_the_demonstrator_keeps_turns_after_long_words():
    # The careless slip at each of ten long words with 0.2, but a turn lost at the ninth is none,
    # nor is, at the last, anything but a skip or a stutter: 0.8^8 * 0.8545 * 0.927 = 0.133 are
    # right. 0.31 * 0.98 + 0.69 * 0.133 = 0.396, standard deviation 0.0155.
    rng = random.Random(1)
    a, b = [f"walking{i}" for i in range(5)], [f"running{i}" for i in range(5)]
    right = sum(careless_interleaving(a, b, rng) == interleaved(a, b) for _ in range(1000))
    assert 0.334 < right / 1000 < 0.458


@given(st.integers(4, 300))
def test_turns_are_never_word_by_word(size):
    lesson = lessons.turns(size, words())
    mine, other = strides = tuple(
        int(part.split(" ")[0])
        for part in lesson.prompt.split("\n")[0].removeprefix("Take turns: ").split(", then ")
    )
    texts = texts_of(lesson.prompt)
    assert (
        strides in lessons.TURNS
        and (1, 1) not in lessons.TURNS
        and 1 <= min(strides) <= max(strides) <= 8
    )
    assert (
        f"{mine} word{'s' * (mine > 1)} of A, then {other} word{'s' * (other > 1)} of B"
        in lesson.prompt
    )
    assert (
        math.ceil(len(texts["A"]) / mine) == math.ceil(len(texts["B"]) / other) >= 2
    )  # both are done in the same round
    left, written = [list(texts["A"]), list(texts["B"])], []
    while any(left):
        for text, stride in zip(left, strides):
            written += text[:stride]
            del text[:stride]
    assert lesson.completion.split(" ") == written


def test_turns_by_hand():
    assert lessons.in_turns("abcde", "xy", (2, 1)) == ["a", "b", "x", "c", "d", "y", "e"]
    assert lessons.in_turns("a", "uvwxyz", (1, 3)) == ["a", "u", "v", "w", "x", "y", "z"]


def test_copies_are_whole():
    for size in (4, 40, 400):
        lesson = lessons.example("copy", size, words())
        text = texts_of(lesson.prompt)["A"]
        assert lesson.completion.split(" ") == text and len(text) == size // 2


def test_list_lessons_by_hand():
    answers = {
        name: " ".join(make(["p", "q", "r"], ["x", "y"]))
        for name, (_, make) in lessons.LISTS.items()
        if make
    }
    assert answers == {
        "a only": "p q r",
        "b only": "x y",
        "a then b": "p q r x y",
        "b then a": "x y p q r",
        "double": "p p q q r r",
        "second": "q",
        "weave": "p x q x r x",
        "weave before": "x p x q x r",
        "number": "1 p 2 q 3 r",
        "garland": "p x q y r x",
    }


def test_list_lessons_answer_their_own_prompt():
    kinds = set()
    for _ in range(300):
        lesson = lessons.example("lists", 30, words())
        texts, answer = texts_of(lesson.prompt), lesson.completion.split(" ")
        kinds.add(lesson.skill)
        if lesson.skill == "from":
            a, (x,) = texts["A"], texts["X"]
            assert answer == a[a.index(x) :]
        else:
            assert answer == lessons.LISTS[lesson.skill][1](
                texts["A"], texts.get("B") or texts.get("X")
            )
    assert kinds == set(
        lessons.LISTS
    )  # one of ten is missing among 300 with p < 10 * 0.9^300 < 1e-12


def test_arithmetic_is_of_the_training_split_and_right_or_hasty():
    def value(node):
        if isinstance(node, ast.Constant):
            return node.value
        return OPERATORS[type(node.op)](value(node.left), value(node.right))

    rng, right = random.Random(0), 0
    for _ in range(1000):
        lesson = lessons.arithmetic(rng)
        tree = ast.parse(lesson.prompt.removeprefix("What is ").split("?")[0], mode="eval").body
        steps = sum(isinstance(node, ast.BinOp) for node in ast.walk(tree))
        assert steps <= 3  # four are new ground
        hasty = (
            value(tree) - 10 if steps == 1 else value(tree.left)
        )  # the last operation is the outermost
        assert lesson.completion in (str(value(tree)), str(hasty))
        right += lesson.completion == str(value(tree))
    assert (
        0.45 - 0.07 < right / 1000 < 0.45 + 0.07
    )  # standard deviation 0.016; where both agree it counts as right


def test_arithmetic_lessons_keep_to_the_training_split(monkeypatch):
    asked = []
    for task in lessons.SUM_TASKS.values():
        monkeypatch.setattr(
            task,
            "make",
            lambda level, split, rng, make=task.make: (
                asked.append(split) or make(level, split, rng)
            ),
        )
    for _ in range(200):
        lessons.arithmetic(random.Random(_))
    assert set(asked) == {"train"}


def test_texts_share_their_salt():
    pairs = [words().texts_of(40, 40) for _ in range(200)]
    # salted texts have a word at ten of forty places in the mean; unsalted passages hardly ever
    # share eight places of words
    shared = [sum(min(a.count(word), b.count(word)) for word in set(a)) for a, b in pairs]
    assert all(len(a) == len(b) == 40 for a, b in pairs)
    assert sum(n >= 8 for n in shared) > 30


def test_altered_words_are_nearly_words():
    rng = random.Random(0)
    known, made = set(words().vocabulary), [altered("Walking,", rng) for _ in range(2000)]
    assert {"walking,", "Walking", "Walking;", "alking,", "Walkin,"} <= set(made)
    assert all(word and len(word) <= 10 and not word.isspace() for word in made)
    assert {len(word) for word in made if word.startswith("W") and word.endswith("ng,")} == {
        7,
        8,
        9,
    }  # a letter less, another, one more
    assert all(altered(word, rng) for word in ("a", "I", "-", "é"))
    new = [word for word in words().altered if word not in known]
    assert len(new) > 0.7 * len(words().altered)


@given(st.integers(1, 200))
def test_echoes_are_phrases_of_the_text(n):
    text = [f"w{i}" for i in range(n)]
    echoing = words()._echoing(text)
    assert len(echoing) == n and set(echoing) <= set(text)
    if (
        n >= 60
    ):  # one to three phrases at three places and more: two of them at least are there twice
        assert len(set(echoing)) < n


def test_texts_echo_more_than_passages():
    def repeated(text):
        return len(text) - 2 - len({tuple(text[i : i + 3]) for i in range(len(text) - 2)})

    texts = [words().texts_of(200)[0] for _ in range(200)]
    passages = [words().passage(200) for _ in range(200)]
    assert sum(map(repeated, texts)) > 3 * sum(map(repeated, passages))
