"""Sampling of groups from the policy."""

from collections.abc import Sequence

from grpo.config import Config
from grpo.model.policy import Policy
from grpo.records import Group
from grpo.rollout.generate import generate
from grpo.rollout.request import RolloutRequest
from grpo.rollout.sampling import sample_key, truncation
from grpo.rollout.speculative import AcceptanceModel
from grpo.training.problems import ProblemStream
from tasks.base import Problem, Task, draft_of, drafts_leave_data

# Index in the stream, problem, sampling temperature.
Request = tuple[int, Problem, float]


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

    def sample(self, step: int, requests: Sequence[Request], attempt: int) -> list[Group]:
        """Return an unscored group for each request."""
        if not requests:
            return []

        problems = [problem for _, problem, _ in requests]
        temperatures = [temperature for _, _, temperature in requests]
        prompts = [self.policy.encode(problem) for problem in problems]

        with drafts_leave_data(self.task, problems):
            rollout = RolloutRequest(
                prompts,
                keys=[self._keys(step, index, attempt) for index, _, _ in requests],
                temperatures=temperatures,
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
                index,
                problem,
                prompt,
                temperature,
                answers,
                attempt,
                shots=self.policy.shots(problem),
            )
            for (index, problem, temperature), prompt, answers in zip(
                requests, prompts, completions
            )
        ]

    def _keys(self, step: int, index: int, attempt: int) -> list[int]:
        """Return a key for each completion of a group: its random numbers follow from that."""
        return [
            sample_key(self.config.seed, step, index, sample, attempt)
            for sample in range(self.config.group_size)
        ]
