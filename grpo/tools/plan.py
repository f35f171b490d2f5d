"""What a run would take, before it is begun: `python -m grpo.plan --model DIRECTORY --words 500
--gpus 1xH200`, with the flags of train.py.

Memory and time of a step on one or several GPUs, from the model's configuration (its weights are
not read), the task's own texts and what the flags say. Without drafts, which depend on what the
policy can do; evaluations and checkpoints apart. How it is counted:

- memory: weights, the optimizer's part (`grpo.model.memory`), keys and values of the rollout,
  activations of a micro-batch, logits.
- a pass of the decoder over R rows: the weights and the keys and values read at a share of the
  GPU's copying speed, the products of R tokens at a share of its rate, and a fixed time a layer
  for what lies between.
- the update: products of 4 (LoRA) or 6 (full) FLOPs for a weight and token, 2 more for a
  reference; those of the head twice forward; attention's; the optimizer's traffic. Its shares and
  the fixed times are fitted to measurements on an H200 (see runs/LOG.md).
"""

import argparse
import contextlib
import math
import re
import sys
from dataclasses import dataclass
from statistics import fmean

import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM

from grpo.config import Config, resolve_config
from grpo.flags import parse as parse_training
from grpo.model.adapter import adapter_of
from grpo.model.encoding import prompt_tokens, target_length
from grpo.model.llama import FAMILIES
from grpo.model.load import dtype_on, load_shape, load_tokenizer, resolve
from grpo.model.memory import Shape, optimizer_bytes, prompts_at_once, shape_of, update_tokens
from grpo.model.prompts import check_format
from grpo.rollout.cuda_memory import bucket
from grpo.rollout.generate import budget
from grpo.run.start import start_from
from tasks.base import Parser, UserError, declared_budget, exit_status, load_task, problem_at

PROBES = 16  # problems whose tokens are counted
WEIGHTS, CACHE, PRODUCTS, DECODED, ATTENTION = (
    0.85,
    0.78,
    0.58,
    1.7,
    0.2,
)  # shares of the GPU's rates that are reached
LAYER = 16e-6  # seconds that a layer of a decoder's pass takes beside its products and attention
LAUNCH = 0.1  # seconds in which the host starts all kernels of a micro-batch: it takes no less
HOST = 0.02  # seconds of the host's own, in rollout, update and communication each
LOGITS = 1024  # tokens whose logits are held at once


@dataclass(frozen=True)
class Gpu:
    """Bytes of memory; bytes read and written a second by a copy; FLOP/s of large products in
    bfloat16; bytes a second to another such GPU.
    """

    memory: float
    bandwidth: float
    rate: float
    link: float


# H200: measured, but for the link; H100: the same chip, its memory and that of all others at nine
# tenths of their makers' data sheets, as are their rates
GPUS = {
    "H200": Gpu(150.7e9, 4.2e12, 780e12, 300e9),
    "H100": Gpu(85.5e9, 3.0e12, 780e12, 300e9),
    "A100-80GB": Gpu(85.0e9, 1.83e12, 281e12, 200e9),
    "A100-40GB": Gpu(42.4e9, 1.4e12, 281e12, 200e9),
    "L40S": Gpu(47.7e9, 0.78e12, 326e12, 20e9),
    "RTX4090": Gpu(25.3e9, 0.91e12, 149e12, 20e9),
    "RTX3090": Gpu(25.3e9, 0.84e12, 64e12, 20e9),
}


@dataclass(frozen=True)
class Model:
    """A model as it would be loaded: what memory depends on, and how many numbers it has, and of
    these are trained.
    """

    shape: Shape
    context: int
    vocabulary: int
    size: int
    trained: int
    is_lora: bool

    @property
    def head(self) -> int:
        """Parameters of the output layer."""
        return self.vocabulary * self.shape.width

    @property
    def body(self) -> int:
        """All other parameters."""
        return self.size - self.head


@dataclass(frozen=True)
class Work:
    """A step: prompts and their tokens, completions of each, their tokens, and the most that one
    may have.
    """

    prompts: int
    prompt: float
    group: int
    tokens: float
    room: int


def model_of(config: Config) -> Model:
    """Return the model by its configuration, made without memory."""
    loaded = load_shape(config.model)
    if loaded.model_type not in FAMILIES:
        raise UserError(
            f"--model {config.model}: there is no forecast for {loaded.model_type}, only for "
            f"{', '.join(FAMILIES)}"
        )
    dtype = (
        getattr(torch, config.dtype)
        if config.dtype != "auto"
        else dtype_on("cuda", config.model, resolve(config.model), bool(config.lora_rank))
    )
    with torch.device("meta"):
        causal = AutoModelForCausalLM.from_config(loaded, trust_remote_code=False)
        size = trained = causal.num_parameters()
        if config.lora_rank:
            adapted = get_peft_model(
                causal, adapter_of(config.lora_rank, config.lora_alpha, config.lora_variant)
            )
            trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    return Model(
        shape_of(loaded, dtype.itemsize),
        loaded.max_position_embeddings,
        loaded.vocab_size,
        size,
        trained,
        bool(config.lora_rank),
    )


