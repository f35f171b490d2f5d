"""Checks of a model: its files and tensors, its context, and which ways to run it are right.

When a model is loaded, a few short sequences are run both by the model alone, one at a time and
without padding, and in a micro-batch; `grpo.fast` compares its rollout as well. A model whose own
forward pass disagrees depends on more than the tokens before, and is refused.

Shapes: T tokens of a completion, N tokens of all completions, V vocabulary.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast

from grpo.data.errors import UserError, lacks_memory, shortened
from grpo.data.files import MAX_BYTES

# `transformers` and `peft` resolve most attributes of a model at run time, so a type checker knows
# hardly any of them.
Model = Any

NO_CONTEXT_LIMIT = 1 << 30

# The hidden size of SmolLM2-135M, on which the defaults were measured.
MEASURED_SIZE = 576


def context_of(config: Any, supports_windows: bool = True) -> tuple[int, str]:
    """Return the most tokens of prompt and completion together, and why that is less than usual.

    The reason is "" if it is the limit in the model's `config`. Lower limits are

    - the shortest attention window, unless the forward pass `supports_windows`;
    - with LongRoPE (arXiv:2402.13753) the context before the extension. Beyond it `transformers`
      turns all positions of a batch by other factors, so the log-probabilities of a short text
      would depend on the longest one beside it.
    """
    config = config.get_text_config(decoder=True)
    limits = (getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len"))
    found = [(next(filter(None, limits), NO_CONTEXT_LIMIT), "")]  # MPT has the second

    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        name = "original_max_position_embeddings"
        most = rope.get(name) or getattr(config, name)
        found.append((most, f"its positions are extended by LongRoPE beyond {most:,} tokens"))

    if not supports_windows and (window := attention_window(config)):
        found.append((window, f"its attention window is {window:,} tokens"))

    return min(found)


def attention_window(config: Any) -> int | None:
    """Return the tokens of the layers' attention window, or chunk; None if all see everything."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and any("chunked" in kind for kind in kinds):
        return getattr(config, "attention_chunk_size", None)
    if kinds is not None and not any("sliding" in kind for kind in kinds):
        return None
    return getattr(config, "sliding_window", None)


# Files and tensors

# What `transformers` and `tokenizers` read of a directory.
MODEL_FILES = (".json", ".jinja", ".safetensors", ".txt", ".model")

# The largest hidden state that is accepted in float16. Its numbers end at twice this, and training
# moves the largest hidden states little.
LIMIT = 32_768.0

# What it reads. The largest hidden states belong to the first tokens of a text, to line ends and to
# marks (massive activations, arXiv:2402.17762).
TEXT = """Which of the two is larger? Add the numbers, then compare: 17 + 25 = 42, and 3 * 9 = 27.
A train that leaves at 8:15 is 12 minutes late; "never mind", said the clerk, "it is Tuesday."
  def half(x): return x / 2  # {"key": [1.5, null]}
| one | two | three |

The river was low, the reeds were dry, and nothing moved but a heron and its shadow.
"""


def check_files(folder: Path) -> None:
    """Raise UserError if a file that `transformers` reads is not an ordinary one, or too large."""
    for path in sorted(folder.iterdir()):
        if path.suffix in MODEL_FILES and not path.is_file():
            raise UserError(f"--model {folder}: {path.name} is no ordinary file")
        if path.suffix in (".json", ".jinja") and path.stat().st_size > MAX_BYTES:
            most = f"{MAX_BYTES >> 20:,} MiB"
            raise UserError(f"--model {folder}: {path.name} has more than {most}")


def check_step(tensors: Mapping[str, Tensor]) -> None:
    """Raise FloatingPointError if one of the tensors is not finite after a step of the optimizer.

    A finite gradient can make a weight NaN, or its second moment infinite, which freezes the weight
    for good. Neither shows in the step's loss.
    """
    if fault := _fault(tensors):
        raise FloatingPointError(f"after the optimizer's step {fault}")


