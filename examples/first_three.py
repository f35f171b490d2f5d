"""A reward function of your own, in a few lines: the embedded model learns where to stop.

python examples/first_three.py
"""

import random

from grpo import train

WORDS = "owl tide salt moss bell rope loom kiln fern gate harp iron jade kelp lamp mint".split()


def reward(prompt, completion, answer, **row):
    """Return the share of words in the right place, and 0.2 more if all of them are."""
    wrote, right = completion.split(), answer.split()
    hits = sum(word == wanted for word, wanted in zip(wrote, right))
    return {"place": hits / max(len(wrote), len(right)), "all": 0.2 * (wrote == right)}


def rows(count):
    """Yield lists of eight words, and their first three."""
    rng = random.Random(0)
    for _ in range(count):
        words = rng.sample(WORDS, 8)
        prompt = f"Write the first three words of A.\nA: {' '.join(words)}"
        yield {"prompt": prompt, "answer": " ".join(words[:3])}


if __name__ == "__main__":
    run = train(rows(600), reward, reward_range=(0, 1.2), max_new_tokens=32, steps=60)
    print(run.report())
    print(run.policy.generate(["Write the first three words of A.\nA: one two three four five"]))
