"""Estimate the memory and the time of a run before it starts.

    python -m grpo.plan --model DIRECTORY --words 500 --gpus 1     and the flags of train.py

The estimate is for one step, on one or several GPUs. It is made from the model's configuration (its
weights are not read), the task's texts and the flags. Speculative decoding is left out, because its
gain depends on the policy; so are evaluations and checkpoints. What the GPU can do is measured in a
few seconds (`grpo.tools.measure`), unless a kind is named. The arithmetic is that of
`grpo.tools.estimate`.
"""

import argparse
import contextlib
import re
import sys
from statistics import fmean

import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM

from data.text import printable
from grpo.config import Config
from grpo.flags import parse as parse_training
from grpo.model.adapter import adapter_of
from grpo.model.context import context_of
from grpo.model.encoding import prompt_tokens, target_length
from grpo.model.llama import FAMILIES
from grpo.model.load import dtype_on, load_shape, load_tokenizer, resolve
from grpo.model.memory import shape_of
from grpo.model.prompts import check_format
from grpo.resolve import resolve_config
from grpo.rollout.budget import ModelContext, budget
from grpo.run.start import start_from
from grpo.tools.estimate import GPUS, Gpu, PlannedModel, Work, forecast
from grpo.tools.measure import measure_gpu
from tasks.base import Parser, UserError, declared_budget, exit_status, load_task, problem_at

# The number of problems whose tokens are counted.
PROBES = 16

# The share of a GPU's memory that a run may take.
USABLE = 0.97


def model_of(config: Config) -> PlannedModel:
    """Return the model that the configuration names; no memory is allocated for it.

    Raises UserError if there is no estimate for its architecture.
    """
    loaded = load_shape(config.model)
    if loaded.model_type not in FAMILIES:
        raise UserError(
            f"--model {config.model}: there is no estimate for {loaded.model_type}, only for "
            f"{', '.join(FAMILIES)}"
        )
    is_lora = bool(config.lora_rank)
    if config.dtype == "auto":
        dtype = dtype_on("cuda", config.model, resolve(config.model), is_lora)
    else:
        dtype = getattr(torch, config.dtype)

    with torch.device("meta"):
        causal = AutoModelForCausalLM.from_config(loaded, trust_remote_code=False)
        size = trained = causal.num_parameters()
        if config.adapter:
            adapted = get_peft_model(causal, adapter_of(config.adapter))
            trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)

    return PlannedModel(
        shape=shape_of(loaded, dtype.itemsize),
        context=context_of(loaded, supports_windows=False)[0],
        vocabulary=loaded.vocab_size,
        size=size,
        trained=trained,
        is_lora=is_lora,
    )


def work_of(config: Config, model: PlannedModel, tokens: int = 0) -> Work:
    """Return the work of a step at the run's level.

    Completions have `tokens` tokens, or as many as the right answers if that is 0.
    """
    assert config.level is not None and config.prompts, "the configuration is resolved"
    tokenizer = load_tokenizer(config.model)
    task = load_task(config.task, config.reward, config.task_options, config.wording)
    format = config.prompt_format(task)
    check_format(tokenizer, format)
    declared = declared_budget(task, config.level)
    context = ModelContext(config.model, model.context)

    # Tokens of the prompt, of the right answer, and of the budget, for each problem.
    prompts, targets, budgets = [], [], []
    for index in range(PROBES):
        problem = problem_at(task, seed=config.seed, split="train", level=config.level, index=index)
        encoded = prompt_tokens(
            tokenizer, format.turns(problem), tokenizer.chat_template, format.arguments
        )
        prompt = len(encoded)
        target = target_length(tokenizer, problem.target)

        prompts.append(prompt)
        targets.append(target)
        budgets.append(
            budget(target, prompt, context, asked=config.max_new_tokens, declared=declared)
        )

    return Work(
        prompts=config.prompts,
        prompt=fmean(prompts),
        group=config.group_size,
        tokens=tokens or fmean(targets),
        room=max(*budgets, tokens),
    )


