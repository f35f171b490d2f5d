"""Which level a run trains on, where it starts, and how it gets from no reward to some.

    Ladder         levels climbed one after the other, with replay and steps back
    survey         what the policy can do at each level before training
    choose_start   the pre-flight: where the run starts, chosen by the survey
    demonstrate    the right answer shown in groups where no completion is right
    warm_start     a short imitation of right answers, for a policy that earns nothing

A level is a difficulty of the task's problems; for interleave it is the words of each text.
docs/curriculum.md describes the rules for users.
"""

import hashlib
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import takewhile
from statistics import fmean
from typing import Any

from data.errors import UserError
from grpo.config import Config
from grpo.distributed import SINGLE, Ranks
from grpo.ending import CHECK_EVERY, EXHAUSTED
from grpo.evaluate import (
    TOO_MANY_TRUNCATED,
    EvaluationSettings,
    Sampling,
    evaluate,
    score_groups,
    select,
    turns_of,
)
from grpo.learn.optimizer import Optimizer
from grpo.learn.update import UpdateMemory, imitate
from grpo.model.policy import Policy
from grpo.records import Completion, Decision, Group, Resumable, StepSummary, truncated_share
from grpo.statistics import MARGIN, mean_interval, problems_needed, reaches_mark
from grpo.stream import ProblemStream
from grpo.variance import common_trap, group_class
from tasks.base import Problem, Task, compares, levels_of
from tasks.scoring import range_of, scores_of
from tasks.supply import LADDER, Supply, patience

# --- the ladder -----------------------------------------------------------------------------------

# The running mean is taken over the groups of the last WINDOW steps, or of more steps if these have
# too few groups for its interval.
WINDOW = 3

# The share of the prompts that come from earlier levels.
REPLAY = 0.25

# With these two, a level on which every group collapses is left after 8 steps, and tried again ever
# more rarely: 7 moves in 200 steps, with replay or without. Before the evidence doubled, there were
# 36 moves without replay, and with replay none at all (runs/archive/LOG.md, 2026-11-23:
# "Intervals near 1, promotion, step back").
COLLAPSE_AT = 0.9
COLLAPSE_STEPS = 8


