"""The search in completions: the same matches in a file and on a live page, whose server bounds its
work.
"""

import json
from pathlib import Path
from urllib.parse import urlencode

import pytest
from driven import assert_quiet, open_page, texts, wait
from live_pages import ask, serving
from report_runs import EVIL, STEPS, group, make_run, metrics_of

from grpo.run.logs import MetricsLog
from grpo.run.rollouts import write_rollouts
from grpo.tools.report import live, search
from grpo.tools.report import program as report

# What is searched for, and what it finds in step 2: (group, completion; None: the prompt).
MATCHES = {
    "the OWL": [(0, 0), (1, 1)],
    "  the \t owl ": [(0, 0), (1, 1)],
    "do <b>it</b>": [(0, None), (1, None)],
    "\\x1b[31m": [(0, None), (1, None)],
    "straße": [(0, 1)],
    "STRASSE": [],
    "ΟΔΟΣ": [(0, 1)],
    "i̇stanbul": [(0, 1)],
    "😀 ÉTÉ": [(1, 0)],
    "\\u202e": [(1, 0)],
    EVIL: [(1, 0)],
    ".*": [],
    "owl%": [],
    "nowhere": [],
}


@pytest.fixture
def run(tmp_path):
    folder = make_run(tmp_path / "made")
    groups = [
        group(("The  Owl\nsaw", 0.5), ("STRAßE ΟΔΟΣ İstanbul", 0.25), ("The  Owl\nsaw", 0.5)),
        group((f"😀 été \u202e {EVIL}", 0.0), ("see the owl", 1.0)),
    ]
    write_rollouts(folder / "rollouts" / "step-000002.jsonl.zst", groups, step=2)
    return folder


@pytest.fixture
def server(run):
    with serving(run) as server:
        yield server


def asked(server, query, after=0, until=STEPS):
    question = {"run": 0, "query": query, "after": after, "until": until}
    status, _, body = ask(server, f"search?{urlencode(question)}")
    assert status == 200
    return json.loads(body)


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


def test_a_search_covers_all_steps_and_fields(server):
    answer = asked(server, "a b c d")
    assert answer["searched"] == STEPS
    places = [(one["step"], one["group"], one["completion"]) for one in answer["finds"]]
    assert places == [(step, group, 0) for step in (1, 3, 4, 5, 6) for group in (0, 1)]
    assert {one["text"] for one in answer["finds"]} >= {"a b c d", "a b c d6"}
    assert [one["step"] for one in asked(server, "a b c d", after=3, until=5)["finds"]] == [
        4
    ] * 2 + [5] * 2


@pytest.mark.parametrize(("query", "places"), MATCHES.items())
def test_upper_case_and_spaces_do_not_matter(server, query, places):
    finds = asked(server, " ".join(query.lower().split()))["finds"]
    assert [(one["group"], one["completion"]) for one in finds if one["step"] == 2] == places


def test_an_answer_ends_when_it_has_enough(server, monkeypatch):
    monkeypatch.setattr(search, "ENOUGH", 3)
    answer = asked(server, "a b c d")
    assert answer["searched"] == 3 and len(answer["finds"]) == 4
    monkeypatch.setattr(search, "SECONDS", -1.0)
    assert asked(server, "nowhere") == {"finds": [], "searched": 1}
    assert asked(server, "nowhere", after=1) == {"finds": [], "searched": 2}
    assert asked(server, "nowhere", after=STEPS, until=STEPS + 4)["searched"] == STEPS + 4


def test_an_excerpt_is_short():
    text = "one " * 20_000 + "owl " + "two " * 20_000
    assert search.excerpt(text, "owl") == "… " + "one " * 10 + "owl " + "two " * 14


@pytest.mark.parametrize(
    "question",
    [
        {},
        {"run": 1},
        {"run": "-1"},
        {"after": "x"},
        {"until": ""},
        {"until": "9" * 10},
        {"query": ""},
        {"query": "a" * (live.MAX_QUERY + 1)},
    ],
)
def test_a_question_that_is_none_is_refused(server, question):
    whole = {"run": 0, "query": "owl", "after": 0, "until": 9}
    path = f"search?{urlencode({**whole, **question})}" if question else "search"
    assert ask(server, path)[0] == 404


@pytest.mark.parametrize("query", ["\0", "\udcff", "(a+)+$" * 100, "../../etc", "a&run=1", "‮"])
def test_a_hostile_query_finds_nothing(server, query):
    text = query.encode("utf-8", "surrogateescape")
    status, _, body = ask(
        server,
        f"search?{urlencode({'run': 0, 'after': 0, 'until': 9})}&" + urlencode({"query": text}),
    )
    assert status == 200 and json.loads(body) == {"finds": [], "searched": 9}


def test_damage_is_said(server, run):
    (run / "rollouts" / "step-000004.jsonl.zst").write_bytes(b"damage")
    status, _, body = ask(server, "search?run=0&after=0&until=6&query=nowhere")
    assert status == 503 and "not a whole rollout file" in json.loads(body)["error"]


def test_a_group_is_told_alone(server):
    one = json.loads(ask(server, "group?run=0&step=2&group=1")[2])
    assert one["group"] == 1 and one["texts"][1]["words"] == "see the owl"
    assert ask(server, "group?run=0&step=2&group=9")[0] == 503
    assert ask(server, "group?run=0&step=2")[0] == 404


@pytest.mark.browser
def test_a_file_and_a_live_page_find_the_same(browser, server, run):
    assert report.main([str(run)]) == 0
    found = {}
    for name, url in (("file", Path(run / "report.html").as_uri()), ("live", server.url)):
        open_page(browser, url)
        found[name] = {query: found_on(browser, query) for query in MATCHES}
        assert_quiet(browser, url)
    assert {query: places for query, (_, places) in found["live"].items()} == MATCHES
    assert found["live"] == found["file"]


@pytest.mark.browser
def test_a_match_in_a_step_that_was_not_opened_is_opened(browser, server, run):
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


@pytest.mark.browser
def test_a_long_list_is_continued(browser, server, monkeypatch):
    monkeypatch.setattr(search, "ENOUGH", 4)
    open_page(browser, server.url)
    browser.execute_script("hunt.listed = 4; hunt.query = state.query = 'do <b>'; searchOn()")
    said = f"4 matches in the steps up to 2 of {STEPS}"
    wait(browser, lambda: texts(browser, "#found p") == [said])
    browser.execute_script("document.getElementById('more-finds').click()")
    wait(browser, lambda: texts(browser, "#found p") == [f"{2 * STEPS} matches"])
    assert len(texts(browser, ".find")) == 2 * STEPS and texts(browser, "#more-finds") == []


@pytest.mark.browser
def test_a_match_in_a_group_that_did_not_fit_is_opened(browser, server, monkeypatch):
    monkeypatch.setattr(live, "STEP_BYTES", 1300)
    assert len(json.loads(ask(server, "samples?run=0&step=2")[2])["groups"]) == 1
    open_page(browser, server.url)
    set_field(browser, "see the owl")
    wait(browser, lambda: texts(browser, "#found p") == ["1 match"])
    browser.execute_script("document.querySelector('.find').click()")
    wait(browser, lambda: texts(browser, "#step b") == ["Step 2"])
    assert texts(browser, "#group h3")[0].startswith("Group 1")
    assert "Completion 1" in texts(browser, ".row.here")[0]
    assert_quiet(browser, server.url)
