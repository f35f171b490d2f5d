"""Interleave two texts word by word: from A = a1 a2 ... and B = b1 b2 ..., write a1 b1 a2 b2 ...

The prompt describes two processes that each keep their own place and take turns. The score is the
similarity of the completion with the true interleaving: the best Needleman-Wunsch alignment over
words, normalised to [0, 1] (`align.needleman.similarity`). The reward is a named shaping of that
alignment, because plain similarity rewards cheap strategies: copying one text alone scores 0.5. The
default, `pairs`, aligns the pairs of neighbouring words instead: one text alone has none of them
and earns 0. docs/rewards.md has a table of what such strategies earn.
"""

import copy
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise

from align.needleman import (
    Alignment,
    normalise,
    nw_align_batch,
    nw_score_batch,
    prefix_scores,
    split_words,
    word_ends,
)
from data.corpus import Document, fingerprint, load_corpus, load_foreign, load_texts, split_of
from data.errors import UserError
from tasks.base import SPLITS, Problem, Score, key_of
from tasks.drafts import Guess
from tasks.traps import IN_WORDS, TrapNames

PROMPT = (
    "Two processes each read a text, one word at a time, and each keeps its own place. They take "
    "turns: A writes its next word, then B writes its next word, until both are done. Do this all "
    "in one turn.\n"
    "A: {a}\n"
    "B: {b}"
)

# Further wordings, which the pre-flight tries for models other than the embedded one.
ONLY = PROMPT.replace("Do this all in one turn.", "Write only the resulting sequence of words.")
TURNS = (
    "Interleave the two texts word by word: first word of A, first word of B, second word of A, "
    "second word of B, and so on until both are done. Write only the resulting sequence of words.\n"
    "A: {a}\n"
    "B: {b}"
)


def interleaved(a: Sequence[str], b: Sequence[str]) -> list[str]:
    """Return a1 b1 a2 b2 ...; the rest of a longer text follows.

    >>> interleaved(["a", "b"], ["1", "2"])
    ['a', '1', 'b', '2']
    """
    both = min(len(a), len(b))
    return [word for pair in zip(a, b) for word in pair] + [*a[both:], *b[both:]]


def explain(problem: Problem, completion: str, score: Score, reward: str | None) -> str:
    """Return how a completion earned its reward, e.g. "0.190 = 4 right before the first error / 21
    written".

    What the division is by is named by the longer text: "21 written", or "20 wanted".
    """
    parts = score.parts
    earned = f"{score.reward:.3f}"
    if score.exact:
        return f"{earned} = all {parts['words']} words right"

    written, wanted = parts["words"], len(split_words(problem.target))
    longest = max(written, wanted)
    divisor = f"{written} written" if written > wanted else f"{wanted} wanted"
    counted = (
        f"{parts['matches']} right − {parts['substitutions']} replaced − {parts['gaps']} missing "
        "or too many"
    )
    if reward == "prefix":
        return f"{earned} = {parts['first_divergence']} right before the first error / {divisor}"
    if reward == "pairs" and longest > 1:
        most = longest - 1
        return (
            f"{earned} = ({parts['pairs']} + {most}) / (2 × {most}); the similarity of the pairs "
            "of neighbouring words"
        )
    return f"{earned} = ({counted} + {divisor}) / (2 × {longest})"


