"""A model behind an OpenAI-compatible server, as `eval.py --endpoint URL` evaluates it.

The server is asked by POST .../chat/completions, several requests at a time in threads. A request
that may succeed later (no connection, a timeout, a status of 408, 409, 425, 429, or 500 and above)
is repeated after a pause. Any other status is the user's mistake, and a one-line message has the
server's reason. The key comes from the environment, and is neither stored nor shown.
"""

import os
import time
from collections.abc import Iterable, Sequence
from multiprocessing.pool import ThreadPool
from typing import Any

import httpx

from data.errors import UserError, blaming, escape_control, shortened
from grpo.evaluate import ShowProgress, score_groups
from grpo.records import Completion, Group
from grpo.tools.evaluate import Evaluation
from tasks.base import Problem, Task, declared_budget, key_of
from tasks.supply import DistinctProblems, first_distinct

KEY = "OPENAI_API_KEY"
AT_A_TIME = 8  # requests

PAUSES = (0, 1, 2, 4, 8, 16)  # seconds before each try
MAY_SUCCEED_LATER = {408, 409, 425, 429}

# A long completion on a slow server takes minutes.
TIMEOUT = httpx.Timeout(600.0, connect=20.0)

# Without the model's tokenizer, the budget is a token for each character of the target, and this
# many more.
MARGIN = 32


class RemoteEvaluation(Evaluation):
    """The evaluation of a model behind a server. Its tokenizer and its context are not known."""

    def _load(self) -> None:
        self.url = _address(self.flags.endpoint)
        key = os.environ.get(KEY, "").strip()
        if not (key.isascii() and key.isprintable()):
            raise UserError(f"{KEY}: has characters that no header can hold; copy the key again")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.client = httpx.Client(headers=headers, timeout=TIMEOUT)

    def _select(
        self, problems: Iterable[Problem], size: int, **limits: int | None
    ) -> DistinctProblems:
        return first_distinct(problems, size, (), **limits)

    def _sample(
        self, task: Task, problems: Sequence[Problem], progress: ShowProgress
    ) -> list[Group]:
        """Ask for the completions of each problem, and score them.

        Raises UserError if the server refuses a request, or if all tries fail.
        """
        size = self.answering.samples
        bodies = [self._body(task, problem, i) for problem in problems for i in range(size)]
        completions = [self._ask(bodies[0])]  # alone: it shows whether the server can be reached
        with ThreadPool(AT_A_TIME) as pool:
            for completion in pool.imap(self._ask, bodies[1:]):
                progress("asking", len(completions), len(bodies))
                completions.append(completion)

        groups = []
        for number, problem in enumerate(problems):
            own = completions[number * size : (number + 1) * size]
            groups.append(Group(number, problem, (), self.answering.temperature, own))
        progress("scoring", 0, len(groups))
        score_groups(task, groups)
        return groups

    def _about(self, task: Task, problems: Sequence[Problem]) -> dict[str, Any]:
        """Return the largest budget, and the first prompt by its turns: the server writes them."""
        turns = [f"{role}: {text}" for role, text in self.format.turns(problems[0])]
        return {
            "endpoint": self.url,
            "budget": max(self._budget(task, problem) for problem in problems),
            "sent": [escape_control(line) for text in turns for line in text.split("\n")],
        }

    def _budget(self, task: Task, problem: Problem) -> int:
        declared = declared_budget(task, problem.level)
        return self.answering.max_new_tokens or max(declared, len(problem.target) + MARGIN)

    def _body(self, task: Task, problem: Problem, sample: int) -> dict[str, Any]:
        """Return the request for one sample of a problem."""
        turns = self.format.turns(problem)
        return {
            "model": self.model,
            "messages": [{"role": role, "content": text} for role, text in turns],
            "temperature": self.answering.temperature,
            "top_p": self.answering.top_p,
            "max_tokens": self._budget(task, problem),
            "seed": int(key_of(self.flags.seed, problem.key, sample), 16) % 2**31,
        }

    def _ask(self, body: dict[str, Any]) -> Completion:
        """Return the server's answer to a request, after several tries if necessary."""
        for pause in PAUSES:
            time.sleep(pause)
            try:
                response = self.client.post(self.url, json=body)
            except httpx.HTTPError as error:
                reason = f"{type(error).__name__}: {error}"
                continue
            if response.is_success:
                return self._read(response)
            status, text = response.status_code, " ".join(response.text.split())
            reason = f"status {status}: {shortened(text, 200) or 'no reason given'}"
            if status not in MAY_SUCCEED_LATER and status < 500:
                raise UserError(f"--endpoint {self.url}, model {self.model}: {reason}")
        raise UserError(f"--endpoint {self.url}: {len(PAUSES)} tries failed; the last: {reason}")

    def _read(self, response: httpx.Response) -> Completion:
        """Return the answer in a response."""
        text = shortened(" ".join(response.text.split()), 120) or "it is empty"
        what = f"the response is not that of an OpenAI-compatible server: {text}"
        with blaming(f"--endpoint {self.url}: {what}"):
            choice = response.json()["choices"][0]
            # JSON can write half of a surrogate pair, which no file can hold.
            answer = (choice["message"]["content"] or "").encode("utf-8", "replace").decode()
            finish = "length" if choice.get("finish_reason") == "length" else "stop"
        return Completion((), (), answer, finish)


def _address(given: str) -> str:
    """Return the address for chats of a server; its "/v1" may be left out."""
    try:
        url = httpx.URL(given)
    except httpx.InvalidURL:
        url = httpx.URL()
    if url.scheme not in ("http", "https") or not url.host:
        raise UserError(f"--endpoint {given}: give an address such as http://localhost:8000/v1")
    if url.userinfo or url.query:
        raise UserError(f"--endpoint {url.host}: give the key in {KEY}, not in the address")

    return str(url.copy_with(path=f"{url.path.rstrip('/') or '/v1'}/chat/completions"))