def check_loaded(tensors: Mapping[str, Tensor], source: str) -> None:
    """Raise UserError if one of the tensors read from `source` is not finite."""
    if fault := _fault(tensors):
        raise UserError(
            f"{source}: {fault}; the file is damaged: give another model, or an earlier checkpoint"
        )


def _fault(tensors: Mapping[str, Tensor]) -> str:
    """Return which of the floating-point tensors is not finite, in words; "" if all are."""
    found = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    # The norm of finite numbers may overflow, so only then each tensor is checked.
    if torch.nn.utils.get_total_norm(found.values()).isfinite():
        return ""

    for name, tensor in found.items():
        if count := int((~tensor.isfinite()).sum()):
            return f"{name} is not finite ({count:,} of {tensor.numel():,} numbers)"
    return ""


def check_names(source: str, what: str, differences: Mapping[str, Iterable[str]]) -> None:
    """Raise UserError unless the tensors read from `source` are exactly those of `what`.

    The `differences` are names of tensors, by kind: "missing", "unexpected", "of another shape".
    """
    problems = []
    for kind, names in differences.items():
        if found := sorted(names):
            others = ", ..." if len(found) > 3 else ""
            problems.append(f"{len(found)} {kind} ({', '.join(found[:3])}{others})")
    if problems:
        raise UserError(
            f"--model {source}: the tensors there are not those of {what}: {'; '.join(problems)}; "
            "give a folder whose weights and configuration were saved together"
        )


@torch.no_grad()
def fits_float16(model: Model, tokens: list[int]) -> bool:
    """Return whether no hidden state of `model`, which is in float16, exceeds LIMIT on `tokens`."""
    ids = torch.tensor([tokens], device=model.device)
    try:
        output = model(input_ids=ids, use_cache=False, output_hidden_states=True)
    except Exception as error:  # `check_model` says later why it cannot run
        if lacks_memory(error):
            raise
        return True
    # What is not a number is not below the limit.
    return all(bool(hidden.abs().amax() <= LIMIT) for hidden in output.hidden_states)


# Ways to run a model

# The largest distance that is accepted in float32, in nats. In most models of 30 layers rounding
# comes to 1e-5, and a missing mechanism to 1e-3 or more (runs/archive/LOG.md, 2026-11-23).
FLOAT32_TOLERANCE = 1e-4

# The largest relative distance that is accepted in bfloat16, float16 and quantised models. Rounding
# comes to 0.03 in SmolLM2, to 0.04 in a random model of the shape of Llama-3.2-3B, and a missing
# mechanism to 0.142 or more (tests/support/tiny_architectures.py).
LOW_PRECISION_TOLERANCE = 0.07

# In some models rounding grows: in those of random weights with depth and width, in Qwen2.5-0.5B
# under an adapter of rank 4 to 7e-4 nats. So a larger distance is accepted up to this multiple of
# the model's own rounding (`own_rounding`), in float32 up to this multiple of what a NUDGE changes.
OWN_ROUNDINGS = 2.0

# A relative distance that is never accepted as rounding, and one in float32, in nats.
MISSING, FLOAT32_MISSING = 0.14, 1e-3

# In float32 the embeddings are changed by this part of their size to measure a model's rounding. It
# is worth NUDGE_ROUNDINGS, about as many as follow in 30 layers.
NUDGE, NUDGE_ROUNDINGS = 1e-5, 100

# Standard deviation of the adapters' second matrices during the comparison. In bfloat16, an ignored
# scale of 1/2 then makes a difference of 0.10 (SmolLM2), and rounding one of 0.03.
ADAPTER_STD = 0.03

REFUSED = (
    "its logits are more than its output layer on its last hidden state, or a token's "
    "probabilities depend on more than the tokens before it"
)

LARGE_LOGIT = 1000.0  # see `whole_head`


