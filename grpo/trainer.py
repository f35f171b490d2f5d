"""The loop. It reads as the algorithm (GRPO, arXiv:2402.03300), one station of the data after the
other:

    problems ─► rollout ─► scores (─► control) ─► variance monitor ─► advantages ─► update ─► store

Departures from the paper: groups without variance are skipped, replaced, or drawn again, hotter;
the level of the problems follows a curriculum; a token's log-probability is compared with the
sampler's own; the reference is optional.
"""

import ctypes
import math
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import count
from statistics import fmean
from typing import Any

import torch

from grpo.config import Config
from grpo.curriculum.ladder import Curriculum
from grpo.curriculum.warm_start import WarmStart, most_updates, right_answer, warm_start
from grpo.distributed import ALONE, Ranks
from grpo.learn.advantages import advantages
from grpo.learn.credit import token_advantages
from grpo.learn.imitate import imitate
from grpo.learn.optimizer import Optimizer, maker
from grpo.learn.update import UpdateSettings, update
from grpo.model.memory import optimizer_bytes
from grpo.model.policy import Policy
from grpo.records import Group, StepReport, StepSummary
from grpo.rollout.generate import budget_for, fitting, generate
from grpo.rollout.sampling import sample_key, truncation
from grpo.rollout.speculative import AcceptanceModel
from grpo.variance import COLLAPSED, VarianceMonitor, classify, common_trap
from grpo.verdict import SOLVED_STEPS, Progress
from tasks.base import (
    Problem,
    Task,
    UserError,
    credits_of,
    declared_budget,
    draft_of,
    is_right,
    range_of,
    scores_of,
)
from tasks.supply import Supply

MOST_BATCHES = 4  # of prompts that dynamic sampling draws for one step


