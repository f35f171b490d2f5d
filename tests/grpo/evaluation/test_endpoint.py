"""Evaluation of a model behind a server: the same problems, patience with failures, no answer asked
for twice, one line for each mistake.
"""

import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from chat_server import chat, serving

from grpo import load_model
from grpo.tools.evaluation import endpoint
from grpo.tools.evaluation import program as evaluation
from grpo.tools.evaluation.answers import AnswerFile, ServerAnswer
from tasks.registry import load_task
from tasks.supply import problem_at

TOP = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(endpoint, "FIRST_PAUSE", 0.01)
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


def test_the_problems_and_figures_are_those_of_a_local_evaluation():
    assert evaluation.main("--words 3 --problems 12 --out local.jsonl".split()) == 0
    with serving(solve) as (url, log):
        (result,) = ask(url, "--out", "remote.jsonl")
    assert result["mean"] == result["exact"] == 1 and result["n"] == 12
    assert result["prompt_tokens"] == 12 * 11 and result["completion_tokens"] == 12 * 7

    local, remote = (
        [json.loads(line) for line in Path(f"{name}.jsonl").read_text().splitlines()]
        for name in ("local", "remote")
    )
    for one, other in zip(local, remote, strict=True):
        assert one["doc"] == other["doc"] and one["target"] == other["target"]
        assert other["resps"] == [[other["target"]]] and other["exact_match"] == 1
    body = log.bodies[0]
    assert body["model"] == "m" and body["temperature"] == 1 and body["max_tokens"] > 32
    assert body["messages"] == [{"role": "user", "content": remote[0]["doc"]["prompt"]}]
    assert len({body["seed"] for body in log.bodies}) == 12
    assert log.most_at_once <= 8


def test_no_answer_is_asked_for_twice():
    with serving(solve) as (url, log):
        first = ask(url)
        assert len(log.bodies) == 12
        assert ask(url) == first and len(log.bodies) == 12
        ask(url, "--samples", "2")
        assert len(log.bodies) == 24  # the first sample of each problem is known
        ask(url, "--system", "Be brief.")
        ask(url, "--temperature", "0.5")
        assert len(log.bodies) == 48  # other questions
        path = Path("runs/endpoint/m.jsonl")
        whole = path.read_bytes()
        path.write_bytes(whole[:-20])  # the program was killed while it wrote
        ask(url, "--temperature", "0.5")
        assert len(log.bodies) == 49
        assert len(path.read_bytes().splitlines()) == 48
        for line in path.read_text().splitlines():
            json.loads(line)


def test_each_seed_has_answers_of_its_own(tmp_path, capsys):
    rows = tmp_path / "problems.jsonl"
    rows.write_text(
        "".join(
            json.dumps(load_task("interleave").make(3, "test", random.Random(i)).to_json()) + "\n"
            for i in range(4)
        )
    )
    with serving(solve) as (url, log):
        ask(url, "--dataset", str(rows), "--problems", "4")
        assert len(log.bodies) == 4
        ask(url, "--dataset", str(rows), "--problems", "4", "--seed", "1")
        assert len(log.bodies) == 8 == len({body["seed"] for body in log.bodies})
        capsys.readouterr()
        ask(url, "--dataset", str(rows), "--problems", "4")
        assert len(log.bodies) == 8
        assert "eval.py: 4 answers are from runs/endpoint/m.jsonl\n" in capsys.readouterr().err


def test_two_programs_add_answers_to_one_file(tmp_path):
    path = tmp_path / "answers.jsonl"
    one, other = AnswerFile(path), AnswerFile(path)
    for name, file in (("a", one), ("b", one), ("c", other), ("d", one)):
        file.add(name, ServerAnswer(name, False, 1, 1))
    path.write_bytes(path.read_bytes() + b'{"id": "e", "te')  # a program was killed
    again = AnswerFile(path)
    assert [again.get(name).text for name in "abcd"] == [*"abcd"] and again.get("e") is None
    again.add("f", ServerAnswer("f", False, 1, 1))
    assert AnswerFile(path).get("f").text == "f" and len(path.read_bytes().splitlines()) == 5


