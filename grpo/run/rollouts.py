"""The files in rollouts/: groups with everything that is needed to replay their update.

A file has one JSON line for each group: the problem, the token ids of the prompt, temperature,
class, action and trap, and of each completion its token ids, the sampler's log-probabilities, which
are stored exactly, its text, reward with its parts, and advantage. The advantage is a number, or a
list with one for each token. In the second case the credits that it comes from are stored as well.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from data.errors import UserError, blaming
from data.files import raw_json, read_jsonl_zst, write_jsonl_zst
from grpo.records import Completion, Group, GroupClass
from tasks.base import Problem, Score

# Steps, evaluations, validation checks, the pre-flight, the answers that were imitated, the
# evaluation after that, and the batch of a step that failed.
KINDS = ("step", "eval", "promotion", "preflight", "imitation", "imitated", "failed")
_NAME = re.compile(rf"({'|'.join(KINDS)})-(\d+)\.jsonl\.zst")

_SCORE = ("reward", "parts", "value", "exact", "credits")
_SCORE_TYPES: Any = tuple[float, dict[str, Any], float, bool, tuple[tuple[int, float], ...] | None]


def file_of(run: Path, kind: str, step: int) -> Path:
    """Return the file of a step's rollouts of a `kind`, one of `KINDS`."""
    return Path(run) / "rollouts" / f"{kind}-{step:06d}.jsonl.zst"


def steps_of(run: Path, kind: str = "step") -> list[int]:
    """Return the steps whose rollouts of a `kind` are stored, in rising order."""
    names = (_NAME.fullmatch(path.name) for path in (Path(run) / "rollouts").glob(f"{kind}-*"))
    return sorted(int(name[2]) for name in names if name)


def write_rollouts(path: Path, groups: Sequence[Group], *, step: int) -> None:
    """Write the groups of one step with a checksum, completely or not at all."""
    write_jsonl_zst(path, (_to_json(number, group, step) for number, group in enumerate(groups)))


def groups_of(path: Path) -> list[Group]:
    """Return the groups that a file holds. Raises UserError if it is damaged."""
    lines = read_jsonl_zst(path)
    if not lines:
        raise UserError(f"{path}: holds no groups")
    groups = []
    for number, line in enumerate(lines, start=1):
        with blaming(f"{path}, line {number}: is not a group that a run writes"):
            groups.append(_from_json(line))
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
    """Return the group of a line. Any exception means that it is not one."""
    rows = line["completions"]
    completions = [msgspec.convert(row, Completion) for row in rows]
    advantages = msgspec.convert(
        [row["advantage"] for row in rows], list[float | list[float] | None]
    )
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
