"""The settings of one run of `bench_learning.py`."""

from dataclasses import dataclass, field
from typing import Any

from grpo.config import Config, resolve_config
from tasks.base import Task
from tasks.registry import load_task

LOSS = "dapo"
MAX_GRAD_NORM = 1.0


@dataclass(frozen=True)
class Job:
    """One run: its trainer, and the settings that both sides share.

    - `trainer`: "ours", "trl", or "start" for the score before training alone;
    - `reward`: one of the task's rewards, or None for its default;
    - `budget`: the completion budget in tokens (None: as long as the longest answer);
    - `ours`: settings of our trainer alone, by name;
    - `micro`: the number of completions in TRL's micro-batch (0: the whole step);
    - `at_once`: how many runs share the device.

    A run ends after `minutes` or `steps`, or once two evaluations in a row are at least `enough`.
    """

    trainer: str
    rate: float
    seed: int
    model: str
    task: str
    level: int
    reward: str | None
    prompts: int
    group_size: int
    lora_rank: int
    minutes: float
    steps: int
    eval_every: int
    eval_problems: int
    enough: float
    ours: dict[str, Any] = field(default_factory=dict)
    micro: int = 0
    vllm: bool = False
    at_once: int = 1
    budget: int | None = None

    @property
    def name(self) -> str:
        return (
            self.trainer
            if self.trainer == "start"
            else f"{self.trainer}-{self.rate:g}-seed{self.seed}"
        )

    @property
    def batch(self) -> int:
        return self.prompts * self.group_size

    @property
    def config(self) -> Config:
        """Our configuration. `trl_config` is the same for all settings that TRL has as well."""
        config = Config(
            task=self.task,
            level=self.level,
            reward=self.reward,
            ramp=False,
            model=self.model,
            lora_rank=self.lora_rank,
            prompts=self.prompts,
            group_size=self.group_size,
            temperature=1.0,
            max_new_tokens=self.budget,
            dynamic_sampling=0,
            warm_start="off",
            preflight="off",
            loss=LOSS,
            scale="group",
            credit="outcome",
            beta=0.0,
            epochs=1,
            learning_rate=self.rate,
            schedule="constant",
            patience=0,
            steps=self.steps,
            seed=self.seed,
            **self.ours,
        )
        return resolve_config(config, self.make_task())

    def make_task(self) -> Task:
        return load_task(self.task, self.reward)
