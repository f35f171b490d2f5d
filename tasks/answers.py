r"""Read the integer that a text gives as its answer. Training and evaluation share these rules.

Reasoning is not part of the answer: if the text has a ``</think>``, only what follows the last one
is read. The integer is looked for in the first of these places that the text has, and in no other,
so further guesses elsewhere earn nothing:

1. the last ``\boxed{...}``; inside it, rules 2 and 3 apply;
2. what follows the last ``=``, "equals", "answer is", "answer:" or ``<answer>``, or the last "is"
   (are, makes, gives, ...) between an expression and a number, as in "37 + 15 is 52". An expression
   has two numbers or more;
3. the whole text.

All numbers in that place must be readable and have the same value; the reader never picks one of
several. The number of a label that begins a line ("Step 2:") does not count. These are refused:

- empty, no number: white space; "none"; digits glued to letters are words: "x2", "3rd", "42kg".
  Accepted: 42 kg, 42 m2, $42
- not an integer: 1.0, .5, 1.234, 1e5, 0x1F, 3/4, 42 %, 4 million, 37 + 15, 2-3, ``\frac{3}{4}``,
  ½, ≈4. Accepted: "It is 3."
- ... a bound: x > 52, 52 < x, 52 ≥ x, ``x \neq 52``, more than 52, at least 52, 1 less than x.
  Accepted: -> 42, <b>42</b>, a quoted "> 42"
- ... a factorial: 5! is, ``\boxed{52!}``, ``$52!$``, (52!), "= 52!". Accepted: "The answer is
  52!", 42!, 42! So
- malformed grouping: 12,34  1,2,3  1234,567  1,234 567  1_2. Accepted: 1,234  1 234  1_234
  ``1{,}234``  ``1\,234``
- unclear sign: "- 42" (or a bullet?), --42, –42 (en dash), -(42), minus 42, ``-\boxed{42}``.
  Accepted: -42, +42, −42 (U+2212), -$42
- other digits: ٤٢, ４２: only 0 to 9 count. Accepted: 007 is 7, -0 is 0
- several answers: "12 13 14", "12, 13", "12 or 13", "1. 12", "52, not 53". Accepted: "52. Yes,
  52.", "Step 2: 52"
- denied: a sentence with "not", "n't", "never", "wrong", ...: "the answer is not 52", "52 is
  wrong". Accepted: "I can't be sure. It is 52."
- open box: ``\boxed{4`` without its brace: cut off
- open reasoning: ``<think>52`` without ``</think>``: cut off. Accepted: ``<think>50</think>52``
- too long: more than MAX_CHARACTERS of text, MAX_DIGITS of digits (leading zeros count)

An exclamation mark directly after a number either ends a sentence or is a factorial. It is a
factorial after a formula (in "= 52!" too, although the writer may only have been excited), in a
box, and wherever the sentence continues.

Digits are grouped as one to three digits, then groups of exactly three. All groups have the same
separator: a comma, an underscore, or one space (also a no-break, figure or thin space). So "12 345"
is read as 12345, although two numbers may have been meant; guesses listed like that count as one
number. Percentages and millions are refused because their value is not the number in the text. The
time is linear in the length of the text.
"""

import re
from dataclasses import dataclass

__all__ = ["Answer", "extract", "MAX_CHARACTERS", "MAX_DIGITS"]

MAX_CHARACTERS = 100_000
MAX_DIGITS = 640  # up to here int() takes any digits, whatever sys.set_int_max_str_digits says

# Characters before a box or a marker that may deny it.
LOOK_BACK = 60


@dataclass(frozen=True)
class Answer:
    """What was read, e.g. ``Answer(1234, "1,234", None)``, or why nothing was, e.g.
    ``Answer(None, "1.5", "not an integer")``.

    `span` is the piece of the text that was read or refused, "" if there is none. `reason` is one
    of those in the list above.
    """

    value: int | None
    span: str
    reason: str | None


