"""The logs of a run: how they are written, and `load_run`, which reads all data of a run.

| file | holds |
|---|---|
| metrics.jsonl, eval.jsonl, curriculum.jsonl | a line for each step, evaluation and decision |
| seen.jsonl, groups.jsonl | the keys of the problems, and a summary of each group, by step |
| samples.log, warnings.log, prompt.txt | text for people |
| rollouts/ | every prompt and completion, see `grpo.run.rollouts` |

Rank 0 writes with `RunFiles`; the other ranks have `NoFiles`. Readers check what they read, so that
a damaged or foreign file is one line that names it. Neither torch nor transformers is imported.
"""

import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from functools import cached_property
from operator import index
from pathlib import Path
from typing import Any

import msgspec

from data.errors import UserError, blaming, escape_control, shortened
from data.files import (
    check_links,
    kind_of,
    open_own,
    read_bytes,
    read_jsonl,
    read_yaml,
    write_whole,
)
from grpo.config import KINDS as SETTING_KINDS
from grpo.config import Config, checked
from grpo.records import Decision, Group, StepReport
from grpo.run.files import resume_hint
from grpo.run.rollouts import KINDS, file_of, groups_of, remove_after, steps_of, write_rollouts
from grpo.run.trackers import Trackers
from grpo.show.group import best_and_worst, completion_record, summaries

LOGS = ("metrics.jsonl", "eval.jsonl", "seen.jsonl", "curriculum.jsonl", "groups.jsonl")

SAMPLES_EVERY = 10  # steps between entries of samples.log

# A tokenizer takes tokens of 32 bits; a larger number, from a foreign file, has no text.
MOST_TOKENS = 1 << 32

# What each line of a log must have besides "step", and an evaluation that is a report.
Number = int | float
REQUIRED: dict[str, dict[str, Any]] = {
    "eval.jsonl": {"purpose": str},
    "curriculum.jsonl": {"from": int, "to": int, "kind": str, "why": str},
    "seen.jsonl": {"keys": list[str]},
    "groups.jsonl": {"groups": list[dict[str, Any]]},
}
REPORT = {"level": int, **dict.fromkeys(("mean", "ci_low", "ci_high", "exact"), Number)}


# --- logs -------------------------------------------------------------------------------------


