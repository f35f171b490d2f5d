"""How a policy is loaded. Nothing here imports torch, because `grpo.config` needs it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AdapterSettings:
    """A new LoRA adapter, e.g. ``AdapterSettings(rank=64, alpha=32.0)``.

    `seed` is that of its random weights.
    """

    rank: int
    alpha: float = 32.0
    seed: int = 0


@dataclass(frozen=True)
class LoadOptions:
    """What becomes of a model's weights, e.g. ``LoadOptions("bfloat16", AdapterSettings(64))``.

    - `dtype`: torch's name of the precision; auto: see `grpo.model.load.dtype_on`, and gradients
      are of low precision where that is faster;
    - `adapter`: the adapter of a new LoRA run; None for full fine-tuning, and for weights that
      have an adapter already;
    - `quantise` (with LoRA): one of `grpo.model.load.BITS_OPTIONS`;
    - `start`: the checkpoint of an earlier run from which this run started: the model itself, or
      one that holds an adapter on top of it;
    - `keep_reference`: keep the policy as it was at the start, for the KL term.
    """

    dtype: str = "auto"
    adapter: AdapterSettings | None = None
    quantise: str = "none"
    start: str | None = None
    keep_reference: bool = False
