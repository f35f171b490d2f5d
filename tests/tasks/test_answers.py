"""Which number a text answers with: every form of a number, any text, and in linear time."""

import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks import answers
from tasks.answers import MAX_CHARACTERS, MAX_DIGITS, Answer, extract

ACCEPTED = [
    ("42", 42),
    ("007", 7),
    ("-42", -42),
    ("\u221242", -42),
    ("It is 3.", 3),
    ("1,234", 1234),
    ("1\xa0234", 1234),
    ("1_234", 1234),
    ("1{,}234", 1234),
    ("1\\,234", 1234),
    ("12 345", 12345),
    ("0,042", 42),
    ("42 apples", 42),
    ("42 kg", 42),
    ("$42", 42),
    ("-$42", -42),
    ("t1 has 42, the 3rd x2 and GPT-4 none", 42),
    ("52, yes, 52.", 52),
    ("1,000, or rather 1000", 1000),
    ("\u201c42\u201d", 42),
    ("...42", 42),
    ("**42**", 42),
    ("<b>42</b>", 42),
    ("-> 42", 42),
    ("- It is 42", 42),
    ("37 + 15 = 52", 52),
    ("1.5 + 1.5 = 3", 3),
    ("10 - 12 =-2", -2),
    ("3 plus 4 equals 7.", 7),
    ("37 and 15. **Answer:** 52", 52),
    ("12? 13? The final answer is: **52**.", 52),
    ("12 13 <answer>52</answer>", 52),
    ("\\boxed{42}", 42),
    ("7 = \\boxed{ -1{,}234 } = 8", -1234),
    ("\\boxed{1} \\boxed{2}", 2),
    ("\\boxed{37 + 15 = 52}", 52),
    ("\\fbox{5}, no, \\boxed{\\text{42 kg}}.", 42),
    ("$\\boxed{\\boxed{5}}$", 5),
    ("\\boxed{\\} 5}", 5),
    ("37 + 15 is 52", 52),
    ("The answer to 37 + 15 is 52", 52),
    ("37 and 15 therefore makes exactly 52 apples", 52),
    ("**Step 2:** it is 52", 52),
    ("7 * 7 = 49", 49),
    ("7 * 7 is 49", 49),
    ("<think>50</think>52", 52),
    ("<think>1 <think>2</think> 3</think>The answer is 52.", 52),
    ("<THINKING>\\boxed{50}</THINKING> 52", 52),
    ("<think>it is not 52 but x > 52</think>\\boxed{52}", 52),
    ("5! = 120", 120),
    ("> 52", 52),
    ("<|assistant|> 52<|end|>", 52),
    ("Since 5 > 3, the answer is 52", 52),
    ("I am not sure. It is 52.", 52),
    ("50 is wrong. The answer is 52.", 52),
]

REFUSED = {
    "empty": ["", "   \n\t", "<think>52</think>\n"],
    "no number": [
        "none",
        "Step 2:",
        "x*2",
        "7x7",
        "x2",
        "42kg",
        "x/2",
        "52 =",
        "-",
    ],
    "not an integer": [
        "x^2",
        "1.5",
        "1,234.00",
        "1e5",
        "0x1F",
        "42%",
        "4 million",
        "\\frac{4}{4}",
        "\u221a4",
        "~4",
        "x>52",
        "52 <= x",
        "x > $7",
        "7 * 7",
        "7*7",
        "It is 7 * 7",
        "\\boxed{7 \\times 7}",
        "49 = 7 \u00d7 7",
        "3/4",
        "7-7",
        "ratio 10: 30",
        "5!",
        "The answer is 52!",
        "5^2",
        "5 more than 2",
    ],
    "several answers": [
        "12 13",
        "1. 12",
        "12 345 67",
        "\\boxed{12, 13}",
    ],
    "unclear sign": [
        "37 + 15",
        "52 = 37 + 15",
        "The answer to 37 + 15: 52",
        "- 42",
        "\u2212 42",
        "--42",
        "\u201342",
        "\uff0d42",
    ],
    "malformed grouping": [
        "12,34",
        "1,2,3",
        "1,234,56",
        "1,234 567",
        "1,234_567",
        "1_2",
    ],
    "other digits": ["\u0664\u0662", "\uff14\uff12", "4\uff12", "\U0001d7d2", "\\boxed{\uff14}"],
    "denied": [
        "It is 52, not 53",
        "is not 52 but 53",
        "the answer is not 52",
        "the answer isn't 52",
        "The answer is not\n52",
        "It is never 52",
        "52 is wrong.",
    ],
    "open reasoning": ["<think>52", "<think>50</think>52<think>", "52 <thinking>"],
    "open box": ["\\boxed{4", "\\boxed{1} \\boxed{\\text{4}", "\\boxed{5\\}", "-\\boxed{4"],
}
REFUSED["too long"] = ["1," * 500_000, "9" * (MAX_DIGITS + 1)]

