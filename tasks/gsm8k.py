r"""GSM8K (Cobbe et al. 2021, arXiv:2110.14168): word problems of primary school.

`--task gsm8k:FOLDER`, where the folder has the published files train.jsonl and test.jsonl
(github.com/openai/grade-school-math). Their answers end with ``#### N``. The test split is
test.jsonl; a hash of the question puts a tenth of train.jsonl into the validation split.

The answer of a completion (see `tasks.answers`) is right if its number equals the published one,
exactly: 1,234 and 1234.0 and ``\frac{2468}{2}`` are one number. A unit or a currency sign beside
the number does not matter, and of "9 * 2 = 18" what follows the "=" counts. Different numbers, a
formula and a denial ("not 18") are no answer. A right answer earns 1, another one 0.1, none 0.

Numbers are read here. math-verify was compared with this reader and left out;
docs/data-and-tasks.md says why, with figures.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.errors import UserError
from data.files import kind_of, read_jsonl
from data.text import shortened
from tasks.answers import final_answer, number_of
from tasks.base import SPLITS, Problem, Score, key_of

FILES = {"train": "train.jsonl", "test": "test.jsonl"}

INSTRUCTION = (
    'Think about it first. Then end with one line that begins with "Answer:" and holds the final '
    "answer alone."
)

# The completion budget in tokens, unless --max-new-tokens gives one.
BUDGET = 256

# The reward of a wrong answer in the right form, as for countdown in TinyZero
# (github.com/Jiayi-Pan/TinyZero).
FORM = 0.1


class Gsm8k:
    """The task; `argument` is the folder of the published files."""

    name = "gsm8k"
    rewards: tuple[str, ...] = ()
    default_level = 1
    metric = "exact match"
    level_unit = ""
    reads_reasoning = True
    argument = ("FOLDER", "the folder of train.jsonl and test.jsonl")

    def __init__(self, argument: str):
        """Read the problems from the folder `argument`.

        Raises UserError if a file is missing or a line is not one of GSM8K.
        """
        folder = Path(argument)
        for name in FILES.values():
            if kind_of(folder / name) != "file":
                raise UserError(
                    f"--task gsm8k:{argument}: no file {folder / name}; get train.jsonl and "
                    "test.jsonl from github.com/openai/grade-school-math"
                )

        self._by_split: dict[str, list[Problem]] = {split: [] for split in SPLITS}
        seen: set[str] = set()
        for name in ("test", "train"):  # a question in both files belongs to the test split
            for where, row in read_jsonl(folder / FILES[name]):
                problem = _problem(where, row)
                if problem.key in seen:
                    continue
                seen.add(problem.key)
                is_validation = name == "train" and int(problem.key, 16) % 10 == 0
                self._by_split["validation" if is_validation else name].append(problem)

    def make(self, level: int, split: str, rng: random.Random) -> Problem:
        """Return a random problem of the split."""
        if level != 1:
            raise UserError(f"--level {level}: task gsm8k has level 1 alone")
        if not self._by_split[split]:
            raise UserError(f"--task gsm8k: there is no problem of the {split} split")
        return rng.choice(self._by_split[split])

    def score(self, problem: Problem, completions: Sequence[str]) -> list[Score]:
        """Return the score of each completion."""
        right = number_of(problem.data["answer"])
        scores = []
        for completion in completions:
            answer = final_answer(completion)
            is_right = number_of(answer or "") == right
            of_wrong = FORM if answer is not None else 0.0
            scores.append(Score(1.0 if is_right else of_wrong, {"answer": answer}, exact=is_right))
        return scores

    @staticmethod
    def unended(problem: Problem, completion: str, score: Score) -> Score:
        """Return the score of a completion that the token budget cut off: at most that of a wrong
        answer in the right form.
        """
        return Score(min(score.reward, FORM), score.parts)

    @staticmethod
    def explain(problem: Problem, completion: str, score: Score, reward: str | None) -> str:
        """Explain the score of an answer that is right, wrong or missing."""
        answer = score.parts["answer"]
        earned = f"{score.reward:.3f}"
        if answer is None:
            return f"{earned} = no answer was found"
        answer = shortened(str(answer))
        if score.exact:
            return f"{earned} = the answer {answer} is right"
        return f"{earned} = there is an answer, {answer}, but it is wrong"

    def max_new_tokens(self, level: int) -> int:
        """Return the completion budget, unless --max-new-tokens gives one."""
        return BUDGET

    def problems(self, split: str) -> list[Problem]:
        """Return all problems of a split."""
        return list(self._by_split[split])

    def family_size(self, level: int) -> int:
        """Return the number of problems, in all splits."""
        return sum(map(len, self._by_split.values()))

    def key(self, problem: Problem) -> str:
        """Return the key of a problem, computed again from its data."""
        return _key(problem.data["question"])

    def sources(self) -> dict[str, str]:
        """Return a fingerprint of the problems of each split."""
        return {
            f"gsm8k-{split}": key_of(*(one.key + one.data["answer"] for one in part))
            for split, part in self._by_split.items()
            if part
        }


def _problem(where: str, row: dict[str, Any]) -> Problem:
    """Return the problem in a line of a file. Raises UserError, which names it, if it is none."""
    question, solution = row.get("question"), row.get("answer")
    if not isinstance(question, str) or not isinstance(solution, str):
        raise UserError(
            f"{where}: is not a line of GSM8K; it needs question and answer, both texts"
        )

    _, hashes, answer = solution.rpartition("####")
    if not hashes or number_of(answer) is None:
        raise UserError(f"{where}: its answer does not end with #### and a number")

    data = {"question": question, "answer": answer.strip()}
    prompt = f"{question.rstrip()}\n\n{INSTRUCTION}"
    return Problem("gsm8k", 1, prompt, f"Answer: {answer.strip()}", _key(question), data)


def _key(question: str) -> str:
    return key_of("gsm8k", " ".join(question.split()))
