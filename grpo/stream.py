"""The stream of training problems: which ones a step takes, and which the policy has seen."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, count, islice
from typing import Any

from data.errors import UserError
from grpo.config import Config
from grpo.model.policy import Policy
from grpo.model.prompts import check_conversations
from grpo.records import Resumable
from grpo.rollout.generate import budget_for, fitting, room_warning
from tasks.base import Problem, Task, declared_budget, problems_of
from tasks.supply import Supply, problem_at, problem_stream

# Problems of a level whose prompts and budgets are tried before training.
PROBES = 16

# A problem and its index in the stream.
Indexed = tuple[int, Problem]


class ProblemStream(Resumable):
    """The problems of `supply` that fit the policy's context, in order.

    No index of the stream is used twice. `seen` has the keys of all problems that the policy was
    trained on, in earlier runs, too; `trained` counts those of this run by level.
    """

    STATE = ("next_index", "seen", "trained")

    def __init__(self, config: Config, task: Task, policy: Policy, supply: Supply):
        self.config = config
        self.task = task
        self.policy = policy
        self.supply = supply

        self.next_index = 0
        self.seen: set[str] = set()
        self.trained: Counter[int] = Counter()
        self._warnings: list[str] = []  # see `take_warnings`
        self._warned: set[str] = set()  # of what

    def at(self, index: int, level: int) -> Indexed:
        """Return the first problem of a level from `index` on that fits the context."""
        asked = self.config.max_new_tokens
        passed: list[Problem] = []
        problems = (self.supply.at(i, level) for i in count(index))
        problem = next(fitting(self.policy, problems, passed, asked))

        if passed:
            left_out = (
                f"{passed[0].title} is left out of training, as is every problem whose prompt and "
                f"right answer do not fit the model's {self.policy.context:,} tokens or "
                "--max-new-tokens"
            )
            self._warn_once("left out", left_out)
        declared = declared_budget(self.task, problem.level)
        self._warn_once("room", room_warning(self.policy, problem, asked, declared))
        return index + len(passed), problem

    def _warn_once(self, of: str, warning: str) -> None:
        if warning and of not in self._warned:
            self._warned.add(of)
            self._warnings.append(warning)

    def take_warnings(self) -> list[str]:
        """Return what the user should know about the problems drawn since the last call.

        The first problem that was left out is named, and the first whose prompt leaves too little
        room for completions.
        """
        taken = self._warnings
        self._warnings = []
        return taken

    def budget(self, prompt: tuple[int, ...], problem: Problem) -> int:
        """Return the most new tokens that a completion of `problem` may take after its `prompt`."""
        declared = declared_budget(self.task, problem.level)
        return budget_for(self.policy, prompt, problem.target, self.config.max_new_tokens, declared)

    def check(self, levels: Sequence[int]) -> None:
        """Raise UserError if problems do not suit a run at these levels.

        The chat template must pass on the problems of a fixed set. The first problems of each level
        must fit the context and the budget, and the task must draw them with nothing but the
        generator that it is given: otherwise a resumed run would have other problems, and
        evaluations before and after training could not be compared.
        """
        held_out = (problems_of(self.task, split) for split in ("validation", "test"))
        check_conversations(self.policy, chain(self.supply.dataset, *held_out))
        for level in levels:
            once, again = (
                problem_at(self.task, seed=self.config.seed, split="train", level=level, index=0)
                for _ in range(2)
            )
            if once != again:
                raise UserError(
                    f"task {self.task.name}: make({level}, 'train', rng) returned two problems for "
                    "the same random numbers; draw everything with rng"
                )
        self.largest_budget(levels)

    def largest_budget(self, levels: Iterable[int]) -> int:
        """Return the largest completion budget of the first problems of these levels, in tokens.

        Raises UserError if one of them does not fit the context or the budget.
        """
        budgets = []
        for level in levels:
            stream = problem_stream(self.task, seed=self.config.seed, split="train", level=level)
            for problem in islice(fitting(self.policy, stream, []), PROBES):
                budgets.append(self.budget(self.policy.encode(problem), problem))
        return max(budgets)

    def mark_seen(self, problems: Sequence[Indexed]) -> float:
        """Record that the policy was trained on these problems of the stream.

        Returns the share of them that it had seen before.
        """
        new = {
            problem.key: problem.level for _, problem in problems if problem.key not in self.seen
        }
        self.trained.update(new.values())
        self.seen.update(new)
        self.next_index = problems[-1][0] + 1
        return 1 - len(new) / len(problems)

    def metrics(self, level: int) -> dict[str, Any]:
        """Return how many problems were seen, and the share of a finite family at `level`."""
        metrics: dict[str, Any] = {"problems/seen": len(self.seen)}
        if size := self.supply.family_size(level):
            metrics["problems/family_share"] = self.trained[level] / size
        return metrics

    def begin_after(self, state: dict[str, Any]) -> None:
        """Begin with the policy of an earlier run, whose trainer had this `state`.

        The problems that it was trained on count as seen. Fresh problems continue where its stream
        ended, because runs with the same seed, task and level share their stream. Raises UserError
        for a state of another version.
        """
        if not {"seen", "next_index"} <= state.keys():
            raise UserError(
                "--model: the run was made by another version of this program; export its policy "
                "(python -m grpo.export RUN FOLDER) and give that folder"
            )
        self.seen = set(state["seen"])
        if self.config.problems == "fresh" and not self.config.dataset:
            self.next_index = state["next_index"]
