r"""Read the answer of a completion: where it stands, and which number it is. And GSM8K.

Training and evaluation share these rules. Reasoning is not part of the answer: if the text has a
``</think>``, only what follows the last one is read, and a ``<think>`` that is never closed means
that there is no answer; one that the chat template opened counts as well.

`final_answer` is for completions that reason first. The answer is the first of these that the text
has:

1. what follows the last "Answer:" (or "The final answer:") at the beginning of a line, to the end
   of that line, or if that is empty, what 2 to 4 find below it, or the next line that is not empty;
2. the content of the last ``\boxed{...}``;
3. what follows the last ``####``, to the end of that line (the form of GSM8K);
4. what follows the last "answer is", to the end of that sentence (as in arXiv:2201.11903).

`integer_in` is for bare answers. The integer is looked for in the last box, else behind the last
"=", "answer:" or "is" before a number, else in the whole text.

A minus before a box belongs to it. All numbers in that place must have the same value; the reader
never picks one of several. Formulas that are not worked out (7 * 7), bounds (x < 7, at most 7),
denials (not 7, 7 is wrong), ±7 and multiples (7 dozen) are no numbers. Units are not read, and the
percent sign is one: 7% is 7.

docs/data-and-tasks.md compares it with math-verify.
"""

import re
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

from grpo.data.errors import UserError, shortened
from grpo.data.files import kind_of, read_jsonl
from grpo.tasks.base import Problem, Score, after_reasoning, key_of
from grpo.tasks.rows import Rows

# No answer is longer, and no number in one.
MAX_CHARACTERS = 1000
MAX_DIGITS = 100

_ANSWER = re.compile(
    r"^[ \t>*_#-]*(?:the[ ])?(?:final[ ])?answer[ \t*_]*:", re.IGNORECASE | re.MULTILINE
)
_SENTENCE = re.compile(r"\banswer is:?(.*?)(?:[.!](?!\S)|$)", re.IGNORECASE | re.MULTILINE)
_HASHES = re.compile(r"####(.*)$", re.MULTILINE)

# A sign, and what may stand between it and its number: brackets, marks and LaTeX's commands.
_DASH = r"\-‐‑−–"
_SIGN = rf"(?: [{_DASH}+] | \b (?: minus | negative ) \b )"
_OPEN = rf"(?: \\[a-z]+ | [^\w.,:;!?=<>%/{_DASH}+] | _ )*+"

# A brace. A box begins at the signs before it; a dash with space behind it is none of them: it is
# that of a list or a sentence, and in "60 - \boxed{8}" an operator.
_BRACE = re.compile(
    rf"""
    (?P<box>
        (?: (?<! [\w)}}] ) (?<! [\d)}}]\s )
            (?P<signs>
                (?: [{_DASH}+] | (?: \b (?: minus | negative ) | ± | \\(?:pm|mp) ) \s?+ ){{1,3}}
            )
            [\\$*_(\[]{{0,8}} )?
        \\boxed \s* )? \{{ | \}}
    """,
    re.VERBOSE | re.IGNORECASE,
)

# What the integer of a bare answer follows.
_MARKER = re.compile(
    r"(?<!not)(?<!not\s)(?<!never\s)(?:(?<![<>!~/])=|<answer>|\banswer\W{0,4}(?::|is\b)|\bequals\b"
    r"|\b(?:is|makes|gives)\b(?=[\W_]{0,8}\d))",
    re.IGNORECASE,
)

# A number with its sign and currency: 2 1/2, or with groups of three digits, a fraction part or a
# denominator.
_NUMBER = re.compile(
    rf"""
    (?P<signs> (?: {_SIGN} {_OPEN} )++ )?
    (?: (?P<whole> \d++ ) \s++ (?P<over> \d++ ) \s? / \s? (?P<under> \d++ )
      | (?P<digits> \d{{1,3}} (?P<joint> [,_ \u00a0\u2007\u2009\u202f] ) \d{{3}}
            (?: (?P=joint) \d{{3}} )* (?! \d ) (?: \.\d* )?
          | \d+ (?: \.\d* )? | \.\d+ )
        (?: \s? / \s? (?P<denominator> \d+ ) )? )
    """,
    re.VERBOSE | re.IGNORECASE,
)
_CALCULATION = re.compile(r"<<[^<>]*>>")  # of GSM8K: 9*2=<<9*2=18>>18
_TAG = re.compile(r"<<[^<>]*>>|</?[a-z|][^<>]*>", re.IGNORECASE)  # <b>, </s>, <<9*2=18>>
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))")
_AROUND = re.compile(r"\A[\s*_`$]+|(?<![\s*_`$.])[\s*_`$.]+\Z")
_MARKS = re.compile(r"\\(?:(?:text|mathrm|boxed|left|right)(?![a-z])|[,;!$%])|[{}*`]")
_UNIT_POWER = re.compile(r"(?<=m|t)\^?[23](?!\d)|(?<=\bin)\^?[23](?!\d)")  # m2, ft^2, in3

