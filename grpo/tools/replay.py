"""Repeat a stored step: the update from its stored completions.

Sampling is not repeated: completions, rewards and the sampler's log-probabilities come from the
rollout files. Their texts are compared with their tokens, and the means of their rewards with those
in metrics.jsonl. The policy before the step is that of the nearest earlier checkpoint, or the one
with which the run began; the stored steps between are repeated as well.

On a CPU with the same number of threads the result is identical to the last bit. With another
machine, library version or number of threads, rounding differs, and differences in the last digits
have no meaning.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch

from grpo.config import load_config
from grpo.data.errors import UserError
from grpo.model.load import load_policy
from grpo.records import Group, originals
from grpo.run.checkpoint import load_optimizer, verify
from grpo.run.logs import RunData, checkpoint_folders, step_of
from grpo.tasks.registry import load_task, require_trusted
from grpo.tasks.supply import Supply
from grpo.trainer import Trainer
from grpo.variance import reward_metrics

# What is compared: metrics of the rewards and of the update, the texts, and the advantages.
FIGURES = (
    "reward reward_std value exact loss grad_norm entropy kl sampling/sampling_logp_difference/max "
    "texts advantages"
).split()


def replay(run: RunData, step: int, allowed: Collection[str | None] = ()) -> dict[str, Any]:
    """Repeat `step` and compare it with its record.

    Returns "figures" (for each of FIGURES that the step has: stored, repeated), "same" (whether
    all are equal to the bit), "step", and "start", see `trainer_before`. UserError if a step is not
    stored, or if the run's task, reward or loss is a program that is not `allowed` by the user.
    """
    everything, groups, stored = stored_step(run, step)
    trainer, start = trainer_before(run, step, allowed)
    completions = [completion for group in everything for completion in group.completions]
    stored |= {
        "texts": [completion.text for completion in completions],
        "advantages": [group.advantages for group in groups],
    }
    repeated = {
        **trainer.update_policy(groups, stored["learning_rate"]),
        **reward_metrics(originals(everything)),
        "texts": [trainer.policy.decode(completion.tokens) for completion in completions],
        "advantages": trainer.compute_advantages(groups),
    }

    pairs = {name: (stored[name], repeated[name]) for name in FIGURES if name in repeated}
    same = all(old == new for old, new in pairs.values())
    return {"step": step, "start": start, "figures": pairs, "same": same}


def stored_step(run: RunData, step: int) -> tuple[list[Group], list[Group], dict[str, Any]]:
    """Return the groups of a step, those that it was trained on, and its line in metrics.jsonl."""
    line = next((line for line in run.metrics if line["step"] == step), None)
    if line is None:
        raise UserError(
            f"{run.path}: step {step} is not in metrics.jsonl, which has {len(run.metrics)} steps"
        )
    if "engine" in line:
        raise UserError(
            f"{run.path}: step {step} was sampled by --engine {line['engine']}, so it is not "
            "replayable; give a step that the project's own decoder sampled"
        )
    groups = run.groups(step)
    return groups, [group for group in groups if group.action == "keep"], dict(line)


def trainer_before(run: RunData, step: int, allowed: Collection[str | None]) -> tuple[Trainer, int]:
    """Return a trainer as it was before `step`, and the step of its checkpoint (0: none)."""
    config = replace(load_config(run.path), engine=None, shard=False)  # no engine sampled it
    require_trusted(vars(config), allowed, run.path)

    folders = [path for path in checkpoint_folders(run.path) if step_of(path) < step]
    saved = {step_of(path): path for path in folders if not verify(path)}
    start = max(saved, default=0)
    checkpoint = saved.get(start)
    if not checkpoint and any(line["kind"] == "imitation" for line in run.decisions):
        raise UserError(
            f"{run.path}: step {step} is not replayable: the run imitated right answers before its "
            "first step, and the checkpoint after that is missing or damaged"
        )
    policy = load_policy(config.model, device=config.device, weights=checkpoint, **config.loading)
    if policy.device.type == "cpu":  # with other threads, sums are computed in another order
        torch.set_num_threads(run.config["facts"].get("threads", torch.get_num_threads()))
    task = load_task(config.task, config.reward, config.task_options, config.wording)
    trainer = Trainer(config, Supply(task, seed=config.seed), policy)
    if checkpoint is not None:
        load_optimizer(checkpoint, trainer.optimizer)
    for between in range(start + 1, step):
        _, groups, line = stored_step(run, between)
        trainer.update_policy(groups, line["learning_rate"])
    return trainer, start
