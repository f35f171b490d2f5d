r"""Read the answer of a completion: where it stands, and which number it is.

Training and evaluation share these rules. Reasoning is not part of the answer: if the text has a
``</think>``, only what follows the last one is read, and a ``<think>`` that is never closed means
that there is no answer; one that the chat template opened counts as well.

`final_answer` is for completions that reason first. The answer is the first of these that the text
has:

1. what follows the last "Answer:" (or "The final answer:") at the beginning of a line, to the end
   of that line, or if that is empty, the last box below it or the next line that is not empty;
2. the content of the last ``\boxed{...}``;
3. what follows the last ``####``, to the end of that line (the form of GSM8K);
4. what follows the last "answer is", to the end of that sentence (as in arXiv:2201.11903).

`integer_in` is for bare answers. The integer is looked for in the last box, else behind the last
"=", "answer:" or "is" before a number, else in the whole text.

All numbers in that place must have the same value; the reader never picks one of several. Formulas
that are not worked out (7 * 7), bounds and denials are no numbers.
"""

import re
from fractions import Fraction
from itertools import pairwise

# No answer is longer, and no number in one.
MAX_CHARACTERS = 1000
MAX_DIGITS = 100

_ANSWER = re.compile(
    r"^[ \t>*_#]*(?:the[ ])?(?:final[ ])?answer[ \t*_]*:", re.IGNORECASE | re.MULTILINE
)
_SENTENCE = re.compile(r"\banswer is:?(.*?)(?:[.!](?!\S)|$)", re.IGNORECASE | re.MULTILINE)
_HASHES = re.compile(r"####(.*)$", re.MULTILINE)
_BRACE = re.compile(r"(\\boxed\s*)?\{|\}")
_THINKING = re.compile(r"<(/?)think(?:ing)?>", re.IGNORECASE)

# What the integer of a bare answer follows.
_MARKER = re.compile(
    r"(?<![<>!])=|<answer>|\banswer\W{0,4}(?::|is\b)|\bequals\b"
    r"|\b(?:is|makes|gives)\b(?=[\W_]{0,8}\d)",
    re.IGNORECASE,
)

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


def final_answer(text: str) -> str | None:
    r"""Return the answer in a completion that reasons first; None if there is none.

    >>> final_answer("6 times 7 is 42.\nAnswer: **42**.")
    '42'
    """
    said = _said(text)
    if said is None:
        return None
    places = (
        *_after_answer(said),
        _last_box(said),
        _last(_HASHES, said),
        _last(_SENTENCE, said),
    )
    return next(filter(None, (_bare(found or "") for found in places)), None)


def integer_in(text: str) -> tuple[int | None, str | None]:
    r"""Return the integer that a bare answer gives, or None and why there is none.

    >>> integer_in("37 + 15 = **1,052** apples"), integer_in("12 or 13")
    ((1052, None), (None, 'not one integer'))
    """
    said = _said(text)
    if said is None:
        return None, "open reasoning"
    place = _last_box(said)
    if place is None:
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
    if len(text) > MAX_CHARACTERS or _NO_ANSWER.search(text):
        return None
    text = _bare(_PRODUCT.sub(" × ", text))
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


def _said(text: str) -> str | None:
    """Return what follows the reasoning; None if the reasoning is not closed."""
    ends = [tag.end() for tag in _THINKING.finditer(text) if tag[1]]
    said = text[ends[-1] :] if ends else text
    return None if _THINKING.search(said) else said


def _after_answer(text: str) -> list[str | None]:
    """Return where an answer may stand after the last "Answer:"; [] if there is none."""
    _, *after = _ANSWER.split(text)
    if not after:
        return []
    line, *below = after[-1].split("\n")
    return [line] if _bare(line) else [_last_box("\n".join(below)), *below]


def _bare(answer: str) -> str:
    """Return an answer without emphasis or a box around it and without a full stop at its end."""
    before = None
    while answer != before:
        before = answer
        answer = answer.strip().strip("*_`$").removesuffix(".")
        box = _last_box(answer)
        if box is not None and answer == f"\\boxed{{{box}}}":
            answer = box
    return answer


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
