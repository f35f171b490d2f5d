"""A reward function of your own, in a few lines: the embedded model learns a new list exercise.

python examples/every_second.py
"""

import random
from itertools import permutations

from grpo import train

WORDS = "owl tide salt moss bell rope loom kiln fern gate harp iron jade kelp lamp mint".split()


def reward(prompt, completion, answer, **row):
    """Return the share of words in the right place, and 0.2 more if all of them are."""
    wrote, right = completion.split(), answer.split()
    hits = sum(word == wanted for word, wanted in zip(wrote, right))
    return {"place": hits / max(len(wrote), len(right)), "all": 0.2 * (wrote == right)}


def rows(count):
    """Yield lists of four words, and the first and the third of them."""
    for words in random.Random(0).sample([*permutations(WORDS, 4)], count):
        prompt = f"Write the first word of A, then every second word.\nA: {' '.join(words)}"
        yield {"prompt": prompt, "answer": " ".join(words[::2])}


if __name__ == "__main__":
    run = train(rows(600), reward, reward_range=(0, 1.2), max_new_tokens=32, steps=60)
    print(run.report())
    prompt = "Write the first word of A, then every second word.\nA: one two three four"
    print(run.policy.generate([prompt], temperature=0))
