"""Hostile tasks: files with a class whose attributes or methods are wrong."""

from collections.abc import Iterator

from hostile import ACCEPTED, ESCAPE, HARMLESS, REFUSED, Input

OPENING = "from tasks.base import Problem, Score, key_of\n"
MAKE = 'def make(self, level, split, rng): return Problem("t", level, "a b", "a b", key_of("a"))'
SCORE = "def score(self, problem, completions): return [Score(0.5) for _ in completions]"

# The body of a class T: one line each.
NAME = "name = 't'"
WHOLE = (NAME, MAKE, SCORE)
TASKS = {
    "needs arguments": (*WHOLE, "def __init__(self, a): pass"),
    "init raises": (*WHOLE, "def __init__(self): 1 / 0"),
    "no name": (MAKE, SCORE),
    "name is a number": ("name = 3", MAKE, SCORE),
    "name is empty": ("name = ''", MAKE, SCORE),
    "name with escapes": (f"name = {ESCAPE!r}", MAKE, SCORE),
    "no make": (NAME, SCORE),
    "make is no function": (NAME, "make = 3", SCORE),
    "no score": (NAME, MAKE),
    "make takes too few": (NAME, "def make(self): pass", SCORE),
    "rewards is a number": (*WHOLE, "rewards = 3"),
    "options is a list": (*WHOLE, "options = [1]"),
    "levels raises": (*WHOLE, "def levels(self, level): 1 / 0"),
    "levels of words": (*WHOLE, "def levels(self, level): return 'x'"),
    "draft raises": (*WHOLE, "def draft(self, problem): 1 / 0"),
    "draft of none": (*WHOLE, "def draft(self, problem): return lambda text: None"),
    "budget of words": (*WHOLE, "def max_new_tokens(self, level): return 'x'"),
    "range of one": (*WHOLE, "reward_range = (1, 1)"),
    "default level of words": (*WHOLE, "default_level = 'x'"),
}
FILES = {
    "no Python": "def (",
    "null bytes": "\0",
    "a missing module": "import no_such_module",
    "raises": "raise RuntimeError('no')",
    "raises escapes": f"raise RuntimeError({ESCAPE!r})",
    "exits": "import sys; sys.exit(0)",
    "exits with words": "raise SystemExit('goodbye')",
    "recursion": "def f(): f()\nf()",
    "no class": "x = 1",
    "no type": "T = 1",
}
MADE = ["None", "3", "'x'", "{}", "1 / 0", "[]"] + [
    f"Problem({', '.join(values)})"
    for values in (
        ("'t'", "level", "None", "'a'", "'k'"),
        ("'t'", "level", "'a'", "3", "'k'"),
        ("'t'", "level", "'a'", "'a'", "None"),
        ("'t'", "level", "''", "''", "'k'"),
        ("'t'", "level", "'\\ud800'", "'a'", "'k'"),
        ("'t'", "level", "'a'", "'\\ud800'", "'k'"),
        ("'t'", "'x'", "'a'", "'a'", "'k'"),
        ("'t'", "level", "'a'", "'a'", "'k'", "3"),
        ("'t'", "level", "'a'", "'a'", "'k'", "{'x': object()}"),
        ("'t'", "level", "'a ' * 10 ** 6", "'a'", "'k'"),
        ("'t'", "level", "'a'", "'a ' * 10 ** 6", "'k'"),
    )
]
SCORED = [
    "None",
    "3",
    "[]",
    "[Score(0.5)]",
    "[0.5 for _ in completions]",
    "['x' for _ in completions]",
    "1 / 0",
    "[Score(float('nan')) for _ in completions]",
    "[Score(7) for _ in completions]",
    "[Score('x') for _ in completions]",
    "[Score(None) for _ in completions]",
    "[Score(0.5, parts=3) for _ in completions]",
    "[Score(0.5, parts={'x': object()}) for _ in completions]",
    "[Score(0.5, parts={'x': float('nan')}) for _ in completions]",
    "[Score(0.5, value='x') for _ in completions]",
    "(_ for _ in ()).throw(KeyError('k'))",
    "__import__('sys').exit(0)",
]
FINE_TASKS = {
    "name with escapes",
    "Problem('t', level, '', '', 'k')",
    "[Score(0.5, parts={'x': float('nan')}) for _ in completions]",
}


def tasks() -> Iterator[Input]:
    """Yield files with a class of a task, or without one."""

    def case(name: str, source: str, outcome: str = REFUSED) -> Input:
        flags = ("--preflight", "only") if name.startswith("levels") else ()
        return Input(
            f"task: {name}",
            ("--task", "own.py:T", *flags),
            lambda home: (home / "own.py").write_text(OPENING + source) and None,
            outcome,
        )

    def of_class(name: str, *body: str) -> Input:
        source = "class T:\n" + "".join(f"    {line}\n" for line in body)
        return case(name, source, HARMLESS if name in FINE_TASKS else REFUSED)

    yield case("whole", "class T:\n" + "".join(f"    {line}\n" for line in WHOLE), ACCEPTED)
    for name, source in FILES.items():
        yield case(name, source)
    for name, body in TASKS.items():
        yield of_class(name, *body)
    for made in MADE:
        yield of_class(made, NAME, SCORE, f"def make(self, level, split, rng): return {made}")
    for scored in SCORED:
        yield of_class(
            scored, NAME, MAKE, f"def score(self, problem, completions): return {scored}"
        )
