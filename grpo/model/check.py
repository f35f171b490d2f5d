"""Compare our forward passes with the unmodified model's, and choose the fastest that agrees.

A `transformers` model can run in three ways, called paths here; the fastest comes first:

- *fast*: our own forward pass (`model.llama`);
- *shared*: the model's, with prompts shared between completions (`model.prefix_cache` in the
  rollout, `model.packed_attention` in the update);
- *plain*: the model's, with every token run again at each step (`model.fallback`).

An architecture's name does not tell which of them are right: some layers keep a state beside keys
and values, and some attention functions take arguments that change the result. So when a model is
loaded, each path runs a few short sequences, both as the rollout runs the model and as the update
does. Its log-probabilities are compared with those of the model's own forward pass: its own
attention, one sequence at a time, no padding. A model for which no path is right is refused.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from grpo.model.interfaces import Model, RolloutCache
from grpo.model.llama import FastLlama, build_fast_llama
from grpo.model.packed_attention import Packing, PaddedBatch
from grpo.model.prefix_cache import ATTENTION_NAME
from grpo.model.probe import ROLLOUT, Probe, probe_of
from tasks.base import UserError

ForwardPath = Literal["fast", "shared", "plain"]
PATHS: tuple[ForwardPath, ...] = ("fast", "shared", "plain")

# float32: the largest allowed difference of the log-probabilities in nats, as the mean over the
# vocabulary at the worst token. Rounding comes to 1e-5 at most in a model of 30 layers, a missing
# mechanism to 1e-3 and more (runs/LOG.md, 2026-11-23).
EXACT = 1e-4

# bfloat16, float16 and quantised models: the largest allowed mean deviation of the differences
# within the vocabulary, as a share of that of the log-probabilities, at the median token. Rounding
# comes to 0.04 in models of 30 layers, trained (SmolLM2: 0.03) or random (Llama-3.2-3B's shape:
# 0.04). Single tokens may differ by much: where rounding makes a router choose another expert.
ROUGH = 0.07

# Rounding grows with depth and width in a model of random weights. So a difference larger than
# ROUGH is compared with the model's own: that between two of its attention implementations, which
# compute the same. A difference of MISSING is never taken for rounding: missing mechanisms come to
# 0.142 and more (tests/support/tiny_architectures.py, in bfloat16).
OWN_ROUNDINGS = 2.0
MISSING = 0.14

# Standard deviation of the adapters' second matrices during the comparison. An adapter whose scale
# of 1/2 is ignored then comes to 0.10 in bfloat16 (SmolLM2), rounding to 0.03.
ADAPTER_STD = 0.03

CAPPED = (
    "its logits are more than its output layer on its last hidden state (capped or transformed)"
)


class Runner(Protocol):
    """What runs a model: a `grpo.model.policy.Policy`.

    `choose_path` sets its `path`, `fast_model` and `logit_scale`.
    """

    name: str
    path: ForwardPath
    fast_model: FastLlama | None
    logit_scale: float

    @property
    def causal(self) -> Model:
        """The model without its adapters' wrapper."""

    @property
    def inner(self) -> Model:
        """The model without its output layer."""

    @property
    def head(self) -> nn.Module:
        """The output layer."""

    @property
    def device(self) -> torch.device:
        """The device of the model."""

    def prefill(self, prompts: Sequence[tuple[int, ...]]) -> tuple[Tensor, RolloutCache]:
        """Run the prompts; return the hidden states of their last tokens, and their cache."""

    def extend(self, tokens_RT: Tensor, cache: RolloutCache) -> Tensor:
        """Run the next tokens of each row; return their hidden states."""

    def pack(
        self, prompts: Sequence[tuple[int, ...]], completions: Sequence[tuple[int, ...]]
    ) -> Packing | PaddedBatch:
        """Return a micro-batch."""

    def predict(self, packing: Packing | PaddedBatch) -> Tensor:
        """Run a micro-batch; return the hidden states that predict its completions' tokens."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states."""


@torch.no_grad()
def choose_path(policy: Runner) -> None:
    """Make `policy` run its model the fastest way that agrees with the model itself.

    Raises UserError if none does. The message names what the model has that is not supported.
    """
    with _probe_adapters(policy.causal):
        _choose_path(policy)


