"""The groups of a step as compact JSON, for the page that shows them.

Every text is escaped here (`data.text.escape_control`). Every completion is aligned with its target
here, too, so that the page needs no aligner of its own. A text that several completions of a group
share is stored once.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from align.words import split_words, word_ends
from data.text import escape_control
from grpo.records import Completion, Group
from grpo.run.rollouts import summaries
from grpo.show.alignment import aligned, first_divergence

# The kinds of columns in run lengths.
MARKS = {"match": "=", "plain": "=", "substitute": "x", "delete": "-", "insert": "+"}

# Token ids -> the text that each token adds, None if it comes with a later one.
Pieces = Callable[[Sequence[int]], list[str | None]]


def packed(group: Group, number: int, pieces: Pieces | None = None) -> dict[str, Any]:
    """Return group `number` of a step as JSON values.

    It has the group's summary, "prompt", "target" (words) and:

    - "texts": the distinct texts, each with "words", "ops" (see `run_lengths`), "divergence" (the
      first mistake), "parts" of the score and, with `pieces`, "logprobs": one for each word, in
      hundredths of a nat;
    - "rows": a list for each column, with an entry for each completion: the number of its text, its
      reward and so on.
    """
    # The tokens are part of the key, because a text can be tokenised in two ways.
    texts: dict[tuple, dict[str, Any]] = {}
    numbers: dict[tuple, list[int] | None] = {}  # the word that each token belongs to
    rows: dict[str, list] = defaultdict(list)

    for sample, completion in enumerate(group.completions):
        key = completion.text, completion.tokens
        if key not in texts:
            numbers[key] = _word_numbers(completion, pieces) if pieces else None
            texts[key] = _packed_text(group, sample, numbers[key])
        row = _packed_row(group, sample, list(texts).index(key), numbers[key])
        for name, value in row.items():
            rows[name].append(value)

    summary = {name: short(value) for name, value in summaries([group])[0].items()}
    return {
        **summary,
        "group": number,
        "prompt": "\n".join(map(escape_control, group.problem.prompt.split("\n"))),
        "target": escape_words(group.problem.target),
        "texts": list(texts.values()),
        "rows": rows,
    }


def _packed_text(group: Group, sample: int, numbers: list[int] | None) -> dict[str, Any]:
    """Return what `packed` stores of the text of a completion."""
    completion, answer = group.completions[sample], group.texts[sample]
    text: dict[str, Any] = {
        "words": escape_words(answer),
        "ops": run_lengths(group.problem.target, answer),
        "divergence": first_divergence(group.problem.target, answer),
        "parts": _parts(group.scores[sample].parts),
    }
    if numbers:
        by_words = by_word(completion.logprobs, numbers, completion.text)
        text["logprobs"] = [round(100 * sum(values)) for values in by_words]
    return text


def _packed_row(group: Group, sample: int, text: int, numbers: list[int] | None) -> dict[str, Any]:
    """Return what `packed` stores of a completion; `text` is the number of its text."""
    completion, score = group.completions[sample], group.scores[sample]
    advantage = group.advantages[sample] if group.advantages else None
    row = {
        "text": text,
        "reward": short(score.reward),
        "value": short(score.value),
        "exact": int(score.exact),
        "finish": completion.finish,
        "tokens": len(completion.tokens),
        "advantage": short(fmean(advantage) if isinstance(advantage, list) else advantage),
    }
    if isinstance(advantage, list) and numbers:
        by_words = by_word(advantage, numbers, completion.text)
        row["credits"] = [short(fmean(values or [0.0])) for values in by_words]
    return row


def escape_words(text: str) -> str:
    """Return the words of `text`, separated by spaces, with unprintable characters escaped."""
    return " ".join(map(escape_control, split_words(text)))


def run_lengths(target: str, text: str) -> str:
    """Return an optimal alignment of `text` with `target` as run lengths.

    "=" is a right word, "x" a word instead of another, "-" a missing word, "+" a word too many.
    Without a target every word is "=".

    >>> run_lengths("the old grey owl", "the owl saw")
    '1=2-1=1+'
    """
    return "".join(
        f"{len(list(run))}{MARKS[kind]}"
        for kind, run in groupby(column.kind for column in aligned(target, text))
    )


def word_numbers(pieces: Sequence[str | None], text: str) -> list[int] | None:
    """Return for each token the number of the word of `text` in which its piece ends.

    A piece of spaces belongs to the next word; after the last word, to that number plus 1. `pieces`
    are the texts that the tokens add, None if a text comes with a later token. The result is None
    if the pieces do not make up `text`.

    >>> word_numbers([" an", " o", "wl", None], " an owl")
    [0, 1, 1, 2]
    """
    if "".join(piece or "" for piece in pieces) != text:
        return None
    ends, numbers, at = word_ends(text), [], 0
    for piece in pieces:
        last = at + len((piece or "").rstrip())
        numbers.append(bisect_left(ends, last if last > at else at + 1))
        at += len(piece or "")
    return numbers


def _word_numbers(completion: Completion, pieces: Pieces) -> list[int] | None:
    """Return `word_numbers` of the completion's tokens; an end token adds no text."""
    if completion.finish != "stop":
        return word_numbers(pieces(completion.tokens), completion.text)
    return word_numbers([*pieces(completion.tokens[:-1]), None], completion.text)


def by_word(values: Sequence[float], numbers: Sequence[int], text: str) -> list[list[float]]:
    """Return the tokens' values, grouped by the word of `text` that they belong to.

    Tokens after the last word, such as the end token, are left out.
    """
    words: dict[int, list[float]] = defaultdict(list)
    for value, number in zip(values, numbers):
        words[number].append(value)
    return [words[number] for number in range(len(word_ends(text)))]


def pieces_of(run: Path) -> Pieces | None:
    """Return a function from tokens to their pieces of text, or None if the run has no checkpoint.

    It uses the tokenizer of the last checkpoint.
    """
    files = sorted((run / "checkpoints").glob("step-*/tokenizer.json"))
    if not files:
        return None
    from tokenizers import Tokenizer
    from tokenizers.decoders import DecodeStream

    tokenizer = Tokenizer.from_file(str(files[-1]))

    def pieces(tokens: Sequence[int]) -> list[str | None]:
        stream = DecodeStream(skip_special_tokens=False)
        return [stream.step(tokenizer, token) for token in tokens]

    return pieces


def short(value: Any) -> Any:
    """Return a float rounded to four significant digits, and anything else unchanged."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _parts(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a score that are not None, with texts escaped."""
    shown = {}
    for name, value in parts.items():
        if value is not None:
            is_number = isinstance(value, (int, float))
            shown[escape_control(name)] = short(value) if is_number else escape_control(str(value))
    return shown