class Probe:
    """Token ids of the test sequences, and the log-probabilities of a policy's unmodified model.

    Raises UserError if the logits are not finite.
    """

    def __init__(self, policy: Any):
        model = policy.causal
        # Two prompts of different lengths; two completions of each, which begin alike.
        self.prompts, self.completions = probe_tokens(len(model.get_input_embeddings().weight))

        self.expected = []  # (T + 1, V) each: its tokens, and what follows its end
        for c, completion in enumerate(self.completions):
            prompt = self.prompts[c // 2]
            tokens = torch.tensor([[*prompt, *completion]], device=policy.device)
            logits = model(input_ids=tokens, use_cache=False).logits
            self.expected.append(logprobs_of(logits[0, len(prompt) - 1 :]))

        if any(each.isnan().any() for each in self.expected):
            raise UserError(
                f"--model {policy.name}: its logits are not finite; give a fresh copy of its "
                "weights"
            )
        # The implementation of attention with which the model computed them.
        self.attention: str = model.config._attn_implementation


class WholeHead:
    """The output layer and what the model does before and after it, e.g. a cap on the logits.

    It is the model's own forward pass around layers that return the given hidden states.
    """

    def __init__(self, policy: Any):
        self.causal, self.inner, self.out_features = policy.causal, policy.inner, policy.vocabulary

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the logits (..., V) of hidden states (..., E)."""
        given: list[Any] = []

        def forward(*_: Any, **__: Any) -> LastHiddenState:
            given.append(hidden.reshape(1, -1, hidden.shape[-1]))
            return LastHiddenState(last_hidden_state=given[0])

        self.inner.forward = forward
        try:
            tokens = torch.zeros(hidden.shape[:-1], dtype=torch.long, device=hidden.device)
            logits = self.causal(input_ids=tokens.view(1, -1), use_cache=False).logits
        finally:
            del self.inner.forward
        if not given:
            raise NotImplementedError("the model calls its layers in another way")
        return logits.view(*hidden.shape[:-1], -1)


class LastHiddenState(BaseModelOutputWithPast):
    """The output of a model's layers, of which only the last hidden states are known."""

    def __getattr__(self, name: str) -> None:
        return None


def probe_tokens(vocabulary: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Return prompts and completions of random tokens, the same at every call."""
    generator = torch.Generator().manual_seed(25)

    def random_tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(vocabulary, (count,), generator=generator).tolist())

    prompts = [random_tokens(11), random_tokens(6)]
    completions = []
    for lengths in ((8, 6), (4, 7)):
        first = random_tokens(1)
        completions += [first + random_tokens(length - 1) for length in lengths]
    return prompts, completions


@torch.no_grad()
def check_model(policy: Any) -> Probe:
    """Return the probe of a policy's model. Raises UserError if its micro-batches disagree."""
    with probe_adapters(policy.causal):
        try:
            probe = Probe(policy)
            policy.whole_head = whole_head(policy, probe)
            difference = update_distance(policy, policy.forward, probe)
        except UserError:
            raise
        except Exception as error:  # an architecture may raise anything
            if lacks_memory(error):
                raise
            raise refusal(
                policy, f"it cannot be run on token ids alone ({cause_of(error)})"
            ) from error
        if not is_rounding(policy, difference, probe):
            raise refusal(policy, f"{REFUSED}: they differ by {difference:.1g} in a batch")
    return probe


@contextmanager
def probe_adapters(model: Model) -> Iterator[None]:
    """Give each LoRA adapter a small random second matrix (B) while ways are compared.

    In a new adapter B is 0, which would hide a mistake in the merging of adapters. A trained one
    can exceed the tolerance, so a resumed run could take another way than it began with.
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


def whole_head(policy: Any, probe: Probe) -> WholeHead | None:
    """Return what makes logits of hidden states if that is more than the output layer, else None.

    Large logits show it: a cap changes small ones too little for a comparison of log-probabilities.
    """
    layer, whole = policy.causal.get_output_embeddings(), WholeHead(policy)
    hidden_1TE = policy.hidden_states(torch.tensor(probe.prompts[:1], device=policy.device))
    hidden_1TE = hidden_1TE * (LARGE_LOGIT / layer(hidden_1TE).abs().max())
    try:
        difference = (whole(hidden_1TE) - layer(hidden_1TE)).abs().max().item()
    except Exception as error:  # the log-probabilities will tell
        if lacks_memory(error):
            raise
        return None
    return whole if difference > LARGE_LOGIT / 50 else None


def update_distance(policy: Any, forward: Any, probe: Probe) -> float:
    """Return the distance from the expected log-probabilities in a micro-batch of `forward`."""
    batch = forward.pack(probe.prompts, probe.completions)
    logits = policy.head(batch.of_tokens(forward.predict(batch)))
    return distance(policy, logits, torch.cat([each[:-1] for each in probe.expected]))


def is_rounding(policy: Any, difference: float, probe: Probe) -> bool:
    """Return whether rounding explains a `distance` from the log-probabilities of the probe."""
    if has_low_precision(policy.causal):
        accepted, missing, roundings = LOW_PRECISION_TOLERANCE, MISSING, 1
    else:
        accepted, missing, roundings = FLOAT32_TOLERANCE, FLOAT32_MISSING, NUDGE_ROUNDINGS
    if difference <= accepted or difference >= missing:
        return difference <= accepted
    return difference <= OWN_ROUNDINGS * roundings * own_rounding(policy, probe)


def own_rounding(policy: Any, probe: Probe) -> float:
    """Return the distance that one rounding explains: in float32 the part of it in what a NUDGE to
    the embeddings changes, else what another attention implementation does; 0 if there is none.
    """
    model, is_low = policy.causal, has_low_precision(policy.causal)
    before = model.config._attn_implementation
    other = "sdpa" if probe.attention == "eager" else "eager"
    try:
        model.set_attn_implementation(other if is_low else probe.attention)
        embeddings = model.get_input_embeddings()
        with nullcontext() if is_low else embeddings.register_forward_hook(_nudge):
            moved = Probe(policy)
    except Exception as error:  # the model may have no other, or one that cannot be run
        if lacks_memory(error):
            raise
        return 0.0
    finally:
        model.set_attn_implementation(before)
    moved_by = distance(policy, torch.cat(moved.expected), torch.cat(probe.expected))
    return moved_by if is_low else moved_by / NUDGE_ROUNDINGS


def _nudge(module: Any, inputs: Any, embedded: Tensor) -> Tensor:
    noise = torch.randn(embedded.shape, generator=torch.Generator().manual_seed(0))
    return embedded * (1 + NUDGE * noise.to(embedded))


def has_low_precision(model: Model) -> bool:
    """Return whether the model rounds more than float32 does."""
    is_quantised = getattr(model, "is_quantized", False)
    return is_quantised or model.dtype not in (torch.float32, torch.float64)


def logprobs_of(logits: Tensor) -> Tensor:
    """Return the log-softmax of logits (..., V), in float32 at least."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def distance(policy: Any, logits_NV: Tensor, expected_NV: Tensor) -> float:
    """Return the distance of the log-softmax of logits from log-probabilities.

    In float32 it is the mean absolute difference over the vocabulary, in nats, at the worst token.
    In low precision it is the mean absolute deviation of the differences over the vocabulary,
    divided by that of the expected log-probabilities, at the median token: a single token may
    differ by more, where rounding makes a router choose another expert.
    """
    difference_NV = logprobs_of(logits_NV) - expected_NV
    if not has_low_precision(policy.causal):
        return difference_NV.abs().mean(-1).max().item()

    # Rounding of the largest logit (from 16 on bfloat16 has only multiples of 1/8) moves the
    # normaliser, and so all log-probabilities by the same amount. The deviation leaves that out.
    deviation_N, scale_N = (
        (x_NV - x_NV.mean(-1, keepdim=True)).abs().mean(-1) for x_NV in (difference_NV, expected_NV)
    )
    return (deviation_N / scale_N.mean()).median().item()


def refusal(policy: Any, reason: str) -> UserError:
    """Return the error that refuses the model."""
    return UserError(
        f"--model {policy.name}: {type(policy.causal).__name__} is not supported: {reason}; give a "
        "model of another architecture"
    )


def cause_of(error: Exception) -> str:
    """Return the type and the first line of an error."""
    lines = str(error).strip().splitlines() or [""]
    return shortened(f"{type(error).__name__}: {lines[0]}", 300)
