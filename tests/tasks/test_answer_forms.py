"""Reading answers: every form of a number, any text, and in linear time."""

import re
import sys
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from refused_answers import REFUSED

from tasks import answers
from tasks.answers import MAX_CHARACTERS, MAX_DIGITS, Answer, extract

NUMBERS = (
    st.integers()
    | st.integers(-(10**MAX_DIGITS) + 1, 10**MAX_DIGITS - 1)
    | st.sampled_from([999, 1000, -1000, 10**6])
)


BIASED = st.text("0123456789,._ \n-+\u2212=*/^$%{}()\\'xe\u00a0\u2009\u0664\u00b2~", max_size=40)


PIECES = st.lists(
    st.sampled_from(
        [
            "1",
            "23",
            "456",
            ",",
            " ",
            ".",
            "-",
            "=",
            "*",
            "{",
            "}",
            "\\boxed{",
            "-\\boxed{",
            "\\frac{",
            "e5",
            "x",
            "$",
            "answer is ",
            " or ",
            "\\,",
            "{,}",
            "minus ",
            "_",
            "%",
        ]
    ),
    max_size=14,
).map("".join)


TEXTS = st.text() | BIASED | PIECES


def grouped(number: int, separator: str) -> str:
    return f"{number:,}".replace(",", separator)


def value_of(span: str) -> int:
    """Read an accepted span the slow way: its digits one by one, negative by its first
    character.
    """
    value = 0
    for character in span:
        if character in "0123456789":
            value = 10 * value + "0123456789".index(character)
    return -value if span[0] in "-\u2212" else value


@pytest.mark.parametrize("limit", [0, 640])  # none, and the lowest that Python takes
def test_the_longest_number_is_read_whatever_limit_python_has(limit):
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(limit)
    try:
        assert extract("-" + "9" * MAX_DIGITS).value == 1 - 10**MAX_DIGITS
    finally:
        sys.set_int_max_str_digits(before)


def test_the_longest_text_is_read():
    assert extract("5".rjust(MAX_CHARACTERS)).value == 5


@given(
    NUMBERS,
    st.sampled_from(["", ",", " ", "\u00a0", "\u2007", "\u2009", "\u202f", "_", "{,}", r"\,"]),
    st.sampled_from(
        [
            "{}",
            "{}.",
            "{} apples",
            "about x2: {}",
            "The 3rd is {}, I think.",
            "**{}**",
            "`{}`",
            "${}$",
            r"\({}\)",
            r"\boxed{{{}}}",
            r"1, 2 or \boxed{{ {} }}, 3",
            "37 + 15 = {}",
            "37 + 15 ={}",
            "y={} kg",
            "1 2 3\nAnswer: {}",
            "12 is wrong. The answer is **{}**",
        ]
    ),
    st.sampled_from(["-", "\u2212"]),
    st.sampled_from(["", "+"]),
)
def test_every_form_of_a_number_is_read(number, separator, frame, minus, plus):
    written = (minus if number < 0 else plus) + (
        grouped(abs(number), separator) if separator else str(abs(number))
    )
    assert extract(frame.format(written)) == Answer(number, written, None)


@given(TEXTS)
@example("-\\boxed{1}")
def test_any_text_has_an_answer_or_a_reason(text):
    answer = extract(text)
    assert answer.span in text
    if answer.reason is None:
        assert type(answer.value) is int and answer.value == value_of(answer.span)
        assert re.search(r"[0-9]", answer.span) and not re.search(
            r"[^-+\u2212$€£0-9,_ \u00a0\u2007\u2009\u202f{}\\]", answer.span
        )
    else:
        assert answer.value is None and answer.reason in REFUSED


@given(
    st.lists(st.integers(-99, 99), min_size=2, max_size=8).filter(
        lambda guesses: len(set(guesses)) > 1
    ),
    st.sampled_from(
        [" ", ", ", ",", "\n", " or ", "; ", "/", " | ", "  ", "\t", ". ", "_", ";", "\u200b"]
    ),
    st.sampled_from(["{}", "Answer: {}", "37 + 15 = {}", r"\boxed{{{}}}", "**{}**"]),
)
def test_a_list_of_guesses_is_never_read(guesses, separator, frame):
    # of two digits at most, so that no list looks like groups of three
    assert extract(frame.format(separator.join(map(str, guesses)))).value is None


@given(TEXTS, st.sampled_from(["37 + 15 is 52", "-7", "x > 3", "", "none"]))
def test_what_was_thought_is_not_read(thought, said):
    assert extract(f"<think>{thought}</think>{said}") == extract(said)


@given(TEXTS, st.integers(-(10**9), 10**9))
def test_the_last_box_wins_whatever_sentence_stands_before(text, number):
    assert extract(f"{text}.\n\\boxed{{{number}}}").value == number


@pytest.mark.parametrize("word", ["FALSE", "It is not", "wrong:"])
def test_a_denial_without_an_end_of_its_sentence_reaches_the_box(word):
    assert extract(f"{word}\n\\boxed{{7}}").reason == "denied"


# ---- time


UNITS = [
    "-",
    "- ",
    "-(",
    "-\\a",
    "1",
    "1,",
    "1 ",
    "1_",
    "1.",
    "1,1 ",
    "12 345x ",
    "a",
    "a1-",
    "1e",
    "_",
    "*",
    "1*",
    "minus ",
    "~ ",
    ".",
    ".1",
    "\\",
    "\\a",
    "$-",
    "{",
    "}",
    "\\boxed{",
    "\\boxed ",
    "-\\boxed",
    "=",
    "answer",
    "answer ",
    "<answer>",
    "1 x ",
    "1 / ",
    "1     ",
    " ",
    "\n",
    "\u00b2",
    "\u0664",
    "1 234",
    "<=",
    "<",
    "<a",
    "1 <a",
    "> ",
    "<=1",
    "<think>",
    "</think>",
    "1 is 1 ",
    "is ",
    "1 1 is",
    "not ",
    "not 1 ",
    "not 1. ",
    "Step 1: ",
    "Step 1:",
    "Step 1:\n",
    "# ",
    "1!",
    "! ",
    "1 a than ",
    "than 1 ",
    "\\leq ",
    "1 \\leq",
]


@pytest.mark.parametrize("head, tail", [("", ""), ("\\boxed{5 ", "x}")])
def test_time_grows_with_the_length_not_its_square(monkeypatch, head, tail):
    monkeypatch.setattr(answers, "MAX_CHARACTERS", 10**6)

    def cost(unit, characters):
        start = time.process_time()
        extract(head + unit * (characters // len(unit)) + tail)
        return time.process_time() - start

    for unit in UNITS:
        small = min(cost(unit, 4_000) for _ in range(3))
        # 25 times the text: linear time is 25 times as much, quadratic 625 times; 20 ms for what
        # is too fast to be timed
        assert any(cost(unit, 100_000) < 125 * small + 0.02 for _ in range(10)), unit


def test_a_million_characters_are_refused_unread():
    assert extract("1," * 500_000) == Answer(None, "", "too long")
