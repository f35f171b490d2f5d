"""The view `why` of `python -m grpo.inspect`: one completion's reward and advantage, in words.

Each sentence has the numbers that it is made of, so that a reader can repeat the computation.
"""

import argparse
from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.text import Text

from data.text import escape_control
from grpo.config import WEIGHT_WORDS, WEIGHTED_BY
from grpo.learn.advantages import EPS, divisors
from grpo.records import WHY, Group
from grpo.run.reader import RunData
from grpo.show.tables import DONE_TO, advantage_of
from grpo.tools.inspect_common import as_json, check_sample, show_next
from grpo.tools.reward_words import reward_in_words

# Of completions that no step sampled to train on.
UNTRAINED = "none: the completion was not sampled for training"


def show_why(run: RunData, arguments: argparse.Namespace, console: Console) -> None:
    """Say in words why a completion earned its reward and advantage, and what it taught."""
    groups = run.groups(arguments.step, arguments.kind)
    group = run.group(arguments.step, arguments.group, arguments.kind)
    check_sample(run, group, arguments.sample)
    record = {
        "step": arguments.step,
        "group": arguments.group,
        "sample": arguments.sample,
        "reward": reward_in_words(
            run.config,
            group,
            arguments.sample,
            is_of_step=arguments.kind in ("step", "failed"),
        ),
        "advantage": UNTRAINED,
        "training": UNTRAINED,
    }
    if arguments.kind == "step":
        record |= {
            "advantage": advantage_in_words(run.config, groups, group, arguments.sample),
            "training": training_in_words(run.config, groups, group, arguments.sample),
        }
    if as_json([record], arguments, console):
        return

    for name in ("reward", "advantage", "training"):
        line = Text.assemble((f"{name:<9}  ", "bold"), escape_control(str(record[name])))
        console.print(line, soft_wrap=not console.is_terminal)
    number = f"{arguments.step} {arguments.group}"
    kind = "" if arguments.kind == "step" else f" --kind {arguments.kind}"
    show_next(run, f"tokens {number} {arguments.sample}{kind}", console)


def advantage_in_words(
    config: Mapping[str, Any], groups: Sequence[Group], group: Group, sample: int
) -> str:
    """Return how the reward became the advantage, e.g. "-0.523 = (0.190 - 0.471) / 0.537, ..."."""
    rewards = group.rewards
    mean = fmean(rewards)
    if not group.advantages:
        why = WHY.get(group.class_name, "its rewards vary")
        done = DONE_TO.get(group.action, "not trained on")
        if group.action in ("resample", "demonstrate"):
            done += ", see its next try"
        return (
            f"none: the group was {done} ({group.class_name}: {why}); the mean of its "
            f"{len(rewards)} rewards is {mean:.3f}"
        )

    advantage = advantage_of(group, sample)
    if isinstance(group.advantages[sample], list):
        return f"{advantage}: each token has its own, by what its word added to the reward"

    # "batch" is over all groups that the step trained on.
    scale = config.get("scale", "group")
    trained = [each for each in groups if each.advantages] if scale == "batch" else [group]
    (divisor, *_) = divisors([each.rewards for each in trained], scale=scale)

    digits = _enough_digits(advantage, rewards[sample], mean, divisor)
    difference = f"({rewards[sample]:.{digits}f} - {mean:.{digits}f})"
    of_group = f"the reward less the mean of the group's {len(rewards)} rewards"
    if scale == "none":
        return f"{advantage} = {difference}: {of_group}"

    count = sum(len(each.rewards) for each in trained)
    whose = "their" if scale == "group" else f"the step's {count} trained rewards'"
    return (
        f"{advantage} = {difference} / {divisor:.{digits + 1}f}: {of_group}, over {whose} standard "
        f"deviation + {EPS:g}"
    )


def _enough_digits(advantage: str, reward: float, mean: float, divisor: float) -> int:
    """Return the decimals (one more for the divisor) that give the `advantage` again."""
    for digits in range(3, 17):
        difference = round(reward, digits) - round(mean, digits)
        if float(f"{difference / round(divisor, digits + 1):.3f}") == float(advantage):
            return digits
    return 3  # the stored advantage was computed in another way


def training_in_words(
    config: Mapping[str, Any], groups: Sequence[Group], group: Group, sample: int
) -> str:
    """Return whether the step trained on a completion, and with which weight."""
    completion = group.completions[sample]
    masks = config.get("truncated") == "mask"
    if group.action == "demonstrate":
        if sample == len(group.completions) - 1:
            return "no: the right answer took its place in the group's next try"
        return "in the group's next try, in which the right answer takes the last one's place"
    if not group.advantages:
        return "no: the group taught nothing"
    if masks and completion.is_truncated:
        return "no: it was truncated, and the loss leaves such completions out (truncated: mask)"

    trained = [
        len(each.tokens)
        for each in chain.from_iterable(one.completions for one in groups if one.advantages)
        if not (masks and each.is_truncated)
    ]
    length, kind = len(completion.tokens), str(config.get("loss", "dapo"))
    weight = "weighted by the run's own loss"
    if kind in WEIGHTED_BY:
        numbers = {"rows": len(trained), "length": length, "tokens": sum(trained)}
        weight = f"each with weight 1 / {WEIGHT_WORDS[WEIGHTED_BY[kind]].format(**numbers)}"
    return f"yes, on its {length} tokens, {weight}{_effect(group.advantages[sample])}"


def _effect(advantage: float | list[float]) -> str:
    """Return what an update does to a completion of this advantage; "" if tokens differ."""
    if isinstance(advantage, list):
        return ""
    if advantage == 0:
        return "; its advantage is 0, so it taught nothing"
    verb = "raises" if advantage > 0 else "lowers"
    sign = "positive" if advantage > 0 else "negative"
    return f"; its advantage is {sign}, so the update {verb} its probability"
