"""Write a model, or only its adapter."""

from collections.abc import Mapping
from pathlib import Path

from peft import PeftModel
from torch import Tensor

from grpo.model.interfaces import Model


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
