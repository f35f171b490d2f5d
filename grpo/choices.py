"""The values that some settings may take.

They stand apart from the code that implements them, because `--help` must not wait for torch.
"""

from pathlib import Path

# What the weight of a token is 1 over (see `loss.token_weights`), and how `inspect why` says it.
WEIGHT_WORDS = {
    "completion": "({rows} completions × {length} tokens)",
    "budget": "({rows} completions × the token budget)",
    "step": "{tokens:,}, the tokens that the step trained on",
}
WEIGHTED_BY = {  # each loss, and what weights its tokens
    "grpo": "completion",
    "dr_grpo": "budget",
    "dapo": "step",
    "gspo": "completion",
    "cispo": "step",
}
LOSSES = tuple(WEIGHTED_BY)
FROM_PYTHON = "python:"  # begins the name of a loss that is a function given in Python
QUANTISED = ("none", "int8", "nf4")
CONTROLS = ("none", "shuffled-rewards", "constant-reward")
TRUNCATED = ("learn", "mask")
PREFLIGHTS = ("on", "off", "only")
SCALES = ("group", "batch", "none")  # what advantages are divided by
CREDITS = ("outcome", "alignment")  # what gets an advantage: a completion, or each token
PROMOTIONS = ("running", "heldout")
SCHEDULES = ("constant", "cosine")
SOURCES = ("base", "start", "dataset", "corpus", "config", "task", "loss")  # what a run depends on
TRACKERS = ("tensorboard", "wandb", "trackio")
WARM_STARTS = ("auto", "off", "imitation")
MAX_DRAFTED = 127  # tokens
MAX_SHOTS = 64  # examples before a question; more would fill any context, and each is searched for

# The mean score at which a level is left, unless the user gives one. The running mean has the lower
# mark because it lags behind the policy. At 0.9, a policy whose true mean is 0.96 is promoted
# within 100 steps of 2 prompts, and one of 0.8 hardly ever (runs/LOG.md, 2026-11-23: "Intervals
# near 1, promotion, step back").
PROMOTE_AT = {"running": 0.9, "heldout": 0.97}


def is_loss(spec: str) -> bool:
    """Return whether `spec` is a value of the setting `loss`.

    >>> is_loss("dapo"), is_loss("my.py:loss"), is_loss("python:loss"), is_loss("mse")
    (True, True, True, False)
    """
    where, _, name = spec.rpartition(":")
    is_function = bool(name) and (where.endswith(".py") or spec == FROM_PYTHON + name)
    return spec in LOSSES or is_function


def program_of(spec: str) -> list[Path]:
    """Return the file of a loss ``path/to/file.py:function``; [] for any other loss."""
    if spec in LOSSES or spec.startswith(FROM_PYTHON):
        return []
    return [Path(spec.rpartition(":")[0])]


def is_draft_mode(mode: str) -> bool:
    """Return whether `mode` is a value of the setting `draft`: auto, off, or a number of tokens."""
    return mode in ("auto", "off") or (mode.isdecimal() and int(mode) <= MAX_DRAFTED)
