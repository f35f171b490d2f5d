"""A task of your own: write the first word of a text, and then every second one."""

from grpo.tasks.base import Problem, Score, key_of

WORDS = {
    "train": "owl tide salt moss bell rope loom kiln fern gate harp iron jade kelp mint".split(),
    "validation": "barn clay dune elm frost glade hive ink".split(),
    "test": "lark mill nest oak pond quay reef sail".split(),
}


class EverySecond:
    name = "every-second"
    rewards = ()  # one reward only
    default_level = 4  # words of the text

    def make(self, level, split, rng):
        words = rng.choices(WORDS[split], k=level)
        return Problem(
            self.name,
            level,
            f"Write the first word of A, then every second word.\nA: {' '.join(words)}",
            target=" ".join(words[::2]),
            key=key_of(self.name, *words),
        )

    def score(self, problem, completions):
        target = problem.target.split()
        hits = [sum(x == y for x, y in zip(text.split(), target)) for text in completions]
        return [
            Score(reward=hit / max(len(target), len(text.split())), exact=text.split() == target)
            for hit, text in zip(hits, completions)
        ]
