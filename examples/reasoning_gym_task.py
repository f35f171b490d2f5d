"""A task of reasoning-gym: look at a problem, train on it, and read the answers.

pip install -c constraints.txt -e '.[reasoning]'
python examples/reasoning_gym_task.py [--task NAME] [--model MODEL] [--steps N]

The embedded model is too small for these tasks: expect little of it, and give a real MODEL.
"""

import argparse

from grpo import train
from tasks.registry import load_task
from tasks.scoring import scores_of
from tasks.supply import problem_at

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--task", default="chain_sum", help="the name of a dataset of reasoning-gym")
parser.add_argument("--model", default="builtin", help="as for train.py")
parser.add_argument("--steps", type=int, default=30)


def main(flags):
    """Show a problem, train, and show the best and the worst answer of the last step."""
    name = f"reasoning_gym:{flags.task}"
    task = load_task(name)
    problem = problem_at(task, seed=0, split="train", level=1, index=0)
    (score,) = scores_of(task, problem, [problem.target])
    print(f"{problem.prompt}\n\n{problem.target}\n(earns {score.reward:g})\n")

    run = train(task=name, model=flags.model, steps=flags.steps, max_new_tokens=64, prompts=8)

    answers = sorted(run.rollouts(run.steps()[-1]), key=lambda answer: answer["reward"])
    for answer in (answers[-1], answers[0]):
        print(f"\nreward {answer['reward']:.2f}: {answer['text']!r}, wanted {answer['target']!r}")
    for line in run.reports:
        print(f"step {line['step']}: held-out score {line['mean']:.3f} (n = {line['n']})")


if __name__ == "__main__":
    main(parser.parse_args())