class MetricsLog:
    """A file of JSON Lines, each with a "step". Lines are on the disk when `append` returns."""

    def __init__(self, folder: Path, name: str = "metrics.jsonl"):
        self.path = Path(folder) / name

    def append(self, *lines: dict[str, Any]) -> None:
        """Write lines at once. JSON has no NaN or infinity, so such numbers become null."""
        finite = [json.loads(json.dumps(line), parse_constant=lambda _: None) for line in lines]
        texts = [json.dumps(line, ensure_ascii=False) for line in finite]
        append(self.path, "".join(f"{text}\n" for text in texts))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a log, without an incomplete last one. Other damage is a UserError."""
    path = Path(path)
    if not path.exists():
        return []
    lines = []
    for where, line in read_jsonl(path, is_log=True):
        required = {"step": int} | REQUIRED.get(path.name, {})
        if path.name == "eval.jsonl" and line.get("purpose") == "report":
            required |= REPORT
        for name, kind in required.items():
            with blaming(f"{where}, {name}: is not what a run writes"):
                msgspec.convert(line.get(name), kind)
        lines.append(line)
    return lines


def append(path: Path, text: str) -> None:
    """Append `text` to a file. It is on the disk when this function returns."""
    try:
        with open_own(path, "a") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written: {error.strerror}; free some space and "
            f"{resume_hint(path.parent)}"
        ) from error


def rewind(run: Path, step: int) -> None:
    """Remove what the run's logs and rollouts hold of steps after `step`, which are made again, and
    lines and files that a killed process has not completed.
    """
    for path in (run / name for name in LOGS):
        if path.exists():
            lines = [line for line in read_metrics(path) if line["step"] <= step]
            texts = [json.dumps(line, ensure_ascii=False) for line in lines]
            write_whole(path, "".join(f"{text}\n" for text in texts).encode())

    path = run / "samples.log"
    if path.exists():
        # Bytes, because the last line may end in the middle of a character.
        entries = re.split(
            rb"^(?==== step \d+ )", read_bytes(path).rpartition(b"\n")[0], flags=re.M
        )
        kept = [entry for entry in entries[1:] if int(entry.split(None, 3)[2]) <= step]
        write_whole(path, b"".join(entry.rstrip(b"\n") + b"\n" for entry in kept))

    remove_after(run, step)
    for path in (*run.glob(".*.partial"), *run.glob("rollouts/.*.partial")):
        if not path.name.startswith(".report."):  # which another process may write now
            path.unlink()


# --- all of them ------------------------------------------------------------------------------


class RunFiles:
    """The logs and rollouts of the run in `folder`, which has made `done` steps, and its trackers.

    `warn` shows a warning.
    """

    def __init__(self, folder: Path, config: Config, done: int, warn: Callable[[str], None]):
        self.folder = folder
        self.mark = config.mark
        self.trackers = Trackers(config.track, folder, dataclasses.asdict(config), done, warn)

    def append(self, log: str, *lines: dict[str, Any]) -> None:
        """Write lines to one of the LOGS, all of them at once, e.g. to "eval"."""
        MetricsLog(self.folder, f"{log}.jsonl").append(*lines)

    def write_step(self, report: StepReport) -> None:
        """Write a step: rollouts, metrics, problem keys, groups, decisions and samples."""
        step, groups = report.step, report.groups
        self.write_rollouts("step", step, groups)
        self.append("metrics", report.metrics)
        self.trackers.send(report.metrics)
        keys = dict.fromkeys(group.problem.key for group in groups)
        self.append("seen", {"step": step, "keys": list(keys)})
        self.append("groups", {"step": step, "groups": summaries(groups)})
        self.write_decisions(report.decisions)
        if step == 1 or step % SAMPLES_EVERY == 0:
            date = datetime.now(UTC).isoformat(timespec="seconds")
            text = f"=== step {step} {date}\n{best_and_worst(groups)}"
            append(self.folder / "samples.log", text)

    def write_imitation(self, groups: list[Group]) -> None:
        """Write the right answers that were imitated before the first step, and their keys."""
        self.write_rollouts("imitation", 0, groups)
        keys = [group.problem.key for group in groups]
        self.append("seen", {"step": 0, "imitated": True, "keys": keys})

    def write_decisions(self, decisions: Sequence[Decision]) -> None:
        """Write decisions to curriculum.jsonl."""
        for decision in decisions:
            self.append("curriculum", {**decision.to_json(), **self.mark})

    def write_evaluations(self, lines: Sequence[dict[str, Any]]) -> None:
        """Write lines to eval.jsonl, all of them at once."""
        self.append("eval", *lines)
        for line in lines:
            self.trackers.send(line)

    def write_rollouts(self, kind: str, step: int, groups: list[Group]) -> None:
        """Write groups of a kind (`KINDS`) with all their texts to rollouts/."""
        write_rollouts(file_of(self.folder, kind, step), groups, step=step)

    def write_prompt(self, lines: Sequence[str]) -> None:
        """Write the first prompt, as it is sent to the model, to prompt.txt unless that exists."""
        path = self.folder / "prompt.txt"
        if not path.exists():
            write_whole(path, "".join(f"{line}\n" for line in lines).encode())

    def write_warning(self, line: str) -> None:
        """Append a warning to warnings.log, because the console may be closed or lost."""
        append(
            self.folder / "warnings.log",
            f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC  {escape_control(line)}\n",
        )

    def finish(self) -> None:
        """Close the trackers."""
        self.trackers.finish()


class NoFiles:
    """Has the methods of `RunFiles` and writes nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


# --- reading them back -------------------------------------------------------------------------


