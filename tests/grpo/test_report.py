"""A run as one page: what is embedded and how, and the page itself, driven in a browser."""

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from grpo.records import Completion, Group
from grpo.run.logs import MetricsLog
from grpo.run.reader import load_run
from grpo.run.rollouts import write_rollouts
from grpo.tools.report import description, samples
from grpo.tools.report import page as report
from tasks.base import Problem, Score

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


def make_run(folder, *, steps=STEPS, control="none", groups=None):
    """Write a run by the project's own writers: two groups a step, a decision at step 3,
    evaluations before and after.
    """
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.yaml").write_text(
        f"task: t\nlevel: 4\nreward: prefix\nmodel: builtin\ncontrol: {control}\nname: '{EVIL}'\n"
        "facts: {torch: 2.13.0, device: cpu, threads: 2}\n"
    )
    for step in range(1, steps + 1):
        MetricsLog(folder).append(metrics_of(step))
        varied = group(
            (f"a b c d{step}", 0.75), ("a x c", 0.25), (EVIL, 0.0), advantages=[1.0, -0.25, -0.75]
        )
        drawn = groups or [
            varied,
            group(
                ("a b c d", 1.0),
                ("a b c d", 1.0),
                class_name="solved",
                action="skip",
                trap="copies A",
            ),
        ]
        write_rollouts(folder / "rollouts" / f"step-{step:06d}.jsonl.zst", drawn, step=step)
    for step, mean in ((0, 0.1), (steps, 0.9)):
        MetricsLog(folder, "eval.jsonl").append(
            {
                "step": step,
                "purpose": "report",
                "level": 4,
                "unit": "words",
                "temperature": 1.0,
                "metric": "similarity",
                "mean": mean,
                "ci_low": mean - 0.05,
                "ci_high": mean + 0.05,
                "exact": mean,
                "n": 20,
            }
        )
    MetricsLog(folder, "curriculum.jsonl").append(
        {
            "step": 3,
            "from": 3,
            "to": 4,
            "kind": "promotion",
            "why": f"mean 0.9 {EVIL}",
            "figures": {},
        }
    )
    return folder


@pytest.fixture
def made(tmp_path):
    return make_run(tmp_path / "made")


def said(capsys, *argv, status=0):
    assert report.main([str(part) for part in argv]) == status
    return capsys.readouterr()


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


def test_a_page_is_written_where_it_says(made, tmp_path, capsys):
    text = said(capsys, made).out
    assert text.startswith(f"{made / 'report.html'}: ") and " MB, 1 run; open" in text
    assert float(re.search(r"([\d.]+) MB", text)[1]) == pytest.approx(
        (made / "report.html").stat().st_size / 1e6, abs=0.05
    )
    other = make_run(tmp_path / "other", control="shuffled-rewards")
    assert "both.html: " in said(capsys, made, other, "-o", tmp_path / "both.html").out
    told = data_of((tmp_path / "both.html").read_text())["data"]["runs"]
    assert [(run["name"], run["control"]) for run in told] == [
        ("made", None),
        ("other", "shuffled-rewards"),
    ]


def test_what_is_said_of_a_run(made):
    (run,) = data_of(page_of(made))["data"]["runs"]
    assert run["headline"] == [
        ["task", "t"],
        ["level", "4 words"],
        ["model", "builtin"],
        ["reward", "prefix"],
        ["steps", "6"],
        ["tokens", "600"],
        ["time", "0:09 min"],
        ["hardware", "cpu, 2 threads"],
    ]
    assert run["heldout"] == [
        {
            "what": "similarity at 4 words",
            "how": "n = 20, temperature 1",
            "scores": ["0.100 [0.050, 0.150]", "0.900 [0.850, 0.950]"],
            "exact": "0.10 → 0.90",
        }
    ]
    assert (
        run["metrics"]["reward"] == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
        and "levels" not in run["metrics"]
    )
    assert (
        run["decisions"][0]["step"] == 3
        and run["facts"][0] == ["torch", "2.13.0"]
        and ["name", EVIL] in run["config"]
    )


