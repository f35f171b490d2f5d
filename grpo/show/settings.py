"""The settings of a run as lines of text, for the start of the console output."""

import json
from pathlib import Path

import torch

from grpo.config import Config
from grpo.model.prompts import template_arguments
from grpo.trainer import Trainer
from tasks.base import declared_budget, draft_of, problems_of, sources_of


def settings(folder: Path, config: Config, trainer: Trainer) -> dict[str, str]:
    """Return a line for each aspect of the run in `folder`, defaults included."""
    control = {
        name: f"{control}: a control experiment, whose rewards carry no information"
        for name, control in config.mark.items()
    }
    return {
        "run": str(folder),
        **control,
        "task": _task(config, trainer),
        "problems": _problems(config, trainer),
        "prompt": _prompt(config),
        "reward": config.reward or "the task's own",
        "model": _model(config, trainer),
        "tuning": _tuning(config, trainer),
        "update": _update(config, trainer),
        "sampling": _sampling(config, trainer),
        "batch": _batch(config, trainer),
        "loss": _loss(config),
    }


def _task(config: Config, trainer: Trainer) -> str:
    line = f"{config.task}, level {config.level}"
    levels = trainer.curriculum.levels
    if len(levels) > 1:
        path = " → ".join(map(str, levels))
        line += f" (levels {path}, promoted at a mean of {config.promote_at:g})"
    return line + "".join(f", {name} {value}" for name, value in config.task_options.items())


def _problems(config: Config, trainer: Trainer) -> str:
    if own := problems_of(trainer.task, "train"):
        return f"{len(own):,} training problems of the data, shuffled each epoch"
    texts = len(sources_of(trainer.task))
    return config.dataset or config.problems + (f", from {texts} texts" if texts else "")


def _prompt(config: Config) -> str:
    """Return how a problem is presented to the model."""
    parts = ["the user's own wording" if config.wording else "the task's own wording"]
    if config.system:
        parts.append(f"a system turn of {len(config.system):,} characters")
    if config.shots:
        parts.append(f"{config.shots} examples")
    for name, value in template_arguments(config.chat_template_kwargs).items():
        parts.append(f"{name} = {json.dumps(value)}")
    return ", ".join(parts)


def _model(config: Config, trainer: Trainer) -> str:
    policy = trainer.policy
    size = sum(p.numel() for p in policy.model.parameters())
    parts = [config.model, f"{size / 1e6:.1f} M parameters"]
    parts.append(str(policy.dtype).removeprefix("torch."))
    if config.quantise != "none":
        parts.append(f"quantised: {config.quantise}")
    line = f"{', '.join(parts)} on {policy.device}, {torch.get_num_threads()} threads"
    return line + (f", {trainer.ranks.size} ranks" if trainer.ranks.size > 1 else "")


def _tuning(config: Config, trainer: Trainer) -> str:
    trained = sum(p.numel() for p in trainer.policy.parameters)
    tuning = f"LoRA rank {config.lora_rank}" if config.lora_rank else "full fine-tuning"
    return f"{tuning}, {trained / 1e6:.2f} M trained, learning rate {config.learning_rate:g}"


def _update(config: Config, trainer: Trainer) -> str:
    optimizer = trainer.optimizer
    has_masters = optimizer.masters[0] is not optimizer.weights[0]
    device = "GPU" if trainer.policy.device.type == "cuda" else "CPU"
    why = "as set" if config.micro_tokens else f"by the memory of the {device}"
    parts = [
        "AdamW, float32 masters" if has_masters else "AdamW",
        f"micro-batches of {trainer.update_memory.micro_tokens:,} tokens ({why})",
    ]
    if trainer.policy.gradient_checkpointing:
        parts.append("gradient checkpointing")
    return ", ".join(parts)


def _sampling(config: Config, trainer: Trainer) -> str:
    parts = [f"temperature {config.temperature:g}"]
    if config.top_p < 1:
        parts.append(f"top-p {config.top_p:g}")
    draft = "off (the task has no drafts)" if draft_of(trainer.task) is None else config.draft
    return ", ".join([*parts, f"speculative decoding: {draft}"])


def _batch(config: Config, trainer: Trainer) -> str:
    assert config.level is not None, "the configuration is resolved"
    line = f"{config.prompts} prompts × {config.group_size} completions"
    if config.dynamic_sampling:
        line += f", further prompts until {config.dynamic_sampling} groups vary"
    if budget := config.max_new_tokens or declared_budget(trainer.task, config.level):
        line += f", up to {budget} new tokens"
    return line


def _loss(config: Config) -> str:
    credit = ", separate for each token by alignment" if config.credit == "alignment" else ""
    kl = f"KL weight {config.beta:g}" if config.beta else "no KL"
    line = (
        f"{config.loss}, advantages by {config.scale}{credit}, {kl}; groups without variance: "
        f"{config.on_degenerate}"
    )
    if config.truncated != "learn":
        line += f"; truncated completions: {config.truncated}"
    if config.demonstrate:
        line += "; right answers shown where no completion is right"
    return line
