"""Why a completion has its reward and its advantage, in sentences.

`python -m grpo.inspect` and the report take them from here. A task says how it computes a reward
(`tasks.registry.explain`), and `grpo.records.WHY` what a class of groups means. Each sentence has
the numbers that it is made of, so that a reader can repeat the computation.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import fmean
from typing import Any

from grpo.config import WEIGHT_WORDS, WEIGHTED_BY
from grpo.records import WHY, Group
from grpo.show.group import DONE_TO, advantage_of
from tasks.registry import explain

NOT_FOR_TRAINING = "none: the completion was not sampled for training"


def why(
    config: Mapping[str, Any], groups: Sequence[Group], number: int, sample: int, kind: str = "step"
) -> dict[str, str]:
    """Return the sentences on "reward", "advantage" and "training" of a completion.

    It is completion `sample` of group `number`, in `groups` of a step's rollouts of a `kind`.
    """
    group = groups[number]
    is_of_step = kind in ("step", "failed")
    sentences = {
        "reward": reward_in_words(config, group, sample, is_of_step=is_of_step),
        "advantage": NOT_FOR_TRAINING,
        "training": NOT_FOR_TRAINING,
    }
    if kind == "step":
        sentences["advantage"] = advantage_in_words(config, groups, group, sample)
        sentences["training"] = training_in_words(config, groups, group, sample)
    return sentences


def reward_in_words(
    config: Mapping[str, Any], group: Group, sample: int, *, is_of_step: bool = True
) -> str:
    """Return how a completion earned its reward.

    E.g. "0.190 = 4 right before the first error / 21 written". Of the run's `config`, the keys
    `task`, `reward` and `control` are read. A control experiment changes only the rewards of steps
    (`is_of_step`).
    """
    control = config.get("control") or "none"
    score = group.scores[sample]
    if is_of_step and control != "none":
        return f"{score.reward:.3f}, set by the control experiment {control}; not earned"

    task = config.get("task", group.problem.task)
    return explain(task, group.problem, group.texts[sample], score, config.get("reward"))


def advantage_in_words(
    config: Mapping[str, Any], groups: Sequence[Group], group: Group, sample: int
) -> str:
    """Return how the reward became the advantage, e.g. "-0.523 = (0.190 - 0.471) / 0.537, ..."."""
    from grpo.learn.advantages import EPS, divisors  # imports torch, which takes seconds

    rewards = group.rewards
    mean = fmean(rewards)
    if not group.advantages:
        done = DONE_TO.get(group.action, "not trained on")
        if group.action in ("resample", "demonstrate"):
            done += ", see its next try"
        return (
            f"none: the group was {done} ({group.class_name}: "
            f"{WHY.get(group.class_name, 'its rewards vary')}); the mean of its {len(rewards)} "
            f"rewards is {mean:.3f}"
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
    length, loss = len(completion.tokens), str(config.get("loss", "dapo"))
    weight = "weighted by the run's own loss"
    if loss in WEIGHTED_BY:
        numbers = {"rows": len(trained), "length": length, "tokens": sum(trained)}
        weight = f"each with weight 1 / {WEIGHT_WORDS[WEIGHTED_BY[loss]].format(**numbers)}"
    return f"yes, on its {length} tokens, {weight}{_effect(group.advantages[sample])}"


def _effect(advantage: float | list[float]) -> str:
    """Return what an update does to a completion of this advantage; "" if tokens differ."""
    if isinstance(advantage, list):
        return ""
    if advantage == 0:
        return "; its advantage is 0, so it taught nothing"
    sign, verb = ("positive", "raises") if advantage > 0 else ("negative", "lowers")
    return f"; its advantage is {sign}, so the update {verb} its probability"
