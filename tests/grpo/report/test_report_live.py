"""The page of a run in progress: who may ask the server, and that the page follows the run."""

import http.client
import json
import shutil
import socket
import struct
import threading

import pytest
from driven import assert_quiet, open_page, texts, wait
from live_pages import ask, serving
from report_runs import EVIL, STEPS, data_of, group, make_run, metrics_of

from data.errors import UserError
from grpo.run.logs import MetricsLog
from grpo.run.rollouts import write_rollouts
from grpo.tools.report import program as report
from grpo.tools.report.live import LiveServer

# What the server answers of a run's completions.
ANSWERS = (
    "samples?run=0&step=1",
    "group?run=0&step=1&group=0",
    "search?run=0&after=0&until=9&query=owl",
)


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "made")


@pytest.fixture
def server(run):
    with serving(run) as server:
        yield server


def test_the_page_is_served_with_its_policy(server):
    status, headers, page = ask(server)
    assert status == 200 and headers["Content-Type"] == "text/html; charset=utf-8"
    assert headers["Referrer-Policy"] == "no-referrer" and headers["Cache-Control"] == "no-store"
    assert "script-src 'sha256-" in page and "; connect-src 'self'\"" in page
    assert "unsafe-eval" not in page and data_of(page)["samples-0"] == {}
    assert data_of(page)["data"]["live"] is True


def test_what_is_new_is_told_once(server, run):
    _, _, first = ask(server, "data")
    version = json.loads(first)["version"]
    assert json.loads(first)["runs"][0]["kept"] == list(range(1, STEPS + 1))
    assert json.loads(ask(server, f"data?since={version}")[2]) == {"version": version}

    MetricsLog(run).append(metrics_of(STEPS + 1))
    answer = json.loads(ask(server, f"data?since={version}")[2])
    assert answer["version"] != version and answer["runs"][0]["made"] == STEPS + 1


def test_the_completions_of_a_step(server):
    step = json.loads(ask(server, "samples?run=0&step=2")[2])
    assert step["count"] == 2 and step["groups"][0]["texts"][1]["words"] == "a x c"


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "evil:8642", "::1"])
def test_another_host_is_refused(server, host):
    for path in ("", "data", *ANSWERS):
        assert ask(server, path, host=host)[0] == 403


@pytest.mark.parametrize("host", ["localhost:9000", "127.0.0.1", "localhost"])
def test_the_near_end_of_a_tunnel_is_this_machine(server, host):
    assert ask(server, "data", host=host)[0] == 200


@pytest.mark.parametrize("token", ["", "x", "..", "%2e%2e"])
def test_without_the_token_nothing_is_told(server, token):
    for path in ("", "data", *ANSWERS):
        status, _, body = ask(server, path, token=token)
        assert status == 403 and body == "forbidden\n"


def test_tokens_are_random(run):
    tokens = set()
    for _ in range(3):
        with LiveServer([run], 0) as server:
            tokens.add(server.token)
    assert len(tokens) == 3 and min(map(len, tokens)) >= 32


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"])
def test_only_get_is_answered(server, method):
    assert ask(server, method=method)[0] == 405


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("other", 404),
        ("data/more", 404),
        ("../../etc/passwd", 404),
        ("samples", 404),
        ("samples?run=1&step=1", 404),
        ("samples?run=-1&step=1", 404),
        ("samples?run=0&step=99", 503),
    ],
)
def test_what_is_not_there_is_said_in_one_line(server, path, status):
    found, _, body = ask(server, path)
    assert found == status and body.count("\n") <= 1


def test_an_address_that_is_none_is_refused_quietly(server, capfd):
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=30) as client:
        client.sendall(b"GET http://[::1/x HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 400 ")
    assert capfd.readouterr() == ("", "")


def test_a_client_that_leaves_while_the_page_loads_is_no_error(server, capfd, monkeypatch):
    """The connection is closed with data unread, so the server's writing fails."""
    answers = server.page
    has_left = threading.Event()
    is_served = threading.Event()
    monkeypatch.setattr(server, "page", lambda: has_left.wait(30) and answers() * 99)
    closed = server.shutdown_request
    monkeypatch.setattr(
        server, "shutdown_request", lambda request: (closed(request), is_served.set())
    )
    client = socket.create_connection(("127.0.0.1", server.server_port), timeout=30)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.sendall(f"GET /{server.token}/ HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    client.close()
    has_left.set()
    assert is_served.wait(30)
    assert capfd.readouterr() == ("", "")
    assert ask(server, "data")[0] == 200


def test_an_error_of_the_server_is_shown(server, capfd, monkeypatch):
    monkeypatch.setattr(server, "page", lambda: 1 / 0)
    with pytest.raises(http.client.HTTPException):
        ask(server)
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_a_damaged_run_is_an_error_and_not_an_end(server, run):
    whole = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text("no JSON\n")
    status, _, body = ask(server, "data")
    assert status == 503 and "is not JSON" in json.loads(body)["error"]
    (run / "metrics.jsonl").write_text(whole)
    assert ask(server, "data")[0] == 200


def test_nothing_is_written(server, run):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    for path in ("", "data", *ANSWERS):
        ask(server, path)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_mistakes_are_said_in_one_line(run, tmp_path, capsys):
    with LiveServer([run], 0) as server:
        assert report.main(["--live", str(run), "--port", str(server.server_port)]) == 2
        with pytest.raises(UserError, match="cannot be used"):
            LiveServer([run], server.server_port)
    assert capsys.readouterr().err.count("\n") == 1
    assert report.main(["--live", str(tmp_path / "none")]) == 2
    assert report.main([str(run), "--port", "70000"]) == 2
    assert "give a number from 0 to 65535" in capsys.readouterr().err
    assert report.main(["--live", str(run), "-o", "page.html"]) == 2
    assert "writes no file" in capsys.readouterr().err


@pytest.mark.browser
def test_the_page_follows_the_run(browser, server, run):
    open_page(browser, server.url)
    browser.execute_script("window.alert = () => { window.alerted = true; }")
    assert texts(browser, "#step b") == [f"Step {STEPS}"]
    wait(browser, lambda: "live" in texts(browser, "#live")[0])

    step = STEPS + 1
    write_rollouts(
        run / "rollouts" / f"step-{step:06d}.jsonl.zst", [group((f"new {EVIL}", 0.5))], step=step
    )
    MetricsLog(run).append(metrics_of(step, **{EVIL: 1.0, "stopped": EVIL}))
    wait(browser, lambda: texts(browser, "#step b") == [f"Step {step}"])
    assert "<script>alert(1)</script>" in texts(browser, ".row .words")[0]
    assert EVIL in texts(browser, "figure h3")
    assert browser.execute_script("return document.querySelectorAll('main script').length") == 0

    # A reader who looks at an earlier step stays there.
    browser.execute_script("document.getElementById('back').click()")
    wait(browser, lambda: texts(browser, "#step b") == [f"Step {STEPS}"])
    MetricsLog(run).append(metrics_of(step + 1))
    wait(browser, lambda: f"step {step + 1}" in texts(browser, "#live")[0])
    assert texts(browser, "#step b") == [f"Step {STEPS}"]
    assert_quiet(browser, server.url)


@pytest.mark.browser
def test_the_page_says_that_it_is_no_longer_live(browser, server, run):
    open_page(browser, server.url)
    shutil.move(run, run.parent / "moved")
    wait(browser, lambda: "not live" in texts(browser, "#live")[0])
    assert "not a run" in texts(browser, "#live")[0]
    browser.get_log("browser")  # the refused request is on the console
