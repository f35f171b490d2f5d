"""What a run trains on: which prompt, which levels, and how it gets from no reward to some.

    survey_prompts  the pre-flight's first table: what the policy earns by each of a few prompts
    survey          the second: what it does at each level, before training
    choose_levels   the levels of training, chosen by the survey
    Curriculum      draws the level of every prompt where groups vary, and opens harder levels
    warm_start      a short imitation of right answers, for a policy far from the task
    demonstrate     the right answer shown in groups where no completion is right

The last two show right answers; `--reward-alone` forbids both. A level is a difficulty of the
task's problems; for interleave it is the words of each text. docs/curriculum.md describes the rules
for users.
"""

import hashlib
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product, takewhile
from statistics import fmean
from typing import Any

from data.errors import UserError
from grpo.config import Config
from grpo.distributed import SINGLE, Ranks
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
from grpo.records import Completion, Decision, Group, Resumable, first_tries, truncated_share
from grpo.statistics import mean_interval, problems_needed, reaches_mark
from grpo.stream import ProblemStream
from grpo.variance import common_trap, group_class
from tasks.base import Problem, Task, compares, levels_of
from tasks.scoring import range_of, scores_of
from tasks.supply import LADDER, Supply, patience

# --- the levels of the prompts --------------------------------------------------------------------

# A level's weight in the draw is the share of its groups that varied lately, but at least FLOOR, so
# that a solved level is still looked at. The hardest open level gets GOAL_SHARE of the prompts at
# least: it is what the run is for.
FLOOR = 0.02
GOAL_SHARE = 1 / 3

# A level's share of varied groups moves by this share of the way for each group.
MEMORY = 0.2

# The next level opens at this running mean of the hardest open one, and at the last level the
# learning rate begins to fall at that one. The mean is over the groups of the last WINDOW steps, or
# of more steps if these have too few groups for its interval.
OPEN_AT = 0.9
ANNEAL_AT = 0.95
WINDOW = 3


class Curriculum(Resumable):
    """Chooses the level of every prompt among `levels`, which rise and of which the last is the
    goal. One level is fixed.

    Of the open levels each is drawn in proportion to the share of its groups that varied lately,
    because only these have a gradient. At first that share is as in `varied`, by level, or else 1,
    and all levels up to `open_to` (the first, if None) are open. The next one opens when the mean
    score of the hardest open level reaches OPEN_AT; a solved group counts as 1, whatever its score.

    Every method depends on nothing but its arguments and the state, so a resumed run makes the same
    decisions.
    """

    STATE = ("levels", "position", "varied", "recent", "anneal_from")

    def __init__(
        self,
        levels: Sequence[int],
        open_to: int | None = None,
        varied: Mapping[int, float] = {},
    ):
        assert levels and list(levels) == sorted(set(levels)), levels
        self.levels = list(levels)
        self.position = self.levels.index(open_to) if open_to else 0  # of the hardest open level
        # The share that varied, of the last groups of each level.
        self.varied = {level: varied.get(level, 1.0) for level in self.levels}

        # Mean scores of the groups of the hardest open level, of the last steps since it opened.
        self.recent: deque[list[float]] = deque()
        # The step after which the learning rate falls; None before the goal is nearly reached.
        self.anneal_from: int | None = None

    @property
    def level(self) -> int:
        """The hardest open level."""
        return self.levels[self.position]

    @property
    def is_last(self) -> bool:
        """Whether the last level is open."""
        return self.position + 1 == len(self.levels)

    @property
    def weights(self) -> dict[int, float]:
        """The weight of each open level in the draw."""
        easier = {level: max(FLOOR, self.varied[level]) for level in self.levels[: self.position]}
        least = sum(easier.values()) * GOAL_SHARE / (1 - GOAL_SHARE)
        return {**easier, self.level: max(self.varied[self.level], FLOOR, least)}

    def levels_for(self, seed: int, step: int, count: int, drawn: int = 0) -> list[int]:
        """Return the levels of `count` prompts of a step, after its first `drawn` prompts.

        The first prompt of a step is at the hardest open level.
        """
        digest = hashlib.sha256(f"levels/{seed}/{step}/{drawn}".encode()).digest()
        weights = self.weights
        levels = random.Random(digest).choices(list(weights), list(weights.values()), k=count)
        return levels if drawn else [self.level, *levels[1:]]

    def observe(self, step: int, groups: Iterable[Group]) -> list[Decision]:
        """Take note of the groups of a training step, every try; return its decisions."""
        groups = list(groups)
        # Of several tries only the last is marked as shown.
        shown = {group.index for group in groups if group.action == "demonstrate"}
        values: dict[int, list[float]] = {}
        for group in first_tries(groups):
            level = group.problem.level
            varies = group.class_name == "varied" or group.index in shown
            is_solved = group.class_name == "solved"
            value = 1.0 if is_solved else fmean(score.value for score in group.scores)
            values.setdefault(level, []).append(value)
            if level in self.varied:  # a dataset as it comes has more levels
                self.varied[level] += MEMORY * (varies - self.varied[level])

        self._remember(values.get(self.level, []))
        if self.is_last:
            return self._anneal(step)
        if not (why := self._reached(OPEN_AT)):
            return []
        before = self.level
        self.position += 1
        self.recent.clear()
        return [Decision(step, before, self.level, "open", why)]

    def _remember(self, values: list[float]) -> None:
        """Add a step's groups to the window, and drop the oldest steps that it does not need."""
        if values:
            self.recent.append(values)
        needed = 2 * problems_needed(OPEN_AT)  # of a perfect policy half as many would do
        while (
            len(self.recent) > WINDOW and sum(map(len, self.recent)) - len(self.recent[0]) >= needed
        ):
            self.recent.popleft()

    def _reached(self, mark: float) -> str:
        """Return in words that the running mean has reached `mark`; "" if it has not."""
        values = [value for groups in self.recent for value in groups]
        if len(self.recent) < WINDOW or fmean(values) < mark:
            return ""
        mean, (low, high) = fmean(values), mean_interval(values)
        if not reaches_mark(mean, low, mark):
            return ""
        return (
            f"running mean {mean:.3f} [{low:.3f}, {high:.3f}] of {len(values)} groups in "
            f"{len(self.recent)} steps"
        )

    def _anneal(self, step: int) -> list[Decision]:
        """Let the learning rate fall from now on, if the goal is nearly reached."""
        if self.anneal_from is not None or not (why := self._reached(ANNEAL_AT)):
            return []
        self.anneal_from = step
        why += ": the learning rate falls from now on"
        return [Decision(step, self.level, self.level, "anneal", why)]


