"""The optimizer, its float32 master weights, its moments, and the sums of the gradients.

bfloat16 has 8 significant bits, so a step that changes a weight by less than 1/512 of it would be
rounded away. Therefore each trained weight in half precision (bfloat16 or float16) has a float32
master, on which the steps are taken, and its gradients are summed over the micro-batches in float32
(mixed precision training, arXiv:1710.03740). A float32 weight is its own master. For each weight in
half precision this takes 4 bytes for the master, 8 for the moments and, during the update, 4 for
the sum.

Without `shard` every rank holds an identical copy of all of this. With `shard` each rank holds the
masters and moments of some rows of each weight, cut as FSDP2 cuts them, and steps on these rows. It
gets their gradients by reduce-scatter, and all ranks get the new weights by all-gather (ZeRO-2,
arXiv:1910.02054). The weights themselves are not sharded, because sampling a token reads them all.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from grpo.distributed import SINGLE, Ranks
from grpo.learn.loss_scale import LossScale

T = TypeVar("T")

Maker = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def adamw(rate: float, weight_decay: float) -> partial[torch.optim.AdamW]:
    """Return a function that makes the optimizer of given weights."""
    # PyTorch's default for the second beta is 0.999. Of five runs of the embedded model five reach
    # 0.99 with this one, and four with PyTorch's; the real model was not compared (runs/LOG.md,
    # 2026-11-27: "AdamW's second beta").
    return partial(
        torch.optim.AdamW, lr=rate, betas=(0.9, 0.99), weight_decay=weight_decay, fused=True
    )


def default_rate(hidden_size: int, *, is_lora: bool) -> float:
    """Return the default learning rate for a model of this hidden size.

    It was measured on SmolLM2-135M (576) only, see runs/LOG.md: 1e-3 for LoRA, and 1e-4 for all
    weights. Wider models get less, by the exponent that Thinking Machines fitted to the Llama
    family (https://tinker-docs.thinkingmachines.ai/supervised-learning/sl-hyperparams); their
    formula gives 1.3e-3 at 576. Narrower models get no more.
    """
    return (1e-3 if is_lora else 1e-4) * min(1.0, 576 / hidden_size) ** 0.781


class Optimizer:
    """Steps on `weights` by the optimizer that `make` returns for their masters.

    `dtype` is the precision of the model's hidden states, which the trained weights need not have.
    Each of several `ranks` takes the same steps or, with `shard`, those on its own rows.
    """

    def __init__(
        self,
        weights: Sequence[nn.Parameter],
        make: Maker,
        *,
        dtype: torch.dtype = torch.float32,
        ranks: Ranks = SINGLE,
        shard: bool = False,
    ):
        self.weights = list(weights)
        self.ranks = ranks
        self.is_sharded = shard and ranks.size > 1
        self.masters = [
            weight
            if self._is_master(weight)
            else nn.Parameter(weight.detach()[self.rows(number)].to(_wide(weight), copy=True))
            for number, weight in enumerate(self.weights)
        ]
        self.inner = make(self.masters)

        self.loss_scale = LossScale.of(dtype)
        self.has_exchanged = False  # whether the ranks have begun to exchange this update's results

        # During an update: the summed gradients of weights in half precision, by their number.
        self.sums: dict[int, Tensor] = {}
        for number, weight in enumerate(self.weights):
            if weight.dtype != _wide(weight):
                weight.register_post_accumulate_grad_hook(partial(self._sum, number))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """PyTorch's parameter groups, for the learning rate."""
        return self.inner.param_groups

    def gradients(self, passes: Callable[[], T], max_norm: float) -> tuple[T, float]:
        """Give the masters the gradients of the backward passes that `passes` runs by `backward`.

        Returns its result, and the norm of all gradients before they are clipped to `max_norm` (0:
        they are not). If float16 overflows, the passes are repeated with a smaller factor on the
        loss. So a norm that is not finite is the fault of the loss or of the model.
        """
        while True:
            self.clear()
            result = passes()
            norm = self.collect(max_norm)
            if math.isfinite(norm) or not self.loss_scale.reduce():
                return result, norm

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`, times the factor of the loss, to those of the update."""
        (loss * self.loss_scale.factor).backward()

    def clear(self) -> None:
        """Discard all gradients, before the first backward pass of an update."""
        self.has_exchanged = False
        self.inner.zero_grad(set_to_none=True)
        self.sums.clear()
        for weight in self.weights:
            weight.grad = None

    def collect(self, max_norm: float) -> float:
        """Give the masters the gradients of all backward passes and ranks, clipped to `max_norm`.

        Returns the norm of all gradients before clipping. A `max_norm` of 0 means no clipping.
        """
        self.has_exchanged = self.ranks.size > 1
        for number, (weight, master) in enumerate(zip(self.weights, self.masters)):
            total = self.sums.pop(number, weight.grad)
            if total is None and self.ranks.size > 1:
                total = torch.zeros_like(weight, dtype=master.dtype)  # a rank without completions
            weight.grad = None
            if self.is_sharded:
                assert total is not None
                total = self.ranks.reduce_scatter(total)
            master.grad = total

        gradients = [master.grad for master in self.masters if master.grad is not None]
        if self.loss_scale.factor != 1:
            torch._foreach_div_(gradients, self.loss_scale.factor)
        if not self.is_sharded:
            self.ranks.all_reduce(gradients)

        # The squared norm of all weights is the sum of those of the ranks' rows.
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.is_sharded:
            square = norm**2
            self.ranks.all_reduce([square])
            norm = square.sqrt()

        if max_norm:
            torch.nn.utils.clip_grads_with_norm_(self.masters, max_norm, norm)
        return float(norm)

    def step(self, make_room: Callable[[], Any] = lambda: None) -> None:
        """Take a step on the masters, and round them to the weights.

        If memory runs out in the first step, AdamW has not changed a weight: it makes the moments
        of all of them first. Then the moments made so far are discarded, `make_room` is called, and
        the step is tried once more.
        """
        try:
            self._try_step()
        except torch.OutOfMemoryError:
            is_short = True
        else:
            is_short = False

        if is_short:  # not while the error is handled: it keeps tensors
            make_room()
            torch.cuda.empty_cache()
            self._try_step()
        self.loss_scale.count_step()
        self._publish()

    def _try_step(self) -> None:
        """Take a step on the masters; if memory runs out, discard the moments that it made."""
        known = set(self.inner.state)
        try:
            self.inner.step()
        except torch.OutOfMemoryError:
            for master in set(self.inner.state) - known:
                del self.inner.state[master]
            raise

    def tensors(self) -> dict[tuple[int, str], Tensor]:
        """Return the tensors that a step changes.

        The key is the number of the weight, and "weight" or the name of a moment.
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
        """Round the masters to the weights, on all ranks."""
        for weight, master in zip(self.weights, self.masters):
            if master is not weight:
                master.grad = None
                part = master.to(weight.dtype)
                weight.copy_(self.ranks.all_gather(part, len(weight)) if self.is_sharded else part)

    def state_dict(self) -> dict[str, Any]:
        """Return "param_groups", "loss_scale", and "state" by number of the weight.

        The state has all rows of each tensor. A weight that is not its own master has its
        "master" there, too. Every rank calls this.

        The tensors are the optimizer's own, which the next step changes. With `shard` they are
        copies, and ranks other than the first get None in place of what was gathered.
        """
        state = {
            number: dict(self.inner.state[master])
            for number, master in enumerate(self.masters)
            if master in self.inner.state
        }
        for number, (weight, master) in enumerate(zip(self.weights, self.masters)):
            if weight.dtype != master.dtype:
                state.setdefault(number, {})["master"] = master.detach()
            if self.is_sharded:
                self._gather(state.get(number, {}), weight, master)
        return {
            "state": state,
            "param_groups": self.inner.state_dict()["param_groups"],
            "loss_scale": self.loss_scale.state_dict(),
        }

    def _gather(self, entry: dict[str, Any], weight: Tensor, master: Tensor) -> None:
        """Replace the tensors in the state of one weight by copies with the rows of all ranks."""
        for name, value in entry.items():
            if isinstance(value, Tensor) and value.shape == master.shape:
                whole = self.ranks.all_gather(value, len(weight))
                entry[name] = whole.cpu() if self.ranks.is_rank0 else None
            elif isinstance(value, Tensor):
                entry[name] = value.clone()

    @torch.no_grad()
    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from the result of `state_dict`.

        Tensors that have rows hold only `rows` of their weight here.
        """
        state = {number: dict(entry) for number, entry in saved["state"].items()}
        for number, master in enumerate(self.masters):
            if number in state and "master" in state[number]:
                master.copy_(state[number].pop("master"))

        moments = {number: entry for number, entry in state.items() if entry}
        self.inner.load_state_dict({"state": moments, "param_groups": saved["param_groups"]})
        self.loss_scale = replace(self.loss_scale, **saved["loss_scale"])
        self._publish()

    def rows(self, number: int) -> slice:
        """Return the rows of a weight whose master and moments this rank holds."""
        rows = len(self.weights[number])
        return self.ranks.part(rows) if self.is_sharded else slice(0, rows)

    def _is_master(self, weight: Tensor) -> bool:
        """Return whether the weight is its own master."""
        return not self.is_sharded and weight.dtype == _wide(weight)

    def _sum(self, number: int, weight: Tensor) -> None:
        """Add the gradient of a backward pass to the sum, and free its memory at once."""
        assert weight.grad is not None
        if number in self.sums:
            self.sums[number].add_(weight.grad)
        else:
            self.sums[number] = weight.grad.to(_wide(weight))
        weight.grad = None


def _wide(weight: Tensor) -> torch.dtype:
    """Return the type of the weight's master: float32 at least."""
    return torch.promote_types(weight.dtype, torch.float32)
