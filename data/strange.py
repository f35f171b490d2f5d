"""Strange texts: random strings among words, to train a model to copy what it has never read.

A policy that is trained on prose alone can be wrong on tables, code, long numbers or an alphabet it
hardly knows (`data/foreign`). These texts widen what it is trained on, without showing any of those
kinds: their words are random. Words come in families. Those of one family look alike, because they
are the same sequence of pieces, each from one small stock of characters or words, so they must be
read to be told apart. As in other texts, a few words of a family can be much more frequent than the
rest.

    python -m data.strange FOLDER      write documents of strange texts to FOLDER

Then `python train.py --texts FOLDER` trains on them; copy texts of your own beside them first. The
embedded model has seen such words in its pretraining (`data.make`).
"""

import math
import random
import string
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from data.corpus import Document, documents_of, load_corpus
from data.errors import Parser, exit_status
from data.files import read_json, write_whole

# The words of a family, and the most families that one text is made of.
FAMILY = 24
MAX_FAMILIES = 8

# The share of strange words in a strange text lies between these two.
SHARE = (0.2, 1.0)

# How unevenly the words of a family are repeated: Zipf's exponent lies between these two.
ZIPF = (0.0, 2.0)

# How many pieces the words of a family have, and how often the pieces are of each kind.
PIECES = {1: 8, 2: 3, 3: 3, 4: 1, 5: 1}
KINDS = {"script": 5, "code": 4, "run": 2, "word": 4, "marks": 3}

# Characters of ASCII without the space.
PRINTABLE = string.digits + string.ascii_letters + string.punctuation

# Letters and symbols, by their first and last code point. The alphabets of `data/foreign` are not
# among them. None of these characters changes under Unicode normalisation.
SCRIPTS = {
    name: tuple(int(code, 16) for code in codes.split())
    for name, codes in read_json(Path(__file__).with_name("scripts.json")).items()
}


def log_uniform(low: int, high: int, rng: random.Random) -> int:
    """Return an integer from `low` to `high`; every order of magnitude is equally likely."""
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


def letters_of_a_script(rng: random.Random) -> list[str]:
    """Return the letters of one of `SCRIPTS`."""
    first, last = rng.choice(list(SCRIPTS.values()))
    return [chr(code) for code in range(first, last + 1) if chr(code).isprintable()]


def family(
    parts: Sequence[str],
    rng: random.Random,
    letters: Callable[[random.Random], Sequence[str]] = letters_of_a_script,
) -> list[str]:
    """Return `FAMILY` words that look alike: sequences of the same kinds of pieces.

    `parts` are the words that some pieces are; `letters` returns the letters of a script.
    """
    (count,) = rng.choices(list(PIECES), list(PIECES.values()))
    pieces = [_piece(parts, rng, letters) for _ in range(count)]
    return ["".join(make() for make in pieces) for _ in range(FAMILY)]


def _piece(
    parts: Sequence[str], rng: random.Random, letters: Callable[[random.Random], Sequence[str]]
) -> Callable[[], str]:
    """Return a function that draws a piece of a word, each time from the same stock."""
    (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
    if kind == "word":
        cases: list[Callable[[str], str]] = [str, str, str.upper, str.upper, str.title]
        change = rng.choice(cases)
        return lambda: change(rng.choice(parts))

    if kind == "run":  # one or two characters by turns, up to 32 times
        unit = "".join(rng.choices(string.punctuation, k=rng.choice([1, 1, 2])))
        return lambda: unit * log_uniform(1, 32, rng)

    if kind == "marks":  # often always the same
        stock = [
            "".join(rng.choices(string.punctuation, k=rng.choice([1, 1, 2, 3])))
            for _ in range(rng.choice([1, 1, 2, 6]))
        ]
        return lambda: rng.choice(stock)

    alphabets = [string.digits, string.digits, string.hexdigits, PRINTABLE, PRINTABLE]
    alphabet = letters(rng) if kind == "script" else rng.choice(alphabets)
    stock = rng.sample(alphabet, log_uniform(2, min(60, len(alphabet)), rng))
    longest = log_uniform(2, 10 if kind == "script" else 24, rng)
    return lambda: "".join(rng.choices(stock, k=log_uniform(1, longest, rng)))


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
    """Write documents to a folder; return the exit status, 2 for a user's mistake."""
    parser = Parser(
        prog="python -m data.strange", description="Write documents of random words to a folder."
    )
    parser.add_argument("folder", metavar="FOLDER", help="made if it does not exist")
    parser.add_argument("--documents", type=int, default=60, metavar="N", help="default: 60")
    parser.add_argument("--words", type=int, default=600, metavar="N", help="default: 600")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")

    def run() -> int:
        options = parser.parse_args(arguments)
        found = documents(options.documents, options.words, options.seed)
        for document in found:
            path = Path(options.folder, f"{document.title}.txt")
            write_whole(path, document.text.encode())
        print(f"{options.folder}: {len(found)} strange documents of {options.words} words")
        return 0

    return exit_status("data.strange", run)


if __name__ == "__main__":
    sys.exit(main())
