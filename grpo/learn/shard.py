"""Training with masters, gradients and moments divided among the ranks, by PyTorch's FSDP2.

Updates are made by a copy of the model, the learner (`fully_shard`, arXiv:2304.11277). Each rank
holds a part of every weight, in float32 if it is trained. A layer is gathered while it runs, in the
model's precision, and its gradients are added up over the ranks.

The policy itself stays whole on every rank, so no rank waits for another in rollouts and
evaluations. After each update the weights are gathered into it. Where memory is short, an update
begins by giving them up: docs/models.md has the bytes.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from grpo.data.errors import UserError, blaming
from grpo.distributed import Ranks
from grpo.model.check import Model, WholeHead
from grpo.model.policy import Policy, decoder_layers

# Memory is short if less than this share of it is left beside weights, masters and moments.
SHORT = 0.4


def copies_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """Return copies of the tensors that a function returns, because FSDP forbids views."""
    return tuple(tensor.clone() for tensor in function(*args, **kwargs))


class Root(nn.Module):
    """What FSDP gathers the embeddings and the head for: a function that runs the model."""

    forward = staticmethod(copies_of)

    def __init__(self, model: Model):
        super().__init__()
        self.model = model


class Sharding:
    """Gives `policy` a learner that is divided among the `ranks`, and the learner's weights."""

    def __init__(self, policy: Policy, ranks: Ranks):
        if ranks.size == 1:
            raise UserError(
                "--config: shard: divides a model among several ranks; start with torchrun "
                "--nproc-per-node N, or give --config '{shard: false}'"
            )
        self.policy, self.ranks = policy, ranks
        with blaming(f"--config: shard: {type(policy.causal).__name__} cannot be divided"):
            policy.learner = self._learner(ranks)

        # The policy's weights, and their parts.
        self.pairs = list(zip(policy.model.parameters(), policy.learner.model.parameters()))
        self.masters = [part for weight, part in self.pairs if weight.requires_grad]
        self.given_up: list[tuple[UntypedStorage, int]] = []  # and their bytes
        self.is_short = self._plan_memory()

    def _learner(self, ranks: Ranks) -> Policy:
        """Return the policy with a divided copy of its model."""
        policy = self.policy
        precision = MixedPrecisionPolicy(policy.dtype, torch.float32, cast_forward_inputs=False)
        mesh = init_device_mesh(policy.device.type, (ranks.size,))
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": precision}

        layers, parts = decoder_layers(policy.model), nn.ModuleList()
        owned = [id(weight) for layer in layers for weight in layer.parameters()]
        if len({*owned}) < len(owned):
            raise ValueError("its layers share weights")

        # Layer by layer, so that no second whole model is in memory: a memo keeps what was copied.
        memo = {id(layers): parts}
        model = _copied(policy.model, memo)
        for layer in layers:
            parts.append(fully_shard(_copied(layer, dict(memo)), **options))
        root: Any = fully_shard(Root(model), **options)
        for module in (root, *parts):  # the loss has one denominator over all ranks
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

        learner = copy.copy(policy)
        learner.model, learner.run, learner.decoder = model, root, None
        learner.whole_head = WholeHead(learner) if policy.whole_head else None
        forward: Any = copy.copy(policy.forward)
        forward.policy = learner
        if policy.path == "fast":
            forward.llama = forward.llama.divided(learner.causal, copies_of)
        learner.forward = forward
        return learner

    def _plan_memory(self) -> bool:
        """Tell the policy which memory is taken; return whether it is short."""
        policy = self.policy
        parts = sum(local(part).nbytes for _, part in self.pairs)
        sums = sum(local(master).nbytes for master in self.masters)
        # The weights count twice if what a forward pass gathers stays for its backward pass. Two of
        # the three sums are moments.
        policy.reserved_bytes = 2 * policy.weight_bytes + parts + 3 * sums
        if self._has_room():
            root: Any = policy.learner.run
            root.set_reshard_after_forward(False)
            return False
        policy.reserved_bytes -= policy.weight_bytes
        if self._has_room():
            return False

        # Otherwise an update recomputes activations, and the sums are never beside the weights.
        policy.enable_gradient_checkpointing()
        policy.reserved_bytes -= min(sums, sum(weight.nbytes for weight, _ in self.pairs))
        return True

    def _has_room(self) -> bool:
        """Whether memory is plenty beside what the policy has reserved."""
        return self.policy.device.type != "cuda" or self.policy.free_share >= SHORT

    def give_up(self) -> None:
        """Free the policy's weights, if memory is short, until the next `publish`."""
        for weight, _ in self.pairs if self.is_short else ():
            storage = weight.untyped_storage()
            if storage.resizable() and storage.size():
                self.given_up.append((storage, storage.size()))
                storage.resize_(0)

    @torch.no_grad()
    def publish(self) -> None:
        """Give the policy the weights of the learner. All ranks must call it together."""
        is_missing = bool(self.given_up)
        for storage, size in self.given_up:
            storage.resize_(size)
            # A merged layer has rows of zeros below its weights.
            storage.fill_(0)  # type: ignore[attr-defined]
        self.given_up.clear()

        for weight, part in self.pairs:
            if not (weight.requires_grad or is_missing):
                continue
            if len(weight) % self.ranks.size:
                weight.copy_(whole(part))
            else:  # into its place, in the model's precision
                dist.all_gather_into_tensor(weight, local(part).to(weight.dtype))


# Tensors that may be divided. All ranks must call `whole` together.


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def divided(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a whole tensor; divided as `like`, if that is."""
    if not isinstance(like, DTensor):
        return tensor
    tensor = tensor.to(like.device)
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def _copied(module: Model, memo: dict[int, Any]) -> Model:
    """Return a copy whose trained weights are float32."""
    module = copy.deepcopy(module, memo)
    for weight in module.parameters():
        if weight.requires_grad:
            weight.data = weight.data.float()
    return module
