"""The command that fits the verdict on a run: one test for each cause."""

from dataclasses import replace
from pathlib import Path

import pytest

from grpo.config import Config, make_parser
from grpo.ending import Verdict, solved_step
from grpo.next_command import NOTHING_EASIER, EndedRun, advice, next_commands
from grpo.tasks.arithmetic import Arithmetic
from grpo.tasks.interleave import Interleave

FOLDER = Path("runs/two words")
CONFIG = Config(task="interleave", level=25)
ENDED = EndedRun(FOLDER, CONFIG, Interleave(), 60, budget=99, levels=(10, 25), easier=(5, 10))
AGAIN = "python train.py --config 'runs/two words/config.yaml'"
RESUME = "python train.py --resume 'runs/two words' --steps 120"
LOOK = "python -m grpo.inspect 'runs/two words' step 60"
EVALUATE = "python eval.py --model 'runs/two words'"


def next_command(run, cause):
    return advice(run, cause)[1]


def verdict(kind, **changes):
    """Return a verdict on 60 steps of level 25 whose groups varied."""
    figures = dict(
        level=25,
        n=64,
        before=0.2,
        after=0.2,
        difference=0.0,
        low=-0.1,
        high=0.1,
        steps=60,
        updated=60,
        untaught=0.1,
        truncated=0.0,
    )
    return Verdict(kind, **(figures | changes))


@pytest.mark.parametrize(
    "cause, command",
    [
        (verdict("learned"), EVALUATE),
        (verdict("learned", solved_step=40), f"{AGAIN} --model 'runs/two words' --level 50"),
        (verdict("learned", level=10, solved_step=20), RESUME),
        (verdict("already solved"), f"{AGAIN} --model 'runs/two words' --level 50"),
        (verdict("too short to tell"), RESUME),
        (verdict("not learned", truncated=0.6, untaught=0.9), f"{AGAIN} --max-new-tokens 198"),
        (verdict("not learned", untaught=0.8), f"{AGAIN} --level 10"),
        (verdict("not learned", difference=0.02), RESUME),
        (verdict("not learned", difference=0.02, stopped="an alarm"), LOOK),
        (verdict("learned", level=10, stopped="an alarm"), LOOK),
        (verdict("not learned", difference=-0.02), LOOK),
        (verdict("not measured", difference=None), LOOK),
        # More of what taught nothing would teach nothing.
        (verdict("too short to tell", untaught=0.95), f"{AGAIN} --level 10"),
        (verdict("too short to tell", untaught=0.8), RESUME),
        (verdict("learned", level=10, untaught=0.95, degenerate="failed"), f"{AGAIN} --level 10"),
    ],
)
def test_the_command_fits_the_cause(cause, command):
    assert next_command(ENDED, cause) == command


TRAPPED = verdict("collapsed", trap="copies A")
SIMILARITY, PAIRS = (
    replace(ENDED, config=Config(task="interleave", level=25, reward=name, learning_rate=3e-4))
    for name in ("similarity", "pairs")
)
SLOWER = ("a third of the learning rate, --learning-rate 0.0001", "--learning-rate 0.0001")
OTHER_REWARD = ("the task's default reward, --reward pairs", "--reward pairs")
EASIER = ("easier problems first", "--level 10")


@pytest.mark.parametrize(
    "run, cause, words, flags",
    [
        (SIMILARITY, TRAPPED, *OTHER_REWARD),
        (PAIRS, TRAPPED, *SLOWER),
        (PAIRS, replace(TRAPPED, level=10), *SLOWER),
        (SIMILARITY, verdict("collapsed"), *SLOWER),
        (SIMILARITY, verdict("got worse", high=-0.1), *SLOWER),
        (SIMILARITY, verdict("got worse", high=0.1), *SLOWER),  # of few problems
        (PAIRS, verdict("no signal", degenerate="failed", truncated=0.9), *EASIER),
        (PAIRS, verdict("no signal", degenerate="identical"), *EASIER),
        (PAIRS, verdict("no signal", degenerate="tied"), *EASIER),
        (SIMILARITY, verdict("no signal", degenerate="tied"), *OTHER_REWARD),
        (
            PAIRS,
            verdict("no signal", degenerate="solved"),
            "a harder level",
            "--model 'runs/two words' --level 50",
        ),
    ],
)
def test_a_run_that_failed_has_one_remedy_in_words_and_as_a_command(run, cause, words, flags):
    assert advice(run, cause) == (f"try {words}", f"{AGAIN} {flags}")

    control = replace(run, config=replace(run.config, control="constant-reward"))
    assert advice(control, cause) == ("", f"{AGAIN} --control none")


