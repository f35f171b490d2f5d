"""A task of your own: write the words of a text in reverse order."""

from grpo.tasks.base import Problem, Score, key_of

WORDS = {
    "train": ["owl", "tide", "salt", "moss"],
    "validation": ["bell", "rope"],
    "test": ["loom", "kiln"],
}


class Reverse:
    name = "reverse"
    rewards = ()  # one reward only
    default_level = 3  # words of the text

    def make(self, level, split, rng):
        words = rng.choices(WORDS[split], k=level)
        return Problem(
            self.name,
            level,
            f"Write these words in reverse order: {' '.join(words)}",
            target=" ".join(reversed(words)),
            key=key_of(self.name, *words),
        )

    def score(self, problem, completions):
        target = problem.target.split()
        hits = [sum(x == y for x, y in zip(text.split(), target)) for text in completions]
        return [
            Score(reward=hit / max(len(target), len(text.split())), exact=text.split() == target)
            for hit, text in zip(hits, completions)
        ]