class Ladder(Resumable):
    """Chooses the level of every prompt: it climbs `levels`, which rise. One level is fixed.

    Promotion: the next level is reached at a mean score of `promote_at`, if the mean's 95 %
    interval begins no more than MARGIN below. With `promote_by` "running" that is the running mean
    over groups, whose completions share their problem and count once. With "heldout" it is the mean
    of an evaluation on held-out problems, made every CHECK_EVERY steps while the running mean is
    within MARGIN of the mark; a level with too few of them is left by the running mean.

    Step back: if COLLAPSE_AT of the current level's groups collapse for COLLAPSE_STEPS steps in a
    row, training goes back one level, unless that is solved. Each time doubles the evidence: twice
    as many collapsed steps before the next step back, and as many steps of practice below before
    the level is tried again, or until the one below is solved.

    Every method depends on nothing but its arguments and the state, so a resumed run makes the same
    decisions.
    """

    STATE = (
        *("levels", "position", "recent", "scores", "collapsed", "stayed"),
        *("steps_back", "steps_before_last", "by_training"),
    )

    def __init__(self, levels: Sequence[int], promote_by: str, promote_at: float):
        assert levels and promote_by in ("running", "heldout")
        self.levels = list(levels)
        self.promote_by = promote_by
        self.promote_at = promote_at
        # Twice what a perfect policy needs, so that a good one passes with a few wrong answers.
        self.least_groups = 2 * problems_needed(promote_at)

        self.position = 0  # of the current level in `levels`
        self.scores: dict[int, float] = {}  # level -> its last mean score
        self.steps_back = [0] * len(self.levels)  # from each level, those to a solved one included
        self.by_training: set[int] = set()  # levels with too few held-out problems for a check
        # The steps made before the last level was reached for the first time; None until then.
        self.steps_before_last = None if len(self.levels) > 1 else 0

        # Of the current stay on the current level.
        self.recent: deque[list[float]] = deque()  # mean scores of the groups of the last steps
        self.collapsed = 0  # collapsed steps in a row
        self.stayed = 0  # steps since the last move

    @property
    def level(self) -> int:
        """The level that training is at."""
        return self.levels[self.position]

    @property
    def is_last(self) -> bool:
        """Whether training is at the last level."""
        return self.position + 1 == len(self.levels)

    @property
    def levels_to_check(self) -> list[int]:
        """The levels that are left by a validation check."""
        if self.promote_by == "running":
            return []
        return [level for level in self.levels[:-1] if level not in self.by_training]

    def note_problems(self, level: int, found: int) -> str:
        """Take note of the number of held-out problems of a level; return a warning if they are too
        few to promote by, else "".
        """
        if found >= (needed := problems_needed(self.promote_at)):
            return ""
        self.by_training.add(level)
        return (
            f"level {level} has {found} held-out problems, and promotion at {self.promote_at:g} "
            f"needs at least {needed}: the running mean of its training scores decides instead"
        )

    def levels_for(self, seed: int, step: int, count: int, drawn: int = 0) -> list[int]:
        """Return the levels of `count` prompts of a step, after its first `drawn` prompts.

        The first of them is at the current level.
        """
        later = f"/{drawn}" if drawn else ""
        digest = hashlib.sha256(f"levels/{seed}/{step}{later}".encode()).digest()
        rng = random.Random(digest)

        earlier = self.levels[: self.position]
        # 1.1, so that a level is replayed now and then even if its score is 1.
        weights = [1.1 - self.scores.get(level, 0.0) for level in earlier]
        replayed = [bool(earlier) and i > 0 and rng.random() < REPLAY for i in range(count)]
        return [rng.choices(earlier, weights)[0] if again else self.level for again in replayed]

    def observe(self, summary: StepSummary) -> list[Decision]:
        """Take note of a training step; return one decision, or none."""
        self.scores |= {level: fmean(values) for level, values in summary.values.items()}
        self._remember(summary.values.get(self.level, []))
        self.stayed += 1

        groups = summary.collapsed.get(self.level)  # without replayed ones
        share = fmean(groups) if groups else 0.0
        self.collapsed = self.collapsed + 1 if share >= COLLAPSE_AT else 0
        if self.position > 0 and self.collapsed >= self._patience(self.position):
            return [self._step_back(summary.step, share)]

        return self._promote(summary.step)

    def _remember(self, values: list[float]) -> None:
        """Add a step's groups to the window, and drop the oldest steps that it does not need."""
        if values:
            self.recent.append(list(values))
        while (
            len(self.recent) > WINDOW
            and sum(map(len, self.recent)) - len(self.recent[0]) >= self.least_groups
        ):
            self.recent.popleft()

    def _patience(self, position: int) -> int:
        """Return how many steps are evidence about a level; each step back from it doubles them."""
        return COLLAPSE_STEPS * 2 ** self.steps_back[position]

    def _step_back(self, step: int, share: float) -> Decision:
        """Go back a level, or stay if the level below has nothing left to teach."""
        figures = {"steps": self.collapsed, "share": share}
        self.steps_back[self.position] += 1
        why = (
            f"at least {COLLAPSE_AT:.0%} of the level's groups collapsed in {self.collapsed} "
            "steps in a row"
        )
        below = self.position - 1
        if not self._is_exhausted(below):
            return self._move(-1, step, "collapse", why, **figures)

        self.collapsed = 0
        why += f"; level {self.levels[below]} is solved, so going back would teach nothing"
        return Decision(step, self.level, self.level, "collapse", why, figures)

    def _is_exhausted(self, position: int) -> bool:
        """Return whether a level's last mean score leaves nothing to learn."""
        return self.scores.get(self.levels[position], 0.0) >= EXHAUSTED

    def _may_climb(self) -> bool:
        """Return whether the next level may be tried: it is new, or was practised for below as long
        as that taught anything.
        """
        if self.is_last:
            return False
        following = self.position + 1
        is_practised = self.stayed >= self._patience(following)
        is_practised = is_practised or self._is_exhausted(self.position)
        return self.steps_back[following] == 0 or is_practised

    def move_on(self, step: int, why: str) -> list[Decision]:
        """Leave a level that teaches nothing any more, unless it is the last."""
        return [] if self.is_last else [self._move(+1, step, "promotion", why)]

    def _promote(self, step: int) -> list[Decision]:
        """Return the promotion by the running mean, if that reaches the mark."""
        values = [value for groups in self.recent for value in groups]
        is_enough = len(self.recent) >= WINDOW and len(values) >= self.least_groups
        if self.level in self.levels_to_check or not is_enough or not self._may_climb():
            return []

        mean = fmean(values)
        if mean < self.promote_at:  # saves the interval, which takes 10 ms
            return []

        low, high = mean_interval(values)
        if not reaches_mark(mean, low, self.promote_at):
            return []

        steps, groups = len(self.recent), len(values)
        why = f"running mean {mean:.3f} [{low:.3f}, {high:.3f}] of {groups} groups in {steps} steps"
        figures = dict(mean=mean, ci_low=low, ci_high=high, groups=groups, steps=steps)
        return [self._move(+1, step, "promotion", why, **figures)]

    def wants_validation(self, step: int) -> bool:
        """Return whether a validation check of the current level is due after `step`, and has a
        chance.
        """
        is_due = self.level in self.levels_to_check and step % CHECK_EVERY == 0
        if not is_due or not self.recent or not self._may_climb():
            return False

        # Only the last steps: a longer window lags further behind a policy that learns.
        last = [value for groups in list(self.recent)[-WINDOW:] for value in groups]
        return fmean(last) >= self.promote_at - MARGIN

    def observe_validation(self, step: int, line: Mapping[str, Any]) -> list[Decision]:
        """Take note of a validation check of the current level, a line of eval.jsonl.

        Returns the decision: to climb or to stay.
        """
        mark = self.promote_at
        figures = {name: line[name] for name in ("mean", "ci_low", "ci_high", "n")}
        self.scores[self.level] = line["mean"]
        result = (
            f"held-out mean {line['mean']:.3f} [{line['ci_low']:.3f}, {line['ci_high']:.3f}] of "
            f"{line['n']} problems"
        )
        if reaches_mark(line["mean"], line["ci_low"], mark):
            return [self._move(+1, step, "promotion", result, **figures)]

        why = (
            f"{result}; promotion needs a mean of at least {mark:g} and an interval that begins at "
            f"{mark - MARGIN:g} or above"
        )
        return [Decision(step, self.level, self.level, "stay", why, figures)]

    def _move(self, by: int, step: int, kind: str, why: str, **figures: float) -> Decision:
        before = self.level
        self.position += by
        if self.is_last and self.steps_before_last is None:
            self.steps_before_last = step
        self.recent.clear()
        self.collapsed = 0
        self.stayed = 0
        return Decision(step, before, self.level, kind, why, figures)


