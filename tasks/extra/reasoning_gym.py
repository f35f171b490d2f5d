"""The tasks of reasoning-gym (arXiv:2505.24760), with its generators and its scorers.

`--task reasoning_gym:NAME` (the extra `reasoning`), e.g. reasoning_gym:spell_backward. Each problem
has a seed, drawn from the problem stream. If the problem's key belongs to another split, the next
seed is tried, so splits never share a problem. If NAME has a curriculum, level 1 is its first
level, and each further level raises all of its attributes by one. Otherwise there is only level 1.

A completion reasons first and then answers (see `tasks.extra.reasoning`). The answer can take
several lines if that of reasoning-gym does, or if many are right. reasoning-gym scores it from 0 to
1; 1 is right.
"""

import difflib
import json
import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from data.errors import UserError, needs
from data.text import shortened
from tasks.base import Problem, Score, key_of, split_of_key
from tasks.extra.reasoning import Reasoning, asking, final_answer
from tasks.user_code import calling

# The search ends after this many draws without a problem of the split.
PATIENCE = 1000

# Where a problem with many right answers has one of them, among its metadata.
EXAMPLES = ("example_answer", "example_correct_answer", "possible_answer")


class ReasoningGym(Reasoning):
    """The task; `argument` is the name of a dataset of reasoning-gym."""

    argument = ("NAME", "the name of a dataset of reasoning-gym")

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
        return [self._score_of(dataset, entry, _answer_in(text, entry)) for text in completions]

    def _score_of(self, dataset: Any, entry: Mapping[str, Any], answer: str | None) -> Score:
        """Return the score of an answer; None earns nothing.

        Some of reasoning-gym's scorers raise an exception for an answer that they cannot parse,
        e.g. prime_factorization for "2^3 +". Such an answer is wrong, and its score says why.
        """
        parts: dict[str, Any] = {"answer": answer}
        value = 0.0
        if answer is not None:
            try:
                value = min(1.0, max(0.0, float(dataset.score_answer(answer, entry))))
            except Exception as error:
                message = " ".join(str(error).split())
                parts["scorer_error"] = shortened(f"{type(error).__name__}: {message}", 200)
        return Score(value, parts, exact=value >= 1.0)

    def key(self, problem: Problem) -> str:
        """Return the key of a problem, computed again from its data."""
        return _key(self.dataset, problem.data["question"])

    def levels(self, level: int) -> list[int]:
        """Return the levels up to `level`."""
        return list(range(1, min(level, self._most) + 1))

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
        right, has_lines = _right_answer(entry), _has_lines(entry)

        prompt = asking(question, has_lines=has_lines)
        space = "\n" if has_lines else " "
        target = f"Answer:{space}{right}" if right else ""
        data = {"seed": seed, "question": question}
        return Problem(self.name, level, prompt, target, _key(self.dataset, question), data)

    def _make_entry(self, level: int, seed: int) -> Mapping[str, Any]:
        """Return the entry that reasoning-gym generates from a seed."""
        dataset = self._make_dataset(level, seed)
        with calling(f"task {self.name}: its generator"):
            entry: Mapping[str, Any] = dataset[0]
            return entry

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


def _right_answer(entry: Mapping[str, Any]) -> str:
    """Return a right answer to a problem, "" if reasoning-gym gives none."""
    if entry["answer"] is not None:
        return str(entry["answer"])
    metadata = entry.get("metadata", {})
    for name in EXAMPLES:
        if name in metadata:
            example = metadata[name]
            return example if isinstance(example, str) else json.dumps(example)
    return ""


def _has_lines(entry: Mapping[str, Any]) -> bool:
    """Return whether an answer to a problem can take several lines."""
    answer = entry["answer"]
    return answer is None or "\n" in str(answer).strip()


def _answer_in(completion: str, entry: Mapping[str, Any]) -> str | None:
    """Return the answer in a completion; None if there is none."""
    return final_answer(completion, _right_answer(entry).strip(), has_lines=_has_lines(entry))


def _key(dataset: str, question: str) -> str:
    return key_of("reasoning_gym", dataset, " ".join(question.split()))
