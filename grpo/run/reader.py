"""Read the stored data of a run: `run = load_run("runs/NAME")`.

    run.metrics                        a record (dict) per step: the lines of metrics.jsonl
    run.evals, run.decisions           the lines of eval.jsonl and curriculum.jsonl
    run.group_index                    a record per group: class, action, reward_std ...
    run.rollouts(step=12, group=3)     a record per completion: text, tokens, reward, advantage ...
    run.groups(12)                     the groups of a step (`grpo.records.Group`)

Files are read when they are needed, and rollouts one step at a time. Records are plain dicts in a
list; `to_pandas()` returns them as a data frame. Neither torch nor transformers is imported.
"""

from collections.abc import Iterable, Iterator
from functools import cached_property
from operator import index
from pathlib import Path
from typing import Any, TypedDict

from data.errors import UserError, blaming, needs
from data.files import check_links, kind_of, read_yaml
from grpo.records import Group
from grpo.run.logs import KINDS, Number, check, file_of, groups_of, read_metrics, require, steps_of
from grpo.show.group import completion_record

# A tokenizer takes tokens of 32 bits; a larger number, from a foreign file, has no text.
MOST_TOKENS = 1 << 32

# What a line of eval.jsonl has if its purpose is a report.
OF_REPORTS = ("level", "mean", "ci_low", "ci_high", "exact")


class Facts(TypedDict, total=False):
    """The "facts" in config.yaml."""

    started: str
    ranks: int
    threads: int
    start: str | None
    fingerprints: dict[str, str]
    training_levels: list[int]
    resumed: list[dict[str, Any]]


class ConfigFile(TypedDict, total=False):
    """The keys of config.yaml that are read without `grpo.config.load_config`."""

    task: str
    model: str
    level: int | None
    seed: int
    reward: str | None
    temperature: Number
    control: str
    facts: Facts


class Records(list):
    """Plain dicts in a list, e.g. ``Records([{"step": 1, "reward": 0.3}])``."""

    def to_pandas(self) -> Any:
        """Return the records as a pandas DataFrame (the extra `notebook`)."""
        with needs("pandas", "notebook"):
            import pandas
        return pandas.DataFrame.from_records(self)


