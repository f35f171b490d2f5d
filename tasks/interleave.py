"""Interleave two texts word by word: from A = a1 a2 ... and B = b1 b2 ..., write a1 b1 a2 b2 ...

The prompt describes two processes that each keep their own place and take turns. The score is the
similarity of the completion with the true interleaving: the best Needleman-Wunsch alignment over
words, normalised to [0, 1]. The reward is a named shaping of that alignment, because plain
similarity rewards cheap strategies: copying one text alone scores 0.5. The default, `pairs`, aligns
the pairs of neighbouring words instead: one text alone has none of them and earns 0.
docs/rewards.md has a table of what such strategies earn.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from itertools import pairwise, repeat, takewhile
from operator import eq

import numpy as np

from grpo.align.needleman import (
    Alignment,
    normalise,
    nw_align_batch,
    nw_score_batch,
    prefix_scores,
    split_words,
    word_ends,
)
from grpo.data.corpus import Document, documents_of, load_corpus, load_foreign, load_texts
from grpo.data.errors import UserError
from grpo.tasks.base import SPLITS, Problem, Score, key_of

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
    """Return a1 b1 a2 b2 ...; the rest of a longer text follows."""
    both = min(len(a), len(b))
    return [word for pair in zip(a, b) for word in pair] + [*a[both:], *b[both:]]


class Interleave:
    """The main task. Problems are from the user's `texts`, a folder, or the embedded corpus."""

    name = "interleave"
    rewards: tuple[str, ...] = ("pairs", "prefix", "similarity")

    default_level = 25
    climbs = True
    metric = "similarity"
    level_unit = "words"
    wordings = (PROMPT, ONLY, TURNS)
    demonstrates = True  # the target is an answer worth showing, not only one that is right
    placeholders = {"a": lambda data: " ".join(data["a"]), "b": lambda data: " ".join(data["b"])}
    options = {
        "texts": "draw the problems from your own texts: the .txt and .md files of a folder and "
        "of all folders below; a tenth of them is held out for validation, a tenth for the test "
        "(default: the embedded corpus)"
    }

    @staticmethod
    def default_steps(level: int) -> int:
        """Return the training steps that suffice for the embedded model (runs/archive/LOG.md)."""
        return 60 if level <= 50 else 200

    @staticmethod
    def default_window(level: int) -> int:
        """Return the words of an answer's window in training (runs/decisions.md); 0: all words."""
        return 50 if level > 25 else 0

    def __init__(self, reward: str = rewards[0], texts: str | None = None):
        self.reward = reward
        self.texts = texts
        self._documents = load_texts(texts) if texts else load_corpus()

    @cached_property
    def _by_split(self) -> dict[str, list[Document]]:
        return {split: documents_of(split, self._documents) for split in SPLITS}

    def foreign(self, level: int) -> "Mapping[str, Interleave]":
        """Return the task on each foreign kind that has two texts of `level` words."""
        tasks = {}
        for kind, documents in load_foreign().items():
            task = copy(self)
            task._documents = documents
            task._by_split = {"train": [], "validation": [], "test": documents}
            if len(task._long_enough("test", level)) >= 2:
                tasks[kind] = task
        return tasks

    def make(self, level: int, split: str, rng: random.Random) -> Problem:
        """Return a problem with `level` words in each text: windows of two documents of `split`."""
        # With the user's own texts, missing evaluation texts are reported before training.
        for each in SPLITS if self.texts and split == "train" else (split,):
            if len(self._long_enough(each, level)) < 2:
                raise UserError(self._too_few(level, each))

        windows = []
        for document in rng.sample(self._long_enough(split, level), 2):
            start = rng.randrange(len(document.words) - level + 1)
            windows.append(document.words[start : start + level])
        return self.problem(*windows)

    def _long_enough(self, split: str, level: int) -> list[Document]:
        return [document for document in self._by_split[split] if len(document.words) >= level]

    def _too_few(self, level: int, split: str) -> str:
        """Return why `split` has no problem of `level` words, and what would be enough."""
        counts = ", ".join(f"{len(self._long_enough(each, level))} of {each}" for each in SPLITS)
        lengths = sorted(len(document.words) for document in self._by_split[split])
        most = lengths[-2] if len(lengths) >= 2 else 0  # a problem takes two documents
        return (
            f"--{f'texts {self.texts}' if self.texts else f'words {level}'}: of "
            f"{len(self._documents)} texts these have {level} words or more: {counts}; a problem "
            f"takes two of one split, and the {split} split allows at most --words {most}; give "
            "fewer words, or more --texts (fifty usually suffice)"
        )

    def problem(self, a: Sequence[str], b: Sequence[str]) -> Problem:
        """Return the problem of interleaving the words `a` and `b`."""
        a, b = ([normalise(word) for word in words] for words in (a, b))
        return Problem(
            task=self.name,
            level=max(len(a), len(b)),
            prompt=PROMPT.format(a=" ".join(a), b=" ".join(b)),
            target=" ".join(interleaved(a, b)),
            key=key_of(self.name, " ".join(a), " ".join(b)),
            data={"a": a, "b": b},
        )

    def window(self, problem: Problem, words: int, start: int) -> Problem:
        """Return the problem of writing `words` words of the answer, from number `start` on (see
        `grpo.tasks.base.Task`).
        """
        whole = interleaved(problem.data["a"], problem.data["b"])
        end = start + words
        part = {"begun": " ".join(whole[:start]), "goes_on": end < len(whole)}
        target = " ".join(whole[start:end])
        return replace(problem, target=target, data={**problem.data, **part})

    def is_enough(self, problem: Problem, text: str) -> bool:
        """Return whether `text` extends beyond the window of the problem, or has a wrong word under
        the reward `prefix` (see `grpo.tasks.base.Task`).
        """
        words, target = split_words(text), split_words(problem.target)
        if problem.goes_on and len(words) > len(target):
            return True
        whole = words if text[-1:].isspace() else words[:-1]  # the last may be unfinished
        return self.reward == "prefix" and _right_words(whole, target) < len(whole)

    def _in_window(self, problem: Problem, text: str) -> str:
        """Return `text` without the words behind the problem's window."""
        wanted = len(split_words(problem.target))
        ends = word_ends(text) if problem.goes_on else []
        return text[: ends[wanted - 1]] if len(ends) > wanted else text

    def key(self, problem: Problem) -> str:
        """Return the key of a stored problem, computed again from its two windows."""
        return self.problem(problem.data["a"], problem.data["b"]).key

    def sources(self) -> dict[str, str]:
        """Return the fingerprint of each document's words (see `grpo.tasks.base.sources_of`)."""
        return {document.title: key_of("", *document.words) for document in self._documents}

    def draft(self, problem: Problem) -> "Guess":
        """Return a guesser for speculative decoding (see `grpo.tasks.base.Task`)."""
        return Guess(problem.data["a"], problem.data["b"], begun=split_words(problem.begun))

    def score(self, problem: Problem, completions: Sequence[str]) -> list[Score]:
        """Return a Score for each completion.

        `value` is the similarity, `reward` its shaping. The `parts` are

        - `words` written, and the alignment's `matches`, `substitutions` and `gaps`;
        - `pairs`: the score of the best alignment of the pairs of neighbouring words;
        - `first_divergence`: the index of the first wrong word, None if there is none;
        - `trap`: see `TrapNames.name`; None above a similarity of 0.9; and its kind.
        """
        target = split_words(problem.target)
        target_pairs = list(pairwise(target))
        start = len(split_words(problem.begun))
        traps = TrapNames(problem.data["a"], problem.data["b"], target, start)

        # A policy that has learned the task writes the same text many times.
        completions = [self._in_window(problem, text) for text in completions]
        distinct = list(dict.fromkeys(completions))
        written = [split_words(text) for text in distinct]
        alignments = nw_align_batch([(words, target) for words in written])
        of_pairs = nw_score_batch([(list(pairwise(words)), target_pairs) for words in written])
        scored = map(self._score, written, repeat(traps), alignments, of_pairs.tolist())
        scores = dict(zip(distinct, scored))
        return [scores[text] for text in completions]

    def _score(
        self, words: list[str], traps: "TrapNames", alignment: Alignment, pairs: int
    ) -> Score:
        """Return the score of a completion of these `words`, see `score`."""
        target = traps.target
        kinds = [op.kind for op in alignment.ops]
        prefix = _right_words(words, target)
        exact = words == target
        longest = max(len(words), len(target))
        similarity = (alignment.score + longest) / (2 * longest) if longest else 1.0

        reward = similarity
        if self.reward == "prefix" and longest:
            reward = prefix / max(len(target), min(len(words), prefix + 1))
        elif self.reward == "pairs" and longest > 1:
            reward = (pairs + longest - 1) / (2 * longest - 2)

        # Sampling may have ended after the first wrong word, so the strategy is not known.
        is_cut = self.reward == "prefix" and prefix < len(words) <= prefix + 2
        trap = None if similarity > 0.9 or is_cut else traps.name(words, alignment)
        parts = {
            "words": len(words),
            "matches": kinds.count("match"),
            "substitutions": kinds.count("substitute"),
            "gaps": kinds.count("insert") + kinds.count("delete"),
            "pairs": pairs,
            "first_divergence": None if exact else prefix,
            "trap": trap,
            "trap_kind": "ignores a text" if trap in ONE_TEXT else None,
        }
        return Score(reward=float(reward), parts=parts, value=float(similarity), exact=exact)

    def unended(self, problem: Problem, completion: str, score: Score) -> Score:
        """Do not count the last word where all are right (see `grpo.tasks.base.Task`)."""
        if not score.exact:
            return score
        *before, _ = [0, *word_ends(completion)]
        (shorter,) = self.score(problem, [completion[: before[-1]]])
        return replace(score, reward=shorter.reward, value=shorter.value)

    def credits(
        self, problem: Problem, completions: Sequence[str]
    ) -> list[tuple[tuple[int, float], ...]]:
        """Return what each word of each completion earned (see `grpo.tasks.base.credits_of`).

        The i-th word earns V_i - V_(i-1), where V_i = v_i / max(i, words of the target) is the
        reward of the text so far, without a penalty for words that are still missing. P_i is from
        `prefix_scores`, S is the score of the whole alignment, and M the length of the longer of
        text and target. The last column, for missing words and constants, is settled at the end of
        the text, where an answer that the token budget cut off loses its last word (`unended`):

            reward      v_i                               reward - V_n
            prefix      words before the first wrong one  0
            similarity  P_i / 2                           1/2 + (S - P_n) / 2M
            pairs       P_(i-1) / 2, over pairs of words  1/2 + (S - P_(n-1)) / 2M

        For `pairs` all of these count pairs of neighbouring words; the last one ends at word i. The
        operations of the final alignment cannot be used, because the operation at a word may depend
        on later words.
        """
        target = split_words(problem.target)
        completions = [self._in_window(problem, text) for text in completions]
        distinct = list(dict.fromkeys(completions))
        written = [split_words(text) for text in distinct]
        if self.reward == "prefix":
            right = [_right_words(words, target) for words in written]
            points = [
                [2 * min(i, most) for i in range(len(words) + 1)]
                for words, most in zip(written, right)
            ]
        elif self.reward == "similarity":
            points = prefix_scores(written, target)
        else:
            pairs = [list(pairwise(words)) for words in written]
            points = prefix_scores(pairs, list(pairwise(target)))

        wanted = len(target) - (self.reward == "pairs")
        credits = {}
        for text, scores in zip(distinct, points):
            counted = max(scores) // 2 + 1 if self.reward == "prefix" else len(scores)
            values = [score / 2 / max(min(i, counted), wanted, 1) for i, score in enumerate(scores)]
            earned = [after - before for before, after in pairwise(values)]
            ends = word_ends(text)
            if self.reward == "pairs":
                earned = [0.0, *earned][: len(ends)]  # the first word ends no pair
            credits[text] = tuple(zip(ends, earned, strict=True))
        return [credits[text] for text in completions]

    @staticmethod
    def explain(problem: Problem, completion: str, score: Score, reward: str | None) -> str:
        """Return how a completion earned its reward, e.g. "0.190 = 4 right before the first error /
        21 written"; or "20 wanted", if that is longer.
        """
        parts = score.parts
        written, wanted = parts["words"], len(split_words(problem.target))
        longest = max(written, wanted)
        divisor = f"{written} written" if written > wanted else f"{wanted} wanted"
        if score.exact:
            why = f"all {written} words right"
        elif reward == "prefix":
            right = parts["first_divergence"]
            extra = "" if right < wanted else " and one too many"
            divisor = f"{wanted + bool(extra)} wanted{extra}"
            why = f"{right} right before the first error / {divisor}"
        elif reward == "pairs" and longest > 1:
            why = (
                f"({parts['pairs']} + {longest - 1}) / (2 × {longest - 1}); the similarity of the "
                "pairs of neighbouring words"
            )
        else:
            why = (
                f"({parts['matches']} right − {parts['substitutions']} replaced − {parts['gaps']} "
                f"missing or too many + {divisor}) / (2 × {longest})"
            )
        return f"{score.reward:.3f} = {why}"


