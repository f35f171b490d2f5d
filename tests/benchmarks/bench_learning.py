"""Compare how fast our trainer and TRL's GRPOTrainer learn from one start on one GPU.

    python tests/benchmarks/bench_learning.py runs/start --minutes 8 --seeds 0,1,2

Prints held-out score against minutes and sampled tokens, and keeps each run's lines in --output.
Needs the extra `bench`. Both start from the same policy, which should already earn something: a
real model after the short imitation that begins our runs. Two commands make it:

    python train.py --model DIR --words 10 --steps 1 --name w
    python -m grpo.export runs/w/checkpoints/step-000000 runs/start

What is the same on both sides: the start; the problems, their order and the tokens of each prompt
(a run that saw others is refused); the completion budget; the task's reward, on the decoded
completion; prompts x group size; temperature 1; the dapo loss with its clip range and without KL;
advantages divided by the group's standard deviation; rank, scale and targets of LoRA; AdamW with
our betas, no weight decay, gradients clipped to norm 1; the learning rate of each step (a
warm-up of five, then constant).

What differs: how completions are generated (TRL: by `transformers`, its default), how the update is
computed, and that ours leaves groups without variance out of the loss, where TRL counts their
tokens in the mean; and on a GPU the precision: TRL's is bfloat16, ours float16, or what --ours
says, e.g. '{"dtype": "bfloat16"}'. TRL takes the whole step as one micro-batch, without gradient
checkpointing; where memory runs out, give the largest --trl-micro that fits.

Each run is a process of its own. Its score is that of --eval-problems held-out problems at
temperature 1, with the same random numbers each time; our sampler evaluates both sides (TRL's
weights are copied into our model). Its clock runs from the beginning of the first step, compilation
included, and stops during evaluations. A score is reached at the first of two evaluations in a row
that are at least as high, so that more evaluations bring no more luck.
"""

import argparse
import gc
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from itertools import count, groupby, pairwise
from pathlib import Path
from statistics import fmean

import torch
from bench_model import (
    adapter_of,
    device_name,
    memory_used,
    now,
    trained_by,
    trl_config,
    trl_dataset,
)

from grpo.config import CLIP, Config, resolve_config
from grpo.evaluate import budgets, evaluate, held_out_stream, select, summarise
from grpo.learn.optimizer import BETAS, WARMUP
from grpo.model.load import load_policy, read_tokenizer, resolve
from grpo.rollout.generate import fitting
from grpo.tasks.base import scores_of
from grpo.tasks.registry import load_task
from grpo.tasks.supply import Supply
from grpo.trainer import Trainer

TOP = Path(__file__).resolve().parents[2]
SCORES = (0.8, 0.9, 0.97, 0.99)
BUDGET_PROBLEMS = 512  # of the training stream, whose longest answer sets the completion budget
EVAL_SEED = 777
LOSS = "dapo"
STEPS = 100_000  # the clock ends a run before


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", help="the start: a directory in Hugging Face layout, or builtin")
    add("--task", default="interleave")
    add("--level", type=int, default=10, help="e.g. words of each text")
    add("--minutes", type=float, default=8.0, help="minutes of training in each run")
    add("--rates", default="3e-4,1e-3,3e-3", help="learning rates")
    add("--seeds", default="0")
    add("--prompts", type=int, default=16)
    add("--group-size", type=int, default=16)
    add("--lora-rank", type=int, default=64, help="0: full fine-tuning")
    add("--eval-every", type=int, default=10, help="steps between evaluations")
    add("--eval-problems", type=int, default=64)
    add("--trainers", default="ours,trl", help="the trainers to run")
    add("--ours", type=json.loads, default={}, metavar="JSON", help="settings of ours alone")
    add("--trl-micro", type=int, default=0, help="completions of TRL's micro-batch (0: all)")
    add("--output", type=Path, default=TOP / "runs" / "learning", metavar="FOLDER")
    add("--child", nargs=3, metavar=("TRAINER", "RATE", "SEED"), help=argparse.SUPPRESS)
    return parser.parse_args()