# What makes the value another one than that of the number which stands there.
_NO_ANSWER = re.compile(
    r"""
    # functions, powers and multiples
    \\? sqrt | \\ (?: pi | binom | log | ln | sin | cos | tan ) (?! [a-z] ) | [√∛π¼-¾⅐-⅞]
    | \d [⁰¹²³⁴-⁹] | \d (?: k | \s? bn | (?-i: \s? M | [BT] ) ) \b
    | \b (?: hundred | thousand | (?: [bm] | tr | quadr | quint ) illion | dozen ) s? \b
    | \b (?: twice | double | triple | half | root ) (?: \s+ of )? \s+ \W* \d
    | \b and \s+ a \s+ half \b
    # bounds
    | < | (?<! [-=] ) > | [≤≥⩽⩾≦≧≈±∓] | \d [+] \Z
    | \\ (?: [lg] (?: t | e | eq | eqslant ) | approx | pm | mp ) (?! [a-z] )
    | [+] \s? / \s? [-−–] | \b plus \s or \s minus \b
    | \b at \s+ (?: least | most ) \s+ \W* \d | \d \s+ at \s+ (?: least | most ) \b
    | \b or \s+ (?: more | less | fewer | greater | higher | lower | above | below ) \b
    | \b (?: (?: more | less | fewer | greater | higher | lower | larger | smaller | other )
            \s+ than (?: \s+ or \s+ equal \s+ to )?
        | over | under | above | below | up \s+ to ) \s+ \W* \d
    # denials
    | ≠ | [!~/] = | \\ neq? (?! [a-z] ) | n['’]t \b
    | \b (?: not | cannot | never | neither ) \b
    | \b (?: is | are | was ) \s+ (?: wrong | incorrect | false ) \b
    """,
    re.VERBOSE | re.IGNORECASE,
)

# What stands between the numbers of a formula: "9 + 9" is no 9.
_OPERATOR = re.compile(
    rf"""
    (?: [{_DASH}+×·÷/^] | \A : | \b (?: x | times | plus | minus | mod | choose | cdot | div ) )
    {_OPEN} \Z
    """,
    re.VERBOSE | re.IGNORECASE,
)
_PRODUCT = re.compile(r"(?<=\d)\s*\*\*?\s*(?=[-+$€£¥.]?\d)")  # no mark of bold text


def final_answer(text: str) -> str | None:
    r"""Return the answer in a completion that reasons first; None if there is none.

    >>> final_answer("6 times 7 is 42.\nAnswer: **42**.")
    '42'
    """
    said = after_reasoning(text)
    if said is None:
        return None
    places = []
    _, *after = _ANSWER.split(said)
    if after:
        line, *below = after[-1].split("\n")
        places = [line, *_marked("\n".join(below)), *below]
    return next(filter(None, map(_bare, [*places, *_marked(said)])), None)


def integer_in(text: str) -> tuple[int | None, str | None]:
    r"""Return the integer that a bare answer gives, or None and why there is none.

    >>> integer_in("37 + 15 = **1,052** apples"), integer_in("12 or 13")
    ((1052, None), (None, 'not one integer'))
    """
    said = after_reasoning(text)
    if said is None:
        return None, "open reasoning"
    place = _last_box(said)
    if place is None:
        said = _CALCULATION.sub(" ", said)
        place = said[max((found.end() for found in _MARKER.finditer(said)), default=0) :]
    if not re.search(r"\d", place):
        return None, "no number"
    number = number_of(place)
    if number is None or number.denominator != 1:
        return None, "not one integer"
    return int(number), None


def number_of(text: str) -> Fraction | None:
    r"""Return the number in an answer; None if it has none, or several.

    >>> number_of("$1,234.50"), number_of("9 * 2 = 18 dollars"), number_of("12 or 13")
    (Fraction(2469, 2), Fraction(18, 1), None)
    """
    if len(text) > MAX_CHARACTERS:
        return None
    text = _bare(_PRODUCT.sub(" × ", _TAG.sub(" ", text)))
    plain = _FRACTION.sub(r" \1\2/\3\4 ", text.replace("{,}", ","))
    plain = _MARKS.sub(" ", plain)
    if _NO_ANSWER.search(plain):
        return None

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
    signs = re.findall(_SIGN, found["signs"] or "+", re.VERBOSE | re.IGNORECASE)
    if len(signs) > 1:  # --7
        return None
    return value if signs == ["+"] else -value


