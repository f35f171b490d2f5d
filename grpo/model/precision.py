"""The precision that `auto` stands for.

On a GPU, float16 is as fast as bfloat16 and rounds eight times as finely. With it, policies learned
as with float32, or better than with bfloat16 (runs/LOG.md, 2026-11-26; arXiv:2510.26788). But its
numbers end at 65,504, and some models have larger hidden states. So a forward pass tells.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from grpo.model.interfaces import Model

# The largest number of a forward pass that is accepted in float16. Its numbers end at twice this,
# and training moves the largest hidden states little.
LIMIT = 32_768.0

# What the forward pass reads. The largest hidden states belong to the first tokens of a text, to
# line ends and to marks (massive activations, arXiv:2402.17762).
TEXT = """Which of the two is larger? Add the numbers, then compare: 17 + 25 = 42, and 3 * 9 = 27.
A train that leaves at 8:15 is 12 minutes late; "never mind", said the clerk, "it is Tuesday."
  def half(x): return x / 2  # {"key": [1.5, null]}
| one | two | three |

The river was low, the reeds were dry, and nothing moved but a heron and its shadow.
"""


def default_dtype(*, is_lora: bool, saved: torch.dtype | None, is_continued: bool) -> torch.dtype:
    """Return the default precision of a model on a GPU, before `fits_float16` was asked.

    `saved` is the precision of its files (None: unknown, or of no account). A model that
    `is_continued`, all of whose weights were trained by us, keeps it.
    """
    if is_continued and saved is not None:
        return saved
    return torch.float16 if is_lora or saved is not None else torch.float32


@torch.no_grad()
def fits_float16(model: Model, tokens: list[int]) -> bool:
    """Return whether no number that passes between the model's layers exceeds LIMIT.

    `model` is in float16 and reads `tokens`. A model that cannot run fits: `grpo.model.check` says
    later why it cannot.
    """
    largest = torch.zeros((), device=model.device)

    def see(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        for tensor in _tensors((inputs, output)):
            # The maximum of anything that is not a number is none either.
            torch.maximum(largest, tensor.detach().abs().amax().float(), out=largest)

    hooks = [module.register_forward_hook(see) for module in model.modules()]
    try:
        model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False)
    except torch.OutOfMemoryError:
        raise
    except Exception:
        return True
    finally:
        for hook in hooks:
            hook.remove()
    return bool(largest <= LIMIT)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors in `value` and the tuples within it."""
    if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
