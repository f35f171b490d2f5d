"""GSM8K (Cobbe et al. 2021, arXiv:2110.14168), word problems of primary school: rows and a reward.

python examples/gsm8k.py FOLDER
python train.py --model MODEL --data FOLDER/rows.jsonl --reward-file examples/gsm8k.py:reward

FOLDER has the published train.jsonl and test.jsonl (github.com/openai/grade-school-math), whose
answers end with #### and a number. The first command makes rows.jsonl of them. A tenth of
train.jsonl becomes the validation split.
"""

import json
import sys
from pathlib import Path

from tasks.answers import final_answer, number_of

INSTRUCTION = (
    'Think about it first. Then end with one line that begins with "Answer:" and holds the final '
    "answer alone."
)

# The reward of a wrong answer in the right form, as for countdown in TinyZero
# (github.com/Jiayi-Pan/TinyZero).
FORM = 0.1


def reward(completion, answer):
    """Return 1 for an answer that is the same number, `FORM` for another answer, 0 for none."""
    found = final_answer(completion)
    if found is None:
        return 0.0
    return 1.0 if number_of(found) == number_of(answer) else FORM


def rows(folder):
    """Yield the rows, those of the test split first: of equal questions the first is used."""
    for name in ("test", "train"):
        for number, line in enumerate((folder / f"{name}.jsonl").open(encoding="utf-8")):
            problem = json.loads(line)
            answer = problem["answer"].rpartition("####")[2].strip()
            assert number_of(answer) is not None, f"{name}.jsonl, line {number + 1}: no answer"
            is_validation = name == "train" and number % 10 == 0
            yield {
                "prompt": f"{problem['question']}\n\n{INSTRUCTION}",
                "answer": answer,
                "split": "validation" if is_validation else name,
            }


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    lines = [json.dumps(row) + "\n" for row in rows(folder)]
    (folder / "rows.jsonl").write_text("".join(lines), encoding="utf-8")
