"""Checks of what is read and trained: a model's files, their tensors, and float16's range.

An optimizer can turn a finite gradient into a weight that is NaN. It can also square it to an
infinite second moment, which freezes the weight for good. Neither shows in the loss of that step.

The numbers of float16 end at 65,504, and some models have larger hidden states. So a forward pass
tells.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from data.errors import UserError
from data.files import MAX_BYTES
from grpo.distributed import SINGLE, Ranks
from grpo.model.forward import Model

NAMED_TENSORS = 3  # how many tensors of each kind an error names

# What `transformers` and `tokenizers` read of a directory.
KINDS = (".json", ".jinja", ".safetensors", ".txt", ".model")

# One of these holds the vocabulary of a tokenizer.
TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)

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


def check_files(folder: Path) -> None:
    """Raise UserError if a file that `transformers` reads is not an ordinary one, or too large."""
    for path in sorted(folder.iterdir()):
        if path.suffix in KINDS:
            if not path.is_file():
                raise UserError(f"--model {folder}: {path.name} is no ordinary file")
            if path.suffix in (".json", ".jinja") and path.stat().st_size > MAX_BYTES:
                raise UserError(
                    f"--model {folder}: {path.name} has {path.stat().st_size >> 20:,} MiB; at "
                    f"most {MAX_BYTES >> 20:,} MiB are read"
                )


def check_step(
    tensors: Iterable[Tensor], named: Callable[[], Mapping[str, Tensor]], ranks: Ranks = SINGLE
) -> None:
    """Raise FloatingPointError on all ranks if a tensor is not finite on any of them.

    `named` returns the same tensors by name; it is called only to say which of them is at fault.

    One fused norm is computed first: it is not finite if any number is NaN or infinite. Nor is it
    if finite numbers exceed 1e19, whose squares overflow. So only if it is not finite is each
    tensor checked by itself.
    """
    norm = _norm(tensors)
    ranks.all_reduce([norm])
    if bool(norm.isfinite()):
        return

    faults = [fault for found in ranks.gather([_faults(named())]) for fault in found]
    if faults:
        raise FloatingPointError(f"after the optimizer's step {faults[0]}")


def check_loaded(tensors: Mapping[str, Tensor], source: str) -> None:
    """Raise UserError if one of the tensors read from `source` is not finite."""
    if bool(_norm(tensors.values()).isfinite()):
        return

    if faults := _faults(tensors):
        raise UserError(
            f"{source}: {faults[0]}; the file is damaged: give another model, or an earlier "
            "checkpoint"
        )


def check_names(
    source: str,
    what: str,
    *,
    missing: Iterable[str],
    unexpected: Iterable[str],
    mismatched: Iterable[str] = (),
) -> None:
    """Raise UserError unless the tensors read from `source` are exactly those of `what`.

    The arguments name the tensors that differ; `mismatched` ones have another shape.
    """
    kinds = {"missing": missing, "unexpected": unexpected, "of another shape": mismatched}
    problems = []
    for kind, names in kinds.items():
        names = sorted(names)
        if names:
            others = ", ..." if len(names) > NAMED_TENSORS else ""
            problems.append(f"{len(names)} {kind} ({', '.join(names[:NAMED_TENSORS])}{others})")
    if problems:
        raise UserError(
            f"--model {source}: the tensors there are not those of {what}: {'; '.join(problems)}; "
            "give a folder whose weights and configuration were saved together"
        )


def _norm(tensors: Iterable[Tensor]) -> Tensor:
    """Return the norm of all numbers of the floating-point tensors, a float32 scalar tensor."""
    # A fused norm is of tensors of one type on one device.
    alike: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.is_floating_point():
            alike[tensor.device, tensor.dtype].append(tensor.detach())

    norms = [torch.stack(torch._foreach_norm(each)).float().norm() for each in alike.values()]
    return torch.stack([norm.to(norms[0].device) for norm in norms]).norm()


def _faults(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return a description of each tensor that is not finite."""
    counts = {
        name: int((~tensor.detach().isfinite()).sum())
        for name, tensor in tensors.items()
        if tensor.is_floating_point()
    }
    return [
        f"{name} is not finite ({count:,} of {tensors[name].numel():,} numbers)"
        for name, count in counts.items()
        if count
    ]


@torch.no_grad()
def fits_float16(model: Model, tokens: list[int]) -> bool:
    """Return whether no hidden state of `model`, which is in float16, exceeds LIMIT.

    It reads `tokens`. A model that cannot run fits: `grpo.model.check` says later why it cannot.
    """
    ids = torch.tensor([tokens], device=model.device)
    try:
        output = model(input_ids=ids, use_cache=False, output_hidden_states=True)
    except torch.OutOfMemoryError:
        raise
    except Exception:
        return True
    # What is not a number is not below the limit.
    return all(bool(hidden.abs().amax() <= LIMIT) for hidden in output.hidden_states)
