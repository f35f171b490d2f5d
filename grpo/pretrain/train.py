"""How the embedded model was made: `python -m grpo.pretrain --output data/base_model`.

A small Llama with a byte-level BPE, both made from the training split of our own corpus and from
generated text (`grpo.pretrain.lessons`), in minutes on one GPU. Matrices are trained by Muon
(Jordan et al. 2024), the rest by AdamW. Rows hold one lesson each, in batches of equal length and
equal token count, so no lesson sees another.
"""

import argparse
import json
import multiprocessing
import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from data.corpus import documents_of, load_corpus
from grpo.pretrain import lessons as diet
from grpo.pretrain.muon import Muon

SPECIAL = ["<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"]
PAD, USER, ASSISTANT, END = range(4)
CHAT = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% "
    "endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# a digit is a token of its own
SPLIT = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LENGTHS = {
    48: 0.15,
    160: 0.19,
    320: 0.16,
    640: 0.16,
    1280: 0.16,
    3328: 0.18,
}  # row length in tokens: share of batches
LONG = 160  # tokens: rows beyond are filled, and rarely with interleavings
INTERLEAVED = {320: 0.15, 640: 0.15, 1280: 0.0, 3328: 0.0}  # share of them in long rows
FILL = 0.75  # of a long row, at least
SHORTEST = min(LENGTHS)  # rows of this length hold arithmetic, and no others do


