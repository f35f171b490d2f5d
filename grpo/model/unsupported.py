"""Why a model cannot be trained: mechanisms that no forward path supports."""

import torch
from torch import Tensor

from data.errors import UserError
from grpo.model.distance import distance, has_low_precision, logprobs_of, tolerance
from grpo.model.probe import Probe
from grpo.model.runner import Runner

CAPPED = (
    "its logits are more than its output layer on its last hidden state (capped or transformed)"
)

# The settings of caps on the logits. A cap changes little as long as the logits are small, so the
# comparison at the start can miss it.
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


def unsupported_mechanism(policy: Runner, probe: Probe) -> str:
    """Return the mechanism of the model that no path supports, found by running the model.

    Returns "" if it is none of the known mechanisms.
    """
    model = policy.causal
    if getattr(model.config, "is_encoder_decoder", False):
        return "it is an encoder-decoder"
    if policy.head is None:
        return "it has no output layer"

    one, other = (torch.tensor([probe.sequence(c)], device=policy.device)[:, :12] for c in (0, 3))

    def differs(logits: Tensor) -> bool:
        found, wanted = logprobs_of(logits)[0], alone[0, : logits.shape[1]]
        return not distance(found, wanted, has_low_precision(model)) <= tolerance(model)

    try:
        alone = logprobs_of(model(input_ids=one, use_cache=False).logits)
        if differs(model(input_ids=one[:, :6], use_cache=False).logits):
            return "a token's probabilities depend on later tokens (its attention is not causal)"
        if differs(model(input_ids=torch.cat([one, other]), use_cache=False).logits[:1]):
            return "a sequence's probabilities depend on the other sequences of the batch"
        hidden = policy.inner(input_ids=one, use_cache=False).last_hidden_state
        if differs(policy.head(policy.logit_scale * hidden)):
            return CAPPED
    except Exception:
        pass  # the message names the problem of the last path instead
    return ""


def refusal(policy: Runner, reason: str) -> UserError:
    """Return the error that refuses a model for this reason."""
    return UserError(
        f"--model {policy.name}: {type(policy.causal).__name__} is not supported: {reason}; give a "
        "model of another architecture"
    )


def cause_of(error: Exception) -> str:
    """Return the type and the first line of an error, in 300 characters at most."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]
