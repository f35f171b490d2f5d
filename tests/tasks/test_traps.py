import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.interleave import Interleave
from tasks.traps import all_strategies, main, table

LEVELS = (10, 25, 50, 100)
IGNORE_A_TEXT = ("empty", "copies A", "copies B", "doubles A", "doubles B", "garbage")


@pytest.fixture(scope="module")
def pay():
    return table(LEVELS, samples=8)


@st.composite
def texts(draw):
    """Two texts of 10 to 100 words each, without a word in common (else what is written of one is
    right for both).
    """
    n = draw(st.sampled_from(LEVELS))
    return [
        draw(st.lists(st.text(letters, min_size=1, max_size=3), min_size=n, max_size=n))
        for letters in ("abcdefgh", "stuvwxyz")
    ]


def test_strategies_by_hand():
    written = all_strategies("a b c d e f".split(), "1 2 3 4 5 6".split())
    assert {name: " ".join(words) for name, words in written.items()} == {
        "right": "a 1 b 2 c 3 d 4 e 5 f 6",
        "empty": "",
        "copies A": "a b c d e f",
        "copies B": "1 2 3 4 5 6",
        "doubles A": "a a b b c c d d e e f f",
        "doubles B": "1 1 2 2 3 3 4 4 5 5 6 6",
        "A then B": "a b c d e f 1 2 3 4 5 6",
        "B then A": "1 2 3 4 5 6 a b c d e f",
        "B first": "1 a 2 b 3 c 4 d 5 e 6 f",
        "runs on in A": "a 1 b 2 c 3 d e f",
        "runs on in B": "a 1 b 2 c 3 4 5 6",
        "stops half way": "a 1 b 2 c 3",
        "turn lost at a third": "a 1 b 2 3 c 4 d 5 e 6 f",
        "one word skipped": "a 1 b 2 3 d 4 e 5 f 6",
        "stutter": "a 1 b 2 c c 3 d 4 e 5 f 6",
        "target twice": "a 1 b 2 c 3 d 4 e 5 f 6 a 1 b 2 c 3 d 4 e 5 f 6",
        "garbage": "a~ 1~ b~ 2~ c~ 3~ d~ 4~ e~ 5~ f~ 6~",
    }


@pytest.mark.parametrize("level", LEVELS)
def test_on_the_corpus_who_ignores_a_text_earns_next_to_nothing(pay, level):
    earned = {name: pay[name, level, Interleave.rewards[0]] for name in IGNORE_A_TEXT}
    assert max(earned.values()) <= 0.1, earned


@pytest.mark.parametrize(("level", "share"), [(1, 0.5), (2, 0.25), (3, 0.17), (5, 0.1)])
def test_at_few_words_the_first_one_is_much(level, share):
    earned = table([level], samples=50)
    found = [earned[name, level, Interleave.rewards[0]] for name in IGNORE_A_TEXT]
    assert earned["copies A", level, Interleave.rewards[0]] == pytest.approx(share, abs=0.02)
    assert max(found) == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize("level", LEVELS)
def test_similarity_pays_half_for_one_text(pay, level):
    # at most 2n words, n of them right and n missing: (0 + 2n) / 4n, and a little more where texts
    # share words
    assert 0.5 <= pay["copies A", level, "similarity"] <= 0.55


def test_the_right_answer_earns_all_and_nobody_else_does(pay):
    for (name, _, _), earned in pay.items():
        assert earned == 1 if name == "right" else earned < 1


@given(texts())
def test_under_the_default_reward_one_text_never_pays(pair):
    task = Interleave()
    written = all_strategies(*pair)
    scores = task.score(task.problem(*pair), [" ".join(written[name]) for name in IGNORE_A_TEXT])
    assert max(score.reward for score in scores) <= 0.1


def test_the_command_prints_every_strategy_at_every_level(capsys):
    assert main(["--levels", "10,12", "--samples", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = ["10 words", *all_strategies([], []), "12 words", *all_strategies([], [])]
    assert [line.split(" | ")[0] for line in lines if line.startswith("| ")] == [
        f"| {name}" for name in names
    ]
    assert "| right | 1.00 | 1.00 | 1.00 |" in lines


def test_the_command_refuses_what_cannot_be_made(capsys):
    assert main(["--levels", "5000"]) == 2
    assert capsys.readouterr().err.startswith(
        "tasks.traps: --words 5000: the validation split of the corpus has 0 documents"
    )
    assert main(["--levels", "ten"]) == 2
    assert "--levels ten: give whole numbers above 0" in capsys.readouterr().err
