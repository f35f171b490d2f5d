"""Where the problems of a run come from: data sets, fixed supplies, a user's task."""

import json
from pathlib import Path

import pytest
import yaml
from small_runs import FEW, OWN
from small_train import TOP, fails, make_set, run

from grpo.ending import UNFINISHED
from grpo.run.logs import groups_of, read_metrics
from grpo.tasks.registry import load_task
from grpo.tasks.supply import problem_at, write_problems
from grpo.tools import evaluation, train


def test_a_dataset_says_which_levels_there_are(tmp_path, tiny_flags):
    make_set(tmp_path / "set.jsonl", 4, 12)
    arguments = ["--prompts", "3", "--group-size", "2", "--device", "cpu"]
    arguments += ["--preflight", "off", "--reward-alone"]
    arguments += ["--config", "{eval_problems: 2, dynamic_sampling: 0}"]
    start = ["--name", "a", "--dataset", "set.jsonl", *arguments, *tiny_flags]
    # The tiny model is never right, so no step has a signal.
    assert train.main([*start, "--steps", "1", "--eval-every", "0"]) == UNFINISHED
    resumed = train.main(["--resume", "runs/a", "--steps", "2"])  # by what was resolved then
    assert resumed == UNFINISHED

    problems = [
        group.problem
        for step in (1, 2)
        for group in groups_of(Path(f"runs/a/rollouts/step-00000{step}.jsonl.zst"))
    ]
    assert {problem.level for problem in problems} == {4, 12}  # as they come
    assert len({problem.key for problem in problems}) == 6
    assert {line["level"] for line in read_metrics(Path("runs/a/eval.jsonl"))} >= {12}
    assert yaml.safe_load(Path("runs/a/config.yaml").read_text())["level"] == 12


def test_a_task_that_draws_otherwise_than_by_its_generator_is_refused(capsys, tiny_flags):
    """A resumed run would have other problems, and the held-out ones would change."""
    Path("own.py").write_text("import random\n" + OWN.replace("rng.randrange", "random.randrange"))
    flags = ["--task", "own.py:Own", "--name", "a", "--max-new-tokens", "8", *FEW, *tiny_flags]
    assert fails(capsys, *flags) == (
        "train.py: task own: make(1, 'train', rng) returned two problems for the same random "
        "numbers; draw everything with rng"
    )
    assert not Path("runs").exists()


@pytest.mark.slow
def test_eval_drops_what_was_trained_on(tmp_path, capsys, tiny_flags):
    """The run trains on the very problems that are evaluated: none is left; on other
    ones all are.
    """
    task = load_task("interleave")
    write_problems(
        tmp_path / "set.jsonl",
        [problem_at(task, seed=3, split="test", level=6, index=i) for i in range(4)],
    )
    trained = [*tiny_flags, "--dataset", "set.jsonl"]
    # Two prompts a step: two of the four problems.
    run("--name", "a", "--steps", "1", *trained)
    arguments = ["--model", "runs/a", "--words", "6", "--json", "out.json", "--problems", "4"]
    assert evaluation.main([*arguments, "--seed", "3"]) == 0
    (line,) = json.loads(Path("out.json").read_text())
    # The next ones of the stream stand in.
    assert (line["dropped"], line["n"], line["split"], line["level"]) == (2, 4, "test", 6)
    run("--name", "b", "--steps", "2", *trained)  # all four problems
    arguments[1] = "runs/b"
    assert fails(capsys, *arguments, "--dataset", "set.jsonl", main=evaluation.main) == (
        "eval.py: set.jsonl, level 6: no problem is left: all 4 that were found were trained on"
    )


def test_a_users_task_trains(tmp_path):
    example = TOP / "tests" / "examples" / "every_second.py"
    flags = [f"--task={example}:EverySecond", *FEW, "--steps=1", "--config={eval_problems: 2}"]
    assert train.main(flags) == 0
    assert (tmp_path / "runs" / "everysecond-seed0" / "metrics.jsonl").exists()
