"""The two sides of `bench_learning.py`: our trainer and TRL's `GRPOTrainer`.

Both share the clock, the evaluation and the record. Each run is a process of its own (`run_job`),
which writes JSON lines: first the job, then a line per step, and finally why it ended.
"""

import argparse
import gc
import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from itertools import count, groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from step_sides import memory_used, now, trained_by

from data.errors import UserError
from grpo.config import CLIP, Config, resolve_config
from grpo.evaluate import (
    EvaluationSettings,
    HeldOutRequest,
    Sampling,
    budgets,
    evaluate,
    find_problems,
    summarise,
)
from grpo.learn.optimizer import WARMUP, adamw
from grpo.model.adapter import adapter_of
from grpo.model.load import load_policy, load_tokenizer, resolve
from grpo.model.policy import Policy
from grpo.rollout.budget import fitting
from grpo.run.heldout import EVAL_SEED
from grpo.trainer import Parts, Trainer
from tasks.base import Problem, Task
from tasks.registry import load_task
from tasks.scoring import scores_of
from tasks.supply import Supply

# Problems of the training stream, whose longest answer sets the completion budget.
BUDGET_PROBLEMS = 512

LOSS = "dapo"
MAX_GRAD_NORM = 1.0


def config_of(job: argparse.Namespace) -> Config:
    """Return our configuration. `trl_config` is the same for all settings that TRL has as well."""
    config = Config(
        task=job.task,
        level=job.level,
        ramp=False,
        model=job.model,
        lora_rank=job.lora_rank,
        prompts=job.prompts,
        group_size=job.group_size,
        temperature=1.0,
        max_new_tokens=job.budget,
        dynamic_sampling=0,
        warm_start="off",
        preflight="off",
        loss=LOSS,
        scale="group",
        credit="outcome",
        beta=0.0,
        epochs=1,
        learning_rate=job.rate,
        schedule="constant",
        patience=0,
        steps=job.steps,
        seed=job.seed,
        **job.ours,
    )
    return resolve_config(config, load_task(job.task))


def run_job(job: argparse.Namespace, path: Path):
    """Do the run and write its lines to `path`; `job` is one of `bench_learning.jobs_of`."""
    start, task = time.perf_counter(), load_task(job.task)
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    policy = load_policy(job.model, **config_of(job).loading)
    if job.trainer == "trl":
        # Our loader turns this kind of attention off for the whole process; TRL's model keeps it.
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
    with open(path, "w", buffering=1) as file:
        course = Course(job, task, policy, file, start)
        {"start": measure_start, "ours": train_ours, "trl": train_trl}[job.trainer](course)


