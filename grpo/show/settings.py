"""The settings of a run as lines of text, for the start of the console output."""

from dataclasses import fields
from pathlib import Path

import torch

from data.text import shortened
from grpo.config import Config
from grpo.trainer import Trainer
from tasks.base import declared_budget, problems_of, sources_of

# Settings that are shown always; all others but those of other lines if they are not at their
# default.
MAIN = "reward learning_rate lora_rank temperature loss scale credit beta on_degenerate".split()
ELSEWHERE = (
    "task level steps name resume start mixed control dataset problems task_options model device "
    "dtype prompts group_size max_new_tokens micro_tokens gradient_checkpointing curriculum"
).split()


def settings(folder: Path, config: Config, trainer: Trainer) -> dict[str, str]:
    """Return a line for each aspect of the run in `folder`."""
    control = {
        name: f"{control}: a control experiment, whose rewards carry no information"
        for name, control in config.mark.items()
    }
    task, levels = trainer.task, trainer.curriculum.levels
    about = [f"{config.task}, level {config.level}"]
    if len(levels) > 1:
        path = " → ".join(map(str, levels))
        about.append(f"levels {path}, promoted at a mean of {config.promote_at:g}")
    about += [f"{name} {value}" for name, value in config.task_options.items()]

    texts = len(sources_of(task))
    problems = config.dataset or config.problems + (f", from {texts} texts" if texts else "")
    if own := problems_of(task, "train"):
        problems = f"{len(own):,} training problems of the data, shuffled each epoch"

    default = {field.name: field.default for field in fields(Config)}
    names = [name for name in default if name in MAIN or getattr(config, name) != default[name]]
    chosen = {name: getattr(config, name) for name in names if name not in ELSEWHERE}
    return {
        "run": str(folder),
        **control,
        "task": ", ".join(about),
        "problems": problems,
        "model": _model(config, trainer),
        "batch": _batch(config, trainer),
        "settings": ", ".join(f"{name} {shortened(str(x), 40)}" for name, x in chosen.items()),
    }


def _model(config: Config, trainer: Trainer) -> str:
    policy, ranks = trainer.policy, trainer.ranks.size
    sizes = policy.model.parameters(), policy.parameters
    size, trained = (sum(each.numel() for each in part) / 1e6 for part in sizes)
    optimizer = trainer.optimizer
    has_masters = optimizer.masters[0] is not optimizer.weights[0]
    dtype = str(policy.dtype).removeprefix("torch.")
    return (
        f"{config.model}, {size:.1f} M parameters, {trained:.2f} M trained, {dtype}"
        f"{' with float32 masters' if has_masters else ''} on {policy.device}, "
        f"{torch.get_num_threads()} threads" + (f", {ranks} ranks" if ranks > 1 else "")
    )


def _batch(config: Config, trainer: Trainer) -> str:
    assert config.level is not None, "the configuration is resolved"
    budget = config.max_new_tokens or declared_budget(trainer.task, config.level)
    up_to = f", up to {budget} new tokens" if budget else ""
    why = "as set" if config.micro_tokens else "by the memory of the device"
    recomputed = ", gradient checkpointing" if trainer.policy.gradient_checkpointing else ""
    return (
        f"{config.prompts} prompts × {config.group_size} completions{up_to}, micro-batches of "
        f"{trainer.update_memory.micro_tokens:,} tokens ({why}){recomputed}"
    )