def _right_words(words: Sequence[str], target: Sequence[str]) -> int:
    """Return the number of words before the first wrong one."""
    return sum(takewhile(bool, map(eq, words, target)))


# ---- traps

# Kinds of steps. B_LEADS is the most frequent case of OUT_OF_TURN: B is one word ahead.
KINDS = range(5)
ALONG_A, ALONG_B, IN_TURN, B_LEADS, OUT_OF_TURN = KINDS

RIGHT = "in turn"  # no trap
ALONE = ("copies A", "copies B", RIGHT, "B first", "turn lost")  # by kind
CHANGES = {
    (ALONG_A, ALONG_B): "A then B",
    (ALONG_B, ALONG_A): "B then A",
    (IN_TURN, ALONG_A): "runs on in A",
    (IN_TURN, ALONG_B): "runs on in B",
    (IN_TURN, OUT_OF_TURN): "turn lost",
}

# Traps that earn by one text alone.
ONE_TEXT = ("copies A", "copies B", "doubles A", "doubles B", "ignores A", "ignores B")

# A strategy must explain at least this share of the steps.
MIN_SHARE = 0.7

# A completion ignores a text of three words or more if it has at least HEEDED of the other's words,
# three or more, and of this one's IGNORED times that share at most: fillers match up to 12 %.
HEEDED = 0.4
IGNORED = 0.15


