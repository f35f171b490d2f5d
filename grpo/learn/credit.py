"""Per-token advantages from rewards that are earned on the way: rewards-to-go against a baseline
of the state.

A task that gives credits (`tasks.base.credits_of`) says what each word has added to the reward by
the time it stands there. The reward-to-go R_t of a token is the reward less what the words written
before it had earned, and its advantage, that of the policy gradient sum_t grad log pi(a_t | s_t)
(R_t - b(s_t)) (rewards-to-go with a baseline; arXiv:1506.02438, eq. 1, form 3), is

    A_t = (R_t - mean of R over the completions of the group that were in the state of t)
          / (std of the group's rewards + eps)

The state is (words written, what they earned, the letters of the word under way). A word counts as
written when the text goes on behind it, and is under way until then: only the next token tells
whether "ow" becomes "owl", and a state that knew would depend on the action. As the earnings are
part of the state, they cancel: A_t is the completion's reward less the mean reward of those that
had come as far, no better and no worse. So the first token has the outcome's advantage, a group of
equal rewards has none, and no advantage is larger than rewards of the group differ; behind a slip
after which nothing more can be earned it is exactly 0.

Why this baseline: it depends on the text before the token alone, so it adds no bias, and it knows
what the value of a state mostly hangs on. The mean at the same token or word, whatever had been
earned, pays every token of completions that have gone right so far and charges every token behind
a slip, as the outcome does. The mean has the completion itself in it, as in GRPO, so that what is
learned in a state that k completions shared counts (k - 1) / k: where nobody else has been there
is nothing to compare with, A_t = 0.

Shapes: T tokens of a completion.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from statistics import mean

from grpo.learn.advantages import divisors, floats
from grpo.records import Group

Decode = Callable[[Sequence[int]], str]
State = tuple[int, float, str]

CREDITS = ("outcome", "alignment")


def token_advantages(
    groups: Sequence[Group], decode: Decode, *, scale: str, eps: float = 1e-4
) -> list[list[list[float]]]:
    """Return for each group, for each completion, the advantage of each token (T,), see above.

    The scores have `credits`; `decode` is `Policy.decode`; `scale` is that of `advantages`,
    applied to the rewards.
    """
    decode_one, made = cache(lambda token: decode((token,))), []
    paid = floats([group.rewards for group in groups])
    for group, earned, divisor in zip(
        groups, paid, divisors(paid, scale=scale, eps=eps), strict=True
    ):
        states = []
        for completion, score in zip(group.completions, group.scores, strict=True):
            assert score.credits is not None, "the task was asked for them"
            ends = token_ends(completion.tokens, completion.text, decode, decode_one)
            states.append(token_states(completion.text, ends, score.credits))

        rewards = defaultdict(list)  # of the completions that were in a state
        for reward, row in zip(earned, states):
            for state in dict.fromkeys(row):
                rewards[state].append(reward)
        means = {state: mean(values) for state, values in rewards.items()}
        made.append(
            [
                [(reward - means[state]) / divisor for state in row]
                for reward, row in zip(earned, states)
            ]
        )
    return made


def token_states(
    text: str, ends: Sequence[int], credits: Sequence[tuple[int, float]]
) -> list[State]:
    """Return the state (T,) in which each token of `text` was drawn; `ends` (T,) are where they
    end in it.

    Earnings are rounded to 12 places: completions that earned the same by different sums were in
    one state.
    """
    word_ends = [0, *(end for end, _ in credits)]
    earned = [0.0, *accumulate(amount for _, amount in credits)]
    states = []
    for reached in (0, *ends[:-1]):
        words = bisect_left(word_ends, reached, lo=1) - 1
        states.append((words, round(earned[words], 12), text[word_ends[words] : reached].lstrip()))
    return states


def token_ends(
    tokens: Sequence[int], text: str, decode: Decode, decode_one: Callable[[int], str]
) -> list[int]:
    """Return how many characters of `text` = decode(tokens) are whole when each of the tokens is
    there, (T,).

    Tokens that do not decode by themselves (parts of a character, or a space that is dropped where
    it stands first) are decoded behind the token before them, together up to a whole character.
    """
    pieces = [decode_one(token) for token in tokens]
    if "\N{REPLACEMENT CHARACTER}" not in text and "".join(pieces) == text:
        return list(accumulate(map(len, pieces)))
    ends, first, done = [], 0, 0  # text[:done] is what the tokens before `first` write
    for t in range(1, len(tokens) + 1):
        before = max(0, first - 1)
        piece = decode(tokens[before:t])[len(decode(tokens[before:first])) :]
        if not piece.endswith("\N{REPLACEMENT CHARACTER}"):
            first, done = t, done + len(piece)
        ends.append(done)
    return ends
