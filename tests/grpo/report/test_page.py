"""The report of a run as one page: what is embedded, and that it is harmless."""

import re

import pytest
from report_runs import EVIL, STEPS, data_of, group, make_run, metrics_of, page_of

from grpo import report
from grpo.data.errors import command_of
from grpo.records import CLASSES, WHY
from grpo.run.logs import append_lines, load_run, write_rollouts


@pytest.fixture
def made(tmp_path):
    return make_run(tmp_path / "made")


def said(capsys, *argv, status=0):
    assert report.main([str(part) for part in argv]) == status
    return capsys.readouterr()


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


def test_a_live_page_is_written_until_the_run_has_ended(made, capsys, monkeypatch):
    """Its reader's browser loads it again, until a verdict closes the run."""
    pages = []

    def train_on(seconds):
        pages.append(data_of((made / "report.html").read_text())["data"])
        step = STEPS + len(pages)
        append_lines(made / "metrics.jsonl", metrics_of(step))
        if len(pages) == 2:
            line = {"step": step, "purpose": "verdict", "verdict": "learned"}
            append_lines(made / "eval.jsonl", line)

    monkeypatch.setattr(report.time, "sleep", train_on)
    assert said(capsys, made, "--live").out.count("\n") == 1
    pages.append(data_of((made / "report.html").read_text())["data"])
    assert [page["reload"] for page in pages] == [report.RELOAD_SECONDS] * 2 + [0]
    assert [page["runs"][0]["made"] for page in pages] == [STEPS, STEPS + 1, STEPS + 2]


def test_what_is_said_of_a_run(made):
    (run,) = data_of(page_of(made))["data"]["runs"]
    assert run["headline"] == [
        ["task", "t"],
        ["level", "4 words"],
        ["model", "builtin"],
        ["reward", "prefix"],
        ["steps", "6"],
        ["tokens", "600"],
        ["time", "0:00:09 h"],
        ["hardware", "cpu, 2 threads"],
    ]
    assert run["heldout"] == [
        {
            "what": "similarity at 4 words",
            "how": "n = 20, temperature 1",
            "scores": ["0.100 [0.090, 0.110]", "0.900 [0.890, 0.910]"],
            "exact": "0.10 → 0.90",
        }
    ]
    assert run["metrics"]["reward"] == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    assert "levels" not in run["metrics"]
    assert run["decisions"][0]["step"] == 3
    assert run["inspect"] == f"{command_of('inspect')} {made}"
    assert run["facts"][0] == ["torch", "2.13.0"]
    assert ["name", EVIL] in run["config"]


def test_every_text_is_harmless_in_the_page(made):
    write_rollouts(
        made / "rollouts" / "step-000001.jsonl.zst",
        [group(("x\u2028</script>\x00\x1b[31m", 0.0), ("\u202e<!--<script>", 0.0), key=EVIL)],
        step=1,
    )
    page = page_of(made)
    assert EVIL not in page
    assert "<!--" not in page
    assert "\u2028" not in page
    assert "\x1b" not in page
    assert "\x00" not in page
    texts = data_of(page)["samples-0"]["1"][0]["texts"]
    assert [text["words"] for text in texts] == [r"x </script>\x00\x1b[31m", r"\u202e<!--<script>"]
    assert data_of(page)["samples-0"]["1"][0]["prompt"] == "Do <b>it</b>\n\\x1b[31mnow"


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
    budget = 8 * step
    kept = report.kept_samples(load_run(run), budget)
    assert list(kept) == [1, 3, 5, 9, 17, 25, 33, 40] and sum(map(len, kept.values())) <= budget
    assert list(report.kept_samples(load_run(run), 1)) == [1, 40]
    (told,) = data_of(page_of(run, budget=budget))["data"]["runs"]
    assert told["stored"] == 40 and told["kept"] == sorted(kept)
    assert len(report.kept_samples(load_run(run), 10**6)) == 40


def test_a_run_with_little(tmp_path):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.yaml").write_text("task: t\n")
    (run,) = data_of(page_of(tmp_path / "bare"))["data"]["runs"]
    assert (run["kept"], run["heldout"], run["decisions"], run["metrics"]) == ([], [], [], {})
    run = make_run(tmp_path / "noeval")
    (run / "eval.jsonl").unlink()
    (run / "curriculum.jsonl").unlink()
    assert data_of(page_of(run))["data"]["runs"][0]["heldout"] == []


