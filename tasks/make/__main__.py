"""How the embedded model was made: `python -m tasks.make --output data/base_model`.

It is a small Llama with a byte-level BPE. Both are made from the training split of our own corpus
and from generated texts (`tasks.make.lessons`), in minutes on one GPU. A row of tokens holds one
lesson, so no lesson sees another. All rows of a batch have the same length, and all batches about
the same number of tokens.

Shapes: R rows, T tokens of a row.
"""

import argparse
import json
import multiprocessing
import random
import string
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from data.corpus import documents_of, load_corpus
from tasks.make.lessons import RAW, SHARES, Lesson, Words, lesson, log_uniform

# The size of the model, by the names of `LlamaConfig`.
SHAPE: dict[str, Any] = dict(
    hidden_size=256,
    intermediate_size=256,
    num_hidden_layers=12,
    num_attention_heads=4,
    num_key_value_heads=2,
)
VOCABULARY = 4096
BATCH_TOKENS = 65_536  # of an optimizer step
RATE = 2e-3  # the learning rate
WARMUP = 100  # steps over which the learning rate rises linearly
DECAY = 0.4  # the share of the training, at its end, over which it falls linearly to zero
MAX_GRAD_NORM = 1.0

SPECIAL = ["<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"]
PAD, USER, ASSISTANT, END = range(4)

