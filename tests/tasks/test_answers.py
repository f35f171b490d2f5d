"""Which number a text answers with: tables of texts that are accepted and refused."""

import dataclasses

import pytest
from refused_answers import REFUSED

from tasks.answers import Answer, extract

ACCEPTED = [  # text, value, span
    ("42", 42, "42"),
    ("0", 0, "0"),
    ("007", 7, "007"),
    ("-42", -42, "-42"),
    ("+42", 42, "+42"),
    ("-0", 0, "-0"),
    ("\u221242", -42, "\u221242"),
    (" \n42\t\r\n", 42, "42"),
    ("It is 3.", 3, "3"),
    ("42!", 42, "42"),
    ("42.So", 42, "42"),
    # groups
    ("1,234", 1234, "1,234"),
    ("-1,234,567", -1234567, "-1,234,567"),
    ("1 234 567", 1234567, "1 234 567"),
    ("1\u00a0234", 1234, "1\u00a0234"),
    ("1\u2009234", 1234, "1\u2009234"),
    ("1\u202f234", 1234, "1\u202f234"),
    ("1_234", 1234, "1_234"),
    ("1{,}234", 1234, "1{,}234"),
    (r"1\,234", 1234, r"1\,234"),
    ("12 345", 12345, "12 345"),  # or 12 and 345: a group where it can be one
    ("0,042", 42, "0,042"),
    # words and units
    ("42 apples", 42, "42"),
    ("42 kg", 42, "42"),
    ("52 m2", 52, "52"),
    ("$42", 42, "42"),
    ("-$42", -42, "-$42"),
    (r"\$42", 42, "42"),
    ("42 (forty-two)", 42, "42"),
    ("t1 has 42, the 3rd x2 and GPT-4 none", 42, "42"),
    ("52, yes, 52.", 52, "52"),
    ("1,000, or rather 1000", 1000, "1000"),
    ("(42)", 42, "42"),
    ("\u201c42\u201d", 42, "42"),
    ("...42", 42, "42"),
    ("42 3rd graders", 42, "42"),
    # markup
    ("**42**", 42, "42"),
    ("`-42`", -42, "-42"),
    ("_42_", 42, "42"),
    ("__42__", 42, "42"),
    ("$42$", 42, "42"),
    ("$-42$", -42, "-42"),
    (r"\(42\)", 42, "42"),
    (r"\[ -42 \]", -42, "-42"),
    ("<b>42</b>", 42, "42"),
    ("-> 42", 42, "42"),
    ("- It is 42", 42, "42"),
    # places
    ("37 + 15 = 52", 52, "52"),
    ("37+15=52", 52, "52"),
    ("1.5 + 1.5 = 3", 3, "3"),
    ("x = 1 = 2", 2, "2"),
    ("10 - 12 =-2", -2, "-2"),
    ("3 plus 4 equals 7.", 7, "7"),
    ("37 and 15. Answer: 52", 52, "52"),
    ("37 and 15. **Answer:** 52", 52, "52"),
    ("12? 13? The final answer is: **52**.", 52, "52"),
    ("12 13 <answer>52</answer>", 52, "52"),
    ("1 or 2 => 52", 52, "52"),
    (r"\boxed{42}", 42, "42"),
    (r"7 = \boxed{ -1{,}234 } = 8", -1234, "-1{,}234"),
    (r"\boxed{1} \boxed{2}", 2, "2"),
    (r"\boxed{37 + 15 = 52}", 52, "52"),
    (r"\fbox{5}, no, \boxed{\text{42 kg}}.", 42, "42"),
    (r"$\boxed{\boxed{5}}$", 5, "5"),
    (r"\boxed{\} 5}", 5, "5"),
    # behind an expression
    ("37 + 15 is 52", 52, "52"),
    ("37 plus 15 is 52", 52, "52"),
    ("The sum of 37 and 15 is 52", 52, "52"),
    ("The sum of 37 and 15 is: **52**.", 52, "52"),
    ("The answer to 37 + 15 is 52", 52, "52"),
    ("12 - 48 is equal to -36.", -36, "-36"),
    ("37 and 15 therefore makes exactly 52 apples", 52, "52"),
    ("37 + 15 gives us $52$", 52, "52"),
    ("Answer: the sum of 37 and 15 is 52.", 52, "52"),
    ("37 + 15 is 50. No: 37 + 15 is 52", 52, "52"),
    ("52 is the answer", 52, "52"),
    ("So the answer: 52.", 52, "52"),
    ("A: 52", 52, "52"),
    ("The answer is\n52", 52, "52"),
    # labels
    ("Step 2: 52", 52, "52"),
    ("**Step 2:** it is 52", 52, "52"),
    ("- Part 1: 52\n- Part 2: 52", 52, "52"),
    ("### Step 12:\n52", 52, "52"),
    ("Step 1: 37 + 15 = 52", 52, "52"),
    # reasoning
    ("<think>50</think>52", 52, "52"),
    ("</think>\n\n52", 52, "52"),
    ("<think>1 <think>2</think> 3</think>The answer is 52.", 52, "52"),
    (r"<THINKING>\boxed{50}</THINKING> 52", 52, "52"),
    ("<think>it is not 52 but x > 52</think>\\boxed{52}", 52, "52"),
    # exclamations
    ("52!", 52, "52"),
    ("The answer is 52!", 52, "52"),
    ("37 + 15 is 52!", 52, "52"),
    ("It is **52!** So there.", 52, "52"),
    ("It is $52!!", 52, "52"),
    ("<answer>52!</answer>", 52, "52"),
    ("5! = 120", 120, "120"),
    # neither compared nor denied
    ("x -> 52", 52, "52"),
    ("x ==> 52", 52, "52"),
    ("> 52", 52, "52"),
    ("<|assistant|> 52<|end|>", 52, "52"),
    ("<52>", 52, "52"),
    ("52</answer>", 52, "52"),
    ("Since 5 > 3, the answer is 52", 52, "52"),
    ("See above: 52", 52, "52"),
    ("I am not sure. It is 52.", 52, "52"),
    ("52. That was not easy.", 52, "52"),
    ("It is not hard to see that the answer is 52.", 52, "52"),
    ("50 is wrong. The answer is 52.", 52, "52"),
]


@pytest.mark.parametrize("text, value, span", ACCEPTED)
def test_accepted(text, value, span):
    assert extract(text) == Answer(value, span, None)


@pytest.mark.parametrize(
    "reason, text",
    [(reason, text) for reason, texts in REFUSED.items() for text in texts],
    ids=lambda text: ascii(text[:30]),
)
def test_refused(reason, text):
    answer = extract(text)
    assert (answer.value, answer.reason) == (None, reason) and answer.span in text


@pytest.mark.parametrize(
    "text, span",
    [
        ("It is 1.5.", "1.5"),
        ("a 12,34 b", "12,34"),
        ("so 37 + 15.", "37 + 15"),
        ("a 12, 13 or 14.", "12, 13 or 14"),
        ("so - 42.", "- 42"),
        ("Yes. It is not 52. So", " It is not 52."),
        ("a <think>b 4", "<think>b 4"),
        ("so 5! is it", "5"),
        ("x", ""),
        (r"a -\boxed{4} b", r"-\boxed{4}"),
        (r"a \boxed{4 b", r"\boxed{4 b"),
    ],
)
def test_the_span_shows_what_was_refused(text, span):
    assert extract(text).value is None and extract(text).span == span


def test_an_answer_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        extract("42").value = 43
