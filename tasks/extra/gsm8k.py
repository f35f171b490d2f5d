r"""GSM8K (Cobbe et al. 2021, arXiv:2110.14168): word problems of primary school.

`--task gsm8k:FOLDER`, where the folder has the published files train.jsonl and test.jsonl
(github.com/openai/grade-school-math). Their answers end with ``#### N``. The test split is
test.jsonl; a hash of the question puts a tenth of train.jsonl into the validation split.

The answer of a completion (see `tasks.extra.reasoning`) is right if its number equals the published
one, exactly: 1,234 and 1234.0 and ``\frac{2468}{2}`` are one number. A unit or a currency sign
beside the number does not matter, and of "9 * 2 = 18" what follows the "=" counts. Different
numbers, a formula and a denial ("not 18") are no answer. A right answer earns 1, another one 0.1,
none 0.

Numbers are read here. math-verify was compared with this reader and left out;
docs/data-and-tasks.md says why, with figures.
"""

import random
import re
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

from data.errors import UserError
from data.files import kind_of, read_jsonl
from tasks.base import SPLITS, Problem, Score, key_of
from tasks.extra.reasoning import Reasoning, asking, bare, final_answer, scored

FILES = {"train": "train.jsonl", "test": "test.jsonl"}

# No number that answers a word problem is longer.
MAX_CHARACTERS = 1000
MAX_DIGITS = 100

# A number with its sign and currency: 2 1/2, or with groups of three digits, a fraction part or a
# denominator.
_NUMBER = re.compile(
    r"""
    (?P<sign> [-+−–] | \b (?: minus | negative ) \b )? \s? [$€£¥]? \s?
    (?: (?P<whole> \d++ ) \s++ (?P<over> \d++ ) \s? / \s? (?P<under> \d++ )
      | (?P<digits> \d{1,3} (?P<joint> [,_ \u00a0\u2007\u2009\u202f] ) \d{3}
            (?: (?P=joint) \d{3} )* (?! \d ) (?: \.\d* )?
          | \d+ (?: \.\d* )? | \.\d+ )
        (?: \s? / \s? (?P<denominator> \d+ ) )? )
    """,
    re.VERBOSE,
)
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))")
_MARKS = re.compile(r"\\(?:text|mathrm|boxed|left|right|[,;!$%])|[{}*`]")
_UNIT_POWER = re.compile(r"(?<=m|t)\^?[23](?!\d)|(?<=\bin)\^?[23](?!\d)")  # m2, ft^2, in3

# What makes the value another one than that of the number which stands there.
_NO_ANSWER = re.compile(
    r"""
    \\? sqrt | \\ (?: pi | binom | log | ln | sin | cos | tan ) (?! [a-z] ) | [√∛π¼-¾⅐-⅞]
    | \b (?: hundred | thousand | million | billion | trillion ) \b
    | \d [kK] \b | \d [²³] | (?<!\S)[<>]=?\s*\d | [≤≥≠≈]
    | \b (?: more | less | fewer | greater ) \s+ than \s+ \W? \d
    | \b (?: twice | double | triple | half ) (?: \s+ of )? \s+ \W? \d | \b and \s+ a \s+ half \b
    | \b (?: not | never ) \b | n['’]t \b
    """,
    re.VERBOSE | re.IGNORECASE,
)

# What stands between the numbers of a formula: "9 + 9" is no 9.
_OPERATOR = re.compile(
    r"""
    (?: [-+−–×·÷/^] | \A : | \b (?: x | times | plus | minus | mod | choose | cdot | div ) )
    \s* [$€£¥]? \s* \Z
    """,
    re.VERBOSE | re.IGNORECASE,
)
_PRODUCT = re.compile(r"(?<=\d)\s*\*\*?\s*(?=[-+$€£¥.]?\d)")  # no mark of bold text


