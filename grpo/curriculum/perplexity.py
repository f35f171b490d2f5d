"""The perplexity of a model on a few plain paragraphs: it tells a model that was converted wrongly
from one that merely cannot do the task.
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from grpo.curriculum.survey import LevelSurvey
from grpo.learn.logprobs import Distribution, token_logprobs
from grpo.model.encoding import encode
from grpo.model.policy import Policy

# The paragraphs are few, so that a broken model does not pass: token frequencies that are counted
# in the paragraphs themselves are harder to beat the fewer words they are counted in.
TEXTS = 3
WORDS = 250  # of each

MAX_NATS = 50.0  # a token; exp() of more is of no use


@dataclass(frozen=True)
class Perplexity:
    """How well a model predicts plain text: exp of the mean negative log-likelihood.

    `token` and `word` are the perplexity per token and per word. `unigram` is the perplexity per
    token of a model that knows only how often each token occurs in these paragraphs: the least that
    a model can have which ignores the order of words. A language model has less, SmolLM2-135M a
    quarter of it. With its query and key rows in the order of GGUF, or without its rotary
    embedding, SmolLM2-135M has more (runs/LOG.md). A single damaged layer does not show.
    """

    token: float
    word: float
    unigram: float
    texts: int
    tokens: int

    @property
    def is_language(self) -> bool:
        """Whether the model predicts plain text better than token frequencies do."""
        return self.token < self.unigram

    def line(self) -> str:
        """Return the figures as a sentence."""
        text = (
            f"perplexity on {self.texts} held-out text{'s' * (self.texts != 1)}: {self.token:,.0f} "
            f"per token, {self.word:,.0f} per word (token frequencies alone: {self.unigram:,.0f} "
            "per token)"
        )
        return text if self.is_language else f"{text}: no general language model"

    def warning(self, surveys: Sequence[LevelSurvey]) -> str:
        """Return a warning if the model may be broken, else "".

        A policy that solves problems is not broken, however badly it predicts prose: the embedded
        model was trained on nothing but the task.
        """
        if self.is_language or any(row.any_exact for row in surveys):
            return ""
        return (
            f"the model has a perplexity of {self.token:,.0f} per token on plain paragraphs, where "
            f"token frequencies alone have {self.unigram:,.0f}, and solves no problem: it is no "
            "language model, or was converted wrongly; compare it with the original before you "
            "train it"
        )


@torch.no_grad()
def measure_perplexity(policy: Policy, texts: Sequence[str]) -> Perplexity | None:
    """Return the perplexity of the policy on the first TEXTS of the `texts`, WORDS words of each.

    The chat template is not used. The first token of each text (the tokenizer's start token, if it
    has one) is given, not predicted. None if there is no text to predict.
    """
    encoded = [encode(policy.tokenizer, _beginning(text)).input_ids for text in texts[:TEXTS]]
    sequences = [ids[: policy.context] for ids in encoded if len(ids) > 1]
    if not sequences:
        return None

    targets = [token for ids in sequences for token in ids[1:]]
    packing = policy.pack(
        [tuple(ids[:1]) for ids in sequences], [tuple(ids[1:]) for ids in sequences]
    )
    logprobs, _ = token_logprobs(
        policy.predict(packing),
        policy.head,
        torch.tensor(targets, device=policy.device),
        Distribution(torch.ones(len(targets), device=policy.device)),
    )

    total = -logprobs.double().sum().item()
    words = sum(_words(policy, ids) for ids in sequences)
    return Perplexity(
        token=_exp(total / len(targets)),
        word=_exp(total / words),
        unigram=_exp(_entropy(targets)),
        texts=len(sequences),
        tokens=len(targets),
    )


def _beginning(text: str) -> str:
    """Return the first WORDS words of a text, with its white space as it is."""
    words = list(re.finditer(r"\S+", text))[:WORDS]
    return text[words[0].start() : words[-1].end()] if words else ""


def _words(policy: Policy, ids: Sequence[int]) -> int:
    """Return how many words the tokens write: fewer than the text has, if the context cut it."""
    text = policy.tokenizer.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return max(1, len(text.split()))


def _exp(nats: float) -> float:
    # In this order NaN, from a model whose logits are not finite, becomes MAX_NATS.
    return math.exp(min(MAX_NATS, nats))


def _entropy(tokens: Collection[int]) -> float:
    """Return the entropy of the tokens' frequencies, in nats."""
    counts = Counter(tokens).values()
    return -sum(count / len(tokens) * math.log(count / len(tokens)) for count in counts)
