"""One group of completions, for everything that shows it.

`summaries` and `completion_record` are its records in files and JSON; `best_and_worst` is its entry
in samples.log; `group_lines` is its page in `python -m grpo.inspect`. The console, the trackers and
the report use the same names for classes, actions and advantages.

A completion is compared with its target word by word, by the alignment of Needleman and Wunsch,
scored as the reward is (match 1, mismatch -1, gap -1). Nothing depends on colour alone, because the
text has the marks of wdiff: `[-missing-]`, `{+added+}`, and both for a word that replaces another.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby
from statistics import fmean
from typing import Any, NamedTuple

from rich.text import Text

from align.needleman import nw_align
from align.words import split_words
from data.text import escape_control
from grpo.records import Group, sampled_groups

Record = Mapping[str, Any]

# The classes of groups, and the colour of those that show that training is stuck.
CLASS_STYLES = {
    "varied": "",
    "solved": "",
    "failed": "red",
    "identical": "bold red",
    "tied": "yellow",
    "masked": "yellow",
}

# What was done with a group, by its action.
DONE_TO = {
    "keep": "kept",
    "skip": "skipped",
    "resample": "resampled",
    "demonstrate": "shown the right answer",
}

STYLES = {"substitute": "bold magenta", "delete": "bold red", "insert": "bold blue"}
NAMES = {"match": "right", "substitute": "substituted", "delete": "missing", "insert": "added"}

# In a long run of right words, this many are shown at each end.
CONTEXT = 6


# --- records ----------------------------------------------------------------------------------


def summaries(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return the lines of groups.jsonl: each group of a step, without its texts."""
    return [
        {
            "group": number,
            "index": group.index,
            "attempt": group.attempt,
            "level": group.problem.level,
            "temperature": group.temperature,
            "class": group.class_name,
            "action": group.action,
            "trap": group.trap,
            "reward": fmean(group.rewards),
            "reward_std": group.reward_std,
            "value": fmean(score.value for score in group.scores),
            "exact": fmean(score.exact for score in group.scores),
            "distinct": len(set(group.texts)),
            "tokens": group.tokens,
        }
        for number, group in enumerate(groups)
    ]


def completion_record(group: Group, sample: int) -> dict[str, Any]:
    """Return the record of one completion of a group, as JSON values."""
    completion, score = group.completions[sample], group.scores[sample]
    return {
        "index": group.index,
        "attempt": group.attempt,
        "level": group.problem.level,
        "temperature": group.temperature,
        "class": group.class_name,
        "action": group.action,
        "key": group.problem.key,
        "prompt": group.problem.prompt,
        "target": group.problem.target,
        "text": completion.text,
        "finish": completion.finish,
        "is_demonstration": completion.is_demonstration,
        "num_tokens": len(completion.tokens),
        "tokens": list(completion.tokens),
        "logprobs": list(completion.logprobs),
        "reward": score.reward,
        "value": score.value,
        "exact": score.exact,
        "parts": dict(score.parts),
        "advantage": group.advantages[sample] if group.advantages else None,
    }


# --- a completion and its target --------------------------------------------------------------


class Column(NamedTuple):
    """One word of an alignment.

    `kind` is "match", "substitute", "delete" (`written` is None), "insert" (`wanted` is None), or
    "plain": there is no target text to compare with.
    """

    kind: str
    wanted: str | None
    written: str | None


def aligned(target: str, text: str) -> list[Column]:
    """Return a best alignment of the words of `text` with those of `target`, if it has any.

    >>> [column.kind for column in aligned("the old owl", "the owl saw")]
    ['match', 'delete', 'match', 'insert']
    """
    wanted, written = split_words(target), split_words(text)
    if not wanted:
        return [Column("plain", None, word) for word in written]
    return [
        Column(
            op.kind, None if op.i is None else wanted[op.i], None if op.j is None else written[op.j]
        )
        for op in nw_align(wanted, written).ops
    ]


def counts(columns: Sequence[Column]) -> str:
    """Return the number of words of each kind, e.g. "3 right, 1 missing"."""
    if not columns or columns[0].kind == "plain":  # an empty text without a target has none
        return f"{len(columns)} word{'s' * (len(columns) != 1)}"
    numbers = Counter(column.kind for column in columns)
    return ", ".join(
        f"{numbers[kind]} {name}"
        for kind, name in NAMES.items()
        if numbers[kind] or kind == "match"
    )


def first_divergence(target: str, text: str) -> str:
    """Return where the text first differs from its target; "" if it does not, or there is none.

    An example is "word 3: wrote 'saw' for 'owl'".
    """
    wanted, written = split_words(target), split_words(text)
    same = [x == y for x, y in zip(wanted, written)]
    at = same.index(False) if False in same else len(same)
    if not wanted or at == len(wanted) == len(written):
        return ""
    if at == len(written):
        return f"word {at + 1}: ended before '{escape_control(wanted[at])}'"
    instead = f"for '{escape_control(wanted[at])}'" if at < len(wanted) else "after the end"
    return f"word {at + 1}: wrote '{escape_control(written[at])}' {instead}"


def rendered(columns: Sequence[Column], *, whole: bool = False) -> Text:
    """Return the alignment as text.

    Unless `whole`, the middle of a long run of right words is replaced by their number.
    """
    pieces: list[Text] = []
    for right, same in groupby(columns, lambda column: column.kind in ("match", "plain")):
        run = list(same)  # neighbouring words that are all right, or all wrong
        words = [_word(column) for column in run]
        hidden = len(run) - 2 * CONTEXT
        if right and not whole and hidden > CONTEXT:
            what = "right" if run[0].kind == "match" else "more"
            words[CONTEXT:-CONTEXT] = [Text(f"… {hidden} {what} …", "dim")]
        pieces += words
    return Text(" ").join(pieces)