class Course:
    """The common part of both sides: count tokens and seconds, evaluate, write a line per step.

    `policy` is evaluated: on our side the policy that learns, on TRL's a copy of it, which
    `take_over` brings up to date.
    """

    def __init__(self, options, rate: float, seed: int, file):
        self.options, self.rate, self.seed, self.file = options, rate, seed, file
        cudnn = torch.backends.cuda.cudnn_sdp_enabled()
        self.task = load_task(options.task)
        self.policy = load_policy(options.model, **self.config(budget=1).loading)
        # Our loader turns this kind of attention off for the whole process; TRL's model keeps it.
        torch.backends.cuda.enable_cudnn_sdp(cudnn and options.child[0] == "trl")

        size = options.eval_problems
        stream, fruitless = held_out_stream(
            self.task, options.level, "validation", seed=EVAL_SEED, size=size
        )
        self.heldout = select(self.policy, stream, size, fruitless=fruitless).problems
        supply = Supply(self.task, seed=0)
        known = [supply.at(index, options.level) for index in range(BUDGET_PROBLEMS)]
        self.budget = max(budgets(self.policy, self.task, known + self.heldout, None))
        self.step_number = self.tokens = 0
        self.seconds = 0.0
        self.prompts = hashlib.sha256()
        self.take_over = lambda: None

    def config(self, budget: int) -> Config:
        """Return our configuration. `settings_of` is the same for all settings that TRL has too."""
        options = self.options
        config = Config(
            task=options.task,
            level=options.level,
            model=options.model,
            lora_rank=options.lora_rank,
            prompts=options.prompts,
            group_size=options.group_size,
            temperature=1.0,
            max_new_tokens=budget,
            dynamic_sampling=0,
            preflight="off",
            loss=LOSS,
            scale="group",
            credit="outcome",
            beta=0.0,
            epochs=1,
            learning_rate=self.rate,
            schedule="constant",
            patience=0,
            steps=STEPS,
            seed=self.seed,
            **options.ours,
        )
        return resolve_config(config, self.task)

    def begin(self, trained: int):
        """Write the first line, and start the clock; `trained` is a number of parameters."""
        self.write(trained=trained, device=device_name(), **self.evaluate())
        gc.collect()
        gc.freeze()
        self.since = now()

    def step(self, prompts, lengths, reward: float, rate: float) -> bool:
        """Write the line of a finished step; return whether the run continues.

        `prompts` are the token ids of the step's prompts, `lengths` the numbers of sampled tokens
        of its completions, `reward` their mean reward, `rate` the learning rate of the update.
        """
        options = self.options
        self.seconds += now() - self.since
        self.step_number += 1
        self.tokens += sum(lengths)
        assert len(lengths) == options.prompts * options.group_size and max(lengths) <= self.budget
        self.prompts.update(json.dumps([list(prompt) for prompt in prompts]).encode())

        is_over = self.seconds >= 60 * options.minutes
        is_due = is_over or self.step_number % options.eval_every == 0
        digest = self.prompts.hexdigest()[:16]
        measured = self.evaluate() if is_due else {}
        self.write(reward=reward, rate=rate, prompts=digest, **memory_used(), **measured)
        self.since = now()
        return not is_over

    def evaluate(self) -> dict[str, float]:
        """Return mean score and share of exact answers on held-out problems."""
        self.take_over()
        sampling = Config(max_new_tokens=self.budget)
        found = summarise(evaluate(self.policy, self.task, self.heldout, sampling))
        return {"score": found["mean"], "exact": found["exact"]}

    def write(self, **line):
        where = {"step": self.step_number, "seconds": self.seconds, "tokens": self.tokens}
        print(json.dumps(where | line), file=self.file, flush=True)


def train_ours(course: Course):
    """Train with our trainer, as `train.py` does, without its files."""
    trainer = Trainer(
        course.config(course.budget), Supply(course.task, seed=course.seed), course.policy
    )
    course.begin(trained_by(course.policy.model))
    continues = True
    while continues:
        report = trainer.step()
        completions = [each for group in report.groups for each in group.completions]
        continues = course.step(
            [group.prompt for group in report.groups],
            [len(completion.tokens) for completion in completions],
            report.metrics["reward"],
            report.metrics["learning_rate"],
        )


class Stream:
    """The training problems in the order in which our trainer draws them, made on demand."""

    def __init__(self, course: Course):
        supply, level = Supply(course.task, seed=course.seed), course.options.level
        stream = (supply.at(index, level) for index in count())
        self.rest = fitting(course.policy, stream, [], course.budget)
        self.problems = []

    def __getitem__(self, index: int):
        while len(self.problems) <= index:
            self.problems.append(next(self.rest))
        return self.problems[index]


def train_trl(course: Course):
    """Train with TRL's trainer on the same prompts, rewards, loss, adapter and learning rates."""
    trainer = trl_trainer(course, Stream(course))
    own = [trainer.processing_class.eos_token_id]
    if set(getattr(trainer, "eos_token_ids", own)) != set(course.policy.stops):
        sys.exit("this version of TRL ignores the end tokens of generation_config.json")
    trainer.train()


