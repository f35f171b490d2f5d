"""LoRA adapters (arXiv:2106.09685): a new one, or the one of a checkpoint."""

import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors import SafetensorError, safe_open

from grpo.model.finite import check_names
from grpo.model.interfaces import Model
from grpo.model.options import AdapterSettings
from tasks.base import UserError

# How `peft` is asked for each kind of adapter.
PEFT_OPTIONS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
}


def adapter_of(settings: AdapterSettings) -> LoraConfig:
    """Return the configuration of a new adapter: on all linear layers except the head."""
    return LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # declared as int, used as a factor
        target_modules="all-linear",
        task_type="CAUSAL_LM",
        **PEFT_OPTIONS[settings.variant],
    )


def new_adapter(model: Model, settings: AdapterSettings) -> PeftModel:
    """Return `model` with a new adapter. Raises UserError if the model cannot have one."""
    torch.manual_seed(settings.seed)  # the adapter's A is random
    try:
        return get_peft_model(model, adapter_of(settings))
    except ValueError as error:
        raise UserError(
            f"--lora-rank {settings.rank}: {str(error).splitlines()[0]}; give --lora-rank 0"
        ) from error


def first_adapter(start: str) -> Path:
    """Return the checkpoint whose adapter a run started from. Raises UserError if it is gone."""
    if not (Path(start) / "adapter_config.json").exists():
        raise UserError(
            f"{start}: the adapter that the run started from is not there any more; put the "
            "checkpoint back"
        )
    return Path(start)


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