class Gsm8k(Reasoning):
    """The task; `argument` is the folder of the published files."""

    name = "gsm8k"
    metric = "exact match"
    argument = ("FOLDER", "the folder of train.jsonl and test.jsonl")

    def __init__(self, argument: str):
        """Read the problems from the folder `argument`.

        Raises UserError if a file is missing or a line is not one of GSM8K.
        """
        folder = Path(argument)
        for name in FILES.values():
            if kind_of(folder / name) != "file":
                raise UserError(
                    f"--task gsm8k:{argument}: no file {folder / name}; get train.jsonl and "
                    "test.jsonl from github.com/openai/grade-school-math"
                )

        self._by_split: dict[str, list[Problem]] = {split: [] for split in SPLITS}
        seen: set[str] = set()
        for name in ("test", "train"):  # a question in both files belongs to the test split
            for where, row in read_jsonl(folder / FILES[name]):
                problem = _problem(where, row)
                if problem.key in seen:
                    continue
                seen.add(problem.key)
                is_validation = name == "train" and int(problem.key, 16) % 10 == 0
                self._by_split["validation" if is_validation else name].append(problem)

    def make(self, level: int, split: str, rng: random.Random) -> Problem:
        """Return a random problem of the split."""
        if level != 1:
            raise UserError(f"--level {level}: task gsm8k has level 1 alone")
        if not self._by_split[split]:
            raise UserError(f"--task gsm8k: there is no problem of the {split} split")
        return rng.choice(self._by_split[split])

    def score(self, problem: Problem, completions: Sequence[str]) -> list[Score]:
        """Return the score of each completion."""
        answers = [final_answer(completion) for completion in completions]
        right = number_of(problem.data["answer"])
        return scored([number_of(answer or "") == right for answer in answers], answers)

    def problems(self, split: str) -> list[Problem]:
        """Return all problems of a split."""
        return list(self._by_split[split])

    def family_size(self, level: int) -> int:
        """Return the number of problems, in all splits."""
        return sum(map(len, self._by_split.values()))

    def key(self, problem: Problem) -> str:
        """Return the key of a problem, computed again from its data."""
        return _key(problem.data["question"])

    def sources(self) -> dict[str, str]:
        """Return a fingerprint of the problems of each split."""
        return {
            f"gsm8k-{split}": key_of(*(one.key + one.data["answer"] for one in part))
            for split, part in self._by_split.items()
            if part
        }


def number_of(text: str) -> Fraction | None:
    r"""Return the number in an answer; None if it has none, or several.

    >>> number_of("$1,234.50"), number_of("9 * 2 = 18 dollars"), number_of("12 or 13")
    (Fraction(2469, 2), Fraction(18, 1), None)
    """
    if len(text) > MAX_CHARACTERS or _NO_ANSWER.search(text):
        return None
    text = bare(_PRODUCT.sub(" × ", text))
    plain = _FRACTION.sub(r" \1\2/\3\4 ", text.replace("{,}", ","))
    plain = _MARKS.sub(" ", plain)

    _, _, result = plain.rpartition("=")
    result = _UNIT_POWER.sub("", result)
    numbers = list(_NUMBER.finditer(result))
    for one, other in pairwise(numbers):
        start = max(other.start("whole"), other.start("digits"))  # one of them is -1
        if _OPERATOR.search(result[one.end() : start]):
            return None
    values = {_value(found) for found in numbers}
    return values.pop() if len(values) == 1 else None


def _value(found: re.Match[str]) -> Fraction | None:
    if len(found[0]) > MAX_DIGITS:
        return None
    whole, over, under = found["whole"], found["over"], found["under"]
    try:
        if whole is not None:
            value = int(whole) + Fraction(int(over), int(under))
        else:
            digits = re.sub(r"[^\d.]", "", found["digits"]).removesuffix(".")
            value = Fraction(digits) / int(found["denominator"] or 1)
    except ZeroDivisionError:
        return None
    return value if found["sign"] in (None, "+") else -value


def _problem(where: str, row: dict[str, Any]) -> Problem:
    """Return the problem in a line of a file. Raises UserError, which names it, if it is none."""
    question, solution = row.get("question"), row.get("answer")
    if not isinstance(question, str) or not isinstance(solution, str):
        raise UserError(
            f"{where}: is not a line of GSM8K; it needs question and answer, both texts"
        )

    _, hashes, answer = solution.rpartition("####")
    if not hashes or number_of(answer) is None:
        raise UserError(f"{where}: its answer does not end with #### and a number")

    data = {"question": question, "answer": answer.strip()}
    target = f"Answer: {answer.strip()}"
    return Problem("gsm8k", 1, asking(question), target, _key(question), data)


def _key(question: str) -> str:
    return key_of("gsm8k", " ".join(question.split()))
