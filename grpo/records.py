"""The named things that flow from the rollout to the disk, in the order in which they come to be.

    Problem
      ─► Completion, Group (rollout)
      ─► Group.scores (task)
      ─► Group.verdict, .action, .trap (variance monitor)
      ─► Group.advantages (learn)
      ─► StepSummary ─► Decision (curriculum)
      ─► StepReport (metrics, console)

Reward and advantage are separate fields and neither is ever overwritten by the other.
"""

from dataclasses import dataclass, field
from statistics import pstdev
from typing import Any

from tasks.base import Problem, Score


@dataclass(frozen=True)
class Completion:
    """One sampled answer, e.g. ``Completion((71, 9, 2), (-0.1, -0.3, -0.0), " a b", "stop")``.

    `tokens` are the sampled ids, with the end token last where `finish` is "stop" ("length": the
    budget ran out); `logprobs` their natural-log probabilities under the distribution they were
    drawn from (temperature and truncation included), one for each token; `text` what they write
    (`Policy.decode`): all but that end token, with any other control token by its name.
    `is_demonstration`: it was not sampled but is the task's right answer, for imitation; its
    log-probabilities are 0.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish: str
    is_demonstration: bool = False


@dataclass
class Group:
    """G completions of one prompt, with all that becomes known of them on their way through a step.

    `verdict` is the monitor's class ("varied", "identical", "solved", "failed", "tied"); `action`
    what was done with the group ("keep", "skip", "resample": this try was discarded and sampled
    again, "imitate": a right answer that was imitated); `advantages` has
    one number for each completion, or (--credit alignment) one list for each, of a number for each
    of its tokens, or is empty where the group was not learned from; `trap` is what half of its
    completions or more do instead of what was asked, as the task names it (`Score.parts["trap"]`),
    None where there is no such name.
    """

    index: int  # the problem's index in the training stream
    problem: Problem
    prompt: tuple[int, ...]  # token ids, chat template included
    temperature: float
    completions: list[Completion]
    attempt: int = 0  # 0 for the first draw, 1, 2, ... for hotter ones
    scores: list[Score] = field(default_factory=list)
    verdict: str = "varied"
    action: str = "keep"
    advantages: list[float] | list[list[float]] = field(default_factory=list)
    trap: str | None = None
    shots: tuple[str, ...] = ()  # keys of the examples that the prompt shows

    @property
    def texts(self) -> list[str]:
        """The answers that are scored."""
        return [completion.text for completion in self.completions]

    @property
    def rewards(self) -> list[float]:
        """The reward of each completion."""
        return [score.reward for score in self.scores]

    @property
    def spread(self) -> float:
        """Standard deviation of the rewards, divisor n."""
        return pstdev(self.rewards)

    @property
    def tokens(self) -> int:
        """Sampled tokens of the group, end tokens included; none in a group that is imitated."""
        if any(completion.is_demonstration for completion in self.completions):
            return 0
        return sum(len(completion.tokens) for completion in self.completions)


@dataclass(frozen=True)
class StepSummary:
    """A training step as the curriculum sees it.

    E.g. ``StepSummary(7, {10: [0.9, 0.8]}, {10: [False, False]}, tokens=900)``.

    `values` and `collapsed` have for each level a list with an entry per group (first tries): its
    mean score, and whether it collapsed.
    `seconds` is what the step took, `tokens` what it sampled.
    """

    step: int
    values: dict[int, list[float]]
    collapsed: dict[int, list[bool]] = field(default_factory=dict)
    seconds: float = 0.0
    tokens: int = 0


@dataclass(frozen=True)
class Decision:
    """What a curriculum decided after a step, a line of curriculum.jsonl.

    `kind`: "preflight" (before the first step), "promotion", "collapse" (one rung back), "budget"
    (spent), "climbed" (the last rung), "stay" (a look was not enough). `before` and `after` are
    levels, `why` is a sentence with the `figures`.
    """

    step: int
    before: int
    after: int
    kind: str
    why: str
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """The decision in one line, for the console."""
        levels = (
            f"level {self.before} → {self.after}"
            if self.after != self.before
            else f"level {self.before}"
        )
        return f"step {self.step}: {levels}, {self.why}"

    def to_json(self) -> dict[str, Any]:
        """Return the decision as a line of curriculum.jsonl."""
        return {
            "step": self.step,
            "from": self.before,
            "to": self.after,
            "kind": self.kind,
            "why": self.why,
            "figures": self.figures,
        }


@dataclass
class StepReport:
    """What a training step did: `metrics` is the line of metrics.jsonl, `groups` every group
    drawn, skipped ones too, `events` the lines for the console (alarms, the curriculum's
    `decisions`).
    """

    step: int
    metrics: dict[str, Any]
    groups: list[Group]
    events: list[str] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
