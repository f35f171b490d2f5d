r"""The integer that a text answers with: one reading for training and evaluation alike, strict
where a text is unclear.

What a policy thinks aloud is no answer: where there is a ``</think>``, only what follows the last
one counts. In that the integer is looked for in the first of these places that the text has (one
place only, so further guesses elsewhere earn nothing):
1. the last ``\boxed{...}``, and in it by rules 2 and 3;
2. what follows the last ``=``, "equals", "answer is", "answer:" or ``<answer>``, or the last "is"
   (are, makes, gives, ...) between an expression and a number, as in "37 + 15 is 52": an
   expression has two numbers or more;
3. the whole text.
There the numbers must all be good and have one value; nothing is picked out of several. The number
of a label that begins a line ("Step 2:") is none of them. Refused are:

- empty, no number: white space; "none"; digits glued to letters are words: "x2", "3rd", "42kg".
  But read: 42 kg, 42 m2, $42
- not an integer: 1.0, .5, 1.234, 1e5, 0x1F, 3/4, 42 %, 4 million, 37 + 15, 2-3, ``\frac{3}{4}``,
  ½, ≈4. But read: "It is 3."
- ... a bound: x > 52, 52 < x, 52 ≥ x, ``x \neq 52``, more than 52, at least 52, 1 less than x.
  But read: -> 42, <b>42</b>, a quoted "> 42"
- ... a factorial: 5! is, ``\boxed{52!}``, ``$52!$``, (52!), "= 52!". But read: "The answer is
  52!", 42!, 42! So
- malformed grouping: 12,34  1,2,3  1234,567  1,234 567  1_2. But read: 1,234  1 234  1_234
  ``1{,}234``  ``1\,234``
- unclear sign: "- 42" (or a bullet?), --42, –42 (en dash), -(42), minus 42, ``-\boxed{42}``. But
  read: -42, +42, −42 (U+2212), -$42
- other digits: ٤٢, ４２: only 0 to 9 count. But read: 007 is 7, -0 is 0
- several answers: "12 13 14", "12, 13", "12 or 13", "1. 12", "52, not 53". But read: "52. Yes,
  52.", "Step 2: 52"
- denied: a sentence with "not", "n't", "never", "wrong", ...: "the answer is not 52", "52 is
  wrong". But read: "I can't be sure. It is 52."
- open box: ``\boxed{4`` without its brace: cut off
- open reasoning: ``<think>52`` without its ``</think>``: cut off. But read:
  ``<think>50</think>52``
- too long: more than MAX_CHARACTERS of text, MAX_DIGITS of digits (leading zeros count)

An exclamation mark directly behind a number ends a sentence of prose, or it is a factorial: behind
a formula ("= 52!" too, though a glad writer may have meant 52), in a box, and wherever the
sentence goes on. Groups are one to three digits, then groups of exactly three after one and the
same separator: comma, underscore, one space (also no-break, figure, thin). So "12 345" is 12345,
though two numbers may have been meant; guesses listed like that are worth one number. Percent and
millions are refused because their value is not the number that stands there. The time is linear in
the length of the text.
"""

import re
from dataclasses import dataclass

__all__ = ["Answer", "extract", "MAX_CHARACTERS", "MAX_DIGITS"]

MAX_CHARACTERS = 100_000
MAX_DIGITS = 640  # up to here int() takes any digits, whatever sys.set_int_max_str_digits says


@dataclass(frozen=True)
class Answer:
    """What was read: ``Answer(1234, "1,234", None)``, or refused: ``Answer(None, "1.5", "not an
    integer")``.

    `span` is the raw piece of the text that was read or refused, "" where there is none; `reason`
    one of the table above.
    """

    value: int | None
    span: str
    reason: str | None