def parse(argv: list[str]) -> tuple[Config, argparse.Namespace]:
    """Return the configuration, and the flags of this program.

    Raises UserError for flags that have no estimate.
    """
    parser = Parser(
        prog="python -m grpo.plan",
        description=__doc__.splitlines()[0],
        epilog="All flags of train.py are accepted, too.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--gpus",
        help="a number of GPUs like the one at hand, which is measured; or a number and a kind: "
        f"1x, 2x, ... {', '.join(GPUS)} (default: 1 if there is a GPU, else 1xH200)",
    )
    parser.add_argument(
        "--completion-tokens",
        type=int,
        help="mean tokens of a completion (default: those of the right answers)",
    )
    own, others = parser.parse_known_args(argv)
    if own.completion_tokens is not None and own.completion_tokens < 1:
        raise UserError(f"--completion-tokens {own.completion_tokens}: give 1 or more")
    own.gpus = own.gpus or ("1" if torch.cuda.is_available() else "1xH200")

    config, _ = start_from(*parse_training(others))
    if config.dataset and not (config.level or config.curriculum):
        raise UserError(
            f"--dataset {config.dataset}: give --words too, because the plan does not read the file"
        )
    config = resolve_config(config, load_task(config.task, config.reward, config.task_options))
    if config.quantise != "none":
        raise UserError(f"--quantise {config.quantise}: there is no estimate for it; leave it out")
    return config, own


def _gpus_of(text: str) -> tuple[int, Gpu, str]:
    """Return number, capacity and name of the GPUs in "2xH100", or in "2", which measures one."""
    found = re.fullmatch(r"([1-9]\d*)(?:x(.+))?", text)
    if not found or found[2] and found[2] not in GPUS:
        raise UserError(
            f"--gpus {text}: give a number of GPUs like the one here, or a number and one of "
            f"{', '.join(GPUS)}, e.g. 2xH100"
        )
    if found[2]:
        return int(found[1]), GPUS[found[2]], found[2]
    gpu = measure_gpu()
    speed = f"{gpu.bandwidth / 1e12:.2f} TB/s, {gpu.rate / 1e12:.0f} TFLOP/s measured"
    return int(found[1]), gpu, f"{torch.cuda.get_device_name()} ({speed})"


def start(argv: list[str]) -> int:
    """Print the plan; return 1 if the run does not fit into memory."""
    config, own = parse(argv)
    number, gpu, name = _gpus_of(own.gpus)
    with contextlib.redirect_stdout(sys.stderr):
        model = model_of(config)
    work = work_of(config, model, own.completion_tokens or 0)
    memory, seconds = forecast(config, model, work, gpu, number)

    total = sum(memory.values())
    step = sum(seconds.values())
    tokens = work.prompts * work.group * work.tokens
    tuning = f"LoRA rank {config.lora_rank}" if model.is_lora else "full fine-tuning"
    lines = (
        f"model     {config.model}: {model.size / 1e6:,.0f} M parameters, {tuning}, "
        f"{model.trained / 1e6:,.1f} M trained; {config.task}, level {config.level}\n"
        f"step      {work.prompts} prompts of {work.prompt:,.0f} tokens × {work.group} completions "
        f"of {work.tokens:,.0f} tokens, on {number}x{name}\n"
        f"memory    {total / 1e9:.1f} of {gpu.memory / 1e9:.0f} GB on each GPU: "
        f"{_parts_of(memory, 1e9)}\n"
        f"time      {step:.2f} s per step without speculative decoding, {tokens / step:,.0f} "
        f"tokens/s: {_parts_of(seconds, 1)}"
    )
    print(printable(lines))

    # The trainer frees the decoder's memory before each update if it has to.
    freed = min(memory["keys and values"], memory["gradients and activations"])
    if total - freed > USABLE * gpu.memory:
        advice = "give --optimizer adamw8bit, or several GPUs and --shard"
        if model.is_lora:
            first = "" if config.gradient_checkpointing else "--gradient-checkpointing, "
            advice = f"give {first}a smaller --group-size, or a lower level"
        print(f"          does not fit: {advice}")
        return 1

    if total > USABLE * gpu.memory:
        print(
            f"          fits in {(total - freed) / 1e9:.1f} GB, because keys and values are freed "
            "before each update"
        )

    assert config.steps is not None, "the configuration is resolved"
    minutes = config.steps * step / 60
    print(
        f"run       {config.steps} steps: {minutes:,.0f} minutes, plus evaluations and checkpoints"
    )
    return 0


def _parts_of(figures: dict[str, float], unit: float) -> str:
    """Return the figures in words, in this unit, without those that would read 0.00."""
    return ", ".join(
        f"{name} {value / unit:.2f}" for name, value in figures.items() if value / unit >= 0.005
    )


def main(argv: list[str] | None = None) -> int:
    """Run the program with these arguments; return the exit status."""
    return exit_status("grpo.plan", lambda: start(sys.argv[1:] if argv is None else argv))
