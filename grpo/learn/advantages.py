"""Advantages: how much better a completion, or one of its tokens, is than the rest of its group.

    A_i = (r_i - mean(r)) / (std(r) + eps)        GRPO, arXiv:2402.03300, section 4.1.2

Without the division these are the advantages of Dr. GRPO (arXiv:2503.20783). The standard deviation
is the sample's (divisor n - 1), as in TRL; the GRPO paper leaves it open. The module `statistics`
computes exactly, so a group of equal rewards has advantages of exactly 0, instead of rounding
errors that the division would magnify.

Credit for single tokens. Some tasks earn their reward word by word, and say by how much each word
of a completion raises it (`grpo.tasks.base.credits_of`). The policy gradient with rewards-to-go
and a baseline is

    sum_t grad log pi(a_t | s_t) (R_t - b(s_t))        arXiv:1506.02438, eq. 1, form 3

where the reward-to-go R_t of a token is the reward less what the words before it have earned. So
the advantage is

    A_t = (R_t - mean of R_t over the completions of the group that were in state s_t)
          / (std of the group's rewards + eps)

The state s_t is (words written, what they have earned, the letters of the unfinished word, the
tokens of an unfinished character). A word counts as written once the text goes on after it: only
the next token tells whether "ow" becomes "owl", and a state that knew would depend on the action.
Completions in one state have earned the same, so A_t is the completion's reward less the mean
reward of all completions that had come exactly as far. The first token has the advantage of the
whole completion; after a mistake that allows no more earnings every advantage is exactly 0.

The baseline depends only on the text before the token, so it adds no bias. The mean includes the
completion itself, as in GRPO: in a state that only one completion has visited A_t = 0. A
demonstration leaves its group's states at the first mistake; so that it is learned whole, each of
its tokens has the advantage of the whole answer.

Shapes: T tokens of a completion.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import accumulate, chain
from statistics import mean, stdev

from grpo.config import SCALES, python_name
from grpo.data.errors import UserError, shown
from grpo.records import Completion, Group
from grpo.tasks.base import calling, finite_number

EPS = 1e-4  # added to a standard deviation

Decode = Callable[[Sequence[int]], str]

# Words written, what they have earned, the letters of the unfinished word, and the tokens since
# then, which have written no whole character yet.
State = tuple[int, float, str, tuple[int, ...]]

# Marks an incomplete character in decoded text.
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


def advantages(rewards: Sequence[Sequence[float]], *, scale: str = "group") -> list[list[float]]:
    """Return the advantage of each completion, in the shape of `rewards`: one list for each group.

    `scale` says what divides them: the standard deviation of the "group"; that of the "batch", of
    all rewards given, *not* taken about the groups' means; or "none". Under `on_degenerate: skip`
    a batch is the groups that are trained on; TRL's `scale_rewards="batch"` counts all groups.
    """
    groups = [list(map(float, group)) for group in rewards]  # of NumPy `mean` would round integers
    centres = map(mean, groups)
    return [
        [(reward - centre) / divisor for reward in group]
        for group, centre, divisor in zip(groups, centres, divisors(groups, scale=scale))
    ]


def own_advantages(function: Callable, groups: Sequence[Group]) -> list[list[float]]:
    """Return the advantages that a user's `function` computes of the groups that are trained on.

    Raises UserError unless they are a finite number for each completion of each group.
    """
    whose = f"advantages {python_name(function)}"
    with calling(whose):  # what it returns may be a generator, which runs now
        found = function(groups)
        rows = list(found) if isinstance(found, Iterable) else []
        rows = [list(row) if isinstance(row, Iterable) else [] for row in rows]
    sizes = [len(group.completions) for group in groups]
    if list(map(len, rows)) != sizes or None in map(finite_number, chain.from_iterable(rows)):
        wanted = ", ".join(f"{count} of {size}" for size, count in Counter(sizes).items())
        raise UserError(
            f"{whose}: returned {shown(found)}; it must return a list of finite numbers for each "
            f"group ({wanted})"
        )
    return [list(map(float, row)) for row in rows]


def divisors(rewards: Sequence[Sequence[float]], *, scale: str) -> list[float]:
    """Return what each group's advantages are divided by; `scale` as in `advantages`."""
    assert scale in SCALES
    if scale == "none":
        return [1.0] * len(rewards)
    if scale == "group":
        return [stdev(group) + EPS for group in rewards]

    every_reward = [reward for group in rewards for reward in group]
    return [stdev(every_reward) + EPS] * len(rewards) if rewards else []