def _word(column: Column) -> Text:
    kind, wanted, written = column
    if kind in ("match", "plain"):
        return Text(escape_control(written or ""))
    missing = f"[-{escape_control(wanted)}-]" if wanted is not None else ""
    added = f"{{+{escape_control(written)}+}}" if written is not None else ""
    return Text(missing + added, STYLES[kind])


# --- text -------------------------------------------------------------------------------------


def best_and_worst(groups: Sequence[Group]) -> str:
    """Return the best and the worst sampled completion of a step, as samples.log has them."""
    samples = [
        (group, number) for group in sampled_groups(groups) for number in range(len(group.texts))
    ]
    rewards = [group.rewards[number] for group, number in samples]
    text = ""
    for name, reward in (("best", max(rewards)), ("worst", min(rewards))):
        group, number = samples[rewards.index(reward)]
        score, completion = group.scores[number], group.completions[number]
        text += (
            f"{name}: reward {score.reward:.4f}, score {score.value:.4f}, {completion.finish}, "
            f"level {group.problem.level}\n"
            f"  wanted: {escape_control(group.problem.target)}\n"
            f"  wrote:  {escape_control(completion.text)}\n"
        )
    return text


def group_lines(group: Group, reward_name: str = "", *, whole: bool = False) -> Iterator[Text]:
    """Yield a group as lines: prompt, target, figures, and each distinct text with its alignment.

    The texts with the highest rewards come first. Unless `whole`, runs of right words are
    shortened.
    """
    yield Text.assemble(("prompt  ", "bold"), escape_control(group.problem.prompt))
    if group.problem.target.strip():
        yield Text.assemble(("target  ", "bold"), escape_control(group.problem.target))
    (line,) = summaries([group])
    figures = (
        f", {done_to(line)}; reward {line['reward']:.3f} ± {line['reward_std']:.3f}, "
        f"{line['distinct']} distinct texts in {len(group.texts)} completions, temperature "
        f"{group.temperature:g}"
    )
    yield Text.assemble(("group   ", "bold"), class_of(line), figures)

    same_text = defaultdict(list)
    for sample in by_reward(group):
        same_text[group.texts[sample]].append(sample)
    for samples in same_text.values():
        yield Text("")
        yield from _completion_lines(group, samples, reward_name, whole)


def by_reward(group: Group) -> list[int]:
    """Return the numbers of a group's completions, highest reward first."""
    return sorted(range(len(group.rewards)), key=lambda sample: -group.rewards[sample])


def _completion_lines(
    group: Group, samples: Sequence[int], reward_name: str, whole: bool
) -> Iterator[Text]:
    """Yield the lines of the completions `samples`, which have the same text."""
    first = samples[0]
    completion, score = group.completions[first], group.scores[first]
    target = group.problem.target

    title = f"completion{'s' * (len(samples) > 1)} {', '.join(map(str, samples))}"
    reward = f" ({reward_name})" if reward_name else ""
    end = "truncated" if completion.is_truncated else "complete"
    if completion.is_demonstration:
        end = "the right answer, which was shown"
    yield Text.assemble(
        (title, "bold"),
        f"  reward {score.reward:.3f}{reward}, score {score.value:.3f}, advantage "
        f"{advantage_of(group, first)}, {len(completion.tokens)} tokens, {end}",
    )

    columns = aligned(target, completion.text)
    said = counts(columns)
    if target.strip():
        said += f"; {first_divergence(target, completion.text) or 'right to the end'}"
    parts = [
        f"{name} {value:.3g}"
        if isinstance(value, float)
        else f"{name} {escape_control(str(value))}"
        for name, value in score.parts.items()
        if value is not None
    ]
    yield Text("; ".join(filter(None, (said, ", ".join(parts)))), "dim")
    yield rendered(columns, whole=whole)


def classes_of(line: Record) -> Text:
    """Return the number of groups of each class in a step, the degenerate ones in colour."""
    numbers = {name: line.get(f"groups/class/{name}") for name in CLASS_STYLES}
    return Text(", ").join(
        Text(f"{number:g} {name}", CLASS_STYLES[name]) for name, number in numbers.items() if number
    )


def class_of(line: Record) -> Text:
    """Return the class of a group, in its colour."""
    return Text(line["class"], CLASS_STYLES.get(line["class"], ""))


def done_to(line: Record) -> str:
    """Return what was done with a group, e.g. "kept" or "skipped (try 3)"."""
    tries = f" (try {line['attempt'] + 1})" if line["attempt"] else ""
    return DONE_TO.get(line["action"], str(line["action"])) + tries


def advantage_range(group: Group) -> str:
    """Return the range of a group's advantages; "" if the group was not trained on."""
    numbers = list(
        chain.from_iterable(row if isinstance(row, list) else [row] for row in group.advantages)
    )
    return f"{min(numbers):+.2f} to {max(numbers):+.2f}" if numbers else ""


def advantage_of(group: Group, sample: int) -> str:
    """Return the advantage of a completion, or the range of its tokens' advantages."""
    if not group.advantages:
        return "none"
    advantage = group.advantages[sample]
    if isinstance(advantage, list):
        return f"{min(advantage):+.3f} to {max(advantage):+.3f} by token"
    return f"{advantage:+.3f}"