# --- the pre-flight: a survey, and the choice of the level where the run starts -------------------

SURVEY_SEED = 3_000_003  # of the problems and the samples, whatever the seed of the run
SURVEY_PROBLEMS = 4  # of each level; with 16 completions each, enough to see whether groups vary
SURVEY_LEVELS = (1, 2, 3, 5, *LADDER)  # for a task that does not name its own

# A level is within reach if at least half of its groups vary and at least one in four has a right
# answer. It is left out if nearly all answers are right: a ladder would leave it in a few steps.
VARIED = 0.5
ANY_EXACT = 0.25
NEARLY_SOLVED = 0.9

NO_LEVEL = f"at no level do {VARIED:.0%} of the groups vary and {ANY_EXACT:.0%} hold a right answer"


@dataclass(frozen=True)
class LevelSurvey:
    """The results of one level, e.g. ``LevelSurvey(10, 4, 0.46, 0.19, 0.2, 1.0, 0.5, ...)``.

    `value` (score), `reward`, `exact` (right answers) and `truncated` are means over all
    completions.
    """

    level: int
    groups: int
    value: float
    reward: float
    reward_std: float  # mean standard deviation within a group, with divisor n
    varied: float  # share of the groups that vary
    any_exact: float  # share of the groups that have a right answer (pass@G)
    exact: float
    truncated: float
    distinct: float  # mean number of different texts in a group
    tokens: int
    seconds: float  # levels that were sampled together divide their seconds by tokens

    @property
    def is_solved(self) -> bool:
        """Whether nearly all answers are right."""
        return self.exact >= NEARLY_SOLVED

    @property
    def is_within_reach(self) -> bool:
        """Whether training can begin at this level."""
        return self.varied >= VARIED and self.any_exact >= ANY_EXACT

    @property
    def finding(self) -> str:
        """The deciding figures, in words."""
        if self.is_solved:
            return f"{self.exact:.0%} of its answers are right"
        return f"{self.varied:.0%} of its groups vary and {self.any_exact:.0%} hold a right answer"


