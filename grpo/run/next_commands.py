"""The commands to run after a run: the one that fits its verdict, and those that look into it."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from data.text import quoted
from grpo.choices import FROM_PYTHON, program_of
from grpo.config import Config
from grpo.evaluate import TOO_MANY_TRUNCATED
from grpo.flags import program
from grpo.verdict import Verdict
from tasks.base import REWARD_FILE, Task, is_of_project, levels_of, problems_of
from tasks.levels import LADDER

# A run with a larger share of its tokens in groups without variance learned little because of them.
MOSTLY_UNTAUGHT = 0.5


@dataclass(frozen=True)
class EndedRun:
    """What the next commands depend on.

    - `folder`, `config` (resolved) and `task` of the run, and the `step` at which it ended;
    - `budget`: the tokens that a completion of the last held-out evaluation could take;
    - `levels`: those of training; `easier`: all levels below the last of them, rising;
    - `ended`: why it ended before its steps were made; "" if it did not. More steps would not
      continue it.
    """

    folder: Path
    config: Config
    task: Task
    step: int
    budget: int = 0
    levels: tuple[int, ...] = ()
    easier: tuple[int, ...] = ()
    ended: str = ""

    @property
    def trusted(self) -> str:
        """The flags that allow a command to execute the user's task or reward; "" without."""
        config = self.config
        flags = f" --task {shlex.quote(config.task)}" if not is_of_project(config.task) else ""
        if reward_file := config.task_options.get(REWARD_FILE):
            flags += f" --{REWARD_FILE} {shlex.quote(reward_file)}"
        return flags

    @property
    def trained_by(self) -> str:
        """The flags that allow train.py to execute the user's task, reward or loss."""
        loss = self.config.loss
        return self.trusted + (f" --loss {shlex.quote(loss)}" if program_of(loss) else "")

    @property
    def inspection(self) -> str:
        """The command that shows the groups of the last step."""
        return f"python -m grpo.inspect {quoted(self.folder)} step {self.step}"

    @property
    def evaluation(self) -> str:
        """The command that evaluates the trained policy on the test split."""
        config = self.config
        options = "".join(
            f" --{name} {shlex.quote(value)}" for name, value in config.task_options.items()
        )
        return (
            f"{program('eval')} --model {quoted(self.folder)} --task {shlex.quote(config.task)}"
            f"{options} --levels {config.level}"
        )

    def again(self, flags: str) -> str:
        """Return the command that trains with the settings of the run, changed by `flags`."""
        settings = quoted(self.folder / "config.yaml")
        return f"{program()} --config {settings}{self.trained_by} {flags}"


def next_commands(run: EndedRun) -> list[str]:
    """Return the commands that look into a run.

    A task that was made from Python values cannot be loaded by a command, so those that would are
    left out.
    """
    folder = quoted(run.folder)
    of_run = [run.inspection, f"python -m grpo.report {folder}"]
    audit = f"python -m tasks.audit {folder}{run.trusted}"
    return of_run if _is_from_python(run.task) else [run.evaluation, *of_run, audit]


def next_command(run: EndedRun, verdict: Verdict) -> str:
    """Return the command that fits the verdict best: that of the first row that matches.

    | verdict | command |
    |---|---|
    | not measured | look at the last step |
    | too short to tell, or learned at an easier level alone | the same run, twice the steps |
    | solved, by this run or before it | the next level |
    | learned | evaluate |
    | not learned, in a control experiment | the same without the control |
    | not learned, completions truncated | a larger budget |
    | not learned, groups without variance | an easier level first |
    | not learned otherwise, but rising | the same run, twice the steps |
    | anything else | look at the last step |

    A run that has ended by itself would make no more steps: then "twice the steps" is a look at the
    last one.
    """
    config = run.config
    is_in_python = _is_from_python(run.task) or config.loss.startswith(FROM_PYTHON)
    if is_in_python or verdict.kind == "not measured":
        return run.inspection
    more = f"--steps {2 * verdict.steps}"
    longer = f"{program()} --resume {quoted(run.folder)}{run.trained_by} {more}"
    if run.ended or verdict.stopped:
        longer = run.inspection
    if verdict.kind == "too short to tell" or verdict.level != config.level:
        return longer
    if verdict.kind == "already solved" or verdict.solved_step is not None:
        return _harder(run)
    if verdict.kind == "learned":
        return run.evaluation
    if config.control != "none":
        return run.again("--control none")
    if verdict.truncated > TOO_MANY_TRUNCATED and run.budget:
        return run.again(f"--max-new-tokens {2 * run.budget}")
    if verdict.untaught > MOSTLY_UNTAUGHT:
        return _easier(run)

    is_rising = verdict.difference is not None and verdict.difference > 0
    return longer if is_rising else run.inspection


def _is_from_python(task: Task) -> bool:
    """Return whether no command line can load the task."""
    return getattr(task, "from_python", False)


def _harder(run: EndedRun) -> str:
    """Return the command that continues at the next level; the evaluation if there is none."""
    config = run.config
    assert config.level is not None, "the configuration is resolved"
    level = _next_level(run.task, config.level)
    if level is None or config.dataset or problems_of(run.task, "train"):
        return run.evaluation
    climb = f" --curriculum {config.curriculum},{level}" if config.curriculum else ""
    return run.again(f"--model {quoted(run.folder)}{climb} --level {level}")


def _next_level(task: Task, level: int) -> int | None:
    """Return the level after `level`; None if it is not known which is harder."""
    if getattr(task, "level_unit", "") == "words":
        return next((harder for harder in LADDER if harder > level), None)
    return None if levels_of(task, level) else level + 1


def _easier(run: EndedRun) -> str:
    """Return the command that begins at an easier level; without one, that shows the groups."""
    if not run.easier:
        return f"python -m grpo.inspect {quoted(run.folder)} degenerate"
    if len(run.levels) > 1:  # it has climbed already, and is stuck
        easier = run.easier[-1]
        below = [level for level in run.levels if level < easier]
        climb = ",".join(map(str, [*below, easier]))
        climb = f"--curriculum {climb} " if run.config.curriculum else ""
        return run.again(f"{climb}--level {easier}")
    last = run.config.level
    climb = ",".join(map(str, [*run.easier, last]))
    return run.again(f"--curriculum {climb}")