_SPACE = "[ \u00a0\u2007\u2009\u202f]"
_JOINT = r"(?:[,_]|\{,\}|\\,)"
_SIGN = "[-+−\u2010-\u2013\u207b\ufe63\uff0b\uff0d±∓]"
# Every loop is possessive (*+, ++), and a prefix that finds no number is passed over as a whole:
# else a run of n signs would be read again from each of its n places.
_PREFIX = (
    rf"(?:{_SIGN}|[<>!]=|[≈~≤≥≠]|\b(?:minus|negative)\b)"
    rf"(?:{_SIGN}|[≈~≤≥≠$€£({{\[*_`]|[^\S\n]|\\[a-z]*+)*+"
)
_REST = r"\w*+(?:(?:[-+−./^]|\*(?!\*))\d\w*+)*+"  # of a word: x2, x_2, x-2, x/2
_BOUND = r"\\(?:leq?|geq?|lt|gt|neq?|approx|[lg]eqslant)(?![a-z])"  # LaTeX's ≤ ≥ < > ≠ ≈
_TAG = r"</?[a-z][^<>\n]*+>"
_INDENT = r"[^\S\n]*+(?:[#>*_•-]++[^\S\n]*+)*+"  # of a line: white space, bullets, quotes, headings
_NAME = r"(?!minus\b|negative\b)(?-i:[A-Z])[^\W\d_]*+"
_LABEL = rf"^{_INDENT}{_NAME}[^\S\n]++\d{{1,3}}+[*_]*+:[*_]*+(?=\s)"  # "Step 2:" begins a line
# What stands for nothing comes first: labels, quoted lines, tags, an angle bracket around a
# number. A < or > that is no part of an arrow (->, =>) or a mark (|>) is a relation; ≤, >=, ≠ and
# their like are prefixes.
_TOKEN = re.compile(
    rf"""
    {_LABEL} | ^[^\S\n]*+(?:>[^\S\n]*+)++ | {_TAG} | <(?=[-+−]?\d[\d,]*+>)
  | (?P<relation> (?<![-=–—~|<>])[<>]++(?!=) | {_BOUND} )
  | (?P<bad> \\(?:[cdt]?frac|sqrt|binom)(?![a-z]) | [¼-¾⅐-⅞√∛∜] | (?<!\.)\.\d++ )
  | (?P<prefix> {_PREFIX} )?+
    (?P<body> \d++ (?: (?:{_JOINT}|\.)\d++ | {_SPACE}\d++(?![^\W_]) )*+ ) (?P<end>)
    _*+ (?P<word> \.e[-+−]?\d++ | [^\W_]{_REST} )?+
    (?: (?= (?:[^\S\n]|[*_`$\\)}}\]])*+
            (?P<scale> %|‰|\^
              | (?:percent|per[ ]cent|dozen|hundred|thousand|million|billion|trillion)\b) ) )?+
  | {_PREFIX} | \\[a-z]++ | [^\W\d_]{_REST}""",
    re.VERBOSE | re.IGNORECASE | re.MULTILINE,
)
_GROUPED = re.compile(rf"\d+|\d{{1,3}}({_JOINT}|{_SPACE})\d{{3}}(?:\1\d{{3}})*")
_READABLE = re.compile(r"[-+−]?(?:\\?[$€£])?")  # of prefixes
_LITERAL = re.compile(r"\.?e[-+−]?\d+|0[xob]\w+", re.IGNORECASE)  # 1e5, 0x1F
_BOX = re.compile(rf"(?P<sign>{_SIGN}[^\S\n]*+[$({{*]*+)?\\f?boxed\s*+{{")
_THINKING = re.compile(r"<(/?)think(?:ing)?>", re.IGNORECASE)
_COPULA = r"\b(?:is|are|was|were|equal|makes?|gives?|yields?)\b"
_ADVERB = r"(?:\s++(?:equal\s++to|[a-z]{1,12}ly|thus|therefore|then|now|just|us)\b)?+"
_PLACE = re.compile(
    rf"""
    (?P<marker> (?<![<>!])= | \bequals\b | \banswer\b\W{{0,8}}?(?:\bis\b|:) | <answer> )
  | (?P<copula> {_COPULA} (?= {_ADVERB} [\W_]{{0,8}}?\d ) )
  | (?P<number> \d(?:[.,_]?\d)*+ )
  | (?P<end> [.!?](?=\s|\Z) | (?<!not)\n )""",
    re.VERBOSE | re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"[.!?](?=\s|\Z)|(?<!not)\n", re.IGNORECASE)
_DENIAL = re.compile(
    r"\b(?:not|cannot|never|neither|nor|wrong|incorrect|false)\b|n['’]t\b", re.IGNORECASE
)
# Before a marker or a box: "not the right answer:", "isn't $\boxed{", but not "it is not hard to
# see that the answer is".
_DENIED = re.compile(rf"(?:{_DENIAL.pattern})(?:\s++\w++){{0,2}}[\s$*({{\\:]*\Z", re.IGNORECASE)
_BOUNDED = re.compile(
    rf"(?:(?<![-=–—~|])[<>]=?|[≤≥≠≈]|!=|{_BOUND})[^\S\n]*[$({{]*\Z", re.IGNORECASE
)
_BOUNDING = {"than", "least", "most", "above", "below", "over", "under"}  # directly before a number
_IS_BOUND = re.compile(  # directly behind a number: "< x", "≠ \alpha", "less than"
    rf"[^\S\n]*+(?:(?:(?!{_TAG})[<>]++=?+|[≤≥≠≈]|!=|{_BOUND})[^\S\n]*+[\w($\\{{-]|[a-z]++[^\S\n]++than\b)",
    re.IGNORECASE,
)
_APART = re.compile(r"[^\s$({\[\\*_`]|\n")  # more than white space and markup
_FORMULA = re.compile(r"(?:[=+−/^×·÷({\[\\-]|\w\*)\s*\Z")  # before a number
_EXCLAIMED = re.compile(r"!++[*_`\"'”’»]*+(?:\Z|</|\s++(?![a-z0-9+\-−*/=^<>!]))")
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
    said, open_at = _after_thinking(text)
    if open_at is not None:
        return Answer(None, text[open_at:], "open reasoning")
    if not said.strip():
        return Answer(None, "", "empty")
    return _answer(said)


