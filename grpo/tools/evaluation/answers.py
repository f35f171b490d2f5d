"""The answers of a model behind a server, and the file that keeps them."""

import json
import os
import re
import threading
from pathlib import Path
from typing import Any, NamedTuple

from data.errors import UserError
from data.files import kind_of, open_own, read_bytes
from grpo.run.lock import wait_for

# What reading a value raises that is not what it should be.
WRONG = (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError)

# Half of a surrogate pair is not a character, and no file can hold it. JSON can write it.
_SURROGATES = re.compile("[\ud800-\udfff]")


class ServerAnswer(NamedTuple):
    """What the server wrote: the text, whether the budget ended it, and the tokens it counted."""

    text: str
    is_truncated: bool
    prompt_tokens: int
    completion_tokens: int


class AnswerFile:
    """A file of a server's answers, one JSON object a line; each is on the disk when `add` returns.

    A last line without its end was cut off when the program was killed. It is removed. Several
    programs may add answers to one file.
    """

    def __init__(self, path: Path):
        self.path = path
        self._lock = threading.Lock()
        self._known: dict[str, ServerAnswer] = {}
        if not kind_of(path):
            return

        with path.open("rb") as file:
            wait_for(file)
            *lines, cut = read_bytes(path).split(b"\n")
            for number, line in enumerate(lines, start=1):
                key, answer = self._parsed(line, f"{path}, line {number}")
                self._known[key] = answer

            # What is removed must be the beginning of an answer.
            if cut and not b'{"id": '.startswith(cut[:7]):
                raise UserError(
                    f"{path}: does not hold answers of --endpoint; give another --answers"
                )
            if cut:
                os.truncate(path, sum(len(line) + 1 for line in lines))

    @staticmethod
    def _parsed(line: bytes, where: str) -> tuple[str, ServerAnswer]:
        """Return key and answer of a line. Raises UserError, which names it, if it is damaged."""
        try:
            value = json.loads(line)
            answer = ServerAnswer(
                answer_text(value["text"]),
                bool(value["truncated"]),
                int(value["prompt_tokens"]),
                int(value["completion_tokens"]),
            )
            return str(value["id"]), answer
        except WRONG as error:
            raise UserError(
                f"{where}: is not an answer of --endpoint; give another --answers"
            ) from error

    def get(self, key: str) -> ServerAnswer | None:
        """Return the answer of this key, or None."""
        return self._known.get(key)

    def add(self, key: str, answer: ServerAnswer) -> None:
        """Append an answer. Raises UserError if it cannot be written."""
        value = {
            "id": key,
            "text": answer.text,
            "truncated": answer.is_truncated,
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.completion_tokens,
        }
        line = json.dumps(value) + "\n"
        with self._lock:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with open_own(self.path, "a") as file:
                    wait_for(file)
                    file.write(line)
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                raise UserError(f"{self.path}: cannot be written: {error.strerror}") from error

            self._known[key] = answer


def answer_text(content: Any) -> str:
    """Return the text of an answer, with U+FFFD for half of a surrogate pair.

    Raises TypeError if it is no text: some servers return a list of parts.
    """
    return _SURROGATES.sub("\ufffd", content)
