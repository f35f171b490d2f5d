"""The optimizer Muon: orthogonalised momentum, computed for many matrices at once.

Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/. The result is that of
`torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`. In contrast to it, matrices of the same shape
are multiplied in one batch, and the learning rate is a tensor, so that a CUDA graph can capture the
step.
"""

from collections.abc import Iterable

import torch

# The coefficients (a, b, c) of the Newton-Schulz iteration x <- a x + b (x x') x + c (x x')^2 x,
# and the number of iterations.
QUINTIC = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5

# Updates are scaled to this root mean square, which is that of a typical AdamW update.
ADAMW_RMS = 0.2


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Return approximately U V' of the singular value decomposition U S V' of each matrix.

    `matrices` and result are (n, rows, columns); the result is bfloat16.
    """
    # The matrix products are smaller if there are no more rows than columns.
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.bfloat16()
    x = x.mT if is_tall else x

    # The iteration converges if all singular values are at most 1.
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    a, b, c = QUINTIC
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


class Muon:
    """Updates `matrices`, which are parameters with two dimensions, by their `grad`."""

    def __init__(
        self, matrices: Iterable[torch.Tensor], momentum: float = 0.95, weight_decay: float = 0.01
    ):
        self.momentum = momentum
        self.weight_decay = weight_decay

        by_shape: dict[torch.Size, list] = {}
        for matrix in matrices:
            by_shape.setdefault(matrix.shape, []).append(matrix)
        self.groups = list(by_shape.values())
        self.momenta = [torch.stack([torch.zeros_like(p) for p in group]) for group in self.groups]

    @torch.no_grad()
    def step(self, rate: torch.Tensor) -> None:
        """Take one step with Nesterov momentum and decoupled weight decay.

        `rate` is the learning rate, a tensor without dimensions.
        """
        for group, momentum in zip(self.groups, self.momenta):
            gradients = torch.stack([p.grad for p in group])
            momentum.lerp_(gradients, 1 - self.momentum)

            updates = orthogonal(gradients.lerp(momentum, self.momentum)).float()
            updates *= rate * ADAMW_RMS * max(group[0].shape) ** 0.5

            torch._foreach_mul_(group, 1 - rate * self.weight_decay)
            torch._foreach_sub_(group, list(updates.unbind()))
