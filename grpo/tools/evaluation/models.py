"""The models that can be evaluated: in this process, or behind an OpenAI-compatible server.

The server is asked by POST .../chat/completions, several requests at a time in threads. A request
that may succeed later (no connection, a timeout, a status of 408, 409, 425, 429, or 500 and above)
is repeated after a pause that doubles each time, with random jitter so that many requests are not
repeated at the same time; a Retry-After header is honoured. Any other status is the user's mistake,
and a one-line message has the server's reason.

Each answer is written to a file as soon as it arrives, so an evaluation that was killed continues
without asking twice. The key comes from the environment, and is neither stored nor shown.
"""

import json
import os
import random
import re
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx

from data.errors import UserError
from data.files import kind_of, open_own, read_bytes
from data.text import escape_control, shortened
from grpo.evaluate import (
    EvaluationSettings,
    ShowProgress,
    budgets,
    evaluate,
    first_room_warning,
    score_groups,
    select,
)
from grpo.model.policy import Policy
from grpo.model.prompts import PromptFormat, sent_lines
from grpo.records import Completion, Group
from tasks.base import Problem, Task, declared_budget, key_of
from tasks.supply import DistinctProblems, first_distinct

KEY = "OPENAI_API_KEY"

AT_A_TIME = 8  # requests

TRIES = 6
FIRST_PAUSE = 1.0  # seconds; the next ones are twice as long each
LONGEST_PAUSE = 120.0
MAY_SUCCEED_LATER = {408, 409, 425, 429}

CONNECT_SECONDS = 20.0
READ_SECONDS = 600.0  # a long completion on a slow server

# Without the model's tokenizer, the budget is a token for each character of the target, and this
# many more.
MARGIN = 32

# What reading a value raises that is not what it should be.
WRONG = (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError)


class LocalModel:
    """A policy in this process; `seen` are the keys of problems that it was trained on."""

    def __init__(self, policy: Policy, seen: set[str], settings: EvaluationSettings):
        self.policy = policy
        self.seen = seen
        self.settings = settings
        self.sampling = settings.sampling

    def choose(self, problems: Iterable[Problem], size: int, **limits: Any) -> DistinctProblems:
        """Return distinct problems that training has not seen, and that fit the context."""
        return select(self.policy, problems, size, self.seen, self.sampling, **limits)

    def warning(self, task: Task, problems: Sequence[Problem]) -> str:
        """Return a warning if a prompt leaves too little room for completions, else ""."""
        return first_room_warning(self.policy, task, problems, self.sampling)

    def answer(
        self, task: Task, problems: Sequence[Problem], progress: ShowProgress
    ) -> list[Group]:
        """Sample a group of completions for each problem, and score it."""
        return evaluate(self.policy, task, problems, self.settings, progress)

    def budget(self, task: Task, problems: Sequence[Problem]) -> int:
        """Return the most new tokens that a completion of one of the problems may take."""
        return max(budgets(self.policy, task, problems, self.sampling))

    def sent(self, problem: Problem) -> list[str]:
        """Return the prompt, decoded from its token ids."""
        return sent_lines(self.policy, problem)

    def figures(self) -> dict[str, Any]:
        """Return no more figures."""
        return {}


class Answer(NamedTuple):
    """What the server wrote: the text, whether the budget ended it, and the tokens it counted."""

    text: str
    is_truncated: bool
    prompt_tokens: int
    completion_tokens: int


class AnswerFile:
    """A file of a server's answers, one JSON object a line, to which several programs may add.

    A line that was cut off when a program was killed is passed over: its question is asked again.
    """

    def __init__(self, path: Path):
        self.path = path
        self._lock = threading.Lock()
        self._known: dict[str, Answer] = {}
        content = read_bytes(path) if kind_of(path) else b""
        self._begin = "\n" if content and not content.endswith(b"\n") else ""
        for line in content.splitlines():
            with suppress(*WRONG):
                value = json.loads(line)
                key = value.pop("id")
                self._known[key] = Answer(**value)

    def get(self, key: str) -> Answer | None:
        """Return the answer of this key, or None."""
        return self._known.get(key)

    def add(self, key: str, answer: Answer) -> None:
        """Append an answer. Raises UserError if it cannot be written."""
        line = json.dumps({"id": key, **answer._asdict()})
        with self._lock:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with open_own(self.path, "a") as file:
                    file.write(f"{self._begin}{line}\n")
            except OSError as error:
                raise UserError(f"{self.path}: cannot be written: {error.strerror}") from error
            self._begin = ""
            self._known[key] = answer


