"""A stored step made again: its update from its stored completions, to the last bit on the machine
that made it.

Sampling is not repeated: the completions, rewards and sampler's log-probabilities are those of the
rollout files. The policy before the step is that of the nearest earlier checkpoint (or the run's
first), taken on by the stored steps between. On a CPU with as many threads the same bits come out;
another machine, library or number of threads rounds otherwise, and then differences in the last
digits are no sign of anything.
"""

from dataclasses import replace
from typing import Any

import torch

from grpo.config import Config, load_config
from grpo.learn.batch import micro_batches
from grpo.learn.update import completion_logprobs
from grpo.model.load import load_policy
from grpo.records import Group
from grpo.run.checkpoint import checkpoints, load_optimizer, step_of
from grpo.run.reader import RunData
from grpo.trainer import Trainer
from tasks.base import UserError, load_task, trust

FIGURES = ("loss", "grad_norm", "entropy", "kl", "parity/max_abs_logprob_diff", "advantages")


def replay(run: RunData, step: int, task: str | None = None) -> dict[str, Any]:
    """Return for each of FIGURES that the step has (stored, made again), "same" (all equal, to the
    bit), and "start", the step gone on from.

    Raises UserError when the step, or what leads to it, is not stored, and where the task is a
    program and not named by `task`, too.
    """
    stored = next((line for line in run.metrics if line["step"] == step), None)
    if stored is None:
        raise UserError(
            f"{run.path}: step {step} is not in metrics.jsonl, which has {len(run.metrics)} steps"
        )
    trainer, start = trainer_before(run, step, task)
    kept = kept_of(run, step)
    before = [group.advantages for group in kept]
    again = {**trainer.update_policy(step, kept), "advantages": trainer.compute_advantages(kept)}
    pairs = {
        name: (before if name == "advantages" else stored[name], again[name])
        for name in FIGURES
        if name in again
    }
    return {
        "step": step,
        "start": start,
        "figures": pairs,
        "same": all(old == new for old, new in pairs.values()),
    }


def token_figures(
    run: RunData, step: int, number: int, sample: int, task: str | None = None
) -> tuple[list[float], list[float]]:
    """Return by token of a completion the entropy (nats) of the policy that drew it and its own
    log-probability, by the trainer's forward pass.
    """
    group = run.group(step, number)
    trainer, _ = trainer_before(run, step, task)
    alone = replace(
        group,
        completions=[group.completions[sample]],
        scores=[group.scores[sample]],
        advantages=[0.0],
    )
    (batch,) = micro_batches(
        [alone],
        "grpo",
        micro_tokens=0,
        max_length=len(group.completions[sample].tokens),
        device=trainer.policy.device,
    )
    with torch.no_grad():
        logp_RT, entropy_RT = completion_logprobs(trainer.policy, batch, trainer.sampler.truncate)
    return entropy_RT[0].tolist(), logp_RT[0].tolist()


def trainer_before(run: RunData, step: int, task: str | None = None) -> tuple[Trainer, int]:
    """Return a trainer whose policy and optimizer are as they were before `step`, and the step
    that it was gone on from.
    """
    config = load_config(run.path / "config.yaml")
    trust(config.task, task, run.path)
    saved = {step_of(path): path for path in checkpoints(run.path)[0] if step_of(path) < step}
    start = max(saved, default=0)
    trainer = _trainer(config, run, saved.get(start))
    for between in range(start + 1, step):
        trainer.update_policy(between, kept_of(run, between))
    return trainer, start


def _trainer(config: Config, run: RunData, checkpoint: Any) -> Trainer:
    if config.device != "cuda" and not torch.cuda.is_available():
        torch.set_num_threads(
            run.config.get("facts", {}).get("threads", torch.get_num_threads())
        )  # another number adds in another order
    policy = load_policy(config.model, **config.loading, weights=checkpoint)
    task = load_task(config.task, config.reward, config.task_options, config.wording)
    trainer = Trainer(config, task, policy)
    if checkpoint is not None:
        load_optimizer(checkpoint, trainer.optimizer)
    return trainer


def kept_of(run: RunData, step: int) -> list[Group]:
    """Return the groups that a step learned from."""
    return [group for group in run.groups(step) if group.action == "keep"]
