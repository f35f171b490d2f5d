r"""Reasoning first, then the answer: how a prompt asks for it, and where the answer is found.

Reasoning is not part of the answer: if the text has a ``</think>``, only what follows the last one
is read, and a ``<think>`` that is never closed means that there is no answer; one that the chat
template opened counts as well. The answer is the first of these that the text has:

1. what follows the last "Answer:" (or "The final answer:") at the beginning of a line, to the end
   of that line, or of the text where an answer can take several lines. If nothing else is in that
   line, it is the last box below it, or the next line that is not empty; if nothing is below it
   either, that "Answer:" does not count;
2. the content of the last ``\boxed{...}``;
3. what follows the last ``####``, to the end of that line (the form of GSM8K);
4. what follows the last "answer is", to the end of that sentence (the form of the chains of thought
   of arXiv:2201.11903, by which models are often prompted).

Emphasis around it (``**``, ``$``, backquotes), a full stop at its end and a box around all of it
are removed, unless a right answer begins or ends so itself.
"""

import re
from collections.abc import Sequence

from data.text import shortened
from tasks.base import Problem, Score

INSTRUCTION = (
    'Think about it first. Then end with one line that begins with "Answer:" and holds the final '
    "answer alone."
)
# The same for an answer that can take several lines.
LINES_INSTRUCTION = (
    'Think about it first. Then end with "Answer:" and, in the lines after it, the final answer '
    "alone."
)

# The completion budget in tokens, unless --max-new-tokens gives one.
BUDGET = 256

# The reward of a wrong answer in the right form, as for countdown in TinyZero
# (github.com/Jiayi-Pan/TinyZero).
FORM = 0.1

_ANSWER = re.compile(
    r"^[ \t>*_#]*(?:the[ ])?(?:final[ ])?answer[ \t*_]*:", re.IGNORECASE | re.MULTILINE
)
_SENTENCE = re.compile(r"\banswer is:?(.*?)(?:[.!](?!\S)|$)", re.IGNORECASE | re.MULTILINE)
_HASHES = re.compile(r"####(.*)$", re.MULTILINE)
_BRACE = re.compile(r"(\\boxed\s*)?\{|\}")
_THINKING = re.compile(r"<(/?)think(?:ing)?>", re.IGNORECASE)


class Reasoning:
    """What the tasks share whose completions reason first."""

    rewards: tuple[str, ...] = ()
    default_level = 1
    level_unit = ""
    reads_reasoning = True

    def max_new_tokens(self, level: int) -> int:
        """Return the completion budget, unless --max-new-tokens gives one."""
        return BUDGET

    @staticmethod
    def unended(problem: Problem, completion: str, score: Score) -> Score:
        """Return the score of a completion that the token budget cut off: at most that of a wrong
        answer in the right form.
        """
        return Score(min(score.reward, FORM), score.parts)

    @staticmethod
    def explain(problem: Problem, completion: str, score: Score, reward: str | None) -> str:
        """Explain the score of an answer that is right, wrong or missing."""
        answer = score.parts.get("answer")
        earned = f"{score.reward:.3f}"
        if answer is None:
            return f"{earned} = no answer was found"
        answer = shortened(str(answer))
        if score.exact:
            return f"{earned} = the answer {answer} is right"
        if score.reward == FORM:
            return f"{earned} = there is an answer, {answer}, but it is wrong"
        if score.reward == 0:
            return f"{earned} = the answer {answer} earns nothing"
        return f"{earned} = the answer {answer} is partly right"


def asking(question: str, *, has_lines: bool = False) -> str:
    """Return the prompt that asks the model to reason about `question` and then to answer it.

    With `has_lines` the answer can take several lines.
    """
    return f"{question.rstrip()}\n\n{LINES_INSTRUCTION if has_lines else INSTRUCTION}"


def final_answer(text: str, right: str = "", *, has_lines: bool = False) -> str | None:
    r"""Return the answer in a completion; None if there is none.

    With `has_lines` an answer can take several lines. `right` is a right answer, whose marks are
    left (see `bare`).

    >>> final_answer("6 times 7 is 42.\nAnswer: **42**.")
    '42'
    """
    ends = [tag.end() for tag in _THINKING.finditer(text) if tag[1]]
    said = text[ends[-1] :] if ends else text
    if _THINKING.search(said):
        return None

    places = (
        *_after_answer(said, has_lines),
        _last_box(said),
        _last(_HASHES, said),
        _last(_SENTENCE, said),
    )
    return next(filter(None, (bare(found or "", right) for found in places)), None)


def bare(answer: str, right: str = "") -> str:
    """Return an answer without emphasis or a box around it and without a full stop at its end.

    A mark with which a `right` answer begins or ends may be part of the answer, and is left.
    """
    ends = right[:1] + right[-1:]
    marks = "".join(mark for mark in "*_`$" if mark not in ends)
    stop = "" if right.endswith(".") else "."
    before = None
    while answer != before:
        before = answer
        answer = answer.strip().strip(marks).removesuffix(stop)
        box = _last_box(answer)
        if box is not None and answer == f"\\boxed{{{box}}}":
            answer = box
    return answer


def scored(rights: Sequence[bool], answers: Sequence[str | None]) -> list[Score]:
    """Return a score for each completion: 1 if its answer is right, FORM if it has one, else 0."""
    scores = []
    for is_right, answer in zip(rights, answers, strict=True):
        of_wrong = FORM if answer is not None else 0.0
        scores.append(Score(1.0 if is_right else of_wrong, {"answer": answer}, exact=is_right))
    return scores


def _after_answer(text: str, has_lines: bool) -> list[str | None]:
    """Return where an answer may stand after the last "Answer:"; [] if there is none."""
    _, *after = _ANSWER.split(text)
    if not after:
        return []
    line, *below = after[-1].split("\n")
    if has_lines:
        return [after[-1]]
    return [line] if bare(line) else [_last_box("\n".join(below)), *below]


def _last(pattern: re.Pattern[str], text: str) -> str | None:
    found = pattern.findall(text)
    return found[-1] if found else None


def _last_box(text: str) -> str | None:
    """Return the content of the last box that is closed; None if there is none."""
    last = None
    is_open: list[tuple[int, bool]] = []  # where each open brace ends, and whether a box begins
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            is_open.append((brace.end(), brace[1] is not None))
        elif is_open:
            start, is_box = is_open.pop()
            if is_box and (last is None or start > last[0]):
                last = start, brace.start()
    return None if last is None else text[slice(*last)]
