"""The optimizer: float32 masters and moments, sums of gradients, loss scale, learning rate.

bfloat16 has 8 significant bits, so a step that changes a weight by less than 1/512 of it would be
rounded away. Therefore each trained weight in half precision has a float32 master, on which the
steps are taken, and its gradients are summed over the micro-batches in float32 (mixed precision
training, arXiv:1710.03740). A float32 weight is its own master. Every rank holds all of this, or a
part of it (`grpo.learn.shard`).

float16 rounds eight times as finely, so sampler and trainer differ less (arXiv:2510.26788). But its
numbers end at 65,504 and at 6e-8, and the gradient of a token in a step of 100,000 is around 1e-5.
So the loss is multiplied by a factor before the backward pass, and the float32 sums of the
gradients are divided by it (arXiv:1710.03740, section 3.2). If a gradient overflows, the backward
passes are repeated with a smaller factor, so no step is lost.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from grpo.distributed import SINGLE, Ranks
from grpo.learn.shard import Sharding, divided, local, whole
from grpo.model.check import MEASURED_SIZE

LARGEST = 2.0**16  # the loss scale at first, in float16
BACKOFF = 4.0  # divides the loss scale after an overflow
STEPS_TO_DOUBLE = 100  # steps without overflow after which a reduced loss scale doubles

WARMUP = 5  # steps over which the learning rate rises

# Of five runs of the embedded model five reach 0.99 with this second beta, and four with PyTorch's
# 0.999 (runs/archive/LOG.md, 2026-11-27: "AdamW's second beta").
BETAS = (0.9, 0.99)


def default_rate(hidden_size: int, *, is_lora: bool) -> float:
    """Return the default learning rate, measured on SmolLM2-135M (576, see runs/decisions.md).

    Wider models get less, by the exponent that Thinking Machines fitted to the Llama family
    (https://tinker-docs.thinkingmachines.ai/supervised-learning/sl-hyperparams).
    """
    return (1e-3 if is_lora else 2e-4) * min(1.0, MEASURED_SIZE / hidden_size) ** 0.781


def lr_factor(step: int, anneal_from: int, anneal_steps: int) -> float:
    """Return the factor on the learning rate at `step` (1, 2, ...), in [0, 1].

    After `anneal_from` steps it falls by a cosine within `anneal_steps` (0: it does not fall).
    """
    rise = min(1.0, step / (WARMUP + 1))
    if not anneal_steps or step <= anneal_from:
        return rise
    progress = min(1.0, (step - anneal_from - 1) / anneal_steps)  # a loop by hand may go on
    return rise * 0.5 * (1 + math.cos(math.pi * progress))


def optimizer_bytes(trained: int, number: int) -> int:
    """Return the bytes of masters, moments and sums for `trained` numbers of `number` bytes."""
    masters = 4 * trained if number < 4 else 0  # a float32 model is its own master
    moments, sums = 8 * trained, 4 * trained
    return masters + moments + sums


class Optimizer:
    """Steps on the masters of `weights` by AdamW at a learning `rate`, without weight decay.

    `dtype` is that of the hidden states, which the trained weights need not have. An update calls
    `clear`, `backward` for each micro-batch, `collect` and `step`.
    """

    def __init__(
        self,
        weights: Sequence[nn.Parameter],
        rate: float,
        *,
        dtype: torch.dtype = torch.float32,
        ranks: Ranks = SINGLE,
        sharding: Sharding | None = None,
    ):
        self.weights = list(weights)
        self.ranks = ranks
        self.sharding = sharding
        self.masters = sharding.masters if sharding else list(map(_master, self.weights))
        self.inner = torch.optim.AdamW(
            self.masters, lr=rate, betas=BETAS, weight_decay=0.0, fused=True
        )

        # The factor on the loss, a power of 2, and the steps since it last changed.
        self.largest_scale = LARGEST if dtype == torch.float16 else 1.0
        self.loss_scale = self.largest_scale
        self.steps_at_scale = 0

        # During an update: the summed gradients of weights in half precision, by their number.
        self.sums: dict[int, Tensor] = {}
        for number, weight in enumerate(self.weights):
            if weight.dtype != _wide(weight) and not sharding:
                weight.register_post_accumulate_grad_hook(partial(_add_up, self.sums, number))

    def clear(self) -> None:
        """Discard all gradients, before the first backward pass of an update."""
        self.sums.clear()
        for weight in (*self.weights, *self.masters):
            weight.grad = None

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`, times the loss scale, to those of the update."""
        (loss * self.loss_scale).backward()

    def collect(self, max_norm: float) -> float:
        """Give the masters the gradients of all backward passes and ranks, clipped to `max_norm`
        unless it is 0; return their norm before.
        """
        # FSDP has given them to divided masters already.
        owners = [] if self.sharding else zip(self.weights, self.masters)
        for number, (weight, master) in enumerate(owners):
            total = self.sums.pop(number, weight.grad)
            if total is None and self.ranks.size > 1:
                total = torch.zeros_like(weight, dtype=master.dtype)  # a rank without completions
            weight.grad = None
            master.grad = total

        gradients = [master.grad for master in self.masters if master.grad is not None]
        if self.loss_scale != 1:
            torch._foreach_div_(gradients, self.loss_scale)
        if not self.sharding:
            self.ranks.all_reduce(gradients)

        norm = whole(torch.nn.utils.get_total_norm(gradients))
        if max_norm:
            torch.nn.utils.clip_grads_with_norm_(self.masters, max_norm, norm)
        return float(norm)

    def must_repeat(self, norm: float) -> bool:
        """Return whether float16 overflowed; then reduce the loss scale for a repetition."""
        if math.isfinite(norm) or self.loss_scale == 1:
            return False
        self.loss_scale = max(1.0, self.loss_scale / BACKOFF)
        self.steps_at_scale = 0
        return True

    def step(self) -> None:
        """Take a step on the masters, and round them to the weights."""
        self.inner.step()
        self.steps_at_scale += 1
        if self.loss_scale < self.largest_scale and self.steps_at_scale >= STEPS_TO_DOUBLE:
            self.loss_scale *= 2
            self.steps_at_scale = 0
        self._publish()

    @torch.no_grad()
    def _publish(self) -> None:
        """Round the masters to the weights."""
        if self.sharding:
            self.inner.zero_grad()
            self.sharding.publish()
            return
        for weight, master in zip(self.weights, self.masters):
            if master is not weight:
                master.grad = None
                weight.copy_(master.to(weight.dtype))

    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the weights by the model's names, and their moments by "name (kind)"."""
        names = {id(weight): name for name, weight in model.named_parameters()}
        found: dict[str, Tensor] = {}
        for weight, master in zip(self.weights, self.masters):
            name = names[id(weight)]
            found[name] = weight
            for kind, value in self.inner.state.get(master, {}).items():
                if isinstance(value, Tensor):
                    found[f"{name} ({kind})"] = local(value)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return "loss_scale", and "moments" by "weight's number/name", "master" included if it is
        another tensor. The tensors are the optimizer's own, which the next step changes; or, if
        they are divided among the ranks, whole copies in the host's memory, on rank 0 alone.
        """
        moments = {
            f"{number}/{name}": value
            for number, entry in self.inner.state_dict()["state"].items()
            for name, value in entry.items()
        }
        for number, (weight, master) in enumerate(zip(self.weights, self.masters)):
            if weight.dtype != master.dtype:
                moments[f"{number}/master"] = master.detach()
        if self.sharding:
            for name, value in moments.items():
                gathered = whole(value)
                if self.ranks.is_rank0:  # a copy: the next step changes what was whole already
                    moments[name] = gathered.to("cpu", copy=True)
        scale = {"factor": self.loss_scale, "steps": self.steps_at_scale}
        return {"moments": moments, "loss_scale": scale}

    @torch.no_grad()
    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from the result of `state_dict`."""
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in saved["moments"].items():
            number, name = key.split("/")
            master = self.masters[int(number)]
            own = divided(value, like=master) if value.ndim else value  # a count of steps is whole
            if name == "master":
                master.copy_(own)
            else:
                state.setdefault(int(number), {})[name] = own

        groups = self.inner.state_dict()["param_groups"]
        self.inner.load_state_dict({"state": state, "param_groups": groups})
        self.loss_scale = saved["loss_scale"]["factor"]
        self.steps_at_scale = saved["loss_scale"]["steps"]
        self._publish()


def _master(weight: nn.Parameter) -> nn.Parameter:
    if weight.dtype == _wide(weight):
        return weight
    return nn.Parameter(weight.detach().to(_wide(weight), copy=True))


def _add_up(sums: dict[int, Tensor], number: int, weight: Tensor) -> None:
    """Add the gradient of a backward pass to the sum, and free its memory at once.

    No method: a weight whose hook knew the optimizer would keep its memory for good.
    """
    assert weight.grad is not None
    if number in sums:
        sums[number].add_(weight.grad)
    else:
        sums[number] = weight.grad.to(_wide(weight))
    weight.grad = None


def _wide(weight: Tensor) -> torch.dtype:
    """Return the type of the weight's master: float32 at least."""
    return torch.promote_types(weight.dtype, torch.float32)