class RunData:
    """The stored data of a run. UserError names a damaged file, and what is not there."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if kind_of(self.path) == "folder":
            check_links(self.path)
        if kind_of(self.path / "config.yaml") != "file":
            raise UserError(
                f"{self.path}: not a run (it has no config.yaml); give the directory that train.py "
                "named, such as runs/NAME"
            )

    def __repr__(self) -> str:
        """Return e.g. <TrainedRun runs/own: learned>."""
        verdict = f": {self.verdict['verdict']}" if self.verdict else ""
        return f"<{type(self).__name__} {self.path}{verdict}>"

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved configuration, and the "facts" of the run."""
        return read_config(self.path)

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return self._log("metrics.jsonl")

    @cached_property
    def evals(self) -> list[dict[str, Any]]:
        """The evaluations: the lines of eval.jsonl except verdicts."""
        return [line for line in self._log("eval.jsonl") if line["purpose"] != "verdict"]

    @property
    def verdict(self) -> dict[str, Any] | None:
        """The last verdict on the run (see `grpo.ending`); None if there is none yet."""
        lines = [line for line in self._log("eval.jsonl") if line["purpose"] == "verdict"]
        return lines[-1] if lines else None

    @property
    def reports(self) -> list[dict[str, Any]]:
        """The reported evaluations before, during and after training, without validation checks."""
        return [line for line in self.evals if line["purpose"] == "report"]

    @cached_property
    def decisions(self) -> list[dict[str, Any]]:
        """The lines of curriculum.jsonl."""
        return self._log("curriculum.jsonl")

    @cached_property
    def group_index(self) -> list[dict[str, Any]]:
        """A record for each group of all steps, see `grpo.show.group.summaries`."""
        lines = self._log("groups.jsonl")
        return [{"step": line["step"], **group} for line in lines for group in line["groups"]]

    def steps(self, kind: str = "step") -> list[int]:
        """Return the steps whose rollouts of a `kind` are stored, see `grpo.run.rollouts.KINDS`."""
        if kind not in KINDS:
            raise UserError(f"rollouts of kind {kind!r}: give one of {', '.join(KINDS)}")
        return steps_of(self.path, kind)

    def groups(self, step: int, kind: str = "step") -> list[Group]:
        """Return the groups of a step, in the order in which they were drawn."""
        path = file_of(self.path, kind, step)
        if not path.exists():
            there = ", ".join(map(str, self.steps(kind))) or "none"
            raise UserError(
                f"{self.path}: no rollouts of {kind} {step} are stored; it has {shortened(there)}"
            )
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
    ) -> list[dict[str, Any]]:
        """Return a record for each completion of one or several steps; None means all steps.

        Keys: step, group, sample (both from 0), index, attempt, level, temperature, class, action,
        key, prompt, target, text, finish, num_tokens, tokens, logprobs, reward, value, exact,
        parts, and advantage. The advantage is a number, a list with one per token, or None if the
        group was not trained on. A group with the action "demonstrate" comes a second time, as it
        was trained on: its last completion is the right answer, with `is_demonstration`.
        """
        steps = self.steps(kind) if step is None else step
        records = []
        # Numbers of NumPy and of data frames become Python's.
        for each in map(index, steps if isinstance(steps, Iterable) else [steps]):
            drawn = self.groups(each, kind) if group is None else [self.group(each, group, kind)]
            for number, one in enumerate(drawn, start=group or 0):
                for sample in range(len(one.completions)):
                    place = {"step": each, "group": number, "sample": sample}
                    records.append(place | completion_record(one, sample))
        return records

    def _log(self, name: str) -> list[dict[str, Any]]:
        return read_metrics(self.path / name)


def read_config(run: Path) -> dict[str, Any]:
    """Return what a run's config.yaml holds: the settings, and the "facts"."""
    path = run / "config.yaml"
    values = read_yaml(path)
    facts = values.pop("facts", {})
    return checked(values, str(path), known=SETTING_KINDS) | {"facts": facts}


def tokenizer_of(run: Path) -> Any | None:
    """Return the tokenizer of the run's last checkpoint; None if it has no checkpoint."""
    files = sorted((run / "checkpoints").glob("step-*/tokenizer.json"))
    if not files:
        return None
    from tokenizers import Tokenizer

    with blaming(f"{files[-1]}: is not a tokenizer"):
        return Tokenizer.from_file(str(files[-1]))


def load_run(path: str | Path) -> RunData:
    """Return the stored data of the run in directory `path`, read when it is needed."""
    if not isinstance(path, str | Path):
        raise UserError(f"load_run: the run is {path!r}; give the path of its directory")
    return RunData(path)
