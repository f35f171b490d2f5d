r"""Read the integer that a text gives as its answer. Training and evaluation share these rules.

Reasoning is not part of the answer: if the text has a ``</think>``, only what follows the last one
is read. The integer is looked for in the first of these places that the text has, and in no other,
so further guesses elsewhere earn nothing:

1. the last ``\boxed{...}``; inside it, rules 2 and 3 apply;
2. what follows the last ``=``, "equals", "answer is", "answer:" or ``<answer>``, or the last "is"
   (are, makes, gives, ...) before a number, as in "37 + 15 is 52";
3. the whole text.

All numbers in that place must be readable and have the same value; the reader never picks one of
several. Digits glued to letters are words ("x2", "3rd", "42kg"). The reasons to refuse a text are

- empty; no number; too long (more than MAX_CHARACTERS of text, or MAX_DIGITS digits);
- not an integer: 1.0, .5, 1e5, 0x1F, 42 %, 4 million, 5^2, 5!, ``\frac{3}{4}``, an expression that
  is not worked out (7 * 7, 3/4), a bound (x > 52, ≈ 52);
- malformed grouping: 12,34  1,2,3  1,234 567. Accepted: 1,234  1 234  1_234  ``1{,}234``;
- unclear sign: "- 42" (or a bullet?), --42, –42 (en dash), minus 42. Accepted: -42, +42, −42, -$42;
- other digits: ٤٢; only 0 to 9 count. Accepted: 007 is 7;
- several answers: "12, 13", "12 or 13", "52, not 53". Accepted: "52. Yes, 52.";
- denied: "not", "n't", "never", "wrong" ... in the answer or before it in its sentence;
- open box, open reasoning: ``\boxed{4`` or ``<think>52`` was cut off.

Digits are grouped as one to three digits, then groups of exactly three with the same separator: a
comma, an underscore or one space. So "12 345" is read as 12345, although two numbers may have been
meant. The time is linear in the length of the text.
"""

import re
from typing import NamedTuple

MAX_CHARACTERS = 100_000
MAX_DIGITS = 640  # up to here int() takes any digits, whatever sys.set_int_max_str_digits says


class Answer(NamedTuple):
    """The integer that was read, or the reason why none was, one of those in the list above."""

    value: int | None
    reason: str | None


_THINKING = re.compile(r"<(/?)think(?:ing)?>", re.IGNORECASE)
_BOX = re.compile(r"\\f?boxed\s*+\{")
_MARKER = re.compile(
    r"""
    (?<![<>!])=>? | \b equals \b | \b answer \b \W{0,8}? (?: \b is \b | : ) | <answer>
  | \b (?: is | are | was | were | equal | makes? | gives? | yields? ) \b
    (?: \s++ (?: equal \s++ to | [a-z]{1,12}ly | thus | therefore | then | now | just | us ) \b )?+
    (?= [\W_]{0,8}? \d )
    """,
    re.VERBOSE | re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"[.!?](?=\s)|\n")
_DENIAL = re.compile(
    r"\b(?:not|cannot|never|neither|nor|wrong|incorrect|false)\b|n['’]t\b", re.IGNORECASE
)

# What makes the value another one than that of the number which stands there.
_CHANGED = re.compile(
    r"""
    [√∛∜^‰≤≥≠≈~] | \d [\s*_`$)}\\]{0,8} [%!]
  | \\ (?: [cdt]?frac | sqrt | binom | leq? | geq? | lt | gt | neq? | approx ) (?! [a-z] )
  | \b (?: percent | dozen | hundred | thousand | million | billion | trillion ) \b
  | \b than \b | \b (?: least | most | above | below | over | under ) \s++ [\W_]{0,8}? \d
  | (?<! [-=|] ) [<>] =? [\s*_`$({-]*+ \d | \d \s*+ (?: [<>](?!\|) | != ) | !=
    """,
    re.VERBOSE | re.IGNORECASE,
)
# Tags, marks of quoted lines, and labels that begin a line ("Step 2:"), which are no answers.
_SKIPPED = re.compile(
    r"</?[A-Za-z][^<>\n]*+>|^>+|^[\s#>*_•-]{0,8}[A-Z][a-z]*+ \d{1,3}[*_]*+:(?!\S)", re.MULTILINE
)

