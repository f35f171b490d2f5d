"""The parts of a trainer, and how they are built from the run's configuration, once resolved."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from grpo.config import Config
from grpo.curriculum.ladder import Ladder, LadderSettings
from grpo.distributed import Ranks
from grpo.learn.loss import OwnLoss
from grpo.learn.optimizer import Optimizer, adamw, default_rate
from grpo.learn.update import UpdateSettings
from grpo.model.context import text_config
from grpo.model.memory import optimizer_bytes
from grpo.model.policy import Policy
from grpo.training.callbacks import Callback
from grpo.variance import ClassRule, VarianceMonitor, VarianceSettings
from tasks.base import Task
from tasks.supply import Supply

# The learning rate of the embedded model, all weights (runs/LOG.md, 2026-11-22: "a new base").
BUILTIN_RATE = 2e-4


@dataclass(frozen=True)
class Parts:
    """What a trainer is made of, besides configuration and policy, e.g. ``Parts(Interleave())``.

    Without a `supply`, problems come from the task's stream or fixed set, as `problems` of the
    configuration says, and never from its `dataset`. Without an `own_loss`, `loss` of the
    configuration names the loss. The `callbacks` are called after each step, in order, on rank 0
    alone.
    """

    task: Task
    supply: Supply | None = None
    own_loss: OwnLoss | None = None
    callbacks: Sequence[Callback] = ()


def with_learning_rate(config: Config, policy: Policy) -> Config:
    """Fill in the learning rate if none was asked for: it depends on the size of the model."""
    if config.learning_rate is not None:
        return config
    if config.model == "builtin" and not config.lora_rank:
        rate = BUILTIN_RATE
    else:
        rate = default_rate(text_config(policy.causal.config).hidden_size, is_lora=policy.is_lora)
    return dataclasses.replace(config, learning_rate=rate)


def build_curriculum(config: Config, levels: list[int]) -> Ladder:
    """Return a ladder of `levels` with the rules of the configuration."""
    return Ladder(levels, ladder_settings(config))


def ladder_settings(config: Config) -> LadderSettings:
    """Return the rules of the configuration's ladder."""
    promote_by, promote_at = config.promotion
    return LadderSettings(
        promote_by=promote_by,
        promote_at=promote_at,
        window=config.promote_window,
        promote_every=config.promote_every,
        replay=config.replay,
    )


def build_monitor(config: Config) -> VarianceMonitor:
    """Return the variance monitor."""
    return VarianceMonitor(variance_settings(config))


def variance_settings(config: Config) -> VarianceSettings:
    """Return how the configuration treats groups without variance."""
    return VarianceSettings(
        on_degenerate=config.on_degenerate,
        temperature=config.temperature,
        rule=class_rule(config),
        retries=config.retries,
        temperature_factor=config.temperature_factor,
        temperature_ceiling=config.temperature_ceiling,
    )


def class_rule(config: Config) -> ClassRule:
    """Return which groups carry a gradient under the configuration."""
    return ClassRule(
        masks_truncated=config.truncated == "mask",
        credits_tokens=config.credit == "alignment",
    )


def build_optimizer(config: Config, policy: Policy, ranks: Ranks) -> Optimizer:
    """Return the optimizer of the policy's parameters."""
    assert config.learning_rate is not None, "the configuration is resolved"
    make = adamw(config.learning_rate)
    return Optimizer(policy.parameters, make, dtype=policy.dtype, ranks=ranks)


def reserved_bytes(policy: Policy) -> int:
    """Return the bytes that weights and optimizer state take on the device of this rank."""
    return policy.weight_bytes + optimizer_bytes(
        sum(p.numel() for p in policy.parameters),
        policy.parameters[0].element_size(),
    )


def update_settings(
    config: Config, *, max_length: int, truncate: Callable | None, own_loss: OwnLoss | None = None
) -> UpdateSettings:
    """Return the settings of an update; dr_grpo divides by `max_length` tokens."""
    clip_low, clip_high = config.clips
    return UpdateSettings(
        kind=config.loss,
        beta=config.beta,
        clip_low=clip_low,
        clip_high=clip_high,
        max_length=max_length,
        max_grad_norm=config.max_grad_norm,
        truncate=truncate,
        importance_limit=config.importance_limit,
        own_loss=own_loss,
        masks_truncated=config.truncated == "mask",
    )
