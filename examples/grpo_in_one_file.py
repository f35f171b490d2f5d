"""GRPO in one file: a small language model learns to interleave two texts, word by word.

    python examples/grpo_in_one_file.py

Group relative policy optimization (arXiv:2402.03300) needs no value network. It samples several
completions of each prompt, and compares each completion with the others of its group. One step:

    1. sample   G completions of each of several prompts, token by token
    2. score    each completion by its alignment with the right answer: a reward from 0 to 1
    3. compare  advantage = (reward - mean of the group) / (standard deviation of the group + EPS)
    4. learn    make completions with a positive advantage likelier and the others less likely,
                within bounds, and stay close to the reference: the model before training

The trainer in `grpo/` does the same for any model, and faster. A test compares the advantages, the
loss and the gradient of the two (`tests/test_one_file.py`).

Shapes: G completions (rows) of a group, P tokens of its prompt, T tokens of its longest completion,
V vocabulary. A tensor's name ends with its shape: `logp_GT` has G rows and T columns.
"""

import argparse
import copy
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo.align.needleman import similarity_batch, split_words
from grpo.tasks.interleave import Interleave

MODEL = Path(__file__).resolve().parents[1] / "data" / "base_model"

PROMPTS = 4  # prompts a step
GROUP_SIZE = 16  # completions of each prompt, G
UPDATES = 2  # optimizer steps on the same completions

EPS = 1e-4  # bounds the advantages of a group whose rewards hardly differ
CLIP_LOW, CLIP_HIGH = 0.2, 0.28  # the ratio counts from 0.8 to 1.28, as in DAPO (arXiv:2503.14476)
BETA = 0.01  # weight of the KL divergence from the reference

LEARNING_RATE = 2e-4
WARMUP = 5  # steps before the full learning rate
MAX_GRAD_NORM = 1.0


@dataclass
class Group:
    """The completions of one prompt, padded on the right."""

    prompt_P: Tensor  # token ids
    tokens_GT: Tensor  # token ids
    mask_GT: Tensor  # True at a completion's tokens, its end token included; False at padding
    old_GT: Tensor  # log-probability of each token under the policy that sampled it
    ref_GT: Tensor  # log-probability of each token under the reference
    texts: list[str]
    rewards_G: Tensor


def prefill(model, prompt_P: Tensor, size: int):
    """Run the prompt once for the group; return logits (G, 1, V) of the next token, and a cache."""
    output = model(prompt_P[None], use_cache=True, logits_to_keep=1)
    output.past_key_values.batch_repeat_interleave(size)
    return output.logits.expand(size, -1, -1), output.past_key_values


def sample(model, prompt_P: Tensor, budget: int, end: int) -> tuple[Tensor, ...]:
    """Sample completions of at most `budget` tokens: tokens, mask and log-probabilities (G, T)."""
    logits_G1V, cache = prefill(model, prompt_P, GROUP_SIZE)
    is_open_G1 = torch.ones(GROUP_SIZE, 1, dtype=torch.bool)
    columns = []
    while is_open_G1.any() and len(columns) < budget:
        logp_GV = logits_G1V[:, 0].log_softmax(-1)
        drawn_G1 = torch.multinomial(logp_GV.exp(), num_samples=1)

        # A row that has ended is padded until the last row ends.
        token_G1 = torch.where(is_open_G1, drawn_G1, end)
        columns.append((token_G1, is_open_G1, logp_GV.gather(1, token_G1)))
        is_open_G1 = is_open_G1 & (token_G1 != end)
        logits_G1V = model(token_G1, past_key_values=cache).logits

    return tuple(torch.cat(parts, dim=1) for parts in zip(*columns))


def completion_logprobs(model, prompt_P: Tensor, tokens_GT: Tensor) -> Tensor:
    """Return the log-probability of each token (G, T), with gradient, in one pass over all tokens.

    The prompt's last token predicts the first token of a completion. The last token of the
    completion predicts nothing. Gradients flow through the cache into the prompt.
    """
    first_G1V, cache = prefill(model, prompt_P, len(tokens_GT))
    next_GTV = model(tokens_GT, past_key_values=cache).logits
    logits_GTV = torch.cat([first_G1V, next_GTV[:, :-1]], dim=1)
    return logits_GTV.log_softmax(-1).gather(2, tokens_GT[:, :, None])[:, :, 0]