def test_a_reward_that_pays_for_wrong_answers_is_to_be_looked_at():
    cheated = verdict("got worse", cause="exact answers fell from 1.000 to 0.500")
    assert advice(PAIRS, cheated) == ("try a reward that only exact answers earn in full", LOOK)


def test_a_run_at_a_fixed_level_climbs_to_it_next_time():
    run = replace(ENDED, levels=(25,))
    assert (
        next_command(run, verdict("not learned", untaught=0.8)) == f"{AGAIN} --curriculum 5,10,25"
    )


# Some answers earn less; the top is reached; nothing is earned at all.
@pytest.mark.parametrize("best, after", [(1.5, 0.75), (1.5, 0.7), (2.0, 1.0), (0.0, 0.0)])
def test_a_top_of_the_range_that_nothing_reaches_is_lowered(best, after):
    task = Interleave()
    task.reward_range = (0.0, 2.0)
    config = Config(task="data", level=25, task_options={"reward-file": "my.py:reward"})
    run = replace(PAIRS, config=config, task=task, best=best, easier=())
    said, command = advice(run, verdict("no signal", degenerate="identical", after=after))
    named = after == 0.75, command.endswith(" --reward-file my.py:reward --reward-range 0,1.5")
    assert named == (said == "try --reward-range 0,1.5, if right answers earn no more",) * 2


def test_a_run_that_has_ended_by_itself_is_looked_at():
    """More steps would not continue it: the same command would be given again and again."""
    run = replace(ENDED, ended="the budget of the last level is spent")
    for kind in ("too short to tell", "not learned"):
        assert next_command(run, verdict(kind, difference=0.02)) == LOOK
    assert next_command(run, verdict("learned", level=10)) == LOOK
    assert next_command(run, verdict("learned")) == EVALUATE


def test_a_ladder_that_is_stuck_ends_lower():
    config = Config(task="interleave", level=25, curriculum="5,10,25")
    run = replace(ENDED, config=config, levels=(5, 10, 25))
    stuck = verdict("not learned", untaught=0.8)
    assert next_command(run, stuck) == f"{AGAIN} --curriculum 5,10 --level 10"
    # Half way to 25 words, where 5 and 10 are solved.
    half_way = replace(run, easier=(17,))
    assert next_command(half_way, stuck) == f"{AGAIN} --curriculum 5,10,17 --level 17"


@pytest.mark.parametrize("kind", ["no signal", "not learned"])
@pytest.mark.parametrize("name", NOTHING_EASIER)
def test_without_an_easier_level_the_remedy_is_another(kind, name):
    lowest = replace(PAIRS, levels=(25,), easier=())
    stuck = verdict(kind, untaught=1.0, degenerate=name)
    said, command = advice(lowest, stuck)
    assert said == f"try {NOTHING_EASIER[name]}" and command.endswith(" degenerate")
    said, command = advice(lowest, replace(stuck, truncated=0.9))
    assert said == "try twice the token budget, --max-new-tokens 198" and said[-20:] in command


