"""The corpus: texts from .txt, .json and .jsonl, merged without loss, split by document.

A document's split is a hash of its words, so it does not move when it is renamed, re-wrapped, or
joined by others.

    python -m data.corpus                          list the corpus: words and split of each document
    python -m data.corpus merge PATH [PATH ...]    add texts to it
"""

import codecs
import hashlib
import itertools
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from align.words import normalise, split_words
from data.errors import Parser, UserError, exit_status
from data.files import json_kind, kind_of, read_json, read_jsonl, read_text, write_whole

TEXTS = Path(__file__).parent / "texts"

# The fewest words of a text that `merge` adds.
MIN_WORDS = 40

# The salt is part of every split and must never change. Without one the 96 embedded documents fall
# 79/6/11 (train, validation, test); with this one, the first that was tried, 75/10/11.
SPLIT_SALT = "interleave"

# Words of a shingle, and the share of a document's shingles from which on it repeats another
# document that has them.
SHINGLE = 5
NEAR = 0.8

# The most bytes that `load_texts` reads. To find repeats in them takes about 20 s and 1 GB.
MAX_TEXT = 20_000_000

# Files with these suffixes must be text. Others are judged by so many bytes at their beginning.
PLAIN = (".txt", ".md")
SNIFF = 8192


@dataclass(frozen=True)
class Document:
    """One text of the corpus, e.g. ``Document("tale-flood", "Monday, the third of ...")``."""

    title: str
    text: str

    @cached_property
    def words(self) -> list[str]:
        """Return its words."""
        return split_words(self.text)


def load_corpus(path: str | Path | None = None) -> list[Document]:
    """Return the documents of `path` (default: the embedded corpus) sorted by title.

    A document may be as short as one word, because the task decides how many words a level needs.
    Raises the errors of `load_documents`.
    """
    documents = load_documents(TEXTS if path is None else path)
    return sorted(documents, key=lambda document: (document.title, document.text))


def load_documents(path: str | Path) -> list[Document]:
    """Return the documents of a folder of .txt files, or of one .txt, .json or .jsonl file.

    The title of a .txt file is its name without the suffix. A JSON file holds a list of ``{"title",
    "text"}``, a list of strings, or a mapping of title to text. A JSON Lines file has one
    ``{"title", "text"}`` per line.

    Raises UserError, which names the file and the place in it, if the path does not exist, the
    folder has no .txt file, the suffix is unknown, the content is binary or damaged, or a text is
    empty.
    """
    path = Path(path)
    files = sorted(path.glob("*.txt")) if kind_of(path) == "folder" else [path]
    if not files:
        raise UserError(f"{path}: the folder holds no .txt file")
    found = [each for file in files for each in _read(file)]
    for where, document in found:
        _check(where, document)
    return [document for _, document in found]


def load_texts(path: str | Path) -> list[Document]:
    """Return the documents of a user's own folder (--texts) and its subfolders, sorted by title.

    Each file of UTF-8 text is a document, whatever its suffix, and its title is its path within the
    folder. Hidden, empty and binary files are skipped. A document that repeats another one (see
    `merge`) is skipped as well, because it could belong to another split. If `path` is a .txt,
    .json or .jsonl file, it is read by `load_documents`.

    Raises UserError if a .txt or .md file is not UTF-8, if there is no text, or if there are more
    than `MAX_TEXT` bytes.
    """
    path = Path(path)
    if kind_of(path) == "folder":
        found = _texts_below(path)
    else:
        found = load_documents(path)

    if not found:
        raise UserError(
            f"{path}: the folder holds no text in UTF-8; give a folder of .txt or .md files"
        )

    return without_repeats(sorted(found, key=lambda document: (document.title, document.text)))


def without_repeats(documents: Iterable[Document]) -> list[Document]:
    """Return the documents that do not repeat another one, as `merge` defines it, in their order.

    Of two documents of which one repeats the other, the longer one is kept, or the first.
    """
    documents = list(documents)
    shingles = _Shingles()
    kept = set()

    # The longest first: of a chapter and its book, the book is kept.
    for number in sorted(range(len(documents)), key=lambda i: -len(documents[i].words)):
        if shingles.nearest(documents[number])[1] < NEAR:
            shingles.add(documents[number])
            kept.add(number)
    return [document for number, document in enumerate(documents) if number in kept]


