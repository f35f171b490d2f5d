"""The warm start: a short imitation of right answers, before the first step.

It is for a policy with no level within reach. It ends at a held-out score of ENOUGH, or after a
share MAX_SHARE of the run. Its result is recorded apart from what reinforcement adds afterwards.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from grpo.curriculum.demonstrations import demonstration
from grpo.evaluate import score_groups
from grpo.model.policy import Policy
from grpo.records import Group
from tasks.base import Problem, Task

# Right answers in an update. SmolLM2-135M then needs 18 to 22 updates, or 12 seconds, for 10 words
# (runs/LOG.md, 2026-11-23: "10 words by one command").
ANSWERS = 32

# Updates between two held-out scores. The score rises by 0.03 an update, and a score every five
# updates overshot its mark (runs/LOG.md, 2026-11-23: "what it does from nothing").
VALIDATE_EVERY = 2

# The held-out score that ends the imitation. No answer is right by then (exact 0.00), but rewards
# vary: reinforcement goes on from 0.40 to 0.99, and needs no further right answers. Imitation alone
# ends at 0.964 (runs/LOG.md, 2026-11-23: "10 words by one command").
ENOUGH = 0.4

# The most that imitation may take, as a share of the tokens that the run will learn from. The 18 to
# 22 updates above are 0.3 % of such a run, so this is a bound for models that imitate slowly.
MAX_SHARE = 0.05


@dataclass
class WarmStart:
    """The result of an imitation.

    E.g. ``WarmStart(20, 640, 19_200, [2.9, ...], [[0, 0.02], [2, 0.1], ...], "held-out ...")``.

    `losses` has the loss of each update, in nats per token. `validation_scores` has pairs of
    (updates made, held-out score), beginning before the first update. `why` is a sentence.
    """

    updates: int = 0
    answers: int = 0
    tokens: int = 0
    losses: list[float] = field(default_factory=list)
    validation_scores: list[list[float]] = field(default_factory=list)
    why: str = ""

    @property
    def score(self) -> float:
        """The last held-out score."""
        return self.validation_scores[-1][1]

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        return asdict(self)


def right_answer(policy: Policy, task: Task, index: int, problem: Problem) -> Group:
    """Return the right answer of a problem as a group of one completion, with advantage 1."""
    group = Group(
        index,
        problem,
        policy.encode(problem),
        1.0,
        [demonstration(policy, problem)],
        action="imitate",
        advantages=[1.0],
        shots=policy.shots(problem),
        opened=policy.opened(problem),
    )
    score_groups(task, [group])
    return group


def most_updates(steps: int, completions: int) -> int:
    """Return the most updates before a run of `steps` with `completions` completions each.

    That is a share MAX_SHARE of the run, counting answers like completions, which are about as
    long. It is never less than the updates before the first validation.
    """
    return max(VALIDATE_EVERY, int(MAX_SHARE * steps * completions / ANSWERS))


def warm_start(
    draw: Callable[[int], Sequence[Group]],
    learn: Callable[[Sequence[Group]], dict[str, float]],
    validate: Callable[[], float],
    limit: int,
) -> tuple[WarmStart, list[Group]]:
    """Imitate until the held-out score is ENOUGH, or `limit` updates are made.

    `draw(n)` returns the right answers of n new problems, `learn` makes one update on them and
    returns its "loss", and `validate` returns the policy's held-out score. Returns the result and
    the answers that were learned from.
    """
    result = WarmStart(validation_scores=[[0, validate()]])
    learned: list[Group] = []

    while result.score < ENOUGH and result.updates < limit:
        groups = draw(ANSWERS)
        learned += groups

        result.losses.append(learn(groups)["loss"])
        result.updates += 1
        result.answers += len(groups)
        result.tokens += sum(len(group.completions[0].tokens) for group in groups)

        if result.updates % VALIDATE_EVERY == 0 or result.updates == limit:
            result.validation_scores.append([result.updates, validate()])

    before = result.validation_scores[0][1]
    cause = "its share of the run is spent"
    if result.score >= ENOUGH:
        cause = "the score is enough for reinforcement"
    result.why = (
        f"held-out score {before:.3f} → {result.score:.3f} after {result.updates} updates: {cause}"
    )
    return result, learned
