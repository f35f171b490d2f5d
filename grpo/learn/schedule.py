"""The learning rate over the steps of a run."""

import math


def lr_factor(
    step: int, *, schedule: str, warmup: int, steps: int | None, cosine_start: int | None = 0
) -> float:
    """Return the factor on the learning rate at `step` (1, 2, ...), in [0, 1].

    It rises linearly over `warmup` steps. Then it is constant, or under the `schedule` "cosine"
    falls from 1 at the first step after the warm-up to almost 0 at the last of the `steps`.

    A constant rate does not depend on the length of the run, so a run that is continued beyond its
    plan equals one that was planned longer. The warm-up of a cosine schedule is shortened to
    `steps` - 1, so that even a short run reaches the full rate. The fall begins after
    `cosine_start` steps; None means that it has not begun. A ladder lets it begin at the last
    level, so that the hardest level is not left with the smallest rates.
    """
    if schedule != "cosine":
        return min(1.0, step / (warmup + 1))

    assert steps is not None, "the configuration is resolved"
    warmup = min(warmup, steps - 1)
    if step <= warmup:
        return step / (warmup + 1)
    if cosine_start is None:
        return 1.0

    start = max(warmup, cosine_start)
    return 0.5 * (1 + math.cos(math.pi * (step - start - 1) / (steps - start)))
