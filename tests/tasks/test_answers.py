"""Where the answer of a completion stands, which number it is, and the task GSM8K."""

import json
import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo.data.errors import UserError
from grpo.tasks.answers import FORM, INSTRUCTION, final_answer, integer_in, number_of
from grpo.tasks.base import CUT_OFF, SPLITS, scores_of, without_end
from grpo.tasks.registry import load_task
from grpo.tasks.supply import problem_at

HALF = Fraction(1, 2)

NUMBERS = {
    # plain, signs
    "18": 18, "18.": 18, "18.0": 18, " 18 ": 18, "018": 18, "0": 0, "-0": 0,
    "3.14": Fraction(157, 50), "+18": 18, "-18": -18, "−18": -18, "- 18": -18,
    "–18": -18, "minus 18": -18, "negative 18": -18,
    ".5": HALF, "0.5": HALF, "-0.5": -HALF,
    # currency, units, words
    "$18": 18, "$18.00": 18, "-$18": -18, "$ 18": 18, "€18": 18, "¥18": 18,
    "£18.50": Fraction(37, 2), "18 USD": 18, "USD 18": 18, "18¢": 18, "$18 per day": 18,
    "18 dollars": 18, "18 apples.": 18, "18%": 18, "18 %": 18, "18 km/h": 18, "18kg": 18,
    "18 m2": 18, "18 m^2": 18, "18°": 18, "18 apples and no pears": 18, "is 18": 18,
    "about 18": 18, "18 (eighteen)": 18,
    "eighteen (18)": 18, "18 or 18": 18, "18!": 18, "18 more than Bob": 18,
    # groups of digits
    "1,234": 1234, "1,234,567": 1234567, "$1,234.50": Fraction(2469, 2), "1234": 1234,
    "100,000": 100000, "1,234.": 1234, "1 234": 1234, "18 000": 18000, "12 345 678": 12345678,
    "1\u202f234": 1234, "1_234": 1234, "1{,}234": 1234, r"1\,234": 1234,
    # fractions
    "1/2": HALF, "1 / 2": HALF, "36/2": 18, "5/2 hours": Fraction(5, 2), "2 1/2": Fraction(5, 2),
    r"\frac{1}{2}": HALF, r"\dfrac{36}{2}": 18, r"\tfrac{1}{2}": HALF, r"\frac12": HALF,
    r"-\frac{1}{2}": -HALF, r"2\frac{1}{2}": Fraction(5, 2),
    # marks around it
    "**18**": 18, "`18`": 18, "$18$": 18, "$$18$$": 18, r"\(18\)": 18, r"\[18\]": 18, "(18)": 18,
    "[18]": 18, "{18}": 18, '"18"': 18, "<b>18</b>": 18, "18,": 18, "18;": 18, "#18": 18,
    r"\boxed{18}": 18, r"\$18": 18, r"18\%": 18, r"18\text{ cm}": 18, r"\text{18}": 18,
    r"\textbf{18}": 18, r"18^\circ": 18,
    # results of a calculation
    "**18** and **18**": 18, "18 dollars: 18": 18, "18 double rooms": 18, "18 x": 18,
    "<<9*2=18>>18": 18,
    "= 18": 18, "x = 18": 18, "9 * 2 = 18": 18, "3 + 15 = $18": 18, r"9 \times 2 = 18": 18,
}  # fmt: skip

NO_ANSWERS = [
    # no number, or not one that stands there
    "eighteen", "", "-", ".", "$", "1/0", "9" * 200, "18 million", "18½", r"18\pi", r"\sqrt{324}",
    "not 18", "it isn't 18", "18 trillion", "18k", "18²", "> 18", "≥ 18", "more than 18",
    # several numbers
    "12 or 13", "12, 13", "18 of 20", "18 to 20", "18-20", "between 12 and 18", "18 > 17",
    "18 h 30 min", "18:30", "18; no, 17", "1,2,3", "1,23", "1.234,50",
    # a calculation without its result
    "3 + 4", "10 + 8 apples", "36 = 2 * 18", "10^2",
    # Formulas whose numbers are equal, and another value than that of the number.
    "9 + 9", "9 - 9", "9 * 9", "9 ** 9", "9 x $9", r"9 \times 9", r"9 \cdot 9", "9 ÷ 9", "9:9",
    "9 apples + 9 apples", "9 mod 9", "twice 9", "half of 36", "18 and a half",
]  # fmt: skip

