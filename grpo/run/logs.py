"""The files in the directory of a run: their names, how they are written, and how `load_run` reads
them. docs/run-files.md lists them.

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

from grpo.config import Config, names_in, read_config
from grpo.data.errors import UserError, blaming, escape_control, quoted, shortened
from grpo.data.files import (
    check_links,
    kind_of,
    open_own,
    raw_json,
    read_bytes,
    read_jsonl,
    write_jsonl_zst,
    write_whole,
)
from grpo.records import (
    Action,
    Decision,
    Group,
    GroupClass,
    StepReport,
    completion_values,
    group_values,
    row_of,
    summaries,
)
from grpo.run.trackers import Tracker
from grpo.show.group import best_and_worst

LOGS = ("metrics.jsonl", "eval.jsonl", "seen.jsonl", "curriculum.jsonl", "groups.jsonl")
ONE_A_STEP = ("metrics.jsonl", "groups.jsonl")

# What a run writes before it has a result.
BEGINNING = {".lock", "config.yaml", "prompt.txt", "warnings.log"}

CHECKPOINT = re.compile(r"step-(\d{6,})")

# Steps, evaluations, validation checks, the pre-flight, the answers that were imitated, the
# evaluation after that, and the batch of a step that failed.
KINDS = ("step", "eval", "promotion", "preflight", "imitation", "imitated", "failed")
ROLLOUTS = re.compile(rf"({'|'.join(KINDS)})-(\d+)\.jsonl\.zst")

SAMPLES_EVERY = 10  # steps between entries of samples.log

# A tokenizer takes tokens of 32 bits; a larger number, from a foreign file, has no text.
MOST_TOKENS = 1 << 32

# What may hold a number or a text that msgspec cannot write.
RAW = {"logprobs", "text", "advantage", "parts", "credits"}

# What each group in groups.jsonl must have, so that it can be shown.
SUMMARY: Any = msgspec.defstruct(
    "Summary",
    [
        *[(name, int) for name in ("group", "level", "distinct")],
        *[(name, float | None) for name in ("reward", "reward_std", "value", "exact")],
        ("class", GroupClass),
        ("action", Action),
        ("trap", str | None),
    ],
)

# What each line of a log must have besides "step", and an evaluation that is a report.
REQUIRED: dict[str, dict[str, Any]] = {
    "eval.jsonl": {"purpose": str},
    "curriculum.jsonl": {"from": int, "to": int, "kind": str, "why": str},
    "seen.jsonl": {"keys": list[str]},
    "groups.jsonl": {"groups": list[SUMMARY]},
}
MEAN = {"mean": float, "ci_low": float, "ci_high": float}
COMPONENT: Any = msgspec.defstruct("Component", MEAN.items())
REPORT = {"components": dict[str, COMPONENT] | None, "level": int, **MEAN, "exact": float}


# --- names ------------------------------------------------------------------------------------


def file_of(run: Path, kind: str, step: int) -> Path:
    """Return the file of a step's rollouts of a `kind`, one of `KINDS`."""
    return run / "rollouts" / f"{kind}-{step:06d}.jsonl.zst"


def step_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint's folder."""
    match = CHECKPOINT.fullmatch(checkpoint.name)
    assert match is not None, f"{checkpoint} is not a checkpoint"
    return int(match[1])


def checkpoint_folders(run: Path) -> list[Path]:
    """Return the folders of a run's checkpoints by step, damaged ones included."""
    folders = (run / "checkpoints").glob("step-*")
    return sorted((path for path in folders if CHECKPOINT.fullmatch(path.name)), key=step_of)


def resume_hint(folder: Path) -> str:
    """Return how to continue a run that ends here: from its last checkpoint, if there is one."""
    if checkpoint_folders(folder):
        return f"continue with --resume {quoted(folder)}"
    if not folder.exists() or has_no_result(folder):
        return "start it again"
    return f"start it again after rm -r {quoted(folder)}, because it has no checkpoint yet"


def has_no_result(folder: Path) -> bool:
    """Return whether a run that ends here loses nothing."""
    return {path.name for path in folder.iterdir()} <= BEGINNING


# --- logs -------------------------------------------------------------------------------------


def append_lines(path: Path, *lines: dict[str, Any]) -> None:
    """Append lines to a log. NaN and infinity become null, because JSON lacks them."""
    finite = [json.loads(json.dumps(line), parse_constant=lambda _: None) for line in lines]
    append_text(path, _json_lines(finite))


def _json_lines(lines: Iterable[dict[str, Any]]) -> str:
    return "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines)


