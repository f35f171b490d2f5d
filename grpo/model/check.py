"""Compare our forward passes with the unmodified model's, when a model is loaded, and choose the
fastest that agrees.

A `transformers` model can be run in three ways, fastest first: by the *fast* forward pass
(`model.llama`), with prompts *shared* between completions (`model.prefix_cache`,
`model.packed_attention`), and *plain*, every token again (`model.fallback`). Which of them is
right cannot be read from an architecture's name: some layers keep a state beside keys and values,
some attention functions take arguments that change the result. So each way is tried on a few short
sequences, as the rollout runs the model and as the update does, and its log-probabilities are
compared with those of the model's own forward pass: its own attention, one sequence at a time, no
padding. A model for which no way is right is refused.

Shapes: P prompts, C completions, R rows of the rollout, T tokens, N tokens compared, H hidden
size, V vocabulary.
"""

import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from grpo.model.llama import FastLlama, fast_llama
from grpo.model.prefix_cache import NAME
from tasks.base import UserError

Path = Literal["fast", "shared", "plain"]
PATHS: tuple[Path, ...] = ("fast", "shared", "plain")

# By how many nats the log-probabilities of a token's place may differ in float32, in the mean over
# the vocabulary. Rounding comes to 1e-5 at most in a model of 30 layers, a mechanism that is
# missing to 1e-3 and more (runs/LOG.md, 2026-11-23).
EXACT = 1e-4

# The same for bfloat16, float16 and quantised models: the mean deviation of the differences as a
# share of that of the log-probabilities, within the vocabulary, at the median of the places.
# Rounding comes to 0.04 in models of 30 layers, trained (SmolLM2: 0.03) or random (Llama-3.2-3B's
# shape: 0.04). Single places may differ by much: where rounding makes a router take another expert.
ROUGH = 0.07

# Rounding grows with depth and width in a model of random weights. So a difference larger than
# ROUGH is held against the model's own: that between two of its attention implementations, which
# compute the same. A difference of MISSING is never taken for rounding: mechanisms that are
# missing come to 0.142 and more (tests/support/tiny_architectures.py, in bfloat16).
OWN_ROUNDINGS = 2.0
MISSING = 0.14

CAPPED = (
    "its logits are more than its output layer on its last hidden state (capped or transformed)"
)


