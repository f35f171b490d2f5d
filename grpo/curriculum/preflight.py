"""The pre-flight: what a policy can do before its first step, level by level, and where the run
should start.

GRPO learns from the differences within a group. So before anything is trained a few problems of
each level are sampled exactly as the run samples, and the run starts where groups differ *and* a
right answer is within reach. Differences alone are not enough: at two words SmolLM2 was paid for
"the first word, then stop", its groups varied, and it learned that.

The problems are those of the training split, drawn with a seed of their own. They do not count as
seen: nothing is learned from them. Every run of a task has the same ones, so that tables can be
compared.

The pre-flight also measures the perplexity on a few plain paragraphs, because a model that was
converted wrongly looks much like one that merely cannot do the task; see `Perplexity`.
"""

import math
import re
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from statistics import fmean
from typing import Any

import torch

from grpo.distributed import ALONE, Ranks
from grpo.evaluate import TOO_MANY_TRUNCATED, Sampling, evaluate, select, truncated_share
from grpo.learn.logprobs import token_logprobs
from grpo.model.policy import Policy
from grpo.records import Group
from grpo.variance import classify
from tasks.base import Problem, Task, is_right, levels_of, range_of
from tasks.levels import LADDER
from tasks.supply import Supply, patience

SEED = 3_000_003  # of the problems and the samples, whatever the seed of the run
PROBLEMS = 4  # of each level; with 16 completions each enough to see whether groups differ
LEVELS = (1, 2, 3, 5, *LADDER)  # for a task that does not name its own

# A level is within reach where at least half of its groups vary and one in four holds an exact
# answer, and solved where nearly all answers are exact: a ladder would leave it in a few steps.
VARIED = 0.5
ANY_EXACT = 0.25
SOLVED = 0.9
NO_LEVEL = f"at no level do {VARIED:.0%} of the groups vary and {ANY_EXACT:.0%} hold a right answer"

# The held-out paragraphs. Few, because frequencies that are counted in the paragraphs themselves
# are the harder to beat the fewer words they are counted in, and a broken model should not pass.
TEXTS = 3
WORDS = 250
MOST_NATS = 50.0  # a token; exp() of more says nothing


@dataclass(frozen=True)
class LevelSurvey:
    """What a few groups of one level came to, e.g. ``LevelSurvey(10, 4, 0.46, 0.19, 0.2, 1.0, 0.5,
    ...)``.

    `value`, `reward`, `exact` (right answers) and `truncated` are means over all completions,
    `reward_std` is the mean standard deviation within a group (divisor n), `varied` and `any_exact`
    are the shares of the groups whose rewards differ and that hold a right answer (pass@G),
    `distinct` is the mean number of different texts in a group. `seconds` is the share, by tokens,
    of the time that the levels took that were sampled together.
    """

    level: int
    groups: int
    value: float
    reward: float
    reward_std: float
    varied: float
    any_exact: float
    exact: float
    truncated: float
    distinct: float
    tokens: int
    seconds: float

    @property
    def is_solved(self) -> bool:
        """Whether almost all answers at this level are right."""
        return self.exact >= SOLVED

    @property
    def is_within_reach(self) -> bool:
        """Whether training can begin at this level."""
        return self.varied >= VARIED and self.any_exact >= ANY_EXACT

    @property
    def finding(self) -> str:
        """Return the figures that decide, in words."""
        return (
            f"{self.varied:.0%} of its groups vary and {self.any_exact:.0%} hold a right answer"
            if not self.is_solved
            else f"{self.exact:.0%} of its answers are right"
        )


@dataclass(frozen=True)
class Start:
    """Where a run starts, e.g. ``Start([2, 3, 5, 10], 2, "75% of its groups vary ...")``.

    `rungs` are the levels of training, `level` is the first of them, or None where no level is
    within reach (then the rungs are those that were asked for), and `why` is a sentence.
    """

    rungs: list[int]
    level: int | None
    why: str


