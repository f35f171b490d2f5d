"""How the embedded model was made: `python -m data.make --output data/base_model`.

It is a small Llama with a byte-level BPE. Both are made from the training split of our own corpus
and from generated texts, in minutes on one GPU.

    texts      sequences of words: passages, invented and strange words
    lessons    the skills, and the demonstrator with bad habits
    batches    the BPE, and rows of tokens
    __main__   the training, its flags, and the files that it writes
"""

import argparse
import json
import multiprocessing
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from data.make.batches import END, PAD, Batches, make_tokenizer, serve

# The size of the model, by the names of `LlamaConfig`.
SHAPE: dict[str, Any] = dict(
    hidden_size=256,
    intermediate_size=256,
    num_hidden_layers=12,
    num_attention_heads=4,
    num_key_value_heads=2,
)
VOCABULARY = 4096

# Tokens of an optimizer step.
BATCH_TOKENS = 65_536

RATE = 2e-3  # the learning rate

# Steps over which the learning rate rises linearly.
WARMUP = 100

# The share of the training, at its end, over which the learning rate falls linearly to zero.
DECAY = 0.4

# Gradients are clipped to this norm.
MAX_GRAD_NORM = 1.0


def build(vocabulary: int) -> LlamaForCausalLM:
    """Return a new model of `SHAPE` with random weights."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        pad_token_id=PAD,
        eos_token_id=END,
        **SHAPE,
    )
    return LlamaForCausalLM(config)


class Step:
    """One step of pretraining: loss, gradient, Muon for the matrices and AdamW for the rest."""

    def __init__(self, model: LlamaForCausalLM, device: str):
        self.model = model
        self.device = device

        # Muon (https://kellerjordan.github.io/posts/muon/) is for matrices between hidden states.
        # So the embedding is not among them.
        matrices = {
            name: p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name
        }
        rest = [p for name, p in model.named_parameters() if name not in matrices]
        self.optimizers = [
            torch.optim.Muon(matrices.values(), weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.loss_of = torch.compile(loss_of, dynamic=False) if device == "cuda" else loss_of
        for layer in model.model.layers if device == "cuda" else ():
            layer.compile(dynamic=False)

    def __call__(self, tokens: np.ndarray, learned: np.ndarray, rate: float) -> torch.Tensor:
        """Take one step with learning rate `rate`; return the loss, on the device."""
        tokens_RT = torch.from_numpy(tokens).to(self.device).long()
        learned_RT = torch.from_numpy(learned).to(self.device)
        self.model.zero_grad()
        with torch.autocast(self.device, torch.bfloat16):
            loss = self.loss_of(self.model, hidden_of(self.model, tokens_RT), tokens_RT, learned_RT)
        loss.backward()

        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
        return loss.detach()


def hidden_of(model: Any, tokens_RT: torch.Tensor) -> torch.Tensor:
    """Return the hidden states of the last layer, (rows, length, width).

    The layers are called one by one, so that all of them share one compiled layer.
    """
    hidden = model.model.embed_tokens(tokens_RT)
    positions = torch.arange(tokens_RT.shape[1], device=tokens_RT.device)[None]
    rotary = model.model.rotary_emb(hidden, positions)
    for layer in model.model.layers:
        # Attention without a mask is causal.
        hidden = layer(
            hidden, attention_mask=None, position_ids=positions, position_embeddings=rotary
        )
    return hidden


def loss_of(
    model: Any, hidden: torch.Tensor, tokens_RT: torch.Tensor, learned_RT: torch.Tensor
) -> torch.Tensor:
    """Return the mean cross-entropy of the `learned` tokens, given all tokens before them."""
    logits = model.lm_head(model.model.norm(hidden))[:, :-1]
    targets = tokens_RT[:, 1:].masked_fill(~learned_RT[:, 1:], -100)
    return torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(), targets.reshape(-1)
    )


def train(arguments: argparse.Namespace) -> None:
    """Pretrain for --steps, and save the model."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(arguments.seed)
    tokenizer = make_tokenizer(VOCABULARY)

    # The processes that make batches must be forked before torch computes anything.
    fork = multiprocessing.get_context("fork")
    queue = fork.Queue(maxsize=32)
    for worker in range(arguments.workers):
        batches = Batches(tokenizer, arguments.seed * 1000 + worker + 1, BATCH_TOKENS)
        fork.Process(target=serve, args=(batches, queue), daemon=True).start()

    model = build(len(tokenizer))
    model.to(torch.device(device))  # type: ignore[arg-type]  # wrapped without its types
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"{millions:.2f} M parameters on {device}, vocabulary {len(tokenizer)}", flush=True)

    take = Step(model, device)
    tokens_learned = 0
    begun = time.time()
    for step in range(arguments.steps):
        factor = min(1.0, (step + 1) / WARMUP, (1 - step / arguments.steps) / DECAY)
        tokens, learned = queue.get()
        loss = take(tokens, learned, RATE * factor)
        tokens_learned += tokens.size
        if step % 1000 == 0:
            print(f"step {step}: loss {loss.item():.4f}, {time.time() - begun:.0f} s", flush=True)

    recipe = dict(
        SHAPE,
        vocabulary=VOCABULARY,
        batch_tokens=BATCH_TOKENS,
        rate=RATE,
        steps=arguments.steps,
        seed=arguments.seed,
        tokens=tokens_learned,
        seconds=round(time.time() - begun),
        hardware=torch.cuda.get_device_name() if device == "cuda" else "cpu",
        torch=str(torch.__version__),
    )
    save(model, tokenizer, Path(arguments.output), recipe)


def save(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    output: Path,
    recipe: dict[str, Any],
) -> None:
    """Write the model, its tokenizer and recipe.json (all settings and the cost) to `output`."""
    output.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16)  # type: ignore[arg-type]  # wrapped without its types
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    (output / "recipe.json").write_text(json.dumps(recipe, indent=1) + "\n", "utf-8")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the flags."""
    parser = argparse.ArgumentParser(
        prog="python -m data.make", description="Make the embedded model."
    )
    parser.add_argument("--output", default="data/base_model")
    parser.add_argument("--steps", type=int, default=28_167, help="optimizer steps")
    parser.add_argument("--workers", type=int, default=12, help="processes that make lessons")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


if __name__ == "__main__":
    train(parse())
