"""Checks of what is read and trained: a model's files, their tensors, and float16's range.

And LoRA adapters (arXiv:2106.09685): a new one, that of a checkpoint, and how either is saved.
"""

import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from torch import Tensor

from data.errors import UserError, shortened
from data.files import MAX_BYTES, kind_of, read_json
from grpo.model.check import Model, text_config

NAMED_TENSORS = 3  # how many tensors of each kind an error names

# What `transformers` and `tokenizers` read of a directory.
KINDS = (".json", ".jinja", ".safetensors", ".txt", ".model")

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


def check_step(tensors: Mapping[str, Tensor]) -> None:
    """Raise FloatingPointError if one of the tensors is not finite after a step of the optimizer.

    An optimizer can turn a finite gradient into a weight that is NaN. It can also square it to an
    infinite second moment, which freezes the weight for good. Neither shows in the step's loss.
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
    """Return which of the floating-point tensors is not finite, in words; "" if all are.

    One fused norm tells it in most cases: it is not finite if any number is NaN or infinite. Nor is
    it if finite numbers exceed 1e19, whose squares overflow. So only then each tensor is checked.
    """
    found = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}

    # A fused norm is of tensors of one type on one device.
    alike: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for tensor in found.values():
        alike[tensor.device, tensor.dtype].append(tensor.detach())
    norms = [torch.stack(torch._foreach_norm(each)).float().norm() for each in alike.values()]
    if bool(torch.stack([norm.to(norms[0].device) for norm in norms]).norm().isfinite()):
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
            others = ", ..." if len(found) > NAMED_TENSORS else ""
            problems.append(f"{len(found)} {kind} ({', '.join(found[:NAMED_TENSORS])}{others})")
    if problems:
        raise UserError(
            f"--model {source}: the tensors there are not those of {what}: {'; '.join(problems)}; "
            "give a folder whose weights and configuration were saved together"
        )


@torch.no_grad()
def fits_float16(model: Model, tokens: list[int]) -> bool:
    """Return whether no hidden state of `model`, which is in float16, exceeds LIMIT on `tokens`.

    A model that cannot run fits: `grpo.model.check` says later why it cannot.
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


# Adapters

ALPHA = 32  # an adapter adds ALPHA / rank times its product


def adapter_of(rank: int, left_out: Sequence[str] = ()) -> LoraConfig:
    """Return the configuration of a new adapter: on all linear layers except the head.

    Those whose names are `left_out` get none.
    """
    return LoraConfig(
        r=rank,
        lora_alpha=ALPHA,
        target_modules="all-linear",
        exclude_modules=list(left_out) or None,
        task_type="CAUSAL_LM",
    )


def new_adapter(model: Model, rank: int, seed: int) -> PeftModel:
    """Return `model` with a new adapter. Raises UserError if the model cannot have one."""
    torch.manual_seed(seed)  # the adapter's A is random
    try:
        return get_peft_model(model, adapter_of(rank, _beside_the_text(model)))
    except ValueError as error:
        raise UserError(
            f"--lora-rank {rank}: {str(error).splitlines()[0]}; give --lora-rank 0"
        ) from error


def _beside_the_text(model: Model) -> list[str]:
    """Return the names of the linear layers that text does not go through: of images, of sound."""
    if text_config(model.config) is model.config:
        return []
    of_text = set(model.get_decoder().modules())
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module not in of_text
    ]


def is_adapter(folder: Path) -> bool:
    """Return whether `folder` holds an adapter."""
    return kind_of(folder / "adapter_config.json") == "file"


def layers_of(source: str) -> tuple[str, list[Path]]:
    """Return the whole model under `source` and the adapters on it, the innermost first.

    An adapter names the model that it was trained on. Raises UserError if it names none or itself.
    """
    adapters: list[Path] = []
    while is_adapter(folder := Path(source)):
        file = folder / "adapter_config.json"
        found = read_json(file)
        base = found.get("base_model_name_or_path") if isinstance(found, dict) else None
        if not isinstance(base, str) or not base or Path(base) in [folder, *adapters]:
            raise UserError(f"{file}: names no base model (base_model_name_or_path)")
        adapters.insert(0, folder)
        source = base
    return source, adapters


def merged(model: Model, folder: Path) -> Model:
    """Return `model` with the adapter in `folder` added to its weights.

    Raises UserError if the adapter does not fit.
    """
    whole: Model = load_adapter(model, folder).merge_and_unload()
    whole.name_or_path = whole.config.name_or_path = str(folder)
    return whole.requires_grad_(True)


def load_adapter(model: Model, folder: Path) -> PeftModel:
    """Return `model` with the adapter of a checkpoint, to be trained further.

    Raises UserError unless the file holds exactly the adapter's weights.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # missing keys are reported below
            adapted = PeftModel.from_pretrained(
                model, folder, is_trainable=True, use_safetensors=True
            )

        with safe_open(folder / "adapter_model.safetensors", "pt") as file:
            found = set(file.keys())
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = shortened(" ".join(str(error).split()), 200)
        raise UserError(
            f"{folder}: its adapter does not fit {type(model).__name__} ({reason}); give the base "
            "model that it was trained on, and an adapter as save_pretrained writes it"
        ) from error

    expected = set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
    differences = {"missing": expected - found, "unexpected": found - expected}
    check_names(str(folder), "its adapter", differences)
    return adapted


def save_model(model: Model, folder: Path, tensors: Mapping[str, Tensor] | None = None) -> None:
    """Write a model, or only its adapter if it has one; `tensors`, if given, replace its own."""
    # `peft` writes sets in an order that changes from process to process.
    for config in getattr(model, "peft_config", {}).values():
        for name in ("target_modules", "exclude_modules"):
            if isinstance(getattr(config, name), set):
                setattr(config, name, sorted(getattr(config, name)))

    # Embeddings are never trained with an adapter. Without this option `peft` asks the hub.
    options = {"save_embedding_layers": False} if isinstance(model, PeftModel) else {}
    model.save_pretrained(folder, state_dict=None if tensors is None else dict(tensors), **options)
