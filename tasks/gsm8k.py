r"""GSM8K (Cobbe et al. 2021, arXiv:2110.14168): word problems of primary school.

`--task gsm8k:FOLDER`, where the folder has the published files train.jsonl and test.jsonl
(github.com/openai/grade-school-math). Their answers end with ``#### N``. The test split is
test.jsonl; a hash of the question puts a tenth of train.jsonl into the validation split.

The problems are rows, and the reward is a function (`tasks.rows`). The answer of a completion (see
`tasks.answers`) is right if its number equals the published one, exactly: 1,234 and 1234.0 and
``\frac{2468}{2}`` are one number. A unit or a currency sign beside the number does not matter, and
of "9 * 2 = 18" what follows the "=" counts. Different numbers, a formula and a denial ("not 18")
are no answer. A right answer earns 1, another one 0.1, none 0.

Numbers are read here. math-verify was compared with this reader and left out;
docs/data-and-tasks.md says why, with figures.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from data.errors import UserError, shortened
from data.files import kind_of, read_jsonl
from tasks.answers import final_answer, number_of
from tasks.base import Problem, Score, key_of
from tasks.rows import Rows

INSTRUCTION = (
    'Think about it first. Then end with one line that begins with "Answer:" and holds the final '
    "answer alone."
)

# The reward of a wrong answer in the right form, as for countdown in TinyZero
# (github.com/Jiayi-Pan/TinyZero).
FORM = 0.1


def reward(completion: str, answer: str) -> float:
    """Return what a completion earns if `answer` is right."""
    found = final_answer(completion)
    if found is None:
        return 0.0
    return 1.0 if number_of(found) == number_of(answer) else FORM


class Gsm8k(Rows):
    """The task; `argument` is the folder of the published files."""

    name = "gsm8k"
    metric = "exact match"
    level_unit = ""
    argument = ("FOLDER", "the folder of train.jsonl and test.jsonl")
    options = {}

    def __init__(self, argument: str):
        """Read the problems from the folder `argument`.

        Raises UserError if a file is missing or a line is not one of GSM8K.
        """
        super().__init__(list(_rows(Path(argument))), reward_functions=[reward])
        self.from_python, self.python_functions, self.notes = False, {}, []
        self._by_split = {
            split: [replace(one, target=f"Answer: {one.data['row']['answer']}") for one in part]
            for split, part in self._by_split.items()
        }

    @staticmethod
    def unended(problem: Problem, completion: str, score: Score) -> Score:
        """Return the score of a completion that the token budget cut off: at most that of a wrong
        answer in the right form.
        """
        return Score(min(score.reward, FORM), score.parts)

    @staticmethod
    def explain(problem: Problem, completion: str, score: Score, reward: str | None) -> str:
        """Explain the score of an answer that is right, wrong or missing."""
        answer = shortened(final_answer(completion) or "")
        if score.reward == 0:
            return f"{score.reward:.3f} = no answer was found"
        if score.exact:
            return f"{score.reward:.3f} = the answer {answer} is right"
        return f"{score.reward:.3f} = there is an answer, {answer}, but it is wrong"


def _rows(folder: Path) -> Iterator[dict[str, str]]:
    """Yield the rows, those of the test split first: of equal questions the first is used."""
    for name in ("test", "train"):
        path = folder / f"{name}.jsonl"
        if kind_of(path) != "file":
            raise UserError(
                f"--task gsm8k:{folder}: no file {path}; get train.jsonl and test.jsonl from "
                "github.com/openai/grade-school-math"
            )
        for where, row in read_jsonl(path):
            question, solution = str(row.get("question", "")), str(row.get("answer", ""))
            _, hashes, answer = solution.rpartition("####")
            if not (question and hashes) or number_of(answer) is None:
                raise UserError(
                    f"{where}: is not a line of GSM8K; it needs a question, and an answer that "
                    "ends with #### and a number"
                )
            is_validation = int(key_of("gsm8k", " ".join(question.split())), 16) % 10 == 0
            yield {
                "prompt": f"{question.rstrip()}\n\n{INSTRUCTION}",
                "answer": answer.strip(),
                "split": "validation" if name == "train" and is_validation else name,
            }
