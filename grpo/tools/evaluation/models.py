"""What is evaluated: a policy in this process, or a model behind an endpoint."""

from collections.abc import Sequence
from typing import Any, Protocol

from data.text import escape_control
from grpo.evaluate import (
    EvaluationSettings,
    HeldOutRequest,
    Sampling,
    ShowProgress,
    budgets,
    evaluate,
    find_problems,
    first_room_warning,
    score_groups,
    select,
)
from grpo.model.policy import Policy
from grpo.model.prompts import PromptFormat, sent_lines
from grpo.records import Completion, Group
from grpo.tools.evaluation.answers import ServerAnswer
from grpo.tools.evaluation.endpoint import Endpoint, Question
from grpo.tools.evaluation.request import Request
from tasks.base import Problem, Task, declared_budget
from tasks.supply import DistinctProblems, family_size, first_distinct, patience, problem_stream

# Without the model's tokenizer, the budget is a token for each character of the target, and this
# many more.
MARGIN = 32


class EvaluatedModel(Protocol):
    """What an evaluation asks of a model."""

    def find(self, task: Task, level: int, split: str, size: int) -> DistinctProblems:
        """Return `size` distinct problems of the task that the model may be evaluated on."""

    def select(self, problems: Sequence[Problem]) -> DistinctProblems:
        """Return those of the `problems` that the model may be evaluated on."""

    def warning(self, task: Task, problems: Sequence[Problem]) -> str:
        """Return what the user should know about the problems before they are answered, or ""."""

    def answer(
        self, task: Task, problems: Sequence[Problem], progress: ShowProgress
    ) -> list[Group]:
        """Return a group of scored completions for each problem; say how far it is."""

    def budget(self, task: Task, problems: Sequence[Problem]) -> int:
        """Return the most new tokens that a completion of one of the problems may take."""

    def sent(self, problem: Problem) -> list[str]:
        """Return the prompt of a problem as the model is sent it."""

    def figures(self) -> dict[str, Any]:
        """Return more figures of the answers since the last call."""


class LocalModel:
    """A policy in this process; `seen` are the keys of problems that it was trained on."""

    def __init__(self, request: Request, policy: Policy, seen: set[str]):
        self.request = request
        self.policy = policy
        self.seen = seen

    def find(self, task: Task, level: int, split: str, size: int) -> DistinctProblems:
        """Return distinct problems that training has not seen, and that fit the context."""
        return find_problems(
            self.policy,
            task,
            HeldOutRequest(level, split, self.request.seed, size),
            self.seen,
            self.request.sampling,
        )

    def select(self, problems: Sequence[Problem]) -> DistinctProblems:
        """Return the problems that training has not seen, and that fit the context."""
        request = self.request
        return select(self.policy, problems, request.problems, self.seen, request.sampling)

    def warning(self, task: Task, problems: Sequence[Problem]) -> str:
        """Return a warning if a prompt leaves too little room for completions."""
        return first_room_warning(self.policy, task, problems, self.request.sampling)

    def answer(
        self, task: Task, problems: Sequence[Problem], progress: ShowProgress
    ) -> list[Group]:
        """Sample a group of completions for each problem, and score it."""
        request = self.request
        settings = EvaluationSettings(request.sampling, request.seed, request.samples)
        return evaluate(self.policy, task, problems, settings, progress)

    def budget(self, task: Task, problems: Sequence[Problem]) -> int:
        """Return the largest budget of the problems."""
        return max(budgets(self.policy, task, problems, self.request.sampling))

    def sent(self, problem: Problem) -> list[str]:
        """Return the prompt, decoded from its token ids."""
        return sent_lines(self.policy, problem)

    def figures(self) -> dict[str, Any]:
        """Return no more figures."""
        return {}


class RemoteModel:
    """A model behind an `endpoint`; `format` says what is added to a problem's prompt."""

    def __init__(self, request: Request, endpoint: Endpoint, format: PromptFormat):
        self.request = request
        self.endpoint = endpoint
        self.format = format
        self._answers: list[ServerAnswer] = []
        self._failed = 0

    def find(self, task: Task, level: int, split: str, size: int) -> DistinctProblems:
        """Return distinct problems; whether they fit the model's context is not known."""
        family = family_size(task, level)
        stream = problem_stream(task, seed=self.request.seed, split=split, level=level)
        return first_distinct(stream, size, fruitless=patience(size, family), family=family)

    def select(self, problems: Sequence[Problem]) -> DistinctProblems:
        """Return the first distinct problems."""
        return first_distinct(problems, self.request.problems)

    def warning(self, task: Task, problems: Sequence[Problem]) -> str:
        """Return no warning: the room for completions is not known."""
        return ""

    def answer(
        self, task: Task, problems: Sequence[Problem], progress: ShowProgress
    ) -> list[Group]:
        """Ask for the completions of each problem, and score them.

        A problem is left out if a request for it failed.
        """
        samples = self.request.samples
        questions = [
            Question(
                self._messages(problem), self._sampling(task, problem), sample, self.request.seed
            )
            for problem in problems
            for sample in range(samples)
        ]
        answers = self.endpoint.ask(questions, progress)

        groups = []
        for number, problem in enumerate(problems):
            of_problem = answers[number * samples : (number + 1) * samples]
            whole = [answer for answer in of_problem if answer is not None]
            self._failed += samples - len(whole)
            if len(whole) == samples:
                self._answers += whole
                completions = [
                    Completion((), (), answer.text, "length" if answer.is_truncated else "stop")
                    for answer in whole
                ]
                groups.append(
                    Group(number, problem, (), self.request.sampling.temperature, completions)
                )

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
        """Return the tokens that the server counted, how many requests failed, and which arguments
        the server does not know.
        """
        figures: dict[str, Any] = {
            "endpoint": self.endpoint.url,
            "prompt_tokens": sum(answer.prompt_tokens for answer in self._answers),
            "completion_tokens": sum(answer.completion_tokens for answer in self._answers),
            "failed": self._failed,
        }
        if self.endpoint.left_out:
            figures["left_out"] = sorted(self.endpoint.left_out)
        self._answers, self._failed = [], 0
        return figures

    def _messages(self, problem: Problem) -> list[dict[str, str]]:
        return [{"role": role, "content": text} for role, text in self.format.turns(problem)]

    def _sampling(self, task: Task, problem: Problem) -> dict[str, Any]:
        """Return the arguments of a request that say how to sample."""
        asked: Sampling = self.request.sampling
        arguments = {
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "max_tokens": self._budget(task, problem),
        }
        return arguments | ({"top_k": asked.top_k} if asked.top_k else {})

    def _budget(self, task: Task, problem: Problem) -> int:
        asked = self.request.sampling.max_new_tokens
        declared = declared_budget(task, problem.level)
        return asked or max(declared, len(problem.target) + MARGIN)
