r"""The integer that a text answers with: one reading for training and evaluation alike, strict where a text is unclear.

Where it is looked for, the first of these that the text has (one place only, so further guesses elsewhere earn nothing):
1. the last ``\boxed{...}``, and in it by rule 2;
2. what follows the last ``=``, "equals", "answer is", "answer:" or ``<answer>``;
3. the whole text.
There the numbers must all be good and have one value; nothing is picked out of several. Refused are:

| reason | refused | but read |
|---|---|---|
| empty, no number | white space; "none"; digits glued to letters are words: "x2", "3rd", "42kg" | 42 kg, 42 m2, $42 |
| not an integer | 1.0, .5, 1.234, 1e5, 0x1F, 3/4, 42 %, 4 million, 37 + 15, 2-3, ``\frac{3}{4}``, ½, ≈4 | "It is 3." |
| malformed grouping | 12,34  1,2,3  1234,567  1,234 567  1_2 | 1,234  1 234  1_234  ``1{,}234``  ``1\,234`` |
| unclear sign | "- 42" (or a bullet?), --42, –42 (en dash), -(42), minus 42, ``-\boxed{42}`` | -42, +42, −42 (U+2212), -$42 |
| other digits | ٤٢, ４２: only 0 to 9 count | 007 is 7, -0 is 0 |
| several answers | "12 13 14", "12, 13", "12 or 13" | "52. Yes, 52." |
| open box | ``\boxed{4`` without its brace: cut off | |
| too long | more than MAX_CHARACTERS of text, MAX_DIGITS of digits (leading zeros count) | |

Groups are one to three digits, then groups of exactly three after one and the same separator: comma, underscore, one
space (also no-break, figure, thin). So "12 345" is 12345, though two numbers may have been meant; guesses listed like
that are worth one number. Percent and millions are refused because their value is not the number that stands there.
The time is linear in the length of the text.
"""

import re
from dataclasses import dataclass

__all__ = ["Answer", "extract", "MAX_CHARACTERS", "MAX_DIGITS"]

MAX_CHARACTERS = 100_000
MAX_DIGITS = 640  # up to here int() takes any digits, whatever sys.set_int_max_str_digits says


@dataclass(frozen=True)
class Answer:
    """What was read: ``Answer(1234, "1,234", None)``, or refused: ``Answer(None, "1.5", "not an integer")``.

    `span` is the raw piece of the text that was read or refused, "" where there is none; `reason` one of the table above.
    """

    value: int | None
    span: str
    reason: str | None


_SPACE = "[ \u00a0\u2007\u2009\u202f]"
_JOINT = r"(?:[,_]|\{,\}|\\,)"
_SIGN = "[-+−\u2010-\u2013\u207b\ufe63\uff0b\uff0d±∓]"
# Every loop is possessive (*+, ++), and a prefix that finds no number is passed over as a whole: else a run of n signs
# would be read again from each of its n places.
_PREFIX = rf"(?:{_SIGN}|[<>!]=|[≈~≤≥≠]|\b(?:minus|negative)\b)(?:{_SIGN}|[≈~≤≥≠$€£({{\[*_`]|[^\S\n]|\\[a-z]*+)*+"
_REST = r"\w*+(?:(?:[-+−./^]|\*(?!\*))\d\w*+)*+"  # of a word: x2, x_2, x-2, x/2
_TOKEN = re.compile(
    rf"""
    (?P<bad> \\(?:[cdt]?frac|sqrt|binom)(?![a-z]) | [¼-¾⅐-⅞√∛∜] | (?<!\.)\.\d++ )
  | (?P<prefix> {_PREFIX} )?+ (?P<body> \d++ (?: (?:{_JOINT}|\.)\d++ | {_SPACE}\d++(?![^\W_]) )*+ ) (?P<end>)
    _*+ (?P<word> \.e[-+−]?\d++ | [^\W_]{_REST} )?+
    (?: (?= (?:[^\S\n]|[*_`$\\)}}\]])*+
            (?P<scale> %|‰|\^|(?:percent|per[ ]cent|dozen|hundred|thousand|million|billion|trillion)\b) ) )?+
  | {_PREFIX} | \\[a-z]++ | [^\W\d_]{_REST}""",
    re.VERBOSE | re.IGNORECASE,
)
_GROUPED = re.compile(rf"\d+|\d{{1,3}}({_JOINT}|{_SPACE})\d{{3}}(?:\1\d{{3}})*")
_READABLE = re.compile(r"[-+−]?(?:\\?[$€£])?")  # of prefixes
_LITERAL = re.compile(r"\.?e[-+−]?\d+|0[xob]\w+", re.IGNORECASE)  # 1e5, 0x1F
_BOX = re.compile(rf"(?P<sign>{_SIGN}[^\S\n]*+[$({{*]*+)?\\f?boxed\s*+{{")
_MARKER = re.compile(
    r"(?<![<>!])=|\bequals\b|\banswer\b\W{0,8}?(?:\bis\b|:)|<answer>", re.IGNORECASE
)
_OPERATORS = {
    "/",
    "÷",
    "*",
    "×",
    "·",
    "⋅",
    "^",
    ":",
    "x",
    "X",
    "times",
    "cdot",
    "div",
    "mod",
}  # and prefixes


