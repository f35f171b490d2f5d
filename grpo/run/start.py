"""Start a new run from the policy of an earlier run, which --model names.

A checkpoint of full fine-tuning is a model, which becomes the base model of the new run. A
checkpoint of LoRA is an adapter: the new run trains it further on the adapter's base model. So the
new run's checkpoints do not depend on the earlier run.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.errors import UserError
from data.files import kind_of
from grpo.config import Config, load_config, spelled
from grpo.run.checkpoint import find_resume

# The settings that decide the shape and the scale of an adapter.
ADAPTER = ("lora_rank", "lora_alpha")

PROMPT = ("system", "shots", "chat_template_kwargs")

# The settings that the new run takes over, unless a flag overrides them.
TAKEN_OVER = (*ADAPTER, "quantise", "dtype", *PROMPT)


def checkpoint_of(model: str) -> tuple[Path | None, list[str]]:
    """Return the checkpoint `model`, or the latest valid one of the run `model`; and warnings.

    Returns (None, []) if `model` is neither. Raises UserError if a run has no valid checkpoint.
    """
    path = Path(model)
    if not any(kind_of(path / name) == "file" for name in ("config.yaml", "trainer.json")):
        return None, []
    return find_resume(path, flag="--model")


def config_of(checkpoint: Path) -> Config:
    """Return the configuration of the run that wrote the `checkpoint`.

    Raises UserError if it cannot be read.
    """
    return load_config(checkpoint.parent.parent / "config.yaml")


def start_from(config: Config, given: Mapping[str, Any]) -> tuple[Config, list[str]]:
    """Return the configuration of a new run whose --model may be an earlier run; and warnings.

    The new run takes over the earlier run's settings of model and prompt, and its wording if the
    task is the same, unless a flag (`given`) overrides them. Raises UserError if the flags ask for
    a different adapter.
    """
    checkpoint, warnings = checkpoint_of(config.model)
    if checkpoint is None:
        return config, []

    given = {name: value for name, value in given.items() if value is not None}
    earlier = config_of(checkpoint)
    has_adapter = (checkpoint / "adapter_config.json").exists()
    if has_adapter:
        _check_adapter(checkpoint, earlier, given)

    taken = {name: getattr(earlier, name) for name in TAKEN_OVER if name not in given}
    if config.task == earlier.task and "wording" not in given:
        taken["wording"] = earlier.wording

    # A learning rate suits one kind of training: an adapter of this rank, or all weights.
    rank = {**taken, **given}["lora_rank"]
    if "learning_rate" not in given and rank == earlier.lora_rank:
        taken["learning_rate"] = earlier.learning_rate

    base = earlier.model if has_adapter else str(checkpoint)
    return dataclasses.replace(config, **taken, model=base, start=str(checkpoint)), warnings


def _check_adapter(checkpoint: Path, earlier: Config, given: Mapping[str, Any]) -> None:
    """Raise UserError if the flags ask for an adapter that differs from the checkpoint's."""
    for name in ADAPTER:
        own = getattr(earlier, name)
        if name in given and given[name] != own:
            raise UserError(
                f"{spelled(name)} {given[name]}: the adapter of {checkpoint} has {own}; leave it "
                f"out, or merge the adapter (python -m grpo.export {checkpoint} FOLDER) and give "
                "--model FOLDER"
            )
