"""The settings of a run as lines of text, for the start of the console output."""

import json
from collections.abc import Iterable
from pathlib import Path

import torch

from grpo.config import Config
from grpo.model.prompts import template_arguments
from grpo.trainer import Trainer
from tasks.base import declared_budget, problems_of, sources_of


def settings(folder: Path, config: Config, trainer: Trainer) -> dict[str, str]:
    """Return a line for each aspect of the run in `folder`, defaults included."""
    control = {
        name: f"{control}: a control experiment, whose rewards carry no information"
        for name, control in config.mark.items()
    }
    task, policy = trainer.task, trainer.policy
    levels = trainer.curriculum.levels
    climb = ""
    if len(levels) > 1:
        path = " → ".join(map(str, levels))
        climb = f" (levels {path}, promoted at a mean of {config.promote_at:g})"
    options = [f"{name} {value}" for name, value in config.task_options.items()]
    arguments = template_arguments(config.chat_template_kwargs)
    assert config.level is not None, "the configuration is resolved"
    budget = config.max_new_tokens or declared_budget(task, config.level)
    draft = config.draft if hasattr(task, "draft") else "off (the task has no drafts)"
    return {
        "run": str(folder),
        **control,
        "task": _joined(f"{config.task}, level {config.level}{climb}", *options),
        "problems": _problems(config, trainer),
        "prompt": _joined(
            "the user's own wording" if config.wording else "the task's own wording",
            config.system and f"a system turn of {len(config.system):,} characters",
            config.shots and f"{config.shots} examples",
            *(f"{name} = {json.dumps(value)}" for name, value in arguments.items()),
        ),
        "reward": config.reward or "the task's own",
        "model": _joined(
            f"{config.model}, {_millions(policy.model.parameters()):.1f} M parameters",
            str(policy.dtype).removeprefix("torch."),
            config.quantise != "none" and f"quantised: {config.quantise}",
        )
        + f" on {policy.device}, {torch.get_num_threads()} threads"
        + (f", {trainer.ranks.size} ranks" if trainer.ranks.size > 1 else ""),
        "tuning": _joined(
            f"LoRA rank {config.lora_rank}" if config.lora_rank else "full fine-tuning",
            f"{_millions(policy.parameters):.2f} M trained",
            f"learning rate {config.learning_rate:g}",
        ),
        "update": _update(config, trainer),
        "sampling": _joined(
            f"temperature {config.temperature:g}",
            config.top_p < 1 and f"top-p {config.top_p:g}",
            f"speculative decoding: {draft}",
        ),
        "batch": _joined(
            f"{config.prompts} prompts × {config.group_size} completions",
            config.dynamic_sampling
            and f"further prompts until {config.dynamic_sampling} groups vary",
            budget and f"up to {budget} new tokens",
        ),
        "loss": _loss(config),
    }


def _joined(*parts: object) -> str:
    """Return the parts that are not empty, with commas between them."""
    return ", ".join(str(part) for part in parts if part)


def _millions(parameters: Iterable[torch.Tensor]) -> float:
    return sum(each.numel() for each in parameters) / 1e6


def _problems(config: Config, trainer: Trainer) -> str:
    if own := problems_of(trainer.task, "train"):
        return f"{len(own):,} training problems of the data, shuffled each epoch"
    texts = len(sources_of(trainer.task))
    return config.dataset or _joined(config.problems, texts and f"from {texts} texts")


def _update(config: Config, trainer: Trainer) -> str:
    optimizer = trainer.optimizer
    has_masters = optimizer.masters[0] is not optimizer.weights[0]
    device = "GPU" if trainer.policy.device.type == "cuda" else "CPU"
    why = "as set" if config.micro_tokens else f"by the memory of the {device}"
    return _joined(
        "AdamW, float32 masters" if has_masters else "AdamW",
        f"micro-batches of {trainer.update_memory.micro_tokens:,} tokens ({why})",
        trainer.policy.gradient_checkpointing and "gradient checkpointing",
    )


def _loss(config: Config) -> str:
    return _joined(
        f"{config.loss}, advantages by {config.scale}",
        config.credit == "alignment" and "separate for each token by alignment",
        f"KL weight {config.beta:g}" if config.beta else "no KL",
        f"groups without variance: {config.on_degenerate}",
        config.truncated != "learn" and f"truncated completions: {config.truncated}",
        config.demonstrate and "right answers shown where no completion is right",
    )
