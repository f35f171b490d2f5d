"""How a run ends: the reasons to end it early, its verdict, and the program's exit status.

The verdict compares the policy after training with the policy before it, problem by problem, on the
same held-out problems. The score alone does not decide: copying one text earns half of the
similarity. So a policy that fell into a trap or into one wrong text has collapsed whatever its
score, one that gives fewer exact answers got worse, one that earns less reward has not learned, and
one that hardly any step updated had no signal to learn from. Nothing here imports torch, because
the report reads verdicts.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from statistics import fmean
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from grpo.config import Config
from grpo.records import WHY, Decision, Group, Resumable, level_name, originals, truncated_share
from grpo.statistics import MARGIN, TAIL, mean_interval, problems_needed, reaches_mark
from grpo.tasks.base import Score
from grpo.variance import common_trap

# A level is solved if the mean of a held-out evaluation is at least SOLVED, and nothing more can be
# learned there from a mean of EXHAUSTED on. That is higher than 0.99, because the mean on other
# problems may be lower.
SOLVED = 0.97
EXHAUSTED = 0.995
NEEDED = problems_needed(SOLVED)  # held-out problems that show it, if all are solved

# A held-out evaluation may end the run once this share of the groups of as many steps is solved:
# with fewer the score still rises, and one of five seeds ended at 0.985 (runs/archive/LOG.md,
# 2026-11-25).
SOLVED_SHARE = 0.95
SOLVED_STEPS = 10
# Steps that trained on nothing are no failure if a larger share of their groups was solved.
MOSTLY_SOLVED = 0.9
CHECK_EVERY = 10  # steps between two validation checks
CHECK_PROBLEMS = 128

MIN_STEPS = 50  # fewer steps without a clear difference are too few to say "not learned"
UNFINISHED = 3  # exit status of a run that was stopped, or has not learned

# Fewer updates than one in twenty steps are almost none: the run would have to be twenty times as
# long to be trained as its steps suggest.
RARE = 0.05

# A level sits in a trap if at most this share of its groups varies, and COLLAPSED_SHARE of its
# completions is in one trap or is one wrong text each; the run ends after TRAPPED times `patience`
# such steps. One run came out of a trap by itself after 250 steps (runs/archive/LOG.md, 2026-11-28:
# "Reward alone, five seeds").
TRAP_VARIED = 0.2
TRAPPED = 5

# A policy has collapsed if this share of its completions is in one trap, or is one wrong text.
COLLAPSED_SHARE = 0.5
LAST_STEPS = 5  # of training, whose groups are asked for identical wrong texts
# Fewer held-out completions prove no collapse unless those of training agree.
MIN_COMPLETIONS = 6


def solves_level(line: Mapping[str, Any]) -> bool:
    """Return whether a held-out evaluation, a line of eval.jsonl, solves its level.

    The interval must begin at most MARGIN below SOLVED, and the budget may cut off one completion
    of twenty: an answer needs an end. The reward may leave one of twenty unjudged. Fewer than
    NEEDED problems have no such interval; of them nearly all answers must be right.
    """
    is_high = reaches_mark(line["mean"], line["ci_low"], SOLVED)
    is_high |= line["n"] < NEEDED and line["mean"] >= EXHAUSTED
    is_judged = line.get("unjudged", 0) <= MARGIN * line.get("completions", line["n"])
    return is_high and is_judged and line.get("truncated", 0.0) <= MARGIN


def solved_step(evaluations: Sequence[Mapping[str, Any]], level: int) -> int | None:
    """Return the step from which on all held-out evaluations of `level` are solved, if any."""
    solved = [
        (line["step"], solves_level(line))
        for line in evaluations
        if line["purpose"] in ("report", "promotion") and line["level"] == level
    ]
    last_unsolved = max((step for step, holds in solved if not holds), default=-1)
    return min((step for step, _ in solved if step > last_unsolved), default=None)


class EndWatch(Resumable):
    """Finds every reason for which a run ends before its steps are made:

    - *stopped*: no group could be trained on for `patience` steps (0: never), or most completions
      of the hardest level were in one trap, or in one wrong text each, for TRAPPED times as many;
      both are failures;
    - *exhausted*: every group of the last level was solved for `patience` steps;
    - *solved*: nearly all groups of the last level were solved for SOLVED_STEPS steps, and a
      held-out evaluation confirms it;
    - *asked*: a callback of the user's said why it ends.
    """

    STATE = ("asked", "solved", "recent", "solved_steps", "untrained", "classes", "trapped", "trap")

    def __init__(self, config: Config):
        self.asked = ""
        self.patience = config.patience
        # The rewards of a control experiment say nothing about the policy.
        self.may_be_solved = config.patience > 0 and config.control == "none"
        # Of the last steps at the last level: solved groups, all groups.
        self.recent: deque[list[int]] = deque(maxlen=SOLVED_STEPS)
        self.solved_steps = 0  # in a row, at which nearly all recent groups were solved
        self.solved = ""  # why the run ends, once a held-out evaluation has confirmed it

        self.untrained = 0  # steps in a row that trained on nothing
        self.classes: Counter[str] = Counter()  # of the groups of these steps
        self.trapped = 0  # steps in a row in which the hardest level sat in a trap
        self.trap = ""  # which one

    def observe(self, groups: Sequence[Group], level: int | None, *, is_last: bool = True) -> None:
        """Count a step whose hardest level is `level` (None: all)."""
        sampled = originals(groups)
        if any(group.teaches for group in groups):
            self.untrained = 0
            self.classes.clear()
        else:
            self.untrained += 1
            self.classes.update(group.class_name for group in sampled)

        hardest = [group for group in sampled if level in (None, group.problem.level)]
        if not hardest:
            return
        if is_last:
            self.recent.append([sum(map(_is_solved, hardest)), len(hardest)])
            solved, count = map(sum, zip(*self.recent, strict=True))
            is_solved = len(self.recent) == SOLVED_STEPS and solved >= SOLVED_SHARE * count
            self.solved_steps = self.solved_steps + 1 if is_solved else 0

        trap = _trap_of(hardest)
        self.trapped = self.trapped + 1 if trap and trap == self.trap else int(bool(trap))
        self.trap = trap

    def stopped(self, level: int) -> str:
        """Return why training has failed, whose hardest open level is `level`; "" if it has not."""
        if 0 < TRAPPED * self.patience <= self.trapped:
            return f"for {self.trapped} steps {self.trap} at level {level}"
        count = self.classes.total()
        if not self._is_idle or self.classes["solved"] > MOSTLY_SOLVED * count:
            return ""

        ranked = ", ".join(f"{n / count:.0%} {name}" for name, n in self.classes.most_common())
        return (
            f"no group could be trained on for {self.untrained} steps, up to level {level} "
            f"({ranked})"
        )

    def ended(self, level: int) -> str:
        """Return why no step follows although steps are left; "" if one does."""
        if stopped := self.stopped(level):
            return stopped
        if self._is_idle and not self.solved:
            return f"every training group was solved for {self.untrained} steps"
        return self.solved or self.asked

    @property
    def _is_idle(self) -> bool:
        """Whether `patience` steps in a row trained on nothing."""
        return 0 < self.patience <= self.untrained

    def wants_check(self, level: int) -> bool:
        """Return whether a held-out evaluation may end the run now."""
        is_due = self.solved_steps > 0 and (self.solved_steps - 1) % CHECK_EVERY == 0
        return is_due and self.may_be_solved and not self.ended(level)

    def take_check(self, step: int, line: Mapping[str, Any]) -> list[Decision]:
        """Return the decision to end the run if an evaluation, `line`, confirms it."""
        if not solves_level(line) or line["mean"] < EXHAUSTED:
            return []
        self.solved = (
            f"at least {SOLVED_SHARE:.0%} of the groups of the last {SOLVED_STEPS} steps were "
            f"solved, and the held-out mean is {line['mean']:.3f} "
            f"[{line['ci_low']:.3f}, {line['ci_high']:.3f}]"
        )
        figures = {name: line[name] for name in ("mean", "ci_low", "ci_high", "n")}
        return [Decision(step, line["level"], line["level"], "solved", self.solved, figures)]


def _is_solved(group: Group) -> bool:
    """Return whether the whole answers of a group are solved; of a window they are expected."""
    expected = group.problem.expected
    return group.class_name == "solved" if expected is None else expected >= EXHAUSTED


def _trap_of(groups: Sequence[Group]) -> str:
    """Return in words the trap in which the groups of a level sit; "" if they sit in none."""
    classes = Counter(group.class_name for group in groups)
    if classes["varied"] > TRAP_VARIED * len(groups):
        return ""
    if trap := common_trap([score for group in groups for score in group.scores]):
        return f"most completions were in the trap {trap!r}"
    is_common = classes["identical"] >= COLLAPSED_SHARE * len(groups)
    return "most groups wrote one wrong text each" if is_common else ""


Failure = Literal["not learned", "collapsed", "got worse", "no signal"]
Kind = Failure | Literal["learned", "already solved", "too short to tell", "not measured"]
FAILED: tuple[Failure, ...] = get_args(Failure)
FALLEN: tuple[Failure, ...] = ("collapsed", "got worse")


@dataclass(frozen=True)
class Verdict:
    """Whether a run learned, and what its logs say of it."""

    kind: Kind
    level: int
    n: int  # problems that were scored both before and after
    before: float | None  # mean held-out scores on these problems
    after: float | None
    difference: float | None  # what reinforcement added: to `imitated`, or else to `before`
    low: float | None  # of its 95 % interval, wider if several levels are compared
    high: float | None
    steps: int
    updated: int  # steps that changed the weights
    untaught: float  # share of the sampled tokens in groups that taught nothing
    truncated: float  # share of the completions that reached the token budget
    stopped: str = ""  # why the run was stopped; "" if it was not
    imitated: float | None = None  # score after the warm start; None without one
    solved_step: int | None = None  # see `solved_step`
    mistake: str = ""  # the most common one of the last held-out evaluation, in words
    next_command: str = ""  # what to run next
    demonstrated: float = 0.0  # share of the groups trained on that showed the right answer
    windows: float = 0.0  # share of all groups whose prompt showed the beginning of the answer
    cause: str = ""  # why the run failed, in a sentence
    remedy: str = ""  # what to change
    trap: str = ""  # the one that the policy fell into
    degenerate: str = ""  # the most common class of the groups without gradient

    @property
    def tier(self) -> str:
        """What the policy learned from, so that results of a kind are compared."""
        if self.imitated is not None:
            return "right answers imitated first"
        return "right answers shown" if self.demonstrated or self.windows else "by reward alone"

    @property
    def exit_status(self) -> int:
        """0, or UNFINISHED if the run was stopped or has failed."""
        return UNFINISHED if self.stopped or self.kind in FAILED else 0

    def lines(self, metric: str, unit: str) -> list[str]:
        """Return the verdict for the console: the conclusion, its cause, what to change, figures.

        `metric` names the score, `unit` what a level counts.
        """
        lines = [f"{self.kind.upper()}: {self._comparison(metric, unit)}; {self.tier}"]
        lines += [line for line in (self.cause, self.remedy) if line]
        return lines + [f"{name}: {text}" for name, text in figures_in_words(vars(self)).items()]

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
        kind, step = values.pop("kind"), values.pop("steps")
        return {"step": step, "purpose": "verdict", "verdict": kind, "tier": self.tier, **values}

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> "Verdict":
        """Return the verdict in a line of eval.jsonl."""
        return msgspec.convert({"kind": line["verdict"], "steps": line["step"], **line}, cls)


class HeldOut(NamedTuple):
    """Scored answers to held-out problems: those of the untrained policy (`before`), of the trained
    one (`after`), and of the policy after the warm start (`imitated`; none without one).
    """

    before: Sequence[Group] = ()
    after: Sequence[Group] = ()
    imitated: Sequence[Group] = ()

    @property
    def begun(self) -> Sequence[Group]:
        """The answers when reinforcement began: what imitation taught does not count."""
        return self.imitated or self.before

    def at(self, level: int) -> "HeldOut":
        """Return the answers at one level."""
        return HeldOut(
            *([each for each in groups if each.problem.level == level] for groups in self)
        )

    def paired(self, name: str, *, trapped: bool = True) -> list[tuple[float, float, float]]:
        """Return the mean "value", "exact" or "reward" of each problem that was judged each time:
        before training, when reinforcement began, and after it. Unless `trapped` answers count,
        one whose trap is of a kind that ignores a part of the task is worth 0.
        """

        def worth(score: Score) -> float:
            return getattr(score, name) if trapped or not score.parts.get("trap_kind") else 0.0

        before, begun, after = (
            {group.problem.key: fmean(map(worth, group.judged)) for group in groups if group.judged}
            for groups in (self.before, self.begun, self.after)
        )
        keys = [key for key in before if key in begun and key in after]
        return [(before[key], begun[key], after[key]) for key in keys]

    @property
    def unjudged(self) -> float:
        """The share of the answers that the reward judged before, and does not judge any more; 0 if
        it may be chance.
        """
        before = {group.problem.key: group.judged_share for group in self.begun}
        lost = [
            before[key] - group.judged_share
            for group in self.after
            if (key := group.problem.key) in before
        ]
        share = fmean(lost) if lost else 0.0
        is_sure = share >= COLLAPSED_SHARE or (lost and mean_interval(lost, (-1.0, 1.0))[0] > 0)
        return share if is_sure else 0.0


def conclude(
    level: int,
    answers: HeldOut,
    metrics: Sequence[Mapping[str, Any]],
    evaluations: Sequence[Mapping[str, Any]],
    *,
    stopped: str = "",
) -> Verdict:
    """Return the verdict on a run that was asked for `level`, from its logs and `answers`.

    If the run learned nothing there, it is the verdict on the hardest level at which it learned, or
    that it trained on and at which the policy collapsed or got worse. `evaluations` are the lines
    of eval.jsonl.
    """
    was_solved = {level: False} | {
        line["level"]: solves_level(line)
        for line in evaluations
        if line["purpose"] == "report" and line["step"] == 0
    }
    verdicts = {
        each: reach_verdict(each, answers, metrics, was_solved[each], stopped, len(was_solved))
        for each in sorted(was_solved, reverse=True)
    }
    chosen = verdicts[level]
    trained = {name for line in metrics for name in line.get("levels", {})}
    if chosen.kind != "learned":
        decisive = (
            each
            for each in (chosen, *verdicts.values())
            if each.kind == "learned" or (each.kind in FALLEN and str(each.level) in trained)
        )
        chosen = next(decisive, chosen)

    at_level = answers.at(chosen.level)
    return replace(
        chosen,
        solved_step=solved_step(evaluations, chosen.level),
        mistake=most_common_mistake(at_level.after or at_level.before),
    )


def reach_verdict(
    level: int,
    answers: HeldOut,
    metrics: Sequence[Mapping[str, Any]],
    was_solved: bool = False,
    stopped: str = "",
    chances: int = 1,
) -> Verdict:
    """Return the verdict on a run at one level.

    `metrics` are the lines of metrics.jsonl; `was_solved` is whether the untrained policy passed
    the validation check. A policy that is called "learned" if it learned at any of several levels
    has as many `chances` of being called so by mistake. So the interval misses as many times more
    rarely (Bonferroni's correction), and the probability of a mistake stays at TAIL.
    """
    answers = answers.at(level)
    values, exact = answers.paired("value"), answers.paired("exact")
    before, begun, after = map(fmean, zip(*values)) if values else (None, None, None)
    low, high = _gain(values, chances)
    figures = figures_of(metrics)
    collapse, trap = _collapse(level, answers, metrics)
    no_signal = "" if was_solved else _no_signal(metrics, figures)
    # A mean of the problems that are left may rise because the wrong answers are left out.
    unjudged = answers.unjudged
    is_unjudged = unjudged > MARGIN

    # Problems lost since reinforcement began; one may be chance.
    lost = sum(then - now for _, then, now in values)
    decline = ""
    if high < 0:
        decline = "the held-out score fell by more than chance explains"
    elif was_solved and lost > 1 and after is not None and after < SOLVED - MARGIN:
        decline = "the level was solved before training, and is not any more"
    elif _gain(exact, chances)[1] < 0:
        _, then, now = map(fmean, zip(*exact))
        decline = f"exact answers fell from {then:.3f} to {now:.3f}, which the score does not show"

    less = ""
    if low > 0:
        earned = answers.paired("reward")
        _, then, now = map(fmean, zip(*earned))
        # A range may be unknown, so a fall is measured by the largest change.
        if then - now > MARGIN * max(abs(last - first) for _, first, last in earned):
            less = f"the mean reward fell from {then:.4g} to {now:.4g}, although the score rose"
        elif _gain(answers.paired("value", trapped=False), chances)[0] <= 0:
            less = "the score rose by answers that ignore a part of the task"

    rows: list[tuple[Kind, Any, str]] = [  # the first that holds, and its cause
        ("no signal", no_signal and not figures["updated"], no_signal),
        ("collapsed", collapse, collapse),
        ("got worse", decline, decline),
        ("not measured", not values and not is_unjudged, ""),
        ("learned", low > 0 and figures["updated"] and not (trap or less or is_unjudged), ""),
        ("already solved", was_solved, ""),
        ("no signal", no_signal, no_signal),
        ("too short to tell", len(metrics) < MIN_STEPS and not stopped, less),
        ("not learned", True, less),
    ]
    kind, _, *causes = next(row for row in rows if row[1])
    if is_unjudged:
        causes.append(f"the reward no longer judges {unjudged:.0%} of the held-out problems")
    endless = truncated_share(answers.after) if answers.after else 0.0
    if endless >= COLLAPSED_SHARE:
        causes.append(
            f"{endless:.0%} of the held-out completions did not end within their token budget"
        )

    return Verdict(
        kind,
        level=level,
        n=len(values),
        **figures,
        stopped=stopped,
        imitated=begun if answers.imitated else None,
        before=before,
        after=after,
        difference=fmean(now - then for _, then, now in values) if values else None,
        low=low if values else None,
        high=high if values else None,
        cause="; ".join(filter(None, causes)),
        trap=trap,
    )


def _gain(paired: Sequence[tuple[float, float, float]], chances: int) -> tuple[float, float]:
    """Return the interval of what reinforcement added; without problems it may be anything."""
    gains = [now - then for _, then, now in paired]
    return mean_interval(gains, (-1.0, 1.0), TAIL / chances) if gains else (-1.0, 1.0)


def _collapse(
    level: int, answers: HeldOut, metrics: Sequence[Mapping[str, Any]]
) -> tuple[str, str]:
    """Return how the trained policy collapsed, in words, and its trap; "" for what does not apply.

    A trap that it was in before, at a level that was not trained, is no collapse. Most
    evaluations have one completion of each problem, so whether the completions of a group are the
    same wrong text is asked of the last steps of training.
    """
    scores, old = (
        [score for group in groups for score in group.judged]
        for groups in (answers.after, answers.begun)
    )
    is_enough = len(scores) >= MIN_COMPLETIONS

    if trap := common_trap(scores):
        labels = ((each.parts.get("trap"), each.parts.get("trap_kind")) for each in (*scores, *old))
        names = sorted({name for name, kind in labels if name and trap in (name, kind)})
        shares = [sum(line.get(f"traps/{name}") or 0.0 for name in names) for line in metrics]
        since = _since(metrics, shares)
        share, old_share = (
            fmean([score.parts.get("trap") in names for score in each] or [0.0])
            for each in (scores, old)
        )
        if not since and old_share >= COLLAPSED_SHARE:
            return "", trap
        if is_enough or since:
            return f"{share:.0%} of the held-out completions are in the trap {trap!r}{since}", trap

    texts, old_texts = _wrong_texts(answers.after), _wrong_texts(answers.begun)
    text, most = next(iter(texts.most_common(1)), ("", 0))
    if is_enough and most >= COLLAPSED_SHARE * len(scores):
        share = most / len(scores)
        if old and old_texts[text] / len(old) >= share:
            return "", "one wrong text"  # what it came from
        return f"{share:.0%} of the held-out completions are the same wrong text", ""

    # Right answers may be identical too, where the highest reward is not known.
    by_step = [line.get("levels", {}).get(str(level)) for line in metrics]
    shares = [step["class"].get("identical", 0) / step["groups"] if step else 0 for step in by_step]
    last = fmean(shares[-LAST_STEPS:]) if len(shares) >= LAST_STEPS else 0.0
    if last >= COLLAPSED_SHARE and texts.total() >= COLLAPSED_SHARE * len(scores) > 0:
        since = _since(metrics, shares)
        return f"{last:.0%} of the last training groups wrote one wrong text each{since}", ""
    return "", ""


def _wrong_texts(groups: Sequence[Group]) -> Counter[str]:
    return Counter(
        " ".join(text.split())
        for group in groups
        for text, score in zip(group.texts, group.scores)
        if not (score.exact or score.abstained)
    )


def _since(metrics: Sequence[Mapping[str, Any]], shares: Sequence[float]) -> str:
    """Return in words from which step on the shares stayed at COLLAPSED_SHARE or above; "" if the
    last one is below.
    """
    lasting = list(takewhile(lambda share: share >= COLLAPSED_SHARE, reversed(shares)))
    if not lasting:
        return ""
    first = len(metrics) - len(lasting)
    return f", since step {metrics[first]['step']}" if first else ", from the first step on"


def _no_signal(metrics: Sequence[Mapping[str, Any]], figures: Mapping[str, Any]) -> str:
    """Return in words why no step, or almost none, updated the weights; "" if enough did."""
    steps, updated, name = (figures[key] for key in ("steps", "updated", "degenerate"))
    if updated >= RARE * steps:
        return ""
    if not name:
        return "no group was trained on"
    share = _total(metrics, f"groups/class/{name}") / max(1, _total(metrics, "groups/count"))
    return f"{share:.0%} of the groups were {name} ({WHY[name]})"


def _total(metrics: Sequence[Mapping[str, Any]], name: str) -> int:
    """Return the sum of a metric over all steps; a line may lack it."""
    return sum(line.get(name) or 0 for line in metrics)


def figures_of(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of a verdict that come from the lines of metrics.jsonl."""
    last = metrics[-1] if metrics else {}
    kept, demonstrated = (_total(metrics, f"groups/{name}") for name in ("kept", "demonstrated"))
    classes = {name: _total(metrics, f"groups/class/{name}") for name in WHY}
    most_common = max(classes, key=classes.__getitem__)

    # Weighted by groups, because dynamic sampling takes more or fewer in a step.
    truncated = [line.get("completions/clipped_ratio") or 0 for line in metrics]
    groups = [line.get("groups/count") or 1 for line in metrics]
    # `on_degenerate: keep` wastes no tokens, although these groups teach nothing either.
    wasted = last.get("wasted_tokens_total", 0) / (last.get("num_tokens") or 1)
    # Groups that vary may be shown the right answer, too.
    idle = max(0.0, sum(classes.values()) - demonstrated) / max(1, sum(groups))
    return {
        "steps": len(metrics),
        # Under `on_degenerate: keep` groups without a gradient are in the loss.
        "updated": sum("loss" in line and line.get("grad_norm") != 0 for line in metrics),
        "untaught": wasted or idle,
        "truncated": fmean(truncated, groups) if truncated else 0.0,
        "demonstrated": demonstrated / kept if kept else 0.0,
        "windows": _total(metrics, "groups/windows") / sum(groups) if groups else 0.0,
        "degenerate": most_common if classes[most_common] else "",
    }


def figures_in_words(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the figures of a verdict as console and report show them; `values` is its record, or
    what `figures_of` a run in progress are.
    """
    shares = {
        "sampled tokens that taught nothing": values["untaught"],
        "completions truncated": values["truncated"],
        "groups trained on that showed the right answer": values["demonstrated"] or None,
        "groups that began within the right answer": values["windows"] or None,
    }
    solved = values.get("solved_step")
    found = {
        "steps that updated the weights": f"{values['updated']} of {values['steps']}",
        **{name: f"{share:.0%}" for name, share in shares.items() if share is not None},
        "solved for good": "" if solved is None else f"step {solved}",
        "most common mistake": values.get("mistake", ""),
    }
    return {name: text for name, text in found.items() if text}


def most_common_mistake(groups: Sequence[Group]) -> str:
    """Return the most common mistake, e.g. "empty (31 of 44 wrong answers)"; "" without one."""
    mistakes = Counter(
        mistake_of(group, number)
        for group in groups
        for number, score in enumerate(group.scores)
        if not (score.exact or score.abstained)
    )
    wrong = mistakes.total()
    for name, count in mistakes.most_common(1):
        return f"{name} ({count} of {wrong} wrong answer{'s' * (wrong != 1)})"
    return ""


def mistake_of(group: Group, number: int) -> str:
    """Return what is wrong with completion `number` of a group; the first cause that applies.

    A task names mistakes by the labels `trap` and `reason` in the parts of a score. Others are read
    from the text.
    """
    completion, parts = group.completions[number], group.scores[number].parts
    for label in (parts.get("trap"), parts.get("reason")):
        if isinstance(label, str) and label:
            return label

    written, wanted = completion.text.split(), group.problem.target.split()
    rows = [
        ("nothing is written", not written),
        ("truncated at the token budget", completion.is_truncated),
        ("the text repeats itself", len(written) >= 8 and 2 * len(set(written)) <= len(written)),
        ("a wrong answer", len(wanted) <= 1),
        ("words are missing", len(written) < len(wanted)),
        ("words are added", len(written) > len(wanted)),
        ("a wrong word", True),
    ]
    return next(mistake for mistake, holds in rows if holds)
