"""The verdict on a run.

It compares the policy after training with the policy before it, on the same held-out problems. A
paired comparison needs no assumption about how hard the problems are, and its interval is several
times narrower than that of the difference of two independent means. A run whose steps changed no
weights has not learned, whatever the scores.
"""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from statistics import fmean
from typing import Any, Literal

from grpo.records import Group, level_name
from grpo.statistics import TAIL, mean_interval

MIN_STEPS = 50  # fewer steps without a clear difference are too few to say "not learned"
UNFINISHED = 3  # exit status of a run that was stopped, or has not learned

Kind = Literal["learned", "already solved", "not learned", "too short to tell", "not measured"]


@dataclass(frozen=True)
class Verdict:
    """Whether a run learned, e.g. ``Verdict("learned", level=25, n=200, before=0.18, after=0.99,
    difference=0.81, low=0.78, high=0.84, steps=60, updated=41, untaught=0.62, truncated=0.0)``.

    `before` and `after` are mean held-out scores on the same `n` problems of `level`. `imitated` is
    the score on them after the warm start and before the first step; None without a warm start.
    `difference` is what reinforcement added: to `imitated`, or else to `before`. `low` and `high`
    are its 95 % interval, or a wider one if several levels are compared (see `reach_verdict`).
    `updated` is the number of steps that changed the weights, `untaught` the share of sampled
    tokens in groups that taught nothing, `truncated` the share of completions that reached the
    token budget, `demonstrated` the share of the groups trained on that showed the right answer.
    `stopped` says why the run was stopped; "" if it was not.

    `solved_step` is the first step from which on each held-out evaluation had solved the level (see
    `grpo.run.conclusion.is_solved`); None without one. `mistake` is the most common mistake of the
    last held-out evaluation, in words; "" without wrong answers. `next_command` is what to run
    next.
    """

    kind: Kind
    level: int
    n: int
    before: float | None
    after: float | None
    difference: float | None
    low: float | None
    high: float | None
    steps: int
    updated: int
    untaught: float
    truncated: float
    stopped: str = ""
    imitated: float | None = None
    solved_step: int | None = None
    mistake: str = ""
    next_command: str = ""
    demonstrated: float = 0.0

    @property
    def exit_status(self) -> int:
        """0, or UNFINISHED if the run was stopped or has not learned."""
        return UNFINISHED if self.stopped or self.kind == "not learned" else 0

    def lines(self, metric: str, unit: str, control: str = "") -> list[str]:
        """Return the verdict for the console: the conclusion, then the supporting figures.

        `metric` names the score, `unit` what a level counts, `control` marks a control experiment.
        """
        mark = f"CONTROL {control}  " if control else ""
        spent = (
            f"{self.updated} of {self.steps} steps updated the weights; {self.untaught:.0%} of the "
            f"sampled tokens were in groups that taught nothing; {self.truncated:.0%} of the "
            "completions were truncated"
        )
        if self.demonstrated:
            spent += f"; {self.demonstrated:.0%} of the groups trained on showed the right answer"
        lines = [f"{mark}{self.kind.upper()}: {self._comparison(metric, unit)}", spent]
        if self.solved_step is not None:
            lines.append(f"solved in every held-out evaluation from step {self.solved_step} on")
        if self.mistake:
            lines.append(f"most common mistake: {self.mistake}")
        return lines

    def _comparison(self, metric: str, unit: str) -> str:
        """Return the scores before and after, and their difference, in words."""
        level = level_name(self.level, unit)
        if not self.n:
            return f"no held-out problem at {level} was scored both before and after"

        imitated, added = "", "difference"
        if self.imitated is not None:
            imitated = f" → {self.imitated:.3f} by imitation"
            added = "reinforcement added"
        return (
            f"held-out {metric} at {level} {self.before:.3f}{imitated} → {self.after:.3f}, {added} "
            f"{self.difference:+.3f} [{self.low:+.3f}, {self.high:+.3f}] (n = {self.n}, paired)"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as a line of eval.jsonl."""
        values = asdict(self)
        kind = values.pop("kind")
        return {"step": values.pop("steps"), "purpose": "verdict", "verdict": kind, **values}

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> "Verdict | None":
        """Return the verdict in a line of eval.jsonl; None if an older version wrote less."""
        values = {"kind": line["verdict"], "steps": line["step"], **line}
        names = {field.name: field.default is MISSING for field in fields(cls)}
        if any(is_needed and name not in values for name, is_needed in names.items()):
            return None
        return cls(**{name: values[name] for name in names if name in values})


def is_expected(verdict: Verdict, mark: Mapping[str, str]) -> bool:
    """Return whether a run ended as it should.

    A run learns, and a control experiment, which has a `mark`, does not.
    """
    if verdict.stopped:
        return False
    if mark:
        return verdict.kind != "learned"
    return verdict.kind in ("learned", "already solved")


@dataclass(frozen=True)
class HeldOutScores:
    """Mean scores of held-out problems by key, e.g. ``HeldOutScores({"k": 0.2}, {"k": 0.9})``.

    They are those of the untrained policy (`before`), of the trained one (`after`), and of the
    policy after the warm start (`imitated`; None without one). Their level is one of `levels` at
    which the policies are compared.
    """

    before: Mapping[str, float]
    after: Mapping[str, float]
    imitated: Mapping[str, float] | None = None
    levels: int = 1


def values_by_problem(groups: Sequence[Group], level: int) -> dict[str, float]:
    """Return the mean score of each problem of `level`, by its key."""
    return {
        group.problem.key: fmean(score.value for score in group.scores)
        for group in groups
        if group.problem.level == level
    }


def reach_verdict(
    level: int,
    scores: HeldOutScores,
    metrics: Sequence[Mapping[str, Any]],
    *,
    was_solved: bool,
    stopped: str = "",
) -> Verdict:
    """Return the verdict on a run.

    A policy that is called "learned" if it learned at any of several levels has as many chances of
    being called so by mistake. So the interval then misses as many times more rarely (Bonferroni's
    correction), and the probability of a mistake stays at TAIL.

    The scores after training are compared with those after the warm start if there was one, so
    what imitation taught does not count. `metrics` are the lines of metrics.jsonl; `was_solved` is
    whether the untrained policy passed the validation check.
    """
    before, after, imitated = scores.before, scores.after, scores.imitated
    start = before if imitated is None else imitated
    shared = [key for key in before if key in after and key in start]
    differences = [after[key] - start[key] for key in shared]

    figures: dict[str, Any] = dict(
        level=level,
        n=len(shared),
        **_figures_of(metrics),
        stopped=stopped,
        imitated=fmean(imitated[key] for key in shared) if imitated and shared else None,
    )
    if not shared:
        nothing: dict[str, Any] = dict.fromkeys(("before", "after", "difference", "low", "high"))
        return Verdict("not measured", **figures, **nothing)

    low, high = mean_interval(differences, bounds=(-1.0, 1.0), tail=TAIL / scores.levels)
    is_worse = high < 0
    kind: Kind
    if low > 0 and figures["updated"]:
        kind = "learned"
    elif was_solved and not is_worse:
        kind = "already solved"
    elif len(metrics) < MIN_STEPS and not is_worse and not stopped:
        kind = "too short to tell"
    else:
        kind = "not learned"

    return Verdict(
        kind,
        **figures,
        before=fmean(before[key] for key in shared),
        after=fmean(after[key] for key in shared),
        difference=fmean(differences),
        low=low,
        high=high,
    )


def _figures_of(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of a verdict that come from the lines of metrics.jsonl."""
    last = metrics[-1] if metrics else {}
    tokens = last.get("num_tokens", 0)
    truncated = [line.get("completions/clipped_ratio") or 0 for line in metrics]
    # Weighted by groups: dynamic sampling and a token budget take more or fewer in a step.
    groups = [max(1, line.get("groups/count") or 1) for line in metrics]
    kept, demonstrated = (
        sum(line.get(f"groups/{done}") or 0 for line in metrics)
        for done in ("kept", "demonstrated")
    )
    return {
        "steps": len(metrics),
        "updated": sum("loss" in line for line in metrics),
        "untaught": last.get("wasted_tokens_total", 0) / tokens if tokens else 0.0,
        "truncated": fmean(truncated, groups) if truncated else 0.0,
        "demonstrated": demonstrated / kept if kept else 0.0,
    }