def append_text(path: Path, text: str) -> None:
    """Append `text` to a file. It is on the disk when this function returns."""
    try:
        with open_own(path) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written: {error.strerror}; free some space and "
            f"{resume_hint(path.parent)}"
        ) from error


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a log, without an incomplete last one. Other damage is a UserError."""
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


def rewind(run: Path, step: int) -> list[str]:
    """Remove what a run has written after `step`, and what a killed process has not completed.

    Returns warnings about logs that are damaged.
    """
    warnings = []
    for path in (run / name for name in LOGS):
        if path.exists():
            lines = [line for line in read_metrics(path) if line["step"] <= step]
            steps = [line["step"] for line in lines]
            if path.name in ONE_A_STEP and steps != list(range(1, step + 1)):
                warnings.append(
                    f"{path}: lacks steps or has them twice, {len(steps)} lines of {step} steps; "
                    "figures of the run are computed from them"
                )
            # In a damaged log half a character may stand alone, which JSON can escape.
            write_whole(path, _json_lines(lines).encode(errors="backslashreplace"))

    path = run / "samples.log"
    if path.exists():
        # Bytes, because the last line may end in the middle of a character.
        whole = read_bytes(path).rpartition(b"\n")[0]
        entries = re.split(rb"^(?==== step \d+ )", whole, flags=re.M)
        kept = [entry for entry in entries[1:] if int(entry.split(None, 3)[2]) <= step]
        write_whole(path, b"".join(entry.rstrip(b"\n") + b"\n" for entry in kept))

    for path in (run / "rollouts").glob("*.jsonl.zst"):
        name = ROLLOUTS.fullmatch(path.name)
        if name and int(name[2]) > step:
            path.unlink()
    for path in (*run.glob(".*.partial"), *run.glob("rollouts/.*.partial")):
        if not path.name.startswith(".report."):  # which another process may write now
            path.unlink()
    return warnings


# --- rollouts ---------------------------------------------------------------------------------


def write_rollouts(path: Path, groups: Sequence[Group], *, step: int) -> None:
    """Write the groups of one step with a checksum, completely or not at all."""
    numbered = enumerate(groups)
    write_jsonl_zst(path, ({"step": step, "group": n} | _to_json(group) for n, group in numbered))


def _to_json(group: Group) -> dict[str, Any]:
    rows = []
    for sample, (completion, score) in enumerate(zip(group.completions, group.scores)):
        values = completion_values(group, sample)
        # Most runs need neither of these.
        if completion.is_demonstration:
            values["is_demonstration"] = True
        if score.credits is not None:
            values["credits"] = score.credits
        rows.append({name: raw_json(x) if name in RAW else x for name, x in values.items()})
    return {
        **group_values(group),
        "task": group.problem.task,
        "problem": raw_json(dataclasses.asdict(group.problem)),
        "prompt_tokens": group.prompt,
        **({"shots": group.shots} if group.shots else {}),
        "completions": rows,
    }


def groups_of(path: Path) -> list[Group]:
    """Return the groups that a file holds. Raises UserError if it is damaged."""
    groups = []
    for where, line in read_jsonl(path):
        with blaming(f"{where}: is not a group that a run writes"):
            groups.append(_from_json(line))
    if not groups:
        raise UserError(f"{path}: holds no groups")
    return groups


def _from_json(line: dict[str, Any]) -> Group:
    """Return the group of a line. Any exception means that it is not one."""
    rows = line["completions"]
    advantages = [row["advantage"] for row in rows]
    values = {
        **line,
        "prompt": line["prompt_tokens"],
        "scores": rows,
        "class_name": line["class"],
        "action": line["action"],
        "trap": line["trap"],
        "advantages": [] if None in advantages else advantages,
    }
    return msgspec.convert(values, Group)


# --- all that a run writes --------------------------------------------------------------------


class RunFiles:
    """The logs, rollouts and trackers of the run in `folder`."""

    def __init__(self, folder: Path, config: Config):
        self.folder = folder
        self.mark = config.mark
        self.trackers: list[Tracker] = []

    def start_trackers(self, config: Config, done: int, warn: Callable[[str], None]) -> None:
        """Start the trackers. One that fails is left out, with a warning."""
        self.trackers = [
            Tracker(name, self.folder, dataclasses.asdict(config), done, warn)
            for name in names_in(config.track)
        ]

    def write_step(self, report: StepReport) -> None:
        """Write a step to all files that are about it."""
        step, groups = report.step, report.groups
        self.write_rollouts("step", step, groups)
        append_lines(self.folder / "metrics.jsonl", report.metrics)
        self._track(report.metrics)
        self.write_seen(step, dict.fromkeys(group.problem.key for group in groups))
        append_lines(self.folder / "groups.jsonl", {"step": step, "groups": summaries(groups)})
        self.write_decisions(report.decisions)
        if step == 1 or step % SAMPLES_EVERY == 0:
            date = datetime.now(UTC).isoformat(timespec="seconds")
            text = f"=== step {step} {date}\n{best_and_worst(groups)}"
            append_text(self.folder / "samples.log", text)

    def write_seen(self, step: int, keys: Iterable[str], **about: Any) -> None:
        """Write the keys of the problems that a step trained on."""
        append_lines(self.folder / "seen.jsonl", {"step": step, **about, "keys": list(keys)})

    def write_decisions(self, decisions: Sequence[Decision]) -> None:
        """Write decisions to curriculum.jsonl."""
        for decision in decisions:
            append_lines(self.folder / "curriculum.jsonl", {**decision.to_json(), **self.mark})

    def write_evaluations(self, *lines: dict[str, Any]) -> None:
        """Write lines to eval.jsonl, all of them at once."""
        append_lines(self.folder / "eval.jsonl", *lines)
        for line in lines:
            if line["purpose"] != "verdict":
                self._track(line)

    def _track(self, line: dict[str, Any]) -> None:
        for tracker in self.trackers:
            tracker.send(line)

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
        text = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC  {escape_control(line)}\n"
        append_text(self.folder / "warnings.log", text)

    def finish(self) -> None:
        """Close the trackers."""
        for tracker in self.trackers:
            tracker.finish()


class NoFiles:
    """Has the methods of `RunFiles` and writes nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