class Runner(Protocol):
    """What runs a model: a `grpo.model.policy.Policy`, whose `path`, `fast_model` and
    `logit_scale` are found here.
    """

    name: str
    path: Path
    fast_model: FastLlama | None
    logit_scale: float

    @property
    def causal(self) -> nn.Module: ...
    @property
    def inner(self) -> nn.Module: ...
    @property
    def head(self) -> nn.Module: ...
    @property
    def device(self) -> torch.device: ...
    def prefill(self, prompts: Sequence[tuple[int, ...]]) -> tuple[Tensor, Any]: ...
    def extend(self, tokens_RT: Tensor, shared: Any) -> Tensor: ...
    def pack(
        self, prompts: Sequence[tuple[int, ...]], completions: Sequence[tuple[int, ...]]
    ) -> Any: ...
    def predict(self, packing: Any) -> Tensor: ...
    def logits(self, hidden: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Probe:
    """Token ids: two prompts of different length, and two completions of each that begin with the
    same token.
    """

    prompts: tuple[tuple[int, ...], ...]
    completions: tuple[tuple[int, ...], ...]

    def sequence(self, c: int) -> tuple[int, ...]:
        return self.prompts[c // 2] + self.completions[c]


@dataclass(frozen=True)
class RolloutStep:
    """One pass of the rollout over completions `rows`, of which `filled` tokens have been read:
    `length` tokens of each, the first `accepted` of which are right; the others are rejected
    drafts.
    """

    rows: tuple[int, ...]
    filled: tuple[int, ...]
    length: int
    accepted: tuple[int, ...]


# One row a prompt at first; then the completions diverge; drafts are accepted in part; completion
# 2 ends, and a row is dropped.
ROLLOUT = (
    RolloutStep(rows=(0, 2), filled=(0, 0), length=1, accepted=(1, 1)),
    RolloutStep(rows=(0, 1, 2, 3), filled=(1, 1, 1, 1), length=3, accepted=(3, 2, 1, 3)),
    RolloutStep(rows=(0, 1, 2, 3), filled=(4, 3, 2, 4), length=2, accepted=(2, 2, 2, 1)),
    RolloutStep(rows=(0, 3, 1), filled=(6, 5, 5), length=1, accepted=(1, 1, 1)),
)
# Which row of the step before each row was:
SOURCES = ((0, 1), (0, 0, 1, 1), (0, 1, 2, 3), (0, 3, 1))


def probe_of(vocabulary: int) -> Probe:
    """Return the probe for a vocabulary of that size; the same at each call."""
    generator = torch.Generator().manual_seed(25)

    def some(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(vocabulary, (count,), generator=generator).tolist())

    prompts = (some(11), some(6))
    completions = []
    for lengths in ((8, 6), (4, 7)):
        first = some(1)
        completions += [first + some(length - 1) for length in lengths]
    return Probe(prompts, tuple(completions))


@torch.no_grad()
def choose_path(policy: Runner):
    """Let `policy` run its model the fastest way that agrees with the model itself.

    Raises UserError where none does, and names what the model has that is not supported.
    """
    model = policy.causal
    own = model.config._attn_implementation
    if own == NAME:
        own = "eager"
        model.set_attn_implementation(own)
    probe = probe_of(model.get_input_embeddings().weight.shape[0])
    expected = _own_logprobs(policy, probe)

    problem = ""
    for path in PATHS:
        try:
            if not _take(policy, path, own):
                continue
            difference = _difference(policy, probe, expected)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever an architecture may object to; the next path is tried
            problem = f"it cannot be run so ({_cause(error)})"
        else:
            if difference <= tolerance(model):
                return
            if difference < MISSING and _is_rough(model):
                rounding = _own_rounding(policy, probe, expected, own)
                _take(policy, path, own)
                if difference <= OWN_ROUNDINGS * rounding:
                    return
            problem = f"its log-probabilities differ from ours by {difference:.1g}"
        if path == "fast":
            warnings.warn(
                f"the fast forward pass disagrees with the model and is not used: {problem}",
                stacklevel=3,
            )
    raise _refusal(policy, _mechanism(policy, probe) or problem)


def tolerance(model) -> float:
    """Return by how much two ways to run `model` may differ by rounding alone, see `_between`."""
    return ROUGH if _is_rough(model) else EXACT


def _own_rounding(policy: Runner, probe: Probe, expected: list[Tensor], own: str) -> float:
    """Return by how much another attention implementation of the model differs; 0 if it has none.

    `expected` are the log-probabilities by its `own` implementation. Leaves the model at the other.
    """
    scale = policy.logit_scale
    try:
        policy.causal.set_attn_implementation("sdpa" if own == "eager" else "eager")
        other = _own_logprobs(policy, probe)
    except (ValueError, UserError):
        return 0.0
    finally:
        policy.logit_scale = scale
    return _between(torch.cat(other), torch.cat(expected), is_rough=True)


def _is_rough(model) -> bool:
    return model.dtype not in (torch.float32, torch.float64) or bool(
        getattr(model, "is_quantized", False)
    )


def _take(policy: Runner, path: Path, own: str) -> bool:
    """Set `policy` to this path; return whether the model has it. `own` is the model's own
    attention.
    """
    model = policy.causal
    policy.path, policy.fast_model = path, None
    if path == "plain":
        with suppress(ValueError):  # of a part of the model that never had another attention
            model.set_attn_implementation(own)
        return True
    model.set_attn_implementation(NAME)
    if path == "fast":
        policy.fast_model = fast_llama(model)
        return policy.fast_model is not None
    return model.config._attn_implementation == NAME


def _own_logprobs(policy: Runner, probe: Probe) -> list[Tensor]:
    """Return the log-probabilities of the unmodified model for each completion: of its first token
    ... of what follows its last, (T + 1, V). Sets the policy's `logit_scale`.

    Raises UserError where it cannot be run on token ids, its numbers are not finite, or its logits
    are capped.
    """
    model, seen, logprobs = policy.causal, {}, []

    def see_hidden(module, inputs, output):
        seen["hidden"] = getattr(output, "last_hidden_state", None)

    def see_head(module, inputs, output):
        seen["input"], seen["output"] = inputs[0], output

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
    if seen.get("hidden") is not None and "input" in seen:
        before = _factor(seen["input"], seen["hidden"], _is_rough(model))
        after = _factor(logits, seen["output"], _is_rough(model))
        if before is None or after is None:
            raise _refusal(policy, _mechanism(policy, probe) or CAPPED)
        policy.logit_scale = before * after
    return logprobs


def _logprobs(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def _factor(whole: Tensor, part: Tensor, is_rough: bool) -> float | None:
    """Return the constant by which `part` was multiplied to give `whole`, or None where no
    constant explains it.
    """
    if whole is part:
        return 1.0
    if whole.shape != part.shape:
        return None
    whole, part = whole.double(), part.double()
    factor = ((whole * part).sum() / part.square().sum()).item()
    residual = (whole - factor * part).norm() / whole.norm()
    if residual > (1e-2 if is_rough else 1e-5):
        return None
    return factor if abs(factor - 1) > 1e-3 else 1.0


def _difference(policy: Runner, probe: Probe, expected: list[Tensor]) -> float:
    """Return by how much the log-probabilities differ from `expected`, those of the rollout or
    those of the update, whichever differ more.
    """
    pairs = (_rolled_out(policy, probe, expected), _updated(policy, probe, expected))
    differences = [_between(*pair, _is_rough(policy.causal)) for pair in pairs]
    return torch.tensor(differences).max().item()  # NaN if one is


def _between(found_NV: Tensor, expected_NV: Tensor, is_rough: bool) -> float:
    """Return the mean absolute difference over the vocabulary, in nats, at the worst place.

    Where rounding is not small, return the mean deviation of the differences within the vocabulary,
    as a share of that of the expected ones, at the median of the places.
    """
    apart_NV = found_NV - expected_NV
    never_NV = expected_NV.isinf()  # a token that can never come has -inf on both sides
    compared_NV = ~(never_NV & (found_NV == expected_NV))
    if not is_rough:
        return apart_NV.where(compared_NV, 0.0).abs().mean(-1).max().item()

    # Rounding of the likeliest logit (of 16 and more bfloat16 keeps multiples of 1/8) moves the
    # normaliser, and with it all log-probabilities alike: that part says nothing about the model.
    apart_N = _deviation(apart_NV, compared_NV)
    return (apart_N / _deviation(expected_NV, ~never_NV).mean()).median().item()


def _deviation(x_NV: Tensor, counted_NV: Tensor) -> Tensor:
    """Return the mean absolute deviation (N,) of those values that count from their mean."""
    count_N1 = counted_NV.sum(-1, keepdim=True)
    mean_N1 = x_NV.where(counted_NV, 0.0).sum(-1, keepdim=True) / count_N1
    return ((x_NV - mean_N1).where(counted_NV, 0.0).abs().sum(-1, keepdim=True) / count_N1)[:, 0]


def _rolled_out(policy: Runner, probe: Probe, expected: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return log-probabilities (N, V) as the sampler runs the model, see ROLLOUT, and the expected
    ones.
    """
    hidden_PH, cache = policy.prefill(probe.prompts)
    cache.allocate(len(probe.prompts), max(map(len, probe.completions)) + 2)
    found, wanted = [hidden_PH], [expected[0][0], expected[2][0]]

    for step, sources in zip(ROLLOUT, SOURCES, strict=True):
        if step is not ROLLOUT[0]:
            cache.keep(*(torch.tensor(x, device=policy.device) for x in (sources, step.filled)))
        tokens_RT = torch.zeros(len(step.rows), step.length, dtype=torch.long)
        for row, (c, filled, accepted) in enumerate(zip(step.rows, step.filled, step.accepted)):
            right = probe.completions[c][filled : filled + accepted]
            tokens_RT[row, :accepted] = torch.tensor(right)
            wanted += expected[c][filled + 1 : filled + 1 + accepted]
        hidden_RTH = policy.extend(tokens_RT.to(policy.device), cache)
        found += [hidden_RTH[row, :accepted] for row, accepted in enumerate(step.accepted)]

    return _logprobs(policy.logits(torch.cat(found))), torch.stack(wanted)


def _updated(policy: Runner, probe: Probe, expected: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return log-probabilities (N, V) as the update runs the model, all sequences packed, and the
    expected ones.
    """
    hidden_NH = policy.predict(policy.pack(probe.prompts, probe.completions))
    return _logprobs(policy.head(hidden_NH)), torch.cat([each[:-1] for each in expected])


def _mechanism(policy: Runner, probe: Probe) -> str:
    """Return what it is about the model that no path has, found by running it by itself; "" where
    none of the known reasons holds.
    """
    model = policy.causal
    if getattr(model.config, "is_encoder_decoder", False):
        return "it is an encoder-decoder"
    if policy.head is None:
        return "it has no output layer"
    one, other = (torch.tensor([probe.sequence(c)], device=policy.device)[:, :12] for c in (0, 3))

    def differs(logits: Tensor) -> bool:
        found, wanted = _logprobs(logits)[0], alone[0, : logits.shape[1]]
        return not _between(found, wanted, _is_rough(model)) <= tolerance(model)

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
        pass  # the paths' own problem is named instead
    return ""


def _refusal(policy: Runner, reason: str) -> UserError:
    return UserError(
        f"--model {policy.name}: {type(policy.causal).__name__} is not supported: {reason}; give a "
        "model of another architecture"
    )


def _cause(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]