def fingerprint(document: Document) -> str:
    """Return a hash of a document's words: 16 hex digits of SHA-256.

    Title and layout have no influence.
    """
    return hashlib.sha256("\x1f".join(["", *document.words]).encode()).hexdigest()[:16]


def split_of(document: Document) -> str:
    """Return "train" (80 %), "validation" (10 %) or "test" (10 %), by a hash of the words."""
    digest = hashlib.sha256(f"{SPLIT_SALT}\n{' '.join(document.words)}".encode()).digest()
    tenth = int.from_bytes(digest[:8], "big") * 10 >> 64  # 0 ... 9
    return {8: "validation", 9: "test"}.get(tenth, "train")


def documents_of(split: str, documents: Iterable[Document]) -> list[Document]:
    """Return the documents of one split, in their order."""
    return [document for document in documents if split_of(document) == split]


def merge(
    paths: Iterable[str | Path],
    into: str | Path = TEXTS,
    min_words: int = MIN_WORDS,
    say: Callable[[str], None] = print,
) -> int:
    """Add the texts of `paths` to the folder `into`; return how many were refused.

    `paths` are files, or folders that are searched with their subfolders. Each document is written
    to a new file, whole or not at all; existing files are not changed. A document that repeats
    another one is dropped: of its sequences of five words 80 % or more stand in the other one. A
    text that cannot be read is refused by name, and the others are added. `say` is called with a
    line for each document. Raises UserError if `into` cannot be read or written.
    """
    into = Path(into)
    shingles = _Shingles()
    for document in load_documents(into) if any(into.glob("*.txt")) else ():
        shingles.add(document)

    refused = 0
    for file in [file for path in paths for file in _files_below(Path(path))]:
        try:
            found = _read(file)
        except UserError as error:
            say(f"refused  {error}")
            refused += 1
            continue

        for where, document in found:
            if fault := _fault_of(document, min_words):
                say(f"refused  {where}: {fault}")
                refused += 1
                continue

            title, similarity = shingles.nearest(document)
            if similarity >= NEAR:
                say(f"dropped  {where}: repeats {title} (similarity {similarity:.2f})")
                continue

            target = _free_name(into, document.title)
            write_whole(target, document.text.encode())
            shingles.add(Document(target.stem, document.text))
            words = f"{len(document.words):,} words, {split_of(document)}"
            say(f"added    {where} as {target.name}: {words}")
    return refused


class _Shingles:
    """An index of documents by their sequences of `SHINGLE` words (Broder 1997)."""

    def __init__(self) -> None:
        self._titles: list[str] = []
        self._having: dict[tuple[str, ...], list[int]] = {}  # the documents with a sequence

    def add(self, document: Document) -> None:
        for shingle in self._of(document):
            self._having.setdefault(shingle, []).append(len(self._titles))
        self._titles.append(document.title)

    def nearest(self, document: Document) -> tuple[str, float]:
        """Return the title of the document that has most of this one's sequences, and their share.

        Returns ("", 0.0) if no document has a share of `NEAR`.
        """
        shingles = self._of(document)
        shared = Counter(number for shingle in shingles for number in self._having.get(shingle, ()))
        found = ((count, self._titles[number]) for number, count in shared.items())
        count, title = max(found, default=(0, ""))
        share = count / len(shingles)
        return (title, share) if share >= NEAR else ("", 0.0)

    @staticmethod
    def _of(document: Document) -> set[tuple[str, ...]]:
        words = document.words
        return {tuple(words[i : i + SHINGLE]) for i in range(max(1, len(words) - SHINGLE + 1))}


def _files_below(path: Path) -> list[Path]:
    """Return all files in a folder and its subfolders, except hidden ones.

    A path that is a file, an empty folder, or missing is returned as it is.
    """
    files = [file for file in path.rglob("*") if not file.is_dir()] if path.is_dir() else []
    shown = (file for file in files if "/." not in f"/{file.relative_to(path).as_posix()}")
    return sorted(shown) or [path]


def _texts_below(folder: Path) -> list[Document]:
    """Return a document for each text file in `folder` and its subfolders.

    Links to folders are not followed.
    """
    found = []
    size = 0
    for file in _files_below(folder):
        if not file.is_file() or not (file.suffix in PLAIN or _is_text(file)):
            continue

        size += file.stat().st_size
        if size > MAX_TEXT:
            raise UserError(
                f"{folder}: holds more than {MAX_TEXT // 10**6} MB of text; give a folder with a "
                "part of it"
            )
        document = Document(file.relative_to(folder).as_posix(), read_text(file))
        if document.words:
            _check(str(file), document)
            found.append(document)
    return found