@contextmanager
def _probe_adapters(model: Model) -> Iterator[None]:
    """Give each LoRA adapter a small random second matrix (B) while the paths are compared.

    B is 0 in a new adapter, which would hide a mistake in how it is merged. A trained adapter has
    made the difference larger than ROUGH (0.09 after 975 steps at a rate of 1e-3, in bfloat16). The
    path would then depend on how far a run has come, and a resumed run would take another one than
    it began with.
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
    model = policy.causal
    own_attention = model.config._attn_implementation
    if own_attention == ATTENTION_NAME:
        own_attention = "eager"
        model.set_attn_implementation(own_attention)
    probe = probe_of(model.get_input_embeddings().weight.shape[0])
    expected = _own_logprobs(policy, probe)

    problem = ""
    for path in PATHS:
        try:
            if not _set_path(policy, path, own_attention):
                continue
            difference = _difference(policy, probe, expected)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever an architecture objects to: try the next path
            problem = f"it cannot be run this way ({_cause(error)})"
        else:
            if _is_rounding(policy, path, difference, probe, expected, own_attention):
                return
            problem = f"its log-probabilities differ from ours by {difference:.1g}"

        if path == "fast":
            warnings.warn(
                f"the fast forward pass disagrees with the model and is not used: {problem}",
                stacklevel=3,
            )
    raise _refusal(policy, _unsupported_mechanism(policy, probe) or problem)


def _is_rounding(
    policy: Runner,
    path: ForwardPath,
    difference: float,
    probe: Probe,
    expected: list[Tensor],
    own_attention: str,
) -> bool:
    """Return whether rounding explains the `difference` that the policy's path makes."""
    model = policy.causal
    if difference <= tolerance(model):
        return True
    if not (difference < MISSING and _is_rough(model)):
        return False

    rounding = _own_rounding(policy, probe, expected, own_attention)
    _set_path(policy, path, own_attention)  # which the comparison has changed
    return difference <= OWN_ROUNDINGS * rounding


def tolerance(model: Model) -> float:
    """Return by how much two ways to run `model` may differ by rounding, see `_distance`."""
    return ROUGH if _is_rough(model) else EXACT


def _own_rounding(
    policy: Runner, probe: Probe, expected: list[Tensor], own_attention: str
) -> float:
    """Return by how much another attention implementation of the model differs; 0 if it has none.

    `expected` are the log-probabilities by its `own_attention`. Leaves the model at the other one.
    """
    scale = policy.logit_scale
    try:
        policy.causal.set_attn_implementation("sdpa" if own_attention == "eager" else "eager")
        other = _own_logprobs(policy, probe)
    except (ValueError, UserError):
        return 0.0
    finally:
        policy.logit_scale = scale
    return _distance(torch.cat(other), torch.cat(expected), is_rough=True)


def _is_rough(model: Model) -> bool:
    """Return whether the model's rounding is larger than that of float32."""
    is_quantised = bool(getattr(model, "is_quantized", False))
    return model.dtype not in (torch.float32, torch.float64) or is_quantised


def _set_path(policy: Runner, path: ForwardPath, own_attention: str) -> bool:
    """Set `policy` to this path; return whether the model has it.

    `own_attention` is the name of the model's own attention implementation.
    """
    model = policy.causal
    policy.path = path
    policy.fast_model = None
    if path == "plain":
        with suppress(ValueError):  # a part of the model may support no other attention
            model.set_attn_implementation(own_attention)
        return True

    model.set_attn_implementation(ATTENTION_NAME)
    if path == "fast":
        policy.fast_model = build_fast_llama(model)
        return policy.fast_model is not None
    return model.config._attn_implementation == ATTENTION_NAME


