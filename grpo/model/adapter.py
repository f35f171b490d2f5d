"""LoRA adapters (arXiv:2106.09685): a new one, that of a checkpoint, and how either is saved."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from torch import Tensor

from data.errors import UserError
from data.files import kind_of, read_json
from grpo.model.forward import Model
from grpo.model.sizes import text_config
from grpo.model.weights import check_names

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