def token_advantages(
    groups: Sequence[Group], decode: Decode, *, scale: str
) -> list[list[list[float]]]:
    """Return for each group and each completion the advantages of its tokens (T,).

    `decode` is `Policy.decode`, and `scale` that of `advantages`.
    """
    decode_one = cache(lambda token: decode((token,)))
    # The same completions visit many states together, and `mean` is slow, because it is exact.
    mean_of = cache(mean)
    group_divisors = divisors([group.rewards for group in groups], scale=scale)

    by_group = []
    for group, divisor in zip(groups, group_divisors, strict=True):
        states = []
        for completion, score in zip(group.completions, group.scores, strict=True):
            assert score.credits is not None, "the task was asked for them"
            ends = token_ends(completion.tokens, completion.text, decode, decode_one)
            states.append(token_states(completion, ends, score.credits))

        # The baseline of a state: the mean over the completions that visited it, each counted once.
        visitors = defaultdict(list)
        for reward, row in zip(group.rewards, states):
            for state in dict.fromkeys(row):
                visitors[state].append(float(reward))
        means = {state: mean_of(tuple(visiting)) for state, visiting in visitors.items()}

        rows = []
        for reward, completion, row in zip(group.rewards, group.completions, states):
            # A demonstration goes where no completion has been, so it is compared with the others
            # at its first token, where all of them are in one state.
            compared = row[:1] * len(row) if completion.is_demonstration else row
            rows.append([(reward - means[state]) / divisor for state in compared])
        by_group.append(rows)
    return by_group


def token_states(
    completion: Completion, ends: Sequence[int], credits: Sequence[tuple[int, float]]
) -> list[State]:
    """Return the state (T,) in which each token of a completion was drawn.

    `ends` (T,) says where in its text each token ends; `credits` where each word does, and what it
    earned, rounded here, because sums may differ by rounding.
    """
    word_ends, amounts = zip((0, 0.0), *credits)
    earned = [round(amount, 12) for amount in accumulate(amounts)]

    states = []
    last = 0  # where the token before the last one ends
    first = 0  # the tokens from here on are not in the text yet
    for t, reached in enumerate((0, *ends[:-1])):  # a token is drawn where the one before it ends
        if reached > last:
            last, first = reached, t
        words = bisect_left(word_ends, reached, lo=1) - 1
        unfinished = completion.text[word_ends[words] : reached].lstrip()
        states.append((words, earned[words], unfinished, completion.tokens[first:t]))
    return states


def token_ends(
    tokens: Sequence[int], text: str, decode: Decode, decode_one: Callable[[int], str]
) -> list[int]:
    """Return how many characters of `text` = decode(tokens) are complete after each token, (T,).

    Parts of a character do not decode by themselves, nor a space that is dropped at the start of a
    text. They are decoded together with the token before them.
    """
    # The quick way, if every token decodes by itself.
    pieces = [decode_one(token) for token in tokens]
    if INCOMPLETE not in text and "".join(pieces) == text:
        return list(accumulate(map(len, pieces)))

    ends = []
    first = 0  # the tokens from here on are not complete yet
    complete = 0  # the tokens before `first` write text[:complete]
    for t in range(1, len(tokens) + 1):
        before = max(0, first - 1)
        piece = decode(tokens[before:t])[len(decode(tokens[before:first])) :]
        if not piece.endswith(INCOMPLETE):
            first = t
            complete += len(piece)
        ends.append(complete)
    return ends
