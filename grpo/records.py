"""The records that flow from the rollout to the disk, in the order in which a step makes them.

    Problem
      ─► Completion, Group (rollout)
      ─► Group.scores (task)
      ─► Group.class_name, .action, .trap (variance monitor)
      ─► Group.advantages (learn)
      ─► Decision (curriculum)
      ─► StepReport (metrics, console)

Reward and advantage are separate fields, and neither ever overwrites the other.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any, ClassVar, Literal, get_args

from grpo.tasks.base import Problem, Score

# The class of a group: "varied", or why it carries no gradient.
GroupClass = Literal["varied", "identical", "solved", "failed", "tied"]
CLASSES: tuple[GroupClass, ...] = get_args(GroupClass)

# What each class without gradient means.
WHY = {
    "identical": "all completions identical",
    "solved": "all right",
    "failed": "all with the lowest reward",
    "tied": "different texts, equal rewards",
}

# How a completion ended, by its `finish`.
ENDINGS = {
    "stop": "complete",
    "length": "truncated",
    "enough": "ended where nothing more is scored",
}

# What a step does with a group: learn from it, leave it out, learn from a copy that shows the right
# answer instead, or imitate it (a right answer, before the first step).
Action = Literal["keep", "skip", "demonstrate", "imitate"]


@dataclass(frozen=True)
class Completion:
    """One sampled answer, e.g. ``Completion((71, 9, 2), (-0.1, -0.3, -0.0), " a b", "stop")``."""

    tokens: tuple[int, ...]  # sampled ids, the end token included
    # Of each token, under the distribution that it was drawn from: natural logarithms, temperature
    # and truncation included.
    logprobs: tuple[float, ...]
    text: str  # decoded without the end token; other control tokens by their names
    # "stop", or without an end token "length" if the budget truncated the completion, "enough" if
    # nothing that follows would be scored.
    finish: str
    is_demonstration: bool = False  # a right answer of the task: not sampled, its logprobs are 0

    @property
    def is_truncated(self) -> bool:
        """Whether the budget cut the completion off."""
        return self.finish == "length"

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        if self.is_demonstration:
            return "the right answer, which was shown"
        return ENDINGS.get(self.finish, self.finish)


@dataclass
class Group:
    """The completions of one prompt. Each station of a step fills in its own fields."""

    index: int  # of the problem in the training stream
    problem: Problem
    prompt: tuple[int, ...]  # token ids, chat template included
    temperature: float
    completions: list[Completion]
    scores: list[Score] = field(default_factory=list)
    class_name: GroupClass = "varied"
    action: Action = "keep"
    # One for each completion, or for each of its tokens; none if nothing was learned.
    advantages: list[float | list[float]] = field(default_factory=list)
    trap: str | None = None  # the cheap strategy that at least half of the completions follow
    shots: tuple[str, ...] = ()  # keys of the examples that the prompt shows
    opened: str = ""  # the reasoning tag that the prompt ends with, e.g. "<think>\n"; not stored

    @property
    def texts(self) -> list[str]:
        """The answers that are scored."""
        return [completion.text for completion in self.completions]

    @property
    def rewards(self) -> list[float]:
        """The reward of each completion."""
        return [score.reward for score in self.scores]

    @property
    def judged(self) -> list[Score]:
        """The scores that a reward gave: one that abstained says nothing of its completion."""
        return [score for score in self.scores if not score.abstained]

    @property
    def judged_share(self) -> float:
        """The share of the completions that a reward judged."""
        return len(self.judged) / len(self.scores)

    @property
    def reward_std(self) -> float:
        """The standard deviation of the rewards, by which advantages are divided."""
        return stdev(self.rewards) if len(self.rewards) > 1 else 0.0

    @property
    def teaches(self) -> bool:
        """Whether the group is trained on and varies; `on_degenerate: keep` keeps others too."""
        return self.action == "keep" and self.class_name == "varied"

    @property
    def has_demonstration(self) -> bool:
        """Whether a completion is a right answer that was not sampled."""
        return any(completion.is_demonstration for completion in self.completions)

    @property
    def tokens(self) -> int:
        """The number of newly sampled tokens: none if it is imitated, or a copy with an answer."""
        if self.has_demonstration:
            return 0
        return sum(len(completion.tokens) for completion in self.completions)


def level_name(level: int, unit: str) -> str:
    """Return a level in words: "25 words", or "level 25" if the task's levels count nothing."""
    return f"{level} {unit}" if unit else f"level {level}"


