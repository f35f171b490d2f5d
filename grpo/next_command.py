"""The commands to run after a run: the one that fits its verdict, and those that look into it."""

import math
import shlex
from dataclasses import dataclass
from pathlib import Path

from grpo.config import FROM_PYTHON, Config
from grpo.data.errors import command_of, quoted
from grpo.ending import FALLEN, Verdict
from grpo.evaluate import TOO_MANY_TRUNCATED
from grpo.tasks.base import Task, levels_of, problems_of, range_of
from grpo.tasks.registry import REWARD_FILE, programs_in
from grpo.tasks.supply import LADDER
from grpo.variance import EQUAL

# A run with a larger share of its tokens in groups without variance learned little because of them.
MOSTLY_UNTAUGHT = 0.5
# Above this share, more steps would not teach more either.
NEARLY_UNTAUGHT = 0.9

# What to change where no level is easier, by the most common class of the groups.
NOTHING_EASIER = {
    "failed": "a stronger --model, or a reward that pays for a part of the answer",
    "tied": "a reward that tells these answers apart",
    "identical": "a --model or a prompt whose answers differ",
}


@dataclass(frozen=True)
class EndedRun:
    """What the next commands depend on."""

    folder: Path
    config: Config  # resolved
    task: Task
    step: int  # at which it ended
    budget: int = 0  # tokens that a completion of the last held-out evaluation could take
    levels: tuple[int, ...] = ()  # of training
    easier: tuple[int, ...] = ()  # below the hardest open level, and not solved; rising
    best: float = math.inf  # the highest reward that a completion has earned
    ended: str = ""  # why it ended before its steps were made: more steps would not continue it

    def trusted(self, *, trains: bool = False) -> str:
        """Return the flags that allow a command to execute programs of the user's."""
        programs = programs_in(vars(self.config))
        if not trains:
            programs.pop("loss", None)
        return "".join(f" --{flag} {shlex.quote(x)}" for flag, x in programs.items())

    @property
    def inspection(self) -> str:
        """The command that shows the groups of the last step."""
        return f"{command_of('inspect')} {quoted(self.folder)} step {self.step}"

    @property
    def evaluation(self) -> str:
        """The command that evaluates the trained policy on the test split, as it was trained."""
        return f"{command_of('eval')} --model {quoted(self.folder)}{self.trusted()}"

    def again(self, flags: str) -> str:
        """Return the command that trains with the settings of the run, changed by `flags`."""
        settings = quoted(self.folder / "config.yaml")
        return f"{command_of('train')} --config {settings}{self.trusted(trains=True)} {flags}"


def next_commands(run: EndedRun) -> list[str]:
    """Return the commands that look into a run; no command can load a task made from Python."""
    folder = quoted(run.folder)
    of_run = [run.inspection, f"{command_of('report')} {folder}"]
    audit = f"{command_of('audit')} {folder}{run.trusted()}"
    is_from_python = getattr(run.task, "from_python", False)
    return of_run if is_from_python else [run.evaluation, *of_run, audit]


def advice(run: EndedRun, verdict: Verdict) -> tuple[str, str]:
    """Return what to change after a run that failed, in words, and the next command.

    No command but an inspection fits a task or a loss that was made from Python values.
    """
    words, command = _advice(run, verdict)
    is_from_python = getattr(run.task, "from_python", False)
    is_from_python |= run.config.loss.startswith(FROM_PYTHON)
    is_from_python |= run.config.scale.startswith(FROM_PYTHON)
    if is_from_python or verdict.kind == "not measured":
        command = run.inspection
    return f"try {words}" if words and verdict.exit_status else "", command