def levels_to_survey(supply: Supply, training_levels: Sequence[int]) -> list[int]:
    """Return the `training_levels` and the levels that are easier than the last of them, rising.

    The easier levels are those of the dataset, or those that the task names, or SURVEY_LEVELS.
    """
    last = training_levels[-1]
    offered = supply.levels or levels_of(supply.task, last) or SURVEY_LEVELS
    return sorted({level for level in offered if level < last} | set(training_levels))


def survey(
    policy: Policy,
    supply: Supply,
    config: Config,
    training_levels: Sequence[int],
    ranks: Ranks = SINGLE,
) -> tuple[list[LevelSurvey], list[Group]]:
    """Sample a few problems of each level; return a row for each level, and all groups.

    They are sampled exactly as the run will sample them. Their seed is the same in every run, so
    tables can be compared. They do not count as seen, because nothing is learned from them.

    Beyond the first of the `training_levels` the survey ends at a level without a right answer,
    because harder ones would take longest and show nothing.
    """
    # The easier levels are one batch, which takes as many forward passes as the longest of them.
    levels = levels_to_survey(supply, training_levels)
    first = training_levels[0]
    batches = [[level for level in levels if level <= first]]
    batches += [[level] for level in levels if level > first]

    task, sampling = supply.task, Sampling.of(config)
    settings = EvaluationSettings(sampling, SURVEY_SEED, config.group_size, draft=config.draft)
    rows: list[LevelSurvey] = []
    groups: list[Group] = []
    for batch in batches:
        start = time.perf_counter()

        problems: dict[int, list[Problem]] = {}
        for level in batch:
            try:
                problems[level] = survey_problems(policy, supply, level, sampling)
            except Exception:
                # The task is user code, and need not have easier levels that nobody asked for.
                if level in training_levels:
                    raise

        share = ranks.share([problem for found in problems.values() for problem in found])
        sampled = ranks.gather(evaluate(policy, task, share, settings))
        for index, group in enumerate(sampled, start=len(groups)):
            group.index = index
            group.class_name = group_class(group, config, range_of(task))
            group.action = "skip"  # nothing is learned from it
        groups += sampled

        tokens = sum(group.tokens for group in sampled)
        seconds_per_token = (time.perf_counter() - start) / max(1, tokens)
        for level in problems:
            members = [group for group in sampled if group.problem.level == level]
            rows += [summarise_level(level, members, seconds_per_token)] if members else []
        if not rows or not rows[-1].any_exact:
            break
    return rows, groups


def survey_problems(
    policy: Policy, supply: Supply, level: int, sampling: Sampling
) -> list[Problem]:
    """Return SURVEY_PROBLEMS distinct problems of a level, or as many as there are."""
    family = supply.family_size(level)
    found = select(
        policy,
        supply.sample(level, SURVEY_SEED),
        SURVEY_PROBLEMS,
        frozenset(),
        sampling,
        fruitless=patience(SURVEY_PROBLEMS, family),
        family=family,
    )
    return found.problems


def summarise_level(
    level: int, groups: Sequence[Group], seconds_per_token: float = 0.0
) -> LevelSurvey:
    """Return the row of a level's scored and classified groups."""
    scores = [score for group in groups for score in group.scores]
    tokens = sum(group.tokens for group in groups)
    return LevelSurvey(
        level=level,
        groups=len(groups),
        value=fmean(score.value for score in scores),
        reward=fmean(score.reward for score in scores),
        reward_std=fmean(group.reward_std for group in groups),
        varied=fmean(group.class_name == "varied" for group in groups),
        any_exact=fmean(any(score.exact for score in group.scores) for group in groups),
        exact=fmean(score.exact for score in scores),
        truncated=truncated_share(groups),
        distinct=fmean(len(set(group.texts)) for group in groups),
        tokens=tokens,
        seconds=seconds_per_token * tokens,
    )


@dataclass(frozen=True)
class Start:
    """Where a run starts, e.g. ``Start([2, 3, 5, 10], 2, "75% of its groups vary ...")``.

    `levels` are the levels of training. `level` is the first of them, or None if no level is within
    reach; then `levels` are those that were asked for. `why` is a sentence.
    """

    levels: list[int]
    level: int | None
    why: str