def test_warnings_are_alarms_and_the_stop():
    lines = [metrics_of(1), metrics_of(2, events=["ALARM: a trap", "opened level 2"])]
    lines.append(metrics_of(5, stopped="no signal"))
    assert [(one["step"], one["why"]) for one in report.warnings_of(lines)] == [
        (2, "ALARM: a trap"),
        (5, "stopped: no signal"),
    ]


def test_every_class_of_groups_has_a_sign_and_a_meaning():
    source = (report.FOLDER / "base.js").read_text()
    (block,) = re.findall(r"const CLASSES = \{(.*?)\};", source, re.DOTALL)
    assert set(re.findall(r"(\w+): \[", block)) == set(CLASSES)
    assert {"varied", *WHY} == set(CLASSES)


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


def test_the_verdict_comes_first(made):
    line = {
        "step": 6,
        "purpose": "verdict",
        "verdict": "learned",
        "before": 0.1,
        "after": 0.9,
        "difference": 0.8,
        "low": 0.7,
        "high": 0.9,
        "n": 20,
        "imitated": None,
        "solved_step": 5,
        "mistake": f"skips a word {EVIL}",
        "next_command": "python eval.py --model runs/made",
    }
    append_lines(made / "eval.jsonl", line)
    for step in range(7, 10):
        append_lines(
            made / "metrics.jsonl", metrics_of(step, loss=0.1, wasted_tokens_total=90 * step)
        )
    outcome = data_of(page_of(made))["data"]["runs"][0]["outcome"]
    assert (outcome["title"], outcome["tone"]) == ("Learned", "good")
    assert outcome["text"].startswith("+0.800 on held-out problems (95 % interval +0.700 to +0.900")
    assert outcome["next"] == "python eval.py --model runs/made"
    assert outcome["figures"] == [
        ["steps that updated the weights", "3 of 9", None],
        ["sampled tokens that taught nothing", "90%", None],
        ["completions truncated", "0%", None],
        ["solved for good", "step 5", 5],
        ["most common mistake", f"skips a word {EVIL}", None],
    ]


@pytest.mark.parametrize("kind", ["collapsed", "not learned"])
def test_a_failed_run_has_its_cause_at_the_top_and_nothing_in_the_colour_of_success(made, kind):
    why = {"cause": f"100% in the trap '{EVIL}'", "remedy": "try --reward prefix"}
    gain = {"low": 0.1, "high": 0.3, "n": 200}
    append_lines(
        made / "eval.jsonl",
        {"step": 6, "purpose": "verdict", "verdict": kind, "difference": 0.2, **gain, **why},
    )
    page = page_of(made)
    outcome = data_of(page)["data"]["runs"][0]["outcome"]
    assert (outcome["title"], outcome["tone"]) == (kind.capitalize(), "bad")
    assert outcome["why"] == list(why.values())

    blue = re.findall(r"^(.*) {\n  color: var\(--c0\);", page, re.M)
    scores = [selector for selector in blue if "score" in selector]
    assert scores == ['.scores[data-tone="good"] .score:last-of-type b']


def test_a_run_without_a_verdict_says_so(made):
    outcome = data_of(page_of(made))["data"]["runs"][0]["outcome"]
    assert outcome["why"] == []
    assert (outcome["title"], outcome["tone"], outcome["text"]) == ("No verdict yet", "open", "")
    assert outcome["figures"][0][1] == "0 of 6"


def test_where_learning_began():
    def lines(*scores, level=1):
        return [{"step": i, "level": level, "value": x} for i, x in enumerate(scores, start=1)]

    rising = [0.1] * 5 + [0.4] + [0.9] * 6
    assert report.learning_began(lines(*rising)) == 7
    returning = lines(0.1, 0.9, 0.1, 0.1, 0.1, 0.1, 0.9, 0.9, 0.9)
    assert report.learning_began(returning) == 8  # for good
    assert report.learning_began(lines(*rising) + lines(*[0.0] * 6, level=2)) == 7
    assert report.learning_began(lines(*[0.5] * 12)) is None
    assert report.learning_began(lines(0.1, 0.9)) is None
    assert report.learning_began([]) is None


def test_settings_that_are_not_at_their_default(made):
    (run,) = data_of(page_of(made))["data"]["runs"]
    assert run["changed"] == ["task", "level", "reward", "name"]
