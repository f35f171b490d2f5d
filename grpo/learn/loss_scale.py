"""The factor on the loss with which float16 gradients neither vanish nor overflow.

float16 has 11 significant bits, bfloat16 has 8. So log-probabilities are eight times as exact, and
sampler and trainer differ less (arXiv:2510.26788). But its numbers end at 65,504 and at 6e-8, and
the gradient of a token in a step of 100,000 is around 1e-5. So the loss is multiplied by a factor
before the backward pass, and the float32 sums of the gradients are divided by it (arXiv:1710.03740,
section 3.2). If a gradient overflows, the backward passes are repeated with a smaller factor, so no
step is lost.
"""

from dataclasses import dataclass

import torch

LARGEST = 2.0**16  # the factor at first, in float16
BACKOFF = 4.0  # divides the factor after an overflow
STEPS_TO_DOUBLE = 100  # steps without overflow after which a reduced factor doubles


@dataclass
class LossScale:
    """The factor, always a power of 2, and the largest that it may become.

    ``LossScale(1.0, 1.0)`` scales nothing.
    """

    factor: float
    largest: float
    steps: int = 0  # since the factor last changed, or training began

    @classmethod
    def of(cls, dtype: torch.dtype) -> "LossScale":
        """Return the factor for a model that computes in `dtype`; always 1 without float16."""
        largest = LARGEST if dtype == torch.float16 else 1.0
        return cls(largest, largest)

    def state_dict(self) -> dict[str, float]:
        """Return what changes, as JSON types."""
        return {"factor": self.factor, "steps": self.steps}

    def metrics(self) -> dict[str, float]:
        """Return the factor by the name of its metric; nothing without float16."""
        return {"loss_scale": self.factor} if self.largest > 1 else {}

    def reduce(self) -> bool:
        """Reduce the factor after an overflow. Return whether it could be reduced."""
        if self.factor <= 1:
            return False
        self.factor = max(1.0, self.factor / BACKOFF)
        self.steps = 0
        return True

    def count_step(self) -> None:
        """Take note of a step without overflow."""
        self.steps += 1
        if self.factor < self.largest and self.steps >= STEPS_TO_DOUBLE:
            self.factor, self.steps = 2 * self.factor, 0
