"""What cheap strategies of interleaving write, and the right answer."""

from collections.abc import Sequence

from grpo.tasks.interleave import interleaved


def strategies(a: Sequence[str], b: Sequence[str]) -> dict[str, list[str]]:
    """Return what each trap writes."""
    right = interleaved(a, b)
    return {
        "copies A": list(a),
        "copies B": list(b),
        "doubles A": [word for word in a for _ in range(2)],
        "doubles B": [word for word in b for _ in range(2)],
        "ignores A": [word for each in b for word in ("~", each)],
        "ignores B": [word for each in a for word in (each, "~")],
        "A then B": [*a, *b],
        "B then A": [*b, *a],
        "B first": interleaved(b, a),
        "runs on in A": [*right[: len(right) // 2], *a[len(right) // 4 :]],
        "runs on in B": [*right[: len(right) // 2], *b[len(right) // 4 :]],
        "stops half way": right[: len(right) // 2],
    }


def all_strategies(a: Sequence[str], b: Sequence[str]) -> dict[str, list[str]]:
    """Return what each strategy writes: the traps, small mistakes, and the right answer."""
    right = interleaved(a, b)
    third = 2 * (len(a) // 3)
    return {
        "right": right,
        "empty": [],
        **strategies(a, b),
        "turn lost at a third": right[:third] + interleaved(b[third // 2 :], a[third // 2 :]),
        "one word skipped": right[:third] + right[third + 1 :],
        "stutter": right[:third] + right[third : third + 1] + right[third:],
        "target twice": right + right,
        "garbage": [f"{word}~" for word in right],
    }
