"""The learning rate over the steps of a run."""

import math


def lr_factor(
    step: int, *, schedule: str, warmup: int, steps: int | None, cosine_start: int | None = 0
) -> float:
    """Return the factor on the learning rate at `step` (1, 2, ...), in [0, 1].

    It rises linearly over `warmup` steps and then stays at 1 or, under the `schedule` "cosine",
    falls to almost 0 at the last of the `steps`.

    - "constant" does not depend on the length of the run, so a run that is continued beyond its
      plan equals one that was planned longer.
    - "cosine" begins to fall after `cosine_start` steps or half of the `steps`, whichever is less,
      but not before the end of the warm-up. A ladder gives the number of steps before its last
      level was first reached, so that the hardest level is not left with the smallest rates; None
      before that level is reached. The half is a bound because a level may never be passed at the
      full rate. So the rate never rises again, not even when a ladder steps back. The warm-up is at
      most `steps` - 1, so that even a short run reaches the full rate.
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
    progress = min(1.0, (step - start - 1) / (steps - start))  # a loop by hand may exceed `steps`
    return 0.5 * (1 + math.cos(math.pi * progress))