@dataclass(frozen=True)
class SurveySettings:
    """How a run samples and judges its groups: `threshold` is that of `variance.classify`."""

    sampling: Sampling
    group_size: int
    threshold: float


def levels_to_survey(supply: Supply, rungs: Sequence[int]) -> list[int]:
    """Return the `rungs` and the easier levels up to the last of them, rising.

    The easier levels are those that the dataset has, or else those that the task names, or else
    LEVELS.
    """
    top = rungs[-1]
    offered = supply.levels or levels_of(supply.task, top) or LEVELS
    return sorted({level for level in offered if level < top} | set(rungs))


def survey(
    policy: Policy,
    supply: Supply,
    levels: Sequence[int],
    settings: SurveySettings,
    *,
    rungs: Sequence[int],
    ranks: Ranks = ALONE,
) -> tuple[list[LevelSurvey], list[Group]]:
    """Return a row for each of the `levels` (rising) that was sampled, and all the groups.

    Beyond the first of the `rungs` the survey ends at a level without a right answer: the harder
    ones would take longest and show nothing. A level that the task cannot make is left out, unless
    it is one of the `rungs`.
    """
    # The easier levels are sampled together, which takes as many forward passes as the longest of
    # them.
    lots = [[level for level in levels if level <= rungs[0]]]
    lots += [[level] for level in levels if level > rungs[0]]

    rows: list[LevelSurvey] = []
    every: list[Group] = []
    for lot in lots:
        start = time.perf_counter()
        problems = [
            problem
            for level in lot
            for problem in draw(policy, supply, level, settings.sampling, is_asked=level in rungs)
        ]
        groups = _sample(policy, supply.task, problems, settings, ranks)
        seconds = time.perf_counter() - start
        rows += _rows(groups, seconds)
        every += groups
        if not rows or not rows[-1].any_exact:
            break

    for index, group in enumerate(every):
        group.index = index
    return rows, every


def draw(
    policy: Policy, supply: Supply, level: int, sampling: Sampling, *, is_asked: bool
) -> list[Problem]:
    """Return PROBLEMS distinct problems of a level, or as many as there are; [] where the task has
    no such level.
    """
    try:
        family = supply.family_size(level)
        found = select(
            policy,
            supply.sample(level, SEED),
            PROBLEMS,
            frozenset(),
            sampling,
            fruitless=patience(PROBLEMS, family),
            family=family,
        )
    except Exception:
        # Nobody asked for an easier level, and a task of the user's own need not have it.
        if is_asked:
            raise
        return []
    return found.problems


def _sample(
    policy: Policy,
    task: Task,
    problems: Sequence[Problem],
    settings: SurveySettings,
    ranks: Ranks,
) -> list[Group]:
    """Return a group for each problem, sampled, scored and classified."""
    mine = evaluate(
        policy,
        task,
        ranks.share(problems),
        sampling=settings.sampling,
        seed=SEED,
        samples=settings.group_size,
    )
    groups = ranks.gather(mine)
    for group in groups:
        group.verdict = classify(
            group.rewards,
            group.texts,
            threshold=settings.threshold,
            reward_range=range_of(task),
        )
        group.action = "skip"  # nothing is learned from it
    return groups


def _rows(groups: Sequence[Group], seconds: float) -> list[LevelSurvey]:
    """Return a row for each level of the groups, which took so many `seconds` together."""
    tokens = sum(group.tokens for group in groups)
    by_level: dict[int, list[Group]] = {}
    for group in groups:
        by_level.setdefault(group.problem.level, []).append(group)
    return [
        summarise_level(level, part, seconds * sum(group.tokens for group in part) / tokens)
        for level, part in by_level.items()
    ]


