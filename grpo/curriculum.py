"""What a run trains on: which problems, by which prompt, and how it gets from no reward to some.

    Curriculum      draws the level of every prompt where groups vary, and opens harder levels
    ProblemStream   the problems of these levels, and which of them the policy has seen
    doubtful_parts  windows of long answers, where the policy is likely to make a mistake
    survey_prompts  the pre-flight's first table: what the policy earns by each of a few prompts
    survey          the second: what it does at each level, before training
    choose_levels   the levels of training, chosen by the survey
    warm_start      a short imitation of right answers, for a policy far from the task
    demonstrate     the right answer shown in groups where no completion is right

The last two show right answers; `--reward-alone` forbids both. A level is a difficulty of the
task's problems; for interleave it is the words of each text. docs/curriculum.md describes the rules
for users.
"""

import hashlib
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain, count, islice, product, starmap, takewhile
from statistics import fmean
from typing import Any

import torch

from grpo.config import Config, resolve_config
from grpo.data.errors import UserError, lacks_memory
from grpo.distributed import SINGLE, Ranks
from grpo.evaluate import budgets, evaluate, score_groups, select, turns_of
from grpo.learn.batch import Truncate, completion_logprobs, micro_batches
from grpo.learn.optimizer import Optimizer
from grpo.learn.update import UpdateMemory, imitate
from grpo.model.policy import Policy
from grpo.model.prompts import check_conversations, format_of
from grpo.records import Completion, Decision, Group, Resumable, originals, truncated_share
from grpo.rollout.generate import fitting
from grpo.statistics import mean_interval, problems_needed, reaches_mark
from grpo.tasks.base import (
    EXPECTED,
    Problem,
    Score,
    Task,
    asked,
    compares,
    levels_of,
    problems_of,
    range_of,
    scores_of,
    worded,
)
from grpo.tasks.registry import load_task
from grpo.tasks.supply import (
    LADDER,
    Supply,
    patience,
    problem_at,
    problem_stream,
    training_set,
    window_of,
)
from grpo.variance import MOSTLY_JUDGED, classify, common_trap

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
    score of the hardest open level reaches OPEN_AT; a solved group counts as 1, whatever its score,
    and a window as what the whole answer is expected to score. A group does not count of which the
    reward judged less than half.

    Every method depends on nothing but its arguments and the state, so a resumed run makes the same
    decisions.
    """

    STATE = ("levels", "position", "varied", "recent", "anneal_from")

    def __init__(
        self, levels: Sequence[int], open_to: int | None = None, varied: Mapping[int, float] = {}
    ):
        self.levels = list(levels)
        self.position = self.levels.index(open_to) if open_to else 0  # of the hardest open level
        self.varied = {level: varied.get(level, 1.0) for level in self.levels}

        # Mean scores of the groups of the hardest open level, by step, since it opened.
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

    def observe(self, step: int, groups: Sequence[Group]) -> list[Decision]:
        """Take note of the groups of a training step; return its decisions."""
        self._take_note(groups)
        before = self.level
        why = self._reached(ANNEAL_AT if self.is_last else OPEN_AT)
        if not why or self.anneal_from is not None:
            return []

        if self.is_last:
            self.anneal_from = step
            why += ": the learning rate falls from now on"
            return [Decision(step, before, before, "anneal", why)]

        self.position += 1
        self.recent.clear()
        return [Decision(step, before, self.level, "open", why)]

    def _take_note(self, groups: Sequence[Group]) -> None:
        """Move the shares of varied groups, and add the step to the window of the running mean."""
        values = []
        for group in originals(groups):
            level = group.problem.level
            if level in self.varied:  # a dataset as it comes has more levels
                varies = group.class_name == "varied" or group.action == "demonstrate"
                self.varied[level] += MEMORY * (varies - self.varied[level])
            if level == self.level:
                value = group.problem.expected
                if value is None and group.judged_share >= MOSTLY_JUDGED:
                    is_solved = group.class_name == "solved"
                    value = 1.0 if is_solved else fmean(score.value for score in group.judged)
                if value is not None:
                    values.append(value)
        if values:
            self.recent.append(values)

        # The oldest steps leave that the interval does not need.
        needed = 2 * problems_needed(OPEN_AT)  # of a perfect policy half as many would do
        while len(self.recent) > WINDOW and sum(map(len, list(self.recent)[1:])) >= needed:
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


# --- the problems of the prompts ------------------------------------------------------------------

# The least weight of a token in the draw of a window, so that a perfect policy has a draw, too.
TINY = 1e-9

PROBES = 16  # problems of a level whose prompts and budgets are tried before training

# A problem and its index in the stream.
Indexed = tuple[int, Problem]


def load_supply(config: Config, task: Task | None = None) -> tuple[Config, Supply]:
    """Return the configuration, resolved, and the problems that it names, of a `task` if given."""
    task = task or load_task(config.task, config.reward, config.task_options, config.wording)
    problems = training_set(config.dataset, task)
    config = resolve_config(config, task, {problem.level for problem in problems})
    return config, Supply(task, seed=config.seed, dataset=problems, mixed=config.mixed)


class ProblemStream(Resumable):
    """The problems of `supply` that fit the policy's context, in order; no index is used twice."""

    STATE = ("next_index", "seen", "trained", "left_out", "has_said_so")

    def __init__(self, config: Config, policy: Policy, supply: Supply):
        self.config = config
        self.task = supply.task
        self.policy = policy
        self.supply = supply

        self.next_index = 0
        self.seen: set[str] = set()  # keys of all that the policy was trained on, in any run
        self.trained: Counter[int] = Counter()  # of these in this run, by level
        self.left_out = ""  # the first problem that does not fit
        self.has_said_so = False

    def take(self, index: int, levels: Sequence[int]) -> list[Indexed]:
        """Return a problem of each of the `levels`, in turn the first that fits from `index` on."""
        ahead = {(i, level): self.supply.at(i, level) for i, level in enumerate(levels, index)}
        self.policy.prepare([*ahead.values()])
        found: list[Indexed] = []
        for level in levels:
            passed: list[Problem] = []
            problems = (ahead.get((i, level)) or self.supply.at(i, level) for i in count(index))
            problem = next(fitting(self.policy, problems, passed, self.config.max_new_tokens))
            found.append((index + len(passed), problem))
            index = found[-1][0] + 1

            if passed and not self.left_out:
                self.left_out = passed[0].title
        return found

    def take_events(self) -> list[str]:
        """Return a line, once in a run, after a problem was left out."""
        if self.has_said_so or not self.left_out:
            return []
        self.has_said_so = True
        return [
            f"{self.left_out} is left out of training, as is every problem whose prompt and right "
            f"answer do not fit the model's {self.policy.context:,} tokens or --max-new-tokens"
        ]

    def windows(self, problems: Sequence[Indexed]) -> list[Indexed]:
        """Return windows of the problems at random, see `window_of`."""
        words, seed = self.config.window, self.config.seed
        found = {i: window_of(self.task, words, seed, i, problem) for i, problem in problems}
        return self.with_windows(problems, found)

    def with_windows(
        self, problems: Sequence[Indexed], windows: Mapping[int, Problem]
    ) -> list[Indexed]:
        """Return the problems, or their `windows` (by index) where these fit: of other tokens, the
        beginning and the rest may be longer than the whole.
        """
        self.policy.prepare([*windows.values()])
        most = self.config.max_new_tokens
        fit = {i for i, part in windows.items() if [*fitting(self.policy, [part], [], most)]}
        return [(i, windows[i] if i in fit else problem) for i, problem in problems]

    def check(self, levels: Sequence[int]) -> None:
        """Raise UserError if problems do not suit a run at these levels.

        The chat template must pass on the problems of a fixed set. The first problems of each level
        must fit the context and the budget, and the task must draw them with nothing but the
        generator that it is given: otherwise a resumed run would have other problems, and
        evaluations before and after training could not be compared.
        """
        held_out = (problems_of(self.task, split) for split in ("validation", "test"))
        fixed = chain(self.supply.dataset, *held_out)
        check_conversations(self.policy, (worded(self.task, problem) for problem in fixed))
        for level in levels:
            once, again = (
                problem_at(self.task, seed=self.config.seed, split="train", level=level, index=0)
                for _ in range(2)
            )
            if once != again:
                raise UserError(
                    f"task {self.task.name}: make({level}, 'train', rng) returned two problems for "
                    "the same random numbers; draw everything with rng"
                )
            score = target_score(self, once) if level < levels[-1] else None
            if score and not score.exact and score.value < OPEN_AT:
                self.policy.notes.append(
                    f"the target of {once.title} scores {score.value:.3f}, and the next level "
                    f"opens at a mean of {OPEN_AT}: unless other answers score more, the run never "
                    "climbs; give the range whose highest reward a right answer earns"
                )
        self.largest_budget(levels)

    def largest_budget(self, levels: Iterable[int]) -> int:
        """Return the largest completion budget of the first problems of these levels, in tokens.

        Raises UserError if one of them does not fit the context or the budget.
        """
        first: list[Problem] = []
        for level in levels:
            stream = problem_stream(self.task, seed=self.config.seed, split="train", level=level)
            first += islice(fitting(self.policy, stream, []), PROBES)
        return max(budgets(self.policy, self.task, first, self.config.max_new_tokens))

    def mark_seen(self, problems: Sequence[Indexed]) -> float:
        """Record that the policy was trained on these; return the share it had seen before."""
        new = {
            problem.key: problem.level for _, problem in problems if problem.key not in self.seen
        }
        self.trained.update(new.values())
        self.seen.update(new)
        self.next_index = problems[-1][0] + 1
        return 1 - len(new) / len(problems)

    def metrics(self, level: int) -> dict[str, Any]:
        """Return how many problems were seen, and the share of a finite family at `level`."""
        metrics: dict[str, Any] = {"problems/seen": len(self.seen)}
        if size := self.supply.family_size(level):
            metrics["problems/family_share"] = self.trained[level] / size
        return metrics

    def begin_after(self, state: dict[str, Any]) -> None:
        """Begin with the policy of an earlier run, whose trainer had this `state`.

        The problems that it was trained on count as seen. Fresh problems continue where its stream
        ended, because runs with the same seed, task and level share their stream.
        """
        self.seen = set(state["seen"])
        if not self.config.dataset:
            self.next_index = state["next_index"]


