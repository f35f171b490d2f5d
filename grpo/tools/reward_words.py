"""How a completion earned its reward, in words: what the task says, and what the trainer added."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from grpo.records import Group
from grpo.training.truncation import PENALTY
from tasks.base import explain, explain_parts, reward_weights


def reward_in_words(
    config: Mapping[str, Any], group: Group, sample: int, *, is_of_step: bool = True
) -> str:
    """Return how a completion earned its reward, e.g. "0.190 = 4 right before the first error / 21
    written".

    `config` is the run's; of it `task`, `task_options`, `reward`, `control` and `truncated` are
    read. Only the rewards of a step (`is_of_step`) are changed by a control experiment.
    """
    control = config.get("control") or "none"
    score = group.scores[sample]
    if is_of_step and control != "none":
        return f"{score.reward:.3f}, set by the control experiment {control}; not earned"

    # The task knows nothing of the soft penalty, so it explains the reward without it. Rounded,
    # because some explanations ask whether the reward is exactly 0.
    penalty = score.parts.get(PENALTY) if config.get("truncated") == "soft-penalty" else None
    if isinstance(penalty, float) and -1 <= penalty <= 0:
        parts = {name: part for name, part in score.parts.items() if name != PENALTY}
        earned = replace(score, reward=round(score.reward - penalty, 12), parts=parts)
    else:
        earned, penalty = score, 0

    weights = reward_weights(config.get("task_options"))
    if weights:  # of the components of a user's reward
        words = explain_parts(earned, weights)
    else:
        task = config.get("task", group.problem.task)
        words = explain(task, group.problem, group.texts[sample], earned, config.get("reward"))
    if not penalty:
        return words
    return f"{score.reward:.3f} = {earned.reward:.3f} − {-penalty:.3f} for its length; {words}"
