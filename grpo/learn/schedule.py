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
    `cosine_start` steps; a ladder gives the number of steps before its last level, so that the
    hardest level is not left with the smallest rates, and None before that level is reached. After
    half of the steps the fall begins in any case: at the full rate a level may never be passed.
    """
    if schedule != "cosine":
        return min(1.0, step / (warmup + 1))

    assert steps is not None, "the configuration is resolved"
    warmup = min(warmup, steps - 1)
    if step <= warmup:
        return step / (warmup + 1)

    half = steps // 2
    start = max(warmup, half if cosine_start is None else min(cosine_start, half))
    if step <= start:
        return 1.0
    progress = min(1.0, (step - start - 1) / (steps - start))  # a loop by hand may go on
    return 0.5 * (1 + math.cos(math.pi * progress))