class Trainer:
    """Owns everything that changes while a run goes on; `step` makes one step and reports it. Of
    several `ranks` each has one, all alike.
    """

    def __init__(
        self,
        config: Config,
        task: Task,
        policy: Policy,
        supply: Supply | None = None,
        ranks: Ranks = ALONE,
    ):
        self.config, self.task, self.policy, self.ranks = config, task, policy, ranks
        policy.use(config.prompt_format(task))
        self.supply = supply or Supply(task, seed=config.seed, kind=config.problems)
        self.truncate = truncation(config.top_k, config.top_p)
        if policy.device.type == "cpu":
            keep_freed_memory()
        assert config.learning_rate is not None, "the configuration is resolved"
        self.learning_rate = config.learning_rate
        self.optimizer = Optimizer(
            policy.parameters,
            maker(config.optimizer, rate=self.learning_rate, weight_decay=config.weight_decay),
            ranks=ranks,
            shard=config.shard,
        )
        self.curriculum = curriculum_of(config)
        self.monitor = VarianceMonitor(
            config.on_degenerate,
            temperature=config.temperature,
            threshold=config.variance_threshold,
            retries=config.retries,
            heat=config.temperature_factor,
            ceiling=config.temperature_ceiling,
        )
        self.reward_range = range_of(task)
        self.draft, self.drafting = draft_of(task), AcceptanceModel(config.draft)
        self.credits = credits_of(task) if config.credit == "alignment" else None
        self.progress = Progress(config.patience)
        self.started: WarmStart | None = None  # what imitation came to, where there was any
        self.solved = ""  # why the run ends early, once a held-out check has confirmed it
        self.done = 0  # steps
        self.drawn = 0  # the next index of the training stream
        self.tokens = 0  # sampled in all
        self.seen: dict[str, None] = {}  # keys of the problems trained on, in order
        self.inherited = 0  # how many of them an earlier run had trained the policy on
        policy.reserved_bytes = policy.weight_bytes + optimizer_bytes(
            sum(p.numel() for p in policy.parameters),
            policy.parameters[0].element_size(),
            config.optimizer,
            ranks.size if config.shard else 1,
        )
        self.micro_tokens = config.micro_tokens or policy.tokens_at_once
        if config.gradient_checkpointing:
            policy.enable_gradient_checkpointing()
        self.said: list[str] = []  # what happened in the step under way, for the console
        # The groups of the step under way, for the record if it fails.
        self.current: list[Group] = []

    def step(self) -> StepReport:
        """Make one step: sample groups, score them, keep those that teach, and learn from them."""
        step, clock = self.done + 1, _Clock()
        self.drafting.begin()

        # Sample until enough groups vary; `groups` has every try, discarded ones too.
        problems: list[tuple[int, Problem]] = []
        kept: list[Group] = []
        groups = self.current = []
        while more := self.problems(step, problems):
            problems += more
            groups += self.rollout(step, more, clock)
            kept = [group for group in groups if group.action == "keep"]

            has_enough = len(kept) >= (self.config.dynamic_sampling or 0)
            if has_enough or len(problems) >= MOST_BATCHES * self.config.prompts:
                break

        by_group: Sequence[Any] = self.compute_advantages(kept)
        for group, values in zip(kept, by_group, strict=True):
            group.advantages = values
        learned = self.update_policy(step, kept)
        clock.lap("update")

        metrics = self.metrics(step, groups, learned, clock)
        metrics["events"] = self.said + self.monitor.observe(groups, self.curriculum.level)
        self.said = []

        self.progress.observe(groups)
        summary = step_summary(step, groups, seconds=metrics["step_time"])
        decisions = self.curriculum.observe(summary)

        self.seen.update(dict.fromkeys(problem.key for _, problem in problems))
        self.done, self.drawn = step, problems[-1][0] + 1
        if self.stopped:
            metrics["stopped"] = self.stopped
        return StepReport(
            step,
            metrics,
            groups,
            metrics["events"] + [decision.line for decision in decisions],
            decisions,
        )

    @property
    def stopped(self) -> str:
        """Why training failed and stops after this step; "" if it continues.

        Either a collapse was alarmed under `on_alarm: stop`, or no group taught anything for
        --patience steps.
        """
        collapse = self.monitor.collapse if self.config.on_alarm == "stop" else []
        return "; ".join(collapse) or self.progress.stopped

    @property
    def ended(self) -> str:
        """Why no step follows this one although steps are left; "" if one does."""
        return self.stopped or self.solved or self.progress.exhausted or self.curriculum.ended

    @property
    def seems_solved(self) -> bool:
        """Whether a held-out check may end the run: every group of the last steps is solved.

        Only at the last level, and again every `promote_every` steps while that lasts.
        """
        since = self.progress.solved - SOLVED_STEPS
        is_last = self.curriculum.level == self.curriculum.rungs[-1]
        return (
            bool(self.progress.patience)
            and self.config.control == "none"  # a control's rewards say nothing about the policy
            and is_last
            and since >= 0
            and since % self.config.promote_every == 0
        )

    def problems(
        self, step: int, earlier: Sequence[tuple[int, Problem]] = ()
    ) -> list[tuple[int, Problem]]:
        """Return the (index in the training stream, problem) that a step goes on with after its
        `earlier` ones: a pure function of seed, step and state. No index comes twice, those whose
        problem does not fit the context are passed over, and none is left when the budget is.
        """
        problems, index = list(earlier), earlier[-1][0] + 1 if earlier else self.drawn
        for level in self.curriculum.levels_for(
            self.config.seed, step, self.config.prompts, len(earlier)
        ):
            problems.append(self.next_problem(index, level))
            index = problems[-1][0] + 1
        return problems[len(earlier) : self.affordable([problem for _, problem in problems])]

    def next_problem(self, index: int, level: int) -> tuple[int, Problem]:
        """Return the first problem of the training stream from `index` on that fits the context,
        and its own index.
        """
        passed: list[Problem] = []
        stream = (self.supply.at(i, level) for i in count(index))
        problem = next(fitting(self.policy, stream, passed, self.config.max_new_tokens))
        return index + len(passed), problem

    def affordable(self, problems: Sequence[Problem]) -> int:
        """Return how many of `problems`, from the first on, a step can take: problems x group size
        x the largest budget <= `step_tokens`, or 1.
        """
        if not self.config.step_tokens:
            return len(problems)
        largest = 0
        for number, problem in enumerate(problems, start=1):
            largest = max(largest, self.budget(self.policy.encode(problem), problem))
            if number * self.config.group_size * largest > self.config.step_tokens:
                return max(1, number - 1)
        return len(problems)

    def budget(self, prompt: tuple[int, ...], problem: Problem) -> int:
        """Return the most new tokens that a completion of `problem` may take after its `prompt`."""
        asked, declared = self.config.max_new_tokens, declared_budget(self.task, problem.level)
        return budget_for(self.policy, prompt, problem.target, asked, declared)

    def rollout(
        self, step: int, problems: Sequence[tuple[int, Problem]], clock: "_Clock"
    ) -> list[Group]:
        """Return the step's groups, scored and judged; degenerate ones are drawn again as the
        monitor decides.
        """
        groups, attempt = [], 0
        waiting = [(index, problem, self.monitor.temperature) for index, problem in problems]
        while waiting:
            mine = self.sample(step, self.ranks.share(waiting), attempt)
            clock.lap("rollout")
            for group in mine:
                group.scores = scores_of(self.task, group.problem, group.texts)
            clock.lap("score")
            drawn = self.ranks.gather(mine)
            if self.ranks.size > 1:
                clock.lap("wait")
            apply_control(
                drawn,
                self.config.control,
                reward_range=self.reward_range,
                key=f"{self.config.seed}/{step}/{attempt}/{drawn[0].index}",
            )
            for group in drawn:
                group.verdict = classify(
                    group.rewards,
                    group.texts,
                    threshold=self.config.variance_threshold,
                    reward_range=self.reward_range,
                )
                group.trap = common_trap(group.scores)
                group.action = self.monitor.decide(group.verdict, attempt)
            clock.lap("score")
            groups += drawn
            waiting = [
                (group.index, group.problem, self.monitor.retry_temperature(group))
                for group in drawn
                if group.action == "resample"
            ]
            attempt += 1
        return groups

    def imitate(self, look: Callable[[], float]) -> list[Group]:
        """Imitate right answers of the training split until the policy earns something
        (`grpo.curriculum.warm_start`).

        `look` returns the held-out score. Returns the answers; what came of them is `started`.
        """
        self.started, answers = warm_start(
            self.answers,
            partial(
                imitate,
                self.policy,
                self.optimizer,
                micro_tokens=self.micro_tokens,
                max_grad_norm=self.config.max_grad_norm,
            ),
            look,
            most_updates(self.config.steps or 0, self.config.prompts * self.config.group_size),
        )
        return answers

    @property
    def knows_answers(self) -> bool:
        """Whether the target of the next problem is scored as right."""
        _, problem = self.next_problem(self.drawn, self.curriculum.level)
        (score,) = scores_of(self.task, problem, [problem.target])
        return is_right(score)

    def answers(self, size: int) -> list[Group]:
        """Draw the next `size` problems of the training stream at the current level, with their
        right answers.
        """
        groups: list[Group] = []
        while len(groups) < size:
            index, problem = self.next_problem(self.drawn, self.curriculum.level)
            groups.append(right_answer(self.policy, self.task, index, problem))
            self.drawn = index + 1
            self.seen[problem.key] = None
        return groups

    def sample(
        self, step: int, problems: Sequence[tuple[int, Problem, float]], attempt: int
    ) -> list[Group]:
        """Return an unscored group for each (index in the stream, problem, temperature)."""
        if not problems:
            return []
        prompts = [self.policy.encode(problem) for _, problem, _ in problems]
        keys = [
            [
                sample_key(self.config.seed, step, index, sample, attempt)
                for sample in range(self.config.group_size)
            ]
            for index, _, _ in problems
        ]
        budgets = [
            self.budget(prompt, problem) for prompt, (_, problem, _) in zip(prompts, problems)
        ]
        answers = generate(
            self.policy,
            prompts,
            keys=keys,
            temperatures=[temperature for _, _, temperature in problems],
            budgets=budgets,
            truncate=self.truncate,
            drafting=self.drafting,
            guesses=[self.draft(problem) for _, problem, _ in problems] if self.draft else None,
        )
        return [
            Group(
                index,
                problem,
                prompt,
                temperature,
                completions,
                attempt,
                shots=self.policy.shots(problem),
            )
            for (index, problem, temperature), prompt, completions in zip(
                problems, prompts, answers
            )
        ]

    def compute_advantages(self, kept: list[Group]) -> list[list[float]] | list[list[list[float]]]:
        """Return the advantages of each group: a number a completion, or by --credit alignment a
        list of one for each token.
        """
        if self.credits is None:
            return advantages([group.rewards for group in kept], scale=self.config.scale)
        for group in kept:
            group.scores = [
                replace(score, credits=credits)
                for score, credits in zip(
                    group.scores, self.credits(group.problem, group.texts), strict=True
                )
            ]
        return token_advantages(kept, self.policy.decode, scale=self.config.scale)

    def update_policy(self, step: int, kept: list[Group]) -> dict[str, float]:
        """Run `epochs` updates on the kept groups.

        Returns the last update's metrics with the first one's parity, which compares sampler and
        trainer before the weights change. Without groups there is no update.
        """
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = self.learning_rate * self.lr_factor(step)
        if not kept:
            return {}

        settings = self.update_settings(kept)
        first_pass: dict = {}  # log-probabilities of the first epoch, for importance_limit
        run = partial(update, self.policy, self.optimizer, kept, settings, before=first_pass)
        history = [self.update_with_oom_retry(run) for _ in range(self.config.epochs)]

        parity = {name: value for name, value in history[0].items() if name.startswith("parity/")}
        return history[-1] | parity

    def update_settings(self, groups: Sequence[Group]) -> UpdateSettings:
        """Return how the configuration asks to learn from `groups`."""
        config = self.config
        clip_low, clip_high = config.clips
        return UpdateSettings(
            kind=config.loss,
            beta=config.beta,
            clip_low=clip_low,
            clip_high=clip_high,
            max_length=max(
                self.budget(self.policy.encode(group.problem), group.problem) for group in groups
            ),
            max_grad_norm=config.max_grad_norm,
            truncate=self.truncate,
            importance_limit=config.importance_limit,
            parity_limit=config.parity_limit,
        )

    def update_with_oom_retry(self, run: Callable[..., dict[str, Any]]) -> dict[str, Any]:
        """Make one update, `run(micro_tokens=...)`; retry with less memory when it runs out.

        First the micro-batches are halved, which changes no gradient; then activations are
        recomputed in the backward pass. Raises UserError when a single completion does not fit.
        """
        while True:
            try:
                return run(micro_tokens=self.micro_tokens)
            except torch.OutOfMemoryError as error:
                longest = max(
                    len(group.prompt) + len(completion.tokens)
                    for group in self.current
                    for completion in group.completions
                )
                if self.micro_tokens <= longest and self.policy.gradient_checkpointing:
                    raise UserError(
                        f"out of memory in the update of a single completion of {longest} tokens; "
                        "give a smaller model, fewer --words, or --lora-rank 16"
                    ) from error

            self.optimizer.clear()
            torch.cuda.empty_cache()

            if self.micro_tokens > longest:
                self.micro_tokens = max(longest, self.micro_tokens // 2)
                self.said.append(
                    f"out of memory: micro-batches of {self.micro_tokens:,} tokens from now on "
                    "(the gradient is the same)"
                )
            else:
                self.policy.enable_gradient_checkpointing()
                self.said.append(
                    "out of memory: activations are computed twice from now on (the gradient is "
                    "the same)"
                )

    def lr_factor(self, step: int) -> float:
        """Return the share of the learning rate that `step` (1, 2, ...) learns with: linear
        warm-up, then constant or cosine.

        A constant rate does not know how long the run is, so a run that goes on for longer than
        planned is the longer run. Cosine falls from the full rate, at the first step after the
        warm-up, to almost zero at the last step; its warm-up is at most all steps but the last, so
        that the full rate is reached however short the run. On a ladder it begins to fall when the
        last level is reached, so that the hardest level is not left with the smallest rates.
        """
        warmup, steps = self.config.warmup, self.config.steps
        if self.config.schedule != "cosine":
            return min(1.0, step / (warmup + 1))

        assert steps is not None, "the configuration is resolved"
        warmup = min(warmup, steps - 1)
        if step <= warmup:
            return step / (warmup + 1)
        if not self.curriculum.is_last:
            return 1.0
        start = max(warmup, self.curriculum.steps_before_last)
        return 0.5 * (1 + math.cos(math.pi * (step - start - 1) / (steps - start)))

    def metrics(
        self, step: int, groups: list[Group], learned: dict[str, float], clock: "_Clock"
    ) -> dict[str, Any]:
        """Return the step's line for metrics.jsonl; figures of reward and length are over first
        tries.
        """
        first = [group for group in groups if group.attempt == 0]
        completions = [completion for group in first for completion in group.completions]
        scores = [score for group in first for score in group.scores]
        tokens = sum(group.tokens for group in groups)
        self.tokens += tokens
        new = {group.problem.key for group in first} - self.seen.keys()
        size = self.supply.family_size(self.curriculum.level)
        seconds = self.ranks.first(clock.total)  # rungs may be limited by it
        return {
            "step": step,
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            **self.config.mark,
            "level": self.curriculum.level,
            "reward": fmean(score.reward for score in scores),
            "reward_std": fmean(group.spread for group in first),
            "value": fmean(score.value for score in scores),
            "exact": fmean(score.exact for score in scores),
            **self.monitor.metrics(groups),
            **learned,
            **self.drafting.metrics(),
            "problems/seen": len(self.seen) + len(new),
            "problems/repeated": 1 - len(new) / len(first),
            **(
                {"problems/family_share": (len(self.seen) - self.inherited + len(new)) / size}
                if size
                else {}
            ),
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "completions/mean_length": fmean(len(completion.tokens) for completion in completions),
            "completions/clipped_ratio": fmean(
                completion.finish == "length" for completion in completions
            ),
            "num_tokens": self.tokens,
            "tokens_per_second": tokens / seconds,
            "step_time": seconds,
            **{f"time/{name}": value for name, value in clock.laps.items()},
        }

    def state(self) -> dict[str, Any]:
        """Return all that is not a tensor, as JSON values."""
        return {
            "done": self.done,
            "drawn": self.drawn,
            "tokens": self.tokens,
            "seen": list(self.seen),
            "inherited": self.inherited,
            "curriculum": self.curriculum.state_dict(),
            "monitor": self.monitor.state_dict(),
            "progress": self.progress.state_dict(),
            "solved": self.solved,
            "drafting": self.drafting.state_dict(),
            "started": self.started.to_json() if self.started else None,
        }

    def begin_after(self, state: dict[str, Any]) -> None:
        """Begin with the policy of an earlier run, whose `state` this was.

        What that was trained on counts as seen. Fresh problems go on where its stream ended, for
        the two runs share it where they share seed, task and level.
        """
        self.seen = dict.fromkeys(state["seen"])
        self.inherited = len(self.seen)
        if self.config.problems == "fresh" and not self.config.dataset:
            self.drawn = state["drawn"]

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken."""
        self.done, self.drawn, self.tokens, self.seen = (
            state["done"],
            state["drawn"],
            state["tokens"],
            dict.fromkeys(state["seen"]),
        )
        self.inherited = state.get("inherited", 0)  # older versions had none
        self.curriculum.load_state_dict(state["curriculum"])
        self.monitor.load_state_dict(state["monitor"])
        self.progress.load_state_dict(state["progress"])
        self.solved = state["solved"]
        self.drafting.load_state_dict(state["drafting"])
        if state["started"]:
            self.started = WarmStart(**state["started"])


def curriculum_of(config: Config, rungs: Sequence[int] = ()) -> Curriculum:
    """Return the ladder that is asked for, of one level or more; with other levels where `rungs`
    are given.
    """
    rungs = list(rungs) or config.rungs
    promote_by, promote_at = config.promotion
    return Curriculum(
        rungs,
        promote_by=promote_by,
        promote_at=promote_at,
        window=config.promote_window,
        promote_every=config.promote_every,
        replay=config.replay,
        rung_seconds=60 * config.rung_minutes,
        rung_tokens=config.rung_tokens,
        stop=bool(config.curriculum) and config.stop_when_climbed,
    )


def keep_freed_memory() -> None:
    """Let glibc keep freed memory, up to 2 GB, where it would give arrays back to the system and
    have them zeroed anew: a tenth of an update.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is not None and hasattr(libc, "mallopt"):
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD


def apply_control(
    groups: Sequence[Group],
    control: str,
    key: str,
    reward_range: tuple[float, float] | None = (0.0, 1.0),
) -> None:
    """Take the information out of the rewards, for a control run; scores' values and parts stay
    true.

    "shuffled-rewards" permutes them over all completions of `groups`, "constant-reward" makes each
    the middle of the `reward_range` (0.5 where that is unknown), "none" is a real run.
    """
    rewards = [score.reward for group in groups for score in group.scores]
    if control == "shuffled-rewards":
        random.Random(f"control/{key}").shuffle(rewards)
    elif control == "constant-reward":
        rewards = [fmean(reward_range or (0.0, 1.0))] * len(rewards)
    paid = iter(rewards)
    for group in groups:
        group.scores = [replace(score, reward=next(paid)) for score in group.scores]


class _Clock:
    """Where the time of a step goes, in seconds."""

    def __init__(self) -> None:
        self.start = self.last = time.perf_counter()
        self.laps: dict[str, float] = defaultdict(float)

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] += now - self.last
        self.last = now

    def total(self) -> float:
        return time.perf_counter() - self.start


def step_summary(step: int, groups: list[Group], *, seconds: float) -> StepSummary:
    """Return the step as the curriculum sees it: first tries, but the tokens of all."""
    first = [group for group in groups if group.attempt == 0]
    values, collapsed = defaultdict(list), defaultdict(list)
    for group in first:
        values[group.problem.level].append(fmean(score.value for score in group.scores))
        collapsed[group.problem.level].append(group.verdict in COLLAPSED)
    tokens = sum(group.tokens for group in groups)
    return StepSummary(step, dict(values), dict(collapsed), seconds, tokens)