def row_of(problem: Problem) -> dict[str, Any]:
    """Return the columns of a user's row besides prompt and target; {} for another problem."""
    row = problem.data.get("row")
    if not isinstance(row, Mapping):
        return {}
    return {name: x for name, x in row.items() if name != "target" or x != problem.target}


def truncated_share(groups: Sequence[Group]) -> float:
    """Return the share of the groups' sampled completions that the budget cut off."""
    return fmean(each.is_truncated for group in groups for each in group.completions)


def judged_mean(name: str, groups: Sequence[Group]) -> float | None:
    """Return the mean "value" or "exact" of what the reward judged; None if that is nothing."""
    found = [getattr(score, name) for group in groups for score in group.judged]
    return fmean(found) if found else None


def originals(groups: Sequence[Group]) -> list[Group]:
    """Return the groups without the copies that show the right answer."""
    return [group for group in groups if not group.has_demonstration]


@dataclass(frozen=True)
class Decision:
    """A decision of the curriculum: a line of curriculum.jsonl."""

    step: int
    before: int  # level
    after: int
    # Before the first step "prompt", "preflight", "imitation"; then "open" (the next level),
    # "anneal" (the learning rate falls from now on), "solved".
    kind: str
    why: str  # a sentence
    figures: dict[str, Any] = field(default_factory=dict)  # its numbers

    @property
    def line(self) -> str:
        """The decision in one line, for the console."""
        levels = f"level {self.before}"
        if self.after != self.before:
            levels += f" → {self.after}"
        return f"step {self.step}: {levels}, {self.why}"

    def to_json(self) -> dict[str, Any]:
        """Return the decision as a line of curriculum.jsonl."""
        names = {"before": "from", "after": "to"}
        return {names.get(name, name): value for name, value in vars(self).items()}


class Resumable:
    """Something whose attributes in STATE are saved with each checkpoint, as JSON types."""

    STATE: ClassVar[tuple[str, ...]]

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON types. A dictionary is a list of pairs: keys may be numbers."""
        return {name: _to_json(getattr(self, name)) for name in self.STATE}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        for name in self.STATE:
            setattr(self, name, _from_json(state[name], getattr(self, name)))


def _to_json(value: Any) -> Any:
    if isinstance(value, dict):
        return [list(pair) for pair in value.items()]
    if isinstance(value, set):
        return sorted(value)
    return list(value) if isinstance(value, (list, deque)) else value


def _from_json(value: Any, before: Any) -> Any:
    """Return `value` as what the attribute was `before`."""
    if isinstance(before, deque):
        return deque(value, before.maxlen)
    if isinstance(before, dict):
        return type(before)(dict(value))
    return type(before)(value) if isinstance(before, (list, set)) else value


@dataclass
class StepReport:
    """The results of a training step."""

    step: int
    metrics: dict[str, Any]  # its line of metrics.jsonl
    groups: list[Group]  # all that it sampled, and copies that show a right answer
    events: list[str] = field(default_factory=list)  # for the console: alarms and decisions
    decisions: list[Decision] = field(default_factory=list)
    end: str = ""  # why the run ends after this step, if a callback says so


# --- what files and JSON hold of groups -----------------------------------------------------------


def summaries(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return the lines of groups.jsonl: each group of a step, without its texts."""
    return [
        {
            "group": number,
            **group_values(group),
            "reward": fmean(group.rewards),
            "reward_std": group.reward_std,
            "value": judged_mean("value", [group]),
            "exact": judged_mean("exact", [group]),
            "distinct": len(set(group.texts)),
            "tokens": group.tokens,
        }
        for number, group in enumerate(groups)
    ]


def group_values(group: Group) -> dict[str, Any]:
    """Return what every record of a group, and of its completions, begins with."""
    return {
        "index": group.index,
        "level": group.problem.level,
        "temperature": group.temperature,
        "class": group.class_name,
        "action": group.action,
        "trap": group.trap,
    }


def completion_values(group: Group, sample: int) -> dict[str, Any]:
    """Return a completion of a group with its score, as JSON values."""
    completion, score = group.completions[sample], group.scores[sample]
    return {
        "tokens": list(completion.tokens),
        "logprobs": list(completion.logprobs),
        "text": completion.text,
        "finish": completion.finish,
        "reward": score.reward,
        "value": score.value,
        "exact": score.exact,
        "advantage": group.advantages[sample] if group.advantages else None,
        "parts": dict(score.parts),
    }
