"""Compare the time of a long rollout with that of a short one.

    python tests/benchmarks/bench_lengths.py --words 10,500

The task is to copy a text. The embedded model can do that at any of these lengths, so it stands in
for a policy that has learned to interleave. There are equally many completions of each length, all
of one prompt, with and without speculative decoding. The shortest of several times counts.
"""

import argparse
import random
import time

import torch

from data.corpus import documents_of, load_corpus
from grpo.model.load import load_policy
from grpo.rollout.generate import generate
from grpo.rollout.request import RolloutRequest
from grpo.rollout.sampling import sample_key
from grpo.rollout.speculative import AcceptanceModel
from tasks.drafts import Guess


def time_of(
    policy, words: int, completions: int, mode: str, repeats: int
) -> tuple[float, float, dict]:
    """Return seconds, the share of completions that are exact copies, and the drafting metrics."""
    document = random.Random(words).choice(
        [d for d in documents_of("validation", load_corpus()) if len(d.words) >= words]
    )
    text = " ".join(document.words[:words])
    prompt = policy.encode(f"Copy text A.\nA: {text}")
    keys = [[sample_key("bench", words, k) for k in range(completions)]]
    drafting = AcceptanceModel(mode)
    times = []
    for _ in range(repeats):
        drafting.begin()
        start = time.perf_counter()
        (answers,) = generate(
            policy,
            RolloutRequest(
                [prompt],
                keys=keys,
                temperatures=[1.0],
                budgets=[int(1.25 * policy.target_length(text))],
                guesses=[Guess(document.words[:words], [])],
            ),
            drafting,
        )
        times.append(time.perf_counter() - start)

    exact = sum(answer.text.split() == text.split() for answer in answers) / completions
    return min(times), exact, drafting.metrics()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--words", default="10,500")
    parser.add_argument("--completions", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    policy = load_policy("builtin", device=arguments.device)
    print(
        f"{policy.device}, {torch.get_num_threads()} threads, {arguments.completions} "
        "completions\ndrafts  words  seconds  x first  exact copies  tokens a pass"
    )
    for mode in ("off", "auto"):
        first = None
        for words in map(int, arguments.words.split(",")):
            seconds, exact, figures = time_of(
                policy, words, arguments.completions, mode, arguments.repeats
            )
            first = first or seconds
            print(
                f"{mode:<6}{words:>7}{seconds:>9.2f}{seconds / first:>9.1f}{exact:>14.2f}"
                f"{figures.get('draft/tokens_per_forward', 1.0):>15.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