_SPACE = "[ \u00a0\u2007\u2009\u202f]"
_JOINT = r"(?:[,_]|\{,\}|\\,)"
_SIGN = "[-+−\u2010-\u2013\u207b\ufe63\uff0b\uff0d±∓]"

# Every loop is possessive (*+, ++), and a prefix without a number is skipped as a whole. Otherwise
# a run of n signs would be scanned again from each of its n places, in quadratic time.
_PREFIX = (
    rf"(?:{_SIGN}|[<>!]=|[≈~≤≥≠]|\b(?:minus|negative)\b)"
    rf"(?:{_SIGN}|[≈~≤≥≠$€£({{\[*_`]|[^\S\n]|\\[a-z]*+)*+"
)

# The rest of a word with digits in it: x2, x_2, x-2, x/2.
_REST = r"\w*+(?:(?:[-+−./^]|\*(?!\*))\d\w*+)*+"

# LaTeX's ≤ ≥ < > ≠ ≈.
_BOUND = r"\\(?:leq?|geq?|lt|gt|neq?|approx|[lg]eqslant)(?![a-z])"
_TAG = r"</?[a-z][^<>\n]*+>"

# A label at the beginning of a line, "Step 2:", perhaps after bullets, quotes or headings.
_INDENT = r"[^\S\n]*+(?:[#>*_•-]++[^\S\n]*+)*+"
_NAME = r"(?!minus\b|negative\b)(?-i:[A-Z])[^\W\d_]*+"
_LABEL = rf"^{_INDENT}{_NAME}[^\S\n]++\d{{1,3}}+[*_]*+:[*_]*+(?=\s)"

# One token of a text. The first alternatives have no meaning and are skipped: labels, quoted lines,
# tags, and an angle bracket around a number. A < or > is a relation unless it belongs to an arrow
# (->, =>) or a mark (|>). Signs such as ≤, >= and ≠ are prefixes of the number.
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
_READABLE = re.compile(r"[-+−]?(?:\\?[$€£])?")  # prefixes that leave an integer readable
_LITERAL = re.compile(r"\.?e[-+−]?\d+|0[xob]\w+", re.IGNORECASE)  # 1e5, 0x1F
_BOX = re.compile(rf"(?P<sign>{_SIGN}[^\S\n]*+[$({{*]*+)?\\f?boxed\s*+{{")
_THINKING = re.compile(r"<(/?)think(?:ing)?>", re.IGNORECASE)

# Where an answer may begin (rule 2), and what decides it: numbers so far, and ends of sentences.
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

# A denial directly before a marker or a box: "not the right answer:", "isn't $\boxed{". It does not
# match "it is not hard to see that the answer is".
_DENIED = re.compile(rf"(?:{_DENIAL.pattern})(?:\s++\w++){{0,2}}[\s$*({{\\:]*\Z", re.IGNORECASE)

# A relation directly before a box.
_BOUNDED = re.compile(
    rf"(?:(?<![-=–—~|])[<>]=?|[≤≥≠≈]|!=|{_BOUND})[^\S\n]*[$({{]*\Z", re.IGNORECASE
)

# Words that make the next number a bound.
_BOUNDING = {"than", "least", "most", "above", "below", "over", "under"}

# What makes the number before it a bound: "< x", "≠ \alpha", "less than".
_IS_BOUND = re.compile(
    rf"[^\S\n]*+(?:(?:(?!{_TAG})[<>]++=?+|[≤≥≠≈]|!=|{_BOUND})[^\S\n]*+[\w($\\{{-]"
    r"|[a-z]++[^\S\n]++than\b)",
    re.IGNORECASE,
)

# More than white space and markup between two tokens.
_APART = re.compile(r"[^\s$({\[\\*_`]|\n")

# Before the number of a formula.
_FORMULA = re.compile(r"(?:[=+−/^×·÷({\[\\-]|\w\*)\s*\Z")

# An exclamation mark that ends a sentence.
_EXCLAIMED = re.compile(r"!++[*_`\"'”’»]*+(?:\Z|</|\s++(?![a-z0-9+\-−*/=^<>!]))")