def summarise_level(level: int, groups: Sequence[Group], seconds: float = 0.0) -> LevelSurvey:
    """Return the row of a level's scored and classified groups."""
    scores = [score for group in groups for score in group.scores]
    return LevelSurvey(
        level=level,
        groups=len(groups),
        value=fmean(score.value for score in scores),
        reward=fmean(score.reward for score in scores),
        reward_std=fmean(group.spread for group in groups),
        varied=fmean(group.verdict == "varied" for group in groups),
        any_exact=fmean(any(map(is_right, group.scores)) for group in groups),
        exact=fmean(is_right(score) for score in scores),
        truncated=truncated_share(groups),
        distinct=fmean(len(set(group.texts)) for group in groups),
        tokens=sum(group.tokens for group in groups),
        seconds=seconds,
    )


def choose_start(surveys: Sequence[LevelSurvey], rungs: Sequence[int]) -> Start:
    """Return where a run that was asked for `rungs` starts, by what its levels were found to be.

    1. Rungs that are solved already are left out, if the next one is within reach.
    2. A first rung within reach stays the start, even where a harder one is within reach too: the
       easier steps are the cheaper ones, and a ladder leaves such a level after a few of them.
    3. Otherwise the start is the hardest easier level within reach, and the rungs begin with it
       and those between.
    4. Where there is none, nothing changes, and `level` is None.
    """
    rungs, found = list(rungs), {row.level: row for row in surveys}
    solved = len(list(takewhile(lambda rung: rung in found and found[rung].is_solved, rungs)))
    if solved:
        return _past_the_solved(rungs, found, solved)

    first = found.get(rungs[0])
    if first and first.is_within_reach:
        return Start(rungs, rungs[0], first.finding)

    easier = [row for row in surveys if row.level < rungs[0]]
    reachable = [row for row in easier if row.is_within_reach]
    if not reachable:
        return Start(rungs, None, NO_LEVEL)

    hardest = max(reachable, key=lambda row: row.level)
    between = [row.level for row in easier if row.level >= hardest.level]
    why = f"{hardest.finding}; level {rungs[0]} is out of reach"
    if first:
        why += f" ({first.varied:.0%} and {first.any_exact:.0%})"
    return Start(between + rungs, hardest.level, why)


def advice(surveys: Sequence[LevelSurvey]) -> str:
    """Return what to do where no level is within reach."""
    said = "give a --model that solves some of these problems, or an easier task"
    truncated = max((row.truncated for row in surveys), default=0.0)
    if truncated > TOO_MANY_TRUNCATED:
        said += (
            f"; up to {truncated:.0%} of a level's completions were truncated: if they need more "
            "room than the target "
            "takes, give a larger --max-new-tokens"
        )
    return said


def choose_mixed_start(surveys: Sequence[LevelSurvey], rungs: Sequence[int]) -> Start:
    """Return the start of a run that trains on all levels of a dataset as they come: nothing
    changes.
    """
    reachable = [row.level for row in surveys if row.is_within_reach]
    if not reachable:
        return Start(list(rungs), None, NO_LEVEL)
    levels = ", ".join(map(str, reachable))
    why = f"all levels of the dataset are trained on as they come; within reach: {levels}"
    return Start(list(rungs), rungs[0], why)


def _past_the_solved(rungs: list[int], found: dict[int, LevelSurvey], solved: int) -> Start:
    """Return the start of a ladder whose first `solved` rungs are solved."""
    following = found.get(rungs[solved]) if solved < len(rungs) else None
    skipped = solved if following and following.is_within_reach else solved - 1
    start = rungs[skipped]
    why = found[start].finding
    if skipped:
        why += f"; the easier ones are solved ({', '.join(map(str, rungs[:skipped]))})"
    return Start(rungs[skipped:], start, why)


