"""One group of completions, for everything that shows it.

`summaries` and `completion_record` are its records in files and JSON; `best_and_worst` is its entry
in samples.log; `group_lines` is its page in `python -m grpo.inspect`, and `why` says in sentences
what a completion earned and taught. The console, the trackers and the report use the same names.

A completion is compared with its target word by word, by the alignment of Needleman and Wunsch,
scored as the reward is (match 1, mismatch -1, gap -1). Nothing depends on colour alone, because the
text has the marks of wdiff: `[-missing-]`, `{+added+}`, and both for a word that replaces another.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby
from statistics import fmean
from typing import Any, NamedTuple

from rich.text import Text

from align.needleman import nw_align, split_words
from data.errors import escape_control
from grpo.config import WEIGHT_WORDS, WEIGHTED_BY
from grpo.records import CLASSES, WHY, Group
from tasks.registry import explain

Record = Mapping[str, Any]

# What was done with a group, by its action.
DONE_TO = {
    "keep": "kept",
    "skip": "skipped",
    "resample": "resampled",
    "demonstrate": "shown the right answer",
}

# The colours of words that are not right.
STYLES = {"substitute": "bold magenta", "delete": "bold red", "insert": "bold blue"}

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


def rendered(columns: Sequence[Column]) -> Text:
    """Return the alignment as text; the number of its words is the middle of a long right run."""
    pieces: list[Text] = []
    for right, same in groupby(columns, lambda column: column.kind in ("match", "plain")):
        run = list(same)  # neighbouring words that are all right, or all wrong
        words = [_word(column) for column in run]
        hidden = len(run) - 2 * CONTEXT
        if right and hidden > CONTEXT:
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
        (score.reward, group, score, completion)
        for group in groups
        if not group.has_demonstration
        for score, completion in zip(group.scores, group.completions, strict=True)
    ]
    text = ""
    for name, choose in (("best", max), ("worst", min)):
        _, group, score, completion = choose(samples, key=lambda sample: sample[0])
        text += (
            f"{name}: reward {score.reward:.4f}, score {score.value:.4f}, {completion.finish}, "
            f"level {group.problem.level}\n"
            f"  wanted: {escape_control(group.problem.target)}\n"
            f"  wrote:  {escape_control(completion.text)}\n"
        )
    return text


def group_lines(group: Group, reward_name: str = "") -> Iterator[Text]:
    """Yield a group as lines: prompt, target, figures, and each distinct text with its alignment.

    The texts with the highest rewards come first.
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
    yield Text.assemble(("group   ", "bold"), line["class"], figures)

    same_text = defaultdict(list)
    for sample in by_reward(group):
        same_text[group.texts[sample]].append(sample)
    for samples in same_text.values():
        yield Text("")
        yield from _completion_lines(group, samples, reward_name)


def by_reward(group: Group) -> list[int]:
    """Return the numbers of a group's completions, highest reward first."""
    return sorted(range(len(group.rewards)), key=lambda sample: -group.rewards[sample])


def _completion_lines(group: Group, samples: Sequence[int], reward_name: str) -> Iterator[Text]:
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

    said = []
    if target.strip():
        said.append(first_divergence(target, completion.text) or "right to the end")
    for name, value in score.parts.items():
        if value is not None:
            text = f"{value:.3g}" if isinstance(value, float) else escape_control(str(value))
            said.append(f"{name} {text}")
    if said:
        yield Text(", ".join(said), "dim")
    yield rendered(aligned(target, completion.text))


def classes_of(line: Record) -> str:
    """Return the number of groups of each class in a step, e.g. "5 varied, 2 solved"."""
    numbers = {name: line.get(f"groups/class/{name}") for name in CLASSES}
    return ", ".join(f"{number:g} {name}" for name, number in numbers.items() if number)


def done_to(line: Record) -> str:
    """Return what was done with a group, e.g. "kept" or "skipped (try 3)"."""
    tries = f" (try {line['attempt'] + 1})" if line["attempt"] else ""
    return DONE_TO.get(line["action"], str(line["action"])) + tries


def advantage_range(group: Group) -> str:
    """Return the range of a group's advantages; "" if the group was not trained on."""
    rows = [row if isinstance(row, list) else [row] for row in group.advantages]
    return f"{min(map(min, rows)):+.2f} to {max(map(max, rows)):+.2f}" if rows else ""


def advantage_of(group: Group, sample: int) -> str:
    """Return the advantage of a completion, or the range of its tokens' advantages."""
    if not group.advantages:
        return "none"
    advantage = group.advantages[sample]
    if isinstance(advantage, list):
        return f"{min(advantage):+.3f} to {max(advantage):+.3f} by token"
    return f"{advantage:+.3f}"


# --- why, in sentences that have the numbers that they are made of -----------------------------

NOT_FOR_TRAINING = "none: the completion was not sampled for training"


