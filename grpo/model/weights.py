"""Checks of what is read and trained: a model's files, their tensors, and float16's range.

An optimizer can turn a finite gradient into a weight that is NaN. It can also square it to an
infinite second moment, which freezes the weight for good. Neither shows in the loss of that step.

The numbers of float16 end at 65,504, and some models have larger hidden states. So a forward pass
tells.

And LoRA adapters (arXiv:2106.09685): a new one, that of a checkpoint, and how either is saved.
"""

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from torch import Tensor

from data.errors import UserError
from data.files import MAX_BYTES, kind_of, read_json
from grpo.distributed import SINGLE, Ranks
from grpo.model.forward import Model
from grpo.model.sizes import text_config

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


# Adapters

ALPHA = 32  # an adapter adds ALPHA / rank times its product

# The files of a whole model's weights.
WHOLE_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")


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
    """Return whether `folder` holds an adapter. Raises UserError if it holds a whole model too."""
    if kind_of(folder / "adapter_config.json") != "file":
        return False
    if any(file for pattern in WHOLE_WEIGHTS for file in folder.glob(pattern)):
        raise UserError(
            f"--model {folder}: holds a whole model and an adapter, which are two policies; move "
            "one of them to another folder"
        )
    return True


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

    Raises UserError if the adapter does not fit, or is of a kind that cannot be added.
    """
    adapted = load_adapter(model, folder)
    try:
        whole: Model = adapted.merge_and_unload()
    except (NotImplementedError, AttributeError) as error:
        kind = adapted.active_peft_config.peft_type.value
        raise UserError(
            f"--model {folder}: an adapter of type {kind}, which cannot be merged into weights; "
            "give a LoRA adapter or a whole model"
        ) from error
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
        # The first reason that names a tensor, else the first line.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        mismatches = [line for line in lines if line.startswith("size mismatch")]
        reason = (mismatches or lines or ["unreadable"])[0]
        raise UserError(
            f"{folder}: its adapter does not fit {type(model).__name__} ({reason}); give the base "
            "model that it was trained on, and an adapter as save_pretrained writes it"
        ) from error

    expected = set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
    check_names(str(folder), "its adapter", missing=expected - found, unexpected=found - expected)
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