class TrapNames:
    """Names the cheap strategy (the trap) that a completion follows, if it follows one.

    Each pair of neighbouring words is a step. A step continues in A, continues in B, takes turns
    (as the target does), or takes turns with one text ahead of its place. A strategy is one kind of
    step throughout, or one kind up to some place and another kind after it. Shares of steps are
    robust: a single mistake changes one or two steps, whereas in a comparison place by place it
    would shift all later words. Other completions may have words of one text alone, e.g. A with a
    filler after each word.

    `target` begins at word `start` of the interleaving.
    """

    def __init__(self, a: Sequence[str], b: Sequence[str], target: list[str], start: int):
        self.a, self.b, self.target = a, b, target
        # The text of each word of the target.
        self.owners = interleaved("A" * len(a), "B" * len(b))[start : start + len(target)]
        self.words = {*a, *b}

    @cached_property
    def kinds(self) -> dict[tuple[str, str], int]:
        """For each (word, next word), a bit for each kind that this step can be."""
        kinds: dict[tuple[str, str], int] = defaultdict(int)

        def add(kind: int, words: Sequence[str], following: Sequence[str]) -> None:
            for step in zip(words, following):
                kinds[step] |= 1 << kind

        for kind, text in ((ALONG_A, self.a), (ALONG_B, self.b)):
            add(kind, text, text[1:])
            add(kind, text, text[2:])  # a word was left out
        add(IN_TURN, self.target, self.target[1:])

        # B is `lead` words ahead: word i of A is followed by word i + lead of B, then by word i + 1
        # of A.
        for lead in (-2, -1, 1, 2):
            for kind in (OUT_OF_TURN, B_LEADS) if lead == 1 else (OUT_OF_TURN,):
                add(kind, self.a[max(0, -lead) :], self.b[max(0, lead) :])
                add(kind, self.b[max(0, lead - 1) :], self.a[max(0, 1 - lead) :])
        return dict(kinds)

    def name(self, words: Sequence[str], alignment: Alignment) -> str | None:
        """Return the name of the trap that a completion of these `words` is in, or None.

        `alignment` is the best one with the target. A completion must not be nearly right.
        """
        matched = [op.j for op in alignment.ops if op.kind == "match" and op.j is not None]
        return self._cheap(words, matched) or self._ignoring(matched)

    def _ignoring(self, matched: Sequence[int]) -> str | None:
        """Return "ignores A" or "ignores B" if the words `matched` are nearly all of the other."""
        right, wanted = Counter(self.owners[j] for j in matched), Counter(self.owners)
        for text, other in ("AB", "BA"):
            share, of_other = (right[each] / max(1, wanted[each]) for each in (text, other))
            is_enough = share >= HEEDED and min(right[text], wanted[other]) >= 3
            if is_enough and of_other <= IGNORED * share:
                return f"ignores {other}"
        return None

    def _cheap(self, words: Sequence[str], matched: Sequence[int]) -> str | None:
        """Return the name of the strategy that most steps follow, or None."""
        if not words:
            return "empty"

        # A whole answer, after which the text continues.
        length = len(self.target)
        steps = pairwise(words[:length])
        in_turn = sum(self.kinds.get(step, 0) >> IN_TURN & 1 for step in steps)
        if len(words) > 1.1 * length and in_turn >= MIN_SHARE * length:
            return "runs on"

        known = [word for word in words if word in self.words]
        if len(known) < MIN_SHARE * len(words):
            return None

        once = [word for word, before in zip(known, [None, *known]) if word != before]
        strategy = self._strategy(once)
        if strategy == RIGHT:
            # Few words match the last quarter of the target.
            near_end = sum(j >= 0.75 * length for j in matched)
            stops = len(words) < 0.8 * length and near_end <= length / 8
            return "stops half way" if stops else None
        if strategy and len(known) >= 1.5 * len(once):
            return strategy.replace("copies", "doubles")
        return strategy

    def _strategy(self, words: Sequence[str]) -> str | None:
        """Return the name of the kind of most steps, or of the change that explains most of them,
        or None if neither explains enough.
        """
        steps = [self.kinds.get(step, 0) for step in pairwise(words)]
        if not steps:
            return RIGHT if words[:1] == self.target[:1] else None

        # counts[k]: how many of the first k steps are of each kind, (steps + 1, kinds).
        is_kind = np.array(steps)[:, None] >> np.array(KINDS) & 1
        counts = np.concatenate([np.zeros((1, len(KINDS)), int), is_kind.cumsum(axis=0)])
        total = counts[-1]
        enough = MIN_SHARE * len(steps)

        # The single strategy that explains most steps. If B leads in enough of them, that is its
        # name, although after a mistake some steps are out of turn in another way.
        alone = max(KINDS, key=lambda kind: total[kind])
        if alone == OUT_OF_TURN and total[B_LEADS] >= enough:
            alone = B_LEADS

        # The change of strategy that explains most steps, wherever it happens. It must explain more
        # than a single strategy does, by three steps at least: a mistake changes two.
        explained = {
            name: (counts[:, first] + total[then] - counts[:, then]).max()
            for (first, then), name in CHANGES.items()
        }
        best = max(explained, key=explained.__getitem__)
        if explained[best] >= max(enough, total.max() + max(3, 0.1 * len(steps))):
            return best
        return ALONE[alone] if total[alone] >= enough else None


