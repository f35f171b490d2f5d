"""The tokenizer of the embedded model: a byte-level BPE, trained on the training split."""

import random
import string

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from data.corpus import documents_of, load_corpus
from data.make.lessons import SHARES, example
from data.make.words import Words

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
