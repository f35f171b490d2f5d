"""A model behind an OpenAI-compatible server, as `eval.py --endpoint URL` evaluates it.

The server is asked by POST .../chat/completions, several requests at a time in threads. A request
that may succeed later (no connection, a timeout, a status of 408, 409, 425, 429, or 500 and above)
is repeated after a pause that doubles each time. Any other status is the user's mistake, and a
one-line message has the server's reason. The key comes from the environment, and is neither stored
nor shown.
"""

import json
import os
import time
from collections.abc import Iterable, Sequence
from multiprocessing.pool import ThreadPool
from typing import Any
from urllib.parse import urlsplit

import httpx

from data.errors import UserError
from data.text import escape_control, shortened
from grpo.evaluate import EvaluationSettings, ShowProgress, score_groups
from grpo.model.prompts import PromptFormat
from grpo.records import Completion, Group
from tasks.base import Problem, Task, declared_budget, key_of
from tasks.supply import DistinctProblems, first_distinct

KEY = "OPENAI_API_KEY"
AT_A_TIME = 8  # requests

TRIES = 6
FIRST_PAUSE = 1.0  # seconds; the next ones are twice as long each
MAY_SUCCEED_LATER = {408, 409, 425, 429}

# A long completion on a slow server takes minutes.
TIMEOUT = httpx.Timeout(600.0, connect=20.0)

# Without the model's tokenizer, the budget is a token for each character of the target, and this
# many more.
MARGIN = 32


class RemoteModel:
    """A model behind a server, e.g. at "http://localhost:8000/v1".

    `format` says what is added to a problem's prompt.
    """

    def __init__(self, url: str, model: str, format: PromptFormat, settings: EvaluationSettings):
        self.url = _address(url)
        self.model = model
        self.format = format
        self.sampling = settings.sampling
        self.seed = settings.seed
        self.samples = settings.samples

        key = os.environ.get(KEY, "").strip()
        if not (key.isascii() and key.isprintable()):
            raise UserError(f"{KEY}: has characters that no header can hold; copy the key again")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(headers=headers, timeout=TIMEOUT)

    def choose(self, problems: Iterable[Problem], size: int, **limits: Any) -> DistinctProblems:
        """Return distinct problems; whether they fit the model's context is not known."""
        return first_distinct(problems, size, **limits)

    def answer(
        self, task: Task, problems: Sequence[Problem], progress: ShowProgress
    ) -> list[Group]:
        """Ask for the completions of each problem, and score them.

        Raises UserError if the server refuses a request, or if all tries fail.
        """

        def ask(question: tuple[Problem, int]) -> Completion:
            return self._answer(task, *question)

        questions = [(problem, sample) for problem in problems for sample in range(self.samples)]
        completions = [ask(questions[0])]  # alone: it shows whether the server can be reached
        with ThreadPool(AT_A_TIME) as pool:
            for completion in pool.imap(ask, questions[1:]):
                progress("asking", len(completions), len(questions))
                completions.append(completion)

        groups = []
        for number, problem in enumerate(problems):
            own = completions[number * self.samples : (number + 1) * self.samples]
            groups.append(Group(number, problem, (), self.sampling.temperature, own))
        progress("scoring", 0, len(groups))
        score_groups(task, groups)
        return groups

    def about(self, task: Task, problems: Sequence[Problem]) -> dict[str, Any]:
        """Return the largest budget, and the first prompt by its turns: the server writes them."""
        turns = [f"{role}: {text}" for role, text in self.format.turns(problems[0])]
        return {
            "endpoint": self.url,
            "budget": max(self._budget(task, problem) for problem in problems),
            "sent": [escape_control(line) for text in turns for line in text.split("\n")],
        }

    def _budget(self, task: Task, problem: Problem) -> int:
        declared = declared_budget(task, problem.level)
        return self.sampling.max_new_tokens or max(declared, len(problem.target) + MARGIN)

    def _answer(self, task: Task, problem: Problem, sample: int) -> Completion:
        """Return the server's answer, after several tries if necessary.

        Raises UserError if the server refuses the request, or if all tries fail.
        """
        messages = [{"role": role, "content": text} for role, text in self.format.turns(problem)]
        body = {
            "model": self.model,
            "messages": messages,
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "max_tokens": self._budget(task, problem),
            "seed": int(key_of(self.seed, problem.key, sample), 16) % 2**31,
        }
        for attempt in range(TRIES):
            if attempt:
                time.sleep(FIRST_PAUSE * 2 ** (attempt - 1))
            try:
                response = self._client.post(self.url, json=body)
            except httpx.HTTPError as error:
                reason = f"{type(error).__name__}: {error}"
                continue
            status, text = response.status_code, " ".join(response.text.split())
            if status < 300:
                return _read(response.text, self.url)
            reason = f"status {status}: {shortened(text, 200) or 'no reason given'}"
            if status not in MAY_SUCCEED_LATER and status < 500:
                raise UserError(f"--endpoint {self.url}, model {self.model}: {reason}")
        raise UserError(
            f"--endpoint {self.url}: {TRIES} tries failed; the last: {shortened(reason, 200)}"
        )


def _address(url: str) -> str:
    """Return the address for chats of a server; its "/v1" may be left out."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UserError(f"--endpoint {url}: give an address such as http://localhost:8000/v1")
    if parts.username or parts.password or parts.query:
        raise UserError(f"--endpoint {parts.netloc}: give the key in {KEY}, not in the address")

    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/') or '/v1'}/chat/completions"


def _read(text: str, url: str) -> Completion:
    """Return the answer in the text of a response."""
    try:
        choice = json.loads(text)["choices"][0]
        # JSON can write half of a surrogate pair, which no file can hold.
        answer = (choice["message"]["content"] or "").encode("utf-8", "replace").decode()
        finish = "length" if choice.get("finish_reason") == "length" else "stop"
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise UserError(
            f"--endpoint {url}: the response is not that of an OpenAI-compatible server: "
            f"{shortened(' '.join(text.split()), 120) or 'it is empty'}"
        ) from error
    return Completion((), (), answer, finish)
