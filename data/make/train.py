"""How the embedded model was made: `python -m data.make --output data/base_model`.

It is a small Llama with a byte-level BPE. Both are made from the training split of our own corpus
and from generated texts (`data.make.lessons`), in minutes on one GPU.

    words, careless, lessons   the texts, the demonstrator with bad habits, the lessons
    tokenizer, batches         the BPE, and rows of tokens
    muon, step                 the optimizer of the matrices, and one training step
    train                      the training, its flags, and the files that it writes
"""

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from data.make.batches import Batches, accuracy_by_skill, serve
from data.make.step import Step
from data.make.tokenizer import END, PAD, make_tokenizer

# Steps over which the learning rate rises linearly.
WARMUP = 100

# The share of the training, at its end, over which the learning rate falls linearly to zero.
DECAY = 0.4


def build(arguments: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return a new model with random weights, of the size that the flags give."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=arguments.width,
        intermediate_size=arguments.inner,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.heads,
        num_key_value_heads=arguments.kv_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        pad_token_id=PAD,
        eos_token_id=END,
    )
    return LlamaForCausalLM(config)


def train(arguments: argparse.Namespace) -> None:
    """Pretrain until --steps or --minutes are reached, and save the model.

    With a state file, the training can be done in parts, each of which continues the last one.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(arguments.seed)
    tokenizer = make_tokenizer(arguments.vocabulary)
    state = Path(arguments.state) if arguments.state else None
    counts: dict[str, Any] = dict(step=0, tokens=0, seconds=0.0)
    if state is not None and state.exists():
        counts = json.loads(state.with_suffix(".json").read_text("utf-8"))

    # The worker processes must be forked before torch computes anything.
    queue = _start_workers(arguments, tokenizer, counts["step"])
    checks = Batches(tokenizer, arguments.seed * 1000, arguments.batch_tokens)

    model = build(arguments, tokenizer)
    model.to(torch.device(device))  # type: ignore[arg-type]  # wrapped without its types
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"{millions:.2f} M parameters on {device}, vocabulary {len(tokenizer)}", flush=True)

    take = Step(model, device)
    begun = time.time()
    take.prepare(arguments.batch_tokens)
    print(f"prepared in {time.time() - begun:.0f} s", flush=True)
    if state is not None and counts["step"]:
        take.load(load_file(state))

    def report(rows: int | None = None, **figures: Any) -> None:
        sizes = {} if rows is None else {"rows": rows}
        skills = accuracy_by_skill(model, checks, device, **sizes)
        print(json.dumps(figures | skills), flush=True)

    is_done = _take_steps(arguments, take, queue, counts, report)
    if state:
        save_file({name: value.detach().cpu() for name, value in take.state().items()}, state)
        state.with_suffix(".json").write_text(json.dumps(counts), "utf-8")
    if not is_done:
        print(
            f"{counts['step']} steps in {counts['seconds']:.0f} s so far; the same command "
            "continues",
            flush=True,
        )
        return

    cost = dict(
        steps=counts["step"],
        tokens=counts["tokens"],
        seconds=round(counts["seconds"]),
        hardware=torch.cuda.get_device_name() if device == "cuda" else "cpu",
    )
    report(1024, **cost)
    save(model, tokenizer, arguments, cost)


def _start_workers(
    arguments: argparse.Namespace, tokenizer: PreTrainedTokenizerFast, step: int
) -> Any:
    """Start the processes that make batches; return the queue that they fill."""
    fork = multiprocessing.get_context("fork")
    queue = fork.Queue(maxsize=32)
    for worker in range(arguments.workers):
        seed = arguments.seed * 1000 + worker + 1 + 10**6 * step
        batches = Batches(tokenizer, seed, arguments.batch_tokens)
        fork.Process(target=serve, args=(batches, queue), daemon=True).start()
    return queue


def _take_steps(
    arguments: argparse.Namespace,
    take: Step,
    queue: Any,
    counts: dict[str, Any],
    report: Callable[..., None],
) -> bool:
    """Train until all or this part is done; return whether all is.

    `counts` has steps, tokens and seconds so far, and is updated.
    """
    before, start = counts["seconds"], time.time()
    while True:
        counts["seconds"] = before + time.time() - start
        progress = max(
            counts["step"] / arguments.steps, counts["seconds"] / (60 * arguments.minutes)
        )
        if progress >= 1 or time.time() - start > 60 * arguments.part_minutes:
            return progress >= 1

        factor = min(1.0, (counts["step"] + 1) / WARMUP, (1 - progress) / DECAY)
        rate = arguments.rate * factor
        tokens, learned = queue.get()
        loss = take(tokens, learned, rate)
        if counts["step"] % 1000 == 0:
            report(**counts, loss=round(loss.item(), 4))
        counts["step"] += 1
        counts["tokens"] += tokens.size


def save(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    arguments: argparse.Namespace,
    cost: dict[str, Any],
) -> None:
    """Write the model, its tokenizer and recipe.json (all settings and the cost) to --output."""
    output = Path(arguments.output)
    output.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16)  # type: ignore[arg-type]  # wrapped without its types
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    recipe = {
        name: value
        for name, value in vars(arguments).items()
        if name not in ("output", "workers", "state", "part_minutes")
    }
    (output / "recipe.json").write_text(
        json.dumps(recipe | cost | {"torch": str(torch.__version__)}, indent=1) + "\n", "utf-8"
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the flags."""
    parser = argparse.ArgumentParser(
        prog="python -m data.make", description="Make the embedded model."
    )
    parser.add_argument("--output", default="data/base_model")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--inner", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--batch-tokens", type=int, default=65536)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument(
        "--steps",
        type=int,
        default=35_000,
        help="optimizer steps, at most",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=1e9,
        help="end after this time; the learning rate follows whichever limit is nearer",
    )
    parser.add_argument(
        "--part-minutes",
        type=float,
        default=1e9,
        help="stop after this time, to be continued later from --state",
    )
    parser.add_argument("--state", help="file (.safetensors) to stop at and continue from")
    parser.add_argument("--workers", type=int, default=12, help="processes that make lessons")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)
