"""A run as one page: curves, and for a step its groups and completions, in a single HTML file that
needs no network.

    python -m grpo.report runs/NAME                        -> runs/NAME/report.html
    python -m grpo.report runs/NAME runs/OTHER -o both.html   runs over each other

All steps are in the curves. Of the texts, those of some steps are kept, as many as --megabytes
takes: the first, the last, those with a decision or a warning, and between them evenly; the page
says which. Rollouts are read a step at a time. Exit status 2, with one line: no such run, a
damaged file.
"""

import argparse
import hashlib
import html
import json
import math
import re
from base64 import b64encode
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from data.files import write_whole
from grpo.records import Group
from grpo.run.reader import RunData, load_run
from grpo.show.console import clock_time, counted, interval
from grpo.show.tables import WHY
from grpo.text import escape_control
from grpo.tools.report.samples import Pieces, packed, pieces_of, short
from grpo.variance import COLLAPSED
from tasks.base import Parser, UserError, exit_status, needs

ROOM = Path(__file__).parent  # where report.html and its parts lie
SCRIPTS = ("report_charts.js", "report_samples.js", "report.js")
MOST_POINTS = 2000  # of a curve; of a longer run every second, third ... step is drawn
STEP_SHARE = 1 / 8  # of the budget, for the groups of one step
NOTABLE_SHARE = 1 / 2  # of the budget, for the steps with decisions and warnings
Record = Mapping[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Write a report by these flags; return the exit status."""
    return exit_status("grpo.report", lambda: report(argv))


def report(argv: Sequence[str] | None) -> int:
    """Write the page, and say where it is."""
    arguments = parse(argv)
    runs = [load_run(path) for path in arguments.runs]
    output = arguments.output or runs[0].path / "report.html"
    content = page(runs, budget=round(arguments.megabytes * 1e6 / len(runs))).encode()
    write_whole(output, content)
    print(
        f"{output}: {len(content) / 1e6:.1f} MB, {len(runs)} run{'s' * (len(runs) > 1)}; open it "
        "in a browser"
    )
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the flags."""
    parser = Parser(
        prog="python -m grpo.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="the directory of a run")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="where the page goes (default: report.html in the first run)",
    )
    parser.add_argument(
        "--megabytes",
        type=float,
        default=4.0,
        metavar="N",
        help="for the texts of all runs (default: 4); the charts take 5 more",
    )
    arguments = parser.parse_args(argv)
    if not 0 < arguments.megabytes < math.inf:
        raise UserError("--megabytes: give a number above 0, such as 4")
    return arguments


def page(runs: Sequence[RunData], budget: int) -> str:
    """Return the page of `runs` as HTML, with at most `budget` bytes of texts a run."""
    with needs("plotly", "report"):
        from plotly.offline import get_plotlyjs
    samples = [kept_samples(run, budget) for run in runs]
    told = [described(run, kept) for run, kept in zip(runs, samples)]
    names = ", ".join(run["name"] for run in told)
    scripts = {
        "plotly": get_plotlyjs(),
        "script": "".join((ROOM / name).read_text() for name in SCRIPTS),
    }
    blocks = [
        data_block("data", json.dumps({"runs": told, "classes": WHY}, separators=(",", ":"))),
        *(data_block(f"samples-{number}", joined(kept)) for number, kept in enumerate(samples)),
    ]
    parts = {
        **scripts,
        "title": html.escape(f"{names} · report"),
        "style": (ROOM / "report.css").read_text(),
        "data": "\n".join(blocks),
        "hashes": " ".join(
            f"'sha256-{b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
            for script in scripts.values()
        ),
    }
    return re.sub(
        r"\{\{(\w+)\}\}", lambda match: parts[match[1]], (ROOM / "report.html").read_text()
    )  # in one pass: no part is searched for marks


def data_block(name: str, text: str) -> str:
    """Return JSON as an element that no browser runs: without a "<" nothing in it can end the
    element.
    """
    return f'<script type="application/json" id="{name}">{harmless_json(text)}</script>'


def harmless_json(text: str) -> str:
    """Return JSON with each "<" spelled out (it occurs in strings only).

    >>> harmless_json('["</script>"]')
    '["\\\\u003c/script>"]'
    """
    return text.replace("<", "\\u003c")


def described(run: RunData, kept: Mapping[int, str]) -> dict[str, Any]:
    """Return what the page says of a run, but its texts: curves, evaluations, timeline,
    configuration. `kept` are the steps whose texts there are.
    """
    lines = run.metrics[:: max(1, math.ceil(len(run.metrics) / MOST_POINTS))]
    names = dict.fromkeys(
        name for line in lines for name, value in line.items() if isinstance(value, (int, float))
    )
    config = {name: value for name, value in run.config.items() if name != "facts"}
    facts = run.config.get("facts") or {}
    control = config.get("control") or "none"
    return {
        "name": escape_control(run.path.resolve().name),
        "path": escape_control(str(run.path)),
        "control": None if control == "none" else escape_control(str(control)),
        "headline": headline(run),
        "heldout": heldout(run),
        "metrics": {name: [short(line.get(name)) for line in lines] for name in names},
        "drawn": len(lines),
        "made": len(run.metrics),
        "evals": [{key: short(line.get(key)) for key in EVALUATION} for line in run.evals],
        "decisions": [
            {
                "step": line["step"],
                "kind": line["kind"],
                "from": line["from"],
                "to": line["to"],
                "why": escape_control(line["why"]),
            }
            for line in run.decisions
        ],
        "warnings": warnings_of(run.metrics),
        "checkpoints": sorted(
            int(path.name[5:]) for path in (run.path / "checkpoints").glob("step-*")
        ),
        "config": listed(config),
        "facts": listed(facts),
        "stored": len(run.steps()),
        "kept": sorted(kept),
    }


EVALUATION = (
    "step",
    "purpose",
    "level",
    "temperature",
    "metric",
    "mean",
    "ci_low",
    "ci_high",
    "exact",
    "n",
)


def headline(run: RunData) -> list[tuple[str, str]]:
    """Return the figures at the head of the page, as (name, text)."""
    config, last = run.config, run.metrics[-1] if run.metrics else {}
    facts = config.get("facts") or {}
    threads = f", {facts['threads']} threads" if facts.get("threads") else ""
    unit = next((line.get("unit") or "" for line in run.evals), "")
    time = clock_time(sum(line.get("step_time") or 0 for line in run.metrics))
    model, start = config.get("model"), config.get("start")
    told = {
        "task": config.get("task"),
        "level": f"{config.get('level', '')} {unit}",
        "model": f"{model}, started from {start}" if start not in (None, model) else model,
        "reward": config.get("reward") or "the task's own reward",
        "steps": f"{len(run.metrics):,}",
        "tokens": f"{last.get('num_tokens', 0):,}",
        "time": time + (" h" if time.count(":") > 1 else " min"),
        "hardware": f"{facts.get('device', 'unknown')}{threads}",
    }
    return [(name, escape_control(str(value)).strip()) for name, value in told.items()]


def heldout(run: RunData) -> list[dict[str, Any]]:
    """Return for each level and temperature that was reported on the scores before and after, that
    of the level asked for first.
    """
    series: dict[tuple, list[Record]] = {}
    for line in run.reports:
        series.setdefault((line["level"], line.get("temperature", 1.0)), []).append(line)
    order = sorted(series, key=lambda key: (key[0] != run.config.get("level"), key))
    found = []
    for level, temperature in order:
        first, last = series[level, temperature][0], series[level, temperature][-1]
        ends = [first, last] if last is not first else [last]
        found.append(
            {
                "what": escape_control(
                    f"{last.get('metric') or 'score'} at {level} {last.get('unit') or ''}"
                ).strip(),
                "how": f"{counted(last)}, "
                + (f"temperature {temperature:g}" if temperature else "greedy"),
                "scores": [interval(line) for line in ends],
                "exact": " → ".join(f"{line['exact']:.2f}" for line in ends),
            }
        )
    return found


def warnings_of(lines: Sequence[Record]) -> list[dict[str, Any]]:
    """Return where something began that needs a look: half of a step's groups collapsed, half of
    its completions in a trap, an alarm.
    """
    found = []
    before: set[str] = set()
    for line in lines:
        now = {
            f"half of the completions or more: {escape_control(name[6:])}"
            for name, share in line.items()
            if name.startswith("traps/") and share >= 0.5
        }
        if sum(line.get(f"groups/class/{name}") or 0 for name in COLLAPSED) >= 0.5 * (
            line.get("groups/count") or math.inf
        ):
            now.add("half of the groups or more collapsed")
        now |= {
            escape_control(event) for event in line.get("events", ()) if event.startswith("ALARM")
        }
        if line.get("stopped"):
            now.add(f"stopped: {escape_control(line['stopped'])}")
        found += [{"step": line["step"], "why": why} for why in sorted(now - before)]
        before = now
    return found


def listed(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return names and values as they are shown."""
    return [
        (
            escape_control(str(name)),
            "–"
            if value in (None, "", {})
            else escape_control(
                value if isinstance(value, str) else json.dumps(value, default=str)
            ),
        )
        for name, value in values.items()
    ]


def kept_samples(run: RunData, budget: int) -> dict[int, str]:
    """Return for some steps, as many as `budget` bytes take, their groups as JSON: first and last,
    the notable, and evenly between them.
    """
    steps, pieces, kept, used = run.steps(), pieces_of(run.path), {}, 0
    marked = {line["step"] for line in run.decisions if line["kind"] != "stay"} | {
        line["step"] for line in warnings_of(run.metrics)
    }
    notable = sorted(marked & set(steps))
    for wanted, most in ((notable, NOTABLE_SHARE * budget), (steps, budget)):
        for step in (
            wanted[i] for i in evenly_spaced(len(wanted))
        ):  # the first and the last of all steps always fit: there is half of the budget left
            if step not in kept:
                text = packed_step(run.groups(step), pieces, STEP_SHARE * budget)
                if used + len(text) > most:
                    break
                kept[step] = text
                used += len(text)
    return dict(sorted(kept.items()))


def packed_step(groups: Sequence[Group], pieces: Pieces | None, budget: float) -> str:
    """Return the groups of a step as JSON, or as many of them, evenly chosen, as `budget` bytes
    take.
    """
    chosen, used = {}, 40  # the frame
    for number in evenly_spaced(len(groups)):
        text = harmless_json(
            json.dumps(packed(groups[number], number, pieces), separators=(",", ":"))
        )
        if used + len(text) + 1 > budget:
            break
        chosen[number] = text
        used += len(text) + 1
    in_order = ",".join(text for _, text in sorted(chosen.items()))
    return f'{{"count":{len(groups)},"groups":[{in_order}]}}'


def evenly_spaced(count: int) -> Iterator[int]:
    """Yield 0 ... count - 1 so that those so far are always spread evenly: the ends, then the
    middles of ever smaller gaps.

    >>> list(evenly_spaced(5))
    [0, 4, 2, 1, 3]
    """
    yield from dict.fromkeys((0, count - 1)) if count else ()
    gaps = deque([(0, count - 1)])
    while gaps:
        low, high = gaps.popleft()
        if high - low > 1:
            middle = (low + high) // 2
            yield middle
            gaps += [(low, middle), (middle, high)]


def joined(samples: Mapping[int, str]) -> str:
    """Return the samples, step to JSON text, as one JavaScript object."""
    return "{" + ",".join(f'"{step}":{text}' for step, text in samples.items()) + "}"