def test_every_text_is_harmless_in_the_page(made):
    write_rollouts(
        made / "rollouts" / "step-000001.jsonl.zst",
        [group(("x\u2028</script>\x00\x1b[31m", 0.0), ("\u202e<!--<script>", 0.0), key=EVIL)],
        step=1,
    )
    page = page_of(made)
    assert (
        EVIL not in page
        and "<!--" not in page
        and "\u2028" not in page
        and "\x1b" not in page
        and "\x00" not in page
    )
    texts = data_of(page)["samples-0"]["1"]["groups"][0]["texts"]
    assert [text["words"] for text in texts] == [r"x </script>\x00\x1b[31m", r"\u202e<!--<script>"]
    assert data_of(page)["samples-0"]["1"]["groups"][0]["prompt"] == "Do <b>it</b>\n\\x1b[31mnow"


def test_nothing_is_asked_of_a_network(made):
    class Tags(HTMLParser):
        tags = []

        def handle_starttag(self, tag, attributes):
            self.tags.append((tag, dict(attributes)))

    page = page_of(made)
    parser = Tags()
    parser.feed(page)
    assert {tag for tag, _ in parser.tags} >= {"script", "style", "main"} and not {
        "link",
        "img",
        "iframe",
        "base",
    } & {tag for tag, _ in parser.tags}
    for tag, attributes in parser.tags:
        assert "src" not in attributes and attributes.get("href", "#").startswith("#"), (
            tag,
            attributes,
        )
    (policy,) = (
        attributes["content"]
        for _, attributes in parser.tags
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert (
        policy.startswith("default-src 'none'; script-src 'sha256-")
        and "unsafe-eval" not in policy
        and "http" not in policy
    )
    assert not re.search(r"@import|url\(", (report.FOLDER / "report.css").read_text())


def test_markup_is_never_made_of_data():
    for name in report.SCRIPTS:
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\("
            r"|https?:(?!//www.w3.org/2000/svg)",
            (report.FOLDER / name).read_text(),
        ), name


def test_the_steps_kept_are_first_last_notable_and_spread(tmp_path):
    run = make_run(tmp_path / "long", steps=40)
    step = max(map(len, report.kept_samples(load_run(run), 10**6).values()))
    budget = 8 * (step + 20)  # of eight steps, and one step has an eighth of it
    kept = report.kept_samples(load_run(run), budget)
    assert list(kept) == [1, 3, 5, 10, 15, 20, 30, 40] and sum(map(len, kept.values())) <= budget
    (told,) = data_of(page_of(run, budget=budget))["data"]["runs"]
    assert told["stored"] == 40 and told["kept"] == sorted(kept)
    assert len(report.kept_samples(load_run(run), 10**6)) == 40


def test_a_step_beyond_its_share_is_thinned_and_says_so(tmp_path):
    groups = [group((" ".join(f"w{i}" for i in range(200)), 0.5), ("b", 0.1)) for _ in range(9)]
    one = len(report.packed_step(groups[:1], None, 10**6))
    step = json.loads(report.packed_step(groups, None, 3.5 * one))
    assert step["count"] == 9 and [line["group"] for line in step["groups"]] == [0, 4, 8]
    assert json.loads(report.packed_step(groups, None, one / 2)) == {"count": 9, "groups": []}
    kept = report.kept_samples(load_run(make_run(tmp_path / "r", groups=groups)), 8 * 3.5 * one)
    assert [len(json.loads(text)["groups"]) for text in kept.values()] == [3] * STEPS


def test_a_large_run_is_a_small_page(tmp_path):
    words = " ".join(f"word{i}" for i in range(300))
    run = make_run(
        tmp_path / "large",
        steps=8,
        groups=[group(*((f"{i} {words}", 0.1) for i in range(16)), target=words) for _ in range(2)],
    )
    sizes = [len(page_of(run, budget=budget)) for budget in (10, 200_000, 10**6)]
    assert sizes[1] - sizes[0] <= 200_000 < sizes[2] - sizes[0] and sizes[0] < 5.5e6


def test_a_run_with_little(tmp_path):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.yaml").write_text("task: t\n")
    (run,) = data_of(page_of(tmp_path / "bare"))["data"]["runs"]
    assert (run["kept"], run["heldout"], run["decisions"], run["metrics"]) == ([], [], [], {})
    run = make_run(tmp_path / "noeval")
    (run / "eval.jsonl").unlink()
    (run / "curriculum.jsonl").unlink()
    assert data_of(page_of(run))["data"]["runs"][0]["heldout"] == []


def test_a_long_run_is_drawn_by_every_nth_step(tmp_path, monkeypatch):
    monkeypatch.setattr(description, "MOST_POINTS", 4)
    (run,) = data_of(page_of(make_run(tmp_path / "r")))["data"]["runs"]
    assert (run["metrics"]["step"], run["drawn"], run["made"]) == ([1, 3, 5], 3, 6)


def test_warnings_are_where_something_begins():
    lines = [
        metrics_of(1),
        metrics_of(2, **{"groups/class/failed": 1}),
        metrics_of(3, **{"groups/class/failed": 2, "traps/copies A": 0.5}),
        metrics_of(4),
        metrics_of(5, **{"groups/class/tied": 1, "stopped": "ALARM"}),
    ]
    assert [(one["step"], one["why"]) for one in report.warnings_of(lines)] == [
        (2, "at least half of the groups collapsed"),
        (3, "at least half of the completions are in a trap: copies A"),
        (5, "at least half of the groups collapsed"),
        (5, "stopped: ALARM"),
    ]


def test_a_group_packed():
    packed = samples.packed(
        group(("a x c d", 0.25), ("a b c d", 1.0), ("a x c d", 0.25), advantages=[-0.5, 1.0, -0.5]),
        3,
    )
    assert (packed["group"], packed["target"], packed["class"], packed["distinct"]) == (
        3,
        "a b c d",
        "varied",
        2,
    )
    assert [(text["words"], text["ops"], text["divergence"]) for text in packed["texts"]] == [
        ("a x c d", "1=1x2=", "word 2: wrote 'x' for 'b'"),
        ("a b c d", "4=", ""),
    ]
    assert (
        packed["rows"]["text"] == [0, 1, 0]
        and packed["rows"]["advantage"] == [-0.5, 1.0, -0.5]
        and packed["texts"][0]["parts"] == {"matches": 4}
    )
    assert samples.packed(group(("a", 0.5)), 0)["rows"]["advantage"] == [None]


@pytest.mark.parametrize(
    ("target", "text", "ops"),
    [("a b", "", "2-"), ("a", "a b c", "1=2+"), ("a b c", "c", "2-1="), ("a", " \n ", "1-")],
)
def test_run_lengths(target, text, ops):
    assert samples.run_lengths(target, text) == ops


def test_log_probabilities_and_credits_by_word():
    pieces = {1: " ow", 2: "l", 3: " ", 4: "“", 5: "it”", 6: None}
    numbers = samples.word_numbers([pieces[i] for i in (1, 2, 3, 6, 4, 5, 6)], " owl “it”")
    assert numbers == [
        0,
        0,
        1,
        1,
        1,
        1,
        2,
    ]  # the blank and the first byte of the quotation mark belong to the word after them
    assert samples.word_numbers([" ow"], " owl") is None
    one = Group(
        0,
        Problem("t", 2, "p", "owl it", "k"),
        (1,),
        1.0,
        [Completion((1, 2, 6), (-0.5, -0.25, -9.0), " owl", "stop")],
        scores=[Score(0.5)],
        advantages=[[0.5, 0.25, 9.0]],
    )
    packed = samples.packed(one, 0, lambda tokens: [pieces[token] for token in tokens])
    assert packed["texts"][0]["logprobs"] == [-75] and packed["rows"]["credits"] == [
        [0.375]
    ]  # -0.5 - 0.25; (0.5 + 0.25) / 2
    assert samples.by_word([1.0, 2.0], [0, 1], "a b") == [
        [1.0],
        [2.0],
    ]  # cut by the budget: no end token


def test_pieces_by_the_tokenizer_of_a_checkpoint(tmp_path):
    from tokenizers import Tokenizer, decoders, models

    assert samples.pieces_of(tmp_path) is None
    letters = {"Ġowl": 0, "â": 1, "Ģ": 2, "ľ": 3}  # the three bytes of a quotation mark
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="â"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    (tmp_path / "checkpoints" / "step-000002").mkdir(parents=True)
    tokenizer.save(str(tmp_path / "checkpoints" / "step-000002" / "tokenizer.json"))
    assert [piece or "" for piece in samples.pieces_of(tmp_path)([0, 1, 2, 3, 4])] == [
        " owl",
        "",
        "",
        "“",
        "<end>",
    ]


def test_control_tokens_inside_a_text_are_words_of_it_and_the_last_one_is_not():
    pieces = {1: " owl", 2: "<|pad|>", 3: " saw", 9: "<|end|>"}
    one = Group(
        0,
        Problem("t", 2, "p", "owl saw", "k"),
        (1,),
        1.0,
        [Completion((1, 2, 3, 9), (-0.5, -0.25, -0.125, -9.0), " owl<|pad|> saw", "stop")],
        scores=[Score(0.5)],
    )
    packed = samples.packed(one, 0, lambda tokens: [pieces[token] for token in tokens])
    assert packed["texts"][0]["logprobs"] == [-75, -12]  # -0.5 - 0.25; -0.125, rounded to even


def test_evenly_spaced():
    assert [list(report.evenly_spaced(n)) for n in (0, 1, 2, 3)] == [[], [0], [0, 1], [0, 2, 1]]
    for n in range(50):
        assert sorted(report.evenly_spaced(n)) == list(range(n))


def test_mistakes_are_said_in_one_line(made, tmp_path, capsys):
    for argv, words in [
        ((tmp_path / "none",), "not a run"),
        ((), "the following arguments are required"),
        ((made, "--megabytes", "0"), "give a number above 0"),
        ((made, "--megabytes", "nan"), "give a number above 0"),
        ((made, "-o", made), ""),
    ]:
        found = said(capsys, *argv, status=2)
        assert words in found.err and found.err.count("\n") == 1 and not found.out
    (made / "rollouts" / "step-000002.jsonl.zst").write_bytes(b"cut")
    assert "step-000002.jsonl.zst" in said(capsys, made, status=2).err


def test_torch_is_not_imported(made):
    code = (
        f"import sys, grpo.tools.report.page as r; assert r.main([{str(made)!r}]) == 0; assert "
        f"not {{'torch', 'transformers'}} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


# ---------------------------------------------------------------- in a browser

LONG = " ".join(f"word{i}" for i in range(10_000))
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,900",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Chromium, without a window; the first page that it opens is that of two runs."""
    webdriver = pytest.importorskip(
        "selenium.webdriver",
        reason="selenium is not installed: pip install -c constraints.txt -e '.[browser]'",
    )
    program, driver = (
        shutil.which("chromium") or shutil.which("google-chrome"),
        shutil.which("chromedriver"),
    )
    if not program or not driver:
        pytest.skip("chromium or chromedriver is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    window = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    window.get("about:blank")
    yield window
    window.quit()


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
    browser.get_log("browser"), browser.get_log("performance")
    browser.get(url)
    wait(browser, lambda: browser.execute_script("return document.documentElement.dataset.ready"))
    yield browser
    assert browser.get_log("browser") == []
    events = [json.loads(line["message"])["message"] for line in browser.get_log("performance")]
    asked = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
    assert {one["request"]["url"] for one in asked if one["documentURL"] == url} == {
        url
    }  # other documents: the browser's own, when it starts
    assert not browser.execute_script("return window.alerted")


def wait(browser, condition):
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, 10, poll_frequency=0.02).until(lambda _: condition())


def texts(browser, selector):
    return browser.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map((node) => node.textContent)",
        selector,
    )


def press(browser, *keys):
    from selenium.webdriver.common.action_chains import ActionChains

    chain = ActionChains(browser, duration=0)
    for key in keys:
        chain.send_keys(key)
    chain.perform()


@pytest.mark.browser
def test_page_shows_the_runs(opened):
    assert opened.title == "one, two · report"
    assert (
        "CONTROL shuffled-rewards" in texts(opened, "#top tbody tr")[1]
        and "0.100 [0.050, 0.150] → 0.900 [0.850, 0.950]" in texts(opened, "#top tbody tr")[0]
    )
    titles = [title.removesuffix("one") for title in texts(opened, "figcaption h3")]
    assert {
        "Reward",
        "Held-out score",
        "Timeline",
        "Groups by class",
        "Step time (s)",
        "Level",
    } < set(titles) and "KL to the reference" not in titles
    lines = opened.execute_script(
        "return [...document.querySelectorAll('figure')].map((f) => "
        "f.querySelectorAll('.scatterlayer .trace').length)"
    )
    assert (
        len(lines) == len(titles) and lines[titles.index("Reward")] == 6 and min(lines) > 0
    )  # a line and the two edges of its band, each run
    assert "completions of all 6 steps" in texts(opened, "#kept")[0] and f"name{EVIL}" in texts(
        opened, "#tables dl div"
    )
    opened.execute_script("document.querySelector('#runs button:nth-child(2)').click()")
    assert "completions of all 3 steps" in texts(opened, "#kept")[0]


@pytest.mark.browser
def test_slider_cards_and_the_rows_of_a_group(opened):
    assert texts(opened, "#step b") == ["Step 1"] and len(texts(opened, ".card")) == 2
    opened.execute_script(
        "const s = document.getElementById('slider'); s.value = 4; s.dispatchEvent(new "
        "Event('input'))"
    )
    assert texts(opened, "#step b") == ["Step 5"]
    rows = texts(opened, ".row")
    assert (
        [row[:5] for row in rows] == ["0.750", "0.250", "0.000"]
        and "+1.00 advantage" in rows[0]
        and "−0.25 advantage" in rows[1]
    )
    assert (
        "word 4: wrote 'd5' for 'd'" in rows[0]
        and texts(opened, ".row:nth-of-type(2) .words del") == ["b", "d"]
        and texts(opened, ".row:nth-of-type(2) .words ins") == ["x"]
    )
    opened.execute_script("document.querySelectorAll('.card')[1].click()")
    assert "skipped" in texts(opened, "#group h3")[0] and texts(
        opened, ".row:nth-of-type(2) .fold"
    ) == ["same text as completion 0"]
    assert "trap: copies A" in texts(opened, ".card")[1]


@pytest.mark.browser
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
    assert texts(opened, "#group h3")[0].startswith("Group 0") and texts(
        opened, ".row.here .pay b"
    ) == ["0.250"]
    press(opened, "?")
    assert opened.execute_script("return document.getElementById('help').open")
    press(opened, Keys.ESCAPE)
    assert not opened.execute_script("return document.getElementById('help').open")


@pytest.mark.browser
def test_tints(opened):
    press(opened, "3")
    assert texts(opened, "#tints [aria-pressed=true]") == ["Advantage"]
    colours = opened.execute_script(
        "return [1, 2].map((n) => document.querySelector(`.row:nth-of-type(${n}) .words "
        "bdi`).style.background)"
    )
    assert (
        "var(--c0) 55%" in colours[0] and "var(--c1) 14%" in colours[1]
    )  # advantages 1.0 and -0.25 of at most 1.0
    press(opened, "2")
    assert "no checkpoint with a tokenizer" in texts(opened, ".key")[0]


@pytest.mark.browser
def test_search(opened):
    from selenium.webdriver.common.keys import Keys

    press(opened, "/", "c", " ", "D", "4")
    assert opened.execute_script("return document.activeElement.id") == "search"
    assert (
        texts(opened, "#found p") == ["1 match"]
        and "step 4 · group 0 · completion 0" in texts(opened, ".find")[0]
    )
    press(opened, Keys.ENTER)
    assert texts(opened, "#step b") == ["Step 4"] and texts(opened, ".hit") == ["c", "dd4"]
    press(opened, Keys.ESCAPE, Keys.ARROW_LEFT)
    assert texts(opened, "#step b") == ["Step 3"]
    opened.execute_script(
        "const s = document.getElementById('search'); s.value = 'nowhere'; s.dispatchEvent(new "
        "Event('input'))"
    )
    assert texts(opened, "#found p") == ["No matches"]


@pytest.mark.browser
def test_theme(opened):
    def colours():
        return opened.execute_script(
            "return [getComputedStyle(document.body).backgroundColor, "
            "document.querySelector('figure .xtick text').style.fill]"
        )

    before = colours()
    opened.execute_script("document.getElementById('theme').click()")
    after = colours()
    assert before[0] != after[0] and before[1] != after[1]
    press(opened, "t")
    assert colours() == before


@pytest.mark.browser
def test_evil_and_endless_texts_are_shown_harmlessly(opened):
    opened.execute_script("window.alert = () => { window.alerted = true; }")
    assert (
        EVIL in texts(opened, ".row:nth-of-type(3) .words")[0]
        and opened.execute_script(
            "return document.querySelectorAll('main script, main b b').length"
        )
        == 0
    )
    assert "Do <b>it</b>" in texts(opened, "#group pre")[0]
    press(opened, "\ue014")  # to step 2, whose second completion has 10,000 words
    shown = opened.execute_script(
        "return document.querySelectorAll('.row:nth-of-type(2) .words .w').length"
    )
    assert 0 < shown <= 600
    opened.execute_script(
        "[...document.querySelectorAll('.row:nth-of-type(2) .fold')].at(-1).click()"
    )
    assert (
        shown
        < opened.execute_script(
            "return document.querySelectorAll('.row:nth-of-type(2) .words .w').length"
        )
        <= 1200
    )
    assert opened.execute_script("return document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.browser
def test_phone(opened):
    opened.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True},
    )
    try:
        opened.refresh()
        wait(opened, lambda: opened.execute_script("return document.documentElement.dataset.ready"))
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