# Between two numbers these make an expression of them. A prefix such as + or - does so as well.
_OPERATORS = {*"/÷*×·⋅^:xX", "times", "cdot", "div", "mod"}


def extract(text: str) -> Answer:
    r"""Return the integer that `text` answers with, or why there is none.

    >>> extract("37 + 15 = **1,052** apples")
    Answer(value=1052, span='1,052', reason=None)
    >>> extract("12, 13, 14")
    Answer(value=None, span='12, 13, 14', reason='several answers')
    """
    if len(text) > MAX_CHARACTERS:
        return Answer(None, "", "too long")

    after_thinking, open_at = _after_thinking(text)
    if open_at is not None:
        return Answer(None, text[open_at:], "open reasoning")
    if not after_thinking.strip():
        return Answer(None, "", "empty")
    return _answer(after_thinking)


def _after_thinking(text: str) -> tuple[str, int | None]:
    """Return the text after the last </think>, and the place of a <think> that is never closed.

    The place is None if every <think> is closed.
    """
    start = 0
    open_at = None
    for tag in _THINKING.finditer(text):
        if tag[1]:
            start, open_at = tag.end(), None
        elif open_at is None:
            open_at = tag.start()
    return text[start:], open_at


def _answer(text: str) -> Answer:
    """Return the answer in a text without reasoning."""
    start, end = 0, len(text)

    box = _last(_BOX, text)
    if box:
        start = box.end()
        closing = _closing_brace(text, start)
        if closing is None:
            return Answer(None, text[box.start() :], "open box")

        end = closing
        refused = _refusal_of_box(text, box)
        if refused:
            return Answer(None, text[box.start() : end + 1], refused)

    place, is_denied = _place(text, start, end)
    if is_denied:
        return Answer(None, text[place:end], "denied")
    return _read(text, place, end)


def _refusal_of_box(text: str, box: re.Match) -> str | None:
    """Return why what stands before a box makes its content no answer; None if nothing does."""
    before = text[max(0, box.start() - LOOK_BACK) : box.start()]
    if box["sign"]:
        return "unclear sign"
    if _DENIED.search(before):
        return "denied"
    if _BOUNDED.search(before):
        return "not an integer"
    return None


def _place(text: str, start: int, end: int) -> tuple[int, bool]:
    """Return where the answer begins in ``text[start:end]``, and whether it is denied before."""
    last = None  # the last marker or copula
    last_sentence = start  # where its sentence begins
    sentence = start  # where the current sentence begins
    numbers = 0  # in the current sentence, after the last marker or copula

    for found in _PLACE.finditer(text, start, end):
        if found["number"]:
            numbers += 1
        elif found["end"]:
            sentence = found.end()
            numbers = 0
        elif found["marker"] or numbers >= 2:
            last = found
            last_sentence = sentence
            numbers = 0

    if last is None:
        return start, False
    if last["copula"]:
        return last.end(), bool(_DENIAL.search(text, last_sentence, last.start()))
    before = text[max(start, last.start() - LOOK_BACK) : last.start()]
    return last.end(), bool(_DENIED.search(before))


def _last(pattern: re.Pattern, text: str) -> re.Match | None:
    found = None
    for found in pattern.finditer(text):  # noqa: B007
        pass
    return found


def _closing_brace(text: str, start: int) -> int | None:
    """Return where the brace that opens just before `start` is closed; None if it is not."""
    depth = 1
    for match in re.finditer(r"\\.|[{}]", text[start:]):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return start + match.start()
    return None


