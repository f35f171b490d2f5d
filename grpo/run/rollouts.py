"""The files in rollouts/, which hold every prompt and completion of a run.

Each step has a file such as step-000001.jsonl.zst; the other `KINDS` are named likewise.

A file has one JSON line for each group, with everything that is needed to replay the update: token
ids; the sampler's log-probabilities, which are stored exactly; the keys of the examples in the
prompt; rewards and their parts; advantages; temperature, class, action and trap. The advantage of a
completion is a number, or a list with one for each token. In the second case the credits that it
comes from are stored as well.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.errors import UserError
from data.files import raw_json, read_jsonl_zst, write_jsonl_zst
from grpo.records import Completion, Group
from grpo.run.schemas import GroupLine, check
from tasks.base import Problem, Score

# Steps, evaluations, validation checks, the pre-flight, the answers that were imitated, the
# evaluation after that, and the batch of a step that failed.
KINDS = ("step", "eval", "promotion", "preflight", "imitation", "imitated", "failed")
_NAME = re.compile(rf"({'|'.join(KINDS)})-(\d+)\.jsonl\.zst")


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
    lines = list(read_jsonl_zst(path))
    if not lines:
        raise UserError(f"{path}: holds no groups")
    for number, line in enumerate(lines, start=1):
        check(f"{path}, line {number}", line, GroupLine)
        _check_lengths(f"{path}, line {number}", line)
    return [_from_json(line) for line in lines]


def _check_lengths(where: str, line: dict[str, Any]) -> None:
    """Raise UserError if what belongs to single tokens is not given for each token."""
    for row in line["completions"]:
        for name in ("logprobs", "advantage"):
            values = row[name]
            is_left_out = name == "logprobs" and row.get("is_demonstration") and not values
            if isinstance(values, list) and len(values) != len(row["tokens"]) and not is_left_out:
                raise UserError(
                    f"{where}: a completion has {len(row['tokens'])} tokens, and {len(values)} "
                    f"numbers in {name}"
                )


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
    """Return the group of a line."""
    rows = line["completions"]
    completions = [
        Completion(
            tuple(row["tokens"]),
            tuple(row["logprobs"]),
            row["text"],
            row["finish"],
            row.get("is_demonstration", False),
        )
        for row in rows
    ]
    scores = [
        Score(row["reward"], row["parts"], row["value"], row["exact"], _credits(row))
        for row in rows
    ]
    advantages = [row["advantage"] for row in rows]

    return Group(
        index=line["index"],
        problem=Problem(**line["problem"]),
        prompt=tuple(line["prompt_tokens"]),
        temperature=line["temperature"],
        attempt=line["attempt"],
        class_name=line["class"],
        action=line["action"],
        completions=completions,
        scores=scores,
        advantages=[] if None in advantages else advantages,
        trap=line["trap"],
        shots=tuple(line.get("shots", ())),
    )


def _credits(row: dict[str, Any]) -> tuple[tuple[int, float], ...] | None:
    if "credits" not in row:
        return None
    return tuple((end, amount) for end, amount in row["credits"])
