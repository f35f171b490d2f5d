"""The library: `grpo.train`, `grpo.load_model`, and the same by the command line."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grpo import Model, load_model, load_run, make_trainer, train
from grpo.model.save import save_model
from grpo.tools import inspect
from grpo.tools.evaluation import program as evaluation
from grpo.tools.train import main
from tasks import audit
from tasks.base import UserError

WORDS = "owl tide salt moss bell rope loom kiln".split()
ROWS = [{"prompt": f"Copy text A.\nA: {a} {b}", "answer": f"{a} {b}"} for a in WORDS for b in WORDS]
QUICK = dict(
    steps=2,
    prompts=2,
    group_size=4,
    max_new_tokens=8,
    preflight="off",
    eval_problems=4,
    warmup=0,
)
FLAGS = (
    "--prompts 2 --group-size 4 --max-new-tokens 8 --preflight off --eval-problems 4 --config"
).split() + ["{warmup: 0}"]

SMALL_TASK = ["--task", "interleave", "--words", "3", "--max-new-tokens", "64"]

OWN = """
def reward(prompt, completion, answer, **row):
    wrote = completion.split()
    return {"first": float(wrote[:1] == answer.split()[:1]), "all": 0.2 * (wrote == answer.split())}
"""


def reward(prompt, completion, answer, **row):
    wrote = completion.split()
    return {"first": float(wrote[:1] == answer.split()[:1]), "all": 0.2 * (wrote == answer.split())}


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    Path("own.py").write_text(OWN)
    return tmp_path


def alike(one, other):
    """Assert that two runs have the same rollouts, rewards and metrics, times apart."""
    for a, b in zip(one.metrics, other.metrics, strict=True):
        assert {k: v for k, v in a.items() if not _is_time(k)} == {
            k: v for k, v in b.items() if not _is_time(k)
        }
    assert one.rollouts() == other.rollouts()


def _is_time(name):
    return name.startswith("time") or name in ("step_time", "tokens_per_second")


def test_ten_lines_train_and_return_the_run(home):
    run = train(ROWS, reward, reward_range=(0, 1.2), name="a", **QUICK)
    assert len(run.metrics) == 2
    for line in run.metrics:
        assert line["reward"] == pytest.approx(line["reward/first"] + line["reward/all"])
        assert 0 < line["reward/first"] <= 1
    assert run.verdict["verdict"] and run.status in (0, 3)
    assert [line["step"] for line in run.reports] == [0, 2]
    assert run.report() == Path("runs/a/report.html") and Path("runs/a/report.html").stat().st_size
    assert load_run("runs/a").rollouts(1)[0]["parts"].keys() <= {"reward/first", "reward/all"}

    texts = run.policy.generate(["Copy text A.\nA: owl tide"] * 3, max_new_tokens=8, seed=1)
    again = load_model("runs/a").generate(
        ["Copy text A.\nA: owl tide"] * 3, max_new_tokens=8, seed=1
    )
    assert texts == again and len(set(texts)) >= 1
    greedy = run.policy.generate(["Copy text A.\nA: owl tide"] * 2, temperature=0)
    assert greedy[0] == greedy[1]


def test_epochs_go_through_the_training_split(home):
    run = train(
        ROWS, reward, reward_range=(0, 1.2), name="a", **QUICK | {"steps": 30, "prompts": 3}
    )
    keys = [row["key"] for row in run.rollouts() if row["sample"] == 0]
    size = len(set(keys))
    first = keys[:size]
    assert len(set(first)) == size > 40  # each once before any comes again
    held_out = {row["key"] for row in run.rollouts(kind="eval")}
    assert held_out and not held_out & set(keys)


def test_the_command_line_and_the_library_make_the_same_run(home):
    command = ["--data", "rows.jsonl", "--reward-file", "own.py:reward", "--reward-range", "0,1.2"]
    assert main([*command, *FLAGS, "--steps", "2", "--name", "cli"]) in (0, 3)
    from_file = train("rows.jsonl", "own.py:reward", reward_range=(0, 1.2), name="file", **QUICK)
    alike(load_run("runs/cli"), from_file)
    in_memory = train(ROWS, reward, reward_range=(0, 1.2), name="memory", **QUICK)
    for one, other in zip(in_memory.rollouts(), from_file.rollouts(), strict=True):
        assert one["text"] == other["text"] and one["reward"] == other["reward"]


def test_rewards_in_processes_make_the_same_run(home, capsys):
    command = ["--data", "rows.jsonl", "--reward-file", "own.py:reward", "--reward-range", "0,1.2"]
    for name, workers in (("threads", "4"), ("processes", "processes:2")):
        flags = [*FLAGS, "--reward-workers", workers, "--steps", "2", "--name", name]
        assert main([*command, *flags]) in (0, 3)
    alike(load_run("runs/threads"), load_run("runs/processes"))
    with pytest.raises(UserError, match="--reward-workers processes:2: a process loads the reward"):
        train(ROWS, reward, reward_workers="processes:2", **QUICK)
    for wrong in ("0", "x", "processes:", "processes:0", "threads:3", "1.5"):
        with pytest.raises(UserError, match=f"--reward-workers {wrong}: give a number of threads"):
            train("rows.jsonl", "own.py:reward", reward_workers=wrong, **QUICK)


def test_slow_rewards_say_how_far_they_are(home, monkeypatch, capsys):
    monkeypatch.setattr("tasks.reward_calls.LOOK", 0.05)
    monkeypatch.setattr("grpo.show.console.FIRST", 0.1)

    def slow(completion):
        time.sleep(0.1)
        return len(completion) % 2

    train(ROWS, slow, reward_workers=2, name="a", **QUICK)
    assert re.search(r"scoring [1-7]/8, 0 s", capsys.readouterr().out)


def test_a_reward_process_that_dies_ends_the_run_with_one_line(home, capsys):
    Path("dies.py").write_text("import os\ndef reward(completion):\n    os.abort()\n")
    flags = [*FLAGS, "--reward-workers", "processes:2", "--steps", "2", "--name", "a"]
    assert main(["--data", "rows.jsonl", "--reward-file", "dies.py:reward", *flags]) == 2
    line = one_line(capsys)
    assert "completion 1 ended its process (killed by SIGABRT)" in line and "reward reward" in line


def test_a_run_is_resumed_to_the_same_weights(home):
    options = dict(reward_range=(0, 1.2), **QUICK | {"steps": 4})
    whole = train(ROWS, reward, name="whole", **options)
    train(ROWS, reward, name="cut", **options | {"steps": 2})
    resumed = train(ROWS, reward, reward_range=(0, 1.2), resume="runs/cut", steps=4)
    assert resumed.path == Path("runs/cut")
    alike(whole, resumed)

    with pytest.raises(UserError, match="changed since it was saved"):
        train(ROWS[1:], reward, reward_range=(0, 1.2), resume="runs/cut", steps=5)


def test_the_reward_file_of_a_run_is_not_executed_unless_it_is_named(home, capsys):
    command = ["--data", "rows.jsonl", "--reward-file", "own.py:reward", "--reward-range", "0,1.2"]
    assert main([*command, *FLAGS, "--steps", "1", "--name", "a"]) in (0, 3)
    Path("own.py").write_text("raise SystemExit('executed')")
    capsys.readouterr()
    for program, arguments in (
        (main, ["--resume", "runs/a"]),
        (evaluation.main, ["--model", "runs/a"]),
        (audit.main, ["runs/a"]),
        (inspect.main, ["runs/a", "replay", "1"]),
    ):
        assert program(arguments) == 2
        error = capsys.readouterr().err
        assert "if you trust it, give --reward-file own.py:reward" in error, error
        assert error.count("\n") == 1

    Path("own.py").write_text(OWN)
    named = ["--reward-file", "own.py:reward"]
    assert evaluation.main(["--model", "runs/a", *named, "--problems", "2"]) == 0
    assert audit.main(["runs/a", *named]) == 0
    assert inspect.main(["runs/a", "replay", "1", *named]) == 0
    assert main(["--resume", "runs/a", *named, "--steps", "2"]) in (0, 3)

    Path("own.py").write_text(OWN + "# changed\n")
    capsys.readouterr()
    assert main(["--resume", "runs/a", *named, "--steps", "3"]) == 2
    assert "task: own.py" in capsys.readouterr().err


OWN_LOSS = """
def loss(inputs, settings):
    ratio_RT = (inputs.logp_RT - inputs.old_RT).exp()
    clipped_RT = ratio_RT.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    advantages_RT = inputs.advantages
    return -(ratio_RT * advantages_RT).minimum(clipped_RT * advantages_RT)
