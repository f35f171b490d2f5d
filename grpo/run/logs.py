"""The files that a run writes as it goes on, and how they are read back.

| file | holds |
|---|---|
| metrics.jsonl, eval.jsonl, curriculum.jsonl | a line for each step, evaluation and decision |
| seen.jsonl, groups.jsonl | the keys of the problems, and a summary of each group, by step |
| samples.log, warnings.log, prompt.txt | text for people |
| rollouts/step-000001.jsonl.zst ... | every prompt and completion; the other `KINDS` likewise |

A file in rollouts/ has one JSON line for each group, with everything that is needed to replay the
update: token ids; the sampler's log-probabilities, which are stored exactly; the keys of the
examples in the prompt; rewards and their parts; advantages; temperature, class, action and trap.
The advantage of a completion is a number, or a list with one for each token. In the second case the
credits that it comes from are stored as well.

Rank 0 writes with `RunFiles`; the other ranks have `NoFiles`. Readers check what they read, so that
a damaged or foreign file is one line that names it.
"""

import dataclasses
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from data.errors import UserError
from data.files import (
    open_own,
    raw_json,
    read_bytes,
    read_jsonl_zst,
    write_jsonl_zst,
    write_whole,
    wrong_lines,
)
from data.text import escape_control
from grpo.config import Config
from grpo.records import Completion, Decision, Group, GroupClass, StepReport
from grpo.run.folders import resume_hint
from grpo.run.trackers import Trackers
from grpo.show.group import best_and_worst, summaries
from tasks.base import Problem, Score

SAMPLES_EVERY = 10  # steps between entries of samples.log

# Steps, evaluations, validation checks, the pre-flight, the answers that were imitated, the
# evaluation after that, and the batch of a step that failed.
KINDS = ("step", "eval", "promotion", "preflight", "imitation", "imitated", "failed")
_NAME = re.compile(rf"({'|'.join(KINDS)})-(\d+)\.jsonl\.zst")

# --- what a line may hold ---------------------------------------------------------------------

Number = int | float

_TEXTS = (
    "time control purpose task unit split metric verdict stopped mistake next_command cause remedy "
    "trap degenerate kind why"
).split()

# The values in a log that are not numbers, or that are whole ones.
VALUES: dict[str, Any] = dict.fromkeys(_TEXTS, str) | {
    "step": int,
    "level": int,
    "levels": dict[str, dict[str, Any]],
    "group_std/hist": dict[str, int],
    "parity/worst": list[dict[str, Number]],
    "events": list[str],
    "figures": dict[str, Any],
    "keys": list[str],
    "groups": list[dict[str, Any]],
}

# The values in a group of groups.jsonl.
SUMMARY: dict[str, Any] = {
    **dict.fromkeys(("group", "index", "attempt", "level", "distinct", "tokens"), int),
    **dict.fromkeys(("temperature", "reward", "reward_std", "value", "exact"), Number),
    "class": GroupClass,
    "action": str,
    "trap": str | None,
}

# What each line of a log must have besides "step".
REQUIRED = {
    "eval.jsonl": ("purpose",),
    "curriculum.jsonl": ("from", "to", "kind", "why"),
    "seen.jsonl": ("keys",),
    "groups.jsonl": ("groups",),
}


def check(where: str, value: Any, kind: Any) -> None:
    """Raise UserError, which begins with `where`, unless the JSON `value` has the type `kind`."""
    try:
        msgspec.convert(value, kind)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # the latter: a lone surrogate
        reason = str(error).replace("`", "").replace(" - at $", " at ")
        raise UserError(
            f"{where}: is not what a run writes ({reason[0].lower()}{reason[1:]})"
        ) from error


def _check_line(where: str, log: str, line: Mapping[str, Any]) -> None:
    """Raise UserError unless `line` is a line of the file `log`."""
    require(where, line, REQUIRED.get(log, ()))
    _check_values(where, line, VALUES)
    for group in line["groups"] if log == "groups.jsonl" else ():
        require(where, group, SUMMARY)
        _check_values(where, group, SUMMARY)


