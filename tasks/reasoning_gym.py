"""The tasks of reasoning-gym (arXiv:2505.24760), with its generators and its scorers.

`--task reasoning_gym:NAME` (the extra `reasoning`), e.g. reasoning_gym:spell_backward. Each problem
has a seed, drawn from the problem stream. If the problem's key belongs to another split, the next
seed is tried, so splits never share a problem. If NAME has a curriculum, level 1 is its first
level, and each further level raises all of its attributes by one. Otherwise there is only level 1.

A completion reasons first and then answers (see `tasks.reasoning`). reasoning-gym scores the answer
from 0 to 1; 1 is right.
"""

import difflib
import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from data.errors import UserError, needs
from tasks.checks import calling
from tasks.explanations import explain_answer
from tasks.protocol import Problem, Score, key_of, split_of_key
from tasks.reasoning import BUDGET, asking, final_answer

# The search ends after this many draws without a problem of the split.
PATIENCE = 1000


class ReasoningGym:
    """The task; `argument` is the name of a dataset of reasoning-gym."""

    rewards: tuple[str, ...] = ()
    default_level = 1
    level_unit = ""
    argument = ("NAME", "the name of a dataset of reasoning-gym")
    explain = staticmethod(explain_answer)

    def __init__(self, argument: str):
        with needs("reasoning_gym", "reasoning", f"--task reasoning_gym:{argument}"):
            from reasoning_gym import factory

        if argument not in factory.DATASETS:
            near = difflib.get_close_matches(argument, factory.DATASETS, 3)
            hint = f"did you mean {' or '.join(near)}?" if near else "see github.com/open-thought"
            raise UserError(f"--task reasoning_gym:{argument}: no such dataset; {hint}")

        self._factory = factory
        self.dataset = argument
        self.name = f"reasoning_gym:{argument}"
        self._of_level = lru_cache(64)(self._make_dataset)
        self._entry = lru_cache(4096)(self._make_entry)
        self._of_level(1)  # reports a dataset that cannot be made

    def make(self, level: int, split: str, rng: random.Random) -> Problem:
        """Return a problem of `split`."""
        self._of_level(level)  # raises UserError if there is no such level
        for _ in range(PATIENCE):
            seed = rng.randrange(2**31)
            problem = self._problem(level, seed)
            if split_of_key(problem.key) == split:
                return problem
        raise UserError(
            f"--level {level}: task {self.name} has too few different problems for a {split} split"
        )

    def score(self, problem: Problem, completions: Sequence[str]) -> list[Score]:
        """Return the score of each completion."""
        entry = self._entry(problem.level, problem.data["seed"])
        dataset = self._of_level(problem.level)
        scores = []
        for completion in completions:
            answer = final_answer(completion)
            value = 0.0
            if answer is not None:
                with calling(f"task {self.name}: its scorer"):
                    value = min(1.0, max(0.0, float(dataset.score_answer(answer, entry))))
            scores.append(Score(value, {"answer": answer}, exact=value >= 1.0))
        return scores

    def key(self, problem: Problem) -> str:
        """Return the key of a problem, computed again from its data."""
        return _key(self.dataset, problem.data["question"])

    def answer(self, problem: Problem, completion: str) -> str | None:
        """Return the answer in a completion, for majority votes."""
        return final_answer(completion)

    def levels(self, level: int) -> list[int]:
        """Return the levels up to `level`."""
        return list(range(1, min(level, self._most) + 1))

    def max_new_tokens(self, level: int) -> int:
        """Return the completion budget, unless --max-new-tokens gives one."""
        return BUDGET

    @property
    def _most(self) -> int:
        """The highest level."""
        if not self._factory.has_curriculum(self.dataset):
            return 1
        attributes = self._factory.create_curriculum(self.dataset).attributes.values()
        return max((len(attribute.levels) for attribute in attributes), default=1)

    def _problem(self, level: int, seed: int) -> Problem:
        """Return the problem of a seed, whatever its split."""
        entry = self._entry(level, seed)
        question = str(entry["question"])
        answer = entry["answer"]

        data = {"seed": seed, "question": question}
        target = f"Answer: {answer}" if answer is not None else ""
        key = _key(self.dataset, question)
        return Problem(self.name, level, asking(question), target, key, data)

    def _make_entry(self, level: int, seed: int) -> Mapping[str, Any]:
        """Return the entry that reasoning-gym generates from a seed."""
        dataset = self._of_level(level, seed)
        with calling(f"task {self.name}: its generator"):
            return dataset[0]

    def _make_dataset(self, level: int, seed: int = 0) -> Any:
        """Return a dataset of one entry. Raises UserError if there is no such level."""
        with calling(f"task {self.name}: its dataset"):
            most = self._most
            if not 1 <= level <= most:
                levels = f"levels 1 to {most}" if most > 1 else "level 1 alone"
                raise UserError(f"--level {level}: task {self.name} has {levels}")

            given: dict[str, Any] = {"seed": seed, "size": 1}
            if not self._factory.has_curriculum(self.dataset):
                return self._factory.create_dataset(self.dataset, **given)

            curriculum = self._factory.create_curriculum(self.dataset)
            curriculum.set_global_level(level - 1)
            config = curriculum.generate_configuration(given)
            dataset_class, _ = self._factory.DATASETS[self.dataset]
            return dataset_class(config=config)


def _key(dataset: str, question: str) -> str:
    return key_of("reasoning_gym", dataset, " ".join(question.split()))