def doubtful_parts(
    stream: ProblemStream,
    problems: Sequence[Indexed],
    memory: UpdateMemory,
    truncate: Truncate | None = None,
    ranks: Ranks = SINGLE,
) -> list[Indexed]:
    """Return the problems; of those whose right answer has more words than a window, a window.

    From a perfect beginning, the policy goes wrong at the k-th token of the right answer with
    probability 1 - p_k, which one forward pass over the answer tells for all k. A token is drawn in
    proportion to these, and a window around it. So windows contain mistakes as often as these are
    made, however rare they have become. `Problem.expected` is what the whole answer is expected to
    score, see `expected_share`. `truncate` is the sampler's.
    """
    policy, words = stream.policy, stream.config.window or 0
    is_long = [bool(words) and len(each.target.split()) > words for _, each in problems]
    if not any(is_long):
        return list(problems)

    # Each rank reads the answers to the problems that it samples.
    own = [
        two_spellings(right_answer(policy, index, problem, stream.config.temperature), policy)
        for (index, problem), long in ranks.share([*zip(problems, is_long)])
        if long
    ]
    read = iter(answer_logprobs(policy, own, memory, truncate))
    logprobs = ranks.gather([next(read) if long else None for long in ranks.share(is_long)])

    parts: dict[int, Problem] = {}
    for (index, problem), values in zip(problems, logprobs, strict=True):
        if values is None:
            continue
        draw = random.Random(f"window/{stream.config.seed}/{index}")
        mistakes = [max(TINY, -math.expm1(value)) for value in values]
        (token,) = draw.choices(range(len(values)), mistakes)
        written = policy.decode(policy.answer_tokens(problem)[: token + 1])
        last = len(problem.target.split()) - words
        start = min(max(0, len(written.split()) - 1 - draw.randrange(words)), last)
        part = asked(stream.task, "window", problem, words, start)
        parts[index] = replace(part, data={**part.data, EXPECTED: expected_share(values)})
    return stream.with_windows(problems, parts)