"""


def test_a_loss_of_ones_own_trains_and_its_file_is_executed_only_if_it_is_named(home, capsys):
    Path("mine.py").write_text(OWN_LOSS)
    small = [*FLAGS, *SMALL_TASK, "--config", "{clip_high: 0.28, epochs: 2}"]
    assert main([*small, "--steps", "2", "--name", "dapo"]) in (0, 3)
    own = ["--loss", "mine.py:loss"]
    assert main([*small, *own, "--steps", "2", "--name", "own"]) in (0, 3)
    one, other = load_run("runs/dapo"), load_run("runs/own")
    for a, b in zip(one.metrics, other.metrics, strict=True):
        assert a.get("loss") == b.get("loss") and a.get("grad_norm") == b.get("grad_norm")
    assert "loss" in one.metrics[1] and one.rollouts(2) == other.rollouts(2)  # DAPO, written again

    Path("mine.py").write_text("raise SystemExit('executed')")
    capsys.readouterr()
    for program, arguments in (
        (main, ["--resume", "runs/own"]),
        (inspect.main, ["runs/own", "replay", "1"]),
    ):
        assert program(arguments) == 2
        assert one_line(capsys).endswith("if you trust it, give --loss mine.py:loss as well\n")
    assert evaluation.main(["--model", "runs/own", "--problems", "2"]) == 0  # needs no loss

    capsys.readouterr()
    assert main(["--resume", "runs/own", *own, "--steps", "3"]) == 2
    assert "executed" in one_line(capsys)
    Path("mine.py").write_text(OWN_LOSS + "# changed\n")
    assert main(["--resume", "runs/own", *own, "--steps", "3"]) == 2
    assert "changed since it was saved: loss: mine.py" in one_line(capsys)
    Path("mine.py").write_text(OWN_LOSS)
    assert inspect.main(["runs/own", "replay", "2", *own]) == 0
    assert main(["--resume", "runs/own", *own, "--steps", "3"]) in (0, 3)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise ValueError('no')", "--loss mine.py:loss raised ValueError: no"),
        ("return inputs.logp_RT.mean()", "--loss mine.py:loss: its loss has the shape ()"),
        ("return inputs.logp_RT / 0", "--loss mine.py:loss: its loss is -inf at token 0 of row 0"),
    ],
)
def test_a_wrong_loss_is_one_line_and_loses_nothing(home, capsys, body, message):
    Path("mine.py").write_text(OWN_LOSS)
    small = [*FLAGS, *SMALL_TASK, "--loss", "mine.py:loss", "--name", "a"]
    assert main([*small, "--steps", "1"]) in (0, 3)
    Path("mine.py").write_text(f"def loss(inputs, settings):\n    {body}\n")
    resumed = ["--resume", "runs/a", "--loss", "mine.py:loss", "--accept-changes", "loss"]
    capsys.readouterr()
    assert main([*resumed, "--steps", "2"]) == 2
    assert message in one_line(capsys)
    assert len(load_run("runs/a").metrics) == 1
    Path("mine.py").write_text(OWN_LOSS)
    assert main([*resumed, "--steps", "2"]) in (0, 3)


def test_a_loss_may_be_a_function_in_python(home, capsys):
    def loss(inputs, settings):
        return -(inputs.logp_RT - inputs.old_RT).exp() * inputs.advantages

    options = dict(task="interleave", level=3, **QUICK | {"max_new_tokens": 64})
    run = train(**options, loss=loss, name="a")
    assert run.config["loss"] == "python:loss" and len(run.metrics) == 2
    assert len(train(resume="runs/a", loss=loss, steps=3).metrics) == 3
    capsys.readouterr()
    assert main(["--resume", "runs/a", "--steps", "4"]) == 2
    assert "give it again, as grpo.train(loss=FUNCTION)" in one_line(capsys)
    with pytest.raises(UserError, match="^--loss mse: give one of grpo, .* or path/to/file.py:"):
        train(**options, loss="mse")


def one_line(capsys):
    """Return the standard error of a program, which is one line."""
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    return error


def test_a_reward_that_fails_ends_the_run_with_one_line_and_loses_nothing(home):
    calls = []

    def fails(completion, answer, **row):
        calls.append(completion)
        if len(calls) > 40:
            raise ValueError("the judge is gone")
        return len(calls) % 2

    with pytest.raises(UserError) as caught:
        train(ROWS, fails, name="a", **QUICK | {"steps": 20, "save_every": 1})
    place, _, said = str(caught.value).partition(" raised ")
    assert re.fullmatch(r"reward fails, data \(list\), row \d+, completion \d", place)
    assert said.startswith("ValueError: the judge is gone")
    done = len(load_run("runs/a").metrics)
    assert done > 0
    resumed = train(
        ROWS, lambda completion, **row: 0.5, resume="runs/a", steps=done + 1, accept_changes="task"
    )
    assert len(resumed.metrics) == done + 1


def test_mistakes_are_one_line(home):
    for message, arguments in (
        ("data without a reward", dict(data=ROWS)),
        ("unknown key stepz; did you mean steps", dict(data=ROWS, reward=reward, stepz=3)),
        ("steps is 'x'", dict(data=ROWS, reward=reward, steps="x")),
        ("--task data: give your problems", dict(reward=reward)),
        ("no such task", dict(task="none")),
        ("reward of 1.2", dict(data=ROWS, reward=lambda completion: 1.2, **QUICK)),
    ):
        with pytest.raises(UserError, match=message) as caught:
            train(**arguments)
        assert "\n" not in str(caught.value)


def test_a_task_by_name_is_trained_as_on_the_command_line(home):
    run = train(task="interleave", level=3, name="a", **QUICK | {"max_new_tokens": 64})
    assert run.config["task"] == "interleave" and len(run.metrics) == 2


def same_steps(reports, metrics):
    """Assert that the steps of a loop are those of a run, times apart."""
    for report, line in zip(reports, metrics, strict=True):
        line = {name: value for name, value in line.items() if not _is_time(name)}
        assert {k: v for k, v in report.metrics.items() if not _is_time(k)} == line


def test_a_loop_by_hand_makes_the_steps_of_a_run_and_writes_nothing(home):
    trainer = make_trainer(ROWS, reward, reward_range=(0, 1.2), **QUICK)
    reports = [trainer.step() for _ in range(2)]
    assert sorted(path.name for path in home.iterdir()) == ["own.py", "rows.jsonl"]
    run = train(ROWS, reward, reward_range=(0, 1.2), name="a", **QUICK)
    same_steps(reports, run.metrics)

    prompts = ["Copy text A.\nA: owl tide"] * 2
    wrote = Model(trainer.policy).generate(prompts, max_new_tokens=8)
    assert wrote == run.policy.generate(prompts, max_new_tokens=8)
    save_model(trainer.policy.model, home / "saved")
    trainer.policy.tokenizer.save_pretrained(home / "saved")
    assert load_model("saved").generate(prompts, max_new_tokens=8) == wrote


def test_generating_between_steps_leaves_the_examples_of_the_prompt(home):
    options = dict(task="interleave", level=2, shots=1, **QUICK | {"max_new_tokens": 64})
    plain, looked_at = (make_trainer(**options) for _ in range(2))
    Model(looked_at.policy).generate(["Copy text A.\nA: owl tide"], max_new_tokens=2)
    assert plain.step().groups[0].prompt == looked_at.step().groups[0].prompt


def test_callbacks_are_called_after_each_step_and_add_metrics(home):
    seen = []

    def first(report):
        seen.append(("first", report.step, len(report.groups)))
        report.metrics["mine/longest"] = max(len(t) for g in report.groups for t in g.texts)

    class Second:
        def __call__(self, report):
            seen.append(("second", report.step, report.metrics["mine/longest"] > 0))

    run = train(ROWS, reward, reward_range=(0, 1.2), name="a", callbacks=[first, Second()], **QUICK)
    assert seen == [("first", 1, 2), ("second", 1, True), ("first", 2, 2), ("second", 2, True)]
    texts = {line["step"]: [] for line in run.metrics}
    for row in run.rollouts():
        texts[row["step"]].append(len(row["text"]))
    assert [line["mine/longest"] for line in run.metrics] == [max(texts[1]), max(texts[2])]


def test_a_callback_that_fails_is_one_line_and_loses_nothing(home):
    def fails(report):
        if report.step == 2:
            raise KeyError("gone")

    def adds(report):
        report.metrics["text"] = "no"

    options = dict(reward_range=(0, 1.2), **QUICK | {"save_every": 1})
    whole = train(ROWS, reward, name="whole", **options)
    for name, callback, message in (
        ("a", fails, "^callback fails, step 2 raised KeyError: 'gone'"),
        ("b", adds, "^callback adds: its metric text is 'no'; it must be a number"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            train(ROWS, reward, name=name, callbacks=[callback], **options)
        assert "\n" not in str(caught.value)
    alike(whole, train(ROWS, reward, reward_range=(0, 1.2), resume="runs/a"))
    with pytest.raises(UserError, match="resume is of runs"):
        make_trainer(ROWS, reward, resume="runs/a")


def example(name):
    """Run a file of examples/ and return what it printed."""
    path = Path(__file__).resolve().parent.parent / "examples" / name
    environment = {**os.environ, "PYTHONPATH": str(path.parents[1])}
    done = subprocess.run(
        [sys.executable, str(path)], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_example_of_a_loop_learns(home):
    *steps, asked, a, b, wanted, wrote = example("loop_by_hand.py").splitlines()
    assert re.match("asked .*", asked) and a.startswith("A: ") and b.startswith("B: ")
    assert len(steps) < 30 and float(steps[-1].split()[3]) > 0.95
    assert wrote.removeprefix("wrote ").split() == wanted.removeprefix("wanted ").split()
    assert not Path("runs").exists()


@pytest.mark.slow
def test_the_example_learns(home):
    """The ten lines of examples/first_three.py, on a task that the model was never taught."""
    assert "LEARNED" in example("first_three.py")
    (run,) = Path("runs").iterdir()
    first, last = load_run(run).reports[0], load_run(run).reports[-1]
    assert first["mean"] < 0.2 and last["mean"] > 0.95


def test_a_wording_is_read_from_its_file(home):
    Path("wording.txt").write_text("Weave these.\nOne: {a}\nTwo: {b}\n")
    more = QUICK | {"max_new_tokens": 64}
    run = train(task="interleave", level=3, name="a", wording="wording.txt", **more)
    assert run.rollouts(1)[0]["prompt"].startswith("Weave these.\nOne: ")