NUMBERS = (
    st.integers()
    | st.integers(-(10**MAX_DIGITS) + 1, 10**MAX_DIGITS - 1)
    | st.sampled_from([999, 1000, -1000, 10**6])
)
PIECES = "1 23 456 , . - = * { } \\boxed{ -\\boxed{ \\frac{ e5 x $ or \\, {,} minus _ %".split()
TEXTS = (
    st.text()
    | st.text("0123456789,._ \n-+\u2212=*/^$%{}()\\'xe\u00a0\u2009\u0664\u00b2~", max_size=40)
    | st.lists(st.sampled_from([*PIECES, " ", "answer is "]), max_size=14).map("".join)
)


@pytest.mark.parametrize("text, value", ACCEPTED)
def test_accepted(text, value):
    assert extract(text) == Answer(value, None)


@pytest.mark.parametrize(
    "reason, text",
    [(reason, text) for reason, texts in REFUSED.items() for text in texts],
    ids=lambda text: ascii(text[:30]),
)
def test_refused(reason, text):
    assert extract(text) == Answer(None, reason)


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
            "${}$",
            r"\({}\)",
            r"1, 2 or \boxed{{ {} }}, 3",
            "37 + 15 ={}",
            "1 2 3\nAnswer: {}",
            "12 is wrong. The answer is **{}**",
        ]
    ),
    st.sampled_from(["-", "\u2212"]),
)
def test_every_form_of_a_number_is_read(number, separator, frame, minus):
    digits = f"{abs(number):,}".replace(",", separator)
    written = f"{minus if number < 0 else ''}{digits}"
    assert extract(frame.format(written)) == Answer(number, None)


@given(TEXTS)
def test_any_text_has_an_answer_or_a_reason(text):
    answer = extract(text)
    if answer.reason is None:
        assert type(answer.value) is int
    else:
        assert answer.value is None and answer.reason in {*REFUSED, "open box", "open reasoning"}


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


UNITS = ["-", "1,", "1 ", "x-1", "minus ", "<", "is 1 ", "\\boxed{", "answer ", "*_", "<a", "\n"]


@pytest.mark.parametrize("head, tail", [("", ""), ("\\boxed{5 ", "x}")])
def test_time_grows_with_the_length_not_its_square(monkeypatch, head, tail):
    monkeypatch.setattr(answers, "MAX_CHARACTERS", 10**6)

    def cost(unit, characters):
        start = time.process_time()
        extract(head + unit * (characters // len(unit)) + tail)
        return time.process_time() - start

    for unit in UNITS:
        small = min(cost(unit, 2_000) for _ in range(3))
        # 20 times the text: linear time is 20 times as much, quadratic 400 times; 20 ms for what
        # is too fast to be timed
        assert any(cost(unit, 40_000) < 100 * small + 0.02 for _ in range(5)), unit