class Course:
    """The common part of both sides: count tokens and seconds, evaluate, write a line per step.

    The clock runs from the beginning of the first step, its compilation included, and stops during
    evaluations. `policy` is evaluated: on our side the policy that learns, on TRL's a copy of it,
    which `take_over` brings up to date.
    """

    def __init__(self, job: argparse.Namespace, task: Task, policy: Policy, file, start: float):
        self.job, self.task, self.policy, self.file, self.start = job, task, policy, file, start
        self.sampling = Sampling(max_new_tokens=job.budget)
        self.heldout = find_problems(
            policy,
            task,
            HeldOutRequest(job.level, "validation", EVAL_SEED, job.eval_problems),
            frozenset(),
            self.sampling,
        ).problems
        self.step_number = self.tokens = 0
        self.seconds = self.first = self.evaluating = 0.0
        self.scores: list[float] = []
        self.prompts = hashlib.sha256()
        self.take_over: Callable[[], None] = lambda: None

    def begin(self, trained: int):
        """Write the first line, and start the clock; `trained` is a number of parameters."""
        self.write(
            job=vars(self.job),
            trained=trained,
            device=torch.cuda.get_device_name()
            if torch.cuda.is_available()
            else f"cpu, {torch.get_num_threads()} threads",
            versions=versions(),
            startup=time.perf_counter() - self.start,
        )
        gc.collect()
        gc.freeze()
        self.since = now()

    def step(
        self, prompts: Sequence[Sequence[int]], lengths: Sequence[int], reward: float, rate: float
    ) -> bool:
        """Write the line of a finished step; return whether the run continues.

        `prompts` are the token ids of the step's prompts, `lengths` the numbers of sampled tokens
        of its completions, `reward` their mean reward, `rate` the learning rate of the update.
        """
        job = self.job
        self.seconds += now() - self.since
        self.step_number += 1
        self.tokens += sum(lengths)
        self.first = self.first or self.seconds
        assert len(lengths) == job.prompts * job.group_size and max(lengths) <= job.budget
        self.prompts.update(json.dumps([list(prompt) for prompt in prompts]).encode())

        why = "minutes" if self.seconds >= 60 * job.minutes else ""
        why = why or ("steps" if self.step_number == job.steps else "")
        measured: dict[str, float] = {}
        if why or self.step_number % job.eval_every == 0:
            measured = self.evaluate()
            self.scores.append(measured["score"])

        if not why and len(self.scores) > 1 and min(self.scores[-2:]) >= job.enough:
            why = "solved"
        if (
            why
        ):  # there is no later evaluation to confirm this one, so it is repeated with new samples
            measured["again"] = self.evaluate(seed=1)["score"]
        self.write(
            step=self.step_number,
            seconds=self.seconds,
            tokens=self.tokens,
            reward=reward,
            rate=rate,
            prompts=self.prompts.hexdigest()[:16],
            **measured,
        )
        if why:
            self.write(end=why, first=self.first, evaluating=self.evaluating, memory=memory_used())
        self.since = now()
        return not why

    def evaluate(self, seed: int = 0) -> dict[str, float]:
        """Return mean score and share of exact answers on `n` held-out problems."""
        start = now()
        self.take_over()
        groups = evaluate(
            self.policy,
            self.task,
            self.heldout,
            EvaluationSettings(sampling=self.sampling, seed=seed),
        )
        found = summarise(groups)
        self.evaluating += now() - start
        return {"score": found["mean"], "exact": found["exact"], "n": found["n"]}

    def write(self, **line: Any):
        self.file.write(json.dumps(line) + "\n")


def versions() -> dict[str, str]:
    packages = ("torch", "transformers", "peft", "trl")
    return {name: version(name) for name in packages if find_spec(name)}


def measure_start(course: Course):
    """Write the completion budget of all runs, and the score of the policy that they start from."""
    job, policy = course.job, course.policy
    supply = Supply(course.task, seed=0)
    problems = [supply.at(index, job.level) for index in range(BUDGET_PROBLEMS)] + course.heldout
    budget = job.budget or max(budgets(policy, course.task, problems, Sampling()))
    course.sampling = Sampling(max_new_tokens=budget)
    course.write(job=vars(job), budget=budget, versions=versions(), **course.evaluate())
    course.write(end="measured")


def train_ours(course: Course):
    """Train with our trainer, as `train.py` does, without its files."""
    config = config_of(course.job)
    trainer = Trainer(config, Parts(course.task), course.policy)
    course.begin(trained_by(course.policy.model))
    continues = True
    while continues:
        report = trainer.step()
        continues = course.step(
            [group.prompt for group in report.groups],
            [len(completion.tokens) for group in report.groups for completion in group.completions],
            report.metrics["reward"],
            report.metrics["learning_rate"],
        )


class Stream:
    """The training problems in the order in which our trainer draws them, made on demand."""

    def __init__(self, course: Course):
        supply, level = Supply(course.task, seed=course.job.seed), course.job.level
        stream = (supply.at(index, level) for index in count())
        self.rest = fitting(course.policy, stream, [], course.job.budget)
        self.problems: list[Problem] = []

    def __getitem__(self, index: int) -> Problem:
        while len(self.problems) <= index:
            self.problems.append(next(self.rest))
        return self.problems[index]


def train_trl(course: Course):
    """Train with TRL's trainer on the same prompts, rewards, loss, adapter and learning rates."""
    trainer = trl_trainer(course, Stream(course))
    own = [trainer.processing_class.eos_token_id]
    if set(getattr(trainer, "eos_token_ids", own)) != set(course.policy.stops):
        raise UserError(
            f"--model {course.job.model}: this version of TRL ignores the end tokens in "
            "generation_config.json; leave only the tokenizer's own there, or install trl>=1.16"
        )
    trainer.train()


