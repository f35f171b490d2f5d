"""A task of copying, and trainers and runs on it."""

from small_runs import FEW

from grpo.config import Config
from grpo.trainer import Parts, Trainer
from tasks.base import Problem, Score, key_of

SMALL = [*FEW, "--steps", "2", "--eval-problems", "2", "--level", "2"]


class Copy:
    """Copies a number; `answer` scores, in whatever way a test wants."""

    name, rewards, default_level = "copy", (), 1

    def __init__(
        self,
        answer=lambda texts: [Score(0.1 * i) for i in range(len(texts))],
        prompt="Copy text A.\nA: {}",
    ):
        self.answer, self.prompt = answer, prompt

    def make(self, level, split, rng):
        number = rng.randrange(10**6)
        return Problem(self.name, level, self.prompt.format(number), f"{number}", key_of(number))

    def score(self, problem, completions):
        return self.answer(completions)


def trainer_for(policy, task=None, **options):
    return Trainer(
        Config(
            **{
                "task": "copy",
                "level": 1,
                "steps": 2,
                "prompts": 2,
                "group_size": 4,
                "max_new_tokens": 8,
                "learning_rate": 0.0,
            }
            | options
        ),
        Parts(task or Copy()),
        policy,
    )
