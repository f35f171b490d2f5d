"""The verdict on a run as the page shows it, above everything else."""

import math
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from data.text import escape_control
from grpo.ending import HeldOut, reach_verdict
from grpo.run.reader import RunData

Record = Mapping[str, Any]

# Learning begins where the running mean of this many steps has risen, for good, by this share of
# its whole rise. A smaller rise than MIN_RISE is not told from noise.
WINDOW = 3
SHARE = 0.2
MIN_RISE = 0.05

# What the page says of each kind of verdict, and whether it is good news.
KINDS = {
    "learned": ("Learned", "good"),
    "already solved": ("Already solved before training", "good"),
    "not learned": ("Not learned", "bad"),
    "too short to tell": ("Too short to tell", "open"),
    "not measured": ("Not measured", "open"),
    "collapsed": ("Collapsed", "bad"),
    "got worse": ("Got worse", "bad"),
    "no signal": ("No signal", "bad"),
    "unfinished": ("No verdict yet", "open"),
}


def outcome(run: RunData) -> dict[str, Any]:
    """Return the verdict: a title, a sentence, figures (name, text, step or None), and a command.

    A run that is still training, or was interrupted, has no verdict line. Its figures are those of
    the steps so far.
    """
    line = run.verdict or {}
    kind = line.get("verdict", "unfinished")
    title, tone = KINDS.get(kind, (kind, "open"))
    return {
        "title": escape_control(title),
        "tone": tone,
        "text": escape_control(_comparison(line)),
        "why": [escape_control(line[name]) for name in ("cause", "remedy") if line.get(name)],
        "figures": [(name, escape_control(text), step) for name, text, step in _figures(run, line)],
        "next": escape_control(str(line.get("next_command") or "")),
    }


def _comparison(line: Record) -> str:
    """Return what reinforcement added to the held-out score, in words; "" if that is unknown."""
    if line.get("difference") is None:
        return ""
    text = f"{line['difference']:+.3f} on held-out problems"
    if line.get("low") is not None and line.get("high") is not None:
        interval = f"95 % interval {line['low']:+.3f} to {line['high']:+.3f}"
        text += f" ({interval}, n = {line.get('n')}, paired)"
    if line.get("imitated") is not None:
        text += f", of which imitation does not count: it had reached {line['imitated']:.3f}"
    return text


def _figures(run: RunData, line: Record) -> list[tuple[str, str, int | None]]:
    """Return what the run did with its steps and tokens, and where it began to learn."""
    counted = reach_verdict(0, HeldOut(), run.metrics, was_solved=False)
    found: list[tuple[str, str, int | None]] = [
        ("steps that updated the weights", f"{counted.updated} of {counted.steps}", None),
        ("sampled tokens that taught nothing", f"{counted.untaught:.0%}", None),
        ("completions truncated", f"{counted.truncated:.0%}", None),
    ]
    if counted.demonstrated:
        shown = f"{counted.demonstrated:.0%} of the groups trained on"
        found.append(("right answers shown", shown, None))

    if line.get("verdict") == "learned":
        began = learning_began(run.metrics)
        if began is not None:
            found.append(("learning began", f"step {began}", began))
    if line.get("solved_step") is not None:
        found.append(("solved for good", f"step {line['solved_step']}", line["solved_step"]))
    if line.get("mistake"):
        found.append(("most common mistake", str(line["mistake"]), None))
    if line.get("stopped"):
        found.append(("stopped", str(line["stopped"]), None))
    return found


def learning_began(metrics: Sequence[Record]) -> int | None:
    """Return the first step from which the score has risen for good; None if it does not rise.

    It is looked for at the run's first level, because a step up to a harder level lowers the score.

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
    if not MIN_RISE <= rise < math.inf:
        return None
    low = [at for at, mean in enumerate(running) if mean < running[0] + SHARE * rise]
    begins = low[-1] + WINDOW
    return int(lines[begins]["step"]) if begins < len(lines) else None