# --- the pre-flight: surveys of prompts and levels ------------------------------------------------

SURVEY_SEED = 3_000_003  # of the problems and the samples, whatever the seed of the run
SURVEY_PROBLEMS = 4  # of each level; with 16 completions each, enough to see whether groups vary
SURVEY_LEVELS = (1, 2, 3, 5, *LADDER)  # for a task that does not name its own

PROMPT_PROBLEMS = 8  # of each prompt and level
PROMPT_SAMPLES = 8
PROMPT_LEVELS = (2, 10)  # and none above the first level of training
SHOTS = (0, 3)
MOST_FOR_SHOTS = 50  # the hardest level at which examples are tried: they lengthen every prompt

# A level is within reach if at least half of its groups vary and at least one in four has a right
# answer. It is left out if nearly all answers are right.
VARIED = 0.5
ANY_EXACT = 0.25
NEARLY_SOLVED = 0.9

# Imitation comes first if no level within reach is at least this share of the first level.
NEAR = 1 / 3

NO_LEVEL = f"at no level do {VARIED:.0%} of the groups vary and {ANY_EXACT:.0%} hold a right answer"


@dataclass(frozen=True)
class PromptSurvey:
    """What the policy earns by a prompt, e.g. ``PromptSurvey("{a} {b}", 3, 0.2, 0.4, 0.6, 0.0)``.

    The figures are means over all completions; `wording` is "" for the task's own.
    """

    wording: str
    shots: int
    reward: float
    value: float
    varied: float  # share of the groups that vary
    truncated: float


def prompts_to_try(
    policy: Policy, task: Task, config: Config, given: Iterable[str], level: int
) -> list[Config]:
    """Return the configuration with each prompt that the pre-flight may choose.

    What the user has `given` stays. Only a task that has `wordings` leaves the choice; the embedded
    model knows the first of them alone, an earlier run's policy knows that run's, and a dataset has
    its own. Where the chat template knows of thinking, it is off, because answers are short.
    """
    wordings = getattr(task, "wordings", ())
    if config.model == "builtin" or config.start or config.dataset or not wordings:
        return [config]

    thinks = "enable_thinking" in (policy.tokenizer.chat_template or "")
    if thinks and "chat_template_kwargs" not in given:
        config = replace(config, chat_template_kwargs='{"enable_thinking": false}')
    _, *others = wordings
    texts = [config.wording] if "wording" in given else ["", *others]
    shots = [config.shots] if "shots" in given or level > MOST_FOR_SHOTS else SHOTS
    return [replace(config, wording=text, shots=count) for text, count in product(texts, shots)]