def _is_text(file: Path) -> bool:
    """Return whether the first SNIFF bytes of a file are UTF-8 text without a NUL.

    The last character may be incomplete.
    """
    with open(file, "rb") as stream:
        start = stream.read(SNIFF)
    with suppress(UnicodeDecodeError):
        return "\0" not in codecs.getincrementaldecoder("utf-8")().decode(start)
    return False


def _free_name(folder: Path, title: str) -> Path:
    """Return a path in `folder` that does not exist, named after a title."""
    # 48 characters of up to 4 bytes each: file systems allow names of 255 bytes.
    slug = re.sub(r"[\W_]+", "-", normalise(title).lower())[:48].strip("-") or "text"
    names = itertools.chain([slug], (f"{slug}-{number}" for number in itertools.count(2)))
    return next(path for path in (folder / f"{name}.txt" for name in names) if not path.exists())


def _read(path: Path) -> list[tuple[str, Document]]:
    """Return each document of a file, of any length, with its place: "FILE, line 3"."""
    if kind_of(path) == "folder":
        raise UserError(f"{path}: the folder holds no file")
    if kind_of(path) and path.suffix not in (".txt", ".json", ".jsonl"):
        raise UserError(f"{path}: unknown suffix {path.suffix!r}; give .txt, .json or .jsonl")
    if path.suffix == ".jsonl":
        return [(where, _document(where, value)) for where, value in read_jsonl(path)]
    if path.suffix == ".json":
        return list(_from_json(path, read_json(path)))
    return [(str(path), Document(path.stem, read_text(path)))]


def _from_json(path: Path, value: Any) -> Iterator[tuple[str, Document]]:
    if isinstance(value, dict):
        value = [{"title": title, "text": text} for title, text in value.items()]
    if not isinstance(value, list):
        raise UserError(
            f"{path}: is {json_kind(value)}; give a list of texts, or a mapping of title to text"
        )
    for number, item in enumerate(value, start=1):
        where = f"{path}, item {number}"
        if isinstance(item, str):
            item = {"title": f"{path.stem}-{number}", "text": item}
        yield where, _document(where, item)


def _document(where: str, value: Any) -> Document:
    fields = value if isinstance(value, dict) else {}
    title, text = fields.get("title"), fields.get("text")
    if not isinstance(title, str) or not isinstance(text, str):
        raise UserError(f'{where}: must be {{"title": string, "text": string}}')
    return Document(title, text.lstrip("\ufeff"))


def _check(where: str, document: Document) -> None:
    if fault := _fault_of(document, min_words=1):
        raise UserError(f"{where}: {fault}")


def _fault_of(document: Document, min_words: int) -> str:
    """Return why a document is no text: it is binary, or has too few words; "" if it is one."""
    # JSON can hold one half of a surrogate pair.
    if re.search("[\0\ud800-\udfff]", document.title + document.text):
        return "is binary (it holds a NUL or half a surrogate pair); give plain text in UTF-8"
    if len(document.words) < min_words:
        return f"is too short: {len(document.words)} words; at least {min_words} are needed"
    return ""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status, 2 for a user's mistake."""
    return exit_status("data.corpus", lambda: _run(arguments))


def _run(arguments: list[str] | None) -> int:
    parser = Parser(
        prog="python -m data.corpus", description="List the corpus, or add texts to it."
    )
    command = parser.add_subparsers(dest="command").add_parser(
        "merge", help="add texts to the corpus"
    )
    command.add_argument(
        "paths", nargs="+", metavar="PATH", help=".txt, .json or .jsonl file, or a folder of them"
    )
    command.add_argument(
        "--into", default=TEXTS, metavar="DIR", help="the corpus folder (default: data/texts)"
    )
    options = parser.parse_args(arguments)
    if options.command is None:
        corpus = load_corpus()
        for each in corpus:
            print(f"{each.title:40}  {len(each.words):>7,} words  {split_of(each)}")
        words = sum(len(each.words) for each in corpus)
        splits = ", ".join(
            f"{split} {len(documents_of(split, corpus))}"
            for split in ("train", "validation", "test")
        )
        print(f"{len(corpus)} documents, {words:,} words: {splits}")
    elif refused := merge(options.paths, options.into):
        raise UserError(f"refused {refused} of the texts, each named above; the others were merged")
    return 0


if __name__ == "__main__":
    sys.exit(main())
