"""How many bytes training keeps in memory, computed from a model's configuration.

The trainer sizes its micro-batches by it.
"""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo.model.context import text_config

# Activations may take one sixth of the GPU's memory, if that is enough.
ACTIVATION_PART = 6

# Keys and values may take this share of the memory that weights and optimizer leave.
CACHE_SHARE = 0.45

# Tokens times parameters that keep a GPU busy for as long as the host takes to start a micro-batch
# (0.1 to 0.2 s): 4,000 tokens of Llama-3.2-3B, or 100,000 of SmolLM2-135M.
BUSY_WORK = 1.15e13

# Bytes of AdamW's two moments for each trained number.
MOMENT_BYTES = 8


@dataclass(frozen=True)
class Shape:
    """A model's sizes, as far as memory depends on them."""

    layers: int
    width: int  # E
    inner: int  # F
    keys: int  # K * D: numbers of a token's keys in a layer, and as many of its values
    number: int  # bytes of a number
    is_fast: bool = True  # whether `model.llama` runs it

    @property
    def parameters(self) -> int:
        """The number of weights in the layers, assuming that queries are as wide as the model."""
        attention = self.width * (2 * self.width + 2 * self.keys)
        return self.layers * (attention + 3 * self.width * self.inner)

    @property
    def cache(self) -> int:
        """Bytes of a token's keys and values."""
        return 2 * self.layers * self.keys * self.number

    def activations(self, gradient_checkpointing: bool = False) -> int:
        """Return the bytes of a token's activations, kept until the backward pass.

        For the fast forward pass they are what `model.ops` saves; for others, a rough count. With
        gradient checkpointing they are the inputs of all layers, and in the backward pass one
        layer's activations and the gradients of its MLP.
        """
        fast = 6 * self.width + 2 * self.keys + 2 * self.inner
        other = 16 * self.width + 5 * self.inner
        layer = fast if self.is_fast else other
        if gradient_checkpointing:
            return (self.layers * self.width + layer + 4 * self.inner) * self.number
        return self.layers * layer * self.number


def shape_of(config: Any, number: int, is_fast: bool = True) -> Shape:
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
        is_fast=is_fast,
    )


@dataclass(frozen=True)
class DeviceMemory:
    """The bytes of a GPU, e.g. ``DeviceMemory(80e9, reserved=6e9)``.

    `reserved` are those of weights and optimizer; caches and activations share the others.
    """

    total: float
    reserved: float

    @property
    def left(self) -> float:
        """The bytes that are not reserved."""
        return max(0.0, self.total - self.reserved)


def update_tokens(
    shape: Shape, memory: DeviceMemory, *, gradient_checkpointing: bool = False
) -> int:
    """Return how many tokens a micro-batch may have on a GPU.

    Their activations may take a sixth of its memory, or a third of what is left of it. To keep the
    GPU busy (BUSY_WORK), they may take as much as keys and values may.
    """
    each = shape.activations(gradient_checkpointing)
    usual = min(memory.total / ACTIVATION_PART, memory.left / 3)
    busy_tokens = BUSY_WORK / shape.parameters
    for_busy_gpu = min(CACHE_SHARE * memory.left, busy_tokens * each)
    tokens = int(max(usual, for_busy_gpu) / each)
    return max(256, min(65_536, tokens))


def prompts_at_once(
    shape: Shape, memory: DeviceMemory, *, completions: int, prompt: int, room: int
) -> int:
    """Return for how many prompts the caches of a rollout have memory.

    A prompt has `prompt` tokens, and `completions` of up to `room` tokens each.
    """
    each = shape.cache * (prompt + completions * room)
    return max(1, int(CACHE_SHARE * memory.left / each))


def optimizer_bytes(trained: int, number: int, parts: int = 1) -> int:
    """Return the bytes of masters, moments and summed gradients of `trained` numbers.

    A number of the model takes `number` bytes. Masters and moments are shared out among `parts`
    ranks; each rank has all the sums.
    """
    # A float32 model on one rank is its own master.
    masters = 4 * trained // parts if number < 4 or parts > 1 else 0
    sums = 4 * trained
    return masters + MOMENT_BYTES * trained // parts + sums


def free_host_memory(system: Path = Path("/")) -> float:
    """Return how many bytes of the host's memory are still available.

    The kernel's figure counts, and the limit of the control group (version 2) if a container sets
    one. Infinite where neither is known, as on systems other than Linux. `system` is the root of
    the file system.
    """
    free = float("inf")
    with suppress(OSError):
        for line in (system / "proc/meminfo").read_text("utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                free = 1024 * int(line.split()[1])

    group = system / "sys/fs/cgroup"
    with suppress(OSError, ValueError):  # ValueError: the limit is "max", which is none
        limit = int((group / "memory.max").read_text("utf-8"))
        used = int((group / "memory.current").read_text("utf-8"))
        figures = dict(
            line.split() for line in (group / "memory.stat").read_text("utf-8").splitlines()
        )
        # The kernel drops cached files when it needs their memory.
        cached = int(figures["inactive_file"]) + int(figures["active_file"])
        free = min(free, limit - used + cached)
    return free
