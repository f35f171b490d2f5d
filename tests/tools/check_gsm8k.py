"""Our scores of GSM8K's published answers: `python tests/tools/check_gsm8k.py FOLDER`.

FOLDER has the published files train.jsonl, test.jsonl and example_model_solutions.jsonl
(github.com/openai/grade-school-math). The last one holds the answers of four models to the test
problems, each with the verdict of GSM8K's authors. Two tables: how many of the published right
answers score 1, and how often our verdict on a model's answer is theirs. Ends with status 1 if
either is not all.
"""

import re
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data.errors import exit_status
from data.files import read_jsonl
from tasks.base import SPLITS, Problem
from tasks.registry import load_task


def is_right(task, problem: Problem, completion: str) -> bool:
    (score,) = task.score(problem, [completion])
    return score.reward == 1.0


def main(folder: str) -> int:
    task = load_task(f"gsm8k:{folder}")
    all_right = True

    print("| split | published answers | of which score 1 |\n|---|---|---|")
    for split in SPLITS:
        problems = task.problems(split)
        right = sum(is_right(task, problem, problem.target) for problem in problems)
        print(f"| {split} | {len(problems):,} | {right:,} |")
        all_right &= right == len(problems)

    by_question = {problem.data["question"]: problem for problem in task.problems("test")}
    verdicts: Counter[tuple[str, bool, bool]] = Counter()
    for _, row in read_jsonl(Path(folder) / "example_model_solutions.jsonl"):
        problem = by_question[row["question"]]
        for model, answer in row.items():
            if isinstance(answer, dict):
                # Their solutions end with "A: 18", where our prompt asks for "Answer: 18".
                completion = re.sub(r"(?m)^A:", "Answer:", answer["solution"])
                ours = is_right(task, problem, completion)
                verdicts[model, answer["is_correct"], ours] += 1

    print(
        "\n| model | both right | both wrong | theirs alone | ours alone |\n|---|---|---|---|---|"
    )
    for model in sorted({model for model, _, _ in verdicts}):
        kinds = [(True, True), (False, False), (True, False), (False, True)]
        counts = [verdicts[model, theirs, ours] for theirs, ours in kinds]
        print(f"| {model} |", " | ".join(f"{count:,}" for count in counts), "|")
        all_right &= not sum(counts[2:])
    return 0 if all_right else 1


if __name__ == "__main__":
    sys.exit(exit_status("check_gsm8k.py", lambda: main(*sys.argv[1:])))
