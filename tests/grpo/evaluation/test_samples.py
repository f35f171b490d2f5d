"""Samples in the format of lm-evaluation-harness, read as its readers do."""

import json

import pytest

from grpo.records import Completion, Group
from grpo.tools.evaluation.samples import write_samples
from tasks.base import Problem, Score


def result(model, keys, level, texts=("7", "8")):
    """The result of a model at a level, as an evaluation holds it."""
    groups = []
    for key in keys:
        problem = Problem("sums", level, f"What is {key}?", "7", key, {"n": [level]})
        completions = [Completion((1,), (0.0,), text, "stop") for text in texts]
        scores = [Score(float(text == "7"), exact=text == "7") for text in texts]
        groups.append(Group(0, problem, (1,), 1.0, completions, scores=scores))
    return {"model": model, "task": "sums", "groups": groups, "top_p": 1.0, "budget": 16}


def test_readers_of_the_harness_find_what_they_look_for(tmp_path):
    """What its scripts/zeno_visualize.py reads of each line of a task that generates."""
    write_samples(
        tmp_path / "samples.jsonl",
        [
            result("one", ["a", "b"], 1),
            result("one", ["c"], 2),
            result("other", ["a", "b"], 1, texts=("7", "7")),
            result("other", ["c"], 2),
        ],
    )
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    one, other = ([line for line in lines if line["model"] == name] for name in ("one", "other"))
    assert [line["doc_id"] for line in one] == [line["doc_id"] for line in other] == [0, 1, 2]
    for line in lines:
        assert line["arguments"]["gen_args_0"]["arg_0"] == f"What is {line['doc']['key']}?"
        assert line["filtered_resps"] == line["resps"][0] and line["filtered_resps"][0] == "7"
        assert line["target"] == "7" and set(line["metrics"]) <= line.keys()
        assert {len(line[f"{name}_hash"]) for name in ("doc", "prompt", "target")} == {64}
    assert [line["exact_match"] for line in lines] == pytest.approx([0.5] * 3 + [1, 1, 0.5])
