"""Word problems of your own in the form of GSM8K: write them, train, evaluate.

python examples/gsm8k_folder.py [--folder FOLDER] [--model MODEL] [--steps N]

FOLDER gets train.jsonl and test.jsonl unless it has them, so the published files work as well.
"""

import argparse
import json
import random
from pathlib import Path

from grpo import train

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--folder", type=Path, default=Path("made-up-gsm8k"))
parser.add_argument("--model", default="builtin", help="as for train.py")
parser.add_argument("--steps", type=int, default=20)

THINGS = "apples books coins eggs keys lamps nails pens".split()


def lines(count, seed):
    """Yield problems, and solutions that end with #### and the answer."""
    rng = random.Random(seed)
    for _ in range(count):
        bags, each, lost = rng.randint(2, 9), rng.randint(2, 9), rng.randint(1, 3)
        things, total = rng.choice(THINGS), bags * each
        yield {
            "question": f"Ann has {bags} bags of {each} {things} and loses {lost} {things}. "
            f"How many {things} has she left?",
            "answer": f"At first she has {bags} * {each} = <<{bags}*{each}={total}>>{total}.\n"
            f"Then she has {total} - {lost} = <<{total}-{lost}={total - lost}>>{total - lost}.\n"
            f"#### {total - lost}",
        }


def main(flags):
    """Write the files, train on them, and say how many held-out problems are right."""
    flags.folder.mkdir(parents=True, exist_ok=True)
    for seed, (name, count) in enumerate({"train": 400, "test": 100}.items()):
        path = flags.folder / f"{name}.jsonl"
        if not path.exists():
            path.write_text("".join(json.dumps(line) + "\n" for line in lines(count, seed)))

    task = f"gsm8k:{flags.folder}"
    run = train(task=task, model=flags.model, steps=flags.steps, max_new_tokens=48, prompts=8)
    for line in run.reports:
        print(f"step {line['step']}: {line['exact']:.3f} right of {line['n']} held-out problems")
    print(f"next: python eval.py --model {run.path} --task {task} --problems 100")


if __name__ == "__main__":
    main(parser.parse_args())