def first_word(policy: Policy, problem: Problem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens of the first word of the right answer, without and with a space before it.

    Both begin a right answer, and many tokenizers have other tokens for the second.
    """
    word = problem.target.split()[0]
    return policy.target_tokens(word), policy.target_tokens(f" {word}")


def two_spellings(answer: Group, policy: Policy) -> Group:
    """Return a group of the right answer, and if it differs of the second spelling of its first
    word.
    """
    plain, spaced = first_word(policy, answer.problem)
    if spaced == plain or answer.completions[0].tokens[: len(plain)] != plain:
        return answer
    completions = [*answer.completions, demonstration(policy, spaced)]
    return replace(answer, completions=completions, advantages=[1.0, 1.0])


@torch.no_grad()
def answer_logprobs(
    policy: Policy, answers: Sequence[Group], memory: UpdateMemory, truncate: Truncate | None = None
) -> list[list[float]]:
    """Return the log-probabilities of the tokens of each right answer (nats), -inf of those that
    `truncate` excludes.

    Of an answer with `two_spellings` of the first word, all of that word's is at its first token.
    """
    exclude = truncate and (lambda logits_NV, _: truncate(logits_NV, None))
    found: dict[tuple[int, int], list[float]] = {}  # by the indices of group and sample
    while True:
        limits = {"max_length": 0, "micro_tokens": memory.micro_tokens}
        try:
            for batch in micro_batches(answers, "cispo", **limits, device=policy.device):
                logp_RT, _ = completion_logprobs(policy, batch, exclude)
                for name, row, tokens in zip(batch.row_ids, logp_RT.tolist(), batch.completions):
                    found[name] = row[: len(tokens)]
            break
        except RuntimeError as error:
            if not lacks_memory(error):
                raise
        # Not while the error is handled: it keeps the tensors of the failed pass.
        policy.free_decoder()
        memory.save_more(answers)

    for answer in answers:
        if spaced := found.get((answer.index, 1)):
            values, size = found[answer.index, 0], len(first_word(policy, answer.problem)[0])
            either = torch.tensor([sum(values[:size]), sum(spaced)]).logsumexp(0).item()
            values[:size] = [min(either, 0.0), *[0.0] * (size - 1)]
    return [found[answer.index, 0] for answer in answers]


def expected_share(logprobs: Sequence[float]) -> float:
    """Return the share of a right answer that is expected before the first mistake, in answers that
    end.

    It is P(end) times the mean of P(the first k tokens are right) over k. The expected similarity
    is mostly higher, because right words behind a mistake count, too.
    """
    *_, end = logprobs
    return math.exp(end) * fmean(map(math.exp, accumulate(logprobs)))


# --- the pre-flight: surveys of prompts and levels ------------------------------------------------

SURVEY_SEED = 3_000_003  # of the problems and the samples, whatever the seed of the run
SURVEY_PROBLEMS = 4  # of each level; with 16 completions each, enough to see whether groups vary
SURVEY_LEVELS = (1, 2, 3, 5, *LADDER)  # for a task that does not name its own

PROMPT_PROBLEMS = 8  # of each prompt and level
PROMPT_SAMPLES = 8
PROMPT_LEVELS = (2, 10)  # and none above the first level of training
PROMPT_FIGURES = ("reward", "value", "varied", "truncated")
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


def prompts_to_try(
    policy: Policy, task: Task, config: Config, given: Iterable[str], level: int
) -> list[Config]:
    """Return the configuration with each prompt that the pre-flight may choose.

    What the user has `given` stays. Only a task that has `wordings` leaves the choice.
    """
    # The embedded model and an earlier run's policy know one wording; a dataset has its own.
    wordings = getattr(task, "wordings", ())
    if config.model == "builtin" or config.start or config.dataset or not wordings:
        return [config]

    # Without thinking, because answers are short.
    thinks = "enable_thinking" in (policy.tokenizer.chat_template or "")
    if thinks and "chat_template_kwargs" not in given:
        config = replace(config, chat_template_kwargs='{"enable_thinking": false}')
    _, *others = wordings
    texts = [config.wording] if "wording" in given else ["", *others]
    shots = [config.shots] if "shots" in given or level > MOST_FOR_SHOTS else SHOTS
    return [replace(config, wording=text, shots=count) for text, count in product(texts, shots)]


def survey_prompts(
    policy: Policy, supply: Supply, configs: Sequence[Config], level: int, ranks: Ranks = SINGLE
) -> tuple[int, list[dict[str, Any]]]:
    """Return which of the `configs` has the best prompt, and a row for each: its wording, examples
    and figures on a few problems up to `level`. The best prompt stays in use.
    """
    offered = supply.levels or levels_of(supply.task, level) or PROMPT_LEVELS
    levels = [each for each in PROMPT_LEVELS if each in offered and each <= level] or [level]
    rows: list[dict[str, Any]] = []
    for config in configs:
        use_prompt(policy, supply.task, config)
        short = replace(config, group_size=PROMPT_SAMPLES)
        groups = sample_levels(policy, supply, short, levels, PROMPT_PROBLEMS, ranks)
        # If no problem fits the context, nothing is earned.
        found = summarise_survey(groups) if groups else dict.fromkeys(PROMPT_FIGURES, 0.0)
        figures = {name: found[name] for name in PROMPT_FIGURES}
        rows.append({"wording": config.wording, "shots": config.shots, **figures})

    # The reward says what can be learned from, but of a weak model it is near 0 by every prompt.
    best = max(range(len(rows)), key=lambda number: rows[number]["reward"] + rows[number]["value"])
    use_prompt(policy, supply.task, configs[best])
    return best, rows


def use_prompt(policy: Policy, task: Task, config: Config) -> None:
    """Let `task` and `policy` present problems as the configuration says."""
    task.wording = config.wording  # type: ignore[attr-defined]
    policy.use(format_of(task, config, config.seed))


def levels_to_survey(supply: Supply, training_levels: Sequence[int]) -> list[int]:
    """Return the `training_levels` and those that are easier than the last of them, rising."""
    last = training_levels[-1]
    offered = supply.levels or levels_of(supply.task, last) or SURVEY_LEVELS
    return sorted({level for level in offered if level < last} | set(training_levels))


def easier_levels(
    offered: Sequence[int],
    level: int,
    decisions: Sequence[Mapping[str, Any]],
    has_half_way: bool = False,
) -> tuple[int, ...]:
    """Return the `offered` levels below `level` that no line of curriculum.jsonl calls solved, or
    if all are solved a level half way from the last of them, where that exists.
    """
    rows = [row for line in decisions for row in line["figures"].get("levels", ())]
    solved = {line["from"] for line in decisions if line["kind"] == "open"}
    solved |= {row["level"] for row in rows if is_done(row)}

    below = [each for each in offered if each < level]
    easier = [each for each in below if each not in solved]
    if below and not easier and has_half_way and level - below[-1] > 1:
        easier = [(below[-1] + level) // 2]
    return tuple(easier)


def survey(
    policy: Policy,
    supply: Supply,
    config: Config,
    training_levels: Sequence[int],
    ranks: Ranks = SINGLE,
) -> tuple[list[dict[str, Any]], list[Group]]:
    """Sample a few problems of each level, or windows, as the run will; return a row for each
    level, and all groups. The problems do not count as seen: nothing is learned from them.

    Beyond the first of the `training_levels` the survey ends at a level without a right answer,
    because harder ones would take longest and show nothing.
    """
    # The easier levels are one batch, which takes as many forward passes as the longest of them.
    levels = levels_to_survey(supply, training_levels)
    easier = [level for level in levels if level <= training_levels[0]]
    batches = [easier, *([level] for level in levels[len(easier) :])]

    rows: list[dict[str, Any]] = []
    groups: list[Group] = []
    for batch in batches:
        sampled = sample_levels(
            policy, supply, config, batch, SURVEY_PROBLEMS, ranks, required=training_levels
        )
        for level in batch:
            if members := [group for group in sampled if group.problem.level == level]:
                rows.append({"level": level, **summarise_survey(members)})
        groups += sampled
        if not rows or not rows[-1]["any_exact"]:
            break

    for index, group in enumerate(groups):
        group.index, group.action = index, "skip"
    return rows, groups


def sample_levels(
    policy: Policy,
    supply: Supply,
    config: Config,
    levels: Sequence[int],
    count: int,
    ranks: Ranks,
    required: Collection[int] = (),
) -> list[Group]:
    """Return a scored and classified group for each of `count` distinct problems of each level.

    There may be fewer: a user's task need not have levels that are not `required`, and groups of
    which the reward judged nothing are left out.
    """
    budget = config.max_new_tokens
    problems: list[Problem] = []
    for level in levels:
        cut = partial(window_of, supply.task, config.window, config.seed)
        drawn = starmap(cut, enumerate(supply.sample(level, SURVEY_SEED)))
        fruitless = patience(count, supply.family_size(level))
        try:
            problems += select(policy, drawn, count, frozenset(), budget, fruitless).problems
        except Exception:
            if level in required:
                raise

    sampling = config, SURVEY_SEED, config.group_size
    answered = ranks.gather(evaluate(policy, supply.task, ranks.share(problems), *sampling))
    groups = [group for group in answered if group.judged]
    for group in groups:
        group.class_name = classify(group, range_of(supply.task))
    return groups


def summarise_survey(groups: Sequence[Group]) -> dict[str, Any]:
    """Return the figures of scored and classified groups: means over completions or groups."""
    scores = [score for group in groups for score in group.judged]
    return {
        "groups": len(groups),
        "value": fmean(score.value for score in scores),
        "reward": fmean(score.reward for score in scores),
        "reward_std": fmean(group.reward_std for group in groups),  # within a group
        # Shares of the groups: those that vary, and those that hold a right answer (pass@G).
        "varied": fmean(group.class_name == "varied" for group in groups),
        "any_exact": fmean(any(score.exact for score in group.scores) for group in groups),
        "exact": fmean(score.exact for score in scores),
        "truncated": truncated_share(groups),
        "distinct": fmean(len(set(group.texts)) for group in groups),  # texts in a group
        "tokens": sum(group.tokens for group in groups),
        "windows": fmean(bool(group.problem.begun) or group.problem.goes_on for group in groups),
    }


# A row of the survey: the figures of `summarise_survey`, and the level.
Row = Mapping[str, Any]


def is_solved(row: Row) -> bool:
    """Return whether nearly all answers at a level are right."""
    return row["exact"] >= NEARLY_SOLVED


def is_done(row: Row) -> bool:
    """Return whether a level is solved by whole answers: of windows more are right."""
    return is_solved(row) and not row.get("windows")


def is_within_reach(row: Row) -> bool:
    """Return whether training can begin at a level, or has nothing left to do there."""
    return is_solved(row) or (row["varied"] >= VARIED and row["any_exact"] >= ANY_EXACT)


def finding(row: Row) -> str:
    """Return in words what decides whether a level is within reach."""
    if is_solved(row):
        return f"{row['exact']:.0%} of its answers are right"
    return f"{row['varied']:.0%} of its groups vary and {row['any_exact']:.0%} hold a right answer"


@dataclass(frozen=True)
class Start:
    """How a run starts, e.g. ``Start([1, 2, 3, 5, 10], 10, "50% of its groups ...", False)``."""

    levels: list[int]  # of training
    open_to: int  # the hardest level that is open at first
    why: str
    is_near: bool  # a level within reach is near enough to learn by reward alone
    is_reachable: bool = True  # some level is within reach


def choose_levels(rows: Sequence[Row], asked: Sequence[int], *, mixed: bool = False) -> Start:
    """Return how a run that was asked to train on the levels `asked` starts.

    GRPO learns from the differences within a group. So where the first asked level is out of reach,
    easier ones are trained on beside it, from the hardest within reach on, or all if none is.
    Asked levels that are solved by whole answers are left out. On all levels of a dataset as they
    come (`mixed`) nothing is left out or added.
    """
    found = {row["level"]: row for row in rows}
    within = [level for level, row in found.items() if is_within_reach(row)]
    if mixed:
        listed = ", ".join(map(str, within))
        why = f"all levels of the dataset are trained on; within reach: {listed or 'none'}"
        return Start(list(asked), asked[-1], why, bool(within), bool(within))

    solved = len(list(takewhile(lambda level: level in found and is_done(found[level]), asked)))
    levels = list(asked[min(solved, len(asked) - 1) :])
    first = levels[0]
    if first in within:
        return Start(levels, first, finding(found[first]), True)

    easier = [level for level in found if level < first and level not in asked]
    reachable = [level for level in within if level < first]
    if not reachable:
        return Start(easier + levels, first, NO_LEVEL, False, False)

    nearest = reachable[-1]
    why = finding(found[nearest])
    if first in found:
        why += f" at level {nearest}; level {first} is out of reach ({finding(found[first])})"
    added = [level for level in easier if level >= nearest]
    return Start(added + levels, first, why, nearest >= NEAR * first)


# --- right answers, shown or imitated -------------------------------------------------------------

# Right answers in an update of the warm start. SmolLM2-135M needs 18 to 22 updates for 10 words
# (runs/archive/LOG.md, 2026-11-23: "10 words by one command").
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


def target_score(stream: ProblemStream, problem: Problem) -> Score | None:
    """Return the score of a target; None if it is empty, as that of a row of the user's own may be,
    if the task compares completions, and so does not say what a target alone earns, or if the
    reward does not judge it.
    """
    if not problem.target.strip() or compares(stream.task):
        return None
    turns = turns_of(stream.task, stream.policy.opened(problem), [problem.target])
    (score,) = scores_of(stream.task, problem, turns)
    return None if score.abstained else score


def demonstration(policy: Policy, tokens: tuple[int, ...]) -> Completion:
    """Return the tokens of a right answer as a completion."""
    zeros = (0.0,) * len(tokens)
    finish = "stop" if tokens[-1] == policy.end else "enough"
    return Completion(tokens, zeros, policy.decode(tokens), finish, is_demonstration=True)


def right_answer(policy: Policy, index: int, problem: Problem, temperature: float = 1.0) -> Group:
    """Return a group of the right answer alone, with advantage 1."""
    return Group(
        index,
        problem,
        policy.encode(problem),
        temperature,
        [demonstration(policy, policy.answer_tokens(problem))],
        action="imitate",
        advantages=[1.0],
        shots=policy.shots(problem),
        opened=policy.opened(problem),
    )


def demonstrate(
    policy: Policy, task: Task, groups: Sequence[Group], ranks: Ranks = SINGLE
) -> list[Group]:
    """Return a copy of each group without a right completion that shows the right answer.

    The right answer replaces the last completion (LUFFY, arXiv:2504.14945), because a policy that
    is sure of a mistake never samples it. The paper's loss shapes the policy's probability p as
    p / (p + 0.1), whose slope vanishes with p, and such a policy gives the right token 1e-5 or less
    (runs/archive/LOG.md, 2026-11-27). So here the ratio uses the trainer's own log-probabilities:
    the gradient of a token is its advantage times the one of log p.

    The group's action becomes "demonstrate"; the copy is learned from. A group is left alone whose
    target is not right or earns no more than its completions.
    """
    stuck = [
        group
        for group in groups
        if group.problem.target.strip() and not any(score.exact for score in group.scores)
    ]
    answers = []
    for group in ranks.share(stuck):
        right = demonstration(policy, policy.answer_tokens(group.problem))
        answers.append(replace(group, completions=[right], scores=[]))
    score_groups(task, answers)

    shown = []
    for group, answer in zip(stuck, ranks.gather(answers), strict=True):
        (earned,) = answer.scores
        if not earned.exact or earned.reward <= max(group.rewards):
            continue
        scores = [*group.scores[:-1], earned]
        # The answer raises the mean, which those that the reward did not judge must have.
        mean = fmean(score.reward for score in scores if not score.abstained)
        scores = [replace(one, reward=mean) if one.abstained else one for one in scores]
        if mean == earned.reward:  # it is alone
            continue
        copy = replace(
            group,
            completions=[*group.completions[:-1], *answer.completions],
            scores=scores,
            class_name="varied",
            trap=common_trap(scores),
            action="keep",
            advantages=[],
        )
        shown.append(copy)
        group.action = "demonstrate"
    return shown


def draw_answers(stream: ProblemStream, level: int, size: int) -> list[Group]:
    """Return the next `size` right answers, which then count as seen, with advantage 1."""
    problems = stream.windows(stream.take(stream.next_index, [level] * size))
    stream.mark_seen(problems)
    groups = [right_answer(stream.policy, index, problem) for index, problem in problems]
    score_groups(stream.task, groups)
    return groups


def most_updates(steps: int, completions: int) -> int:
    """Return the most updates before a run of `steps` with `completions` each: MAX_SHARE of the
    run, since answers are about as long as completions, but enough for one validation.
    """
    return max(VALIDATE_EVERY, int(MAX_SHARE * steps * completions / ANSWERS))


def warm_start(
    stream: ProblemStream,
    level: int,
    optimizer: Optimizer,
    memory: UpdateMemory,
    validate: Callable[[], float],
    limit: int,
) -> tuple[dict[str, Any], list[Group]]:
    """Imitate right answers of `level` until the held-out score is ENOUGH, or for `limit` updates.

    `validate` returns the policy's held-out score. Returns the figures, which are recorded apart
    from what reinforcement adds, and the answers.
    """
    answers: list[Group] = []
    losses: list[float] = []  # of each update, nats per token
    scores = [[0, validate()]]  # updates made, held-out score
    while scores[-1][1] < ENOUGH and len(losses) < limit:
        groups = draw_answers(stream, level, ANSWERS)
        answers += groups
        losses.append(imitate(stream.policy, optimizer, groups, memory)["loss"])
        if len(losses) % VALIDATE_EVERY == 0 or len(losses) == limit:
            scores.append([len(losses), validate()])

    before, after = scores[0][1], scores[-1][1]
    cause = "its share of the run is spent"
    if after >= ENOUGH:
        cause = "the score is enough for reinforcement"
    figures = {
        "updates": len(losses),
        "answers": len(answers),
        "tokens": sum(len(group.completions[0].tokens) for group in answers),
        "losses": losses,
        "validation_scores": scores,
        "why": f"held-out score {before:.3f} → {after:.3f} after {len(losses)} updates: {cause}",
    }
    return figures, answers
