"""A chat template that opens the reasoning itself: an answer before its end is none."""

import json
from pathlib import Path

import pytest
from small_evaluations import evaluated

from grpo.records import Completion
from grpo.run.logs import load_run
from grpo.tools import train

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
UNCLOSED = "Perhaps this:\nAnswer: 7\nBut wait"
CLOSED = "Perhaps this.\n</think>\nAnswer: 7"


def writes(text):
    """A `generate` that always writes `text`."""

    def generate(policy, request, *others):
        tokens = (*policy.target_tokens(text), policy.end)
        completion = Completion(tokens, (0.0,) * len(tokens), text, "stop")
        return [[completion] * len(keys) for keys in request.keys]

    return generate


@pytest.fixture()
def says(tiny_model, monkeypatch):
    """Return a function that lets every completion of the model in `model` be a text."""
    shown = Path("model")
    shown.mkdir()
    for file in Path(tiny_model).iterdir():
        (shown / file.name).symlink_to(file)
    (shown / "chat_template.jinja").unlink(missing_ok=True)
    (shown / "chat_template.jinja").write_text(TEMPLATE)

    def let_say(text):
        monkeypatch.setattr("grpo.rollout.generate.generate", writes(text))

    return let_say


def gsm8k():
    """Problems whose answer is 7, in a folder."""
    rows = [
        {"question": f"Eve has {n} pens and buys {7 - n} more. How many?", "answer": "So. #### 7"}
        for n in range(-40, 7)
    ]
    Path("gsm").mkdir()
    for name in ("train", "test"):
        lines = [json.dumps(row) + "\n" for row in rows]
        Path(f"gsm/{name}.jsonl").write_text("".join(lines[name == "test" :: 2]))
    return "gsm8k:gsm"


@pytest.mark.parametrize(("text", "right"), [(UNCLOSED, 0), (CLOSED, 1)])
def test_reasoning_that_is_never_closed_holds_no_answer(says, text, right):
    says(text)
    task = gsm8k()
    flags = "--steps 1 --prompts 2 --group-size 2 --eval-problems 2 --lora-rank 0 --device cpu"
    assert train.main([*flags.split(), "--model", "model", "--task", task, "--name", "a"]) in (0, 3)

    run = load_run("runs/a")
    for kind, step in (("preflight", 0), ("eval", 0), ("step", 1)):
        scores = [score for group in run.groups(step, kind) for score in group.scores]
        assert {(score.reward, score.exact) for score in scores} == {(right, bool(right))}, kind

    (line,) = evaluated("--model", "model", "--task", task, "--problems", "4", "--samples", "2")
    assert line["mean"] == line["exact"] == right
