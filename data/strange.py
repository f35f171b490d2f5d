"""Strange texts: random strings among words, to train a model to copy what it has never read.

A policy that is trained on prose alone can be wrong on tables, code, long numbers or an alphabet it
hardly knows (`data.foreign`). These texts widen what it is trained on, without showing any of those
kinds: their words are random. Words come in families. Those of one family look alike, because they
are made in one way from one small stock of characters or by one pattern, so they must be read to be
told apart. As in other texts, a few words of a family can be much more frequent than the rest.

    python -m data.strange FOLDER      write documents of strange texts to FOLDER

Then `python train.py --texts FOLDER` trains on them; copy texts of your own beside them first. The
embedded model has seen such words in its pretraining (`data.make.texts`).
"""

import math
import random
import string
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from data.corpus import Document, documents_of, load_corpus
from data.errors import Parser, UserError, exit_status
from data.files import read_json, write_whole

# The words of a family, and the most families that one text is made of.
FAMILY = 24
MAX_FAMILIES = 8

# The share of strange words in a strange text lies between these two.
SHARE = (0.2, 1.0)

# How unevenly the words of a family are repeated: Zipf's exponent lies between these two.
ZIPF = (0.0, 2.0)

# The ways to make the words of a family, and how many of a hundred families are made in each.
KINDS = {
    "script": 24,
    "code": 12,
    "run": 12,
    "compound": 12,
    "mark": 10,
    "wrapped": 15,
    "pattern": 15,
}

# How often a word of letters ends with a punctuation mark.
MARKED = 0.1

# Characters of ASCII without the space.
PRINTABLE = string.digits + string.ascii_letters + string.punctuation

# What a wrapped word looks like; W stands for the word.
WRAPPINGS = [
    *("W", "W", "W:", "W()", "-W", "--W", "#W", "@W"),
    *("(W)", "[W]", "{W}", "<W>", '"W"', "'W'", "`W`", "*W*", "_W_", "$W;"),
]

# Letters and symbols, by their first and last code point. The alphabets of `data.foreign` are not
# among them. None of these characters changes under Unicode normalisation.
SCRIPTS = {
    name: tuple(int(code, 16) for code in codes.split())
    for name, codes in read_json(Path(__file__).with_name("scripts.json")).items()
}

# A maker of the words of one family.
Maker = Callable[[], str]


def log_uniform(low: int, high: int, rng: random.Random) -> int:
    """Return an integer from `low` to `high`; every order of magnitude is equally likely."""
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


def script(rng: random.Random) -> Maker:
    """Return a maker of random words of letters of one script."""
    first, last = rng.choice(list(SCRIPTS.values()))
    letters = [chr(code) for code in range(first, last + 1) if chr(code).isprintable()]
    stock = rng.sample(letters, log_uniform(6, min(60, len(letters)), rng))
    return words_of(stock, rng)


def words_of(letters: Sequence[str], rng: random.Random) -> Maker:
    """Return a maker of random words of `letters`, some with a punctuation mark at the end."""
    longest = log_uniform(2, 10, rng)

    def make() -> str:
        word = "".join(rng.choices(letters, k=rng.randint(1, longest)))
        return word + rng.choice(",.;:!?") if rng.random() < MARKED else word

    return make


def code(rng: random.Random) -> Maker:
    """Return a maker of random strings, of up to 24 out of a few characters of ASCII."""
    of = rng.choice([string.digits, string.digits, string.hexdigits, PRINTABLE, PRINTABLE])
    stock = rng.sample(of, log_uniform(2, min(40, len(of)), rng))
    if rng.random() < 0.5:
        stock += rng.sample(string.punctuation, rng.randint(1, 3))
    longest = log_uniform(2, 24, rng)
    return lambda: "".join(rng.choices(stock, k=log_uniform(1, longest, rng)))


def run(rng: random.Random) -> Maker:
    """Return a maker of words in which a character, or two by turns, stand up to 32 times."""
    units = [
        "".join(rng.choices(string.punctuation if rng.random() < 0.6 else PRINTABLE, k=length))
        for length in rng.choices([1, 1, 2], k=rng.randint(1, 4))
    ]
    most = rng.randint(1, 4)
    return lambda: "".join(
        rng.choice(units) * log_uniform(1, 32, rng) for _ in range(rng.randint(1, most))
    )


def compound(parts: Sequence[str], rng: random.Random) -> Maker:
    """Return a maker of words of two to seven `parts`, or of numbers, joined by a few marks."""
    marks = rng.sample(string.punctuation, rng.randint(1, 3))
    most = rng.randint(1, 6)
    is_numeric = rng.random() < 0.4

    def part() -> str:
        if is_numeric:
            return "".join(rng.choices(string.digits, k=rng.randint(1, 5)))
        return rng.choice(parts)

    def make() -> str:
        return part() + "".join(rng.choice(marks) + part() for _ in range(rng.randint(1, most)))

    return make