# ---- drafts for speculative decoding

# A word of the texts: 0 for A or 1 for B, and the index of the word.
Spot = tuple[int, int]


class Guess:
    """Guesses the rest of an interleaving of the words `a` and `b`.

    It keeps track of the places in A and in B that the completion has reached. After a mistake (a
    word that is skipped, repeated or misspelt, a lost turn, a jump) it assumes that the policy
    continues from its new places and takes turns again.

    If no white space follows the last word of the text, the word may be unfinished, and the guess
    begins with its missing letters. If the next text continues the last one, only the new part is
    read. Copies are independent.

    >>> Guess(["Owls", "see."], ["It", "rains,"])("Owls Owls I")
    't see. rains,'
    """

    def __init__(self, a: Sequence[str], b: Sequence[str], begun: Sequence[str] = ()):
        self.texts = (a, b)
        self.begun = begun  # words before the text
        self.spots: dict[str, list[Spot]] = defaultdict(list)  # the places of each word
        for text, words in enumerate(self.texts):
            for place, word in enumerate(words):
                self.spots[word].append((text, place))
        self._start()

    def _start(self) -> None:
        """Go to the start of both texts. A begins, as if B had just had its turn."""
        self.read = ""  # the text that was followed, up to its last whole word
        self.places = (0, 0)  # the index of the next word of each text
        self.last = 1  # the text of the last word
        self._follow(self.begun)

    def __call__(self, text: str) -> str:
        """Return how the text is expected to continue."""
        is_unfinished = bool(text) and not text[-1].isspace()
        last = text.rsplit(None, 1)[-1] if is_unfinished else ""
        whole = text[: len(text) - len(last)]

        if not whole.startswith(self.read):
            self._start()
        self._follow(split_words(whole[len(self.read) :]))
        self.read = whole
        return " ".join(copy(self)._rest(normalise(last)))

    def _follow(self, words: Sequence[str]) -> None:
        """Write `words`; one that is in neither text counts as the expected word."""
        for word in words:
            self._write(self._find([word]) or self._expected())

    def _rest(self, letters: str) -> list[str]:
        """Return the words that are expected after the `letters` of a word."""
        rest = []
        if letters:
            spot = self._expected()
            if not (spot and self._word(spot).startswith(letters)):
                spot = self._find([word for word in self.spots if word.startswith(letters)])
            self._write(spot or self._expected())
            rest.append(self._word(spot)[len(letters) :] if spot else "")

        a, b = (text[place:] for text, place in zip(self.texts, self.places))
        return rest + (interleaved(a, b) if self.last else interleaved(b, a))

    def _word(self, spot: Spot) -> str:
        return self.texts[spot[0]][spot[1]]

    def _write(self, spot: Spot | None) -> None:
        """Write the word at `spot`, and continue after it."""
        if spot is None:
            return
        self.last, place = spot
        a, b = self.places
        self.places = (a, place + 1) if self.last else (place + 1, b)

    def _expected(self) -> Spot | None:
        """Return the place of the next word; None at the end of both texts."""
        for text in (1 - self.last, self.last):
            if self.places[text] < len(self.texts[text]):
                return text, self.places[text]
        return None

    def _find(self, words: Sequence[str]) -> Spot | None:
        """Return where one of `words` most likely is: at the place expected, else nearest to the
        places reached; None if nowhere.
        """
        expected = self._expected()
        if expected and self._word(expected) in words:
            return expected

        near = [spot for word in words for spot in self.spots.get(word, ())]
        return min(
            near, key=lambda spot: (abs(spot[1] - self.places[spot[0]]), spot[0]), default=None
        )
