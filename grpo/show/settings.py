"""The settings of a run as lines of text, for the start of the console output."""

import json
from pathlib import Path

import torch

from grpo.config import Config
from grpo.model.prompts import template_arguments
from grpo.trainer import Trainer
from tasks.base import Task, declared_budget, problems_of, sources_of


def settings(folder: Path, config: Config, trainer: Trainer) -> dict[str, str]:
    """Return a line for each aspect of the run in `folder`, defaults included."""
    control = {
        name: f"{control}: a control experiment, whose rewards carry no information"
        for name, control in config.mark.items()
    }
    options = "".join(f", {name} {value}" for name, value in config.task_options.items())
    return {
        "run": str(folder),
        **control,
        "task": f"{config.task}, level {config.level}{_climb(config, trainer)}{options}",
        "problems": _problems(config, trainer.task),
        "prompt": _prompt(config),
        "reward": config.reward or "the task's own",
        "model": _model(config, trainer),
        "tuning": _tuning(config, trainer),
        "update": _update(config, trainer),
        "sampling": f"{_sampling(config)}, {_drafts(config, trainer)}",
        "budget": _budget(config, trainer),
        "batch": _batch(config),
        "loss": _loss(config),
    }


def _problems(config: Config, task: Task) -> str:
    if own := problems_of(task, "train"):
        trained_on = None if config.mixed else config.levels_for(task)
        count = sum(trained_on is None or problem.level in trained_on for problem in own)
        return f"the {count:,} training problems of the data, shuffled each epoch"
    if not config.dataset:
        texts = len(sources_of(task))
        return config.problems + (f", from {texts} texts" if texts else "")
    levels = "all levels in its order" if config.mixed else "problems of the levels above"
    return f"{config.dataset}, {levels}"


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


def _climb(config: Config, trainer: Trainer) -> str:
    levels = trainer.curriculum.levels
    if len(levels) == 1:
        return ""
    path = " → ".join(map(str, levels))
    kind = "held-out" if config.promote_by == "heldout" else "running"
    return f" (levels {path}, promoted at a {kind} mean of {config.promote_at:g})"


def _model(config: Config, trainer: Trainer) -> str:
    policy = trainer.policy
    size = sum(p.numel() for p in policy.model.parameters())
    dtype = str(policy.dtype).removeprefix("torch.")

    line = f"{config.model}, {size / 1e6:.1f} M parameters, {dtype}"
    if config.start not in (None, config.model):
        line += f", adapter of {config.start}"
    if config.quantise != "none":
        line += f", quantised: {config.quantise}"
    line += f" on {policy.device}, {torch.get_num_threads()} threads"
    if trainer.ranks.size > 1:
        line += f", {trainer.ranks.size} ranks"
    return line


def _tuning(config: Config, trainer: Trainer) -> str:
    trained = sum(p.numel() for p in trainer.policy.parameters)
    tuning = "full fine-tuning"
    if config.lora_rank:
        tuning = f"LoRA rank {config.lora_rank}"
    return f"{tuning}, {trained / 1e6:.2f} M trained, learning rate {config.learning_rate:g}"


def _update(config: Config, trainer: Trainer) -> str:
    optimizer = trainer.optimizer
    line = "AdamW"
    if optimizer.masters[0] is not optimizer.weights[0]:
        line += ", float32 masters"

    device = "GPU" if trainer.policy.device.type == "cuda" else "CPU"
    why = "as set" if config.micro_tokens else f"by the memory of the {device}"
    line += f", micro-batches of {trainer.update_memory.micro_tokens:,} tokens ({why})"
    if trainer.policy.gradient_checkpointing:
        line += ", gradient checkpointing"
    return line


def _sampling(config: Config) -> str:
    top_k = f", top-k {config.top_k}" if config.top_k else ""
    top_p = f", top-p {config.top_p:g}" if config.top_p < 1 else ""
    return f"temperature {config.temperature:g}{top_k}{top_p}"


def _budget(config: Config, trainer: Trainer) -> str:
    """Return how many tokens a completion may take, both in training and in evaluations."""
    if config.max_new_tokens:
        return f"up to {config.max_new_tokens} new tokens (--max-new-tokens)"
    quarter = "a quarter more new tokens than the target takes"
    assert config.level is not None, "the configuration is resolved"
    declared = declared_budget(trainer.task, config.level)
    return f"up to {declared} new tokens (the task's own), or {quarter}" if declared else quarter


def _drafts(config: Config, trainer: Trainer) -> str:
    if trainer.sampler.draft is None:
        return "speculative decoding: off (the task has no drafts)"
    return f"speculative decoding: {config.draft}"


def _batch(config: Config) -> str:
    parts = [f"{config.prompts} prompts × {config.group_size} completions"]
    if config.dynamic_sampling:
        parts.append(f"further prompts until {config.dynamic_sampling} groups vary")
    if config.step_tokens:
        parts.append(f"at most {config.step_tokens:,} tokens per step")
    return ", ".join(parts)


def _loss(config: Config) -> str:
    credit = ", separate for each token by alignment" if config.credit == "alignment" else ""
    kl = f"KL weight {config.beta:g}" if config.beta else "no KL"
    alarms = ", alarms stop the run" if config.on_alarm == "stop" else ""
    truncated = ""
    if config.truncated != "learn":
        truncated = f"; truncated completions: {config.truncated}"
    shown = "; right answers shown where no completion is right" if config.demonstrate else ""
    return (
        f"{config.loss}, advantages by {config.scale}{credit}, {kl}; groups without variance: "
        f"{config.on_degenerate}{alarms}{truncated}{shown}"
    )