def mark(rng: random.Random) -> Maker:
    """Return a maker of words that are marks alone, one to three characters long."""
    stock = [
        "".join(rng.choices(string.punctuation, k=length))
        for length in rng.choices([1, 1, 1, 2, 2, 3], k=rng.randint(1, 6))
    ]
    return lambda: rng.choice(stock)


def wrapped(parts: Sequence[str], rng: random.Random) -> Maker:
    """Return a maker of `parts` in capitals or between marks, or both."""
    change = rng.choice([str.upper, str.upper, str.upper, str.title, str.lower])
    before, after = rng.choice(WRAPPINGS).split("W")
    return lambda: f"{before}{change(rng.choice(parts))}{after}"


def pattern(parts: Sequence[str], rng: random.Random) -> Maker:
    """Return a maker of words of one pattern: some pieces are always the same, others vary."""

    def piece() -> Maker:
        kind = rng.choice(["digits", "digits", "hexadecimal", "part", "fixed part", "fixed marks"])
        length = rng.randint(2, 8) if kind == "hexadecimal" else rng.randint(1, 5)
        fixed_part = rng.choice(parts)
        fixed_marks = "".join(rng.choices(string.punctuation, k=rng.choice([1, 1, 2, 3])))
        makers: dict[str, Maker] = {
            "digits": lambda: "".join(rng.choices(string.digits, k=length)),
            "hexadecimal": lambda: "".join(rng.choices(string.hexdigits[:16], k=length)),
            "part": lambda: rng.choice(parts),
            "fixed part": lambda: fixed_part,
            "fixed marks": lambda: fixed_marks,
        }
        return makers[kind]

    pieces = [piece() for _ in range(rng.randint(2, 6))]
    return lambda: "".join(make() for make in pieces)


def family(
    parts: Sequence[str],
    rng: random.Random,
    script: Callable[[random.Random], Maker] = script,
    kinds: Sequence[str] = tuple(KINDS),
) -> list[str]:
    """Return `FAMILY` words that look alike, of one of `kinds`, made of `parts` or at random."""
    kind = rng.choices(kinds, [KINDS[kind] for kind in kinds])[0]
    makers: dict[str, Callable[[], Maker]] = {
        "script": lambda: script(rng),
        "code": lambda: code(rng),
        "run": lambda: run(rng),
        "compound": lambda: compound(parts, rng),
        "mark": lambda: mark(rng),
        "wrapped": lambda: wrapped(parts, rng),
        "pattern": lambda: pattern(parts, rng),
    }
    make = makers[kind]()
    return [make() for _ in range(FAMILY)]


def mingled(
    plain: Sequence[str], families: Sequence[Sequence[str]], rng: random.Random
) -> list[str]:
    """Return the words `plain`, a share of them replaced by words of a few `families`."""
    chosen = rng.choices(families, k=log_uniform(1, MAX_FAMILIES, rng))
    stock = [word for words in chosen for word in words]
    replaced = rng.uniform(*SHARE)
    return [rng.choice(stock) if rng.random() < replaced else word for word in plain]


def repeated(words: Sequence[str], exponent: float) -> list[str]:
    """Return `words`, each repeated in proportion to the inverse power of its rank (Zipf's law).

    At an `exponent` of 0 each occurs `FAMILY` times; the higher it is, the fewer words prevail.
    """
    return [
        word
        for rank, word in enumerate(words, start=1)
        for _ in range(math.ceil(FAMILY / rank**exponent))
    ]


def documents(count: int, words: int, seed: int = 0) -> list[Document]:
    """Return `count` strange documents of `words` words; the plain words are training prose."""
    prose = [word for document in documents_of("train", load_corpus()) for word in document.words]
    found = []
    for number in range(count):
        rng = random.Random(f"strange/{seed}/{number}")
        start = rng.randrange(max(1, len(prose) - words))
        plain = prose[start : start + words]
        families = [repeated(family(prose, rng), rng.uniform(*ZIPF)) for _ in range(MAX_FAMILIES)]
        title = f"strange-{seed}-{number:03}"
        found.append(Document(title, " ".join(mingled(plain, families, rng)) + "\n"))
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status, 2 for a user's mistake."""
    return exit_status("data.strange", lambda: _run(arguments))


def _run(arguments: list[str] | None) -> int:
    parser = Parser(
        prog="python -m data.strange", description="Write documents of random words to a folder."
    )
    parser.add_argument("folder", metavar="FOLDER", help="made if it does not exist")
    parser.add_argument("--documents", type=int, default=60, metavar="N", help="default: 60")
    parser.add_argument("--words", type=int, default=600, metavar="N", help="default: 600")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    options = parser.parse_args(arguments)
    for name in ("documents", "words"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name} {getattr(options, name)}: must be at least 1")

    folder = Path(options.folder)
    for document in documents(options.documents, options.words, options.seed):
        write_whole(folder / f"{document.title}.txt", document.text.encode())
    print(f"{folder}: {options.documents} strange documents of {options.words} words")
    return 0


if __name__ == "__main__":
    sys.exit(main())
