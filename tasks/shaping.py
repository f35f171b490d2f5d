"""The rewards of task interleave in words, and the arithmetic of the affine one.

`tasks.interleave` computes the others. The five rewards, for a completion of n words and a target
of m; M is the larger of the two:

- prefix: the words before the first error / M
- similarity: (S + M) / 2M, where S = matches - substitutions - gaps
- clipped: max(0, S) / M
- balanced: similarity × the smaller share of a text that was matched / the larger share
- affine: (S' + F) / (M + F), where S' is the score with affine gaps and F >= -S' the cost of the
  empty alignment
"""

from align.words import split_words
from tasks.explanations import explain_parts, has_numbers
from tasks.protocol import Problem, Score

# Gap costs of the affine reward.
GAP_OPEN = -2.0
GAP_EXTEND = -0.25


def affine_reward(score: float, n: int, m: int) -> float:
    """Return the affine reward (S' + F) / (M + F) of an alignment with the score S'.

    `n` and `m` are the lengths of completion and target, M is the larger. F is the cost of the
    empty alignment, in which all words are in gaps, so S' >= -F.
    """
    longest = max(n, m)
    if longest == 0:
        return 1.0
    empty = empty_cost(n, m)
    return (score + empty) / (longest + empty)


def empty_cost(n: int, m: int) -> float:
    """Return F: what it costs to put n and m words into gaps."""
    return sum(-(GAP_OPEN + (length - 1) * GAP_EXTEND) for length in (n, m) if length)


def explain(problem: Problem, completion: str, score: Score, reward: str | None) -> str:
    """Return how a completion earned its reward, e.g. "0.190 = 4 right before the first error / 21
    written".

    What the division is by is named by the longer text: "21 written", or "20 wanted".
    """
    parts = score.parts
    earned = f"{score.reward:.3f}"
    if not has_numbers(parts, "words", "matches", "substitutions", "gaps", "balance"):
        return explain_parts(score)
    if score.exact:
        return f"{earned} = all {parts['words']} words right"

    written, wanted = parts["words"], len(split_words(problem.target))
    longest = max(written, wanted)
    divisor = f"{written} written" if written > wanted else f"{wanted} wanted"
    counted = (
        f"{parts['matches']} right − {parts['substitutions']} replaced − {parts['gaps']} missing "
        "or too many"
    )
    if reward == "prefix" and has_numbers(parts, "first_divergence"):
        return f"{earned} = {parts['first_divergence']} right before the first error / {divisor}"
    if reward == "similarity":
        return f"{earned} = ({counted} + {divisor}) / (2 × {longest})"
    if reward == "clipped":
        return f"{earned} = max(0, {counted}) / {divisor}"
    if reward == "balanced" and has_numbers(parts, "share_a", "share_b"):
        shares = f"matched {parts['share_a']:.0%} of A, {parts['share_b']:.0%} of B"
        return (
            f"{earned} = similarity {score.value:.3f} × balance {parts['balance']:.3f} ({shares})"
        )
    if reward == "affine":
        empty = empty_cost(written, wanted)
        affine = score.reward * (longest + empty) - empty
        return f"{earned} = (affine score {affine:.2f} + {empty:g}) / ({divisor} + {empty:g})"
    return explain_parts(score)
