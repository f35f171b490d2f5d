"""The groups of a step as compact JSON, for the page that shows them.

Every text is escaped here (`grpo.data.errors.escape_control`). Every completion is aligned with its
target here, too, so that the page needs no aligner of its own. A text that several completions of a
group share is stored once.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from grpo.align.needleman import split_words, word_ends
from grpo.data.errors import escape_control, printable
from grpo.records import Group, summaries
from grpo.run.logs import MOST_TOKENS, tokenizer_of
from grpo.show.group import aligned, first_divergence, question_of, reward_in_words

# The kinds of columns in run lengths.
MARKS = {"match": "=", "plain": "=", "substitute": "x", "delete": "-", "insert": "+"}

# Token ids -> the text that each token adds, None if it comes with a later one.
Pieces = Callable[[Sequence[int]], list[str | None]]


def packed(
    group: Group, number: int, config: Mapping[str, Any], pieces: Pieces | None
) -> dict[str, Any]:
    """Return group `number` of a step as JSON values; `config` is that of the run.

    - "around": what the chat template puts before and after the prompt; None without `pieces`, or
      if the tokens do not hold the prompt as it is;
    - "view": how completions are shown: against the target ("alignment"), or "plain";
    - "texts": the distinct texts, see `_packed_text`;
    - "rows": a list for each column, with an entry for each completion: the number of its text, its
      reward and so on.
    """
    prompt = group.problem.prompt
    is_read = any("answer" in score.parts for score in group.scores)  # out of a longer text
    view = "alignment" if split_words(group.problem.target) and not is_read else "plain"
    texts: dict[tuple, dict[str, Any]] = {}
    numbers: dict[tuple, list[int] | None] = {}  # the word that each token of a text belongs to
    rows: dict[str, list] = defaultdict(list)
    for sample, (completion, score) in enumerate(zip(group.completions, group.scores)):
        # A text can be tokenised in two ways, and a judge can score it in two ways.
        key = (completion.text, completion.tokens, score.reward)
        if key not in texts:
            end = [None] * (completion.finish == "stop")  # a token that adds no text
            tokens = completion.tokens[: len(completion.tokens) - len(end)]
            numbers[key] = (
                word_numbers([*pieces(tokens), *end], completion.text) if pieces else None
            )
            formula = escape_control(reward_in_words(config, group, sample))
            texts[key] = _packed_text(group, sample, view, numbers[key]) | {"formula": formula}
        row = {"text": list(texts).index(key)} | _packed_row(group, sample, numbers[key])
        for name, value in row.items():
            rows[name].append(value)

    seen = "".join(piece or "" for piece in pieces(group.prompt)) if pieces else ""
    before, found, after = seen.rpartition(prompt)
    return {
        **{name: rounded(value) for name, value in summaries([group])[0].items()},
        "group": number,
        "view": view,
        "prompt": printable(prompt),
        "around": [printable(before), printable(after)] if found else None,
        "target": _words(group.problem.target),
        "row": [pair for pair in question_of(group.problem).items() if pair[0] != "prompt"],
        "texts": list(texts.values()),
        "rows": rows,
    }


def _packed_text(group: Group, sample: int, view: str, numbers: list[int] | None) -> dict[str, Any]:
    """Return the words of a text, the parts of its score, and what its `view` shows.

    The log-probabilities of words are in hundredths of a nat. "breaks" are the words that begin a
    line.
    """
    completion, answer = group.completions[sample], group.texts[sample]
    parts = group.scores[sample].parts
    shown = {
        escape_control(name): rounded(x) if isinstance(x, (int, float)) else escape_control(str(x))
        for name, x in parts.items()
        if x is not None
    }
    text: dict[str, Any] = {"words": _words(answer), "parts": shown}
    if view == "alignment":
        text["ops"] = run_lengths(group.problem.target, answer)
        text["divergence"] = first_divergence(group.problem.target, answer)
    else:
        lines = [len(split_words(line)) for line in answer.strip().split("\n")]
        text["breaks"] = list(accumulate(lines))[:-1]

    if numbers and not completion.is_demonstration:
        by_words = by_word(completion.logprobs, numbers, completion.text)
        text["logprobs"] = [round(100 * sum(values)) for values in by_words]
    return text


def _packed_row(group: Group, sample: int, numbers: list[int] | None) -> dict[str, Any]:
    completion, score = group.completions[sample], group.scores[sample]
    advantage = group.advantages[sample] if group.advantages else None
    row = {
        "reward": rounded(score.reward),
        "value": rounded(score.value),
        "exact": int(score.exact),
        "ending": completion.ending,
        "tokens": len(completion.tokens),
        "advantage": rounded(fmean(advantage) if isinstance(advantage, list) else advantage),
    }
    if isinstance(advantage, list) and numbers:
        by_words = by_word(advantage, numbers, completion.text)
        row["credits"] = [rounded(fmean(values or [0.0])) for values in by_words]
    return row


def _words(text: str) -> str:
    """Return the words of `text`, separated by spaces, with unprintable characters escaped."""
    return " ".join(map(escape_control, split_words(text)))


def run_lengths(target: str, text: str) -> str:
    """Return an optimal alignment of `text` with `target` as run lengths, see MARKS.

    >>> run_lengths("the old grey owl", "the owl saw")
    '1=2-1=1+'
    """
    runs = groupby(column.kind for column in aligned(target, text))
    return "".join(f"{len(list(run))}{MARKS[kind]}" for kind, run in runs)


# --- tokens and words -------------------------------------------------------------------------


def word_numbers(pieces: Sequence[str | None], text: str) -> list[int] | None:
    """Return for each token the number of the word of `text` in which its piece ends.

    A piece of spaces belongs to the next word. The result is None if the pieces do not make up
    `text`.

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


def by_word(values: Sequence[float], numbers: Sequence[int], text: str) -> list[list[float]]:
    """Return the values of tokens by word of `text`, without tokens after the last word."""
    words: dict[int, list[float]] = defaultdict(list)
    for value, number in zip(values, numbers):
        words[number].append(value)
    return [words[number] for number in range(len(word_ends(text)))]


def pieces_of(run: Path) -> Pieces | None:
    """Return a function from tokens to their pieces of text; None if the run has no checkpoint."""
    tokenizer = tokenizer_of(run)
    if tokenizer is None:
        return None
    from tokenizers.decoders import DecodeStream

    def pieces(tokens: Sequence[int]) -> list[str | None]:
        stream = DecodeStream(skip_special_tokens=False)
        return [stream.step(tokenizer, token) if token < MOST_TOKENS else None for token in tokens]

    return pieces


def rounded(value: Any) -> Any:
    """Return a float rounded to three decimals, as the page shows it; anything else unchanged.

    It is rounded only once, here. The page would round 0.1905, the first digits of 4 / 21, to
    0.191, while every other program shows 0.190.
    """
    return round(value, 3) if isinstance(value, float) else value
