"""The page of a run in progress: who may ask the server, and that the page follows the run."""

import json
import shutil
from pathlib import Path
from urllib.parse import urlencode

import pytest
from driven import assert_quiet, open_page, texts, wait
from live_pages import ask, serving
from report_runs import EVIL, STEPS, data_of, group, make_run, metrics_of

from data.errors import UserError
from grpo.run.logs import MetricsLog, load_run
from grpo.run.rollouts import write_rollouts
from grpo.tools.report import live, samples
from grpo.tools.report import program as report
from grpo.tools.report.live import LiveServer

# What the server answers of a run's completions.
ANSWERS = (
    "samples?run=0&step=1",
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


# ---- the search

# What is searched for, and what it finds in step 2: (group, completion; None: the prompt).
MATCHES = {
    "the owl": [(0, 0), (1, 1)],
    "do <b>it</b>": [(0, None), (1, None)],
    "straße": [(0, 1)],
    "οδος": [(0, 1)],
    "i̇stanbul": [(0, 1)],
    "😀 été": [(1, 0)],
    "\\u202e": [(1, 0)],
    EVIL: [(1, 0)],
    ".*": [],
    "nowhere": [],
}


@pytest.fixture
def searched(run):
    """The run, with other texts in step 2."""
    groups = [
        group(("The  Owl\nsaw", 0.5), ("STRAßE ΟΔΟΣ İstanbul", 0.25), ("The  Owl\nsaw", 0.5)),
        group((f"😀 été \u202e {EVIL}", 0.0), ("see the owl", 1.0)),
    ]
    write_rollouts(run / "rollouts" / "step-000002.jsonl.zst", groups, step=2)
    return load_run(run)


@pytest.mark.parametrize(("query", "places"), MATCHES.items())
def test_upper_case_and_spaces_do_not_matter(searched, query, places):
    finds = samples.search(searched, query, 0, STEPS)["finds"]
    assert [(one["group"], one["completion"]) for one in finds if one["step"] == 2] == places


def test_an_answer_of_the_search_ends_when_it_has_enough(searched, monkeypatch):
    answer = samples.search(searched, "a b c d", 0, STEPS)
    places = [(one["step"], one["group"], one["completion"]) for one in answer["finds"]]
    assert places == [(step, number, 0) for step in (1, 3, 4, 5, 6) for number in (0, 1)]
    assert answer["searched"] == STEPS
    between = samples.search(searched, "a b c d", 3, 5)["finds"]
    assert [one["step"] for one in between] == [4, 4, 5, 5]

    monkeypatch.setattr(samples, "ENOUGH", 3)
    answer = samples.search(searched, "a b c d", 0, STEPS)
    assert answer["searched"] == 3 and len(answer["finds"]) == 4
    monkeypatch.setattr(samples, "SECONDS", -1.0)
    assert samples.search(searched, "nowhere", 1, STEPS) == {"finds": [], "searched": 2}
    assert samples.search(searched, "nowhere", STEPS, STEPS + 4)["searched"] == STEPS + 4


@pytest.mark.parametrize(
    "question",
    [
        {"run": 1},
        {"run": "-1"},
        {"after": "x"},
        {"until": "9" * 10},
        {"query": ""},
        {"query": "a" * (live.MAX_QUERY + 1)},
    ],
)
def test_a_question_that_is_none_is_refused(server, question):
    whole = {"run": 0, "query": "owl", "after": 0, "until": 9}
    assert ask(server, f"search?{urlencode({**whole, **question})}")[0] == 404


# ---- in a browser


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


def set_field(browser, text):
    browser.execute_script(
        "const field = document.getElementById('search'); field.value = arguments[0];"
        "field.dispatchEvent(new Event('input'))",
        text,
    )


def found_on(browser, text):
    """Return the matches on a page: all of them, and those of step 2 without excerpts."""
    set_field(browser, text)
    wait(browser, lambda: browser.execute_script("return hunt.after === lastStep(0)"))
    finds = browser.execute_script("return hunt.finds")
    return finds, [(one["group"], one["completion"]) for one in finds if one["step"] == 2]


@pytest.mark.browser
def test_a_file_and_a_live_page_find_the_same(browser, server, searched):
    run = searched.path
    assert report.main([str(run)]) == 0
    found = {}
    for name, url in (("file", Path(run / "report.html").as_uri()), ("live", server.url)):
        open_page(browser, url)
        found[name] = {query: found_on(browser, query) for query in MATCHES}
        assert_quiet(browser, url)
    assert {query: places for query, (_, places) in found["live"].items()} == MATCHES
    assert found["live"] == found["file"]


@pytest.mark.browser
def test_a_match_in_a_step_that_was_not_opened_is_opened(browser, server, searched):
    run = searched.path
    open_page(browser, server.url)
    browser.execute_script("window.alert = () => { window.alerted = true; }")
    set_field(browser, EVIL)
    wait(browser, lambda: texts(browser, "#found p") == [f"{STEPS} matches"])
    assert texts(browser, ".find b")[1] == "step 2 · group 1 · completion 0"
    browser.execute_script("document.querySelectorAll('.find')[1].click()")
    wait(browser, lambda: texts(browser, "#step b") == ["Step 2"])
    assert texts(browser, "#group h3")[0].startswith("Group 1")
    assert "Completion 0" in texts(browser, ".row.here")[0] and EVIL in texts(browser, ".hit")[0]
    assert browser.execute_script("return location.hash").endswith("step=2&group=1&completion=0")

    # Steps that are written while the search is open are searched as well.
    step = STEPS + 1
    path = run / "rollouts" / f"step-{step:06d}.jsonl.zst"
    write_rollouts(path, [group((f"again {EVIL}", 0.5))], step=step)
    MetricsLog(run).append(metrics_of(step))
    wait(browser, lambda: texts(browser, "#found p") == [f"{STEPS + 1} matches"])
    assert texts(browser, ".find b")[-1] == f"step {step} · group 0 · completion 0"
    assert texts(browser, "#step b") == ["Step 2"]
    assert_quiet(browser, server.url)
