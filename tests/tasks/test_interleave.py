import random
import unicodedata
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from refusals import refused

from grpo.align.needleman import nw_align
from grpo.data.corpus import Document, documents_of
from grpo.tasks.base import SPLITS
from grpo.tasks.interleave import Interleave, interleaved
from grpo.tasks.supply import problem_at

TASKS = {reward: Interleave(reward) for reward in Interleave.rewards}
A, B = ["a1", "a2", "a3", "a4"], ["b1", "b2", "b3", "b4"]  # right: a1 b1 a2 b2 a3 b3 a4 b4
LONG_A, LONG_B = [f"a{i}" for i in range(20)], [f"b{i}" for i in range(20)]
TEXT = st.lists(st.sampled_from(["a1", "a2", "b1", "b2", "the", "x"]), min_size=1, max_size=7)


def score(text, reward="similarity", a=A, b=B):
    task = TASKS[reward]
    return task.score(task.problem(a, b), [text])[0]


@st.composite
def attempts(draw):
    """Two texts and an attempt at them: words at random, both texts' words in any order, or the
    target with slips.
    """
    a, b = draw(TEXT), draw(TEXT)
    words = draw(st.one_of(st.just([]), TEXT, st.permutations(a + b), st.just(interleaved(a, b))))
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.integers(0, len(words)))
        written = draw(st.lists(st.sampled_from(a + b), max_size=2))
        words = words[:place] + written + words[place + draw(st.integers(0, 2)) :]
    return a, b, words


def test_interleaved_by_hand():
    assert interleaved(["a", "b", "c"], ["1", "2", "3"]) == ["a", "1", "b", "2", "c", "3"]
    assert interleaved(["a", "b", "c"], ["1"]) == ["a", "1", "b", "c"]
    assert interleaved([], ["1", "2"]) == ["1", "2"]


def test_the_problem_holds_texts_and_target():
    problem = Interleave().problem(["Owls", "see."], ["It", "rains,"])
    assert problem.prompt.endswith("\nA: Owls see.\nB: It rains,")
    assert problem.target == "Owls It see. rains,"
    assert problem.level == 2 and problem.data == {"a": ["Owls", "see."], "b": ["It", "rains,"]}


def test_combining_accents_do_not_hide_a_trap():
    """A problem of decomposed words is the problem of the same words composed."""
    a, decomposed = (
        [unicodedata.normalize(form, f"é{number}") for number in range(6)]
        for form in ("NFC", "NFD")
    )
    task = Interleave()
    problem = task.problem(decomposed, B)
    assert problem == task.problem(a, B)
    assert task.score(problem, [" ".join(a)])[0].parts["trap"] == "copies A"


PARTS = ("words", "matches", "substitutions", "gaps", "first_divergence")
PARTS += ("trap", "trap_kind")


@pytest.mark.parametrize(
    "text, similarity, parts",
    [
        # a2 is missing, x stands for b3: S = 6 - 1 - 1 = 4, M = 8, similarity (4 + 8) / 16
        ("a1 b1 b2 a3 x a4 b4", 0.75, (7, 6, 1, 1, 2, None, None)),
        # three words of B are missing: S = 5 - 3 = 2, M = 8, (2 + 8) / 16
        ("a1 b1 a2 a3 a4", 0.625, (5, 5, 0, 3, 3, None, None)),
        # A alone: S = 4 - 4 = 0, M = 8, (0 + 8) / 16
        ("a1 a2 a3 a4", 0.5, (4, 4, 0, 4, 1, "copies A", "ignores a text")),
        # right, and two words more: S = 8 - 2 = 6, M = 10, (6 + 10) / 20
        ("a1 b1 a2 b2 a3 b3 a4 b4 x x", 0.8, (10, 8, 0, 2, 8, "runs on", None)),
        # nothing: S = -8, M = 8, (-8 + 8) / 16
        (" \n", 0, (0, 0, 0, 8, 0, "empty", None)),
    ],
)
def test_parts_by_hand(text, similarity, parts):
    got = score(text)
    assert got.value == got.reward == similarity and not got.exact
    got.parts.pop("pairs")
    assert got.parts == dict(zip(PARTS, parts, strict=True))


