"""One group of completions: its entry in samples.log, and each completion held against the target,
word by word.

Words are aligned as by Needleman and Wunsch, scored as the reward is (match 1, mismatch -1,
gap -1).
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from grpo.align.needleman import nw_align, split_words
from grpo.data.errors import escape_control, shortened
from grpo.records import Group, originals, row_of
from grpo.tasks.base import Problem
from grpo.tasks.registry import explain

MOST_SHOWN = 300  # characters of a prompt, or of a column of its row


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
        Column(kind, None if i is None else wanted[i], None if j is None else written[j])
        for kind, i, j in nw_align(wanted, written).ops
    ]


def question_of(problem: Problem) -> dict[str, str]:
    """Return the prompt, the answer so far in a window, and the other columns of a user's row, each
    on one line.
    """
    begun = {"begun": problem.begun} if problem.begun else {}
    texts = {"prompt": problem.prompt, **begun, **row_of(problem)}
    return {
        name: shortened(text if isinstance(text, str) else json.dumps(text), MOST_SHOWN)
        for name, text in texts.items()
    }


def question_and_answer(problem: Problem, text: str, most: int = 1 << 30) -> str:
    """Return lines of the question, of the right answer if there is one, and of what was written,
    each answer in at most `most` characters.
    """
    lines = [*question_of(problem).items(), ("wrote", shortened(text, most))]
    if problem.target.strip():
        lines.insert(-1, ("wanted", shortened(problem.target, most)))
    return "".join(f"  {name + ':':<8}{line}\n" for name, line in lines)


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


def best_and_worst(groups: Sequence[Group]) -> str:
    """Return the best and the worst sampled completion of a step, as samples.log has them."""
    samples = [
        (group.problem, score, completion)
        for group in originals(groups)
        for score, completion in zip(group.scores, group.completions, strict=True)
    ]
    text = ""
    for name, choose in (("best", max), ("worst", min)):
        problem, score, completion = choose(samples, key=lambda sample: sample[1].reward)
        text += (
            f"{name}: reward {score.reward:.4f}, score {score.value:.4f}, {completion.finish}, "
            f"level {problem.level}\n{question_and_answer(problem, completion.text)}"
        )
    return text


def reward_in_words(
    config: Mapping[str, Any], group: Group, sample: int, *, is_of_step: bool = True
) -> str:
    """Return how a completion earned its reward.

    E.g. "0.190 = 4 right before the first error / 21 written". A control experiment changes only
    the rewards of steps (`is_of_step`).
    """
    control = config.get("control") or "none"
    score = group.scores[sample]
    if is_of_step and control != "none":
        return f"{score.reward:.3f}, set by the control experiment {control}; not earned"

    task = config.get("task", group.problem.task)
    return explain(task, group.problem, group.texts[sample], score, config.get("reward"))
