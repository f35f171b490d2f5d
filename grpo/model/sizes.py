"""What a model's configuration says: how long a sequence may be, and how much memory it takes."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

NO_CONTEXT_LIMIT = 1 << 30

# The hidden size of SmolLM2-135M, on which the defaults were measured.
MEASURED_SIZE = 576

# The names of a model's own limit. MPT has the second, and the decoders of Whisper the third.
LIMITS = ("max_position_embeddings", "max_seq_len", "max_target_positions")


def text_config(config: Any) -> Any:
    """Return the configuration of the language model, which may be a part of a larger one's."""
    whole = getattr(config, "get_text_config", None)
    return whole(decoder=True) if whole else config


def context_of(config: Any, supports_windows: bool = True) -> tuple[int, str]:
    """Return the most tokens of prompt and completion together, and why that is less than usual.

    The reason is "" if it is the limit in the model's `config`. Lower limits are

    - the shortest attention window, unless the forward pass `supports_windows`;
    - with LongRoPE (arXiv:2402.13753) the context before the extension. Beyond it `transformers`
      turns all positions of a batch by other factors, so the log-probabilities of a short text
      would depend on the longest one beside it.
    """
    config = text_config(config)
    limits = (getattr(config, name, None) for name in LIMITS)
    found = [(next(filter(None, limits), NO_CONTEXT_LIMIT), "")]

    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        name = "original_max_position_embeddings"
        original = rope.get(name) or getattr(config, name)
        found.append(
            (original, f"its positions are extended by LongRoPE beyond {original:,} tokens")
        )

    if not supports_windows and (window := attention_window(config)):
        found.append((window, f"its attention window is {window:,} tokens"))

    return min(found)


def attention_window(config: Any) -> int | None:
    """Return the attention window of the model's layers in tokens; None if all see everything.

    The chunks of a chunked attention count as windows.
    """
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and any("chunked" in kind for kind in kinds):
        return getattr(config, "attention_chunk_size", None)
    if kinds is not None and not any("sliding" in kind for kind in kinds):
        return None
    return getattr(config, "sliding_window", None)


# Activations may take one sixth of a GPU's memory, if that is enough.
ACTIVATION_PART = 6

# Keys and values may take this share of the memory that weights and optimizer leave.
CACHE_SHARE = 0.45

# Tokens times parameters that keep a GPU busy for as long as the host takes to start a micro-batch
# (0.1 to 0.2 s): 4,000 tokens of Llama-3.2-3B, or 100,000 of SmolLM2-135M.
BUSY_WORK = 1.15e13


@dataclass(frozen=True)
class Shape:
    """A model's sizes, as far as memory depends on them."""

    layers: int
    width: int  # E
    inner: int  # F
    keys: int  # K * D: numbers of a token's keys in a layer, and as many of its values
    number: int  # bytes of a number

    @property
    def parameters(self) -> int:
        """The number of weights in the layers, assuming that queries are as wide as the model."""
        attention = self.width * (2 * self.width + 2 * self.keys)
        return self.layers * (attention + 3 * self.width * self.inner)

    @property
    def cache(self) -> int:
        """Bytes of a token's keys and values."""
        return 2 * self.layers * self.keys * self.number

    def activations(self, is_fast: bool, gradient_checkpointing: bool = False) -> int:
        """Return the bytes of a token's activations, kept until the backward pass.

        For `grpo.fast.llama` they are what its operations save; for others, a rough count. With
        gradient checkpointing they are the inputs of all layers, and in the backward pass one
        layer's activations and the gradients of its MLP.
        """
        fast = 6 * self.width + 2 * self.keys + 2 * self.inner
        layer = fast if is_fast else 16 * self.width + 5 * self.inner
        if gradient_checkpointing:
            return (self.layers * self.width + layer + 4 * self.inner) * self.number
        return self.layers * layer * self.number


def shape_of(config: Any, number: int) -> Shape:
    """Return the shape of a `transformers` configuration, whose numbers take `number` bytes.

    Sizes that it does not name, or that differ between layers, are guessed.
    """
    config = text_config(config)

    def size(name: str) -> int | None:
        with suppress(AttributeError, RuntimeError):  # the latter: it differs between layers
            value = getattr(config, name)
            return value if isinstance(value, int) else None
        return None

    width = size("hidden_size") or 4096
    heads = size("num_attention_heads") or 1
    key_heads = size("num_key_value_heads") or heads
    head_size = size("head_dim") or width // heads
    return Shape(
        layers=size("num_hidden_layers") or 32,
        width=width,
        inner=size("intermediate_size") or 4 * width,
        keys=key_heads * head_size,
        number=number,
    )


def update_tokens(shape: Shape, total: float, left: float, token_bytes: int) -> int:
    """Return how many tokens a micro-batch may have on a GPU, of `token_bytes` each.

    Their activations may take a sixth of its `total` memory, or a third of what is `left` of it. To
    keep the GPU busy (BUSY_WORK), they may take as much as keys and values may.
    """
    usual = min(total / ACTIVATION_PART, left / 3)
    for_busy_gpu = min(CACHE_SHARE * left, BUSY_WORK / shape.parameters * token_bytes)
    tokens = int(max(usual, for_busy_gpu) / token_bytes)
    return max(256, min(65_536, tokens))


def optimizer_bytes(trained: int, number: int) -> int:
    """Return the bytes of masters, moments and summed gradients of `trained` numbers.

    A number of the model takes `number` bytes; a float32 model is its own master.
    """
    masters = 4 * trained if number < 4 else 0
    moments, sums = 8 * trained, 4 * trained
    return masters + moments + sums
