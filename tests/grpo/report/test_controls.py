"""The controls of the page, its addresses, and what it is for those who cannot see or point."""

import pytest
from driven import assert_quiet, open_page, press, texts, wait
from report_runs import EVIL, group, make_run, metrics_of

from grpo import report
from grpo.run.logs import append_lines, write_rollouts

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """The page of two runs: one with updates, levels and a hostile metric, and one without."""
    folder = make_run(tmp_path_factory.mktemp("controls") / "one")
    for step in range(7, 13):
        more = {"loss": 0.5, "grad_norm": 0.1} if step != 9 else {}
        metrics = metrics_of(step, **more, **{EVIL: step, "group_std": 2.0})
        append_lines(folder / "metrics.jsonl", {**metrics, "level": 4 + (step > 9)})
    solved = group(("42", 1.0), ("<b>41</b>", 0.0625), target="", class_name="tied", key="k9")
    write_rollouts(folder / "rollouts" / "step-000004.jsonl.zst", [solved, solved], step=4)
    other = make_run(folder.parent / "two")
    page = folder.parent / "report.html"
    assert report.main([str(folder), str(other), "-o", str(page)]) == 0
    return page.as_uri()


@pytest.fixture
def opened(browser, url):
    open_page(browser, url)
    browser.execute_script("drawAll()")
    browser.execute_script("window.alert = () => { window.alerted = true; }")
    yield browser
    assert_quiet(browser, url)


def traces(browser, title):
    """Return what a chart draws, as [{name, x, y, ...}]."""
    return browser.execute_script(
        "drawAll(); const spec = CHARTS.find((one) => one.title === arguments[0]);"
        "return spec.plot.data.map(({name, x, y, fill}) => ({name, x, y, fill}))",
        title,
    )


def choose(browser, name, value):
    """Set a field of the page, as its reader does."""
    browser.execute_script(
        "const field = document.getElementById(arguments[0]);"
        "field[field.type === 'checkbox' ? 'checked' : 'value'] = arguments[1];"
        "for (const kind of ['input', 'change']) field.dispatchEvent(new Event(kind))",
        name,
        value,
    )


def test_a_step_without_an_update_is_a_gap(opened):
    (loss,) = traces(opened, "Loss")
    assert loss["y"] == [None] * 6 + [0.5, 0.5, None, 0.5, 0.5, 0.5]
    assert opened.execute_script(
        "return CHARTS.find((one) => one.title === 'Loss').plot.data[0].connectgaps !== true"
    )


def test_a_change_of_level_is_marked(opened):
    layout = opened.execute_script("drawAll(); return CHARTS[0].plot.layout")
    assert [note["text"] for note in layout["annotations"]] == ["level 4", "level 5"]
    dashed = [line["x0"] for line in layout["shapes"] if line.get("line", {}).get("dash") == "dash"]
    assert dashed == [10]


def test_axes_smoothing_and_log_scale(opened):
    choose(opened, "axis", "tokens")
    assert traces(opened, "Loss")[0]["x"][:2] == [100, 200]
    choose(opened, "axis", "time")
    assert traces(opened, "Loss")[0]["x"][:2] == [0.025, 0.05]
    choose(opened, "smoothing", 0.5)
    raw, smooth = traces(opened, "Loss")
    assert smooth["y"] == raw["y"] and smooth["y"][8] is None
    choose(opened, "log", True)
    assert opened.execute_script("drawAll(); return CHARTS[0].plot.layout.yaxis.type") == "log"


def test_charts_are_zoomed_together(opened):
    opened.execute_script(
        "Plotly.relayout(CHARTS[0].plot, {'xaxis.range[0]': 2, 'xaxis.range[1]': 5})"
    )
    wait(opened, lambda: opened.execute_script("return state.range?.join()") == "2,5")
    opened.execute_script("drawAll()")
    ranges = opened.execute_script("return CHARTS.map((one) => one.plot.layout.xaxis.range.join())")
    assert set(ranges) == {"2,5"}
    opened.execute_script("document.getElementById('unzoom').click()")
    assert opened.execute_script("return state.range") is None


def test_an_address_leads_to_a_completion(opened, url):
    address = f"{url}#run=two&step=3&group=0&completion=1"
    open_page(opened, address)
    assert texts(opened, "#runs [aria-pressed=true]") == ["two"]
    assert texts(opened, "#step b") == ["Step 3"]
    assert "Completion 1" in texts(opened, ".row.here")[0]
    press(opened, "k")
    assert opened.execute_script("return location.href").endswith("step=3&group=0&completion=0")
    opened.execute_script("location.hash = '#run=one&step=2&group=1&completion=0'")
    wait(opened, lambda: texts(opened, "#step b") == ["Step 2"])
    assert texts(opened, "#group h3")[0].startswith("Group 1")
    opened.execute_script("location.hash = '#run=none&step=99'")  # is nowhere: nothing happens
    assert texts(opened, "#step b") == ["Step 2"]


def test_a_filter_shows_only_what_it_names(opened):
    assert len(texts(opened, ".card")) == 2
    choose(opened, "outcome", "solved")
    assert len(texts(opened, ".card")) == 1 and "Group 1" in texts(opened, "#group h3")[0]
    choose(opened, "outcome", "")
    choose(opened, "low", "0.5")
    choose(opened, "high", "0.8")
    assert texts(opened, "#passed") == ["1 of 2 groups"]
    assert [row[:5] for row in texts(opened, ".row")] == ["0.750"]
    choose(opened, "truncated", True)
    assert texts(opened, ".card") == [] and texts(opened, ".row") == []


def test_the_data_are_exported(opened):
    csv = opened.execute_script("return metricsAsCsv()")
    assert csv.startswith("run,step,reward,") and csv.count("\n") == 1 + 12 + 6
    fields = ["=1+1", 'a"b', -0.5, None]
    assert opened.execute_script("return arguments[0].map(csvField)", fields) == [
        "'=1+1",
        '"a""b"',
        "-0.5",
        "",
    ]


# What is searched for, and what it finds in step 4: (group, completion; None: the prompt).
MATCHES = {
    "The  OWL": [(0, 0), (1, 1)],
    "do <b>it</b>": [(0, None), (1, None)],
    "straße": [(0, 1)],
    "οδος": [(0, 1)],
    "\\u202e": [(1, 0)],
    EVIL: [(1, 0)],
    ".*": [],
}


def test_the_search_ignores_upper_case_and_spaces(browser, tmp_path):
    run = make_run(tmp_path / "searched")
    groups = [
        group(("The  Owl\nsaw", 0.5), ("STRAßE ΟΔΟΣ", 0.25), ("The  Owl\nsaw", 0.5)),
        group((f"é \u202e {EVIL}", 0.0), ("see the owl", 1.0)),
    ]
    write_rollouts(run / "rollouts" / "step-000004.jsonl.zst", groups, step=4)
    assert report.main([str(run)]) == 0
    url = (run / "report.html").as_uri()
    open_page(browser, url)
    for query, places in MATCHES.items():
        choose(browser, "search", query)
        finds = browser.execute_script("return hunt.finds")
        found = [(one["group"], one["completion"]) for one in finds if one["step"] == 4]
        assert found == places, query

    choose(browser, "search", "straße")
    browser.execute_script("document.querySelector('.find').click()")
    assert texts(browser, "#step b") == ["Step 4"]
    assert "Completion 1" in texts(browser, ".row.here")[0]
    assert_quiet(browser, url)
