"""A dataset of reasoning-gym (arXiv:2505.24760) as rows and a reward: its problems, its scorer.

pip install -c constraints.txt -e '.[reasoning]'
python examples/reasoning_gym_task.py [--task NAME] [--model MODEL] [--steps N]

The embedded model is too small for these tasks: expect little of it, and give a real MODEL.
"""

import argparse

import reasoning_gym

from grpo import train
from tasks.answers import final_answer

INSTRUCTION = 'Think about it first. Then end with one line: "Answer:" and the final answer.'

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--task", default="chain_sum", help="the name of a dataset of reasoning-gym")
parser.add_argument("--model", default="builtin", help="as for train.py")
parser.add_argument("--steps", type=int, default=30)


def main(flags):
    """Train, and show the held-out scores."""
    dataset = reasoning_gym.create_dataset(flags.task, size=1000, seed=0)
    rows = [
        {"prompt": f"{entry['question']}\n\n{INSTRUCTION}", "number": number}
        for number, entry in enumerate(dataset)
    ]

    def reward(completion, number):
        """Return the dataset's own score of the answer, from 0 to 1."""
        answer = final_answer(completion)
        return 0.0 if answer is None else dataset.score_answer(answer, dataset[number])

    run = train(rows, reward, model=flags.model, steps=flags.steps, max_new_tokens=64, prompts=8)
    for line in run.reports:
        print(f"step {line['step']}: held-out score {line['mean']:.3f} (n = {line['n']})")


if __name__ == "__main__":
    main(parser.parse_args())