@pytest.mark.parametrize(
    "reward, uneven, lopsided",
    [  # the first two texts of test_parts_by_hand
        ("similarity", 0.75, 0.625),
        # a1-b1, b2-a3 and a4-b4, three pairs replaced and one missing: S = 3 - 4; a1-b1 and b1-a2,
        # two replaced and three missing: S = 2 - 5; of 7 pairs
        ("pairs", 6 / 14, 4 / 14),
        ("prefix", 2 / 8, 3 / 8),
    ],
)
def test_rewards_by_hand(reward, uneven, lopsided):
    task = Interleave(reward)
    scores = task.score(task.problem(A, B), ["a1 b1 b2 a3 x a4 b4", "a1 b1 a2 a3 a4"])
    assert [each.reward for each in scores] == pytest.approx([uneven, lopsided])
    assert [each.value for each in scores] == [
        0.75,
        0.625,
    ]  # reports show the similarity, whatever is paid


def test_a_trap_is_named_when_seven_tenths_of_the_words_are_of_the_texts():
    def trap(strange):
        return score(" ".join(LONG_A[: 20 - strange] + ["x"] * strange), a=LONG_A, b=LONG_B).parts[
            "trap"
        ]

    assert trap(6) == "copies A"  # 14 of 20 words
    assert trap(7) == "ignores B"


@settings(max_examples=60)
@given(attempts(), st.sampled_from(Interleave.rewards))
@example((["a1"], ["a1"], ["a1"]), "prefix")  # half of it, and yet both texts in full
def test_rewards_are_shares_and_one_only_when_exact(attempt, reward):
    a, b, words = attempt
    got = score(" ".join(words), reward, a, b)
    assert 0 <= got.reward <= 1 and 0 <= got.value <= 1
    assert (got.reward == 1) == (got.value == 1) == got.exact == (words == interleaved(a, b))


def credits(text, reward, a=A, b=B):
    task = TASKS[reward]
    return task.credits(task.problem(a, b), [text])[0]


@pytest.mark.parametrize(
    "reward, expected, rest",
    [  # target a1 b1 a2 b2 a3 b3 a4 b4
        ("prefix", [1, 1, 0, 0, 0, 0], 0),
        # match, match, a2 passed over and match, x in the place of a3, match, match; and b4 is
        # missing at the end
        (
            "similarity",
            [1 / 2, 1 / 2, 0, -1 / 2, 1 / 2, 1 / 2],
            8 / 2 - 1 / 2,
        ),  # and M / 2M for everybody
    ],
)
def test_credits_by_hand(reward, expected, rest):
    text = " a1 b1\n b2 x b3  a4"
    assert [end for end, _ in credits(text, reward)] == [3, 6, 10, 12, 15, 19]
    assert [amount for _, amount in credits(text, reward)] == pytest.approx(
        [share / 8 for share in expected]
    )
    assert score(text, reward).reward - sum(
        amount for _, amount in credits(text, reward)
    ) == pytest.approx(rest / 8)


def test_a_word_too_many_costs_what_it_takes_from_the_reward():
    # all is right, then 8 / 9 and 8 / 10 of it are left; S - 1 and M + 1 the other way
    assert credits("a1 b1 a2 b2 a3 b3 a4 b4 x y", "prefix")[-2:] == (
        (25, pytest.approx(8 / 9 - 1)),
        (27, 0.0),  # nothing counts any more
    )
    # 7 of 7 pairs, and then 7 - 1 of 8; the other half of the reward is settled at the end.
    last = credits("a1 b1 a2 b2 a3 b3 a4 b4 x", "pairs")[-1]
    assert last == (25, pytest.approx(6 / 16 - 7 / 14))


@settings(max_examples=200)
@given(attempts(), st.sampled_from(Interleave.rewards), st.integers(1, 6), st.integers(0, 20))
def test_nothing_counts_after_what_is_enough(attempt, reward, wanted, place):
    a, b, words = attempt
    whole = TASKS[reward].problem(a, b)
    start = place % max(1, len(whole.target.split()) - wanted + 1)
    for problem in (whole, TASKS[reward].window(whole, wanted, start)):
        text = " ".join(words) + " "
        enough = [TASKS[reward].is_enough(problem, text[:n]) for n in range(len(text) + 1)]
        assert enough == sorted(enough)
        if enough[-1]:
            of_parts = TASKS[reward].score(problem, [text[: enough.index(True)], text])
            assert len({(score.reward, score.exact) for score in of_parts}) == 1
        assert not TASKS[reward].is_enough(problem, problem.target + " ")