def _read(text: str, start: int, end: int) -> Answer:
    """Return the value that all numbers in ``text[start:end]`` share, or why there is none."""
    found: list[tuple[re.Match, Answer]] = []
    before = None
    for token in _TOKEN.finditer(text, start, end):
        answer = _number(token)
        if answer is None:
            before = token
            continue

        if found:
            previous, _ = found[-1]
            if _are_tied(text[previous.end("end") : token.start()], token):
                return Answer(None, text[previous.start() : token.end("end")], "not an integer")

        if answer.reason:
            return answer
        if _is_bound(text, before, token, end) or _is_factorial(text, token, end):
            return Answer(None, token.group(), "not an integer")
        found.append((token, answer))
        before = token

    if not found:
        return Answer(None, "", "no number")

    first, _ = found[0]
    last, answer = found[-1]
    if any(other.value != answer.value for _, other in found):
        return Answer(None, text[first.start() : last.end("end")], "several answers")
    denial = _denial(text, start, end, [token.start() for token, _ in found])
    return denial or answer


def _is_bound(text: str, before: re.Match | None, token: re.Match, end: int) -> bool:
    """Return whether a number is only a bound: "x > 52", "more than 52", "52 < x", "1 less than x".

    `before` is the token before the number.
    """
    if _IS_BOUND.match(text, token.end("end"), end):
        return True
    if before is None or _APART.search(text, before.end(), token.start()):
        return False
    return bool(before["relation"]) or before.group().lower() in _BOUNDING


def _is_factorial(text: str, token: re.Match, end: int) -> bool:
    """Return whether an exclamation mark directly after a number is an operator.

    It is one if it does not end a sentence, or if it ends a formula.
    """
    mark = token.end("end")
    if not text.startswith("!", mark, end) or text.startswith("!=", mark, end):
        return False
    ends_sentence = _EXCLAIMED.match(text, mark, end)
    in_formula = _FORMULA.search(text[max(0, token.start() - 8) : token.start()])
    return not ends_sentence or bool(in_formula)


def _denial(text: str, start: int, end: int, numbers: list[int]) -> Answer | None:
    """Return the refusal of a sentence that denies something and holds one of the `numbers`.

    `numbers` are their places in the text, rising. Returns None if no such sentence denies.
    """
    waiting = iter(numbers)
    number = next(waiting)
    stops = [mark.end() for mark in _SENTENCE_END.finditer(text, start, end)]
    for stop in [*stops, end]:
        has_number = False
        while number < stop:
            has_number = True
            number = next(waiting, end)
            if number == end:
                break

        if has_number and _DENIAL.search(text, start, stop):
            return Answer(None, text[start:stop], "denied")
        start = stop
    return None


def _are_tied(gap: str, token: re.Match) -> bool:
    """Return whether the number `token` and the one before it make one expression.

    `gap` is the text between them. It has an operator, or no white space (10:30, 1'234).
    """
    if not re.search(r"\s", gap):
        return True
    operator = gap.strip(" \t()[]{}$\\")
    return operator in _OPERATORS if operator else bool(token["prefix"])


def _number(token: re.Match) -> Answer | None:
    """Return the number in a token, or why it is refused; None if the token is not a number."""
    if token["bad"]:
        return Answer(None, token["bad"], "not an integer")

    body = token["body"]
    prefix = token["prefix"] or ""
    word = token["word"] or ""
    if not body:
        return None
    # Digits with letters are a word (42kg), unless both are a literal (1e5, 0x1F).
    if word and not _LITERAL.fullmatch(word) and not _LITERAL.fullmatch(body + word):
        return None

    span = prefix + body
    digits = re.sub(r"\D", "", body)
    if word or "." in body or token["scale"] or prefix[:1] in tuple("≈~≤≥≠<>!"):
        return Answer(None, token.group(), "not an integer")
    if not digits.isascii():
        return Answer(None, span, "other digits")
    if not _GROUPED.fullmatch(body):
        has_separator = re.search(_JOINT, body)
        return Answer(None, span, "malformed grouping" if has_separator else "several answers")
    if not _READABLE.fullmatch(prefix):
        return Answer(None, span, "unclear sign")
    if len(digits) > MAX_DIGITS:
        return Answer(None, span, "too long")

    is_negative = prefix[:1] in ("-", "−")
    return Answer(-int(digits) if is_negative else int(digits), span, None)
