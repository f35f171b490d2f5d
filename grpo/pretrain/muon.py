"""Muon, momentum made orthogonal (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/),
for many matrices at once.

The same numbers as `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`, but matrices of one shape
go through one batched product, and the rate is a tensor, so that a CUDA graph can hold the step.
"""

from collections.abc import Iterable

import torch

QUINTIC = (3.4445, -4.7750, 2.0315)  # of the Newton-Schulz iteration
ITERATIONS = 5


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Return, for each of `matrices` (n, rows, columns), U V^T of its singular value
    decomposition, roughly, in bfloat16.
    """
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.bfloat16()
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    a, b, c = QUINTIC
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon:
    """Keeps the momenta of `matrices`, parameters of two dimensions whose `grad` each
    step reads.
    """

    def __init__(
        self, matrices: Iterable[torch.Tensor], momentum: float = 0.95, weight_decay: float = 0.01
    ):
        self.momentum, self.weight_decay = momentum, weight_decay
        by_shape: dict[torch.Size, list] = {}
        for matrix in matrices:
            by_shape.setdefault(matrix.shape, []).append(matrix)
        self.groups = list(by_shape.values())
        self.momenta = [torch.stack([torch.zeros_like(p) for p in group]) for group in self.groups]

    @torch.no_grad()
    def step(self, rate: torch.Tensor) -> None:
        """Take one step of size `rate`, a tensor without dimensions: with Nesterov's momentum, and
        decoupled weight decay.
        """
        for group, momentum in zip(self.groups, self.momenta):
            gradients = torch.stack([p.grad for p in group])
            momentum.lerp_(gradients, 1 - self.momentum)
            updates = orthogonal(gradients.lerp(momentum, self.momentum)).float()
            updates *= (
                rate * 0.2 * max(group[0].shape) ** 0.5
            )  # the root mean square of an AdamW update
            torch._foreach_mul_(group, 1 - rate * self.weight_decay)
            torch._foreach_sub_(group, list(updates.unbind()))
