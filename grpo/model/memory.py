"""What training holds in memory, in bytes, counted from a model's configuration; the trainer sizes
its micro-batches by it, `grpo.plan` its forecasts.

Shapes: L layers, N hidden size, K key heads of D, F inner size, of the model's configuration; b
bytes a number.
"""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SHARE, CACHES = (
    6,
    0.45,
    # activations take a sixth of the memory where that is enough, keys and values 0.45 of what is
    # left beside weights and optimizer
)
BUSY = (
    4096  # tokens that keep a GPU busy for as long as the host takes to start a micro-batch (0.1 s)
)
STATE = {"adamw": 8, "adamw8bit": 2}  # bytes of an optimizer's moments for a number that is trained


@dataclass(frozen=True)
class Shape:
    """A model's sizes, as far as memory depends on them."""

    layers: int
    width: int
    inner: int
    keys: int  # numbers of a token's keys in a layer, and as many of its values
    number: int  # bytes
    is_fast: bool = True

    @property
    def cache(self) -> int:
        """Bytes of a token's keys and values."""
        return 2 * self.layers * self.keys * self.number

    @property
    def activations(self) -> int:
        """Bytes of a token's activations until the backward pass: of the fast forward pass what
        `model.ops` saves, else a rough count.
        """
        fast = 6 * self.width + 2 * self.keys + 2 * self.inner
        return (
            self.layers * (fast if self.is_fast else 16 * self.width + 5 * self.inner) * self.number
        )


def shape_of(config, number: int, is_fast: bool = True) -> Shape:
    """Return the shape that a `transformers` configuration tells, with rough ones for sizes that
    it does not name.
    """
    width, heads = config.hidden_size, getattr(config, "num_attention_heads", 1)
    head = getattr(config, "head_dim", None) or width // heads
    keys = (getattr(config, "num_key_value_heads", None) or heads) * head
    return Shape(
        config.num_hidden_layers,
        width,
        getattr(config, "intermediate_size", None) or 4 * width,
        keys,
        number,
        is_fast,
    )


def update_tokens(shape: Shape, memory: float, held: float) -> int:
    """Return how many tokens a micro-batch may have: their activations take a sixth of the GPU's
    `memory`, or a third of what is left beside `held`, but for `BUSY` tokens as much of it as keys
    and values may take.
    """
    left = max(0.0, memory - held)
    room = max(min(memory / SHARE, left / 3), min(CACHES * left, BUSY * shape.activations))
    return max(256, min(65_536, int(room / shape.activations)))


def prompts_at_once(
    shape: Shape, memory: float, held: float, *, completions: int, prompt: int, room: int
) -> int:
    """Return for how many prompts of so many tokens there is place in the caches of a rollout,
    with `completions` of up to `room` tokens each.
    """
    each = shape.cache * (prompt + completions * room)
    return max(1, int(CACHES * max(0.0, memory - held) / each))


def optimizer_bytes(trained: int, number: int, kind: str = "adamw", parts: int = 1) -> int:
    """Return what masters, moments and sums of gradients take for so many `trained` numbers of
    `number` bytes, shared out among `parts` ranks.

    Each rank holds its own part of masters and moments, but all the sums.
    """
    masters = 4 * trained // parts if number < 4 or parts > 1 else 0
    return masters + STATE[kind] * trained // parts + 4 * trained


def free_host_memory(system: Path = Path("/")) -> float:
    """Return how many bytes of the host's memory can still be had: by the kernel's account, and by
    the limit of the control group (version 2) where a container sets one. Infinite where neither
    is told, as on other systems than Linux.
    """
    free = float("inf")
    with suppress(OSError):
        for line in (system / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = 1024 * int(line.split()[1])

    group = system / "sys/fs/cgroup"
    with suppress(OSError, ValueError):  # "max": no limit
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        figures = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cached = int(figures["inactive_file"]) + int(figures["active_file"])  # given up on demand
        free = min(free, limit - used + cached)
    return free
