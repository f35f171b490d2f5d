"""The most common mistake of wrong answers, in words.

A task names what goes wrong by the labels `trap` and `reason` in the parts of a score, and may say
in words what a label means (`tasks.base.mistakes_of`). Other mistakes are read from the completion.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from grpo.records import Completion, Group
from tasks.base import Problem, Score

# A text repeats itself if it has at least this many words, each of them twice on average.
REPEATED_WORDS = 8

# The labels in the parts of a score that name a mistake.
LABELS = ("trap", "reason")


def most_common_mistake(groups: Sequence[Group], words: Mapping[str, str]) -> str:
    """Return the most common mistake of the completions, e.g. "empty (31 of 44 wrong answers)".

    `words` says what the labels of the task mean. Returns "" if every answer is right.
    """
    mistakes = Counter(
        mistake_of(group.problem, completion, score, words)
        for group in groups
        for completion, score in zip(group.completions, group.scores)
        if not score.exact
    )
    if not mistakes:
        return ""
    (name, count), *_ = mistakes.most_common(1)
    wrong = mistakes.total()
    return f"{name} ({count} of {wrong} wrong answer{'s' * (wrong != 1)})"


def mistake_of(
    problem: Problem, completion: Completion, score: Score, words: Mapping[str, str]
) -> str:
    """Return what is wrong with a completion; the first of the causes that applies."""
    labels = [score.parts.get(name) for name in LABELS]
    label = next((label for label in labels if isinstance(label, str) and label), None)
    if label is not None:
        return words.get(label, label)

    written, wanted = completion.text.split(), problem.target.split()
    if not written:
        return "nothing is written"
    if completion.is_truncated:
        return "truncated at the token budget"
    if len(written) >= REPEATED_WORDS and 2 * len(set(written)) <= len(written):
        return "the text repeats itself"

    if len(wanted) > 1 and len(written) < len(wanted):
        return "words are missing"
    if len(wanted) > 1 and len(written) > len(wanted):
        return "words are added"
    return "a wrong word" if len(wanted) > 1 else "a wrong answer"