# --- reading a run ----------------------------------------------------------------------------


class RunData:
    """The stored data of the run in directory `path`, read when it is needed. UserError names a
    damaged file, and what is not there.
    """

    def __init__(self, path: str | Path):
        if not isinstance(path, str | Path):
            raise UserError(f"load_run: the run is {path!r}; give the path of its directory")
        self.path = Path(path)
        if kind_of(self.path) == "folder":
            check_links(self.path)
        if kind_of(self.path / "config.yaml") != "file":
            raise UserError(
                f"{self.path}: not a run (it has no config.yaml); give a directory as runs/NAME"
            )

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved configuration, and the "facts" of the run."""
        return read_config(self.path)

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return read_metrics(self.path / "metrics.jsonl")

    @cached_property
    def evals(self) -> list[dict[str, Any]]:
        """The evaluations: the lines of eval.jsonl except verdicts."""
        lines = read_metrics(self.path / "eval.jsonl")
        return [line for line in lines if line["purpose"] != "verdict"]

    @property
    def verdict(self) -> dict[str, Any] | None:
        """The last verdict on the run (see `grpo.ending`); None if there is none yet."""
        lines = read_metrics(self.path / "eval.jsonl")
        return next((line for line in reversed(lines) if line["purpose"] == "verdict"), None)

    @property
    def reports(self) -> list[dict[str, Any]]:
        """The reported evaluations before, during and after training, without validation checks."""
        return [line for line in self.evals if line["purpose"] == "report"]

    @cached_property
    def decisions(self) -> list[dict[str, Any]]:
        """The lines of curriculum.jsonl."""
        return read_metrics(self.path / "curriculum.jsonl")

    @cached_property
    def group_index(self) -> list[dict[str, Any]]:
        """A record for each group of all steps, see `grpo.records.summaries`."""
        lines = read_metrics(self.path / "groups.jsonl")
        return [{"step": line["step"], **group} for line in lines for group in line["groups"]]

    def steps(self, kind: str = "step") -> list[int]:
        """Return the steps whose rollouts of a `kind`, one of `KINDS`, are stored, rising."""
        if kind not in KINDS:
            raise UserError(f"rollouts of kind {kind!r}: give one of {', '.join(KINDS)}")
        paths = (self.path / "rollouts").glob(f"{kind}-*")
        names = (ROLLOUTS.fullmatch(path.name) for path in paths)
        return sorted(int(name[2]) for name in names if name)

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

        Keys: step, group, sample (both from 0), index, level, temperature, class, action, trap,
        key, prompt, target, text, finish, num_tokens, tokens, logprobs, reward, value, exact,
        parts, and advantage. The advantage is a number, a list with one per token, or None if the
        group was not trained on. A group with the action "demonstrate" comes a second time, as it
        was trained on: its last completion is the right answer, with `is_demonstration`. The other
        columns of a row of the user's own are row/NAME.
        """
        steps = self.steps(kind) if step is None else step
        records = []
        # Numbers of NumPy and of data frames become Python's.
        for each in map(index, steps if isinstance(steps, Iterable) else [steps]):
            drawn = self.groups(each, kind) if group is None else [self.group(each, group, kind)]
            for number, one in enumerate(drawn, start=group or 0):
                about = {"step": each, "group": number, **group_values(one)}
                about |= {name: getattr(one.problem, name) for name in ("key", "prompt", "target")}
                about |= {f"row/{name}": value for name, value in row_of(one.problem).items()}
                for sample, completion in enumerate(one.completions):
                    record = about | {"sample": sample} | completion_values(one, sample)
                    record["num_tokens"] = len(completion.tokens)
                    record["is_demonstration"] = completion.is_demonstration
                    records.append(record)
        return records


load_run = RunData  # as the library calls it


def tokenizer_of(run: Path) -> Any | None:
    """Return the tokenizer of the run's last checkpoint; None if it has no checkpoint."""
    files = sorted((run / "checkpoints").glob("step-*/tokenizer.json"))
    if not files:
        return None
    from tokenizers import Tokenizer

    with blaming(f"{files[-1]}: is not a tokenizer"):
        return Tokenizer.from_file(str(files[-1]))