def _after_thinking(text: str) -> tuple[str, int | None]:
    """Return what follows the last </think>, and where in `text` a <think> stands that nothing
    closes, if there is one.
    """
    start, open_at = 0, None
    for tag in _THINKING.finditer(text):
        if tag[1]:
            start, open_at = tag.end(), None
        elif open_at is None:
            open_at = tag.start()
    return text[start:], open_at


def _answer(text: str) -> Answer:
    start, end = 0, len(text)

    box = _last(_BOX, text)
    if box:
        start = box.end()
        closing = _closing_brace(text, start)
        if closing is None:
            return Answer(None, text[box.start() :], "open box")
        end = closing
        if box["sign"]:
            return Answer(None, text[box.start() : end + 1], "unclear sign")
        before = text[max(0, box.start() - 60) : box.start()]
        if _DENIED.search(before):
            return Answer(None, text[box.start() : end + 1], "denied")
        if _BOUNDED.search(before):
            return Answer(None, text[box.start() : end + 1], "not an integer")

    place, denied = _place(text, start, end)
    if denied:
        return Answer(None, text[place:end], "denied")
    return _read(text, place, end)


def _place(text: str, start: int, end: int) -> tuple[int, bool]:
    """Return where the answer begins in ``text[start:end]``, and whether what stands before it
    denies it.
    """
    last, scope = (
        None,
        start,
    )  # the last marker or copula, and where the sentence of a copula begins
    sentence, numbers = (
        start,
        0,
    )  # where the sentence begins, and its numbers since then or the last marker
    for found in _PLACE.finditer(text, start, end):
        if found["number"]:
            numbers += 1
        elif found["end"]:
            sentence, numbers = found.end(), 0
        elif found["marker"] or numbers >= 2:
            last, scope, numbers = found, sentence, 0

    if last is None:
        return start, False
    if last["copula"]:
        return last.end(), bool(_DENIAL.search(text, scope, last.start()))
    return last.end(), bool(_DENIED.search(text[max(start, last.start() - 60) : last.start()]))


def _last(pattern: re.Pattern, text: str) -> re.Match | None:
    found = None
    for found in pattern.finditer(text):  # noqa: B007
        pass
    return found


def _closing_brace(text: str, start: int) -> int | None:
    """Return where the brace that was opened just before `start` is closed, if it is."""
    depth = 1
    for match in re.finditer(r"\\.|[{}]", text[start:]):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return start + match.start()
    return None


def _read(text: str, start: int, end: int) -> Answer:
    """Return the one value of all numbers in ``text[start:end]``."""
    found: list[tuple[re.Match, Answer]] = []
    before = None
    for token in _TOKEN.finditer(text, start, end):
        answer = _number(token)
        if answer is None:
            before = token
            continue

        if found and _joined(text[found[-1][0].end("end") : token.start()], token):
            return Answer(None, text[found[-1][0].start() : token.end("end")], "not an integer")
        if answer.reason:
            return answer
        if _is_bound(text, before, token, end) or _is_factorial(text, token, end):
            return Answer(None, token.group(), "not an integer")
        found.append((token, answer))
        before = token

    if not found:
        return Answer(None, "", "no number")
    (first, _), (last, answer) = found[0], found[-1]
    if any(other.value != answer.value for _, other in found):
        return Answer(None, text[first.start() : last.end("end")], "several answers")
    denial = _denial(text, start, end, [token.start() for token, _ in found])
    return denial or answer


def _is_bound(text: str, before: re.Match | None, token: re.Match, end: int) -> bool:
    """Tell whether a number is no value but the bound of one: "x > 52", "more than 52", "52 < x",
    "1 less than x".
    """
    if _IS_BOUND.match(text, token.end("end"), end):
        return True
    if before is None or _APART.search(text, before.end(), token.start()):
        return False
    return bool(before["relation"]) or before.group().lower() in _BOUNDING


def _is_factorial(text: str, token: re.Match, end: int) -> bool:
    """Tell whether the exclamation mark directly behind a number is an operator: it ends no
    sentence, or it ends a formula.
    """
    mark = token.end("end")
    if not text.startswith("!", mark, end) or text.startswith("!=", mark, end):
        return False
    ends_sentence = _EXCLAIMED.match(text, mark, end)
    in_formula = _FORMULA.search(text[max(0, token.start() - 8) : token.start()])
    return not ends_sentence or bool(in_formula)


def _denial(text: str, start: int, end: int, numbers: list[int]) -> Answer | None:
    """Return the refusal where a sentence that holds one of the `numbers` (their places, rising)
    denies something.
    """
    waiting = iter(numbers)
    number = next(waiting)
    for stop in [*(mark.end() for mark in _SENTENCE_END.finditer(text, start, end)), end]:
        has_number = False
        while number < stop:
            has_number, number = True, next(waiting, end)
            if number == end:
                break
        if has_number and _DENIAL.search(text, start, stop):
            return Answer(None, text[start:stop], "denied")
        start = stop
    return None


def _joined(gap: str, token: re.Match) -> bool:
    """Tell whether `gap` ties `token` to the number before it: by an operator, or without white
    space (10:30, 1'234).
    """
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
