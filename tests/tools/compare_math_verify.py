"""How math-verify and our reader of numbers fare on the same answers, in Markdown:
`python tests/tools/compare_math_verify.py`.

A written form is read rightly if it is accepted for its number and for no other one. math-verify is
given the answer alone, the answer in a box, and the whole completion. A second table has the time
that hostile answers take, each in a process of its own; one that takes more than 20 s is ended.
Needs `pip install math-verify`, which the project does not.
"""

import logging
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from written_numbers import NO_ANSWERS, NUMBERS

from tasks.extra.gsm8k import number_of
from tasks.extra.reasoning import final_answer

Accepts = Callable[[str, Fraction | int], bool]

# No completion may take longer, in seconds, or more memory, in bytes.
LIMIT = 20
MEMORY = 4 << 30

HOSTILE = {
    "a tower of powers": r"9^{9^{9^{9}}}",
    "a large power": r"2^{10000000000}",
    "a large factorial": r"100000000!",
    "factorials of factorials": r"((99!)!)!",
    "a large binomial": r"\binom{10000000}{5000000}",
    "a long sum": r"\sum_{k=1}^{10^{9}} \frac{\sin(k)}{k}",
    "3000 nested parentheses": "(" * 3000 + "1" + ")" * 3000,
    "500 nested fractions": r"\frac{1}{" * 500 + "1" + "}" * 500,
    "2000 intervals": ",".join(f"({n},{n + 1})" for n in range(2000)),
    "100,000 digits": "9" * 100_000,
}


def ours(answer: str, number: Fraction | int) -> bool:
    return number_of(final_answer(f"Answer: {answer}") or "") == number


def theirs(form: str, has_alarm: bool = True) -> Accepts:
    """Return math-verify's judgement of an answer that is put into `form`."""
    from math_verify import parse, verify

    parsing = {} if has_alarm else {"parsing_timeout": None}
    verifying = {} if has_alarm else {"timeout_seconds": None}

    def accepts(answer: str, number: Fraction | int) -> bool:
        gold, given = parse(str(number)), parse(form.replace("@", answer), **parsing)
        return bool(verify(gold, given, **verifying))

    return accepts


def is_read_rightly(accepts: Accepts, answer: str) -> bool:
    number = NUMBERS.get(answer)
    others = {Fraction(digits) for digits in re.findall(r"\d+", answer)} - {number}
    is_found = number is None or accepts(answer, number)
    return is_found and not any(accepts(answer, other) for other in others)


def forms() -> None:
    readers = {
        "tasks/extra/gsm8k.py": ours,
        "math-verify, answer alone": theirs("@"),
        "math-verify, in a box": theirs(r"\boxed{@}"),
        "math-verify, whole completion": theirs("So I think.\nAnswer: @"),
    }
    print("| reader | numbers | no answers | wrong |\n|---|---|---|---|")
    for name, accepts in readers.items():
        wrong = [
            [answer for answer in answers if not is_read_rightly(accepts, answer)]
            for answers in (NUMBERS, NO_ANSWERS)
        ]
        right = [f"{len(all_) - len(bad)} of {len(all_)}"
                 for all_, bad in zip((NUMBERS, NO_ANSWERS), wrong)]  # fmt: skip
        shown = ", ".join(f"`{answer[:20]}`" for answer in sum(wrong, []))
        print(f"| {name} | {' | '.join(right)} | {shown} |")


def hostile() -> None:
    print("\n| answer | ours | math-verify | without its alarm |\n|---|---|---|---|")
    for name in HOSTILE:
        print(f"| {name} | {' | '.join(timed(name, which) for which in WAYS)} |", flush=True)


WAYS: dict[str, Callable[[], Accepts]] = {
    "ours": lambda: ours,
    "alarm": lambda: theirs(r"\boxed{@}"),
    "none": lambda: theirs(r"\boxed{@}", has_alarm=False),
}


def timed(name: str, which: str) -> str:
    command = [sys.executable, __file__, name, which]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return f"> {LIMIT} s"
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1][:60]


def time_one(name: str, which: str) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    accepts = WAYS[which]()
    accepts("18", 18)  # what is loaded once does not count
    start = time.perf_counter()
    accepts(HOSTILE[name], 18)
    print(f"{time.perf_counter() - start:.2f} s")


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    if len(sys.argv) == 3:
        time_one(*sys.argv[1:])
    else:
        forms()
        hostile()