def _marked(text: str) -> list[str]:
    """Return what the last box holds, and what follows the last "####" and the last "answer is"."""
    box = _last_box(text) or ""
    return [box, *_HASHES.findall(text)[-1:], *_SENTENCE.findall(text)[-1:]]


def _bare(answer: str) -> str:
    """Return an answer without emphasis or a box around it and without a full stop at its end."""
    before = None
    while answer != before:
        before = answer
        answer = _AROUND.sub("", answer)
        box = _last_box(answer)
        if box is not None and answer == f"\\boxed{{{box}}}":
            answer = box
    return answer


def _last_box(text: str) -> str | None:
    """Return the last box that is closed, the signs before it and its content; None without one."""
    last = None
    is_open: list[tuple[int, str | None]] = []  # where each open brace ends, the signs of a box
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            is_open.append((brace.end(), brace["box"] and (brace["signs"] or "")))
        elif is_open:
            start, signs = is_open.pop()
            if signs is not None and (last is None or start > last[0]):
                last = start, brace.start(), signs
    return None if last is None else last[2] + text[last[0] : last[1]]


# ---- GSM8K

INSTRUCTION = (
    'Think about it first. Then end with one line that begins with "Answer:" and holds the final '
    "answer alone."
)

# The reward of a wrong answer in the right form, as for countdown in TinyZero
# (github.com/Jiayi-Pan/TinyZero).
FORM = 0.1


def reward(completion: str, answer: str) -> float:
    """Return what a completion earns if `answer` is right."""
    found = final_answer(completion)
    if found is None:
        return 0.0
    return 1.0 if number_of(found) == number_of(answer) else FORM


class Gsm8k(Rows):
    """GSM8K (Cobbe et al. 2021, arXiv:2110.14168): word problems of primary school.

    `argument` is a folder with the published files train.jsonl and test.jsonl
    (github.com/openai/grade-school-math), whose answers end with ``#### N``. The test split is
    test.jsonl; a hash of the question puts a tenth of train.jsonl into the validation split.

    A right answer earns 1, another one FORM, none 0. It is right if its number equals the published
    one, exactly: 1,234 and 1234.0 are one number, and a unit or a currency sign does not matter.
    """

    name = "gsm8k"
    metric = "exact match"
    argument = "FOLDER, the folder of train.jsonl and test.jsonl"
    options = {}

    def __init__(self, argument: str):
        super().__init__(list(_rows(Path(argument))), reward_functions=[reward])
        self.from_python, self.python_functions, self.notes = False, {}, []

    @staticmethod
    def unended(problem: Problem, completion: str, score: Score) -> Score:
        """Return at most the score of a wrong answer, for one that the token budget cut off."""
        return Score(min(score.reward, FORM), score.parts)

    @staticmethod
    def explain(problem: Problem, completion: str, score: Score, reward: str | None) -> str:
        """Return how an answer earned its reward (see `grpo.tasks.registry.explain`)."""
        answer = shortened(final_answer(completion) or "")
        if score.reward == 0:
            return f"{score.reward:.3f} = no answer was found"
        if score.exact:
            return f"{score.reward:.3f} = the answer {answer} is right"
        return f"{score.reward:.3f} = there is an answer, {answer}, but it is wrong"


def _rows(folder: Path) -> Iterator[dict[str, str]]:
    """Yield the rows, those of the test split first: of equal questions the first is used."""
    for name in ("test", "train"):
        path = folder / f"{name}.jsonl"
        if kind_of(path) != "file":
            raise UserError(
                f"--task gsm8k:{folder}: no file {path}; get it from openai/grade-school-math"
            )
        for where, row in read_jsonl(path):
            question, solution = str(row.get("question", "")), str(row.get("answer", ""))
            _, hashes, answer = solution.rpartition("####")
            if not (question and hashes) or number_of(answer) is None:
                raise UserError(
                    f"{where}: is no line of GSM8K: a question, and an answer that ends with #### N"
                )
            is_validation = int(key_of("gsm8k", " ".join(question.split())), 16) % 10 == 0
            yield {
                "prompt": f"{question.rstrip()}\n\n{INSTRUCTION}",
                "answer": answer.strip(),
                "target": f"Answer: {answer.strip()}",
                "split": "validation" if name == "train" and is_validation else name,
            }
