"""The tokenizer of the embedded model, and batches of lessons in its tokens.

The tokenizer is a byte-level BPE, trained on the training split. A row holds one lesson, so no
lesson sees another. All rows of a batch have the same length, and all batches about the same number
of tokens.
"""

import random
import string
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from data.corpus import documents_of, load_corpus
from data.make.lessons import SHARES, Example, example
from data.make.texts import RAW, StrangeWords, Words
from data.strange import log_uniform

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
# a run is a few tokens to copy instead of many to count.
RUNS = (2, 4, 8, 16)

# How often each run is shown, which decides against how many words it takes a token.
SHOWN = 60

# The lengths of rows in tokens, and their shares of the batches.
LENGTHS = {48: 0.15, 160: 0.19, 320: 0.16, 640: 0.16, 1280: 0.16, 3328: 0.18}

# Rows of this length hold arithmetic, and no other rows do.
SHORTEST = min(LENGTHS)

# Rows with more tokens than this are filled, and rarely hold interleavings.
LONG = 160

# The least share of a long row that a lesson fills.
FILL = 0.75

# The share of interleavings in long rows, by their length.
INTERLEAVED = {320: 0.15, 640: 0.15, 1280: 0.0, 3328: 0.0}

# The share of strange lessons in rows of each length. They have more tokens a word than others.
STRANGE = {160: 0.3, 320: 0.3, 640: 0.3, 1280: 0.15, 3328: 0.0}

# The words of a strange lesson, by the tokens of a long row: at least, and at most.
STRANGE_SIZES = (1 / 25, 1 / 3)

# The least share of a long row that a strange lesson fills.
STRANGE_FILL = 0.5

# A byte-level BPE writes a byte that is no printable character of Latin-1 as one from 256 on.
_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTED]
BYTES = [chr(byte) if byte in _PRINTED else chr(256 + _OTHERS.index(byte)) for byte in range(256)]


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
    prompts = [
        example(skill, 20, words).prompt or ""
        for skill in (*SHARES, "arithmetic")
        for _ in range(200)
    ]
    runs = [f"{mark * length} " * SHOWN for mark in string.punctuation for length in RUNS]
    texts = [document.text for document in documents_of("train", load_corpus())]
    bpe.train_from_iterator(
        texts + prompts + runs,
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
    """A supply of batches: int16 tokens (rows, length), and a mask of the tokens to be learned."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int, batch_tokens: int):
        self.tokenizer = tokenizer
        self.batch_tokens = batch_tokens
        self.cache: dict[str, list[int]] = {}  # the tokens of each word
        pieces = [
            str(tokenizer.decode([i])).strip() for i in range(len(SPECIAL) + 256, len(tokenizer))
        ]
        self.rng = random.Random(seed)
        alphabetic = [piece for piece in pieces if piece.isalpha()]
        self.words = Words(self.rng, alphabetic)
        self.strange_words = StrangeWords(self.rng, alphabetic)
        vocabulary = tokenizer.get_vocab()
        self.bytes = [vocabulary[token] for token in BYTES]

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

    def lesson(self, length: int) -> tuple[list[int], int, str]:
        """Return the tokens of a lesson, where learning starts, and the skill.

        The lesson fits `length` tokens. In a long row it fills a share `FILL` (`STRANGE_FILL`),
        unless it is an interleaving, whose size is bounded.
        """
        is_long = length > LONG
        if length <= SHORTEST:
            skill = "arithmetic"
        else:
            shares = SHARES | {"interleave": INTERLEAVED[length]} if is_long else SHARES
            skill = self.rng.choices(list(shares), list(shares.values()))[0]

        is_strange = self.rng.random() < STRANGE.get(length, 0.0) and skill != "language"
        low, high = int(length / 3.5) if is_long else 4, int(length / 1.4)
        fill = FILL
        if is_strange:
            low = int(length * STRANGE_SIZES[0]) if is_long else 4
            high = int(length * STRANGE_SIZES[1])
            fill = STRANGE_FILL
        least = fill * length if is_long and skill != "interleave" else 0

        # How many tokens a lesson has is known only afterwards, so sizes are tried until one fits.
        while True:
            size = log_uniform(low, high, self.rng)
            lesson = example(skill, size, self.strange_words if is_strange else self.words)
            tokens, start = self._tokens_of(lesson)
            if least <= len(tokens) <= length:
                return tokens, start, f"{lesson.skill}, strange" if is_strange else lesson.skill

    def _tokens_of(self, lesson: Example) -> tuple[list[int], int]:
        """Return the tokens of a lesson, and where learning starts: after the prompt."""
        head: list[int] = []
        if lesson.prompt is not None:
            head = [USER, *self.encode(lesson.prompt), END, ASSISTANT]
        return [*head, *self.encode(lesson.completion), END], len(head)

    def batch(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of a batch, and which of them are learned: (rows, length) each."""
        length = self.rng.choices(list(LENGTHS), list(LENGTHS.values()))[0]
        rows = self.batch_tokens // length
        tokens = np.zeros((rows, length), np.int16)
        learned = np.zeros((rows, length), bool)
        for row in range(rows):
            ids, start, _ = self.lesson(length)
            tokens[row, : len(ids)] = ids
            learned[row, start : len(ids)] = True
        learned[:, 0] = False  # nothing predicts the first token
        return tokens, learned


def serve(batches: Batches, queue: Any) -> None:
    """Fill the queue with batches for ever, in a process of its own."""
    while True:
        queue.put(batches.batch())
