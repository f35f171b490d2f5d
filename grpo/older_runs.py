"""The names that older versions wrote into a run's files, and today's names for them.

Everything that reads a stored run passes it through here, so that the rest of the code knows only
today's names.
"""

from collections.abc import Mapping
from typing import Any

# The settings in config.yaml.
SETTINGS = {
    "heat": "temperature_factor",
    "heat_ceiling": "temperature_ceiling",
    "forget_activations": "gradient_checkpointing",
    "rung_minutes": "level_minutes",
    "rung_tokens": "level_tokens",
}

# The "facts" in config.yaml.
FACTS = {"rungs": "training_levels"}

# A line of metrics.jsonl. Its "reward_std" was the mean within the groups, as "group_std" still is.
METRICS = {
    "clip_ratio/low": "clip_ratio/low_mean",
    "clip_ratio/high": "clip_ratio/high_mean",
    "parity/max_abs_logprob_diff": "sampling/sampling_logp_difference/max",
}

# A group in rollouts/.
GROUP = {"verdict": "class"}

# The "figures" of a line of curriculum.jsonl.
FIGURES = {"rungs": "training_levels", "looks": "validation_scores"}

# Of a monitor that did not judge the heat. No run has this level, so the heat begins anew.
HEAT = {"hot": [], "cold": [], "gave_up_heat": False, "level": -1}

# Parts of the trainer's state in a checkpoint.
CURRICULUM = {"rungs": "levels", "rung": "position", "backs": "steps_back"}
UNTRAINED_CLASSES = {"truncated": "masked"}
WARM_START = {"looks": "validation_scores"}
DRAFTING = {"slipped": "rejected"}
TRAINER = {"started": "imitation"}


def renamed(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return `values` under today's names.

    >>> renamed({"heat": 1.2, "seed": 0}, SETTINGS)
    {'temperature_factor': 1.2, 'seed': 0}
    """
    return {names.get(name, name): value for name, value in values.items()}


def metrics_of(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of metrics.jsonl under today's names."""
    if not METRICS.keys() & line.keys():
        return dict(line)
    return {name: value for name, value in renamed(line, METRICS).items() if name != "reward_std"}


def decision_of(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of curriculum.jsonl under today's names."""
    if not isinstance(line.get("figures"), dict):  # a damaged line
        return dict(line)
    return {**line, "figures": renamed(line["figures"], FIGURES)}


def trainer_state_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trainer's state of a checkpoint under today's names."""
    state = renamed(state, TRAINER)
    imitation = state["imitation"]
    progress = state["progress"]
    return {
        **state,
        "monitor": {**HEAT, **state["monitor"]},
        "curriculum": renamed(state["curriculum"], CURRICULUM),
        "progress": {**progress, "classes": renamed(progress["classes"], UNTRAINED_CLASSES)},
        "drafting": renamed(state["drafting"], DRAFTING),
        "imitation": renamed(imitation, WARM_START) if imitation else None,
    }