def choose_start(
    surveys: Sequence[LevelSurvey], levels: Sequence[int], *, mixed: bool = False
) -> Start:
    """Return where a run that was asked to train on `levels` starts.

    GRPO learns from the differences within a group. So the run starts where groups vary *and* a
    right answer is within reach: at two words SmolLM2 was rewarded for "the first word, then stop",
    its groups varied, and it learned that.

    1. Of the first levels that are solved, all are left out if the next one is within reach;
       otherwise all but the last.
    2. A first level within reach is kept: a ladder leaves easy levels after a few cheap steps.
    3. Otherwise the run starts at the hardest easier level within reach, and climbs by way of the
       surveyed levels between.
    4. If there is none, the levels stay as they are, as they do on all levels of a dataset as they
       come (`mixed`).
    """
    levels = list(levels)
    found = {row.level: row for row in surveys}
    if mixed:
        reachable = [row.level for row in surveys if row.is_within_reach]
        if not reachable:
            return Start(levels, None, NO_LEVEL)
        listed = ", ".join(map(str, reachable))
        why = f"all levels of the dataset are trained on as they come; within reach: {listed}"
        return Start(levels, levels[0], why)

    solved = len(list(takewhile(lambda level: level in found and found[level].is_solved, levels)))
    if solved:
        return _past_the_solved(levels, found, solved)

    first = found.get(levels[0])
    if first and first.is_within_reach:
        return Start(levels, levels[0], first.finding)

    easier = [row for row in surveys if row.level < levels[0]]
    within_reach = [row for row in easier if row.is_within_reach]
    if not within_reach:
        return Start(levels, None, NO_LEVEL)

    hardest = max(within_reach, key=lambda row: row.level)
    between = [row.level for row in easier if row.level >= hardest.level]
    why = f"{hardest.finding}; level {levels[0]} is out of reach"
    if first:
        why += f" ({first.varied:.0%} and {first.any_exact:.0%})"
    return Start(between + levels, hardest.level, why)


def _past_the_solved(levels: list[int], found: dict[int, LevelSurvey], solved: int) -> Start:
    """Return the start of a ladder whose first `solved` levels are solved."""
    following = found.get(levels[solved]) if solved < len(levels) else None
    skipped = solved if following and following.is_within_reach else solved - 1
    start = levels[skipped]

    why = found[start].finding
    if skipped:
        why += f"; the easier ones are solved ({', '.join(map(str, levels[:skipped]))})"
    return Start(levels[skipped:], start, why)


def advice(surveys: Sequence[LevelSurvey]) -> str:
    """Return what the user can do if no level is within reach."""
    text = "give a --model that solves some of these problems, or an easier task"
    truncated = max((row.truncated for row in surveys), default=0.0)
    if truncated > TOO_MANY_TRUNCATED:
        text += (
            f"; up to {truncated:.0%} of a level's completions were truncated: if they need more "
            "room than the target takes, give a larger --max-new-tokens"
        )
    return text


# --- right answers, shown or imitated -------------------------------------------------------------

# Right answers in an update of the warm start. SmolLM2-135M then needs 18 to 22 updates, or 12
# seconds, for 10 words (runs/archive/LOG.md, 2026-11-23: "10 words by one command").
ANSWERS = 32

# Updates between two held-out scores. The score rises by 0.03 an update, and a score every five
# updates overshot its mark (runs/archive/LOG.md, 2026-11-23: "what it does from nothing").
VALIDATE_EVERY = 2

# The held-out score that ends the imitation. No answer is right by then (exact 0.00), but rewards
# vary: reinforcement goes on from 0.40 to 0.99, and needs no further right answers. Imitation alone
# ends at 0.964 (runs/archive/LOG.md, 2026-11-23: "10 words by one command").
ENOUGH = 0.4

# The most that imitation may take, as a share of the tokens that the run will learn from. The 18 to
# 22 updates above are 0.3 % of such a run, so this is a bound for models that imitate slowly.
MAX_SHARE = 0.05


def has_right_targets(stream: ProblemStream, level: int) -> bool:
    """Return whether the next problem has a target, and it is scored as right.

    A task with continuous rewards may have targets that are no better than other texts, and rows of
    the user's own have none. One that compares completions does not say what a target alone earns.
    """
    _, problem = stream.at(stream.next_index, level)
    if not problem.target.strip() or compares(stream.task):
        return False
    turns = turns_of(stream.task, stream.policy.opened(problem), [problem.target])
    (score,) = scores_of(stream.task, problem, turns)
    return score.exact


def no_answers(setting: str, task: str, remedy: str) -> UserError:
    """Return the error of a `setting` that needs right answers, for a task whose targets are not.

    The `remedy` says what is done with them, and what to do instead.
    """
    return UserError(
        f"{setting}: task {task} does not score the target of its problems as right, so there is "
        f"nothing to {remedy}"
    )