def _own_logprobs(policy: Runner, probe: Probe) -> list[Tensor]:
    """Return the unmodified model's log-probabilities for each completion (T + 1, V).

    The first row predicts the completion's first token, and the last one what follows its end.
    Sets the policy's `logit_scale`. Raises UserError if the model cannot be run on token ids, if
    its logits are not finite, or if they are capped.
    """
    model = policy.causal
    seen: dict[str, Any] = {}
    logprobs = []

    def see_hidden(module: nn.Module, inputs: Any, output: Any) -> None:
        seen["hidden"] = getattr(output, "last_hidden_state", None)

    def see_head(module: nn.Module, inputs: Any, output: Any) -> None:
        seen["input"] = inputs[0]
        seen["output"] = output

    hooks = []
    try:
        hooks.append(policy.inner.register_forward_hook(see_hidden))
        hooks.append(policy.head.register_forward_hook(see_head))
        for c in range(len(probe.completions)):
            tokens = torch.tensor([probe.sequence(c)], device=policy.device)
            logits = model(input_ids=tokens, use_cache=False).logits
            logprobs.append(_logprobs(logits[0, len(probe.prompts[c // 2]) - 1 :]))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise _refusal(policy, f"it cannot be run on token ids alone ({_cause(error)})") from error
    finally:
        for hook in hooks:
            hook.remove()

    if any(each.isnan().any() for each in logprobs):
        raise UserError(
            f"--model {policy.name}: its logits are not finite: the weights are damaged; give "
            "those of an earlier checkpoint, or a fresh copy"
        )

    # Some models scale the hidden state before the head, or the logits after it.
    if seen.get("hidden") is not None and "input" in seen:
        before = _factor(seen["input"], seen["hidden"], _is_rough(model))
        after = _factor(logits, seen["output"], _is_rough(model))
        if before is None or after is None:
            raise _refusal(policy, _unsupported_mechanism(policy, probe) or CAPPED)
        policy.logit_scale = before * after
    return logprobs


def _logprobs(logits: Tensor) -> Tensor:
    """Return log-probabilities in float32 at least."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def _factor(whole: Tensor, part: Tensor, is_rough: bool) -> float | None:
    """Return the constant c with whole = c * part, or None if there is none."""
    if whole is part:
        return 1.0
    if whole.shape != part.shape:
        return None

    # Least squares.
    whole, part = whole.double(), part.double()
    factor = ((whole * part).sum() / part.square().sum()).item()
    residual = (whole - factor * part).norm() / whole.norm()
    if residual > (1e-2 if is_rough else 1e-5):
        return None
    return factor if abs(factor - 1) > 1e-3 else 1.0


def _difference(policy: Runner, probe: Probe, expected: list[Tensor]) -> float:
    """Return by how much the policy's log-probabilities differ from the `expected` ones.

    Of the rollout's and the update's, those that differ more count.
    """
    is_rough = _is_rough(policy.causal)
    in_rollout = _distance(*_rollout_logprobs(policy, probe, expected), is_rough)
    in_update = _distance(*_update_logprobs(policy, probe, expected), is_rough)
    return torch.tensor([in_rollout, in_update]).max().item()  # NaN if either is


def _distance(found_NV: Tensor, expected_NV: Tensor, is_rough: bool) -> float:
    """Return how far apart two sets of log-probabilities are.

    In float32: the mean absolute difference over the vocabulary, in nats, at the worst token. If
    `is_rough`: the mean deviation of the differences within the vocabulary, as a share of that of
    the expected ones, at the median token.
    """
    difference_NV = found_NV - expected_NV
    is_impossible_NV = expected_NV.isinf()  # a token that can never come has -inf on both sides
    counts_NV = ~(is_impossible_NV & (found_NV == expected_NV))
    if not is_rough:
        return difference_NV.where(counts_NV, 0.0).abs().mean(-1).max().item()

    # Rounding of the likeliest logit (bfloat16 keeps multiples of 1/8 from 16 on) moves the
    # normaliser, and with it all log-probabilities alike: that part says nothing about the model.
    deviation_N = _deviation(difference_NV, counts_NV)
    return (deviation_N / _deviation(expected_NV, ~is_impossible_NV).mean()).median().item()


def _deviation(x_NV: Tensor, counts_NV: Tensor) -> Tensor:
    """Return the mean absolute deviation (N,) from their mean of those values that count."""
    count_N1 = counts_NV.sum(-1, keepdim=True)
    mean_N1 = x_NV.where(counts_NV, 0.0).sum(-1, keepdim=True) / count_N1
    return ((x_NV - mean_N1).where(counts_NV, 0.0).abs().sum(-1, keepdim=True) / count_N1)[:, 0]


def _rollout_logprobs(
    policy: Runner, probe: Probe, expected: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities (N, V) as the rollout runs the model, and the expected ones.

    The steps are those of ROLLOUT.
    """
    hidden_PE, cache = policy.prefill(probe.prompts)
    cache.allocate(len(probe.prompts), max(map(len, probe.completions)) + 2)
    found = [hidden_PE]
    wanted = [expected[0][0], expected[2][0]]

    for step in ROLLOUT:
        if step is not ROLLOUT[0]:
            cache.reorder(
                torch.tensor(step.sources, device=policy.device),
                torch.tensor(step.filled, device=policy.device),
            )

        tokens_RT = torch.zeros(len(step.rows), step.length, dtype=torch.long)
        for row, (c, filled, accepted) in enumerate(zip(step.rows, step.filled, step.accepted)):
            right = probe.completions[c][filled : filled + accepted]
            tokens_RT[row, :accepted] = torch.tensor(right)
            wanted += expected[c][filled + 1 : filled + 1 + accepted]

        hidden_RTE = policy.extend(tokens_RT.to(policy.device), cache)
        found += [hidden_RTE[row, :accepted] for row, accepted in enumerate(step.accepted)]

    return _logprobs(policy.logits(torch.cat(found))), torch.stack(wanted)


def _update_logprobs(policy: Runner, probe: Probe, expected: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return log-probabilities (N, V) as the update runs the model, and the expected ones.

    All sequences are packed into one micro-batch.
    """
    hidden_NE = policy.predict(policy.pack(probe.prompts, probe.completions))
    return _logprobs(policy.head(hidden_NE)), torch.cat([each[:-1] for each in expected])


def _unsupported_mechanism(policy: Runner, probe: Probe) -> str:
    """Return what the model has that no path supports, found by running it by itself.

    Returns "" if it is none of the known mechanisms.
    """
    model = policy.causal
    if getattr(model.config, "is_encoder_decoder", False):
        return "it is an encoder-decoder"
    if policy.head is None:
        return "it has no output layer"
    one, other = (torch.tensor([probe.sequence(c)], device=policy.device)[:, :12] for c in (0, 3))

    def differs(logits: Tensor) -> bool:
        found, wanted = _logprobs(logits)[0], alone[0, : logits.shape[1]]
        return not _distance(found, wanted, _is_rough(model)) <= tolerance(model)

    try:
        alone = _logprobs(model(input_ids=one, use_cache=False).logits)
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


def _refusal(policy: Runner, reason: str) -> UserError:
    return UserError(
        f"--model {policy.name}: {type(policy.causal).__name__} is not supported: {reason}; give a "
        "model of another architecture"
    )


def _cause(error: Exception) -> str:
    """Return the type and the first line of an error, in 300 characters at most."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]