# The chat template.
CHAT = (
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

# The pieces that are split into tokens. The pattern is that of GPT-2, except that every digit is a
# piece of its own.
SPLIT = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# Runs of one mark become tokens of these lengths, as in the vocabularies of larger models, so that
# a run is a few tokens to copy instead of many to count. SHOWN is how often each run is shown,
# which decides against how many words it takes a token.
RUNS = (2, 4, 8, 16)
SHOWN = 60

# The lengths of rows in tokens, and their shares of the batches. Rows of the shortest length hold
# arithmetic, and no other rows do. Rows longer than LONG are filled, and rarely hold interleavings.
LENGTHS = {48: 0.15, 160: 0.19, 320: 0.16, 640: 0.16, 1280: 0.16, 3328: 0.18}
SHORTEST = min(LENGTHS)
LONG = 160

# The share of interleavings in long rows, by their length.
INTERLEAVED = {320: 0.15, 640: 0.15, 1280: 0.0, 3328: 0.0}

# The share of strange lessons in rows of each length. They have more tokens a word than others.
STRANGE = {160: 0.3, 320: 0.3, 640: 0.3, 1280: 0.15, 3328: 0.0}

# Of plain and of strange lessons: the least share of a long row that one fills, and the least and
# the largest number of its words, as shares of the row's tokens.
SIZES = {False: (0.75, 1 / 3.5, 1 / 1.4), True: (0.5, 1 / 25, 1 / 3)}


def make_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Return the tokenizer, trained on the training documents, prompts of each skill, and runs.

    Every text gets a space in front, so a word has the same tokens at the beginning of a text as
    anywhere else. `vocabulary` is the number of tokens.
    """
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.Prepend(" ")
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()

    words = Words(random.Random(0), [])
    skills = (*SHARES, "arithmetic")
    prompts = [lesson(skill, 20, words)[0] or "" for skill in skills for _ in range(200)]
    runs = [f"{mark * length} " * SHOWN for mark in string.punctuation for length in RUNS]
    texts = [document.text for document in documents_of("train", load_corpus())]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIAL,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(texts + prompts + runs, trainer)

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=SPECIAL[PAD],
        eos_token=SPECIAL[END],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT
    return tokenizer


class Batches:
    """A supply of batches: int16 tokens (R, T), and a mask of the tokens to be learned."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int, batch_tokens: int):
        self.tokenizer = tokenizer
        self.batch_tokens = batch_tokens
        self.cache: dict[str, list[int]] = {}  # the tokens of each word
        self.rng = random.Random(seed)
        pieces = [
            str(tokenizer.decode([i])).strip() for i in range(len(SPECIAL) + 256, len(tokenizer))
        ]
        self.words = Words(self.rng, [piece for piece in pieces if piece.isalpha()])
        vocabulary = tokenizer.get_vocab()
        self.bytes = {byte: vocabulary[token] for byte, token in bytes_to_unicode().items()}

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text`, word by word: this tokenizer never joins words or lines."""
        ids: list[int] = []
        for word in text.replace("\n", " \n").split(" "):
            if word not in self.cache:
                self.cache[word] = self._encode_word(word)
            ids += self.cache[word]
        return ids

    def _encode_word(self, word: str) -> list[int]:
        """Return the tokens of a word, whose line break may stand in front of it."""
        if any(RAW <= ord(character) < RAW + 256 for character in word):
            return [self.bytes[ord(character) % RAW] for character in f" {word}"]

        ids: list[int] = self.tokenizer(word, add_special_tokens=False).input_ids

        # Within a text no space stands before a line break, as the tokenizer puts one here.
        if word.startswith("\n") and self.tokenizer.decode(ids[:1]) == " ":
            return ids[1:]
        return ids

    def row(self, length: int) -> tuple[list[int], int]:
        """Return the tokens of a lesson of at most `length`, and where learning starts.

        In a long row it fills a share of `SIZES`, unless it is an interleaving, whose size is
        bounded.
        """
        is_long = length > LONG
        skill = "arithmetic"
        if length > SHORTEST:
            shares = SHARES | {"interleave": INTERLEAVED[length]} if is_long else SHARES
            (skill,) = self.rng.choices(list(shares), list(shares.values()))

        is_strange = self.rng.random() < STRANGE.get(length, 0.0) and skill != "language"
        self.words.is_strange = is_strange
        fill, low, high = SIZES[is_strange]
        least = fill * length if is_long and skill != "interleave" else 0

        # How many tokens a lesson has is known only afterwards, so sizes are tried until one fits.
        while True:
            size = log_uniform(int(low * length) if is_long else 4, int(high * length), self.rng)
            tokens, start = self._tokens_of(lesson(skill, size, self.words))
            if least <= len(tokens) <= length:
                return tokens, start

    def _tokens_of(self, made: Lesson) -> tuple[list[int], int]:
        """Return the tokens of a lesson, and where learning starts: after the prompt."""
        prompt, answer = made
        head = [] if prompt is None else [USER, *self.encode(prompt), END, ASSISTANT]
        return [*head, *self.encode(answer), END], len(head)

    def batch(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of a batch, and which of them are learned: (R, T) each."""
        (length,) = self.rng.choices(list(LENGTHS), list(LENGTHS.values()))
        rows = self.batch_tokens // length
        tokens = np.zeros((rows, length), np.int16)
        learned = np.zeros((rows, length), bool)
        for row in range(rows):
            ids, start = self.row(length)
            tokens[row, : len(ids)] = ids
            learned[row, start : len(ids)] = True
        learned[:, 0] = False  # nothing predicts the first token
        return tokens, learned


def serve(batches: Batches, queue: Any) -> None:
    """Fill the queue with batches for ever, in a process of its own."""
    while True:
        queue.put(batches.batch())


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


def optimizers_of(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices between hidden states, and AdamW for the rest.

    Muon: https://kellerjordan.github.io/posts/muon/. The embedding is not among its matrices.
    """
    matrices = {
        name: p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name
    }
    rest = [p for name, p in model.named_parameters() if name not in matrices]
    return [
        torch.optim.Muon(matrices.values(), weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train(output: Path, steps: int, workers: int, seed: int) -> None:
    """Pretrain for `steps`; write the model, its tokenizer and recipe.json to `output`."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(seed)
    tokenizer = make_tokenizer(VOCABULARY)

    # The processes that make batches must be forked before torch computes anything.
    fork = multiprocessing.get_context("fork")
    queue = fork.Queue(maxsize=32)
    for worker in range(workers):
        batches = Batches(tokenizer, seed * 1000 + worker + 1, BATCH_TOKENS)
        fork.Process(target=serve, args=(batches, queue), daemon=True).start()

    model = build(len(tokenizer))
    model.to(torch.device(device))  # type: ignore[arg-type]  # wrapped without its types
    optimizers = optimizers_of(model)
    for layer in model.model.layers if device == "cuda" else ():
        layer.compile(dynamic=False)
    print(f"{model.num_parameters() / 1e6:.2f} M parameters on {device}", flush=True)

    tokens_learned = 0
    begun = time.time()
    for step in range(steps):
        factor = min(1.0, (step + 1) / WARMUP, (1 - step / steps) / DECAY)
        tokens_RT, learned_RT = (torch.from_numpy(each).to(device) for each in queue.get())
        model.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            # The tokens that are not learned are context: -100 leaves them out of the loss.
            targets_RT = tokens_RT.long().masked_fill(~learned_RT, -100)
            loss = model(tokens_RT.long(), labels=targets_RT, use_cache=False).loss
        loss.backward()

        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = RATE * factor
            optimizer.step()

        tokens_learned += tokens_RT.numel()
        if step % 1000 == 0:
            print(f"step {step}: loss {loss.item():.4f}, {time.time() - begun:.0f} s", flush=True)

    recipe = SHAPE | dict(
        vocabulary=VOCABULARY,
        batch_tokens=BATCH_TOKENS,
        rate=RATE,
        steps=steps,
        seed=seed,
        tokens=tokens_learned,
        seconds=round(time.time() - begun),
        hardware=torch.cuda.get_device_name() if device == "cuda" else "cpu",
        torch=str(torch.__version__),
    )
    model.to(torch.bfloat16)  # type: ignore[arg-type]  # wrapped without its types
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    (output / "recipe.json").write_text(json.dumps(recipe, indent=1) + "\n", "utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the flags, and train."""
    parser = argparse.ArgumentParser(
        prog="python -m tasks.make", description="Make the embedded model."
    )
    parser.add_argument("--output", type=Path, default="data/base_model")
    parser.add_argument("--steps", type=int, default=28_167, help="optimizer steps")
    parser.add_argument("--workers", type=int, default=12, help="processes that make lessons")
    parser.add_argument("--seed", type=int, default=0)
    train(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    main()
