"""Choose the fastest way to run a model that agrees with the model itself.

Some layers keep a state other than keys and values, and some attention functions take arguments
that change the result. So each path of `grpo.fast.forward` runs the test sequences of
`grpo.model.check`, both as the rollout and as the update would run them, and the fastest path whose
log-probabilities are the model's own is taken; if there is none, the model's own forward pass.
"""

import warnings
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from grpo.fast.decoder import FastDecoder
from grpo.fast.forward import FastForward
from grpo.fast.llama import build_fast_llama
from grpo.fast.merged_linear import gradient_products, has_fast_bf16_matmul
from grpo.fast.prefix_cache import ATTENTION_NAME
from grpo.model.check import (
    Probe,
    cause_of,
    context_of,
    distance,
    has_low_precision,
    is_rounding,
    logprobs_of,
    probe_adapters,
    update_distance,
)
from grpo.model.policy import Policy

# The forward passes of a rollout, as (completions, sources, filled, length, accepted): `length` new
# tokens for each of these completions. Row i was row `sources[i]` of the pass before, and
# `filled[i]` of its tokens are cached. The first `accepted[i]` of its new tokens are right; the
# others are rejected drafts. At first each prompt has one row. Then its completions diverge, drafts
# are accepted in part, and completion 2 ends, so that its row is dropped.
ROLLOUT = (
    ((0, 2), (0, 1), (0, 0), 1, (1, 1)),
    ((0, 1, 2, 3), (0, 0, 1, 1), (1, 1, 1, 1), 3, (3, 2, 1, 3)),
    ((0, 1, 2, 3), (0, 1, 2, 3), (4, 3, 2, 4), 2, (2, 2, 2, 1)),
    ((0, 3, 1), (0, 3, 1), (6, 5, 5), 1, (1, 1, 1)),
)


@torch.no_grad()
def accelerate(policy: Policy, may_round: bool = False) -> None:
    """Give `policy` the fastest forward pass that agrees with its model, and the decoder for it.

    If the gradients `may_round`, their float32 products on a CPU may be in bfloat16.
    """
    own_attention = policy.causal.config._attn_implementation
    probe, policy.probe = policy.probe, None
    with probe_adapters(policy.causal):
        forward = _forward(policy, "fast", probe) or _forward(policy, "shared", probe)

    if forward is None:
        with suppress(ValueError):  # a part of the model may support no other attention
            policy.causal.set_attn_implementation(own_attention)
        return

    policy.path = "fast" if forward.llama else "shared"
    policy.forward = forward
    policy.decoder = FastDecoder(policy, forward)
    policy.limit_context(*context_of(policy.causal.config, supports_windows=False))
    if policy.device.type == "cuda":
        from grpo.fast import update_kernels  # they need Triton, which only comes with CUDA

        policy.kernels = update_kernels
    elif may_round and policy.dtype == torch.float32 and has_fast_bf16_matmul():
        policy.gradient_products = gradient_products
        for layer in forward.llama.linears if forward.llama else ():
            layer.gradient_products = gradient_products


def _forward(policy: Policy, path: str, probe: Probe) -> FastForward | None:
    """Return the forward pass of this path, or None if the model has none that agrees with it."""
    model = policy.causal
    try:
        model.set_attn_implementation(ATTENTION_NAME)
        llama = build_fast_llama(model) if path == "fast" else None
        if path == "fast" and llama is None:
            return None
        forward = FastForward(policy, llama)
        if path == "shared" and not attends_once(policy, forward, probe):
            return None

        in_rollout = rollout_distance(policy, forward, probe)
        in_update = update_distance(policy, forward, probe)
        difference = torch.tensor([in_rollout, in_update]).max().item()  # NaN if either is
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # an architecture may raise anything: try the next path
        problem = f"it cannot be run this way ({cause_of(error)})"
    else:
        if is_rounding(policy, difference, probe):
            return forward
        problem = f"its log-probabilities differ from ours by {difference:.1g}"

    if path == "fast":
        warnings.warn(
            f"the fast forward pass disagrees with the model and is not used: {problem}",
            stacklevel=3,
        )
    return None


def attends_once(policy: Policy, forward: FastForward, probe: Probe) -> bool:
    """Return whether each layer calls our attention exactly once, and the model has no convolution.

    A layer with a state of another kind (recurrent, or of a convolution) fails this test. While its
    weights are small, the comparison of log-probabilities can miss it.
    """
    called: list[int] = []
    packing: Any = forward.pack(probe.prompts, probe.completions)
    attend = packing.attend

    def noting(layer: int, *tensors: Any) -> Tensor:
        called.append(layer)
        return attend(layer, *tensors)

    packing.attend = noting
    forward.predict(packing)

    modules = list(policy.inner.modules())
    numbers = (getattr(module, "layer_idx", None) for module in modules)
    layers = {number for number in numbers if isinstance(number, int)}
    has_convolution = any(isinstance(module, nn.Conv1d) for module in modules)
    return sorted(called) == sorted(layers) and not has_convolution


def rollout_distance(policy: Policy, forward: FastForward, probe: Probe) -> float:
    """Return the distance of a rollout's log-probabilities from those expected; see ROLLOUT."""
    expected, device = probe.expected, policy.device
    hidden_PE, cache = forward.prefill(probe.prompts)
    cache.allocate(len(probe.prompts), max(map(len, probe.completions)) + 2)

    # Both completions of a prompt begin with the same token, so the first of each pair will do.
    found = [hidden_PE]
    wanted = [expected[0][0], expected[2][0]]

    for rows, sources, filled, length, accepted in ROLLOUT:
        cache.reorder(torch.tensor(sources, device=device), torch.tensor(filled, device=device))
        tokens_RT = torch.zeros(len(rows), length, dtype=torch.long)
        for row, (c, begin, count) in enumerate(zip(rows, filled, accepted)):
            tokens_RT[row, :count] = torch.tensor(probe.completions[c][begin : begin + count])
            wanted += expected[c][begin + 1 : begin + 1 + count]

        hidden_RTE = forward.extend(tokens_RT.to(device), cache)
        found += [hidden_RTE[row, :count] for row, count in enumerate(accepted)]

    logprobs = logprobs_of(policy.logits(torch.cat(found)))
    return distance(logprobs, torch.stack(wanted), has_low_precision(policy.causal))
