"""A task whose rewards are forced, and a trainer on it, for tests of single steps."""

from grpo.config import Config
from grpo.tasks.base import Problem, Score, key_of
from grpo.tasks.supply import Supply
from grpo.trainer import Trainer


class Forced:
    """Rewards by index, whatever is written: even problems vary, odd ones earn `odd`."""

    name, rewards, default_level = "forced", (), 1

    def __init__(self, odd=0.5):
        self.odd, self.drawn = odd, {}

    def make(self, level, split, rng):
        number = rng.randrange(10**6)
        return Problem(
            self.name, level, f"Copy text A.\nA: {number}", f"{number} {number}", key_of(number), {}
        )

    def score(self, problem, completions):
        varied = self.drawn[problem.key] % 2 == 0
        return [Score(0.1 * i if varied else self.odd) for i in range(len(completions))]


def trainer_for(policy, odd=0.5, kind=Forced, **options):
    """A trainer whose prompts 1, 3, ... of each step are degenerate."""
    config = Config(
        task="forced",
        level=1,
        group_size=4,
        **{"learning_rate": 1e-3, "steps": 4, "prompts": 4, "max_new_tokens": 24, "save_every": 1}
        | options,
    )
    trainer = Trainer(config, Supply(kind(odd), seed=config.seed), policy)
    trainer.task.drawn = {trainer.stream.supply.at(index, 1).key: index for index in range(20)}
    return trainer


def weights(policy):
    return [p.detach().clone() for p in policy.parameters]