def work_of(config: Config, model: Model, tokens: int = 0) -> Work:
    """Return a step at the run's own level; completions take as many tokens as the right answers,
    or `tokens`.
    """
    tokenizer, task = (
        load_tokenizer(config.model),
        load_task(config.task, config.reward, config.task_options, config.wording),
    )
    assert config.level is not None, "the configuration is resolved"
    format = config.prompt_format(task)
    check_format(tokenizer, format)
    problems = [
        problem_at(task, seed=config.seed, split="train", level=config.level, index=i)
        for i in range(PROBES)
    ]
    prompts = [
        len(
            prompt_tokens(
                tokenizer, format.turns(problem), tokenizer.chat_template, format.arguments
            )
        )
        for problem in problems
    ]
    targets = [target_length(tokenizer, problem.target) for problem in problems]
    declared = declared_budget(task, config.level)
    room = max(
        budget(target, prompt, model.context, config.max_new_tokens, config.model, declared)
        for target, prompt in zip(targets, prompts)
    )
    return Work(
        config.prompts,
        fmean(prompts),
        config.group_size,
        tokens or fmean(targets),
        max(room, tokens),
    )


def forecast(
    config: Config, model: Model, work: Work, gpu: Gpu, gpus: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Return bytes on each GPU and seconds of a step, each by what they are for."""
    shape, mine = model.shape, -(-work.prompts // gpus)
    has_own_reference = config.beta and (
        not model.is_lora or config.start not in (None, config.model)
    )
    weights = model.size * shape.number * (2 if has_own_reference else 1) + (
        4 * model.trained if model.is_lora else 0
    )
    optimizer = optimizer_bytes(
        model.trained,
        4 if model.is_lora else shape.number,
        config.optimizer,
        gpus if config.shard else 1,
    )
    gradients = 4 * model.trained  # which optimizer_bytes counts, too
    held = weights + optimizer
    lot = min(
        mine,
        prompts_at_once(
            shape,
            gpu.memory,
            held,
            completions=work.group,
            prompt=round(work.prompt),
            room=work.room,
        ),
    )
    largest, number = _micro_batches(
        work, mine, config.micro_tokens or update_tokens(shape, gpu.memory, held)
    )
    activations = shape.activations * largest * (0.1 if config.gradient_checkpointing else 1.0)
    memory = {
        "weights": weights,
        "optimizer": optimizer - gradients,
        "keys and values": shape.cache
        * (bucket(lot * work.group) * _up(work.room, 64) + lot * _up(work.prompt, 128)),
        "gradients and activations": max(gradients, activations)
        if number == 1
        else gradients + activations,  # the ones go as the others come
        "logits": 2 * LOGITS * model.vocabulary * shape.number
        + (0 if model.is_lora else 2 * model.head * shape.number),
    }
    return memory, {
        "prefill": _prefill(model, work, gpu, mine),
        "decoding": _decoding(model, work, gpu, lot) * mine / lot + HOST,
        "update": config.epochs * _update(config, model, work, gpu, mine, number),
        "communication": config.epochs * _communication(config, model, gpu, gpus),
    }


def _micro_batches(work: Work, mine: int, most: float) -> tuple[float, int]:
    """Return the tokens of the largest micro-batch, and how many there are, where each may have
    `most` tokens; see `learn.batch`.
    """
    fit = min(work.group, max(1, int((most - work.prompt) // work.tokens)))
    cuts = -(-work.group // fit)
    part = work.prompt + -(-work.group // cuts) * work.tokens
    together = min(mine * cuts, max(1, int(most // part)))
    return part * together, -(-mine * cuts // together)


def _prefill(model: Model, work: Work, gpu: Gpu, mine: int) -> float:
    tokens = mine * work.prompt
    return 2 * model.body * tokens / (PRODUCTS * gpu.rate) + _attention(
        model, tokens, work.prompt / 2
    ) / (ATTENTION * gpu.rate)


def _decoding(model: Model, work: Work, gpu: Gpu, lot: int) -> float:
    shape, rows = model.shape, lot * work.group
    read = shape.cache * (rows * work.tokens / 2 + lot * work.prompt)
    a_pass = (
        LAYER * shape.layers
        + model.size * shape.number / (WEIGHTS * gpu.bandwidth)
        + read / (CACHE * gpu.bandwidth)
        + 2 * model.size * rows / (DECODED * gpu.rate)
    )
    return a_pass * work.tokens


def _update(config: Config, model: Model, work: Work, gpu: Gpu, mine: int, number: int) -> float:
    answers, reference = mine * work.group * work.tokens, bool(config.beta)
    tokens = answers + work.prompt * max(mine, number)  # a prompt is run once in each micro-batch
    body, head = (4, 6) if model.is_lora else (6, 8)
    products = (body + 2 * reference) * model.body * tokens + (
        head + 2 * reference
    ) * model.head * answers
    scores = (3.5 + reference) * _attention(model, answers, work.prompt + work.tokens / 2)
    seconds = products / (PRODUCTS * gpu.rate) + scores / (ATTENTION * gpu.rate)
    traffic = (28 if model.is_lora else 34 + 10 * number) * model.trained
    return max(seconds, LAUNCH * number) + traffic / gpu.bandwidth + HOST


def _communication(config: Config, model: Model, gpu: Gpu, gpus: int) -> float:
    if gpus == 1:
        return 0.0
    sent = (4 + model.shape.number if config.shard else 8) * model.trained * (gpus - 1) / gpus
    return sent / gpu.link + HOST


def _attention(model: Model, tokens: float, seen: float) -> float:
    """Return FLOPs of the forward pass of attention of so many tokens to so many each."""
    return 4 * tokens * seen * model.shape.width * model.shape.layers


def _up(number: float, step: int) -> int:
    return math.ceil(number / step) * step


def parse(argv: list[str]) -> tuple[Config, argparse.Namespace]:
    """Return the configuration, and the flags of this program."""
    parser = Parser(
        prog="python -m grpo.plan",
        description=__doc__.splitlines()[0],
        epilog="and the flags of train.py",
        allow_abbrev=False,
    )
    parser.add_argument("--gpus", default="1xH200", help="how many of which: " + ", ".join(GPUS))
    parser.add_argument(
        "--completion-tokens",
        type=int,
        default=0,
        help="of each completion (default: as the right answers have)",
    )
    own, others = parser.parse_known_args(argv)
    found = re.fullmatch(r"(\d+)x(.+)", own.gpus)
    if not found or found[2] not in GPUS or int(found[1]) < 1:
        raise UserError(
            f"--gpus {own.gpus}: give a number and one of {', '.join(GPUS)}, e.g. 2xH100"
        )
    own.number, own.gpu = int(found[1]), GPUS[found[2]]
    config, _ = start_from(*parse_training(others))
    if config.dataset and not (config.level or config.curriculum):
        raise UserError(
            f"--dataset {config.dataset}: give --words too, for a plan does not read the file"
        )
    config = resolve_config(config, load_task(config.task, config.reward, config.task_options))
    if config.quantise != "none":
        raise UserError(f"--quantise {config.quantise}: there is no forecast for it; leave it out")
    return config, own


def start(argv: list[str]) -> int:
    """Print the plan; return 1 if the run does not fit."""
    config, own = parse(argv)
    with contextlib.redirect_stdout(sys.stderr):
        model = model_of(config)
    work = work_of(config, model, own.completion_tokens)
    memory, seconds = forecast(config, model, work, own.gpu, own.number)
    tuning = f"LoRA rank {config.lora_rank}" if model.is_lora else "full fine-tuning"
    taken, step = sum(memory.values()), sum(seconds.values())
    tokens = work.prompts * work.group * work.tokens
    print(
        f"{config.model}: {model.size / 1e6:,.0f} M parameters, {tuning}, "
        f"{model.trained / 1e6:,.1f} M trained; {config.task}, level {config.level}\n"
        f"a step    {work.prompts} prompts of {work.prompt:,.0f} tokens × {work.group} completions "
        f"of {work.tokens:,.0f}, on {own.gpus}\n"
        f"memory    {_parts_of(memory, 1e9)}: {taken / 1e9:.1f} of {own.gpu.memory / 1e9:.0f} GB "
        "on each\n"
        f"time      {_parts_of(seconds, 1)}: {step:.2f} s a step without drafts, "
        f"{tokens / step:,.0f} tokens/s"
    )
    if taken > 0.97 * own.gpu.memory:
        print(
            "          does not fit: "
            + (
                "give --optimizer adamw8bit, or several GPUs and --shard"
                if not model.is_lora
                else "give a smaller micro_tokens (--config) or --group-size"
            )
        )
        return 1
    assert config.steps is not None, "the configuration is resolved"
    print(
        f"a run     {config.steps} steps: {config.steps * step / 60:,.0f} minutes, evaluations and "
        "checkpoints apart"
    )
    return 0


def _parts_of(figures: dict[str, float], unit: float) -> str:
    return ", ".join(
        f"{name} {value / unit:.2f}" for name, value in figures.items() if value / unit >= 0.005
    )


def main(argv: list[str] | None = None) -> int:
    """Plan by these flags; return the exit status."""
    return exit_status("grpo.plan", lambda: start(sys.argv[1:] if argv is None else argv))