WRITTEN: dict[str, Fraction | int | None] = {**NUMBERS, **dict.fromkeys(NO_ANSWERS)}


LINE = st.text(st.characters(codec="utf-8", exclude_characters="\r\n*_`$\\#{}<>"), max_size=20)


@given(LINE, LINE.map(str.strip))
def test_the_last_answer_line_is_the_answer(thought, answer):
    wanted = answer.strip().removesuffix(".").strip()
    text = f"{thought}\nAnswer: first\n{thought}\nAnswer: {answer}"
    assert final_answer(text) == (wanted.rstrip(".").strip() or None) or answer.endswith(".")
    assert final_answer(f"<think>Answer: 3</think>{text}") == final_answer(text)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Answer: 42", "42"),
        ("so it is 42\n**Answer:** 42", "42"),
        ("> Answer: `42`.", "42"),
        (r"thus \boxed{42}.", "42"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{4", None),
        ("6 * 7 = 42\n#### 42", "42"),
        ("<think>Answer: 1</think>Answer: 2", "2"),
        ("<think>Answer: 1", None),
        ("<THINK>a</think>Answer: 2", "2"),
        ("<think>a</think><think>Answer: 1", None),
        ("the answer is 42", "42"),
        ("I answer 42", None),
        ("Answer:", None),
        ("Answer:\n42", "42"),
        ("**Answer:**\n\\boxed{42}", "42"),
        ("So \\boxed{42}.\nAnswer:", "42"),
        ("Answer:\nWe take 6 times 7.\n#### 42", "42"),
        ("Answer:\n1. We multiply.\n2. The answer is 42.", "42"),
        ("- Answer: \u221242", "\u221242"),
        ("**Final Answer:**\n\n\\[\n\\boxed{42}\n\\]\nI hope that this helps.", "42"),
        ("It is 6 * 7.\n#### 42\nAnswer: ", "42"),
        ("Answer: $\\boxed{42}$.", "42"),
        ("Answer: -\\boxed{42}", "-\\boxed{42}"),
        ("Answer: 41\nAnswer:", None),
        ("", None),
    ],
)
def test_where_the_answer_stands(text, answer):
    assert final_answer(text) == answer


# --- GSM8K ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "number"), WRITTEN.items())
def test_written_forms_of_numbers(text, number):
    assert number_of(final_answer(f"Answer: {text}") or "") == number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("He has 2 + 5 = 7.\n#### 1,234", 1234),
        ("#### $1,234.00\n", 1234),
        ("The answer is 7.", 7),
        ("So 3 + 4 = 7. The answer is 7. That is all of the 12 she had.", 7),
        ("The answer is 6. No: the answer is $1,234.50.", Fraction(2469, 2)),
        ("Therefore, the final answer is: **18** dollars!", 18),
        ("The answer is -3 degrees.\nIt is cold at 5.", -3),
        (r"The answer is $\boxed{18}$.", 18),
        ("Answer: The answer is 7.", 7),
        ("**Answer**: $1,234.00 in total", 1234),
        ("The answer is 5.\nAnswer: 7", 7),
        ("The answer is not 18.", None),
        ("The answer is 12 or 13.", None),
        ("7", None),
    ],
)
def test_where_the_answer_stands_in_a_completion(text, number):
    assert number_of(final_answer(text) or "") == number


@pytest.mark.parametrize(
    "text",
    ["9" * 10**6, "1," * 10**6, "1 " * 10**6, "1/" * 10**6, r"\frac{" * 10**5, "{,}" * 10**6],
)
def test_long_answers_are_refused_at_once(text):
    start = time.process_time()
    assert number_of(text) is None
    assert time.process_time() - start < 1