class Interleave:
    """The main task. `reward` is one of `rewards`.

    Problems are drawn from `documents`, from the user's `texts` (a folder or a file), or from the
    embedded corpus.
    """

    name = "interleave"
    rewards: tuple[str, ...] = ("pairs", "prefix", "similarity")

    default_level = 25
    climbs = True
    metric = "similarity"
    level_unit = "words"
    mistakes = IN_WORDS
    wordings = (PROMPT, ONLY, TURNS)
    demonstrates = True  # the target is an answer worth showing, not only one that is right
    placeholders = {
        "a": lambda data: " ".join(data["a"]),
        "b": lambda data: " ".join(data["b"]),
    }
    explain = staticmethod(explain)
    options = {
        "texts": "draw the problems from your own texts: the .txt and .md files of a folder and "
        "of all folders below; a tenth of them is held out for validation, a tenth for the test "
        "(default: the embedded corpus)"
    }

    @staticmethod
    def default_steps(level: int) -> int:
        """Return the training steps that suffice for the embedded model (runs/archive/LOG.md)."""
        return 60 if level <= 50 else 200

    def __init__(
        self,
        reward: str = rewards[0],
        documents: Sequence[Document] | None = None,
        texts: str | None = None,
    ):
        self.reward = reward
        self.texts = texts

        if documents is not None:
            self._documents = list(documents)
        else:
            self._documents = load_texts(texts) if texts else load_corpus()

    @cached_property
    def _by_split(self) -> dict[str, list[Document]]:
        """The documents of each split."""
        return {
            split: [document for document in self._documents if split_of(document) == split]
            for split in SPLITS
        }

    def foreign(self, level: int) -> "Mapping[str, Interleave]":
        """Return the task on each foreign kind of text (see `tasks.base.foreign_of`).

        A kind without two texts of `level` words is left out.
        """
        tasks = {}
        for kind, documents in load_foreign().items():
            task = copy.copy(self)
            task._documents = documents
            task._by_split = {"train": [], "validation": [], "test": documents}
            if len(task._long_enough("test", level)) >= 2:
                tasks[kind] = task
        return tasks

    def make(self, level: int, split: str, rng: random.Random) -> Problem:
        """Return a problem with `level` words in each text: windows of two documents of `split`.

        Raises UserError if the split has fewer than two documents of that many words. Training on
        the user's own texts needs two in each split.
        """
        # With the user's own texts, missing evaluation texts are reported before training.
        needed = SPLITS if self.texts and split == "train" else (split,)
        for each in needed:
            if len(self._long_enough(each, level)) < 2:
                raise UserError(self._too_few(level, each))

        first, second = rng.sample(self._long_enough(split, level), 2)
        a, b = _window(first, level, rng), _window(second, level, rng)
        return self.problem(a, b)

    def _long_enough(self, split: str, level: int) -> list[Document]:
        """Return the documents of `split` with at least `level` words."""
        return [document for document in self._by_split[split] if len(document.words) >= level]

    def _too_few(self, level: int, split: str) -> str:
        """Return why `split` has no problem of `level` words, and what would be enough."""
        counts = ", ".join(f"{len(self._long_enough(each, level))} of {each}" for each in SPLITS)
        lengths = sorted(len(document.words) for document in self._by_split[split])
        most = lengths[-2] if len(lengths) >= 2 else 0  # a problem takes two documents
        where = f"--texts {self.texts}" if self.texts else f"--words {level}"
        return (
            f"{where}: of {len(self._documents)} texts these have {level} words or more: {counts}; "
            f"a problem takes two of one split, and the {split} split allows at most --words "
            f"{most}; give fewer words, or more --texts (fifty usually suffice)"
        )

    def problem(self, a: Sequence[str], b: Sequence[str]) -> Problem:
        """Return the problem of interleaving the words `a` and `b`."""
        a, b = list(a), list(b)
        return Problem(
            task=self.name,
            level=max(len(a), len(b)),
            prompt=PROMPT.format(a=" ".join(a), b=" ".join(b)),
            target=" ".join(interleaved(a, b)),
            key=key_of(self.name, " ".join(a), " ".join(b)),
            data={"a": a, "b": b},
        )

    def key(self, problem: Problem) -> str:
        """Return the canonical key, computed again from the two windows."""
        return self.problem(problem.data["a"], problem.data["b"]).key

    def sources(self) -> dict[str, str]:
        """Return the fingerprint of each document by title (see `tasks.base.sources_of`).

        It depends on the words and not on their layout, like windows and splits.
        """
        return {document.title: fingerprint(document) for document in self._documents}

    def draft(self, problem: Problem) -> Guess:
        """Return a guess at the continuation of completions (see `tasks.base.Task`)."""
        return Guess(*([normalise(word) for word in problem.data[name]] for name in "ab"))

    def score(self, problem: Problem, completions: Sequence[str]) -> list[Score]:
        """Return a Score for each completion.

        `value` is the similarity, `reward` its shaping. The `parts` are

        - `words` written, and the alignment's `matches`, `substitutions` and `gaps`;
        - `pairs`: the score of the best alignment of the pairs of neighbouring words;
        - `first_divergence`: the index of the first wrong word, None if there is none;
        - `trap`: see `TrapNames.name`; None above a similarity of 0.9.
        """
        target = split_words(problem.target)
        target_pairs = list(pairwise(target))
        traps = TrapNames(problem.data["a"], problem.data["b"], target)

        # A policy that has learned the task writes the same text many times.
        distinct = list(dict.fromkeys(completions))
        written = [split_words(text) for text in distinct]
        alignments = nw_align_batch([(words, target) for words in written])
        of_pairs = nw_score_batch([(list(pairwise(words)), target_pairs) for words in written])
        scores = {
            text: self._score(words, target, traps, alignment, pairs)
            for text, words, alignment, pairs in zip(
                distinct, written, alignments, of_pairs.tolist()
            )
        }
        return [scores[text] for text in completions]

    def unended(self, problem: Problem, completion: str, score: Score) -> Score:
        """Return the score of an answer that the token budget cut off: where all words are right,
        the last one does not count (see `tasks.base.Task`).
        """
        if not score.exact:
            return score
        *before, _ = [0, *word_ends(completion)]
        (shorter,) = self.score(problem, [completion[: before[-1]]])
        return replace(score, reward=shorter.reward, value=shorter.value)

    def credits(
        self, problem: Problem, completions: Sequence[str]
    ) -> list[tuple[tuple[int, float], ...]]:
        """Return what each word of each completion earned (see `tasks.base.credits_of`).

        The i-th word earns V_i - V_(i-1), where V_i = v_i / max(i,
        words of the target) is the reward of the text so far, without a penalty for words that are
        still missing. P_i is from `align.needleman.prefix_scores`, S is the score of the whole
        alignment, and M the length of the longer of text and target. The last column, for missing
        words and constants, is settled at the end of the text:

            reward      v_i                               reward - V_n
            prefix      words before the first wrong one  0
            similarity  P_i / 2                           1/2 + (S - P_n) / 2M
            pairs       P_(i-1) / 2, over pairs of words  1/2 + (S - P_(n-1)) / 2M

        For `pairs` all of these count pairs of neighbouring words; the last one ends at word i.
        An answer that the token budget cut off loses its last word there as well (see `unended`).
        The operations of the final alignment cannot be used, because the operation at a word may
        depend on later words.
        """
        target = split_words(problem.target)
        distinct = list(dict.fromkeys(completions))
        credits = {}
        for text, values in zip(distinct, self._values(distinct, target)):
            earned = [after - before for before, after in pairwise(values)]
            credits[text] = tuple(zip(word_ends(text), earned, strict=True))
        return [credits[text] for text in completions]

    def _values(self, completions: Sequence[str], target: list[str]) -> Iterable[list[float]]:
        """Yield the rewards V_0, V_1, ... of each completion, see `credits`."""
        written = [split_words(text) for text in completions]
        if self.reward == "prefix":
            for words in written:
                right = _right_words(words, target)
                yield _shares([min(i, right) for i in range(len(words) + 1)], len(target))
        elif self.reward == "similarity":
            for scores in prefix_scores(written, target):
                yield _shares([score / 2 for score in scores], len(target))
        else:
            wanted = list(pairwise(target))
            of_pairs = prefix_scores([list(pairwise(words)) for words in written], wanted)
            for words, scores in zip(written, of_pairs):
                # The first word ends no pair.
                first = [0.0] if words else []
                yield first + _shares([score / 2 for score in scores], len(wanted))

    def _score(
        self,
        words: list[str],
        target: list[str],
        traps: TrapNames,
        alignment: Alignment,
        pairs: int,
    ) -> Score:
        """Return the score of a completion of these `words`.

        `pairs` is the score of the alignment of the pairs of words.
        """
        kinds = [op.kind for op in alignment.ops]
        prefix = _right_words(words, target)
        exact = words == target
        longest = max(len(words), len(target))
        similarity = (alignment.score + longest) / (2 * longest) if longest else 1.0

        reward = similarity
        if self.reward == "prefix" and longest:
            reward = prefix / longest
        elif self.reward == "pairs" and longest > 1:
            reward = (pairs + longest - 1) / (2 * longest - 2)

        parts = {
            "words": len(words),
            "matches": kinds.count("match"),
            "substitutions": kinds.count("substitute"),
            "gaps": kinds.count("insert") + kinds.count("delete"),
            "pairs": pairs,
            "first_divergence": None if exact else prefix,
            "trap": None if similarity > 0.9 else traps.name(words, alignment),
        }
        return Score(reward=float(reward), parts=parts, value=float(similarity), exact=exact)


def _window(document: Document, length: int, rng: random.Random) -> list[str]:
    """Return `length` words of a document in a row, from a random place on."""
    start = rng.randrange(len(document.words) - length + 1)
    return list(document.words[start : start + length])


def _right_words(words: Sequence[str], target: Sequence[str]) -> int:
    """Return the number of words before the first wrong one."""
    return next(
        (i for i, pair in enumerate(zip(words, target)) if pair[0] != pair[1]),
        min(len(words), len(target)),
    )


def _shares(values: Sequence[float], wanted: int) -> list[float]:
    """Return value number i, over i symbols, as a share of the longer of text and target."""
    return [value / max(i, wanted, 1) for i, value in enumerate(values)]