def test_where_no_harder_level_is_known_the_run_is_evaluated():
    solved = verdict("learned", solved_step=40)
    chain = Config(task="arithmetic", level=2)
    ended = replace(ENDED, config=chain, task=Arithmetic())
    assert next_command(ended, replace(solved, level=2)).endswith(" --level 3")
    product = replace(ended, config=Config(task="arithmetic", level=22), task=Arithmetic("product"))
    assert next_command(product, replace(solved, level=22)).startswith("python eval.py ")
    rows = replace(ENDED, config=Config(task="interleave", level=25, dataset="a.jsonl"))
    assert next_command(rows, solved) == EVALUATE


def test_a_program_of_the_user_is_named_so_that_it_may_be_executed():
    own = replace(ENDED, config=Config(task="my.py:Mine", level=25))
    assert next_command(own, verdict("too short to tell")).startswith(
        "python train.py --resume 'runs/two words' --task my.py:Mine --steps"
    )

    loss = replace(ENDED, config=Config(task="interleave", level=25, loss="my.py:loss"))
    assert " --loss my.py:loss --steps" in next_command(loss, verdict("too short to tell"))
    assert " --loss my.py:loss --level 10" in next_command(loss, verdict("not learned", untaught=1))
    assert not any("--loss" in command for command in next_commands(loss))

    given = replace(ENDED, config=Config(task="interleave", level=25, loss="python:loss"))
    assert next_command(given, verdict("too short to tell")) == LOOK

    class FromPython(Arithmetic):
        from_python = True

    from_python = replace(ENDED, task=FromPython())
    assert next_command(from_python, verdict("too short to tell")) == LOOK
    assert next_commands(from_python) == [LOOK, "python -m grpo.report 'runs/two words'"]


def evaluation(step, mean, level=25, purpose="report"):
    low = mean - 0.01
    about = {"step": step, "level": level, "purpose": purpose, "n": 64}
    return about | {"mean": mean, "ci_low": low}


@pytest.mark.parametrize(
    "lines, step",
    [
        ([], None),
        ([evaluation(0, 0.2), evaluation(60, 0.9)], None),
        ([evaluation(0, 0.2), evaluation(60, 0.99)], 60),
        ([evaluation(0, 0.99), evaluation(60, 0.99)], 0),
        ([evaluation(20, 0.98, purpose="promotion"), evaluation(60, 0.99)], 20),
        ([evaluation(20, 0.98), evaluation(40, 0.5), evaluation(60, 0.99)], 60),
        ([evaluation(40, 0.98, purpose="promotion"), evaluation(40, 0.5)], None),
        ([evaluation(20, 0.98), evaluation(40, 0.5, level=10)], 20),
        ([evaluation(0, 0.98, purpose="warm start"), evaluation(60, 0.5)], None),
    ],
)
def test_the_step_from_which_on_a_level_is_solved(lines, step):
    assert solved_step(lines, 25) == step


AUDIT = "python -m grpo.tasks.audit "


@pytest.mark.parametrize(
    ("place", "started", "train", "audit"),
    [
        ("here", "train.py", "python train.py", AUDIT),
        ("here", "/bin/grpo-train", "grpo-train", "grpo-audit "),
        ("app", "script.py", "python ../here/train.py", AUDIT),
        ("app", "../here/train.py", "python ../here/train.py", f"PYTHONPATH=../here {AUDIT}"),
        ("wheel", "train.py", "grpo-train", "grpo-audit "),  # the user's own file
    ],
)
def test_commands_work_where_they_are_printed(tmp_path, monkeypatch, place, started, train, audit):
    for folder in ("here", "app", "wheel"):
        (tmp_path / folder).mkdir()
    (tmp_path / "here" / "train.py").touch()
    monkeypatch.chdir(tmp_path / place)
    monkeypatch.setattr("sys.argv", [started])
    home = place.replace("app", "here")
    monkeypatch.setattr("grpo.data.errors.__file__", f"{tmp_path}/{home}/grpo/data/errors.py")

    assert next_command(ENDED, verdict("too short to tell")).startswith(f"{train} --resume ")
    assert ENDED.again("--seed 1").startswith(f"{train} --config ")
    assert next_commands(ENDED)[-1].startswith(audit)
    assert make_parser().format_help().count(f"{train} ") == 5