# A number with what stands before it, or a word that may have digits (x2, x-2). Signs without a
# number are a token as well, so that a run of them is not scanned again from each of its places.
_SIGNS = (
    r"(?:(?:[-+−\u2010-\u2013\u207b\ufe63\uff0b\uff0d±∓]|\b(?:minus|negative)\b)[\s*_`$({\[]*+)"
)
_TOKEN = re.compile(
    rf"""
    (?P<prefix> {_SIGNS}*+ [$€£]?+ )
    (?P<body> (?: (?<!\.)\. )?\d++ (?: [.,_ \u00a0\u2007\u2009\u202f] \d++ )*+ )
    (?P<word> [^\W\d_]\w*+ )?+
  | {_SIGNS}++ | [^\W\d_]\w*+ (?: [-+−./*^]\d\w*+ )*+
    """,
    re.VERBOSE | re.IGNORECASE,
)

# Digits with letters are a word (42kg), unless both are a number (1e5, 0x1F).
_LITERAL = re.compile(r"[\d.]+e\d*|0[xob]\w+", re.IGNORECASE)
_GROUPED = re.compile(r"\d+|\d{1,3}([,_ \u00a0\u2007\u2009\u202f])\d{3}(?:\1\d{3})*")

# Between two numbers that belong to one expression: no white space (10:30), or an operator.
_TIED = re.compile(
    r"\S*+ | [\s()\[\]{}$\\]* (?: [/÷*×·⋅:x] | times | cdot | div | mod ) [\s()\[\]{}$\\]*",
    re.VERBOSE | re.IGNORECASE,
)
_READABLE = re.compile(r"[-+−]?[$€£]?")  # prefixes that leave an integer readable


def extract(text: str) -> Answer:
    r"""Return the integer that `text` answers with, or why there is none.

    >>> extract("37 + 15 = **1,052** apples")
    Answer(value=1052, reason=None)
    >>> extract("12, 13, 14")
    Answer(value=None, reason='several answers')
    """
    if len(text) > MAX_CHARACTERS:
        return Answer(None, "too long")

    *_, text = re.split(r"</think(?:ing)?>", text, flags=re.IGNORECASE)
    if _THINKING.search(text):
        return Answer(None, "open reasoning")
    if not text.strip():
        return Answer(None, "empty")

    sign = ""
    if boxes := list(_BOX.finditer(text)):
        end = _closing_brace(text, boxes[-1].end())
        if end is None:
            return Answer(None, "open box")
        before, text = text[: boxes[-1].start()], text[boxes[-1].end() : end]
        sign = re.sub(r"[\s*_`$({\[]", "", before[-8:])[-1:]
        if _DENIAL.search(_last_sentence(before)):
            return Answer(None, "denied")

    start = max((found.end() for found in _MARKER.finditer(text)), default=0)
    place = text[start:]
    if _DENIAL.search(_last_sentence(text[:start]) + place):
        return Answer(None, "denied")
    return _value_in(sign + place if sign in tuple("-+−–≤≥≠≈<>") else place)


def _closing_brace(text: str, start: int) -> int | None:
    """Return where the brace that opens just before `start` is closed; None if it is not."""
    depth = 1
    for match in re.finditer(r"\\.|[{}]", text[start:]):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return start + match.start()
    return None


def _last_sentence(text: str) -> str:
    """Return the last sentence of `text`, which may be unfinished."""
    return text[max((end.end() for end in _SENTENCE_END.finditer(text)), default=0) :]


def _value_in(place: str) -> Answer:
    """Return the value that all numbers in `place` share, or why there is none."""
    place = _SKIPPED.sub(" ", place).replace("{,}", ",").replace("\\,", ",").replace("\\$", "$")
    if _CHANGED.search(place):
        return Answer(None, "not an integer")

    found = []
    end = None  # of the number before
    for token in _TOKEN.finditer(place):
        answer = _number(token)
        if answer is None:
            continue
        if answer.reason:
            return answer
        if end is not None and _TIED.fullmatch(place, end, token.start()):
            return Answer(None, "not an integer")
        found.append(answer)
        end = token.end()

    if not found:
        return Answer(None, "no number")
    return found[0] if len(set(found)) == 1 else Answer(None, "several answers")


def _number(token: re.Match) -> Answer | None:
    """Return the number in a token, or why it is refused; None if the token is a word."""
    prefix, body, word = token["prefix"], token["body"], token["word"] or ""
    if body is None or (word and not _LITERAL.fullmatch(body + word)):
        return None
    if word or "." in body:
        return Answer(None, "not an integer")

    digits = re.sub(r"\D", "", body)
    if not digits.isascii():
        return Answer(None, "other digits")
    if not _GROUPED.fullmatch(body):
        has_separator = "," in body or "_" in body
        return Answer(None, "malformed grouping" if has_separator else "several answers")
    if not _READABLE.fullmatch(prefix):
        return Answer(None, "unclear sign")
    if len(digits) > MAX_DIGITS:
        return Answer(None, "too long")

    value = int(digits)
    return Answer(-value if prefix[:1] in ("-", "−") else value, None)
