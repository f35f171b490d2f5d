"""Evaluation of a model behind a server: the same problems, patience with failures, one line
for each mistake.
"""

import json
import threading
from collections import Counter
from pathlib import Path

import pytest
from servers import serving
from small_train import fails

from grpo.rollout import server
from grpo.show import console
from grpo.tasks.registry import load_task
from grpo.tasks.supply import problem_at
from grpo.tools import evaluation


def chat(text, finish="stop", tokens=(11, 7)):
    """Return the body of a response with one answer."""
    return {
        "choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": finish}],
        "usage": {"prompt_tokens": tokens[0], "completion_tokens": tokens[1]},
    }


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(server, "PAUSES", (0,) * 6)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def solve(body, number):
    """Answer an interleaving problem rightly."""
    text = body["messages"][-1]["content"]
    a, b = (text.partition(f"\n{name}: ")[2].partition("\n")[0].split() for name in "AB")
    return 200, {}, chat(" ".join(word for pair in zip(a, b) for word in pair))


def ask(url, *flags, status=0):
    arguments = ["--endpoint", url, "--model", "m", "--words", "3", "--problems", "12"]
    assert evaluation.main([*arguments, "--json", "out.json", *flags]) == status
    return json.loads(Path("out.json").read_text()) if status == 0 else None


def test_the_problems_are_those_of_a_local_evaluation():
    assert evaluation.main("--words 3 --problems 12 --json local.json".split()) == 0
    with serving(solve) as (url, log):
        (result,) = ask(url)
    assert result["mean"] == result["exact"] == 1 and result["n"] == 12

    local, remote = json.loads(Path("local.json").read_text())[0]["answers"], result["answers"]
    for one, other in zip(local, remote, strict=True):
        assert one["prompt"] == other["prompt"] and one["target"] == other["target"]
        assert other["completions"] == [other["target"]] and other["exact"] == [True]
    body = log.bodies[0]
    assert body["model"] == "m" and body["temperature"] == 1 and body["max_tokens"] > 32
    assert body["messages"] == [{"role": "user", "content": remote[0]["prompt"]}]
    assert len({body["seed"] for body in log.bodies}) == 12
    assert log.most_at_once <= 8


def test_each_sample_of_a_problem_has_its_own_seed():
    with serving(solve) as (url, log):
        ask(url, "--samples", "2")
        ask(url, "--samples", "2")
        assert len(log.bodies) == 48 and len({body["seed"] for body in log.bodies}) == 24
        ask(url, "--samples", "2", "--seed", "1")
        assert len({body["seed"] for body in log.bodies}) == 48


def test_the_key_is_sent_and_nowhere_else(monkeypatch, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret\r\n")
    with serving(solve) as (url, log):
        ask(url)
    assert {headers["Authorization"] for headers in log.headers} == {"Bearer sk-secret"}
    said = capsys.readouterr()
    files = [path.read_text() for path in Path().rglob("*") if path.is_file()]
    assert not any("sk-secret" in text for text in (said.out, said.err, *files))


def test_failures_that_may_pass_are_tried_again():
    tries = Counter()

    def moody(body, number):
        tries[body["seed"]] += 1
        if tries[body["seed"]] < 4:
            return 429, {}, {"error": {"message": "slow down"}}
        return solve(body, number)

    with serving(moody) as (url, log):
        (result,) = ask(url)
    assert result["mean"] == 1 and len(log.bodies) == 4 * 12


@pytest.mark.parametrize(
    ("behave", "message"),
    [
        (
            lambda *_: (401, {}, {"error": {"message": "bad key"}}),
            'status 401: {"error": {"message": "bad key"}}; give its key in OPENAI_API_KEY',
        ),
        (
            lambda *_: (400, {}, {"error": {"message": "temperature is above 2"}}),
            'status 400: {"error": {"message": "temperature is above 2"}}',
        ),
        (lambda *_: (500, {}, b""), "6 tries failed; the last: status 500: no reason given"),
        (lambda *_: (200, {}, {"choices": []}), "not that of an OpenAI-compatible server"),
        (lambda *_: (200, {}, b""), "not that of an OpenAI-compatible server: it is empty"),
        (lambda *_: (200, {}, b"[" * 200_000), "not that of an OpenAI-compatible server: [["),
        (lambda *_: (200, {}, chat([{"type": "text", "text": "a"}])), "OpenAI-compatible server"),
    ],
)
def test_a_server_that_fails_is_one_line(behave, message, capsys):
    with serving(behave) as (url, _):
        ask(url, status=2)
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("temperature", "Unsupported value: 'temperature' does not support 0.7 with this model."),
        ("seed", "body.seed: Extra inputs are not permitted"),
        ("max_tokens", "'max_tokens' is not supported. Use 'max_completion_tokens' instead."),
    ],
)
def test_what_a_server_refuses_is_left_out(name, words, capsys):
    def strict(body, number):
        return (400, {}, {"error": {"message": words}}) if name in body else solve(body, number)

    with serving(strict) as (url, log):
        (result,) = ask(url)
    assert result["mean"] == 1 and result["refused"] == [name] and len(log.bodies) == 13
    assert ("max_completion_tokens" in log.bodies[-1]) == (name == "max_tokens")
    said = capsys.readouterr()
    assert said.err.count(f"the server refuses {name}; asking with ") == 1
    assert ("the server's" in said.out) == (name == "temperature")