def score(texts: list[str], target: str) -> Tensor:
    """Return the reward of each text (G,): how similar its words are to those of the target.

    The best alignment (Needleman-Wunsch) counts +1 for a match, -1 for a mismatch or a gap. Its sum
    S becomes (S + M) / 2M, where M is the length of the longer text: 1 if all words are right.
    """
    rewards = similarity_batch([split_words(text) for text in texts], split_words(target))
    return torch.tensor(rewards, dtype=torch.float32)


@torch.no_grad()
def collect(model, reference, tokenizer, problem) -> Group:
    """Sample and score a group of completions of the problem."""
    turns = [{"role": "user", "content": problem.prompt}]
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    prompt_P = torch.tensor(prompt)

    # A quarter more tokens than the right answer takes: room for mistakes, but not for rambling.
    budget = 5 * len(tokenizer.tokenize(problem.target)) // 4 + 1
    tokens_GT, mask_GT, old_GT = sample(model, prompt_P, budget, tokenizer.eos_token_id)
    ref_GT = completion_logprobs(reference, prompt_P, tokens_GT)

    # The end token is no part of the text. Any other control token is, and so counts as a mistake.
    rows = [tokens_T[mask_T] for tokens_T, mask_T in zip(tokens_GT, mask_GT)]
    texts = [tokenizer.decode(row).removesuffix(tokenizer.eos_token) for row in rows]
    rewards_G = score(texts, problem.target)
    return Group(prompt_P, tokens_GT, mask_GT, old_GT, ref_GT, texts, rewards_G)


def advantages(rewards_G: Tensor) -> Tensor:
    """Return by how many standard deviations each reward exceeds the mean of its group (G,)."""
    return (rewards_G - rewards_G.mean()) / (rewards_G.std() + EPS)


def token_losses(logp_GT: Tensor, group: Group) -> Tensor:
    """Return the loss of each token (G, T): the clipped surrogate and the KL term."""
    advantages_G1 = advantages(group.rewards_G)[:, None]

    # The ratio is 1 until the first update. The minimum is constant, without gradient, where an
    # update has taken a token beyond a bound in the direction of its advantage.
    ratio_GT = (logp_GT - group.old_GT).exp()
    clipped_GT = ratio_GT.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    surrogate_GT = torch.minimum(ratio_GT * advantages_G1, clipped_GT * advantages_G1)

    # k3 = exp(d) - d - 1 estimates KL(policy || reference), and is never negative. Multiplied by
    # the ratio, it has the gradient of the KL as well (arXiv:2512.02556).
    d_GT = group.ref_GT - logp_GT
    k3_GT = d_GT.expm1() - d_GT
    return -surrogate_GT + BETA * ratio_GT * k3_GT


def step_loss(model, groups: list[Group]) -> Tensor:
    """Return the loss of the step: the mean over the tokens of all groups, as in DAPO.

    A mean over each completion first would give the tokens of long completions less weight.
    """
    losses = []
    for group in groups:
        logp_GT = completion_logprobs(model, group.prompt_P, group.tokens_GT)
        losses.append(token_losses(logp_GT, group)[group.mask_GT])
    return torch.cat(losses).mean()


def main() -> None:
    """Train; print a line for each step, and at the end a completion."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--words", type=int, default=3, help="words of each text (default: 3)")
    parser.add_argument("--steps", type=int, default=12, help="default: 12")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    rng = random.Random(options.seed)

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.0)

    task = Interleave()  # its problems are passages of the embedded corpus
    for step in range(1, options.steps + 1):
        problems = [task.make(options.words, "train", rng) for _ in range(PROMPTS)]
        groups = [collect(model, reference, tokenizer, problem) for problem in problems]

        # Where all rewards of a group are equal, all advantages are 0: there is nothing to learn.
        varied = [group for group in groups if len(group.rewards_G.unique()) > 1]

        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, step / (WARMUP + 1))
        for _ in range(UPDATES if varied else 0):
            optimizer.zero_grad()
            step_loss(model, varied).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()

        reward = torch.cat([group.rewards_G for group in groups]).mean()
        print(f"step {step:2}  reward {reward:.3f}  {len(varied)} of {PROMPTS} groups vary")

    print(f"{problems[-1].prompt}\n{groups[-1].texts[-1]}")


if __name__ == "__main__":
    main()
