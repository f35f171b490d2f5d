"""The page of `grpo.report`: its parts, and the completions that fit into it."""

import hashlib
import html
import json
import re
from base64 import b64encode
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from data.files import write_whole
from grpo.records import WHY, Group
from grpo.run.reader import RunData
from grpo.tools.report.description import described, warnings_of
from grpo.tools.report.samples import Shown, packed, pieces_of

# The folder of report.html and its parts.
FOLDER = Path(__file__).parent
SCRIPTS = (
    "report_base.js",
    "report_head.js",
    "report_metrics.js",
    "report_charts.js",
    "report_plots.js",
    "report_tables.js",
    "report_samples.js",
    "report_filter.js",
    "report_words.js",
    "report_search.js",
    "report_live.js",
    "report.js",
)
STYLES = ("report.css", "report_charts.css", "report_samples.css", "report_narrow.css")

# The Content-Security-Policy of the page: no script but its own, and no network.
POLICY = "default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"

# The size of the completions of all runs, unless another is asked for.
MEGABYTES = 3.0

# Shares of the bytes for completions: the most that one step may take, and the most that all steps
# with decisions and warnings may take.
STEP_SHARE = 1 / 8
NOTABLE_SHARE = 1 / 2


def write_report(
    runs: Sequence[RunData], output: Path | None = None, megabytes: float = MEGABYTES
) -> Path:
    """Write the page of `runs`, and return its path: by default report.html in the first run.

    `megabytes` is the size of the completions of all runs together.
    """
    output = output or runs[0].path / "report.html"
    content = page(runs, budget=round(megabytes * 1e6 / len(runs))).encode()
    write_whole(output, content)
    return output


def page(runs: Sequence[RunData], budget: int) -> str:
    """Return the page as HTML, with at most `budget` bytes of completions for each run."""
    samples = [kept_samples(run, budget) for run in runs]
    descriptions = [described(run, kept) for run, kept in zip(runs, samples)]
    return assembled(descriptions, [joined(kept) for kept in samples], is_live=False)


def assembled(
    descriptions: Sequence[Mapping[str, Any]], samples: Sequence[str], *, is_live: bool
) -> str:
    """Return the page of runs, from their descriptions and their completions as JSON.

    A live page may ask its own server, and nobody else, for what is new.
    """
    from plotly.offline import get_plotlyjs  # here, because it takes a while to import

    names = ", ".join(description["name"] for description in descriptions)
    values = {"runs": descriptions, "classes": WHY, "live": is_live}
    blocks = [data_block("data", json.dumps(values, separators=(",", ":")))]
    blocks += [data_block(f"samples-{number}", text) for number, text in enumerate(samples)]

    scripts = {
        "plotly": get_plotlyjs(),
        "script": "".join((FOLDER / name).read_text("utf-8") for name in SCRIPTS),
    }
    hashes = " ".join(script_hash(script) for script in scripts.values())
    parts = {
        **scripts,
        "title": html.escape(f"{names} · report"),
        "style": "".join((FOLDER / name).read_text("utf-8") for name in STYLES),
        "data": "\n".join(blocks),
        "policy": POLICY.format(hashes=hashes) + ("; connect-src 'self'" if is_live else ""),
    }

    # All parts are inserted in one pass, so that marks within a part stay as they are.
    frame = (FOLDER / "report.html").read_text("utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], frame)


def script_hash(script: str) -> str:
    """Return what the page's Content-Security-Policy says to allow this script and no other."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{b64encode(digest).decode()}'"


def data_block(name: str, text: str) -> str:
    """Return JSON as an element of the page that is not executed.

    It contains no "<", so nothing in it can end the element.
    """
    return f'<script type="application/json" id="{name}">{harmless_json(text)}</script>'


def harmless_json(text: str) -> str:
    """Return JSON with each "<" escaped; it occurs in strings only.

    >>> harmless_json('["</script>"]')
    '["\\\\u003c/script>"]'
    """
    return text.replace("<", "\\u003c")


def kept_samples(run: RunData, budget: int) -> dict[int, str]:
    """Return the groups of some steps as JSON, as many as fit into `budget` bytes.

    Notable steps (with decisions and warnings) come first, then evenly spaced ones.
    """
    steps = run.steps()
    shown = shown_of(run)

    marked = {line["step"] for line in run.decisions if line["kind"] != "stay"}
    marked |= {line["step"] for line in warnings_of(run.metrics)}
    notable = sorted(marked & set(steps))

    # The notable steps leave half of the budget, so that the first and last steps always fit.
    kept: dict[int, str] = {}
    used = 0
    for wanted, most in ((notable, NOTABLE_SHARE * budget), (steps, budget)):
        for place in evenly_spaced(len(wanted)):
            step = wanted[place]
            if step in kept:
                continue
            text = packed_step(run.groups(step), shown, STEP_SHARE * budget)
            if used + len(text) > most:
                break
            kept[step] = text
            used += len(text)
    return dict(sorted(kept.items()))


def shown_of(run: RunData) -> Shown:
    """Return what is known of a run when its completions are shown."""
    config = run.config
    return Shown(
        str(config.get("task")),
        config.get("reward"),
        pieces_of(run.path),
        control=config.get("control"),
        truncated=config.get("truncated"),
        task_options=config.get("task_options"),
    )


def packed_step(groups: Sequence[Group], shown: Shown, budget: float) -> str:
    """Return the groups of a step as JSON; evenly spaced ones, if `budget` bytes are too few."""
    chosen = {}
    used = 40  # the bytes around the groups
    for number in evenly_spaced(len(groups)):
        values = packed(groups[number], number, shown)
        text = harmless_json(json.dumps(values, separators=(",", ":")))
        if used + len(text) + 1 > budget:
            break
        chosen[number] = text
        used += len(text) + 1

    in_order = ",".join(text for _, text in sorted(chosen.items()))
    return f'{{"count":{len(groups)},"groups":[{in_order}]}}'


def evenly_spaced(count: int) -> Iterator[int]:
    """Yield 0 ... count - 1 in an order in which the numbers so far are always evenly spaced.

    First the ends, then the middles of ever smaller gaps.

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
    """Return the samples (step -> JSON) as one JSON object."""
    return "{" + ",".join(f'"{step}":{text}' for step, text in samples.items()) + "}"
