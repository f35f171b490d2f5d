"""Fills in the automatic settings of a run's configuration."""

import dataclasses
from collections.abc import Collection

from data.errors import UserError
from grpo.config import Config
from tasks.base import Task, default_steps_of

# Defaults for models other than the embedded one: the rank of the adapter and the number of steps.
# A run whose last level is solved ends sooner.
LORA_RANK = 64
STEPS = 800

# Prompts a step, and how many groups must vary, or else dynamic sampling draws more prompts. The
# embedded model learns as fast by the step from 8 prompts as from 16 while most of its groups vary
# (runs/LOG.md, 2026-11-25: "Half the prompts").
PROMPTS = 16
BUILTIN_PROMPTS = 8
BUILTIN_VARIED = 4
MIN_VARIED = 8  # or half of fewer prompts, if held-out problems promote to the next level


def resolve_config(config: Config, task: Task, levels: Collection[int] = ()) -> Config:
    """Fill in the automatic settings, except the learning rate, which needs the loaded model.

    `levels` are those of the --dataset. Raises UserError if it lacks a level to be trained on.
    """
    if config.keep_difficulty and not levels:
        raise UserError(
            f"--config: keep_difficulty {config.keep_difficulty}: task {config.task} makes new "
            "problems without end; give a set of problems by --data or --dataset"
        )
    if config.problems != "fresh" and levels:
        raise UserError(
            f"--problems {config.problems}: task {config.task} has a set of problems; leave the "
            "flag out"
        )
    is_builtin = config.model == "builtin"

    level = config.level
    if level is None and config.curriculum:
        level = config.levels_for(task)[-1]
    elif level is None:
        level = max(levels, default=getattr(task, "default_level", 1))
    is_level_given = bool(config.level or config.curriculum)

    rank = config.lora_rank
    if rank is None:
        rank = 0 if is_builtin else LORA_RANK

    steps = config.steps
    if steps is None and is_builtin:
        steps = default_steps_of(task, level)

    prompts = config.prompts or (BUILTIN_PROMPTS if is_builtin else PROMPTS)
    promote_by, promote_at = config.promotion
    varied = config.dynamic_sampling
    if varied is None and config.control == "constant-reward":
        varied = 0  # no group will ever vary
    elif varied is None and is_builtin and config.prompts is None:
        varied = BUILTIN_VARIED
    elif varied is None:
        varied = min(MIN_VARIED, -(-prompts // 2)) if promote_by == "heldout" else 0

    resolved = dataclasses.replace(
        config,
        level=level,
        mixed=config.mixed or (len(levels) > 1 and not is_level_given),
        prompts=prompts,
        promote_by=promote_by,
        promote_at=promote_at,
        dynamic_sampling=varied,
        lora_rank=rank,
        schedule=config.schedule or ("constant" if is_builtin else "cosine"),
        reward=config.reward or getattr(task, "reward", None),
        steps=steps or STEPS,
        resume=None,
        accept_changes=None,
    )
    if levels and not resolved.mixed:
        _check_levels(resolved, task, levels)
    return resolved


def _check_levels(config: Config, task: Task, levels: Collection[int]) -> None:
    """Raise UserError if a level to be trained on is not among the `levels` of the dataset."""
    missing = [level for level in config.levels_for(task) if level not in levels]
    if missing:
        flag = "--curriculum" if config.curriculum else "--words"
        data = config.dataset or "the data"
        raise UserError(
            f"{flag} {config.curriculum or config.level}: {data} has no problem of level "
            f"{missing[0]}; it has those of {', '.join(map(str, sorted(levels)))}"
        )
