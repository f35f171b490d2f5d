"""Sampling of groups from the policy."""

from collections.abc import Sequence
from dataclasses import dataclass

from grpo.config import Config
from grpo.model.policy import Policy
from grpo.records import Group
from grpo.rollout.generate import generate
from grpo.rollout.request import RolloutRequest
from grpo.rollout.sampling import sample_key, truncation
from grpo.rollout.speculative import AcceptanceModel
from grpo.training.problems import ProblemStream
from tasks.base import Problem, Task, draft_of, drafts_leave_data


@dataclass(frozen=True)
class GroupRequest:
    """A group to be sampled: its problem, the problem's index in the stream, and a temperature."""

    index: int
    problem: Problem
    temperature: float


class GroupSampler:
    """Samples a group of completions for each problem.

    `truncate` is the truncation by top-k and top-p, which the loss shares. `draft` is the task's
    guess at completions, None if it has none; `acceptance` decides how much is drafted.
    """

    def __init__(self, config: Config, task: Task, policy: Policy, stream: ProblemStream):
        self.config = config
        self.task = task
        self.policy = policy
        self.stream = stream
        self.truncate = truncation(config.top_k, config.top_p)
        self.draft = draft_of(task)
        self.acceptance = AcceptanceModel(config.draft)

    def sample(self, step: int, requests: Sequence[GroupRequest], attempt: int) -> list[Group]:
        """Return an unscored group for each request. `attempt` counts the tries, from 0."""
        if not requests:
            return []

        problems = [request.problem for request in requests]
        prompts = [self.policy.encode(problem) for problem in problems]

        with drafts_leave_data(self.task, problems):
            rollout = RolloutRequest(
                prompts,
                keys=[self._keys(step, request.index, attempt) for request in requests],
                temperatures=[request.temperature for request in requests],
                budgets=[
                    self.stream.budget(prompt, problem)
                    for prompt, problem in zip(prompts, problems)
                ],
                truncate=self.truncate,
                guesses=[self.draft(problem) for problem in problems] if self.draft else None,
            )
            completions = generate(self.policy, rollout, self.acceptance)
        return [
            Group(
                request.index,
                request.problem,
                prompt,
                request.temperature,
                answers,
                attempt,
                shots=self.policy.shots(request.problem),
                opened=self.policy.opened(request.problem),
            )
            for request, prompt, answers in zip(requests, prompts, completions)
        ]

    def _keys(self, step: int, index: int, attempt: int) -> list[int]:
        """Return a key for each completion of a group: its random numbers follow from that."""
        return [
            sample_key(self.config.seed, step, index, sample, attempt)
            for sample in range(self.config.group_size)
        ]
