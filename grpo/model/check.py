"""Compare our forward passes with the unmodified model's, and choose the fastest that agrees.

A `transformers` model can run in three ways, called paths here; the fastest comes first:

- *fast*: our own forward pass (`model.llama`);
- *shared*: the model's, with prompts shared between completions (`model.prefix_cache` in the
  rollout, `model.packed_attention` in the update);
- *plain*: the model's, with every token run again at each step (`model.fallback`).

The name of an architecture does not tell which paths are right: some layers keep a state other than
keys and values, and some attention functions take arguments that change the result. So when a model
is loaded, each path runs a few short sequences, both as the rollout and as the update would run
them. Its log-probabilities are compared with those of the model's own forward pass, with its own
attention, one sequence at a time and without padding. If no path is right, the model is refused.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from data.errors import UserError
from grpo.model.context import text_config
from grpo.model.distance import distance, has_low_precision, tolerance
from grpo.model.interfaces import Model
from grpo.model.llama import build_fast_llama
from grpo.model.prefix_cache import ATTENTION_NAME
from grpo.model.probe import Probe, probe_of
from grpo.model.probe_runs import attends_once, own_logprobs, rollout_logprobs, update_logprobs
from grpo.model.runner import ForwardPath, Runner
from grpo.model.unsupported import cause_of, refusal, unsupported_mechanism

# In the order in which they are tried: the fastest first.
PATHS: tuple[ForwardPath, ...] = get_args(ForwardPath)

# In a model of random weights rounding grows with depth and width. So a difference larger than
# LOW_PRECISION_TOLERANCE is compared with the model's own rounding: the difference between two of
# its attention implementations. It may be larger by this factor.
OWN_ROUNDINGS = 2.0

# A difference that is never accepted as rounding. Missing mechanisms come to 0.142 or more
# (tests/support/tiny_architectures.py, in bfloat16).
MISSING = 0.14

# Standard deviation of the adapters' second matrices during the comparison. In bfloat16, an ignored
# scale of 1/2 then makes a difference of 0.10 (SmolLM2), and rounding one of 0.03.
ADAPTER_STD = 0.03


@dataclass(frozen=True)
class _Expected:
    """What a path is compared with."""

    probe: Probe
    logprobs: list[Tensor]  # of the unmodified model, see `own_logprobs`
    own_attention: str  # the name of the model's own attention implementation


@torch.no_grad()
def choose_path(policy: Runner) -> None:
    """Set `policy` to the fastest path that agrees with the model itself.

    Raises UserError if none does; the message names the mechanism that is not supported.
    """
    with probe_adapters(policy.causal):
        _choose_path(policy)


@contextmanager
def probe_adapters(model: Model) -> Iterator[None]:
    """Give each LoRA adapter a small random second matrix (B) while the paths are compared.

    In a new adapter B is 0, which would hide a mistake in the merging of adapters. In a trained
    one the difference can exceed the tolerance: it was 0.09 after 975 steps at a rate of 1e-3, in
    bfloat16, and 0.44 between the two decoders after 1,300. So without this the path would depend
    on the length of the training, and a resumed run could take another path than it began with.
    """
    adapters = [weight for name, weight in model.named_parameters() if ".lora_B." in name]
    kept = [weight.data for weight in adapters]
    generator = torch.Generator().manual_seed(0)
    for weight in adapters:
        noise = ADAPTER_STD * torch.randn(weight.shape, generator=generator)
        weight.data = noise.to(weight)
    try:
        yield
    finally:
        for weight, data in zip(adapters, kept):
            weight.data = data


def _choose_path(policy: Runner) -> None:
    """Do the work of `choose_path`, after the adapters have been given values other than 0."""
    model = policy.causal
    own_attention = model.config._attn_implementation
    if own_attention == ATTENTION_NAME:  # it was set for another policy
        own_attention = "eager"
        model.set_attn_implementation(own_attention)

    probe = probe_of(model.get_input_embeddings().weight.shape[0])
    expected = _Expected(probe, own_logprobs(policy, probe), own_attention)

    problem = ""
    for path in PATHS:
        try:
            if not _set_path(policy, path, own_attention):
                continue
            if path == "shared" and not attends_once(policy, probe):
                continue
            difference = _difference(policy, expected)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # an architecture may raise anything: try the next path
            problem = f"it cannot be run this way ({cause_of(error)})"
        else:
            if _is_rounding(policy, path, difference, expected):
                return
            problem = f"its log-probabilities differ from ours by {difference:.1g}"

        if path == "fast":
            warnings.warn(
                f"the fast forward pass disagrees with the model and is not used: {problem}",
                stacklevel=3,
            )
    raise refusal(policy, unsupported_mechanism(policy, probe) or problem)


def _is_rounding(policy: Runner, path: ForwardPath, difference: float, expected: _Expected) -> bool:
    """Return whether rounding explains the `difference` between the policy's path and its model."""
    model = policy.causal
    if difference <= tolerance(model):
        return True
    if not (difference < MISSING and has_low_precision(model)):
        return False

    rounding = _own_rounding(policy, expected)
    _set_path(policy, path, expected.own_attention)  # the comparison has changed it
    return difference <= OWN_ROUNDINGS * rounding


