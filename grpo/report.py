"""Show runs on one page: charts, and the groups and completions of single steps.

    python -m grpo.report runs/NAME                           writes runs/NAME/report.html
    python -m grpo.report runs/NAME runs/OTHER -o both.html   several runs in the same charts
    python -m grpo.report --live runs/NAME                    writes it again while the run goes on

The page is a single HTML file that needs no network. The charts show all steps. The completions
would be too large, so the page has those of the first and the last step, and of as many others as
fit into --megabytes: steps with a decision or a warning, then evenly spaced ones. With --live an
open page loads itself again, except while its reader looks at the samples. The exit status is 2 if
there is no such run, or if a file is damaged.
"""

import argparse
import hashlib
import html
import json
import math
import re
import sys
import time
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from itertools import accumulate, chain, takewhile
from pathlib import Path
from typing import Any

from grpo.config import Config
from grpo.data.errors import (
    Parser,
    UserError,
    command_of,
    escape_control,
    exit_status,
    printable,
    quoted,
)
from grpo.data.files import check_output, write_whole
from grpo.ending import FAILED, figures_in_words, figures_of
from grpo.records import WHY, level_name
from grpo.run.logs import RunData, checkpoint_folders, load_run, step_of
from grpo.show.console import counted, interval, sampling_name
from grpo.tasks.registry import is_of_project
from grpo.tools.report.samples import packed, pieces_of

Record = Mapping[str, Any]

# The folder of page.html and its parts.
FOLDER = Path(__file__).parent / "tools" / "report"
SCRIPTS = ("base.js", "charts.js", "samples.js", "page.js")
STYLES = ("page.css", "samples.css")

# The Content-Security-Policy of the page: no script but its own, and no network.
POLICY = "default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"

# How often the page of a run in progress is written and loaded again.
RELOAD_SECONDS = 30

# The size of the completions of all runs, unless another is asked for.
MEGABYTES = 3.0

# Learning begins where the running mean of this many steps has risen, for good, by this share of
# its whole rise. A smaller rise than MIN_RISE is not told from noise.
WINDOW = 3
SHARE = 0.2
MIN_RISE = 0.05


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program with these arguments; return the exit status."""
    return exit_status("grpo.report", lambda: start(argv))


def start(argv: Sequence[str] | None) -> int:
    """Write the page, and print its path; with --live, again until the runs have ended."""
    arguments = parse(argv)
    if arguments.output:
        check_output(str(arguments.output), "--output")

    steps: list[int] = []
    while True:
        runs = [load_run(path) for path in arguments.runs]
        before, steps = steps, [len(run.metrics) for run in runs]
        has_ended = all(run.verdict and run.verdict["step"] >= n for run, n in zip(runs, steps))
        is_live = arguments.live and not has_ended
        if steps != before or not is_live:
            output = write_report(runs, arguments.output, arguments.megabytes, is_live=is_live)
        if not before:
            size = f"{output.stat().st_size / 1e6:.1f} MB"
            count = f"{len(runs)} runs" if len(runs) > 1 else "1 run"
            print(printable(f"{output}: {size}, {count}; open it in a browser"), flush=True)
        if not is_live:
            return 0
        time.sleep(RELOAD_SECONDS)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the flags."""
    parser = Parser(prog=command_of("report"), description=__doc__)
    add = parser.add_argument
    add("runs", type=Path, nargs="+", metavar="RUN", help="the directory of a run")
    page = "the page to write (default: report.html in the first run)"
    add("-o", "--output", type=Path, metavar="FILE", help=page)
    size = "size of the completions of all runs (default: %(default)g); the charts take 5 more"
    add("--megabytes", type=float, default=MEGABYTES, metavar="N", help=size)
    add("--live", action="store_true", help="write the page again until the runs have ended")
    arguments = parser.parse_args(argv)
    if not 0 < arguments.megabytes < math.inf:
        raise UserError("--megabytes: give a number above 0, such as 4")
    return arguments


# --- the page ---------------------------------------------------------------------------------


def write_report(
    runs: Sequence[RunData],
    output: Path | None = None,
    megabytes: float = MEGABYTES,
    *,
    is_live: bool = False,
) -> Path:
    """Write the page of `runs`, by default report.html in the first run; return its path."""
    output = output or runs[0].path / "report.html"
    budget = round(megabytes * 1e6 / len(runs))
    write_whole(output, page(runs, budget, is_live=is_live).encode())
    return output


