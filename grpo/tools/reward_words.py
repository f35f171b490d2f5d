"""How a completion earned its reward, in words: what the task says, and what the trainer added."""

from collections.abc import Mapping
from typing import Any

from grpo.records import Group
from tasks.registry import explain
from tasks.scoring import explain_parts, reward_weights


def reward_in_words(
    config: Mapping[str, Any], group: Group, sample: int, *, is_of_step: bool = True
) -> str:
    """Return how a completion earned its reward, e.g. "0.190 = 4 right before the first error / 21
    written".

    `config` is the run's; of it `task`, `task_options`, `reward` and `control` are read. Only the
    rewards of a step (`is_of_step`) are changed by a control experiment.
    """
    control = config.get("control") or "none"
    score = group.scores[sample]
    if is_of_step and control != "none":
        return f"{score.reward:.3f}, set by the control experiment {control}; not earned"

    weights = reward_weights(config.get("task_options"))
    if weights:  # of the components of a user's reward
        return explain_parts(score, weights)
    task = config.get("task", group.problem.task)
    return explain(task, group.problem, group.texts[sample], score, config.get("reward"))