def extract(text: str) -> Answer:
    r"""Return the integer that `text` answers with, or why there is none.

    >>> extract("37 + 15 = **1,052** apples")
    Answer(value=1052, span='1,052', reason=None)
    >>> extract("12, 13, 14")
    Answer(value=None, span='12, 13, 14', reason='several answers')
    """
    if len(text) > MAX_CHARACTERS:
        return Answer(None, "", "too long")
    if not text.strip():
        return Answer(None, "", "empty")
    box = _last(_BOX, text)
    if box:
        end = _closing_brace(text, box.end())
        if end is None:
            return Answer(None, text[box.start() :], "open box")
        if box["sign"]:
            return Answer(None, text[box.start() : end + 1], "unclear sign")
        text = text[box.end() : end]
    marker = _last(_MARKER, text)
    return _read(text[marker.end() :] if marker else text)


def _last(pattern: re.Pattern, text: str) -> re.Match | None:
    match = None
    for match in pattern.finditer(text):
        pass
    return match


def _closing_brace(text: str, start: int) -> int | None:
    """Return where the brace that was opened just before `start` is closed, if it is."""
    depth = 1
    for match in re.finditer(r"\\.|[{}]", text[start:]):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return start + match.start()
    return None


def _read(text: str) -> Answer:
    """Return the one value of all numbers in `text`."""
    found = []
    for token in _TOKEN.finditer(text):
        answer = _number(token)
        if answer is None:
            continue
        if found and _joined(text[found[-1][0].end("end") : token.start()], token):
            return Answer(None, text[found[-1][0].start() : token.end("end")], "not an integer")
        if answer.reason:
            return answer
        found.append((token, answer))
    if not found:
        return Answer(None, "", "no number")
    (first, _), (last, answer) = found[0], found[-1]
    if any(other.value != answer.value for _, other in found):
        return Answer(None, text[first.start() : last.end("end")], "several answers")
    return answer


def _joined(gap: str, token: re.Match) -> bool:
    """Tell whether `gap` ties `token` to the number before it: by an operator, or without white space (10:30, 1'234)."""
    operator = gap.strip(" \t()[]{}$\\")
    return (
        not re.search(r"\s", gap)
        or operator in _OPERATORS
        or not operator
        and bool(token["prefix"])
    )


def _number(token: re.Match) -> Answer | None:
    """Return what a token says, None for what is no number at all."""
    if token["bad"]:
        return Answer(None, token["bad"], "not an integer")
    body, prefix, word = token["body"], token["prefix"] or "", token["word"] or ""
    if not body or word and not _LITERAL.fullmatch(word) and not _LITERAL.fullmatch(body + word):
        return None
    span = prefix + body
    digits = re.sub(r"\D", "", body)
    if word or "." in body or token["scale"] or prefix[:1] in tuple("≈~≤≥≠<>!"):
        return Answer(None, token.group(), "not an integer")
    if not digits.isascii():
        return Answer(None, span, "other digits")
    if not _GROUPED.fullmatch(body):
        return Answer(
            None, span, "malformed grouping" if re.search(_JOINT, body) else "several answers"
        )
    if not _READABLE.fullmatch(prefix):
        return Answer(None, span, "unclear sign")
    if len(digits) > MAX_DIGITS:
        return Answer(None, span, "too long")
    return Answer(-int(digits) if prefix[:1] in ("-", "−") else int(digits), span, None)