def make_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Train the BPE on the training documents. Every text gets one space in front, so a word is
    the same tokens anywhere.
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
    words = diet.Words(random.Random(0), [])
    prompts = [
        diet.example(skill, 20, words).prompt or ""
        for skill in (*diet.SHARES, "arithmetic")
        for _ in range(200)
    ]
    texts = [document.text for document in documents_of("train", load_corpus())]
    bpe.train_from_iterator(
        texts + prompts,
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=SPECIAL,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=SPECIAL[PAD],
        eos_token=SPECIAL[END],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT
    return tokenizer


class Batches:
    """Serves batches: int16 tokens (rows, length) and a mask of what is learned. Words are
    tokenised once.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int, batch_tokens: int):
        self.tokenizer, self.batch_tokens = tokenizer, batch_tokens
        self.cache: dict[str, list[int]] = {}
        pieces = [
            str(tokenizer.decode([i])).strip() for i in range(len(SPECIAL) + 256, len(tokenizer))
        ]
        self.rng = random.Random(seed)
        self.words = diet.Words(self.rng, [piece for piece in pieces if piece.isalpha()])

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text`; lines and words are independent of each other under this
        tokenizer.
        """
        ids: list[int] = []
        for word in text.replace("\n", " \n").split(" "):
            if word not in self.cache:
                ids_of_word = self.tokenizer(word, add_special_tokens=False).input_ids
                if word.startswith(
                    "\n"
                ):  # drop the space that the tokenizer puts in front of every text
                    ids_of_word = (
                        ids_of_word[1:]
                        if self.tokenizer.decode(ids_of_word[:1]) == " "
                        else ids_of_word
                    )
                self.cache[word] = ids_of_word
            ids += self.cache[word]
        return ids

    def lesson(self, length: int) -> tuple[list[int], int, str]:
        """Return (tokens, where learning starts, skill) of a lesson that fits `length`, and fills
        a share `FILL` of a long row where the skill has a size.
        """
        shares = (
            diet.SHARES if length <= LONG else diet.SHARES | {"interleave": INTERLEAVED[length]}
        )
        skill = (
            self.rng.choices(list(shares), list(shares.values()))[0]
            if length > SHORTEST
            else "arithmetic"
        )
        least = FILL * length if length > LONG and skill != "interleave" else 0
        while True:
            size = diet.log_uniform(
                4 if length <= LONG else int(length / 3.5), int(length / 1.4), self.rng
            )
            lesson = diet.example(skill, size, self.words)
            head = (
                [] if lesson.prompt is None else [USER, *self.encode(lesson.prompt), END, ASSISTANT]
            )
            tokens = [*head, *self.encode(lesson.completion), END]
            if least <= len(tokens) <= length:
                return tokens, len(head), lesson.skill

    def batch(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of a batch and which of them are learned."""
        length = self.rng.choices(list(LENGTHS), list(LENGTHS.values()))[0]
        rows = self.batch_tokens // length
        tokens, learned = np.zeros((rows, length), np.int16), np.zeros((rows, length), bool)
        for row in range(rows):
            ids, start, _ = self.lesson(length)
            tokens[row, : len(ids)] = ids
            learned[row, start : len(ids)] = True
        learned[:, 0] = False
        return tokens, learned


def serve(batches: Batches, queue: Any) -> None:
    """Fill the queue with batches for ever; runs in a process of its own."""
    while True:
        queue.put(batches.batch())


def hidden_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return what the last layer says, (rows, length, width). Layer by layer, so that one compiled
    layer serves for all of them.
    """
    hidden = model.model.embed_tokens(tokens)
    places = torch.arange(tokens.shape[1], device=tokens.device)[None]
    turned = model.model.rotary_emb(hidden, places)
    for layer in model.model.layers:
        hidden = layer(
            hidden, attention_mask=None, position_ids=places, position_embeddings=turned
        )  # no mask: causal
    return hidden


def loss_of(
    model: Any, hidden: torch.Tensor, tokens: torch.Tensor, learned: torch.Tensor
) -> torch.Tensor:
    """Return, from what the last layer says, the mean cross-entropy of the tokens that are
    `learned`, given all before them.
    """
    logits = model.lm_head(model.model.norm(hidden))[:, :-1]
    targets = tokens[:, 1:].masked_fill(~learned[:, 1:], -100)
    return torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(), targets.reshape(-1)
    )


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # other shapes than those that are trained
def accuracy_by_skill(
    model: Any, batches: Batches, device: str, rows: int = 256
) -> dict[str, float]:
    """Return the teacher-forced greedy token accuracy of each skill on freshly made lessons of up
    to 320 tokens.
    """
    hits: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for length in (SHORTEST, 160, 320):
        for _ in range(rows // 64):
            lessons = [batches.lesson(length) for _ in range(64)]
            tokens = torch.zeros(64, length, dtype=torch.long)
            for row, (ids, _, _) in enumerate(lessons):
                tokens[row, : len(ids)] = torch.tensor(ids)
            guess = model(input_ids=tokens.to(device), use_cache=False).logits.argmax(-1).cpu()
            for row, (ids, start, skill) in enumerate(lessons):
                right = (
                    guess[row, start - 1 : len(ids) - 1] == tokens[row, start : len(ids)]
                    if start
                    else torch.zeros(0)
                )
                hits[skill][0] += int(right.sum())
                hits[skill][1] += len(right)
    return {
        skill: round(right / total, 4) for skill, (right, total) in sorted(hits.items()) if total
    }


def build(arguments: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return a new model of the size that was asked for."""
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


class Step:
    """One optimizer step on a batch: loss, gradients clipped at norm 1, Muon on the matrices,
    AdamW on the rest.

    On CUDA the whole of it is captured as one graph for each row length: a small model's step is a
    thousand small kernels, and the host would be slower in starting them than the GPU in running
    them.
    """

    def __init__(self, model: LlamaForCausalLM, device: str):
        self.model, self.device = model, device
        matrices = {
            name: p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name
        }
        rest = [p for name, p in model.named_parameters() if name not in matrices]
        self.rate = torch.zeros((), device=device)
        self.muon = Muon(matrices.values())
        self.adam = torch.optim.AdamW(
            rest,
            lr=self.rate,
            betas=(0.9, 0.95),
            weight_decay=0.0,
            capturable=device == "cuda",
        )
        self.loss_of = torch.compile(loss_of, dynamic=False) if device == "cuda" else loss_of
        for layer in model.model.layers if device == "cuda" else ():
            layer.compile(dynamic=False)
        self.graphs: dict[int, tuple] = {}
        self.pool = (
            torch.cuda.graph_pool_handle() if device == "cuda" else None
        )  # one memory: the graphs never run at once

    def __call__(self, tokens: np.ndarray, learned: np.ndarray, rate: float) -> torch.Tensor:
        """Take one step at this learning rate; return the loss."""
        batch = [torch.from_numpy(array).to(self.device) for array in (tokens, learned)]
        length = tokens.shape[1]
        if self.device == "cuda" and length not in self.graphs:
            self.graphs[length] = self.capture(batch)
        self.rate.fill_(rate)
        if self.device != "cuda":
            return self.compute(*batch)
        graph, places, loss = self.graphs[length]
        for place, array in zip(places, batch):
            place.copy_(array)
        graph.replay()
        return loss

    def prepare(self, batch_tokens: int, lengths: Sequence[int] = tuple(LENGTHS)) -> None:
        """Capture the steps of all row lengths before the clock starts; nothing is learned."""
        for length in lengths if self.device == "cuda" else ():
            rows = batch_tokens // length
            self.graphs[length] = self.capture(
                [
                    torch.zeros(rows, length, dtype=torch.int16, device=self.device),
                    torch.ones(rows, length, dtype=torch.bool, device=self.device),
                ]
            )
        for name, value in self.state().items():
            if not name.startswith("model."):
                value.zero_()  # what the warm-up left

    def capture(self, batch: Any) -> Any:
        """Return the graph of a step on batches of this shape, the places of its batch, and of its
        loss.
        """
        self.rate.zero_()  # to warm up takes steps, which must go nowhere
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.compute(*batch)
        torch.cuda.current_stream().wait_stream(side)
        self.model.zero_grad()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            loss = self.compute(*batch)
        return graph, batch, loss

    def compute(self, tokens: torch.Tensor, learned: torch.Tensor) -> torch.Tensor:
        """Take one step on a batch; return its loss."""
        self.model.zero_grad()
        with torch.autocast(self.device, torch.bfloat16):
            loss = self.loss_of(
                self.model, hidden_of(self.model, tokens.long()), tokens.long(), learned
            )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.muon.step(self.rate)
        self.adam.step()
        return loss.detach()

    def state(self) -> dict[str, torch.Tensor]:
        """Return every tensor that a later part of the training goes on from, by name; to be
        written in place.
        """
        state: dict[str, torch.Tensor] = {
            f"model.{name}": value for name, value in self.model.named_parameters()
        }
        state |= {f"muon.{i}": momentum for i, momentum in enumerate(self.muon.momenta)}
        for i, p in enumerate(self.adam.param_groups[0]["params"]):
            state |= {f"adam.{i}.{name}": value for name, value in self.adam.state[p].items()}
        return state

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Take over a state of `state`."""
        for i, p in enumerate(
            self.adam.param_groups[0]["params"]
        ):  # AdamW makes its state at its first step
            self.adam.state[p] = {
                name: state[f"adam.{i}.{name}"].to(self.device)
                for name in ("step", "exp_avg", "exp_avg_sq")
            }
        for name, value in self.state().items():
            value.data.copy_(state[name])


def train(arguments: argparse.Namespace) -> None:
    """Pretrain until the steps or minutes asked for are over; then save the model.

    With a state file, training can be done in parts: each continues where the last one stopped.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(arguments.seed)
    tokenizer = make_tokenizer(arguments.vocabulary)
    state = Path(arguments.state) if arguments.state else None
    counts: dict[str, Any] = dict(step=0, tokens=0, seconds=0.0)
    if state is not None and state.exists():
        counts = json.loads(state.with_suffix(".json").read_text())

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
        state.with_suffix(".json").write_text(json.dumps(counts))
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
    """Train, and count in `counts`, until all or this part is done; return whether all is."""
    before, start = counts["seconds"], time.time()
    while True:
        counts["seconds"] = before + time.time() - start
        progress = max(
            counts["step"] / arguments.steps, counts["seconds"] / (60 * arguments.minutes)
        )
        if progress >= 1 or time.time() - start > 60 * arguments.part_minutes:
            return progress >= 1

        # Warm-up over 100 steps; linear decay over the last 40 % of the run.
        rate = arguments.rate * min(1.0, (counts["step"] + 1) / 100, (1 - progress) / 0.4)
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
    """Write model, tokenizer and recipe to the output folder."""
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
        json.dumps(recipe | cost | {"torch": str(torch.__version__)}, indent=1) + "\n"
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the flags."""
    parser = argparse.ArgumentParser(
        prog="python -m grpo.pretrain", description=__doc__.splitlines()[0]
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
        "--steps", type=int, default=35_000, help="optimizer steps, unless --minutes end it first"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=1e9,
        help="learning rate and end follow the clock, if it is ahead",
    )
    parser.add_argument(
        "--part-minutes",
        type=float,
        default=1e9,
        help="stop here for now, and go on another time from --state",
    )
    parser.add_argument("--state", help="file (.safetensors) to stop at and to go on from")
    parser.add_argument("--workers", type=int, default=12, help="processes that make lessons")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)