def test_of_two_values_that_are_refused_together_the_temperature_stays(capsys):
    def strict(body, number):
        words = "`temperature` and `top_p` cannot both be specified for this model."
        return (400, {}, words) if {"temperature", "top_p"} <= body.keys() else solve(body, number)

    with serving(strict) as (url, _):
        assert ask(url, "--top-p", "0.9")[0]["refused"] == ["top_p"]
    assert "T 1 " in capsys.readouterr().out


def test_reasoning_is_stripped_and_empty_answers_are_counted(capsys):
    def think(body, number):
        status, headers, answer = solve(body, number)
        right = answer["choices"][0]["message"]["content"]
        texts = [None, "<think>\nPerhaps", f"<think>\nPerhaps\n</think>\n\n{right}"]
        return status, headers, chat(texts[min(number, 3) - 1], ["stop", "length"][number == 2])

    with serving(think) as (url, _):
        (result,) = ask(url, "--strip-reasoning")
    assert result["empty"] == 2 and result["exact"] == 10 / 12 and result["truncated"] == 1 / 12
    assert "2 of 12 answers are empty" in capsys.readouterr().out


@pytest.mark.parametrize("sends_spaces", [False, True])
def test_a_long_wait_is_shown_and_ended(sends_spaces, monkeypatch, capsys):
    monkeypatch.setattr(server, "PAUSES", (0, 0))
    monkeypatch.setattr(console, "EVERY", 0)
    left = threading.Event()

    def wait(*_):
        spaces = (b" " for _ in range(60) if not left.wait(0.1))
        return 200, {}, spaces if sends_spaces else chat("late" * left.wait(6))

    with serving(wait) as (url, _):
        ask(url, "--timeout", "1", status=2)
        left.set()
    error = capsys.readouterr().err
    assert "m, level 3: asking 0/12, 0 s" in error
    assert "asking again (no answer within --timeout 1 s) 0/12" in error
    assert "2 tries failed; the last: no answer within --timeout 1 s" in error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--endpoint", "localhost:8000"], "give an address such as"),
        (["--endpoint", "http://key@host/v1"], "give the key in OPENAI_API_KEY"),
        (["--endpoint", "http://host/v1", "--timeout", "0"], "--timeout 0.0: give 1 or more"),
        (["--strip-reasoning"], "give --endpoint as well"),
    ],
)
def test_mistakes_in_flags_are_one_line(flags, message, capsys):
    assert message in fails(capsys, *flags, main=evaluation.main)


def test_several_models_are_compared_on_the_same_problems(capsys):
    def by_name(body, number):
        status, headers, answer = solve(body, number)
        return status, headers, answer if body["model"] == "m" else chat("no")

    with serving(by_name) as (url, _):
        good, bad = ask(url, "--model", "other")
    assert (good["model"], bad["model"]) == ("m", "other")
    assert good["mean"] == 1 and bad["mean"] < 0.3
    said = capsys.readouterr().out
    assert "difference to m" in said and f"{bad['mean'] - 1:+.4f}" in said

    found = bad["difference"]
    assert "difference" not in good and (found["to"], found["n"]) == ("m", bad["n"])
    assert found["ci_low"] <= found["mean"] < found["ci_high"]
    assert found["mean"] == pytest.approx(bad["mean"] - 1)


def test_the_turns_of_the_prompt_are_sent():
    with serving(solve) as (url, log):
        variables = "--chat-template-kwargs", '{"enable_thinking": false}'
        ask(url, "--system", "Be brief.", "--shots", "1", "--problems", "1", *variables)
    assert log.bodies[0]["chat_template_kwargs"] == {"enable_thinking": False}
    roles = [turn["role"] for turn in log.bodies[0]["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    first = problem_at(load_task("interleave"), seed=0, split="test", level=3, index=0)
    assert log.bodies[0]["messages"][-1]["content"] == first.prompt