def why(
    config: Mapping[str, Any], groups: Sequence[Group], number: int, sample: int, kind: str = "step"
) -> dict[str, str]:
    """Return the sentences on "reward", "advantage" and "training" of a completion.

    It is completion `sample` of group `number`, in `groups` of a step's rollouts of a `kind`.
    """
    group = groups[number]
    is_of_step = kind in ("step", "failed")
    sentences = {
        "reward": reward_in_words(config, group, sample, is_of_step=is_of_step),
        "advantage": NOT_FOR_TRAINING,
        "training": NOT_FOR_TRAINING,
    }
    if kind == "step":
        sentences["advantage"] = advantage_in_words(config, groups, group, sample)
        sentences["training"] = training_in_words(config, groups, group, sample)
    return sentences


def reward_in_words(
    config: Mapping[str, Any], group: Group, sample: int, *, is_of_step: bool = True
) -> str:
    """Return how a completion earned its reward.

    E.g. "0.190 = 4 right before the first error / 21 written". Of the run's `config`, the keys
    `task`, `reward` and `control` are read. A control experiment changes only the rewards of steps
    (`is_of_step`).
    """
    control = config.get("control") or "none"
    score = group.scores[sample]
    if is_of_step and control != "none":
        return f"{score.reward:.3f}, set by the control experiment {control}; not earned"

    task = config.get("task", group.problem.task)
    return explain(task, group.problem, group.texts[sample], score, config.get("reward"))


def advantage_in_words(
    config: Mapping[str, Any], groups: Sequence[Group], group: Group, sample: int
) -> str:
    """Return how the reward became the advantage, e.g. "-0.523 = (0.190 - 0.471) / 0.537, ..."."""
    from grpo.learn.advantages import EPS, divisors  # imports torch, which takes seconds

    rewards = group.rewards
    mean = fmean(rewards)
    if not group.advantages:
        done = DONE_TO.get(group.action, "not trained on")
        if group.action in ("resample", "demonstrate"):
            done += ", see its next try"
        return (
            f"none: the group was {done} ({group.class_name}: "
            f"{WHY.get(group.class_name, 'its rewards vary')}); the mean of its {len(rewards)} "
            f"rewards is {mean:.3f}"
        )

    advantage = advantage_of(group, sample)
    if isinstance(group.advantages[sample], list):
        return f"{advantage}: each token has its own, by what its word added to the reward"

    # "batch" is over all groups that the step trained on.
    scale = config.get("scale", "group")
    trained = [each for each in groups if each.advantages] if scale == "batch" else [group]
    (divisor, *_) = divisors([each.rewards for each in trained], scale=scale)

    digits = _enough_digits(advantage, rewards[sample], mean, divisor)
    difference = f"({rewards[sample]:.{digits}f} - {mean:.{digits}f})"
    of_group = f"the reward less the mean of the group's {len(rewards)} rewards"
    if scale == "none":
        return f"{advantage} = {difference}: {of_group}"

    count = sum(len(each.rewards) for each in trained)
    whose = "their" if scale == "group" else f"the step's {count} trained rewards'"
    return (
        f"{advantage} = {difference} / {divisor:.{digits + 1}f}: {of_group}, over {whose} standard "
        f"deviation + {EPS:g}"
    )


def _enough_digits(advantage: str, reward: float, mean: float, divisor: float) -> int:
    """Return the decimals (one more for the divisor) that give the `advantage` again."""
    for digits in range(3, 17):
        difference = round(reward, digits) - round(mean, digits)
        if float(f"{difference / round(divisor, digits + 1):.3f}") == float(advantage):
            return digits
    return 3  # the stored advantage was computed in another way


def training_in_words(
    config: Mapping[str, Any], groups: Sequence[Group], group: Group, sample: int
) -> str:
    """Return whether the step trained on a completion, and with which weight."""
    completion = group.completions[sample]
    if group.action == "demonstrate":
        if sample == len(group.completions) - 1:
            return "no: the right answer took its place in the group's next try"
        return "in the group's next try, in which the right answer takes the last one's place"
    if not group.advantages:
        return "no: the group taught nothing"

    trained = [
        len(each.tokens)
        for each in chain.from_iterable(one.completions for one in groups if one.advantages)
    ]
    length, loss = len(completion.tokens), str(config.get("loss", "dapo"))
    weight = "weighted by the run's own loss"
    if loss in WEIGHTED_BY:
        numbers = {"rows": len(trained), "length": length, "tokens": sum(trained)}
        weight = f"each with weight 1 / {WEIGHT_WORDS[WEIGHTED_BY[loss]].format(**numbers)}"
    return f"yes, on its {length} tokens, {weight}{_effect(group.advantages[sample])}"


def _effect(advantage: float | list[float]) -> str:
    """Return what an update does to a completion of this advantage; "" if tokens differ."""
    if isinstance(advantage, list):
        return ""
    if advantage == 0:
        return "; its advantage is 0, so it taught nothing"
    sign, verb = ("positive", "raises") if advantage > 0 else ("negative", "lowers")
    return f"; its advantage is {sign}, so the update {verb} its probability"