def _advice(run: EndedRun, verdict: Verdict) -> tuple[str, str]:
    """Return what to do next: in words if something is to be changed, and as a command.

    It is that of the first row that matches in the table of docs/failing-run.md. More steps are not
    advised if nearly all groups taught nothing, nor to a run that has ended by itself, which would
    make no more: look at its last one.
    """
    config, kind = run.config, verdict.kind
    more = f"{run.trusted(trains=True)} --steps {2 * verdict.steps}"
    longer = f"{command_of('train')} --resume {quoted(run.folder)}{more}"
    if run.ended or verdict.stopped:
        longer = run.inspection
    budget = f"--max-new-tokens {2 * run.budget}"
    reward = next(iter(run.task.rewards), config.reward)
    other_reward = f"the task's default reward, --reward {reward}", run.again(f"--reward {reward}")

    is_open = kind == "too short to tell" or verdict.level != config.level and kind not in FALLEN
    if is_open and verdict.untaught <= NEARLY_UNTAUGHT:
        return "", longer
    if kind == "already solved" or verdict.solved_step is not None:
        return "", _harder(run)
    if kind == "learned" and not is_open:
        return "", run.evaluation
    if config.control != "none":
        return "", run.again("--control none")

    if kind in FALLEN:
        if verdict.trap and reward != config.reward:
            return other_reward
        if verdict.cause.startswith("exact answers fell"):
            return "a reward that only exact answers earn in full", run.inspection
        assert config.learning_rate is not None, "the configuration is resolved"
        rate = f"--learning-rate {config.learning_rate / 3:.2g}"
        return f"a third of the learning rate, {rate}", run.again(rate)

    is_cut = verdict.truncated > TOO_MANY_TRUNCATED and run.budget
    if is_cut and (kind != "no signal" or not run.easier):
        return f"twice the token budget, {budget}", run.again(budget)
    if kind == "no signal" or verdict.untaught > MOSTLY_UNTAUGHT:
        if verdict.degenerate == "solved":
            return "a harder level", _harder(run)
        if verdict.degenerate == "tied" and reward != config.reward:
            return other_reward
        if verdict.degenerate in ("tied", "identical") and (top := _unreached_top(run, verdict)):
            return f"{top}, if right answers earn no more", run.again(top)
        if run.easier:
            return "easier problems first", _easier(run)
        look = f"{command_of('inspect')} {quoted(run.folder)} degenerate"
        return NOTHING_EASIER.get(verdict.degenerate, ""), look

    is_rising = verdict.difference is not None and verdict.difference > 0
    return "", longer if is_rising else run.inspection


def _unreached_top(run: EndedRun, verdict: Verdict) -> str:
    """Return the flag with the range whose top all held-out completions earn, if they earn less
    than the top of the range that rows of the user's own were given; "" otherwise.
    """
    lowest, highest = range_of(run.task) or (0.0, 0.0)
    if not lowest < run.best < highest or REWARD_FILE not in run.config.task_options:
        return ""
    is_best = (verdict.after or 0.0) >= (run.best - lowest) / (highest - lowest) - EQUAL
    return f"--reward-range {lowest:g},{run.best:g}" if is_best else ""


def _harder(run: EndedRun) -> str:
    """Return the command that continues at the next level; the evaluation if none is known."""
    config, level = run.config, run.config.level
    assert level is not None, "the configuration is resolved"
    harder = None if levels_of(run.task, level) else level + 1
    if getattr(run.task, "level_unit", "") == "words":
        harder = next((each for each in LADDER if each > level), None)
    if harder is None or config.dataset or problems_of(run.task, "train"):
        return run.evaluation
    climb = f" --curriculum {config.curriculum},{harder}" if config.curriculum else ""
    return run.again(f"--model {quoted(run.folder)}{climb} --level {harder}")


def _easier(run: EndedRun) -> str:
    """Return the command that begins at an easier level."""
    climb = [*run.easier, run.config.level]
    if len(run.levels) == 1:
        return run.again(f"--curriculum {','.join(map(str, climb))}")

    easier = run.easier[-1]  # the run has climbed already, and is stuck
    below = sorted({easier, *(level for level in run.levels if level < easier)})
    ladder = f"--curriculum {','.join(map(str, below))} " if run.config.curriculum else ""
    return run.again(f"{ladder}--level {easier}")
