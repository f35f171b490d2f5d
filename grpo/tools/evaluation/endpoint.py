"""Ask a model behind an OpenAI-compatible server (POST .../chat/completions).

Requests run concurrently in threads. A request that may succeed later (no connection, a timeout, a
status of 408, 409, 425, 429, or 500 and above) is repeated after a pause that doubles each time,
with random jitter so that many requests are not repeated at the same time; a Retry-After header is
honoured. Any other status is the user's mistake, and a one-line message has the server's reason.

Each answer is written to a file as soon as it arrives, so an evaluation that was killed continues
without asking twice. The key comes from the environment, and is neither stored nor shown.
"""

import json
import os
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from data.errors import UserError
from data.text import shortened
from grpo.evaluate import ShowProgress
from grpo.tools.evaluation.answers import WRONG, AnswerFile, ServerAnswer, answer_text
from tasks.base import key_of

KEY = "OPENAI_API_KEY"

TRIES = 6
FIRST_PAUSE = 1.0  # seconds; the next ones are twice as long each
LONGEST_PAUSE = 120.0
MAY_SUCCEED_LATER = {408, 409, 425, 429}

CONNECT_SECONDS = 20.0
READ_SECONDS = 600.0  # a long completion on a slow server
MAX_BYTES = 1 << 24  # of a response


@dataclass(frozen=True)
class Question:
    """One request: the turns of a chat, how to sample, and which of several samples it is.

    Each `seed` has samples of its own.
    """

    messages: Sequence[Mapping[str, str]]
    sampling: Mapping[str, Any]
    sample: int
    seed: int = 0


class FailedError(Exception):
    """A request failed, and so did all repetitions."""


class Endpoint:
    """A model behind a server, e.g. ``Endpoint("http://localhost:8000/v1", "llama", 8, path)``.

    `answers` is the file of the answers; `concurrency` requests run at the same time. `remembered`
    counts the answers from the file, `left_out` names the arguments that the server does not know.
    """

    def __init__(self, url: str, model: str, concurrency: int, answers: Path):
        self.url = _address(url)
        self.model = model
        self.concurrency = concurrency
        self.remembered = 0
        self.left_out: set[str] = set()
        self.failures: list[str] = []

        self._store = AnswerFile(answers)

        key = _key()
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(READ_SECONDS, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=concurrency),
        )

    def ask(
        self, questions: Sequence[Question], progress: ShowProgress = lambda part, done, total: None
    ) -> list[ServerAnswer | None]:
        """Return the answer to each question, in order; None where all tries failed.

        `progress` is called after each answer. Raises UserError if the server refuses a request, or
        if the very first one fails.
        """
        if not questions:
            return []

        # The first request alone shows whether the server can be reached.
        first = self._answer(questions[0])
        if first is None:
            raise UserError(f"--endpoint {self.url}: {self.failures[-1]}")

        answers: list[ServerAnswer | None] = [first]
        for answer in _side_by_side(self._answer, questions[1:], self.concurrency):
            progress("asking", len(answers), len(questions))
            answers.append(answer)
        return answers

    def _answer(self, question: Question) -> ServerAnswer | None:
        """Return the stored or the server's answer to a question; None if all tries failed."""
        key = key_of(
            self.url,
            self.model,
            json.dumps([dict(turn) for turn in question.messages], sort_keys=True),
            json.dumps(dict(question.sampling), sort_keys=True),
            question.sample,
            question.seed,
        )
        known = self._store.get(key)
        if known is not None:
            self.remembered += 1
            return known

        try:
            answer = self._request(question, key)
        except FailedError as error:
            self.failures.append(str(error))
            return None

        self._store.add(key, answer)
        return answer

    def _request(self, question: Question, key: str) -> ServerAnswer:
        """Return the server's answer, after several tries if necessary.

        Raises FailedError if all tries fail, and UserError if the server refuses the request.
        """
        body: dict[str, Any] = {
            "model": self.model,
            "messages": list(question.messages),
            **question.sampling,
            "seed": int(key, 16) % 2**31,
        }

        pause = FIRST_PAUSE
        asked_pause = 0.0  # by the server
        reason = ""
        for attempt in range(TRIES):
            if attempt:
                time.sleep(max(pause * random.uniform(0.5, 1.0), asked_pause))
                pause, asked_pause = min(2 * pause, LONGEST_PAUSE), 0.0

            for name in self.left_out:
                body.pop(name, None)
            try:
                status, headers, text = self._post(body)
            except httpx.HTTPError as error:
                reason = f"{type(error).__name__}: {error}"
                continue
            if status < 300:
                return _read(text, self.url)

            reason = f"status {status}: {_reason(text)}"
            if "location" in headers:
                moved = shortened(headers["location"], 200)
                reason = f"status {status}: it has moved to {moved}; give that address"
            if status in MAY_SUCCEED_LATER or status >= 500:
                asked_pause = _retry_after(headers.get("retry-after"))
            elif not self._adapt(body, status, text):
                raise UserError(f"--endpoint {self.url}, model {self.model}: {reason}")
        raise FailedError(f"{TRIES} tries failed; the last: {shortened(reason, 200)}")

    def _post(self, body: Mapping[str, Any]) -> tuple[int, httpx.Headers, str]:
        """Return status, headers and text of the response, which may not exceed MAX_BYTES."""
        with self._client.stream("POST", self.url, json=body) as response:
            pieces = []
            size = 0
            for piece in response.iter_bytes():
                pieces.append(piece)
                size += len(piece)
                if size > MAX_BYTES:
                    raise UserError(
                        f"--endpoint {self.url}: a response has more than {MAX_BYTES >> 20} MiB"
                    )

            text = b"".join(pieces).decode("utf-8", errors="replace")
            return response.status_code, response.headers, text

    def _adapt(self, body: dict[str, Any], status: int, text: str) -> bool:
        """Leave out an argument that the server does not know; return whether there was one.

        Newer models of OpenAI call the budget `max_completion_tokens`.
        """
        if status != 400:
            return False
        if "max_completion_tokens" in text and "max_tokens" in body:
            body["max_completion_tokens"] = body.pop("max_tokens")
            return True
        for name in ("seed", "top_k"):
            if name in body and f'"{name}"' in text.replace("'", '"'):
                self.left_out.add(name)
                return True
        return False