@pytest.mark.parametrize("key", ["sk-é", "sk-1\n2"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(monkeypatch, capsys, key):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with serving(solve) as (url, log):
        ask(url, status=2)
    error = capsys.readouterr().err
    assert "OPENAI_API_KEY: has characters that no header can hold" in error and "sk" not in error
    assert not log.bodies


def test_white_space_around_the_key_is_left_out(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1\r\n")
    with serving(solve) as (url, log):
        ask(url)
    assert len(log.bodies) == 12


def test_an_argument_that_the_server_does_not_know_is_said(capsys):
    def plain(body, number):
        if "top_k" in body:
            return 400, {}, {"error": {"message": "unknown argument 'top_k'"}}
        return solve(body, number)

    with serving(plain) as (url, _):
        (result,) = ask(url, "--top-k", "5")
    assert result["left_out"] == ["top_k"]
    assert "the server does not know top_k, so it was left out" in capsys.readouterr().out


def test_failures_that_may_pass_are_tried_again():
    tries = Counter()

    def moody(body, number):
        tries[body["seed"]] += 1
        if tries[body["seed"]] < 4:
            return (429, {"Retry-After": "0.01"}, {"error": {"message": "slow down"}})
        return solve(body, number)

    with serving(moody) as (url, log):
        (result,) = ask(url)
    assert result["mean"] == 1 and result["failed"] == 0
    assert len(log.bodies) == 4 * 12


def test_problems_whose_requests_fail_are_left_out_and_said(capsys):
    def broken(body, number):
        if int(body["seed"]) % 4 == 1:
            return 503, {}, b"<html>busy</html>"
        return solve(body, number)

    with serving(broken) as (url, _):
        arguments = ["--endpoint", url, "--model", "m", "--words", "3", "--problems", "12"]
        status = evaluation.main([*arguments, "--json", "out.json"])
    said = capsys.readouterr()
    if status == 2:  # the first request was one of them
        assert "6 tries failed; the last: status 503: <html>busy</html>" in said.err
    else:
        (result,) = json.loads(Path("out.json").read_text())
        assert result["failed"] == 12 - result["n"] and result["mean"] == 1
        assert result["failed"] == 0 or f"{result['failed']} requests failed" in said.out


@pytest.mark.parametrize(
    ("behave", "message"),
    [
        (lambda *_: (401, {}, {"error": {"message": "bad key"}}), "status 401: bad key"),
        (lambda *_: (404, {}, {"detail": "no model m"}), "status 404: "),
        (lambda *_: (500, {}, b""), "6 tries failed; the last: status 500: no reason given"),
        (lambda *_: (200, {}, b"<html>hello</html>"), "not that of an OpenAI-compatible server"),
        (lambda *_: (200, {}, {"choices": []}), "not that of an OpenAI-compatible server"),
        (lambda *_: (200, {}, b"x" * (1 << 25)), "more than 16 MiB"),
        (lambda *_: (200, {}, b""), "not that of an OpenAI-compatible server: it is empty"),
        (lambda *_: (200, {}, b"[" * 200_000), "not that of an OpenAI-compatible server: [["),
        (lambda *_: (200, {}, chat([{"type": "text", "text": "a"}])), "OpenAI-compatible server"),
        (lambda *_: (200, {}, chat("a", tokens=(math.inf, 1))), "OpenAI-compatible server"),
        (
            lambda *_: (308, {"Location": "https://x/v1/chat/completions"}, b""),
            "status 308: it has moved to https://x/v1/chat/completions; give that address",
        ),
    ],
)
def test_a_server_that_fails_is_one_line(behave, message, capsys):
    with serving(behave) as (url, _):
        ask(url, status=2)
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not Path("runs/endpoint/m.jsonl").exists()


def test_half_of_a_surrogate_pair_is_replaced(capsys):
    with serving(lambda *_: (200, {}, chat("cut \ud83d off"))) as (url, _):
        ask(url, "--out", "samples.jsonl")
        stored = json.loads(Path("runs/endpoint/m.jsonl").read_text().splitlines()[0])
        assert stored["text"] == "cut \ufffd off"
    assert "cut \ufffd off" in Path("samples.jsonl").read_text()
    assert "cut \ufffd off" in capsys.readouterr().out


def test_a_server_that_counts_no_tokens_is_not_said_to_have_counted_none(capsys):
    def uncounted(body, number):
        status, headers, answer = solve(body, number)
        return status, headers, answer | {"usage": None}

    with serving(uncounted) as (url, _):
        ask(url)
    assert "level 3: the server counted no tokens\n" in capsys.readouterr().out


def test_no_server_is_one_line(capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ask(f"http://127.0.0.1:{port}", status=2)
    error = capsys.readouterr().err
    assert f"http://127.0.0.1:{port}/v1/chat/completions: 6 tries failed" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--endpoint", "localhost:8000"], "give an address such as"),
        (["--endpoint", "http://key@host/v1"], "give the key in OPENAI_API_KEY"),
        (["--answers", "x"], "only with --endpoint"),
        (["--endpoint", "http://h", "--concurrency", "0"], "give 1 or more"),
        (["--endpoint", "http://h", "--answers", "text.txt"], "text.txt"),
    ],
)
def test_mistakes_in_flags_are_one_line(flags, message, capsys):
    Path("text.txt").write_text("my diary\nwithout an end")
    assert evaluation.main(flags) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert Path("text.txt").read_text() == "my diary\nwithout an end"


def test_the_key_is_sent_and_nowhere_else(monkeypatch, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    with serving(solve) as (url, log):
        ask(url, "--out", "samples.jsonl")
    assert {headers["Authorization"] for headers in log.headers} == {"Bearer sk-secret"}
    said = capsys.readouterr()
    files = [path.read_text() for path in Path().rglob("*") if path.is_file()]
    assert not any("sk-secret" in text for text in (said.out, said.err, *files))


def test_arguments_that_a_server_does_not_know_are_left_out():
    def strict(body, number):
        if "max_tokens" in body:
            return 400, {}, {"error": {"message": "use 'max_completion_tokens'"}}
        if "seed" in body:
            return 400, {}, {"error": {"message": "unknown argument 'seed'"}}
        return solve(body, number)

    with serving(strict) as (url, log):
        (result,) = ask(url)
    assert result["mean"] == 1 and "max_completion_tokens" in log.bodies[-1]


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


def test_a_killed_evaluation_continues(tmp_path):
    def slow(body, number):
        time.sleep(0.1)
        return solve(body, number)

    with serving(slow) as (url, log):
        flags = ["--endpoint", url, "--model", "m", "--words", "3", "--problems", "40"]
        command = [sys.executable, str(TOP / "eval.py"), *flags, "--concurrency", "2"]
        with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(TOP)}) as process:
            while len(log.bodies) < 12:
                time.sleep(0.02)
            process.send_signal(signal.SIGKILL)
        kept = len(Path("runs/endpoint/m.jsonl").read_bytes().splitlines())
        asked = len(log.bodies)
        assert 8 <= kept <= asked
        assert evaluation.main([*flags, "--json", "out.json"]) == 0
    assert json.loads(Path("out.json").read_text())[0]["n"] == 40
    assert len(log.bodies) <= 40 + (asked - kept) + 1


def test_ctrl_c_does_not_wait_for_a_slow_server():
    last = threading.Event()

    def slow(body, number):
        if number > 3:
            last.wait(60)
        return solve(body, number)

    with serving(slow) as (url, log):
        flags = ["--endpoint", url, "--model", "m", "--words", "3", "--problems", "40"]
        command = [sys.executable, str(TOP / "eval.py"), *flags, "--concurrency", "2"]
        environment = {**os.environ, "PYTHONPATH": str(TOP)}
        with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as process:
            while len(log.bodies) < 5:
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            _, error = process.communicate(timeout=30)
        last.set()
    assert process.returncode == 130
    assert error.decode().splitlines()[-1] == "eval.py: interrupted"
    assert "Traceback" not in error.decode()
    assert len(Path("runs/endpoint/m.jsonl").read_bytes().splitlines()) == 3


def test_answers_under_way_are_kept_if_a_request_is_refused():
    refused = threading.Event()

    def refuses_the_second(body, number):
        if number == 2:
            refused.set()
            return 400, {}, {"error": {"message": "no"}}
        if number == 3:
            refused.wait(60)
            time.sleep(0.2)
        return solve(body, number)

    with serving(refuses_the_second) as (url, log):
        ask(url, "--concurrency", "2", status=2)
        assert len(log.bodies) <= 4
    assert len(Path("runs/endpoint/m.jsonl").read_bytes().splitlines()) == len(log.bodies) - 1


def test_the_embedded_model_behind_a_server_scores_as_it_does_here():
    """The server samples with seeds of its own, so the scores agree within sampling error.

    Its seeds are the numbers of the requests. Those that are sent depend on the server's port, and
    with new ones in each run, some runs would lie outside the interval.
    """
    model = load_model("builtin")

    def sample(body, number):
        (prompt,) = [turn["content"] for turn in body["messages"]]
        (text,) = model.generate(
            [prompt],
            max_new_tokens=body["max_tokens"],
            temperature=body["temperature"],
            seed=number,
        )
        return 200, {}, chat(text)

    flags = ["--words", "5", "--problems", "60", "--json", "local.json"]
    assert evaluation.main(flags) == 0
    (local,) = json.loads(Path("local.json").read_text())
    with serving(sample) as (url, _):
        (remote,) = ask(url, "--words", "5", "--problems", "60", "--concurrency", "1")
    assert remote["ci_low"] <= local["mean"] <= remote["ci_high"]


def test_the_turns_of_the_prompt_are_sent():
    with serving(solve) as (url, log):
        ask(url, "--system", "Be brief.", "--shots", "1", "--problems", "1")
    task = load_task("interleave")
    assert [turn["role"] for turn in log.bodies[0]["messages"]] == [
        "system",
        "user",
        "assistant",
        "user",
    ]
    first = problem_at(task, seed=0, split="test", level=3, index=0)
    assert log.bodies[0]["messages"][-1]["content"] == first.prompt
