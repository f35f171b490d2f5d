"""Warm start: a short imitation of right answers, for a policy that earns nothing and so cannot
learn from rewards.

It ends as soon as the policy earns something: at a held-out score of ENOUGH, or at a cost of MOST
of the run. What it came to is kept apart from what reinforcement then adds.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from grpo.model.policy import Policy
from grpo.records import Completion, Group
from tasks.base import Problem, Task, scores_of

ANSWERS = 32  # of an update
LOOK_EVERY = (
    2  # updates between looks at the held-out score, which rises by 0.03 an update where it rises
)
ENOUGH = 0.4  # the score that ends it; reinforcement is to do the rest
MOST = 0.05  # of the tokens that the run is going to learn from


@dataclass
class WarmStart:
    """What an imitation came to, e.g. ``WarmStart(20, 640, 19_200, [2.9, ...], [[5, 0.1], ...],
    "...")``.

    `losses` (nats a token) has one entry an update; `looks` pairs of (updates, held-out score),
    from before the first update on.
    """

    updates: int = 0
    answers: int = 0
    tokens: int = 0
    losses: list[float] = field(default_factory=list)
    looks: list[list[float]] = field(default_factory=list)
    why: str = ""

    @property
    def score(self) -> float:
        """The held-out score at the end."""
        return self.looks[-1][1]

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        return asdict(self)


def right_answer(policy: Policy, task: Task, index: int, problem: Problem) -> Group:
    """Return the right answer of a problem as a group of one, with advantage 1."""
    tokens = (*policy.target_tokens(problem.target), policy.end)
    text = policy.decode(tokens)
    completion = Completion(tokens, (0.0,) * len(tokens), text, "stop", is_demonstration=True)
    return Group(
        index,
        problem,
        policy.encode(problem),
        1.0,
        [completion],
        scores=scores_of(task, problem, [text]),
        action="imitate",
        advantages=[1.0],
        shots=policy.shots(problem),
    )


def most_updates(steps: int, completions: int) -> int:
    """Return how many updates may be made before a run of `steps` with so many `completions` each:
    MOST of their number.

    Answers count like completions: both are about as long. One look's worth is always allowed.
    """
    return max(LOOK_EVERY, int(MOST * steps * completions / ANSWERS))


def warm_start(
    draw: Callable[[int], Sequence[Group]],
    learn: Callable[[Sequence[Group]], dict[str, float]],
    look: Callable[[], float],
    limit: int,
) -> tuple[WarmStart, list[Group]]:
    """Imitate until the policy earns something; return what it came to, and the answers that were
    learned from.

    `draw(n)` returns n right answers of new problems, `learn` takes one optimizer step towards
    them, `look` returns the policy's held-out score; at most `limit` updates are made.
    """
    made = WarmStart(looks=[[0, look()]])
    learned: list[Group] = []
    while made.score < ENOUGH and made.updates < limit:
        groups = draw(ANSWERS)
        learned += groups
        made.losses.append(learn(groups)["loss"])
        made.updates += 1
        made.answers += len(groups)
        made.tokens += sum(len(group.completions[0].tokens) for group in groups)

        if made.updates % LOOK_EVERY == 0 or made.updates == limit:
            made.looks.append([made.updates, look()])

    reached = (
        "the score is enough for reinforcement"
        if made.score >= ENOUGH
        else "its share of the run is spent"
    )
    made.why = (
        f"held-out score {made.looks[0][1]:.3f} → {made.score:.3f} after {made.updates} "
        f"updates: {reached}"
    )
    return made, learned
