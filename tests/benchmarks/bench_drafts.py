"""Measure what drafts would save in a task whose answer nobody knows beforehand.

    python tests/benchmarks/bench_drafts.py --model DIR --task gsm8k:FOLDER

The model answers some problems at temperature 1, twice: once as a group of today, and once as the
group of an earlier epoch. Then drafts are simulated on the tokens of today. A draft is what
followed the longest earlier occurrence of the last tokens (prompt lookup decoding): in the
completion itself and its prompt; in the other completions of its group, which are taken to be
finished already, more than a rollout could know; or in those of the earlier epoch.

A draft of k tokens is accepted up to the first one that differs. The time of a pass over R rows is
that of `pass_costs` for the model on a GPU; drafts cost nothing, and no row waits for another. So
the speeds are what drafts could give at best.
"""

import argparse
from collections.abc import Iterable, Sequence
from statistics import fmean

import torch

from grpo.model.load import load_policy
from grpo.rollout.cuda_graph import pass_costs
from grpo.rollout.generate import generate
from grpo.rollout.request import RolloutRequest
from grpo.rollout.sampling import sample_key
from tasks.registry import load_task
from tasks.supply import Supply

Tokens = tuple[int, ...]

LENGTHS = (1, 3, 7, 15)

# Tokens whose earlier occurrence is looked for, the longest first.
LONGEST, SHORTEST = 8, 1


class Index:
    """Where each sequence of SHORTEST to LONGEST tokens was followed by what."""

    def __init__(self, texts: Iterable[Tokens]):
        self.texts: list[Sequence[int]] = []
        self.places: dict[Tokens, tuple[int, int]] = {}
        for text in texts:
            self.add(text, 0)

    def add(self, text: Sequence[int], start: int) -> None:
        """Add the tokens of a text from `start` on; a later occurrence replaces an earlier one."""
        if not start:
            self.texts.append(text)
        for end in range(start, len(text)):
            for n in range(SHORTEST, min(LONGEST, end) + 1):
                self.places[tuple(text[end - n : end])] = (len(self.texts) - 1, end)

    def draft(self, tokens: Tokens, k: int) -> Sequence[int]:
        """Return up to k tokens that followed the longest end of `tokens` that is known."""
        for n in range(min(LONGEST, len(tokens)), SHORTEST - 1, -1):
            if place := self.places.get(tokens[-n:]):
                text, end = place
                return self.texts[text][end : end + k]
        return ()


def passes(prompt: Tokens, written: Tokens, known: Sequence[Tokens], k: int, own: bool) -> int:
    """Return the passes that write a completion with drafts of k tokens.

    Drafts come from the texts `known`, and from prompt and completion if it is its `own`.
    """
    index = Index(known)
    whole = prompt + written
    seen = 0
    place = len(prompt) + 1  # the first token follows the prompt
    count = 1
    while place < len(whole):
        if own:
            index.add(whole[:place], seen)
            index.texts[-1] = whole[:place]
            seen = place
        draft = index.draft(whole[:place], k)
        rest = whole[place : place + len(draft)]
        agreed = next((i for i, pair in enumerate(zip(draft, rest)) if pair[0] != pair[1]), None)
        place += 1 + (len(rest) if agreed is None else agreed)
        count += 1
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--task", default="gsm8k:data")
    parser.add_argument("--level", type=int, default=1)
    parser.add_argument("--problems", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--rows", default="16,64,256", help="rows of a pass")
    arguments = parser.parse_args()

    policy = load_policy(arguments.model)
    task = load_task(arguments.task)
    supply = Supply(task, seed=0)
    problems = [supply.at(index, arguments.level) for index in range(arguments.problems)]
    prompts = [policy.encode(problem) for problem in problems]
    P, G = arguments.problems, arguments.group_size

    def answers(epoch: int) -> list[list[Tokens]]:
        keys = [[sample_key("drafts", epoch, p, g) for g in range(G)] for p in range(P)]
        budgets = [arguments.max_new_tokens] * P
        groups = generate(policy, RolloutRequest(prompts, keys, [1.0] * P, budgets))
        return [[completion.tokens for completion in group] for group in groups]

    earlier, today = answers(0), answers(1)
    print(policy.decode(today[0][0]), "\n")
    mean = fmean(len(tokens) for group in today for tokens in group)
    costs = pass_costs(policy)
    print(f"{torch.__version__}, {P} problems of {arguments.task}, {G} completions of {mean:.0f}")
    print(f"a pass takes the time of {costs.fixed:.0f} tokens and its own\n")

    rows = [int(number) for number in arguments.rows.split(",")]
    print(
        "| drafts from | length | tokens a pass | speed at " + " | at ".join(map(str, rows)) + " |"
    )
    print("|---|---|---|" + "---|" * len(rows))
    for name in ("itself", "its group", "an earlier epoch", "all three"):
        for k in LENGTHS:
            counts = []
            for p, (prompt, group) in enumerate(zip(prompts, today)):
                for g, written in enumerate(group):
                    known: list[Tokens] = []
                    if name in ("an earlier epoch", "all three"):
                        known += [prompt + tokens for tokens in earlier[p]]
                    if name in ("its group", "all three"):
                        known += [prompt + tokens for i, tokens in enumerate(group) if i != g]
                    own = name in ("itself", "all three")
                    counts.append(passes(prompt, written, known, k, own))
            gain = mean / fmean(counts)
            speeds = [gain * (costs.fixed + R) / (costs.fixed + R * (k + 1)) for R in rows]
            cells = " | ".join(f"{speed:.2f}" for speed in speeds)
            print(f"| {name} | {k} | {gain:.2f} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