def gsm8k(folder, train=40, test=10):
    folder.mkdir(exist_ok=True)
    for name, size, first in (("train", train, 0), ("test", test, 1000)):
        rows = [
            {
                "question": f"What is {n} and 1?",
                "answer": f"It is <<{n}+1={n + 1}>>.\n#### {n + 1:,}",
            }
            for n in range(first, first + size)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_task(f"gsm8k:{folder}")


def test_gsm8k_gold_answers_score_one(tmp_path):
    task = gsm8k(tmp_path / "gsm8k")
    assert len(task.problems("test")) == 10
    assert len(task.problems("train")) + len(task.problems("validation")) == 40
    assert task.problems("validation") and task.family_size(1) == 50
    for split in SPLITS:
        for problem in task.problems(split):
            assert task.key(problem) == problem.key
            right, gold, wrong, none = scores_of(
                task,
                problem,
                [problem.target, f"x\n#### {problem.data['row']['answer']}", "Answer: 0", "?"],
            )
            assert right.exact and gold.exact and right.reward == gold.reward == 1
            assert wrong.reward == FORM and not wrong.exact and none.reward == 0
    assert task.problems("test")[0].prompt == f"What is 1000 and 1?\n\n{INSTRUCTION}"
    assert gsm8k(tmp_path / "gsm8k").sources() == task.sources()


def test_gsm8k_mistakes(tmp_path):
    for make, message in (
        (lambda: load_task("gsm8k"), "give gsm8k:FOLDER, the folder of train.jsonl"),
        (lambda: load_task(f"gsm8k:{tmp_path}"), "no file"),
        (
            lambda: problem_at(gsm8k(tmp_path / "a"), seed=0, split="test", level=2, index=0),
            "no row of the test split has level 2",
        ),
        (lambda: load_task("arithmetic:3"), "--task arithmetic:3: give arithmetic$"),
    ):
        with pytest.raises(UserError, match=message):
            make()
    for row, message in (
        ({"question": "?"}, "is no line of GSM8K"),
        ({"question": "?", "answer": "3"}, "ends with #### N"),
        ({"question": "?", "answer": "#### many"}, "ends with #### N"),
    ):
        (tmp_path / "a" / "test.jsonl").write_text(json.dumps(row) + "\n")
        with pytest.raises(UserError, match=f"test.jsonl, line 1: .*{message}"):
            load_task(f"gsm8k:{tmp_path / 'a'}")


# ---- bare integers

ACCEPTED = [
    ("42", 42), ("-42", -42), ("\u221242", -42), ("It is 3.", 3), ("1,234", 1234),
    ("1{,}234", 1234), ("12 345", 12345), ("42 apples", 42), ("-$42", -42), ("52, yes, 52.", 52),
    ("**42**", 42), ("37 + 15 = 52", 52), ("1.5 + 1.5 = 3", 3), ("10 - 12 =-2", -2),
    ("37 and 15. **Answer:** 52", 52), ("12? 13? The final answer is: **52**.", 52),
    ("12 13 <answer>52</answer>", 52), ("7 = \\boxed{ -1{,}234 } = 8", -1234),
    ("\\boxed{37 + 15 = 52}", 52), ("37 + 15 is 52", 52), ("The answer to 37 + 15 is 52", 52),
    ("7 * 7 is 49", 49), ("<think>50</think>52", 52),
    ("<think>it is not 52 but x > 52</think>\\boxed{52}", 52), ("I am not sure. It is 52.", 52),
    ("50 is wrong. The answer is 52.", 52), (r"60 - \boxed{8}", 8),
]  # fmt: skip

REFUSED = {
    "no number": ["", "   \n\t", "<think>52</think>\n", "none", "52 =", "-"],
    "open reasoning": ["<think>52", "<think>50</think>52<think>", "52 <thinking>"],
    "not one integer": [
        "1.5", "1e5", "0x1F", "4 million", "\u221a4", "52 <= 53", "7 * 7", "49 = 7 \u00d7 7",
        "37 + 15", "52 = 37 + 15", "3/4", "7-7", "5 more than 2", "12 or 13", "12,34", "1,234 567",
        "\\boxed{12, 13}", "It is 52, not 53", "the answer isn't 52", "The answer is not\n52",
        "1," * 500_000, "9" * 101,
    ],
}  # fmt: skip

# Both readers: the place of the answer does not decide which number it is.
ALIKE = {
    52: [
        "52", "**52**", "$52$", "x = 52", "= 52.", "52 apples", "at 52 km/h", "52 m", "52m", "52 K",
        "- Answer: 52", "- The answer is 52.", "52%", "52 percent", "+52", "+(52)",
        "52 (fifty-two)", "<b>52</b>", "<answer>52</answer>", "52</s>", "x -> 52", "10 - -42 = 52",
        "10 - (-42) = 52", r"\boxed{52}",
        "26*2=<<26*2=52>>52", "Answer: 52 wrong answers", r"x = \boxed{52}", r"60 - 8 = \boxed{52}",
        r"\left(52\right)", r"\mathbf{52}", "52 metres over ground", "52 more than Bob", "52 m²",
        "52 times",
    ],
    -52: [
        "-52", "- 52", "Minus 52", "negative **52**", "\u201152", "-(52)", "(-52)", "(-(52))",
        "$-(52)$", "-$52$", "-[52]", "-(52", "- **52**", "**-52**", "**-**52", "-_52_", "- `52`",
        "- $52", "-\\$52", "x = -(52)", "-(52) apples", "- <b>52</b>", "- $\\$52$", r"\boxed{-52}",
        r"-\boxed{52}", r"$-\boxed{52}$", r"-$\boxed{52}$", r"\[-\boxed{52}\]",
        r"x = -\boxed{52}", r"It is -\boxed{52}.", r"**-\boxed{52}**", r"-**\boxed{52}**",
        r"\boxed{-(52)}", r"\boxed{-\boxed{52}}", r"negative \boxed{52}", r"\(-\boxed{52}\)",
        r"-\(\boxed{52}\)", r"-\(52\)", r"- \text{52}", r"-\mathbf{52}", r"-\left(52\right)",
        r"-\,52", r"-\textbf{52}",
    ],
    None: [
        # bounds
        "x<52", "x < 52", "x<=52", "x <= 52", "x>52", "x>=52", "x >= 52", "52<x", "52 > x",
        "x =< 52", "x < -52", "x<$52", "x < **52**", "x≤52", "x ⩾ 52", r"x \le 52", r"x \leq 52",
        r"x \ge 52", r"x \geqslant 52", r"x \lt 52", r"\boxed{x < 52}", r"$x \gt 52$",
        "at least 52", "at most 52", "It is at least **52**.", "more than $52", "more than **52**",
        "less than or equal to 52", "52 or more", "52 or less", "up to 52", "over 52", "under 52",
        "52+", "52 at most", "the answer is 52, which is less than 60",
        # denials
        "!= 52", "x != 52", "x!=52", "x ≠ 52", "x =/= 52", r"\ne 52", r"x \neq 52", r"x \not= 52",
        "x not = 52", "cannot be 52", "can't be 52", "52 is wrong", "52 is incorrect",
        "52 is false", "never equals 52", "The answer is 52. That is wrong.", "other than 52",
        "neither 52",
        # other values
        "± 52", "±52", r"\pm 52", r"$\pm52$", r"\mp 52", "+/- 52", "+/-52", "plus or minus 52",
        r"\pm\boxed{52}", r"±\boxed{52}", "--52", "- -52", "-(-52)", r"-\boxed{-52}",
        r"--\boxed{52}", "minus -52", "---\n52", "52M", "$52 M", "52B", "52k", "52bn", "52 million",
        "52 millions", "52 quadrillion", "52 thousand", "52 dozen", "52 dozens", "52 **dozen**",
        "52⁴", "square root of 52", "26 + (26)", "52 - (52)", r"52 + \mathbf{52}",
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        r"- \boxed{52}",
        "Answer:\n- \\boxed{52}",
        r"Answer – \boxed{52}",
        r"So the answer is - $\boxed{52}$",
    ],
)
def test_a_dash_with_space_before_a_box_is_no_sign(text):
    assert integer_in(text)[0] == 52


@pytest.mark.parametrize(
    ("text", "value"),
    [(text, value) for value, texts in ALIKE.items() for text in texts],
    ids=ascii,
)
def test_both_readers_agree_on_signs_bounds_and_other_values(text, value):
    assert integer_in(text)[0] == value
    assert number_of(final_answer(f"Answer: {text}") or "") == value
    if "boxed" in text:
        assert number_of(final_answer(f"Thus {text}") or "") == value


@pytest.mark.parametrize("part", ["9", " ", "-", "- ", "<", "\\", "* ", ". ", "-(", "9 -<\\"])
def test_long_texts_take_linear_time(part):
    text = "Answer: " + part * (100_000 // len(part))
    start = time.process_time()
    assert integer_in(text)[0] is None
    final_answer(text)
    assert time.process_time() - start < 1


TEXTS = (
    st.text()
    | st.text("0123456789,._ \n-+\u2212=*/^$%{}()\\'xe\u00a0\u2009\u0664\u00b2~", max_size=40)
    | st.text("0123456789.,+-−–=*/\\{}()$^_ \n\tboxedanswriS", max_size=40)
    | st.lists(st.sampled_from("1 23 456 , - = { } \\boxed{ \\frac{ or is".split())).map(" ".join)
)


@pytest.mark.parametrize("text, value", ACCEPTED)
def test_an_integer_is_read(text, value):
    assert integer_in(text) == (value, None)


@pytest.mark.parametrize(
    "reason, text",
    [(reason, text) for reason, texts in REFUSED.items() for text in texts],
    ids=lambda text: ascii(text[:30]),
)
def test_what_is_no_integer_is_refused(reason, text):
    start = time.process_time()
    assert integer_in(text) == (None, reason)
    assert time.process_time() - start < 1


@given(
    st.integers(-(10**60), 10**60) | st.sampled_from([999, 1000, -1000]),
    st.sampled_from(["", ",", " ", "\u00a0", "\u202f", "_", "{,}"]),
    st.sampled_from(
        ["{}", "{}.", "{} apples", "**{}**", "${}$", r"1, 2 or \boxed{{ {} }}, 3", "37 + 15 ={}"]
    ),
    st.sampled_from(["-", "\u2212"]),
)
def test_every_form_of_an_integer_is_read(number, separator, frame, minus):
    digits = f"{abs(number):,}".replace(",", separator)
    assert integer_in(frame.format(f"{minus if number < 0 else ''}{digits}")) == (number, None)


@given(
    st.lists(st.integers(-99, 99), min_size=2, max_size=8).filter(lambda n: len(set(n)) > 1),
    st.sampled_from([" ", ", ", ",", "\n", " or ", "; ", " | ", "\t", ". ", "_", "\u200b"]),
    st.sampled_from(["{}", "Answer: {}", "37 + 15 = {}", r"\boxed{{{}}}", "**{}**"]),
)
def test_a_list_of_guesses_is_never_read(guesses, separator, frame):
    # of two digits at most, so that no list looks like groups of three
    assert integer_in(frame.format(separator.join(map(str, guesses))))[0] is None


@given(TEXTS, st.sampled_from(["37 + 15 is 52", "-7", "x > 3", "", "none"]))
def test_what_was_thought_is_not_read(thought, said):
    assert integer_in(f"<think>{thought}</think>{said}") == integer_in(said)
    value, reason = integer_in(thought)
    assert (value is None) == (reason is not None)


@pytest.mark.parametrize("name", ["gsm8k", "arithmetic"])
def test_reasoning_and_the_budget_count_in_both_tasks(name, tmp_path):
    """Reasoning that the prompt opened and nothing closes holds no answer, and a right answer that
    the budget cut off earns no more than a wrong one.
    """
    task = gsm8k(tmp_path / "gsm8k") if name == "gsm8k" else load_task(name)
    assert task.reads_reasoning
    problem = problem_at(task, seed=0, split="train", level=task.default_level, index=0)
    said = f"<think>\nPerhaps this:\n{problem.target}\nBut wait"
    texts = [said, f"<think>\nwell</think>{problem.target}", problem.target, "Answer: 1000001"]
    scores = scores_of(task, problem, texts)
    unclosed, closed, plain, wrong = scores
    assert unclosed.reward == 0 and not unclosed.exact
    assert closed == plain and plain.exact and plain.reward == 1

    cut, wrong_cut = (
        without_end(task, problem, texts[2], plain),
        without_end(task, problem, texts[3], wrong),
    )
    assert not cut.exact and cut.value < 1 and wrong_cut == wrong
    assert cut.reward == (0.5 if name == "arithmetic" else FORM) >= wrong.reward
    assert cut.parts["reason"] == CUT_OFF and cut.parts["unended"] == cut.reward - 1