def require(where: str, line: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise UserError, which begins with `where`, unless `line` has a value of each name."""
    for name in names:
        if name not in line:
            raise UserError(f"{where}: is not what a run writes (it has no {name})")


def _check_values(where: str, line: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    for name, value in line.items():
        if name in kinds or not (type(value) is float or value is None):
            check(f"{where}, {name}", value, kinds.get(name, Number | bool))


# --- logs -------------------------------------------------------------------------------------


class MetricsLog:
    """A file of JSON Lines, each with a "step". Lines are on the disk when `append` returns."""

    def __init__(self, folder: Path, name: str = "metrics.jsonl"):
        self.path = Path(folder) / name

    def append(self, *lines: dict[str, Any]) -> None:
        """Write lines at once. JSON has no NaN or infinity, so such numbers become null."""
        texts = [json.dumps(_finite(line), ensure_ascii=False, allow_nan=False) for line in lines]
        append(self.path, "".join(f"{text}\n" for text in texts))

    def truncate_after(self, step: int) -> None:
        """Drop the lines of later steps, which are made again, and an incomplete last line."""
        if self.path.exists():
            kept = [line for line in read_metrics(self.path) if line["step"] <= step]
            texts = [json.dumps(line, ensure_ascii=False) for line in kept]
            write_whole(self.path, "".join(f"{text}\n" for text in texts).encode())


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a log, without an incomplete last one.

    Raises UserError, which names the line, if the log is damaged in any other way.
    """
    path = Path(path)
    if not path.exists():
        return []
    lines = []
    for number, text in enumerate(_whole_lines(path), start=1):
        where = f"{path}, line {number}"
        try:
            # msgspec also refuses NaN and lone surrogates, which no log contains.
            line = msgspec.json.decode(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: is not JSON ({error})") from error
        if not isinstance(line, dict) or not isinstance(line.get("step"), int):
            raise UserError(f'{where}: has no whole number "step"; the file is not a log of a run')
        _check_line(where, path.name, line)
        lines.append(line)
    return lines


class SamplesLog:
    """samples.log: the best and the worst completion of every `every`-th step."""

    HEAD = re.compile(rb"^=== step (\d+) ")

    def __init__(self, folder: Path, every: int = SAMPLES_EVERY):
        self.path = Path(folder) / "samples.log"
        self.every = every

    def append(self, step: int, groups: Sequence[Group]) -> None:
        """Write the best and the worst completion of every `every`-th step and of the first."""
        if step % self.every and step != 1:
            return

        date = datetime.now(UTC).isoformat(timespec="seconds")
        append(self.path, f"=== step {step} {date}\n{best_and_worst(groups)}")

    def truncate_after(self, step: int) -> None:
        """Drop the entries of later steps, and an incomplete last line."""
        if not self.path.exists():
            return

        kept = []
        is_kept = True
        for line in _whole_lines(self.path):
            if head := self.HEAD.match(line):
                is_kept = int(head[1]) <= step
            if is_kept:
                kept.append(line + b"\n")
        write_whole(self.path, b"".join(kept))


def append(path: Path, text: str) -> None:
    """Append `text` to a file. It is on the disk when this function returns.

    Raises UserError if it cannot be written.
    """
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


def _whole_lines(path: Path) -> list[bytes]:
    """Return the lines of a log as bytes, without an incomplete last one.

    The file is not decoded, because the last line may end in the middle of a character.
    """
    return read_bytes(path).split(b"\n")[:-1]


def _finite(value: Any) -> Any:
    """Return a JSON value with None in place of NaN and infinity."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- rollouts ---------------------------------------------------------------------------------


def file_of(run: Path, kind: str, step: int) -> Path:
    """Return the file of a step's rollouts of a `kind`, one of `KINDS`."""
    return Path(run) / "rollouts" / f"{kind}-{step:06d}.jsonl.zst"


def steps_of(run: Path, kind: str = "step") -> list[int]:
    """Return the steps whose rollouts of a `kind` are stored, in rising order."""
    names = (_NAME.fullmatch(path.name) for path in (Path(run) / "rollouts").glob(f"{kind}-*"))
    return sorted(int(name[2]) for name in names if name)


def write_rollouts(path: Path, groups: Sequence[Group], *, step: int) -> None:
    """Write the groups of one step with a checksum, completely or not at all.

    Raises UserError if they cannot be written.
    """
    write_jsonl_zst(path, (_to_json(number, group, step) for number, group in enumerate(groups)))


def groups_of(path: Path) -> list[Group]:
    """Return the groups that a file holds. Raises UserError if it is damaged."""
    lines = read_jsonl_zst(path)
    if not lines:
        raise UserError(f"{path}: holds no groups")
    groups = []
    for number, line in enumerate(lines, start=1):
        try:
            groups.append(_from_json(line))
        except (msgspec.ValidationError, KeyError, ValueError, TypeError) as error:
            raise UserError(
                f"{path}, line {number}: is not a group that a run writes "
                f"({type(error).__name__}: {error})"
            ) from error
    return groups


def remove_after(run: Path, step: int) -> None:
    """Remove the files of steps after `step`, because they are made again."""
    for path in (Path(run) / "rollouts").glob("*.jsonl.zst"):
        name = _NAME.fullmatch(path.name)
        if name and int(name[2]) > step:
            path.unlink()


def _to_json(number: int, group: Group, step: int) -> dict[str, Any]:
    """Return the line of a group."""
    advantages = group.advantages or [None] * len(group.completions)
    return {
        "step": step,
        "group": number,
        "index": group.index,
        "attempt": group.attempt,
        "task": group.problem.task,
        "level": group.problem.level,
        "temperature": group.temperature,
        "class": group.class_name,
        "action": group.action,
        "trap": group.trap,
        "problem": raw_json(group.problem.to_json()),
        "prompt_tokens": group.prompt,
        **({"shots": group.shots} if group.shots else {}),
        "completions": [
            _completion_to_json(completion, score, advantage)
            for completion, score, advantage in zip(
                group.completions, group.scores, advantages, strict=True
            )
        ],
    }


def _completion_to_json(completion: Completion, score: Score, advantage: Any) -> dict[str, Any]:
    """Return a completion in a line. Keys that most runs do not need are left out of theirs."""
    values = {
        "tokens": completion.tokens,
        "logprobs": raw_json(completion.logprobs),
        "text": raw_json(completion.text),
        "finish": completion.finish,
        "reward": score.reward,
        "value": score.value,
        "exact": score.exact,
        "advantage": raw_json(advantage),
        "parts": raw_json(dict(score.parts)),
    }
    if completion.is_demonstration:
        values["is_demonstration"] = True
    if score.credits is not None:
        values["credits"] = raw_json(score.credits)
    return values


def _from_json(line: dict[str, Any]) -> Group:
    """Return the group of a line.

    Raises ValueError, KeyError, TypeError or msgspec.ValidationError if it is not one.
    """
    rows = line["completions"]
    completions = [msgspec.convert(row, Completion) for row in rows]
    advantages = msgspec.convert(
        [row["advantage"] for row in rows], list[float | list[float] | None]
    )
    for completion, advantage in zip(completions, advantages, strict=True):
        per_token = [advantage] if isinstance(advantage, list) else []
        if completion.logprobs or not completion.is_demonstration:
            per_token.append(list(completion.logprobs))
        if any(len(values) != len(completion.tokens) for values in per_token):
            raise ValueError("a completion has another number of tokens than of their numbers")

    return Group(
        index=msgspec.convert(line["index"], int),
        problem=msgspec.convert(line["problem"], Problem),
        prompt=msgspec.convert(line["prompt_tokens"], tuple[int, ...]),
        temperature=msgspec.convert(line["temperature"], float),
        attempt=msgspec.convert(line["attempt"], int),
        class_name=msgspec.convert(line["class"], GroupClass),
        action=msgspec.convert(line["action"], str),
        completions=completions,
        scores=[
            Score(*msgspec.convert([row.get(name) for name in _SCORE], _SCORE_TYPES))
            for row in rows
        ],
        advantages=[] if None in advantages else advantages,  # type: ignore[arg-type]  # no None
        trap=msgspec.convert(line["trap"], str | None),
        shots=msgspec.convert(line.get("shots", ()), tuple[str, ...]),
    )


_SCORE = ("reward", "parts", "value", "exact", "credits")
_SCORE_TYPES: Any = tuple[float, dict[str, Any], float, bool, tuple[tuple[int, float], ...] | None]


# --- all of them ------------------------------------------------------------------------------


class RunFiles:
    """The logs and rollouts of the run in `folder`, which has made `done` steps, and its trackers.

    `warn` shows a warning.
    """

    def __init__(self, folder: Path, config: Config, done: int, warn: Callable[[str], None]):
        self.folder = folder
        self.mark = config.mark
        self.warn = warn
        self.metrics = MetricsLog(folder)
        self.evals = MetricsLog(folder, "eval.jsonl")
        self.seen = MetricsLog(folder, "seen.jsonl")
        self.decisions = MetricsLog(folder, "curriculum.jsonl")
        self.groups = MetricsLog(folder, "groups.jsonl")
        self.samples = SamplesLog(folder)
        self.trackers = Trackers(config.track, folder, dataclasses.asdict(config), done, warn)

    def write_inherited_keys(self, keys: Sequence[str]) -> None:
        """Write the keys of problems that an earlier run was trained on, under step 0."""
        self.seen.append({"step": 0, "keys": list(keys)})

    def write_step(self, report: StepReport) -> None:
        """Write a step: rollouts, metrics, problem keys, groups, decisions and samples."""
        self.write_rollouts("step", report.step, report.groups)
        self.metrics.append(report.metrics)
        is_sampled = report.step == 1 or report.step % SAMPLES_EVERY == 0
        self.trackers.step(report, with_samples=is_sampled)
        keys = dict.fromkeys(group.problem.key for group in report.groups)
        self.seen.append({"step": report.step, "keys": list(keys)})
        self.groups.append({"step": report.step, "groups": summaries(report.groups)})
        self.write_decisions(report.decisions)
        self.samples.append(report.step, report.groups)

    def write_imitation(self, groups: list[Group]) -> None:
        """Write the right answers that were imitated before the first step, and their keys."""
        self.write_rollouts("imitation", 0, groups)
        keys = [group.problem.key for group in groups]
        self.seen.append({"step": 0, "imitated": True, "keys": keys})

    def write_decisions(self, decisions: Sequence[Decision]) -> None:
        """Write decisions to curriculum.jsonl."""
        for decision in decisions:
            self.decisions.append({**decision.to_json(), **self.mark})

    def write_evaluations(self, lines: Sequence[dict[str, Any]]) -> None:
        """Write lines to eval.jsonl, all of them at once."""
        self.evals.append(*lines)
        for line in lines:
            self.trackers.evaluated(line)

    def write_verdict(self, verdict: dict[str, Any]) -> None:
        """Append the verdict to eval.jsonl."""
        self.evals.append({**verdict, **self.mark})

    def write_rollouts(self, kind: str, step: int, groups: list[Group]) -> None:
        """Write groups of a kind (`KINDS`) with all their texts to rollouts/."""
        try:
            write_rollouts(file_of(self.folder, kind, step), groups, step=step)
        except UserError as error:
            raise UserError(f"{error}; {resume_hint(self.folder)}") from error

    def rewind(self, done: int) -> None:
        """Remove everything about steps after `done`, because they are made again."""
        for log in (self.metrics, self.evals, self.seen, self.decisions, self.groups, self.samples):
            log.truncate_after(done)
        remove_after(self.folder, done)
        self.warn_of_damage(done)

    def warn_of_damage(self, done: int) -> None:
        """Warn of each log that lacks a line on one of `done` steps, or has it twice."""
        for log in (self.metrics, self.seen, self.groups):
            found = [f"step {line['step']}" for line in read_metrics(log.path) if line["step"]]
            for damage in wrong_lines(found, [f"step {step}" for step in range(1, done + 1)]):
                self.warn(f"{log.path}: is damaged: it {damage}; figures from it are wrong")

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