def trl_trainer(course: Course, stream: Stream):
    """Return TRL's trainer, which reports each step to `course` and stops when that says so."""
    from datasets import Dataset
    from torch.optim.lr_scheduler import LambdaLR
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    job, policy = course.job, course.policy
    tokenizer = load_tokenizer(job.model)
    seen: dict[str, Any] = {}  # of the step under way

    class Learner(GRPOTrainer):
        def create_scheduler(self, *_, **__):
            """Warm up as our trainer does; `transformers` would begin with a rate of zero."""
            self.lr_scheduler = LambdaLR(
                self.optimizer, lambda done: min(1.0, (done + 1) / (WARMUP + 1))
            )
            return self.lr_scheduler

        def _generate(self, prompts):
            prompt_ids, completion_ids, *rest = super()._generate(prompts)
            seen["prompts"] = [list(ids) for ids in prompt_ids[:: job.group_size]]
            seen["lengths"] = [len(ids) for ids in completion_ids]
            return prompt_ids, completion_ids, *rest

    class Reporter(TrainerCallback):
        def on_train_begin(self, *_, model, **__):
            course.take_over = partial(copy_weights, model, policy)
            course.begin(trained_by(model))

        def on_optimizer_step(self, *_, optimizer, **__):
            seen["rate"] = optimizer.param_groups[0]["lr"]

        def on_step_end(self, arguments, state, control, **__):
            control.should_training_stop = not course.step(**seen)

    def pay(completions, completion_ids, problem, **_) -> list[float]:
        """Return each completion's reward; `problem` holds the indices of their problems."""
        texts, rewards = [policy.decode(ids) for ids in completion_ids], []
        for index, rows in groupby(range(len(texts)), key=problem.__getitem__):
            answers = [texts[row] for row in rows]
            rewards += [score.reward for score in scores_of(course.task, stream[index], answers)]
        seen["reward"] = fmean(rewards)
        return rewards

    def rows(batch: dict[str, list[int]]) -> dict[str, list]:
        prompts = [stream[index].prompt for index in batch["problem"]]
        return {"prompt": [as_turn(tokenizer, prompt) for prompt in prompts], **batch}

    dataset = Dataset.from_dict({"problem": list(range(job.steps * job.prompts))})
    dataset.set_transform(rows)  # problems are made when TRL asks for them
    return Learner(
        model=resolve(job.model),
        reward_funcs=pay,
        args=trl_config(job),
        train_dataset=dataset,
        processing_class=tokenizer,
        peft_config=adapter_of(job.lora_rank) if job.lora_rank else None,
        callbacks=[Reporter()],
    )


def as_turn(tokenizer, prompt: str) -> str | list[dict[str, str]]:
    """Return `prompt` as TRL takes it: the user's turn, or a line where there is no template."""
    return [{"role": "user", "content": prompt}] if tokenizer.chat_template else prompt + "\n"


def trl_config(job: argparse.Namespace):
    """Return TRL's configuration of a job."""
    from trl import GRPOConfig

    cuda = torch.cuda.is_available()
    low, high = CLIP[LOSS]
    beta1, beta2 = adamw(job.rate).keywords["betas"]
    batch = job.prompts * job.group_size
    micro = job.trl_micro or batch
    return GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        # Under LoRA the frozen weights are in bfloat16, as ours; else weights are float32 masters.
        model_init_kwargs={"dtype": "bfloat16" if cuda and job.lora_rank else "float32"},
        bf16=cuda,
        use_cpu=not cuda,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=batch // micro,
        gradient_checkpointing=False,
        num_generations=job.group_size,
        max_completion_length=job.budget,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        loss_type=LOSS,
        scale_rewards="group",
        beta=0.0,
        epsilon=low,
        epsilon_high=high,
        num_iterations=1,
        mask_truncated_completions=False,
        learning_rate=job.rate,
        adam_beta1=beta1,
        adam_beta2=beta2,
        weight_decay=0.0,
        max_grad_norm=MAX_GRAD_NORM,
        max_steps=job.steps,
        shuffle_dataset=False,
        seed=job.seed,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )


@torch.no_grad()
def copy_weights(source: torch.nn.Module, policy: Policy):
    """Copy what is trained in `source` to the `policy`, which is evaluated."""
    theirs = dict(source.named_parameters())
    for name, weight in policy.model.named_parameters():
        if weight.requires_grad:
            weight.copy_(theirs[name])
