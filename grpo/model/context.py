"""How long a sequence may be for a model: its own limit, and what our forward passes support."""

from collections.abc import Iterator
from typing import Any

NO_CONTEXT_LIMIT = 1 << 30

# The names of a model's own limit. MPT has the second, and the decoders of Whisper the third.
LIMITS = ("max_position_embeddings", "max_seq_len", "max_target_positions")


def text_config(config: Any) -> Any:
    """Return the configuration of the language model, which may be a part of a larger one's."""
    whole = getattr(config, "get_text_config", None)
    return whole(decoder=True) if whole else config


def context_of(config: Any, *, supports_windows: bool) -> tuple[int, str]:
    """Return the most tokens of prompt and completion together, and why that is less than usual.

    The reason is "" if it is the limit in the model's `config`. Lower limits are

    - the shortest attention window, unless the forward pass `supports_windows`;
    - with LongRoPE (arXiv:2402.13753) the context before the extension. Beyond it `transformers`
      turns all positions of a batch by other factors, so the log-probabilities of a short text
      would depend on the longest one beside it.
    """
    config = text_config(config)
    limits = (getattr(config, name, None) for name in LIMITS)
    context: int = next(filter(None, limits), NO_CONTEXT_LIMIT)
    reason = ""

    for original in _contexts_before_longrope(config):
        if original < context:
            context = original
            reason = f"its positions are extended by LongRoPE beyond {original:,} tokens"

    window = None if supports_windows else attention_window(config)
    if window and window < context:
        context = window
        reason = f"its attention window is {window:,} tokens"

    return context, reason


def _contexts_before_longrope(config: Any) -> Iterator[int]:
    """Yield the contexts, in tokens, that LongRoPE extends."""
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer = [each for each in parameters.values() if isinstance(each, dict)]
    for each in by_layer or [parameters]:
        if each.get("rope_type") == "longrope":
            original = each.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None)
            if original:
                yield original


def attention_window(config: Any) -> int | None:
    """Return the attention window of the model's layers in tokens; None if all see everything.

    The chunks of a chunked attention count as windows.
    """
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and any("chunked" in kind for kind in kinds):
        return getattr(config, "attention_chunk_size", None)
    if kinds is not None and not any("sliding" in kind for kind in kinds):
        return None
    if not getattr(config, "use_sliding_window", True):
        return None
    return getattr(config, "sliding_window", None)