def demonstration(policy: Policy, problem: Problem) -> Completion:
    """Return the right answer of a problem as a completion."""
    tokens = (*policy.target_tokens(problem.target), policy.end)
    zeros = (0.0,) * len(tokens)
    return Completion(tokens, zeros, policy.decode(tokens), "stop", is_demonstration=True)


def demonstrate(
    policy: Policy, task: Task, groups: Sequence[Group], ranks: Ranks = SINGLE
) -> list[Group]:
    """Return a copy of each group without a right completion that shows the right answer.

    The right answer replaces the last completion (LUFFY, arXiv:2504.14945), because a policy that
    is sure of a mistake never samples it. The paper's loss shapes the policy's probability p as
    p / (p + 0.1), whose slope vanishes with p, and such a policy gives the right token 1e-5 or less
    (runs/archive/LOG.md, 2026-11-27). So here the ratio uses the trainer's own log-probabilities:
    the gradient of a token is its advantage times the one of log p.

    The group's action becomes "demonstrate"; the copy is learned from. A group that will be sampled
    again is left alone, and so is one whose problem has no target, or one that is not scored as
    right, or earns no more than the best completion.
    """
    stuck = [
        group
        for group in groups
        if group.action != "resample"
        and group.problem.target.strip()
        and not any(score.exact for score in group.scores)
    ]
    answers = [
        replace(group, completions=[demonstration(policy, group.problem)], scores=[])
        for group in ranks.share(stuck)
    ]
    score_groups(task, answers)

    shown = []
    for group, answer in zip(stuck, ranks.gather(answers), strict=True):
        (earned,) = answer.scores
        if not earned.exact or earned.reward <= max(group.rewards):
            continue
        scores = [*group.scores[:-1], earned]
        copy = replace(
            group,
            completions=[*group.completions[:-1], *answer.completions],
            scores=scores,
            attempt=group.attempt + 1,
            class_name="varied",
            trap=common_trap(scores),
            action="keep",
            advantages=[],
        )
        shown.append(copy)
        group.action = "demonstrate"
    return shown


def draw_answers(stream: ProblemStream, level: int, size: int) -> list[Group]:
    """Return the right answers of the next `size` problems, which then count as seen.

    Each is a group of one completion, with advantage 1.
    """
    policy = stream.policy
    groups: list[Group] = []
    while len(groups) < size:
        index, problem = stream.at(stream.next_index, level)
        stream.mark_seen([(index, problem)])
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
        groups.append(group)
    score_groups(stream.task, groups)
    return groups


@dataclass
class WarmStart:
    """The result of an imitation.

    E.g. ``WarmStart(20, 640, 19_200, [2.9, ...], [[0, 0.02], [2, 0.1], ...], "held-out ...")``.
    """

    updates: int = 0
    answers: int = 0
    tokens: int = 0
    losses: list[float] = field(default_factory=list)  # of each update, nats per token
    # Pairs of (updates made, held-out score), beginning before the first update.
    validation_scores: list[list[float]] = field(default_factory=list)
    why: str = ""  # a sentence

    @property
    def score(self) -> float:
        """The last held-out score."""
        return self.validation_scores[-1][1]

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        return asdict(self)


def most_updates(steps: int, completions: int) -> int:
    """Return the most updates before a run of `steps` with `completions` completions each.

    That is a share MAX_SHARE of the run, counting answers like completions, which are about as
    long. It is never less than the updates before the first validation.
    """
    return max(VALIDATE_EVERY, int(MAX_SHARE * steps * completions / ANSWERS))


def warm_start(
    stream: ProblemStream,
    level: int,
    optimizer: Optimizer,
    validate: Callable[[], float],
    *,
    limit: int,
    memory: UpdateMemory,
    max_grad_norm: float,
) -> tuple[WarmStart, list[Group]]:
    """Imitate right answers of `level` until the held-out score is ENOUGH, or for `limit` updates.

    It is for a policy with no level within reach. `validate` returns the policy's held-out score.
    Returns the result, which is recorded apart from what reinforcement adds, and the answers.
    """
    result = WarmStart(validation_scores=[[0, validate()]])
    learned: list[Group] = []

    while result.score < ENOUGH and result.updates < limit:
        groups = draw_answers(stream, level, ANSWERS)
        learned += groups
        figures = imitate(stream.policy, optimizer, groups, memory, max_grad_norm)

        result.losses.append(figures["loss"])
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