def _own_rounding(policy: Runner, expected: _Expected) -> float:
    """Return how much another attention implementation of the model differs; 0 if it has none.

    The model is left with the other implementation.
    """
    scale = policy.logit_scale
    try:
        is_eager = expected.own_attention == "eager"
        policy.causal.set_attn_implementation("sdpa" if is_eager else "eager")
        other = own_logprobs(policy, expected.probe)
    except (ValueError, UserError):
        return 0.0
    finally:
        policy.logit_scale = scale
    return distance(torch.cat(other), torch.cat(expected.logprobs), low_precision=True)


def _set_path(policy: Runner, path: ForwardPath, own_attention: str) -> bool:
    """Set `policy` to this path; return whether the model has it.

    `own_attention` is the name of the model's own attention implementation.
    """
    model = policy.causal
    policy.path = path
    policy.fast_model = None

    if path != "plain" and _needs_plain(model):
        return False
    if path == "plain":
        with suppress(ValueError):  # a part of the model may support no other attention
            model.set_attn_implementation(own_attention)
        return True

    model.set_attn_implementation(ATTENTION_NAME)
    if path == "fast":
        policy.fast_model = build_fast_llama(model)
        return policy.fast_model is not None
    return model.config._attn_implementation == ATTENTION_NAME


def _needs_plain(model: Model) -> bool:
    """Return whether the model has what the comparison cannot see, because it shows later.

    - Layers without rotary embedding of Llama 4 scale queries by the index of a token in the
      tensor, from `floor_scale` tokens on, instead of by its position.
    - Modules that an adapter replaces (PEFT's `modules_to_save`) are like the model's own until
      they have been trained. The fast path would use them for the reference, too.
    """
    config = text_config(model.config)
    counts = getattr(config, "attn_temperature_tuning", False)
    without_rotary = not all(getattr(config, "no_rope_layers", None) or [1])
    replaces = any(type(module).__name__ == "ModulesToSaveWrapper" for module in model.modules())
    return (bool(counts) and without_rotary) or replaces


def _difference(policy: Runner, expected: _Expected) -> float:
    """Return the distance between the policy's log-probabilities and the model's.

    It is the larger of the rollout's and the update's.
    """
    probe, logprobs = expected.probe, expected.logprobs
    low_precision = has_low_precision(policy.causal)
    in_rollout = distance(*rollout_logprobs(policy, probe, logprobs), low_precision)
    in_update = distance(*update_logprobs(policy, probe, logprobs), low_precision)
    return torch.tensor([in_rollout, in_update]).max().item()  # NaN if either is