@dataclass(frozen=True)
class Perplexity:
    """How well a model predicts a few plain paragraphs: exp of the mean negative log-likelihood.

    `token` and `word` are the perplexity per token and per word, `unigram` is the perplexity per
    token of a model that knows nothing but how often each token stands in these very paragraphs. No
    model that ignores the order of words can do better than that, and every language model does:
    SmolLM2-135M has a quarter of it. With its query and key rows in the order of GGUF, or without
    its rotary embedding, it has more (runs/LOG.md). A single damaged layer does not show.
    """

    token: float
    word: float
    unigram: float
    texts: int
    tokens: int

    @property
    def is_language(self) -> bool:
        """Whether the model predicts plain text better than token frequencies do."""
        return self.token < self.unigram

    def line(self) -> str:
        """Return the figures as a sentence."""
        said = (
            f"perplexity on {self.texts} held-out text{'s' * (self.texts != 1)}: {self.token:,.0f} "
            "per token, "
            f"{self.word:,.0f} per word (token frequencies alone: {self.unigram:,.0f} per token)"
        )
        return said if self.is_language else f"{said}: no general language model"

    def warning(self, surveys: Sequence[LevelSurvey]) -> str:
        """Return what to say of a model that is no language model, "" where there is nothing to
        warn of.

        A policy that solves problems is not broken, whatever it makes of prose: the embedded model
        was raised on nothing but the task.
        """
        if self.is_language or any(row.any_exact for row in surveys):
            return ""
        return (
            f"the model has a perplexity of {self.token:,.0f} per token on plain paragraphs, where "
            "token frequencies alone "
            f"have {self.unigram:,.0f}, and solves no problem: it is no language model, or was "
            "converted wrongly; compare "
            "it with the original before you train it"
        )


@torch.no_grad()
def measure_perplexity(policy: Policy, texts: Sequence[str]) -> Perplexity | None:
    """Return the perplexity of the policy, without its chat template, on the beginnings of TEXTS
    of the `texts`.

    A text's first token (the tokenizer's own start token, where it has one) is given. None without
    any text.
    """
    beginnings = [_beginning(text) for text in texts[:TEXTS]]
    sequences = [policy.tokenizer(text).input_ids[: policy.context] for text in beginnings]
    pairs = [(text, ids) for text, ids in zip(beginnings, sequences) if len(ids) > 1]
    if not pairs:
        return None

    targets = [token for _, ids in pairs for token in ids[1:]]
    packing = policy.pack(
        [tuple(ids[:1]) for _, ids in pairs], [tuple(ids[1:]) for _, ids in pairs]
    )
    logprobs, _ = token_logprobs(
        policy.predict(packing),
        policy.head,
        torch.tensor(targets, device=policy.device),
        torch.ones(len(targets), device=policy.device),
    )
    total = -logprobs.double().sum().item()
    words = sum(len(text.split()) for text, _ in pairs)
    return Perplexity(
        token=_exp(total / len(targets)),
        word=_exp(total / words),
        unigram=_exp(_entropy(targets)),
        texts=len(pairs),
        tokens=len(targets),
    )


def _beginning(text: str) -> str:
    """Return the first WORDS words of a text, with the space between them as it is."""
    words = list(re.finditer(r"\S+", text))[:WORDS]
    return text[words[0].start() : words[-1].end()] if words else ""


def _exp(nats: float) -> float:
    # In this order NaN, from a model whose logits are not finite, becomes MOST_NATS.
    return math.exp(min(MOST_NATS, nats))


def _entropy(tokens: Collection[int]) -> float:
    """Return the entropy of the tokens' own frequencies, in nats."""
    counts = Counter(tokens).values()
    return -sum(count / len(tokens) * math.log(count / len(tokens)) for count in counts)


def figures_of(
    surveys: Sequence[LevelSurvey], perplexity: Perplexity | None, start: Start
) -> dict[str, Any]:
    """Return all that was found, as JSON values."""
    return {
        "start": start.level,
        "rungs": start.rungs,
        "levels": [asdict(row) for row in surveys],
        "perplexity": asdict(perplexity) if perplexity else None,
    }
