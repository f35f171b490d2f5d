"""Small runs for the tests of the report, and what their pages hold."""

import json
import re

from screens import evaluation

from grpo import report
from grpo.records import Completion, Decision, Group
from grpo.run.logs import append_lines, file_of, load_run, write_rollouts
from grpo.tasks.base import Problem, Score

EVIL = "<script>alert(1)</script>"
STEPS = 6


def group(*rows, target="a b c d", advantages=(), key="k", **facts):
    """Return a group whose completions are (text, reward)."""
    scores = [Score(reward, {"matches": len(text.split()), "trap": None}) for text, reward in rows]
    completions = [Completion((7, 8, 3), (-0.5, -0.25, -2.5), text, "stop") for text, _ in rows]
    return Group(
        0,
        Problem("t", 4, "Do <b>it</b>\n\x1b[31mnow", target, key),
        (1, 2),
        1.0,
        completions,
        scores=scores,
        advantages=list(advantages),
        **facts,
    )


def metrics_of(step, **more):
    return {
        "step": step,
        "reward": step / 10,
        "group_std": 0.1,
        "level": 4,
        "temperature": 1.0,
        "num_tokens": 100 * step,
        "step_time": 1.5,
        "groups/count": 2,
        "groups/class/varied": 2,
        "groups/class/failed": 0,
        "time/rollout": 1.0,
        "time/update": 0.5,
        "levels": {},
        **more,
    }


def make_run(folder, *, steps=STEPS, control="none"):
    """Write a run by the project's own writers: two groups a step, a decision at step 3,
    evaluations before and after.
    """
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.yaml").write_text(
        f"task: t\nlevel: 4\nreward: prefix\nmodel: builtin\ncontrol: {control}\nname: '{EVIL}'\n"
        "facts: {torch: 2.13.0, device: cpu, threads: 2}\n"
    )
    for step in range(1, steps + 1):
        append_lines(folder / "metrics.jsonl", metrics_of(step))
        varied = group(
            (f"a b c d{step}", 0.75), ("a x c", 0.25), (EVIL, 0.0), advantages=[1.0, -0.25, -0.75]
        )
        about = {"class_name": "solved", "action": "skip", "trap": "copies A"}
        solved = group(("a b c d", 1.0), ("a b c d", 1.0), **about)
        write_rollouts(file_of(folder, "step", step), [varied, solved], step=step)
    for step, mean in ((0, 0.1), (steps, 0.9)):
        line = evaluation(4, mean, step=step, metric="similarity", exact=mean, n=20)
        append_lines(folder / "eval.jsonl", line)
    decision = Decision(3, 3, 4, "open", f"mean 0.9 {EVIL}")
    append_lines(folder / "curriculum.jsonl", decision.to_json())
    return folder


def page_of(folder, *others, **arguments):
    return report.page(
        [load_run(path) for path in (folder, *others)], **{"budget": 10**6, **arguments}
    )


def data_of(page):
    """Return the JSON blocks of a page by id, read as a browser does: an element ends at the first
    "</script".
    """
    return {
        name: json.loads(text)
        for name, text in re.findall(
            r'<script type="application/json" id="([\w-]+)">(.*?)</script', page, re.DOTALL
        )
    }
