"""What cheap strategies earn, and how they are named, through slips."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from grpo.tasks.interleave import Interleave, interleaved
from grpo.tasks.supply import problem_at

PAID = (10, 25, 50, 100)
IGNORE_A_TEXT = (
    *("empty", "copies A", "copies B", "doubles A", "doubles B", "ignores A", "ignores B"),
    "garbage",
)


def all_strategies(a: Sequence[str], b: Sequence[str]) -> dict[str, list[str]]:
    """Return what each strategy writes: the right answer, the traps, and small mistakes."""
    right = interleaved(a, b)
    third = 2 * (len(a) // 3)
    return {
        "right": right,
        "empty": [],
        "copies A": list(a),
        "copies B": list(b),
        "doubles A": [word for word in a for _ in range(2)],
        "doubles B": [word for word in b for _ in range(2)],
        "ignores A": [word for each in b for word in ("~", each)],
        "ignores B": [word for each in a for word in (each, "~")],
        "A then B": [*a, *b],
        "B then A": [*b, *a],
        "B first": interleaved(b, a),
        "runs on in A": [*right[: len(right) // 2], *a[len(right) // 4 :]],
        "runs on in B": [*right[: len(right) // 2], *b[len(right) // 4 :]],
        "stops half way": right[: len(right) // 2],
        "turn lost at a third": right[:third] + interleaved(b[third // 2 :], a[third // 2 :]),
        "one word skipped": right[:third] + right[third + 1 :],
        "stutter": right[:third] + right[third : third + 1] + right[third:],
        "target twice": right + right,
        "garbage": [f"{word}~" for word in right],
    }


@pytest.fixture(scope="module")
def pay():
    return table(PAID, samples=8)


def table(levels, samples):
    """Return the mean reward of each (strategy, level, name of the reward)."""
    earned = {}
    for level in levels:
        for reward in Interleave.rewards:
            task = Interleave(reward)
            for index in range(samples):
                problem = problem_at(task, seed=0, split="validation", level=level, index=index)
                written = all_strategies(problem.data["a"], problem.data["b"])
                written["A and the"] = [
                    word for each in problem.data["a"] for word in (each, "the")
                ]
                texts = [" ".join(words) for words in written.values()]
                for name, score in zip(written, task.score(problem, texts)):
                    earned.setdefault((name, level, reward), []).append(score.reward)
    return {key: sum(values) / samples for key, values in earned.items()}


@st.composite
def texts(draw):
    """Two texts of 10 to 100 words each, without a word in common (else what is written of one is
    right for both).
    """
    n = draw(st.sampled_from(PAID))
    return [
        draw(st.lists(st.text(letters, min_size=1, max_size=3), min_size=n, max_size=n))
        for letters in ("abcdefgh", "stuvwxyz")
    ]


@pytest.mark.parametrize("level", PAID)
def test_on_the_corpus_who_ignores_a_text_earns_next_to_nothing(pay, level):
    names = (*IGNORE_A_TEXT, "A and the")
    earned = {name: pay[name, level, Interleave.rewards[0]] for name in names}
    assert max(earned.values()) <= 0.1, earned


@pytest.mark.parametrize("level", [1, 2, 3, 5])
def test_at_few_words_who_ignores_a_text_earns_next_to_nothing_too(level):
    earned = table([level], samples=50)
    assert max(earned[name, level, Interleave.rewards[0]] for name in IGNORE_A_TEXT) <= 0.03
    assert 0.02 <= earned["A and the", level, Interleave.rewards[0]] <= 0.08
    assert earned["copies A", level, "prefix"] == pytest.approx(1 / 2 / level, abs=0.02)


@pytest.mark.parametrize("level", PAID)
def test_similarity_pays_half_for_one_text(pay, level):
    # at most 2n words, n of them right and n missing: (0 + 2n) / 4n, and a little more where texts
    # share words
    assert 0.5 <= pay["copies A", level, "similarity"] <= 0.55


def test_the_right_answer_earns_all_and_nobody_else_does(pay):
    for (name, _, _), earned in pay.items():
        assert earned == 1 if name == "right" else earned < 1


@given(texts())
def test_under_the_default_reward_one_text_never_pays(pair):
    written = all_strategies(*pair)
    scores = TASK.score(TASK.problem(*pair), [" ".join(written[name]) for name in IGNORE_A_TEXT])
    assert max(score.reward for score in scores) <= 0.1


TASK = Interleave()
NAMES = {
    "right": None,
    "garbage": None,
    "one word skipped": None,
    "stutter": None,
    "target twice": "runs on",
    "turn lost at a third": "turn lost",
}
STRATEGIES = {
    name: NAMES.get(name, name) for name in all_strategies([], [])
}  # -> the name it should get
LEVELS = (10, 12, 15, 20, 25, 50, 100, 200)


def named(problem, words):
    return TASK.score(problem, [" ".join(words)])[0].parts["trap"]


def problem_of(level, index=0):
    return problem_at(TASK, seed=7, split="train", level=level, index=index)


def slipped(words, rng, share=0.05):
    """Drop, double or replace `share` of the words, one at least."""
    words = list(words)
    for _ in range(max(1, round(share * len(words))) if words else 0):
        place = rng.randrange(len(words))
        words[place : place + 1] = rng.choice(
            [[], words[place : place + 1] * 2, [rng.choice([*words, "zzz"])]]
        )
    return words


@pytest.mark.parametrize("level", LEVELS)
def test_every_strategy_is_named_as_it_is(level):
    for index in range(5):
        problem = problem_of(level, index)
        got = {
            name: named(problem, words)
            for name, words in all_strategies(problem.data["a"], problem.data["b"]).items()
        }
        assert got == STRATEGIES


@given(
    st.sampled_from(sorted(STRATEGIES)),
    st.sampled_from([level for level in LEVELS if level >= 20]),
    st.integers(0, 20),
    st.randoms(),
)
def test_every_strategy_is_named_through_slips(name, level, index, rng):
    problem = problem_of(level, index)
    words = slipped(all_strategies(problem.data["a"], problem.data["b"])[name], rng)
    assert named(problem, words) == STRATEGIES[name]


@given(st.sampled_from(LEVELS), st.integers(0, 20), st.randoms(), st.floats(0, 0.1))
def test_the_right_answer_with_slips_is_never_named(level, index, rng, share):
    problem = problem_of(level, index)
    assert named(problem, slipped(problem.target.split(), rng, share)) is None


@given(st.sampled_from(sorted(STRATEGIES)), st.sampled_from(LEVELS), st.randoms(), st.floats(0, 1))
def test_nothing_nearly_right_is_named(name, level, rng, share):
    problem = problem_of(level)
    (score,) = TASK.score(
        problem,
        [" ".join(slipped(all_strategies(problem.data["a"], problem.data["b"])[name], rng, share))],
    )
    assert score.value <= 0.9 or score.parts["trap"] is None


@st.composite
def untidy(draw):
    """What policies do: (problem, words, the name of it)."""
    problem = problem_of(draw(st.sampled_from([20, 25, 50, 100])), draw(st.integers(0, 20)))
    a, b = problem.data["a"], problem.data["b"]
    right, level, rng = interleaved(a, b), len(a), random.Random(draw(st.integers(0, 99)))
    at = draw(st.integers(level // 4, 2 * level // 3))
    lead, twice = draw(st.sampled_from([2, 3])), rng.sample(range(level), level // 3)
    return problem, *draw(
        st.sampled_from(
            [
                ([word for i, word in enumerate(a) for _ in range(1 + (i in twice))], "copies A"),
                (a[:at], "copies A"),
                (b[:at], "copies B"),
                (a + a[:at], "copies A"),
                ([word for word in b[:at] for _ in range(2)], "doubles B"),
                (a + b[:at], "A then B"),
                (b + a[:at], "B then A"),
                (interleaved(b, a)[: 2 * at], "B first"),
                (right[: 2 * at], "stops half way"),
                (right[: 2 * at - 1], "stops half way"),
                (right[: 2 * at] + a[at:], "runs on in A"),
                (right[: 2 * at] + b[at:], "runs on in B"),
                (right[: 2 * at] + interleaved(b[at:], a[at:]), "turn lost"),
                (
                    right[: 2 * at] + a[at : at + lead] + interleaved(b[at:], a[at + lead :]),
                    "turn lost",
                ),
                (right + right[: 2 * at], "runs on"),
                (right + a[:at], "runs on"),
                (right + ["zzz"] * at, "runs on"),
                (right[: level // 2] + right[-level // 2 :], None),  # the middle is missing
                ([word for word in right for _ in range(2)], None),
                (rng.sample(right, len(right)), None),
            ]
        )
    )


@given(untidy())
@example((problem_of(25), problem_of(25).target.split()[:1], "stops half way"))
@example((problem_of(25), problem_of(25).data["b"][:1], None))  # one word is no strategy
def test_untidy_traps_are_named_too(attempt):
    problem, words, name = attempt
    assert named(problem, words) == name


def test_texts_of_different_lengths():
    a, b = [f"a{i}" for i in range(30)], [f"b{i}" for i in range(12)]
    problem = TASK.problem(a, b)  # a right answer ends with 18 words of A
    assert named(problem, interleaved(a, b)) is None
    assert named(problem, interleaved(a, b)[:28]) == "stops half way"
    assert named(problem, a) == "copies A" and named(problem, b + a) == "B then A"


def test_one_text_between_other_words_ignores_the_other_one():
    a, b = [f"a{i}" for i in range(10)], [f"b{i}" for i in range(10)]
    problem = TASK.problem(a, b)
    noted = [word for each in a for word in (each, "~")]
    assert named(problem, noted[:8]) == "ignores B"  # four of ten words
    assert named(problem, noted[:6]) is None
    assert named(problem, noted[:17] + ["b8"] + noted[18:]) == "ignores B"  # one by chance
    assert named(problem, noted[:15] + ["b7", "a8", "b8"]) is None

    # In a window, the words of the target are those behind `begun`.
    part = TASK.window(problem, 11, start=5)  # b2 a3 b3 ... b7
    assert named(part, ["~", "a3", "~", "a4", "~", "a5", "~", "a6", "~", "a7"]) == "ignores B"
    assert named(part, ["b2", "~", "b3", "~", "b4", "~", "b5", "~"]) == "ignores A"

    # Where the longer text runs on alone, the other one has no words, or a few.
    for start in (3, 4):  # from b1 or a2 on
        tail = TASK.window(TASK.problem(a, b[:2]), 6, start)
        assert named(tail, ["~", "a2", "~", "a3", "~", "a4", "~"]) is None


def test_two_steps_along_the_other_text_are_a_slip_three_are_a_change():
    a, b = [f"a{i}" for i in range(10)], [f"b{i}" for i in range(10)]
    problem = TASK.problem(a, b)
    # 7 steps along A, one that is none, and along B 2 of 10 or 3 of 11; fewer than three are no
    # other strategy
    assert named(problem, a[:8] + b[4:7]) == "copies A"
    assert named(problem, a[:8] + b[4:8]) == "A then B"
