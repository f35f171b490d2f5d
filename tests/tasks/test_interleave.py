import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.corpus import Document
from tasks.base import UserError
from tasks.interleave import Interleave, interleaved, strategies
from tasks.traps import IGNORE_A_TEXT, all_strategies, main, table

A, B = ["a1", "a2", "a3", "a4"], ["b1", "b2", "b3", "b4"]  # right: a1 b1 a2 b2 a3 b3 a4 b4
WORDS = st.lists(st.sampled_from(["a1", "a2", "b1", "b2", "the", "x"]), max_size=14)


def score(text, reward="similarity", a=A, b=B):
    task = Interleave(reward)
    return task.score(task.problem(a, b), [text])[0]


def test_interleaved_by_hand():
    assert interleaved(["a", "b", "c"], ["1"]) == ["a", "1", "b", "c"]
    assert interleaved([], ["1", "2"]) == ["1", "2"]


def test_the_right_answer():
    for reward in Interleave.rewards:
        right = score("a1 b1 a2 b2 a3 b3 a4 b4", reward)
        assert right.reward == right.value == 1 and right.exact
        assert right.parts["first_divergence"] is None and right.parts["trap"] is None
        assert right.parts["share_a"] == right.parts["share_b"] == 1


def test_parts_by_hand():
    # a2 is missing, x stands for b3: 6 matches, 1 substitution, 1 gap; S = 6 - 1 - 1 = 4, M = 8, (4 + 8) / 16
    parts = score("a1 b1 b2 a3 x a4 b4")
    assert parts.value == 0.75 and not parts.exact
    assert {name: parts.parts[name] for name in ("words", "matches", "substitutions", "gaps", "first_divergence")} == {
        "words": 7, "matches": 6, "substitutions": 1, "gaps": 1, "first_divergence": 2}
    assert (parts.parts["share_a"], parts.parts["share_b"], parts.parts["balance"]) == (0.75, 0.75, 1.0)


@pytest.mark.parametrize("reward, pay", [
    ("similarity", 0.75),
    ("balanced", 0.75),  # 0.75 * (0.75 / 0.75)
    ("clipped", 0.5),  # 4 / 8
    ("prefix", 0.25),  # two words are right before the first divergence, of 8
    # 6 matches, one substitution, one gap of one word: S' = 6 - 1 - 2 = 3; F = (2 + 6 * 0.25) + (2 + 7 * 0.25) = 7.25
    ("affine", (3 + 7.25) / (8 + 7.25)),
])
def test_rewards_by_hand(reward, pay):
    assert score("a1 b1 b2 a3 x a4 b4", reward).reward == pytest.approx(pay)


def test_nothing_written():
    for reward in Interleave.rewards:
        empty = score("  ", reward)
        assert empty.reward == 0 and empty.parts["trap"] == "empty" and empty.parts["first_divergence"] == 0


@pytest.mark.parametrize("trap", strategies(A, B))
def test_every_trap_is_named(trap):
    a, b = [f"a{i}" for i in range(20)], [f"b{i}" for i in range(20)]
    assert score(" ".join(strategies(a, b)[trap]), a=a, b=b).parts["trap"] == trap


@given(WORDS, st.lists(st.sampled_from(["a1", "a2", "b1", "b2", "the"]), min_size=1, max_size=6),
       st.lists(st.sampled_from(["a1", "b1", "the", "y"]), min_size=1, max_size=6), st.sampled_from(Interleave.rewards))
def test_rewards_are_shares_and_one_only_when_exact(words, a, b, reward):
    got = score(" ".join(words), reward, a, b)
    assert 0 <= got.reward <= 1 and 0 <= got.value <= 1
    assert (got.reward == 1) == (got.value == 1) == got.exact == (words == interleaved(a, b))


def test_a_corpus_that_is_too_short():
    task = Interleave(documents=[Document(str(i), " ".join(f"w{i}.{j}" for j in range(50 + i))) for i in range(40)])
    with pytest.raises(UserError, match=r"--words 5000: the train split of the corpus has 0 documents of 5000 words or more, "
                                        r"and two are needed; at most --words \d+ can be made"):
        task.make(5000, "train", random.Random(0))


@pytest.mark.parametrize("level", [10, 25, 50, 100])
def test_no_strategy_that_ignores_a_text_is_paid(level):
    pay = table([level], samples=5)
    for name in IGNORE_A_TEXT:
        assert pay[name, level, Interleave.rewards[0]] <= 0.1
    assert all(pay["right", level, reward] == 1 for reward in Interleave.rewards)
    assert pay["copies A", level, "similarity"] == pytest.approx(0.5, abs=0.05)  # the trap of the original experiment


@given(st.lists(st.text("abcdefgh", min_size=1, max_size=3), min_size=10, max_size=30), st.data())
def test_under_the_default_reward_one_text_never_pays(a, data):
    b = data.draw(st.lists(st.text("stuvwxyz", min_size=1, max_size=3), min_size=len(a), max_size=len(a)))
    written = all_strategies(a, b)
    task = Interleave()
    scores = task.score(task.problem(a, b), [" ".join(written[name]) for name in IGNORE_A_TEXT])
    assert max(score.reward for score in scores) <= 0.1


def test_the_trap_table_prints_every_strategy(capsys):
    main(["--levels", "10", "--samples", "1"])
    printed = capsys.readouterr().out
    assert all(f"| {name} |" in printed for name in all_strategies(A, B)) and "| 10 words |" in printed