def survey_prompts(
    policy: Policy, supply: Supply, configs: Sequence[Config], level: int, ranks: Ranks = SINGLE
) -> list[PromptSurvey]:
    """Return a row for each of the `configs`, whose prompts differ.

    A few problems are sampled at each of PROMPT_LEVELS up to `level`. Leaves the last prompt in
    use.
    """
    offered = supply.levels or levels_of(supply.task, level) or PROMPT_LEVELS
    levels = [each for each in PROMPT_LEVELS if each in offered and each <= level] or [level]
    rows = []
    for config in configs:
        use_prompt(policy, supply.task, config)
        sampling = Sampling.of(config)
        settings = EvaluationSettings(sampling, SURVEY_SEED, PROMPT_SAMPLES, draft=config.draft)
        problems = [
            problem
            for each in levels
            for problem in survey_problems(policy, supply, each, sampling, PROMPT_PROBLEMS)
        ]
        if not problems:  # with this prompt none fits the context
            rows.append(PromptSurvey(config.wording, config.shots, 0.0, 0.0, 0.0, 0.0))
            continue
        figures = summarise_level(level, _sampled(policy, supply.task, problems, settings, ranks))
        rows.append(
            PromptSurvey(
                config.wording,
                config.shots,
                figures.reward,
                figures.value,
                figures.varied,
                figures.truncated,
            )
        )
    return rows


def use_prompt(policy: Policy, task: Task, config: Config) -> None:
    """Let `task` and `policy` present problems as the configuration says."""
    task.wording = config.wording  # type: ignore[attr-defined]
    policy.use(config.prompt_format(task))


def best_prompt(rows: Sequence[PromptSurvey]) -> int:
    """Return the number of the row with the highest reward and score together.

    The reward says what can be learned from, but of a weak model it is near 0 by every prompt.
    """
    return max(range(len(rows)), key=lambda number: rows[number].reward + rows[number].value)


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
                problems[level] = survey_problems(policy, supply, level, sampling, SURVEY_PROBLEMS)
            except Exception:
                # The task is user code, and need not have easier levels that nobody asked for.
                if level in training_levels:
                    raise

        every = [problem for found in problems.values() for problem in found]
        sampled = _sampled(policy, task, every, settings, ranks)
        for index, group in enumerate(sampled, start=len(groups)):
            group.index = index
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
    policy: Policy, supply: Supply, level: int, sampling: Sampling, count: int
) -> list[Problem]:
    """Return `count` distinct problems of a level, or as many as there are."""
    family = supply.family_size(level)
    found = select(
        policy,
        supply.sample(level, SURVEY_SEED),
        count,
        frozenset(),
        sampling,
        fruitless=patience(count, family),
        family=family,
    )
    return found.problems


def _sampled(
    policy: Policy,
    task: Task,
    problems: Sequence[Problem],
    settings: EvaluationSettings,
    ranks: Ranks,
) -> list[Group]:
    """Return a scored and classified group for each problem; each of several ranks samples some."""
    groups = ranks.gather(evaluate(policy, task, ranks.share(problems), settings))
    for group in groups:
        group.class_name = group_class(group, range_of(task))
    return groups


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
    """How a run starts, e.g. ``Start([1, 2, 3, 5, 10], 10, "50% of its groups ...", False)``.

    `levels` are those of training, open up to `open_to`. `is_near` tells whether a level within
    reach is near enough to learn the first asked level by reward alone; `why` is a sentence.
    """

    levels: list[int]
    open_to: int
    why: str
    is_near: bool
    is_reachable: bool = True


def choose_levels(
    surveys: Sequence[LevelSurvey], asked: Sequence[int], *, mixed: bool = False
) -> Start:
    """Return how a run that was asked to train on the levels `asked` starts.

    GRPO learns from the differences within a group. So where the first asked level is out of reach,
    easier ones are trained on beside it, from the hardest within reach on, or all if none is.
    Asked levels that are solved are left out. On all levels of a dataset as they come (`mixed`)
    nothing is left out or added.
    """
    found = {row.level: row for row in surveys}
    solved = len(list(takewhile(lambda level: level in found and found[level].is_solved, asked)))
    levels = list(asked[min(solved, len(asked) - 1) :])
    first = levels[0]
    row = found.get(first)

    within = [row.level for row in surveys if row.is_within_reach or row.is_solved]
    if mixed:
        listed = ", ".join(map(str, within))
        why = f"all levels of the dataset are trained on; within reach: {listed or 'none'}"
        return Start(list(asked), asked[-1], why, bool(within), bool(within))
    if row and (row.is_within_reach or row.is_solved):
        return Start(levels, first, row.finding, True)

    easier = [row.level for row in surveys if row.level < first and row.level not in asked]
    reachable = [level for level in within if level < first]
    added = [level for level in easier if not reachable or level >= reachable[-1]]
    why = found[reachable[-1]].finding if reachable else NO_LEVEL
    if reachable and row:
        why += f" at level {reachable[-1]}; level {first} is out of reach ({row.finding})"
    is_near = bool(reachable) and reachable[-1] >= NEAR * first
    return Start(added + levels, first, why, is_near, bool(reachable))


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

# The held-out score that ends the imitation. By then one answer in ten is right, and most groups
# vary. Ended at 0.4 or 0.6, a run needs 25 more steps to the same score; imitation alone ends at
# 0.964 (runs/archive/LOG.md, 2026-11-28: "By one command"; 2026-11-23: "10 words by one command").
ENOUGH = 0.8

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
