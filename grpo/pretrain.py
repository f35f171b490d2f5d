"""How the embedded model was made: `python -m grpo.pretrain --output data/base_model`.

A small Llama with a byte-level BPE, both made from the training split of our own corpus and from generated text
(`tasks.diet`), in minutes on one GPU. Matrices are trained by Muon (Jordan et al. 2024), the rest by AdamW. Rows hold
one lesson each, in batches of equal length and equal token count, so no lesson sees another.
"""
import argparse
import json
import multiprocessing
import random
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from data.corpus import documents_of, load_corpus
from tasks import diet

SPECIAL = ["<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"]
PAD, USER, ASSISTANT, END = range(4)
CHAT = ("{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}")
SPLIT = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # a digit is a token of its own
LENGTHS = {48: 0.08, 160: 0.38, 320: 0.22, 640: 0.13, 1280: 0.09, 2560: 0.06, 4096: 0.04}  # row length in tokens: share of batches
SHORTEST = min(LENGTHS)  # rows of this length hold arithmetic, and no others do


def make_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Train the BPE on the training documents. Every text gets one space in front, so a word is the same tokens anywhere."""
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.Prepend(" ")
    bpe.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    bpe.decoder = decoders.ByteLevel()
    words = diet.Words(random.Random(0), [])
    prompts = [diet.example(skill, 20, words).prompt or "" for skill in (*diet.SHARES, "arithmetic") for _ in range(200)]
    texts = [document.text for document in documents_of("train", load_corpus())]
    bpe.train_from_iterator(texts + prompts, trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=SPECIAL, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token=SPECIAL[PAD], eos_token=SPECIAL[END],
                                        clean_up_tokenization_spaces=False)
    tokenizer.chat_template = CHAT
    return tokenizer


class Batches:
    """Serves batches: int16 tokens (rows, length) and a mask of what is learned. Words are tokenised once."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int, batch_tokens: int):
        self.tokenizer, self.batch_tokens = tokenizer, batch_tokens
        self.cache: dict[str, list[int]] = {}
        pieces = [tokenizer.decode([i]).strip() for i in range(len(SPECIAL) + 256, len(tokenizer))]
        self.rng = random.Random(seed)
        self.words = diet.Words(self.rng, [piece for piece in pieces if piece.isalpha()])

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text`; lines and words are independent of each other under this tokenizer."""
        ids: list[int] = []
        for word in text.replace("\n", " \n").split(" "):
            if word not in self.cache:
                ids_of_word = self.tokenizer(word, add_special_tokens=False).input_ids
                if word.startswith("\n"):  # drop the space that the tokenizer puts in front of every text
                    ids_of_word = ids_of_word[1:] if self.tokenizer.decode(ids_of_word[:1]) == " " else ids_of_word
                self.cache[word] = ids_of_word
            ids += self.cache[word]
        return ids

    def lesson(self, length: int) -> tuple[list[int], int, str]:
        """Return (tokens, where learning starts, skill) of a lesson that fits `length` and fills at least half of it
        where the skill has a size."""
        while True:
            skills = [skill for skill in diet.SHARES if length <= 320 or skill != "interleave"]
            skill = self.rng.choices(skills, [diet.SHARES[s] for s in skills])[0] if length > SHORTEST else "arithmetic"
            size = diet.log_uniform(4 if length <= 160 else int(length / 4), int(length / 1.4), self.rng)
            lesson = diet.example(skill, size, self.words)
            head = [] if lesson.prompt is None else [USER, *self.encode(lesson.prompt), END, ASSISTANT]
            tokens = [*head, *self.encode(lesson.completion), END]
            if len(tokens) <= length:
                return tokens, len(head), lesson.skill

    def batch(self) -> tuple[np.ndarray, np.ndarray]:
        length = self.rng.choices(list(LENGTHS), list(LENGTHS.values()))[0]
        rows = self.batch_tokens // length
        tokens, learned = np.zeros((rows, length), np.int16), np.zeros((rows, length), bool)
        for row in range(rows):
            ids, start, _ = self.lesson(length)
            tokens[row, :len(ids)] = ids
            learned[row, start:len(ids)] = True
        learned[:, 0] = False
        return tokens, learned


def serve(batches: Batches, queue):
    while True:
        queue.put(batches.batch())


def loss_of(model, tokens, learned):
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
    targets = tokens[:, 1:].masked_fill(~learned[:, 1:], -100)
    return torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), targets.reshape(-1))


@torch.no_grad()
def accuracy_by_skill(model, batches: Batches, device: str, rows: int = 256) -> dict[str, float]:
    """Return the teacher-forced greedy token accuracy of each skill on freshly made lessons of up to 320 tokens."""
    hits = defaultdict(lambda: [0, 0])
    for length in (SHORTEST, 160, 320):
        for _ in range(rows // 64):
            lessons = [batches.lesson(length) for _ in range(64)]
            tokens = torch.zeros(64, length, dtype=torch.long)
            for row, (ids, _, _) in enumerate(lessons):
                tokens[row, :len(ids)] = torch.tensor(ids)
            guess = model(input_ids=tokens.to(device), use_cache=False).logits.argmax(-1).cpu()
            for row, (ids, start, skill) in enumerate(lessons):
                right = guess[row, start - 1:len(ids) - 1] == tokens[row, start:len(ids)] if start else torch.zeros(0)
                hits[skill][0] += int(right.sum())
                hits[skill][1] += len(right)
    return {skill: round(right / total, 4) for skill, (right, total) in sorted(hits.items()) if total}


def build(arguments, tokenizer) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=arguments.width, intermediate_size=arguments.inner,
        num_hidden_layers=arguments.layers, num_attention_heads=arguments.heads, num_key_value_heads=arguments.kv_heads,
        max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=None, pad_token_id=PAD, eos_token_id=END)
    return LlamaForCausalLM(config)


def optimizers(model, rate: float):
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    rest = [p for name, p in model.named_parameters() if not (p.ndim == 2 and "embed" not in name)]
    return [torch.optim.Muon(matrices, lr=rate, weight_decay=0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)]


def train(arguments):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(arguments.seed)
    tokenizer = make_tokenizer(arguments.vocabulary)
    fork = multiprocessing.get_context("fork")  # the workers must exist before torch computes anything
    queue = fork.Queue(maxsize=32)
    for worker in range(arguments.workers):
        batches = Batches(tokenizer, arguments.seed * 1000 + worker + 1, arguments.batch_tokens)
        fork.Process(target=serve, args=(batches, queue), daemon=True).start()
    checks = Batches(tokenizer, arguments.seed * 1000, arguments.batch_tokens)
    model = build(arguments, tokenizer).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters / 1e6:.2f} M parameters on {device}, vocabulary {len(tokenizer)}", flush=True)
    steppers = optimizers(model, arguments.rate)
    fast_loss = torch.compile(loss_of, dynamic=False) if device == "cuda" else loss_of  # one graph for each row length
    start, seen = time.time(), 0
    for step in range(arguments.steps):
        progress = max(step / arguments.steps, (time.time() - start) / (60 * arguments.minutes))
        if progress >= 1:
            break
        for stepper in steppers:
            for group in stepper.param_groups:
                group["lr"] = arguments.rate * min(1.0, (step + 1) / 100, (1 - progress) / 0.4)
        tokens, learned = (torch.from_numpy(array).to(device) for array in queue.get())
        with torch.autocast(device, torch.bfloat16):
            loss = fast_loss(model, tokens.long(), learned)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad()
        seen += tokens.numel()
        if step % 500 == 0:
            accuracy = accuracy_by_skill(model, checks, device)
            print(json.dumps(dict(step=step, loss=round(loss.item(), 4), tokens=seen,
                                  seconds=round(time.time() - start), **accuracy)), flush=True)
    cost = dict(steps=step + 1, tokens=seen, seconds=round(time.time() - start),
                hardware=torch.cuda.get_device_name() if device == "cuda" else "cpu")
    print(json.dumps(dict(cost, **accuracy_by_skill(model, checks, device, rows=1024))), flush=True)
    save(model, tokenizer, arguments, cost)


def save(model, tokenizer, arguments, cost):
    output = Path(arguments.output)
    output.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(output)
    tokenizer.save_pretrained(output)
    recipe = {name: value for name, value in vars(arguments).items() if name not in ("output", "workers")}
    (output / "recipe.json").write_text(json.dumps(recipe | cost | {"torch": str(torch.__version__)}, indent=1) + "\n")


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="data/base_model")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--inner", type=int, default=768)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--batch-tokens", type=int, default=65536)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--steps", type=int, default=22_500, help="optimizer steps, unless --minutes end it first")
    parser.add_argument("--minutes", type=float, default=1e9, help="learning rate and end follow the clock, if it is ahead")
    parser.add_argument("--workers", type=int, default=12, help="processes that make lessons")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


if __name__ == "__main__":
    train(parse())
