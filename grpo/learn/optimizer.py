"""The optimizer and what it holds: float32 masters of the weights, their moments, the sums of the
gradients; all of it on each rank, or shared out.

A weight in bfloat16 has three digits, and a step of a hundred-thousandth is lost on it. So each
weight that is trained in bfloat16 has a master in float32, on which the steps are taken, and its
gradients are added up over the micro-batches in float32 (arXiv:1710.03740). A float32 weight is
its own master. That is 4 bytes a weight for the master, 8 for the moments (2 by `adamw8bit`,
arXiv:2110.02861) and, in the update, 4 for the sum.

With `shard` each rank holds masters and moments of its part of each weight's rows alone, cut as
FSDP2 cuts them, and steps on these; its part of the gradients' sum comes by reduce-scatter, the
new weights by all-gather (ZeRO-2, arXiv:1910.02054). The weights themselves stay whole, for every
token that is sampled reads them all.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from grpo.distributed import SINGLE, Ranks
from tasks.base import needs


def maker(
    kind: str, *, rate: float, weight_decay: float
) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """Return what makes the optimizer that is called `kind`. Raises UserError where its package is
    missing.
    """
    settings: dict[str, Any] = dict(lr=rate, betas=(0.9, 0.99), weight_decay=weight_decay)
    if kind == "adamw":
        return partial(torch.optim.AdamW, fused=True, **settings)
    with needs("bitsandbytes", "bits", f"--optimizer {kind}"):
        from bitsandbytes.optim import AdamW8bit
    return partial(AdamW8bit, **settings)


def default_rate(hidden_size: int, *, is_lora: bool) -> float:
    """Return the learning rate of a model whose hidden states have so many numbers.

    Measured on SmolLM2-135M (576) alone, see runs/LOG.md: 1e-3 under LoRA, 1e-4 for all weights.
    Wider models get less by the exponent that Thinking Machines fitted to the Llama family
    (https://tinker-docs.thinkingmachines.ai/supervised-learning/sl-hyperparams), whose formula
    gives 1.3e-3 at 576; narrower ones no more.
    """
    return (1e-3 if is_lora else 1e-4) * min(1.0, 576 / hidden_size) ** 0.781


class Optimizer:
    """Steps on `weights` by the optimizer that `make` returns for their masters. Of several
    `ranks` all do the same, or with `shard` each its part.
    """

    def __init__(
        self,
        weights: Sequence[nn.Parameter],
        make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        *,
        ranks: Ranks = SINGLE,
        shard: bool = False,
    ):
        self.weights, self.ranks = list(weights), ranks
        self.is_shared = shard and ranks.size > 1
        self.masters = [
            weight
            if self._is_master(weight)
            else nn.Parameter(weight.detach()[self.rows(number)].to(_wide(weight), copy=True))
            for number, weight in enumerate(self.weights)
        ]
        self.inner = make(self.masters)
        self.sums: dict[
            int, Tensor
            # of the gradients of bfloat16 weights in the update under way, by number of the weight
        ] = {}
        for number, weight in enumerate(self.weights):
            if weight.dtype != _wide(weight):
                weight.register_post_accumulate_grad_hook(partial(self._sum, number))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """PyTorch's parameter groups, for the learning rate."""
        return self.inner.param_groups

    def clear(self) -> None:
        """Forget all gradients, before the first backward pass of an update."""
        self.inner.zero_grad(set_to_none=True)
        self.sums.clear()
        for weight in self.weights:
            weight.grad = None

    def collect(self, max_norm: float) -> float:
        """Bring the gradients of all backward passes and ranks to the masters, clipped to
        `max_norm` (0: not); return their norm before that.
        """
        for number, (weight, master) in enumerate(zip(self.weights, self.masters)):
            total = self.sums.pop(number, weight.grad)
            if total is None and self.ranks.size > 1:
                total = torch.zeros_like(weight, dtype=master.dtype)  # a rank without completions
            weight.grad = None
            if self.is_shared:
                assert total is not None
                total = self.ranks.reduce_scatter(total)
            master.grad = total
        gradients = [master.grad for master in self.masters if master.grad is not None]
        if not self.is_shared:
            self.ranks.all_reduce(gradients)
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.is_shared:
            square = norm**2
            self.ranks.all_reduce([square])
            norm = square.sqrt()
        if max_norm:
            torch.nn.utils.clip_grads_with_norm_(self.masters, max_norm, norm)
        return float(norm)

    def step(self) -> None:
        """Take a step on the masters, and round them to the weights."""
        self.inner.step()
        self._publish()

    def tensors(self) -> dict[tuple[int, str], Tensor]:
        """Return what the steps change, by the number of the weight and "weight" or the name of
        its moment.
        """
        found: dict[tuple[int, str], Tensor] = {
            (number, "weight"): weight for number, weight in enumerate(self.weights)
        }
        for number, master in enumerate(self.masters):
            for name, value in self.inner.state.get(master, {}).items():
                if isinstance(value, Tensor):
                    found[number, name] = value
        return found

    @torch.no_grad()
    def _publish(self) -> None:
        for weight, master in zip(self.weights, self.masters):
            if master is not weight:
                master.grad = None
                part = master.to(weight.dtype)
                weight.copy_(self.ranks.all_gather(part, len(weight)) if self.is_shared else part)

    def state_dict(self) -> dict[str, Any]:
        """Return "state" (by number of the weight, whole tensors, "master" among them where the
        weight is none) and "param_groups".

        Every rank calls it. The tensors are the optimizer's own, which the next step changes; with
        `shard` they are copies, which only the first rank is told.
        """
        state = {
            number: dict(self.inner.state[master])
            for number, master in enumerate(self.masters)
            if master in self.inner.state
        }
        for number, (weight, master) in enumerate(zip(self.weights, self.masters)):
            if weight.dtype != master.dtype:
                state.setdefault(number, {})["master"] = master.detach()
            for name, value in state.get(number, {}).items() if self.is_shared else ():
                if isinstance(value, Tensor) and value.shape == master.shape:
                    whole = self.ranks.all_gather(value, len(weight))
                    state[number][name] = whole.cpu() if self.ranks.is_rank0 else None
                elif isinstance(value, Tensor):
                    state[number][name] = value.clone()
        return {"state": state, "param_groups": self.inner.state_dict()["param_groups"]}

    @torch.no_grad()
    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned, of each tensor with rows only `rows` of its
        weight.
        """
        state = {number: dict(entry) for number, entry in saved["state"].items()}
        for number, master in enumerate(self.masters):
            if number in state and "master" in state[number]:
                master.copy_(state[number].pop("master"))
        self.inner.load_state_dict(
            saved | {"state": {number: entry for number, entry in state.items() if entry}}
        )
        self._publish()

    def rows(self, number: int) -> slice:
        """Return which rows of a weight's master and moments are held here."""
        rows = len(self.weights[number])
        return self.ranks.part(rows) if self.is_shared else slice(0, rows)

    def _is_master(self, weight: Tensor) -> bool:
        return not self.is_shared and weight.dtype == _wide(weight)

    def _sum(self, number: int, weight: Tensor) -> None:
        """Add a gradient that a backward pass has left to the sum, and give its memory back at
        once.
        """
        assert weight.grad is not None
        if number in self.sums:
            self.sums[number].add_(weight.grad)
        else:
            self.sums[number] = weight.grad.to(_wide(weight))
        weight.grad = None


def _wide(weight: Tensor) -> torch.dtype:
    return torch.promote_types(weight.dtype, torch.float32)