def page(runs: Sequence[RunData], budget: int, *, is_live: bool = False) -> str:
    """Return the page as HTML; `budget` is that of `kept_samples` for each run."""
    from plotly.offline import get_plotlyjs  # here, because it takes a while to import

    samples = [kept_samples(run, budget) for run in runs]
    descriptions = [described(run, list(kept)) for run, kept in zip(runs, samples)]
    values = {"runs": descriptions, "classes": WHY, "reload": RELOAD_SECONDS if is_live else 0}
    blocks = {"data": _compact(values)}
    for number, kept in enumerate(samples):
        steps = ",".join(f'"{step}":{text}' for step, text in kept.items())
        blocks[f"samples-{number}"] = f"{{{steps}}}"

    scripts = {
        "plotly": get_plotlyjs(),
        "script": "".join((FOLDER / name).read_text("utf-8") for name in SCRIPTS),
    }
    # The page allows these scripts and no others.
    digests = [hashlib.sha256(script.encode()).digest() for script in scripts.values()]
    hashes = " ".join(f"'sha256-{b64encode(digest).decode()}'" for digest in digests)
    names = ", ".join(description["name"] for description in descriptions)
    parts = {
        **scripts,
        "title": html.escape(f"{names} · report"),
        "style": "".join((FOLDER / name).read_text("utf-8") for name in STYLES),
        # Elements that are not executed, and that nothing in them ends.
        "data": "\n".join(
            f'<script type="application/json" id="{name}">{text}</script>'
            for name, text in blocks.items()
        ),
        "policy": POLICY.format(hashes=hashes),
    }

    # All parts are inserted in one pass, so that marks within a part stay as they are.
    frame = (FOLDER / "page.html").read_text("utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], frame)


def _compact(value: Any) -> str:
    """Return a value as JSON with each "<" escaped; it occurs in strings only."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


# --- what the page shows of a run, except for its completions ---------------------------------


def described(run: RunData, kept: Sequence[int]) -> dict[str, Any]:
    """Return what the page shows of a run besides the completions, which are those of `kept`."""
    config = {name: value for name, value in run.config.items() if name != "facts"}
    defaults, control = asdict(Config()), config.get("control") or "none"
    lines = run.metrics
    items = chain.from_iterable(line.items() for line in lines)
    names = dict.fromkeys(name for name, value in items if isinstance(value, (int, float)))
    # A task or a reward of the user's own may have any range.
    has_own = "reward-range" in (config.get("task_options") or {})
    is_known = is_of_project(str(config.get("task"))) and not has_own
    seconds = accumulate(line.get("step_time") or 0.0 for line in lines)
    return _harmless_values(
        {
            "name": run.path.resolve().name,
            "path": str(run.path),
            "inspect": f"{command_of('inspect')} {quoted(run.path)}",
            "control": None if control == "none" else str(control),
            "outcome": outcome(run),
            "headline": headline(run),
            "heldout": heldout(run),
            "range": [0.0, 1.0] if is_known else None,
            # The curves, the minutes trained after each step, and how many steps the run has made.
            "metrics": {name: [line.get(name) for line in lines] for name in names},
            "minutes": [value / 60 for value in seconds],
            "made": len(lines),
            # What happened, by step.
            "evals": run.evals,
            "decisions": run.decisions,
            "warnings": warnings_of(lines),
            "checkpoints": [step_of(path) for path in checkpoint_folders(run.path)],
            # The settings, and which steps have completions.
            "config": _listed(config),
            "changed": [name for name, x in config.items() if x != defaults.get(name, x)],
            "facts": _listed(run.config.get("facts") or {}),
            "stored": len(run.steps()),
            "kept": kept,
        }
    )


def _harmless_values(value: Any) -> Any:
    """Return JSON values with texts escaped, and floats rounded to six significant digits."""
    if isinstance(value, str):
        return escape_control(value)
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {_harmless_values(key): _harmless_values(each) for key, each in value.items()}
    return [_harmless_values(each) for each in value] if isinstance(value, (list, tuple)) else value


def headline(run: RunData) -> list[tuple[str, str]]:
    """Return the facts at the head of the page, as (name, text)."""
    config, facts = run.config, run.config.get("facts") or {}
    unit = next((line.get("unit") or "" for line in run.evals), "")
    model = str(config.get("model"))
    if config.get("start"):
        model = f"{model}, started from {config['start']}"

    own = (config.get("task_options") or {}).get("reward-file")
    if isinstance(functions := facts.get("functions"), Mapping):
        own = own or ", ".join(map(str, functions))
    tokens = run.metrics[-1].get("num_tokens", 0) if run.metrics else 0
    seconds = sum(line.get("step_time") or 0 for line in run.metrics)
    threads = f", {facts['threads']} threads" if facts.get("threads") else ""
    return [
        ("task", str(config.get("task"))),
        ("level", f"{config.get('level', '')} {unit}".strip()),
        ("model", model),
        ("reward", str(config.get("reward") or own or "the task's own reward")),
        ("steps", f"{len(run.metrics):,}"),
        ("tokens", f"{tokens:,}"),
        ("time", f"{timedelta(seconds=round(seconds))} h"),
        ("hardware", f"{facts.get('device', 'unknown')}{threads}"),
    ]


def heldout(run: RunData) -> list[dict[str, Any]]:
    """Return the first and the last score by level, first of the run's level."""
    own_level, levels = run.config.get("level"), {line["level"] for line in run.reports}
    found = []
    for level in sorted(levels, key=lambda level: (level != own_level, level)):
        lines = [line for line in run.reports if line["level"] == level]
        last = lines[-1]
        ends = [lines[0], last] if len(lines) > 1 else [last]
        metric = last.get("metric", "score")
        exact = " → ".join(f"{line['exact']:.2f}" for line in ends)
        found.append(
            {
                "what": f"{metric} at {level_name(level, last.get('unit') or '')}",
                "how": f"{counted(last)}, {sampling_name(last)}",
                "scores": [interval(line) for line in ends],
                # An exact match is the score itself, so it is not repeated.
                "exact": None if metric == "exact match" else exact,
            }
        )
        found += [
            {"what": name, "how": found[-1]["how"], "scores": [interval(each)], "exact": None}
            for name, each in (last.get("components") or {}).items()
        ]
    return found


def warnings_of(lines: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the alarms, and why the run was stopped, with their steps."""
    found = []
    for line in lines:
        alarms = [event for event in line.get("events", ()) if event.startswith("ALARM")]
        if line.get("stopped"):
            alarms.append(f"stopped: {line['stopped']}")
        found += [{"step": line["step"], "why": why} for why in alarms]
    return found


def _listed(values: Record) -> list[tuple[str, str]]:
    """Return names and values as the page shows them, e.g. ("level", "25")."""
    shown = {name: "–" if value in (None, "", {}) else value for name, value in values.items()}
    return [
        (str(name), value if isinstance(value, str) else json.dumps(value, default=str))
        for name, value in shown.items()
    ]


# --- the verdict ------------------------------------------------------------------------------


def outcome(run: RunData) -> dict[str, Any]:
    """Return the verdict: a title, a sentence, figures (name, text, step or None), and a command.

    A run that goes on or was interrupted has none yet. Its figures are those of the steps so far.
    """
    line = run.verdict or {}
    kind = line.get("verdict", "no verdict yet")
    is_good = kind in ("learned", "already solved")
    has_failed = kind in FAILED or bool(line.get("stopped"))  # as the exit status says
    text = ""
    if line.get("difference") is not None:
        bounds = f"95 % interval {line['low']:+.3f} to {line['high']:+.3f}"
        text = f"{line['difference']:+.3f} on held-out problems ({bounds}, n = {line['n']}, paired)"
    if line.get("imitated") is not None:
        text += f", of which imitation does not count: it had reached {line['imitated']:.3f}"

    figures = figures_in_words({**line, **figures_of(run.metrics)})
    began = learning_began(run.metrics) if kind == "learned" else None
    if began is not None:
        figures["learning began"] = f"step {began}"
    if line.get("stopped"):
        figures["stopped"] = line["stopped"]
    steps = {"learning began": began, "solved for good": line.get("solved_step")}
    return {
        "title": kind.capitalize(),
        "tone": "bad" if has_failed else "good" if is_good else "open",
        "text": text,
        "why": [line[name] for name in ("cause", "remedy") if line.get(name)],
        "figures": [(name, text, steps.get(name)) for name, text in figures.items()],
        "next": line.get("next_command") or "",
    }


def learning_began(metrics: Sequence[Record]) -> int | None:
    """Return the first step from which the score has risen for good; None if it does not rise.

    It is looked for at the run's first level: a harder one lowers the score.

    >>> lines = [{"step": n + 1, "level": 1, "value": 0.0 if n < 9 else 1.0} for n in range(20)]
    >>> learning_began(lines)
    10
    """
    first = metrics[0].get("level") if metrics else None
    lines = list(takewhile(lambda line: line.get("level") == first, metrics))
    scores = [line["value"] for line in lines if line.get("value") is not None]
    if len(scores) < max(len(lines), 2 * WINDOW):
        return None

    running = [sum(scores[at : at + WINDOW]) / WINDOW for at in range(len(scores) - WINDOW + 1)]
    rise = max(running) - running[0]
    if rise < MIN_RISE:
        return None
    low = [at for at, mean in enumerate(running) if mean < running[0] + SHARE * rise]
    begins = low[-1] + WINDOW
    return int(lines[begins]["step"]) if begins < len(lines) else None


# --- the completions that fit -----------------------------------------------------------------


def kept_samples(run: RunData, budget: int) -> dict[int, str]:
    """Return the groups of the first and the last step as JSON, and of as many other steps as fit
    into `budget` bytes: notable ones, then evenly spaced ones.
    """
    steps, pieces = run.steps(), pieces_of(run.path)
    marked = {line["step"] for line in (*run.decisions, *warnings_of(run.metrics))}
    ends, notable = {*steps[:1], *steps[-1:]}, sorted(marked & set(steps))

    kept: dict[int, str] = {}
    for step in dict.fromkeys([*ends, *evenly_spaced(notable), *evenly_spaced(steps)]):
        groups = enumerate(run.groups(step))
        text = _compact([packed(group, n, run.config, pieces) for n, group in groups])
        budget -= len(text)
        if budget < 0 and step not in ends:
            break
        kept[step] = text
    return dict(sorted(kept.items()))


def evenly_spaced(numbers: Sequence[int]) -> list[int]:
    """Return numbers in an order in which those so far are always about evenly spaced: by the bits
    of their places, the lowest first (van der Corput).

    >>> evenly_spaced(range(5))
    [0, 4, 2, 1, 3]
    """
    places = sorted(range(len(numbers)), key=lambda place: f"{place:032b}"[::-1])
    return [numbers[place] for place in places]


if __name__ == "__main__":
    sys.exit(main())
