"""Every sample of an evaluation as JSON Lines, in the format of lm-evaluation-harness's samples.

A line is a problem. Its fields are those that `lm_eval --log_samples` writes: doc_id, doc, target,
arguments, resps, filtered_resps, filter, metrics, the hashes of doc, prompt and target, and the
mean of each metric under its name. Within a model each problem has a doc_id of its own, whatever
its level, because readers take it for the problem's name; all models share it.
"""

import hashlib
import json
from pathlib import Path
from statistics import fmean
from typing import Any

from data.files import write_whole
from grpo.records import Group


def write_samples(path: Path, results: list[dict[str, Any]]) -> None:
    """Write a line for each problem of each result. Raises UserError if it cannot be written."""
    ids: dict[str, int] = {}
    lines = []
    for result in results:
        for group in result["groups"]:
            number = ids.setdefault(group.problem.key, len(ids))
            lines.append(json.dumps(_line(number, group, result), ensure_ascii=False))
    write_whole(path, "".join(f"{line}\n" for line in lines).encode())


def _line(number: int, group: Group, result: dict[str, Any]) -> dict[str, Any]:
    problem = group.problem
    doc = {
        "key": problem.key,
        "level": problem.level,
        "prompt": problem.prompt,
        "data": dict(problem.data),
    }
    sampling = {
        "temperature": group.temperature,
        "top_p": result["top_p"],
        "max_gen_toks": result["budget"],
        "do_sample": group.temperature > 0,
    }
    return {
        "model": result["model"],
        "task": result["task"],
        "doc_id": number,
        "doc": doc,
        "target": problem.target,
        "arguments": {"gen_args_0": {"arg_0": problem.prompt, "arg_1": sampling}},
        "resps": [group.texts],
        "filtered_resps": group.texts,
        "filter": "none",
        "metrics": ["score", "exact_match"],
        "doc_hash": _hash(json.dumps(doc, sort_keys=True)),
        "prompt_hash": _hash(problem.prompt),
        "target_hash": _hash(problem.target),
        "score": fmean(score.value for score in group.scores),
        "exact_match": fmean(score.exact for score in group.scores),
    }


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
