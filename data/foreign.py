"""Foreign kinds of text, on which nothing is trained: a second held-out set beside the test split.

The corpus is English prose. Users' own texts also contain tables, code, lists and other alphabets,
and a policy that is right on every test document of the corpus can be wrong on those. Six kinds are
generated from word lists. They are a pure function of kind and number, so they are the same
everywhere. None of these texts may be used for training or for the lessons of the embedded model
(`tests/data/test_foreign.py`).
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

from data.corpus import Document
from data.files import read_json

# Documents of each kind.
DOCUMENTS = 12

# The words that all kinds are made of.
LISTS = read_json(Path(__file__).with_suffix(".json"))
NOUNS, VERBS, QUALITIES, UNITS, HOSTS = (
    LISTS[name].split() for name in ("nouns", "verbs", "qualities", "units", "hosts")
)
ALPHABETS: dict[str, str] = LISTS["alphabets"]

MARKS = "- = * # ~ . _ + / : > < ! ? | ^".split()
BRACKETS = [*("()", "[]", "{}", "<>", "«»"), ("/*", "*/"), ("<!--", "-->")]


def foreign_texts(words: int = 1000) -> dict[str, list[Document]]:
    """Return the documents of each kind, each of at least `words` words."""
    return {kind: list(generated(kind, words)) for kind in KINDS}


def generated(kind: str, words: int = 1000, count: int = DOCUMENTS) -> Iterator[Document]:
    """Yield `count` documents of one of `KINDS`, each of at least `words` words."""
    for number in range(count):
        rng = random.Random(f"foreign/{kind}/{number}")
        parts: list[str] = []
        length = 0
        while length < words:
            parts.append(KINDS[kind](rng, number))
            length += len(parts[-1].split())
        yield Document(f"{kind} {number}", "\n\n".join(parts) + "\n")


def _table(rng: random.Random, number: int) -> str:
    """Return a table: in Markdown, with ASCII lines, or with columns that are aligned by spaces."""
    names = rng.sample(NOUNS, rng.randint(2, 5))
    rows = [names] + [[_cell(rng) for _ in names] for _ in range(rng.randint(4, 12))]
    widths = [max(len(row[i]) for row in rows) for i in range(len(names))]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths)] for row in rows]

    if number % 3 == 0:
        rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
        lines = ["| " + " | ".join(row) + " |" for row in padded]
        return "\n".join([lines[0], rule, *lines[1:]])
    if number % 3 == 1:
        rule = "+" + "+".join("-" * (width + 2) for width in widths) + "+"
        lines = ["| " + " | ".join(row) + " |" for row in padded]
        return "\n".join([rule, lines[0], rule, *lines[1:], rule])
    return "\n".join("  ".join(row).rstrip() for row in padded)


def _cell(rng: random.Random) -> str:
    return rng.choice(
        [
            rng.choice(NOUNS),
            f"{rng.choice(QUALITIES)} {rng.choice(NOUNS)}",
            str(rng.randrange(1000)),
            f"{rng.uniform(0, 100):.2f}",
            f"{rng.randrange(101)}%",
            rng.choice(["yes", "no", "n/a", "-", "x"]),
        ]
    )


def _code(rng: random.Random, number: int) -> str:
    """Return a function: Python in every second document, C in the others."""
    name = f"{rng.choice(VERBS)}_{rng.choice(NOUNS)}"
    given, other, item = rng.sample(NOUNS, 3)
    operator, bound = rng.choice(["+", "-", "*", "%"]), rng.randrange(2, 4096)
    call = f"{rng.choice(VERBS)}_{rng.choice(NOUNS)}"
    if number % 2 == 0:
        lines = [
            f"def {name}({given}, {other}={bound}):",
            f'    """{rng.choice(VERBS).capitalize()} the {rng.choice(QUALITIES)} {given}."""',
            f"    result = [{item}.{rng.choice(NOUNS)} for {item} in {given} if {item} "
            "is not None]",
            f"    if len(result) {rng.choice(['<', '>=', '=='])} {other}:",
            f'        raise ValueError(f"{rng.choice(QUALITIES)} {given}: {{{other}!r}}")',
            f"    return {{'{item}': result[{rng.randrange(3)}:], '{other}': {call}(result) "
            f"{operator} {bound}}}",
        ]
        return "\n".join(lines)

    lines = [
        f"static int {name}(struct {given} *{item}, size_t {other})",
        "{",
        f"    for (size_t i = 0; i < {other}; i++) {{",
        f"        if ({item}->{rng.choice(NOUNS)}[i] == NULL || i {operator} {bound} == "
        f"0x{bound:04x})",
        f"            return -{rng.choice(['EINVAL', 'ENOMEM', 'EAGAIN'])};  /* "
        f"{rng.choice(QUALITIES)} */",
        f"        {item}->{rng.choice(NOUNS)} {operator}= {call}(&{item}->{rng.choice(NOUNS)}[i], "
        f"{bound}UL);",
        "    }",
        "    return 0;",
        "}",
    ]
    return "\n".join(lines)


def _list(rng: random.Random, number: int) -> str:
    """Return a list of up to three levels, with bullets, boxes, numbers or letters."""
    lines, depth = [], 0
    for i in range(1, rng.randint(5, 14)):
        depth = rng.randint(0, min(2, depth + 1)) if i > 1 else 0
        bullet = rng.choice(
            ["-", "*", "•", "- [ ]", "- [x]", f"{i}.", f"({i})", f"{'abcdefghijklmnop'[i]})"]
        )
        point = f"{rng.choice(VERBS)} the {rng.choice(QUALITIES)} {rng.choice(NOUNS)}"
        end = rng.choice(
            ["", ";", f" ({rng.choice(NOUNS)})", f": {rng.choice(NOUNS)}, {rng.choice(NOUNS)}"]
        )
        lines.append(f"{'  ' * depth}{bullet} {point}{end}")
    return "\n".join(lines)


def _numbers(rng: random.Random, number: int) -> str:
    """Return a line of dates, times, quantities, versions, addresses and hashes, and words."""
    year, month, day = rng.randrange(1900, 2100), rng.randrange(1, 13), rng.randrange(1, 29)
    clock = f"{rng.randrange(24):02}:{rng.randrange(60):02}"
    version = ".".join(str(rng.randrange(20)) for _ in range(rng.choice([2, 3, 3, 4])))
    makers = [
        lambda: f"{year}-{month:02}-{day:02}",
        lambda: f"{day}/{month}/{year % 100:02}",
        lambda: f"{clock}:{rng.randrange(60):02}",
        lambda: f"{year}-{month:02}-{day:02}T{clock}Z",
        lambda: f"{rng.uniform(0, 500):.{rng.randrange(4)}f} {rng.choice(UNITS)}",
        lambda: f"{rng.randrange(1000, 9_999_999):,}",
        lambda: f"±{rng.uniform(0, 9):.1e}",
        lambda: f"v{version}",
        lambda: f"{rng.choice(NOUNS)}=={version}",
        lambda: ".".join(str(rng.randrange(256)) for _ in range(4)),
        lambda: f"0x{rng.getrandbits(32):08x}",
        lambda: (
            f"https://{rng.choice(HOSTS)}/{rng.choice(NOUNS)}/{rng.randrange(10**5)}"
            f"?{rng.choice(NOUNS)}={rng.randrange(99)}"
        ),
        lambda: f"{rng.choice(NOUNS)}.{rng.choice(VERBS)}@{rng.choice(HOSTS)}",
        lambda: rng.choice(NOUNS),
    ]
    return " ".join(rng.choice(makers)() for _ in range(rng.randint(6, 14)))


def _punctuation(rng: random.Random, number: int) -> str:
    """Return words with long runs of punctuation: rules, leaders, banners, boxes and brackets."""
    mark, opening = rng.choice(MARKS), rng.choice(BRACKETS)
    title = f"{rng.choice(QUALITIES)} {rng.choice(NOUNS)}"
    run = mark * rng.randint(3, 30)
    return rng.choice(
        [
            f"{run}\n{title}\n{run}",
            f"{rng.choice(NOUNS)} {'.' * rng.randint(3, 24)} {rng.randrange(400)}",
            f"{mark * 3} {title} {mark * 3}",
            f"{opening[0]} {title} {opening[1]}",
            " ".join(rng.choice(MARKS) * rng.randint(1, 8) for _ in range(rng.randint(2, 8))),
            f"{rng.choice(NOUNS)}{mark * 2}{rng.choice(NOUNS)} "
            f"{''.join(rng.choices(MARKS, k=rng.randint(2, 9)))} {title}!!!",
        ]
    )


def _alphabet(rng: random.Random, number: int) -> str:
    """Return a sentence in one alphabet; a document has one alphabet."""
    words = list(ALPHABETS.values())[number % len(ALPHABETS)].split()
    return " ".join(rng.sample(words, rng.randint(5, 12))) + rng.choice(".!?")


KINDS: dict[str, Callable[[random.Random, int], str]] = {
    "tables": _table,
    "code": _code,
    "lists": _list,
    "numbers": _numbers,
    "punctuation": _punctuation,
    "alphabets": _alphabet,
}