def trl_trainer(course: Course, stream: Stream):
    """Return TRL's trainer, which reports each step to `course` and stops when that says so."""
    from torch.optim.lr_scheduler import LambdaLR
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    options, policy = course.options, course.policy
    tokenizer = read_tokenizer(resolve(options.model))[0]
    seen = {}  # of the step under way

    class Learner(GRPOTrainer):
        def create_scheduler(self, *_, **__):
            """Warm up as our trainer does; `transformers` would begin with a rate of zero."""
            self.lr_scheduler = LambdaLR(
                self.optimizer, lambda done: min(1.0, (done + 1) / (WARMUP + 1))
            )
            return self.lr_scheduler

        def _generate(self, prompts):
            prompt_ids, completion_ids, *rest = super()._generate(prompts)
            seen["prompts"] = [list(ids) for ids in prompt_ids[:: options.group_size]]
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

    def as_turn(prompt: str):
        if tokenizer.chat_template:
            return [{"role": "user", "content": prompt}]
        return prompt + "\n"

    def rows(batch):
        prompts = [stream[index].prompt for index in batch["problem"]]
        return {"prompt": [as_turn(prompt) for prompt in prompts], **batch}

    dataset = trl_dataset("problem", list(range(STEPS * options.prompts)))
    dataset.set_transform(rows)  # problems are made when TRL asks for them
    return Learner(
        model=resolve(options.model),
        reward_funcs=pay,
        args=settings_of(course),
        train_dataset=dataset,
        processing_class=tokenizer,
        peft_config=adapter_of(options.lora_rank),
        callbacks=[Reporter()],
    )


def settings_of(course: Course):
    """Return TRL's configuration of a run."""
    options = course.options
    low, high = CLIP[LOSS]
    beta1, beta2 = BETAS
    is_lora = torch.cuda.is_available() and options.lora_rank
    return trl_config(
        options.prompts * options.group_size,
        options.trl_micro,
        # Under LoRA the frozen weights are in bfloat16, as ours; else weights are float32 masters.
        model_init_kwargs={"dtype": "bfloat16" if is_lora else "float32"},
        num_generations=options.group_size,
        max_completion_length=course.budget,
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
        learning_rate=course.rate,
        adam_beta1=beta1,
        adam_beta2=beta2,
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_steps=STEPS,
        seed=course.seed,
    )


@torch.no_grad()
def copy_weights(source: torch.nn.Module, policy):
    """Copy what is trained in `source` to the `policy`, which is evaluated."""
    theirs = dict(source.named_parameters())
    for name, weight in policy.model.named_parameters():
        if weight.requires_grad:
            weight.copy_(theirs[name])


def run(options, trainer: str, rate: str, seed: str) -> list[dict]:
    """Make a run in a process of its own, unless its file is there; return its lines."""
    path = options.output / f"{trainer}-{rate}-{seed}.jsonl"
    if not path.exists():
        print(f"{path.stem} ...", file=sys.stderr, flush=True)
        part = path.with_suffix(".part")
        # An empty cache, so that no run profits from what another one has compiled.
        with part.open("w") as file, tempfile.TemporaryDirectory() as cache:
            caches = {"TRITON_CACHE_DIR": cache, "TORCHINDUCTOR_CACHE_DIR": cache}
            subprocess.run(
                [sys.executable, __file__, *sys.argv[1:], "--child", trainer, rate, seed],
                check=True,
                stdout=file,
                env={"HF_HUB_OFFLINE": "1", **os.environ, **caches, "PYTHONPATH": str(TOP)},
            )
        part.rename(path)
    # TRL prints dictionaries of Python, {'train_runtime': ...}, between the lines of the run.
    return [json.loads(line) for line in path.read_text().splitlines() if line.startswith('{"')]


def check_comparable(one: list[dict], other: list[dict]):
    """End the program unless two runs trained as many parameters on the same prompts."""
    if one[0]["trained"] != other[0]["trained"]:
        sys.exit("no comparison: other parameters were trained")
    for mine, theirs in zip(one[1:], other[1:]):
        if mine["prompts"] != theirs["prompts"]:
            sys.exit(f"no comparison: the prompts differ at step {mine['step']}")


def row_of(name: str, lines: list[dict]) -> str:
    """Return a run's row: its highest confirmed score, and minutes and M tokens to each score."""
    evaluated = [line for line in lines if "score" in line]
    confirmed = [(min(a["score"], b["score"]), a) for a, b in pairwise(evaluated)]
    cells = [f"{max(score for score, _ in confirmed):.3f}"]
    for mark in SCORES:
        first = next((line for score, line in confirmed if score >= mark), None)
        cells.append(f"{first['seconds'] / 60:.2f}, {first['tokens'] / 1e6:.2f}" if first else "")
    return f"| {name} | {' | '.join(cells)} |"


def main():
    options = parse()
    if options.child:
        trainer, rate, seed = options.child
        course = Course(options, float(rate), int(seed), sys.stdout)
        return {"ours": train_ours, "trl": train_trl}[trainer](course)

    options.output.mkdir(parents=True, exist_ok=True)
    heads = " | ".join(f"{mark}: minutes, M tokens" for mark in SCORES)
    print(f"| trainer, rate, seed | highest | {heads} |\n|---|---|" + "---|" * len(SCORES))
    for seed in options.seeds.split(","):
        for rate in options.rates.split(","):
            runs = {name: run(options, name, rate, seed) for name in options.trainers.split(",")}
            for one, other in pairwise(runs.values()):
                check_comparable(one, other)
            for name, lines in runs.items():
                print(row_of(f"{name}, {rate}, {seed}", lines), flush=True)


if __name__ == "__main__":
    main()
