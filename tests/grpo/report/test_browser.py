"""The page of two runs, driven in a browser."""

from pathlib import Path

import pytest
from driven import assert_quiet, open_page, press, texts, wait
from report_runs import EVIL, group, make_run

from grpo import report
from grpo.run.logs import write_rollouts

pytestmark = pytest.mark.browser

LONG = " ".join(f"word{i}" for i in range(10_000))


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = make_run(tmp_path_factory.mktemp("browser") / "one")
    write_rollouts(
        folder / "rollouts" / "step-000002.jsonl.zst",
        [group((LONG, 0.0), ("a b c d", 1.0), target="a b c d")],
        step=2,
    )
    other = make_run(folder.parent / "two", steps=3, control="shuffled-rewards")
    assert report.main([str(folder), str(other), "-o", str(folder.parent / "report.html")]) == 0
    return Path(folder.parent / "report.html").as_uri()


@pytest.fixture
def opened(browser, url):
    """The page, fresh; afterwards nothing must have been said on its console, or been asked of
    anyone but the file itself.
    """
    open_page(browser, url)
    browser.execute_script("drawAll()")
    yield browser
    assert_quiet(browser, url)


def test_page_shows_the_runs(opened):
    assert opened.title == "one, two · report"
    head = texts(opened, "#top thead th")
    rows = [row for row in texts(opened, "#top tbody tr") if row.startswith("held-out")]
    assert "CONTROL shuffled-rewards" in head[1] and "CONTROL" not in head[0]
    assert rows[0].count("0.100 [0.090, 0.110] → 0.900 [0.890, 0.910]") == 2
    titles = [title.removesuffix("one") for title in texts(opened, "figcaption h3")]
    some = {"Reward", "Held-out score", "Timeline", "Outcomes of groups", "Step time (s)", "Level"}
    assert some < set(titles) and "KL to the reference" not in titles
    lines = opened.execute_script(
        "return [...document.querySelectorAll('figure')].map((f) => "
        "f.querySelectorAll('.scatterlayer .trace').length)"
    )
    assert len(lines) == len(titles) and min(lines) > 0
    assert lines[titles.index("Reward")] == 6  # a line and the two edges of its band, each run
    assert "completions of all 6 steps" in texts(opened, "#kept")[0]
    assert f"name{EVIL}" in texts(opened, "#tables dl div")
    opened.execute_script("document.querySelector('#runs button:nth-child(2)').click()")
    assert "completions of all 3 steps" in texts(opened, "#kept")[0]


def test_slider_cards_and_the_rows_of_a_group(opened):
    assert texts(opened, "#step b") == ["Step 1"] and len(texts(opened, ".card")) == 2
    opened.execute_script(
        "const s = document.getElementById('slider'); s.value = 4; s.dispatchEvent(new "
        "Event('input'))"
    )
    assert texts(opened, "#step b") == ["Step 5"]
    rows = texts(opened, ".row")
    assert [row[:5] for row in rows] == ["0.750", "0.250", "0.000"]
    assert "+1.000 advantage" in rows[0]
    assert "−0.250 advantage" in rows[1]
    assert "word 4: wrote 'd5' for 'd'" in rows[0]
    assert texts(opened, ".row:nth-of-type(2) .words del") == ["b", "d"]
    assert texts(opened, ".row:nth-of-type(2) .words ins") == ["x"]
    opened.execute_script("document.querySelectorAll('.card')[1].click()")
    assert "skipped" in texts(opened, "#group h3")[0]
    assert texts(opened, ".row:nth-of-type(2) .fold") == ["same text as completion 0"]
    assert "trap: copies A" in texts(opened, ".card")[1]


@pytest.mark.slow
def test_keyboard(opened):
    from selenium.webdriver.common.keys import Keys

    opened.execute_script("document.documentElement.style.scrollBehavior = 'auto'")
    press(opened, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_LEFT, Keys.ARROW_RIGHT)
    assert texts(opened, "#step b") == ["Step 3"]
    press(opened, Keys.ARROW_DOWN)  # the samples are not in sight: the page scrolls
    assert texts(opened, "#group h3")[0].startswith("Group 0")
    opened.execute_script("document.getElementById('samples').scrollIntoView()")
    press(opened, Keys.ARROW_DOWN)
    assert texts(opened, "#group h3")[0].startswith("Group 1")
    opened.execute_script("scrollTo(0, 0)")
    press(opened, Keys.ARROW_UP)
    assert texts(opened, "#group h3")[0].startswith("Group 1")
    opened.execute_script("document.getElementById('samples').scrollIntoView()")
    press(opened, Keys.ARROW_UP, "j", "j", "k")
    assert texts(opened, "#group h3")[0].startswith("Group 0")
    assert texts(opened, ".row.here .pay b") == ["0.250"]


@pytest.mark.slow
def test_tints(opened):
    press(opened, "3")
    assert texts(opened, "#tints [aria-pressed=true]") == ["Advantage"]
    colours = opened.execute_script(
        "return [1, 2].map((n) => document.querySelector(`.row:nth-of-type(${n}) .words "
        "bdi`).style.background)"
    )
    # Advantages 1.0 and -0.25 of at most 1.0.
    assert "var(--c0) 55%" in colours[0] and "var(--c1) 14%" in colours[1]
    press(opened, "2")
    assert "no checkpoint with a tokenizer" in texts(opened, ".key")[0]


def test_evil_and_endless_texts_are_shown_harmlessly(opened):
    opened.execute_script("window.alert = () => { window.alerted = true; }")
    assert EVIL in texts(opened, ".row:nth-of-type(3) .words")[0]
    made = "return document.querySelectorAll('main script, main b b').length"
    assert opened.execute_script(made) == 0
    assert "Do <b>it</b>" in texts(opened, "#group pre")[0]
    press(opened, "\ue014")  # to step 2, whose second completion has 10,000 words
    words = "return document.querySelectorAll('.row:nth-of-type(2) .words .w').length"
    shown = opened.execute_script(words)
    assert 0 < shown <= 600
    opened.execute_script(
        "[...document.querySelectorAll('.row:nth-of-type(2) .fold')].at(-1).click()"
    )
    assert shown < opened.execute_script(words) <= 1200
    assert opened.execute_script("return document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.slow
def test_phone(opened):
    opened.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True},
    )
    try:
        opened.refresh()
        wait(opened, lambda: opened.execute_script("return document.documentElement.dataset.ready"))
        opened.execute_script("drawAll()")
        assert opened.execute_script("return document.documentElement.scrollWidth") == 390
        assert (
            opened.execute_script(
                "return Math.max(...[...document.querySelectorAll('.plot svg')].map((s) => "
                "s.getBoundingClientRect().right))"
            )
            <= 390
        )
    finally:
        opened.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