@given(attempts(), st.sampled_from(Interleave.rewards), st.integers(1, 9), st.integers(0, 20))
def test_windows_are_parts_of_the_answer(attempt, reward, wanted, place):
    a, b, words = attempt
    task, right = TASKS[reward], interleaved(a, b)
    start = place % max(1, len(right) - wanted + 1)
    window = task.window(task.problem(a, b), wanted, start)
    shown, target = window.begun.split(), window.target.split()
    assert len(target) == min(wanted, len(right)) and len(shown) == start
    assert [*shown, *target] == right[: start + wanted]
    assert task.key(window) == window.key == task.problem(a, b).key

    is_last = len(shown) + len(target) == len(right)
    (score,) = task.score(window, [" ".join([*target, *words])])
    assert score.exact == (not is_last or not words)
    if len(right) > wanted:
        assert task.draft(window)("").split() == right[len(shown) :]


@settings(max_examples=60)
@given(attempts(), st.sampled_from(Interleave.rewards))
@example((["a1"], ["b1"], []), "similarity")
def test_credits_and_what_is_missing_at_the_end_add_up_to_the_reward(attempt, reward):
    a, b, words = attempt
    target, text = interleaved(a, b), " ".join(words)
    earned, longest = (
        sum(amount for _, amount in credits(text, reward, a, b)),
        max(len(words), len(target)),
    )
    if reward == "pairs":
        words, target, longest = [*pairwise(words)], [*pairwise(target)], longest - 1
    best = max(nw_align(words, target[:j]).score for j in range(len(target) + 1))
    rest = (
        0 if reward == "prefix" else 1 / 2 + (nw_align(words, target).score - best) / (2 * longest)
    )
    assert earned + rest == pytest.approx(score(text, reward, a, b).reward, abs=1e-12)


def test_a_corpus_that_is_too_short():
    documents = [Document(str(i), " ".join(f"w{i}.{j}" for j in range(50 + i))) for i in range(40)]
    longest, second = sorted(
        (len(document.words) for document in documents_of("train", documents)), reverse=True
    )[:2]
    task = Interleave()
    task._documents = documents
    for words, enough in ((second + 1, 1), (longest + 1, 0)):
        line = refused(task.make, words, "train", random.Random(0))
        assert line.startswith(f"--words {words}: of 40 texts these have {words} words or more: ")
        assert f": {enough} of train, " in line and f"allows at most --words {second}; " in line
    made = task.make(second, "train", random.Random(0))  # the most that was promised can be made
    assert len(made.data["a"]) == len(made.data["b"]) == second


def texts_of(folder, count, words=30):
    folder.mkdir()
    for i in range(count):
        (folder / f"{i:02}.txt").write_text(" ".join(f"w{i}.{j}" for j in range(words)))
    return Interleave(texts=str(folder))


def test_own_texts_need_two_documents_in_each_split(tmp_path):
    """Held against what the hash of each text says: 40 of them have enough, 12 have not."""
    task = texts_of(tmp_path / "many", 40)
    numbers = [len(documents_of(split, task._documents)) for split in SPLITS]
    assert min(numbers) >= 2
    made = {split: problem_at(task, seed=0, split=split, level=30, index=0) for split in SPLITS}
    for split, problem in made.items():
        own = {word for document in documents_of(split, task._documents) for word in document.words}
        assert {*problem.data["a"], *problem.data["b"]} <= own

    few = texts_of(tmp_path / "few", 12)
    numbers = [len(documents_of(split, few._documents)) for split in SPLITS]
    assert min(numbers) < 2 <= numbers[0]
    assert refused(few.make, 30, "train", random.Random(0)).startswith(
        f"--texts {tmp_path}/few: of 12 texts these have 30 words or more: {numbers[0]} of train, "
        f"{numbers[1]} of validation, {numbers[2]} of test; a problem takes two of one split"
    )