class RunData:
    """The stored data of a run.

    Raises UserError if a file is damaged, or if there is no such step or group.
    """

    def __init__(self, path: str | Path):
        self._given = Path(path)
        self._absolute = self._given.absolute()
        if kind_of(self.path) == "folder":
            check_links(self.path)
        if kind_of(self.path / "config.yaml") != "file":
            raise UserError(
                f"{self.path}: not a run (it has no config.yaml); give the directory that train.py "
                "named, such as runs/NAME"
            )

    @property
    def path(self) -> Path:
        """The folder of the run, from wherever the process is now (a notebook may change that)."""
        is_there = self._given.absolute() == self._absolute
        return self._given if is_there else self._absolute

    def __repr__(self) -> str:
        """Return e.g. <TrainedRun runs/own: learned>."""
        verdict = f": {self.verdict['verdict']}" if self.verdict else ""
        return f"<{type(self).__name__} {self.path}{verdict}>"

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved configuration, and the "facts" of the run."""
        return read_config(self.path)

    @cached_property
    def metrics(self) -> Records:
        """The lines of metrics.jsonl."""
        return self._log("metrics.jsonl")

    @cached_property
    def evals(self) -> Records:
        """The evaluations: the lines of eval.jsonl except verdicts."""
        lines = [line for line in self._log("eval.jsonl") if line["purpose"] != "verdict"]
        for line in lines:
            if line["purpose"] == "report":
                require(f"{self.path / 'eval.jsonl'}, step {line['step']}", line, OF_REPORTS)
        return Records(lines)

    @property
    def verdict(self) -> dict[str, Any] | None:
        """The last verdict on the run (see `grpo.ending`); None if there is none yet."""
        lines = [line for line in self._log("eval.jsonl") if line["purpose"] == "verdict"]
        return lines[-1] if lines else None

    @property
    def reports(self) -> Records:
        """The reported evaluations before, during and after training, without validation checks."""
        return Records(line for line in self.evals if line["purpose"] == "report")

    @property
    def first_reports(self) -> Records:
        """The reported evaluations before the first step, of the policy that nothing has taught."""
        return Records(line for line in self.reports if line["step"] == 0)

    @cached_property
    def decisions(self) -> Records:
        """The lines of curriculum.jsonl."""
        return self._log("curriculum.jsonl")

    @cached_property
    def group_index(self) -> Records:
        """A record for each group of all steps, see `grpo.show.group.summaries`."""
        return Records(
            {"step": line["step"], **group}
            for line in self._log("groups.jsonl")
            for group in line["groups"]
        )

    def steps(self, kind: str = "step") -> list[int]:
        """Return the steps whose rollouts of a `kind` are stored, see `grpo.run.logs.KINDS`."""
        if kind not in KINDS:
            raise UserError(f"rollouts of kind {kind!r}: give one of {', '.join(KINDS)}")
        return steps_of(self.path, kind)

    def groups(self, step: int, kind: str = "step") -> list[Group]:
        """Return the groups of a step, in the order in which they were drawn."""
        path = file_of(self.path, kind, step)
        if not path.exists():
            there = self.steps(kind)
            which = f"it has {_listed(there)}" if there else "it has none"
            raise UserError(f"{self.path}: no rollouts of {kind} {step} are stored; {which}")
        return groups_of(path)

    def group(self, step: int, number: int, kind: str = "step") -> Group:
        """Return group `number` of a step, counted from 0."""
        groups = self.groups(step, kind)
        if not 0 <= number < len(groups):
            raise UserError(
                f"{self.path}: {kind} {step} has no group {number}; it has 0 to {len(groups) - 1}"
            )
        return groups[number]

    def rollouts(
        self, step: int | Iterable[int] | None = None, group: int | None = None, kind: str = "step"
    ) -> Records:
        """Return a record for each completion; see `each_rollout`. None means all steps."""
        return Records(self.each_rollout(step, group, kind))

    def each_rollout(
        self, step: int | Iterable[int] | None = None, group: int | None = None, kind: str = "step"
    ) -> Iterator[dict[str, Any]]:
        """Yield a record for each completion, one step in memory at a time.

        Keys: step, group, sample (both from 0), index, attempt, level, temperature, class, action,
        key, prompt, target, text, finish, num_tokens, tokens, logprobs, reward, value, exact,
        parts, and advantage. The advantage is a number, a list with one per token, or None if the
        group was not trained on. A group with the action "demonstrate" comes a second time, as it
        was trained on: its last completion is the right answer, with `is_demonstration`.
        """
        steps: Iterable[int]
        if step is None:
            steps = self.steps(kind)
        else:
            steps = step if isinstance(step, Iterable) else [step]

        for each in map(index, steps):  # those of NumPy and of data frames become Python's
            if group is None:
                groups = list(enumerate(self.groups(each, kind)))
            else:
                groups = [(group, self.group(each, group, kind))]

            for number, drawn in groups:
                for sample in range(len(drawn.completions)):
                    place = {"step": each, "group": number, "sample": sample}
                    yield place | completion_record(drawn, sample)

    def _log(self, name: str) -> Records:
        return Records(read_metrics(self.path / name))


def read_config(run: Path) -> dict[str, Any]:
    """Return what a run's config.yaml holds: the settings, and the "facts".

    Raises UserError if it is damaged.
    """
    path = run / "config.yaml"
    values = read_yaml(path)
    check(str(path), values, ConfigFile)
    return values


def tokenizer_of(run: Path) -> Any | None:
    """Return the tokenizer of the run's last checkpoint; None if it has no checkpoint."""
    files = sorted((run / "checkpoints").glob("step-*/tokenizer.json"))
    if not files:
        return None
    from tokenizers import Tokenizer

    with blaming(f"{files[-1]}: is not a tokenizer"):
        return Tokenizer.from_file(str(files[-1]))


def load_run(path: str | Path) -> RunData:
    """Return the stored data of the run in directory `path`. Files are read when they are needed.

    Raises UserError if the directory is not that of a run.
    """
    if not isinstance(path, str | Path):
        raise UserError(f"load_run: the run is {path!r}; give the path of its directory")
    return RunData(path)


def _listed(steps: list[int]) -> str:
    """Return steps in words: "1 to 5" if none is left out, else "0, 3, 4", at most ten of them."""
    if steps[-1] - steps[0] == len(steps) - 1:
        return f"{steps[0]} to {steps[-1]}"
    return ", ".join(map(str, steps[:10])) + (", ..." if len(steps) > 10 else "")