class RemoteModel:
    """A model behind a server, e.g. at "http://localhost:8000/v1".

    `format` says what is added to a problem's prompt.
    `remembered` counts the answers that the file `answers` had.
    """

    def __init__(self, url: str, model: str, format: PromptFormat, settings: EvaluationSettings):
        self.url = _address(url)
        self.model = model
        self.format = format
        self.sampling = settings.sampling
        self.seed = settings.seed
        self.samples = settings.samples

        name = re.sub(r"[^A-Za-z0-9._-]+", "-", model).strip(".-")[:100] or "model"
        self.answers = AnswerFile(Path("runs", "endpoint", f"{name}.jsonl"))
        self.remembered = 0

        self._left_out: set[str] = set()  # arguments that the server does not know
        self._prompt_tokens = self._completion_tokens = 0

        key = _key()
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(READ_SECONDS, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=AT_A_TIME),
        )

    def choose(self, problems: Iterable[Problem], size: int, **limits: Any) -> DistinctProblems:
        """Return distinct problems; whether they fit the model's context is not known."""
        return first_distinct(problems, size, **limits)

    def warning(self, task: Task, problems: Sequence[Problem]) -> str:
        """Return no warning: the room for completions is not known."""
        return ""

    def answer(
        self, task: Task, problems: Sequence[Problem], progress: ShowProgress
    ) -> list[Group]:
        """Ask for the completions of each problem, and score them.

        Raises UserError if the server refuses a request, or if all tries fail. What was answered is
        kept, so the same command goes on.
        """

        def ask(question: tuple[Problem, int]) -> Answer:
            return self._answer(task, *question)

        questions = [(problem, sample) for problem in problems for sample in range(self.samples)]
        answers = [ask(questions[0])]  # alone: it shows whether the server can be reached
        with ThreadPool(AT_A_TIME) as pool:
            for answer in pool.imap(ask, questions[1:]):
                progress("asking", len(answers), len(questions))
                answers.append(answer)

        groups = []
        for number, problem in enumerate(problems):
            of_problem = answers[number * self.samples : (number + 1) * self.samples]
            completions = [
                Completion((), (), answer.text, "length" if answer.is_truncated else "stop")
                for answer in of_problem
            ]
            groups.append(Group(number, problem, (), self.sampling.temperature, completions))
        self._prompt_tokens += sum(answer.prompt_tokens for answer in answers)
        self._completion_tokens += sum(answer.completion_tokens for answer in answers)

        progress("scoring", 0, len(groups))
        score_groups(task, groups)
        return groups

    def budget(self, task: Task, problems: Sequence[Problem]) -> int:
        """Return the largest budget of the problems."""
        return max(self._budget(task, problem) for problem in problems)

    def sent(self, problem: Problem) -> list[str]:
        """Return the turns that are sent; how the server writes them is not known."""
        lines = [f"{role}: {text}" for role, text in self.format.turns(problem)]
        return [escape_control(line) for text in lines for line in text.split("\n")]

    def figures(self) -> dict[str, Any]:
        """Return the tokens that the server counted since the last call, and unknown arguments."""
        tokens = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
        }
        self._prompt_tokens = self._completion_tokens = 0
        left_out = {"left_out": sorted(self._left_out)} if self._left_out else {}
        return {"endpoint": self.url, **tokens, **left_out}

    def _budget(self, task: Task, problem: Problem) -> int:
        declared = declared_budget(task, problem.level)
        return self.sampling.max_new_tokens or max(declared, len(problem.target) + MARGIN)

    def _answer(self, task: Task, problem: Problem, sample: int) -> Answer:
        """Return the stored or the server's answer."""
        messages = [{"role": role, "content": text} for role, text in self.format.turns(problem)]
        sampling = {
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "max_tokens": self._budget(task, problem),
        }
        if self.sampling.top_k:
            sampling["top_k"] = self.sampling.top_k

        key = key_of(
            self.url,
            self.model,
            json.dumps(messages, sort_keys=True),
            json.dumps(sampling, sort_keys=True),
            sample,
            self.seed,
        )
        known = self.answers.get(key)
        if known is not None:
            self.remembered += 1
            return known

        seed = int(key, 16) % 2**31
        body = {"model": self.model, "messages": messages, **sampling, "seed": seed}
        answer = self._request(body)
        self.answers.add(key, answer)
        return answer

    def _request(self, body: dict[str, Any]) -> Answer:
        """Return the server's answer, after several tries if necessary.

        Raises UserError if the server refuses the request, or if all tries fail.
        """
        pause = FIRST_PAUSE
        asked_pause = 0.0  # by the server
        reason = ""
        for attempt in range(TRIES):
            if attempt:
                time.sleep(max(pause * random.uniform(0.5, 1.0), asked_pause))
                pause, asked_pause = min(2 * pause, LONGEST_PAUSE), 0.0

            for name in self._left_out:
                body.pop(name, None)
            try:
                response = self._client.post(self.url, json=body)
            except httpx.HTTPError as error:
                reason = f"{type(error).__name__}: {error}"
                continue
            status, text = response.status_code, response.text
            if status < 300:
                return _read(text, self.url)

            reason = f"status {status}: {_reason(text)}"
            if status in MAY_SUCCEED_LATER or status >= 500:
                asked_pause = _retry_after(response.headers)
            elif not self._adapt(body, status, text):
                raise UserError(f"--endpoint {self.url}, model {self.model}: {reason}")
        raise UserError(
            f"--endpoint {self.url}: {TRIES} tries failed; the last: {shortened(reason, 200)}"
        )

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
                self._left_out.add(name)
                return True
        return False


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


def _read(text: str, url: str) -> Answer:
    """Return the answer in the text of a response."""
    try:
        value = json.loads(text)
        choice = value["choices"][0]
        content = choice["message"]["content"] or ""
        usage = value.get("usage") or {}

        return Answer(
            # JSON can write half of a surrogate pair, which no file can hold.
            content.encode("utf-8", "replace").decode(),
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


def _retry_after(headers: Mapping[str, str]) -> float:
    """Return the seconds of a Retry-After header; 0 if it has none (it may hold a date)."""
    try:
        return min(max(0.0, float(headers.get("retry-after", 0))), LONGEST_PAUSE)
    except ValueError:
        return 0.0
