"""The sentences of `grpo.inspect why`, which have the numbers of the update."""

import re
from contextlib import redirect_stdout
from decimal import Decimal
from io import StringIO

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from grpo import inspect
from grpo.config import SCALES
from grpo.learn.advantages import advantages
from grpo.records import Completion, Group
from grpo.run.logs import file_of, write_rollouts
from grpo.tasks.base import Problem, Score

REWARDS = [[1.0, 0.25, 0.5, 0.25], [0.0, 0.5, 0.5, 0.0]]


def group(rewards, of_each, number=0, finish="stop"):
    """Return a group whose completion i has i + 1 tokens."""
    return Group(
        number,
        Problem("t", 4, "p", "a b c d", f"k{number}"),
        (1,),
        1.0,
        [Completion((7,) * (i + 1), (-0.5,) * (i + 1), "a", finish) for i in range(len(rewards))],
        scores=[Score(reward) for reward in rewards],
        advantages=of_each,
        class_name="varied" if of_each else "solved",
        action="keep" if of_each else "skip",
    )


def write(folder, **settings):
    """Write a run of one step: two groups that were trained on, and one that was skipped."""
    (folder / "rollouts").mkdir(parents=True)
    lines = {"task": "own.py:Own", "loss": "dapo", "scale": "group"} | settings
    (folder / "config.yaml").write_text("".join(f"{k}: {v}\n" for k, v in lines.items()))
    made = advantages(REWARDS, scale=lines["scale"])
    groups = [group(rewards, each, i) for i, (rewards, each) in enumerate(zip(REWARDS, made))]
    groups.append(group([1.0, 1.0], [], 2))
    write_rollouts(file_of(folder, "step", 1), groups, step=1)
    write_rollouts(file_of(folder, "eval", 1), groups[2:], step=1)
    return folder


def why(run, step, number, sample, kind="step"):
    """Return the sentences on a completion of a stored step."""
    arguments = [str(run), "why", *map(str, (step, number, sample)), "--kind", kind]
    with redirect_stdout(StringIO()) as said:
        assert inspect.main(arguments) == 0
    return dict(line.split(maxsplit=1) for line in said.getvalue().splitlines())


@pytest.mark.parametrize(
    "scale, words",
    [
        # (1 - 0.5) / (0.35355 + 0.0001), by hand
        ("group", "+1.414 = (1.000 - 0.500) / 0.3537: the reward less the mean of the group's 4"),
        ("none", "+0.500 = (1.000 - 0.500): the reward less the mean of the group's 4 rewards"),
        # of all eight rewards: mean 0.375, standard deviation 0.3273
        ("batch", "+1.527 = (1.000 - 0.500) / 0.3274: "),
    ],
)
def test_an_advantage_in_words(tmp_path, scale, words):
    run = write(tmp_path / "r", scale=scale)
    assert why(run, 1, 0, 0)["advantage"].startswith(words)


@given(
    st.lists(st.floats(0, 1e-3) | st.floats(-2, 2), min_size=2, max_size=6).filter(
        lambda rewards: len(set(rewards)) > 1
    ),
    st.sampled_from(SCALES),
)
@example([0.1, 0.1, 0.0955, 0.0955], "group")
@example([0.1, 0.1, 0.0955, 0.0955], "none")
@example([0.0] * 3 + [0.0009999999999999998] * 3, "none")
def test_an_advantage_comes_out_again_from_the_numbers_that_are_printed(rewards, scale):
    """In nearly tied groups three digits are not enough: 0.002 / 0.0046 is not 0.489."""
    one = group(rewards, advantages([rewards], scale=scale)[0])
    for sample in range(len(rewards)):
        words = inspect.advantage_in_words({"scale": scale}, [one], one, sample)
        said, reward, mean, over = re.match(
            r"(\S+) = \((\S+) - (\S+)\)(?: / (\S+))?:", words
        ).groups(default="1")
        again = (Decimal(reward) - Decimal(mean)) / Decimal(over)
        assert abs(again - Decimal(said)) < Decimal("0.0005001"), words


def test_what_was_trained_on_and_what_was_not(tmp_path):
    run = write(tmp_path / "r")
    assert why(run, 1, 0, 1)["training"] == (
        "yes, on its 2 tokens; its advantage is negative, so the update lowers its probability"
    )
    skipped = why(run, 1, 2, 0)
    assert skipped["advantage"].startswith("none: the group was skipped (solved: all right)")
    assert skipped["training"] == "no: the group taught nothing"
    assert "not sampled for training" in why(run, 1, 0, 0, "eval")["training"]


def test_the_reward_of_a_control_experiment_was_not_earned(tmp_path):
    run = write(tmp_path / "r", control="shuffled-rewards")
    assert "not earned" in why(run, 1, 0, 0)["reward"]
    earned = write(tmp_path / "earned")
    assert why(earned, 1, 0, 0)["reward"] == "1.000, as the task scored it"


def test_why_as_text(tmp_path, capsys):
    run = write(tmp_path / "r")
    assert inspect.main([str(run), "why", "1", "0", "2"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("reward     0.500, as the task scored it\nadvantage  +0.000 = ")
    assert "its advantage is 0, so it taught nothing" in text
    assert inspect.main([str(run), "why", "1", "0", "9"]) == 2
    assert "no completion 9" in capsys.readouterr().err