def _side_by_side(
    ask: Callable[[Question], ServerAnswer | None], questions: Sequence[Question], workers: int
) -> Iterator[ServerAnswer | None]:
    """Yield the answer to each question, in order; at most `workers` are asked at a time.

    If one raises, no other begins, and those under way are awaited, because their answers are kept.
    The threads are daemons, so that Ctrl-C does not wait for a slow server.
    """
    futures = [Future[ServerAnswer | None]() for _ in questions]
    waiting: queue.SimpleQueue = queue.SimpleQueue()
    for future, question in zip(futures, questions):
        waiting.put((future, question))
    ended = threading.Event()

    def work() -> None:
        with suppress(queue.Empty):
            while not ended.is_set():
                future, question = waiting.get_nowait()
                try:
                    future.set_result(ask(question))
                except BaseException as error:  # raised where the answer is awaited
                    ended.set()
                    future.set_exception(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    try:
        for future in futures:
            yield future.result()
    except Exception:
        for thread in threads:
            thread.join()
        raise
    finally:
        ended.set()


def _key() -> str:
    """Return the key for the server; "" without one. Raises UserError if no header can hold it."""
    key = os.environ.get(KEY, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise UserError(f"{KEY}: has characters that no header can hold; copy the key again")
    return key


def _address(url: str) -> str:
    """Return the address for chats: "/v1" and "/chat/completions" may be left out."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UserError(f"--endpoint {url}: give an address such as http://localhost:8000/v1")
    if parts.username or parts.password or parts.query:
        raise UserError(f"--endpoint {parts.netloc}: give the key in {KEY}, not in the address")

    path = parts.path.rstrip("/") or "/v1"
    if not path.endswith("/chat/completions"):
        path += "/chat/completions"
    return f"{parts.scheme}://{parts.netloc}{path}"


def _read(text: str, url: str) -> ServerAnswer:
    """Return the answer in the text of a response."""
    try:
        value = json.loads(text)
        choice = value["choices"][0]
        content = choice["message"]["content"]
        usage = value.get("usage") or {}

        return ServerAnswer(
            "" if content is None else answer_text(content),
            choice.get("finish_reason") == "length",
            int(usage.get("prompt_tokens") or 0),
            int(usage.get("completion_tokens") or 0),
        )
    except WRONG as error:
        raise UserError(
            f"--endpoint {url}: the response is not that of an OpenAI-compatible server: "
            f"{shortened(' '.join(text.split()), 120) or 'it is empty'}"
        ) from error


def _reason(text: str) -> str:
    """Return the server's reason for refusing a request, on one line."""
    try:
        value = json.loads(text)
        error = value.get("error", value)
        reason = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        reason = text
    return shortened(" ".join(str(reason).split()), 200) or "no reason given"


def _retry_after(header: str | None) -> float:
    """Return the seconds of a Retry-After header; 0 if it has none (it may hold a date)."""
    try:
        return min(max(0.0, float(header or 0)), LONGEST_PAUSE)
    except ValueError:
        return 0.0
