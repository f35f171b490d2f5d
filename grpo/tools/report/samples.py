"""The groups of a step as compact JSON values, for a page that shows them: `packed(group, number,
pieces)`.

Every text is made harmless here (`grpo.text.visible`), and every completion is aligned with its
target here, so that there is one aligner. A text that several completions of a group share is
stored once.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from align.words import split_words, word_ends
from grpo.records import Completion, Group
from grpo.run.rollouts import summaries
from grpo.show.alignment import aligned, first_divergence
from grpo.text import escape_control

MARKS = {"match": "=", "substitute": "x", "delete": "-", "insert": "+"}
Pieces = Callable[[Sequence[int]], list[str | None]]


def packed(group: Group, number: int, pieces: Pieces | None = None) -> dict[str, Any]:
    """Return a group as JSON values.

    Its summary, "prompt", "target" (words), "texts" (the different ones: "words", "ops" as
    `run_lengths`, "divergence", "parts" of the score, and with `pieces` "logprobs" in hundredths
    of a nat, one a word) and "rows", a list a column with an entry a completion: its text's
    number, reward ...
    """
    texts: dict[
        tuple, dict[str, Any]
    ] = {}  # keyed by the tokens too: one text may be tokenised in two ways
    numbers: dict[tuple, list[int] | None] = {}  # of the words that the tokens of a text belong to
    rows: dict[str, list] = defaultdict(list)
    for sample, (completion, score) in enumerate(zip(group.completions, group.scores)):
        key = completion.text, completion.tokens
        if key not in texts:
            answer = group.texts[sample]
            numbers[key] = _word_numbers(completion, pieces) if pieces else None
            texts[key] = {
                "words": escape_words(answer),
                "ops": run_lengths(group.problem.target, answer),
                "divergence": first_divergence(group.problem.target, answer),
                "parts": _parts(score.parts),
            }
            if word_numbers := numbers[key]:
                texts[key]["logprobs"] = [
                    round(100 * sum(values))
                    for values in by_word(completion.logprobs, word_numbers, completion.text)
                ]
        advantage = group.advantages[sample] if group.advantages else None
        mean_advantage = fmean(advantage) if isinstance(advantage, list) else advantage
        row = {
            "text": list(texts).index(key),
            "reward": short(score.reward),
            "value": short(score.value),
            "exact": int(score.exact),
            "finish": completion.finish,
            "tokens": len(completion.tokens),
            "advantage": short(mean_advantage),
        }
        word_numbers = numbers[key]
        if isinstance(advantage, list) and word_numbers:
            row["credits"] = [
                short(fmean(values or [0.0]))
                for values in by_word(advantage, word_numbers, completion.text)
            ]
        for name, value in row.items():
            rows[name].append(value)
    prompt = group.problem.prompt
    summary = {name: short(value) for name, value in summaries([group])[0].items()}
    return {
        **summary,
        "group": number,
        "prompt": "\n".join(map(escape_control, prompt.split("\n"))),
        "target": escape_words(group.problem.target),
        "texts": list(texts.values()),
        "rows": rows,
    }


def escape_words(text: str) -> str:
    """Return the words of `text`, a blank between two, each unprintable character spelled out."""
    return " ".join(map(escape_control, split_words(text)))


def run_lengths(target: str, text: str) -> str:
    """Return a best alignment of `text` with `target` as run lengths: "=" right, "x" in the place
    of another, "-" missing, "+" too many.

    >>> run_lengths("the old grey owl", "the owl saw")
    '1=2-1=1+'
    """
    return "".join(
        f"{len(list(run))}{MARKS[kind]}"
        for kind, run in groupby(column.kind for column in aligned(target, text))
    )


def word_numbers(pieces: Sequence[str | None], text: str) -> list[int] | None:
    """Return for each token the number of the word of `text` in which its piece ends: the next
    word for a blank, the last one plus 1 after it.

    `pieces` are the texts that the tokens add (None: it comes with a later one). None when they
    are not those of `text`.

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
    """Return `word_numbers` of the completion's tokens, whose end token writes nothing."""
    if completion.finish != "stop":
        return word_numbers(pieces(completion.tokens), completion.text)
    return word_numbers([*pieces(completion.tokens[:-1]), None], completion.text)


def by_word(values: Sequence[float], numbers: Sequence[int], text: str) -> list[list[float]]:
    """Return the tokens' values gathered by word of `text`; those of tokens after the last word,
    such as the end token, are left out.
    """
    words: dict[int, list[float]] = defaultdict(list)
    for value, number in zip(values, numbers):
        words[number].append(value)
    return [words[number] for number in range(len(word_ends(text)))]


def pieces_of(run: Path) -> Pieces | None:
    """Return what tells the pieces of text of tokens, by the tokenizer of a checkpoint of the run;
    None where it has none.
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
    """Return a number with four significant digits, anything else as it is."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _parts(parts: Mapping[str, Any]) -> dict[str, Any]:
    return {
        escape_control(name): short(value)
        if isinstance(value, (int, float))
        else escape_control(str(value))
        for name, value in parts.items()
        if value is not None
    }
