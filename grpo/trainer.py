"""The training loop. It follows GRPO (arXiv:2402.03300), one station of the data after the other:

    problems ─► sample ─► score ─► classify (─► demonstrate) ─► advantages ─► update ─► observe

Departures from the paper: the loss is DAPO's, without a reference model, unless the settings say
otherwise; a curriculum chooses the level of the problems; the first update of a step compares its
log-probabilities with the sampler's, which is called parity. Before the first step, a policy that
is far from the task may imitate right answers (`imitate`), and in groups without a right completion
one may be shown (`demonstrate`); `--reward-alone` forbids both.

A group whose completions all earn the same has no gradient from its rewards; any other is varied.
The variance monitor (`grpo.variance`) decides what happens to a group without one: by
`on_degenerate` it is skipped (the default) or kept. `Trainer.collect` draws further problems until
`dynamic_sampling` groups teach, that is, vary and are trained on.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property
from statistics import fmean
from typing import Any

from grpo.config import SCALES, Config
from grpo.curriculum import (
    Curriculum,
    Indexed,
    ProblemStream,
    demonstrate,
    doubtful_parts,
    most_updates,
    target_score,
    warm_start,
)
from grpo.data.errors import UserError, shown
from grpo.distributed import SINGLE, Ranks
from grpo.ending import EndWatch
from grpo.evaluate import budgets, score_groups
from grpo.learn.advantages import advantages, own_advantages, token_advantages
from grpo.learn.loss import OwnLoss, load_loss
from grpo.learn.optimizer import Optimizer, default_rate, lr_factor, optimizer_bytes
from grpo.learn.shard import Sharding
from grpo.learn.update import PARITY, FirstPass, UpdateMemory, UpdateSettings, update
from grpo.model.check import MEASURED_SIZE
from grpo.model.policy import Policy
from grpo.model.prompts import format_of
from grpo.records import Group, StepReport, originals, truncated_share
from grpo.rollout.engine import Engine, EngineDecoder
from grpo.rollout.generate import Drafting, sample_groups
from grpo.rollout.sampling import sample_key, truncation
from grpo.tasks.base import Task, calling, credits_of, range_of
from grpo.tasks.supply import Supply
from grpo.variance import VarianceMonitor, reward_metrics

# Prompts a step, and the share of them that must vary, or else dynamic sampling draws more prompts.
# The embedded model learns as fast by the step from 8 prompts as from 16 while most of its groups
# vary (runs/archive/LOG.md, 2026-11-25: "Half the prompts"); a real model learns in half the steps
# from 32 instead of 16 (2026-11-28: "pairs of words, levels where groups vary"). Small models,
# whose steps are quick, end higher from 64 (2026-11-28: "64 prompts for SmolLM2"), and by two
# updates on each rollout (2026-11-28: "Two updates on each rollout of SmolLM2").
BUILTIN_PROMPTS, PROMPTS, SMALL_MODELS_PROMPTS, SMALL_MODELS_EPOCHS = 8, 32, 64, 2
VARIED_SHARE = {True: 1 / 2, False: 1 / 4}  # of the embedded model, and of others

MAX_BATCHES = 4  # of --prompts each: the most that dynamic sampling takes for one step

# The steps in which the learning rate falls to zero once the goal is nearly reached.
ANNEAL_STEPS = 120

# The largest weight of a token that an engine sampled (https://fengyao.notion.site/off-policy-rl).
IMPORTANCE_LIMIT = 2.0

# What a checkpoint saves of a trainer, beside its stream: values, and stations with a state.
VALUES = ("done", "tokens", "varied_share")
STATIONS = ("curriculum", "monitor", "end", "drafting")

# A function of the user's own that is called after each step. Its result is ignored. Numbers that
# it adds to the report's metrics are stored with them; a text as the report's `end` ends the run.
Callback = Callable[[StepReport], Any]


class Trainer:
    """Owns everything that changes during a run; `step` makes one step and reports it.

    Every rank holds an identical trainer. `config` is resolved, as by `load_supply`; the trainer's
    own has the settings that depend on the model, too. The `callbacks` are called after each step,
    on rank 0 alone.
    """

    def __init__(
        self,
        config: Config,
        supply: Supply,
        policy: Policy,
        ranks: Ranks = SINGLE,
        own_loss: OwnLoss | None = None,
        own_advantages: Callable | None = None,
        callbacks: Sequence[Callback] = (),
        engine: Engine | None = None,
    ):
        config = resolve_for_model(config, supply.task, policy)
        assert config.prompts and config.steps and config.epochs, "resolved"
        assert config.learning_rate is not None
        task = supply.task
        self.config = config
        self.prompts = config.prompts  # drawn at a time
        self.epochs = config.epochs  # updates on each rollout
        self.steps = config.steps
        self.task = task
        self.policy = policy
        self.ranks = ranks
        self.callbacks = list(callbacks)

        policy.use(format_of(task, config, config.seed))

        # Where problems and samples come from.
        self.stream = ProblemStream(config, policy, supply)
        self.truncate = truncation(config.top_p)  # the loss shares it
        self.drafting = Drafting()
        self.engine = None
        if config.engine:
            self.engine = EngineDecoder(engine, config.engine, policy, config.top_p, ranks)
        self.curriculum = Curriculum(config.levels_for(task))

        # How rewards become advantages.
        self.monitor = VarianceMonitor(config, range_of(task))
        self.credits = credits_of(task) if config.credit == "alignment" else None
        self.own_advantages = own_advantages
        if own_advantages is None and config.scale not in SCALES:
            raise UserError(
                f"--scale {config.scale}: is a function that was given in Python; give it again, "
                "as grpo.train(advantages=FUNCTION)"
            )

        # How the policy learns from them.
        self.own_loss = own_loss or load_loss(config.loss)
        self.rate = config.learning_rate
        policy.reserved_bytes = policy.weight_bytes + optimizer_bytes(
            sum(p.numel() for p in policy.parameters), policy.parameters[0].element_size()
        )
        sharding = Sharding(policy, ranks) if config.shard else None
        self.optimizer = Optimizer(
            policy.parameters, self.rate, dtype=policy.dtype, ranks=ranks, sharding=sharding
        )
        self.update_memory = UpdateMemory(policy)

        # The progress of the run.
        self.done = 0  # steps
        self.tokens = 0  # sampled so far
        self.varied_share = 1.0  # the share of varied groups among the last prompts
        self.end = EndWatch(config)

        # The step in progress: its groups, to be saved if it fails, and its clock.
        self.current: list[Group] = []
        self.is_sampling = False
        self.timer = StepTimer()

    # --- a step -------------------------------------------------------------------------------

    def step(self) -> StepReport:
        """Make one step of GRPO, and report it."""
        step = self.done + 1

        # Draw problems, sample a group of completions of each, and score them.
        problems, groups = self.collect(step)

        # Leave out the groups without variance, as the variance monitor has decided in `rollout`:
        # all of their advantages would be 0.
        kept = [group for group in groups if group.action == "keep"]

        # The advantage of a completion is its reward, compared with those of its group.
        for group, values in zip(kept, self.compute_advantages(kept), strict=True):
            group.advantages = values

        # Follow the gradient of the clipped surrogate, at a lower rate if fewer groups have one.
        rate = self.learning_rate(step, sum(group.teaches for group in kept) / self.prompts)
        learned = self.update_policy(kept, rate)

        # Open harder levels, raise alarms, and notice the end.
        report = self.observe(step, problems, groups, learned)
        if self.ranks.is_rank0:
            for callback in self.callbacks:
                run_callback(callback, report)
        self.end.asked = self.ranks.on_rank0(lambda: report.end)
        return report

    def collect(self, step: int) -> tuple[list[Indexed], list[Group]]:
        """Sample until `dynamic_sampling` groups teach (0: one batch), but at most MAX_BATCHES.

        Returns the problems and the groups, skipped ones included.
        """
        self.timer = StepTimer()
        self.is_sampling = True
        self.drafting.begin()
        problems: list[Indexed] = []
        groups = self.current = []
        wanted = missing = self.config.dynamic_sampling or 0
        share = self.varied_share
        if self.engine:
            self.engine.update()
            self.timer.lap("engine")
        while True:
            batches = self.batches_needed(missing, len(problems), share)
            # Windows begin as the right answers, which are read first.
            with nullcontext() if self.engine else self.policy.forward.keeping():
                more = self.problems(step, problems, batches)
                problems += more
                groups += self.rollout(step, more)

            varied = sum(group.teaches for group in groups)
            share = varied / len(problems)
            missing = wanted - varied
            if missing <= 0 or len(problems) >= MAX_BATCHES * self.prompts:
                break

        self.drafting.average(self.ranks)
        self.varied_share = share
        self.is_sampling = False
        return problems, groups

    def batches_needed(self, missing: int, drawn: int, share: float) -> int:
        """Return how many batches of --prompts to sample next, after the `drawn` prompts, so that
        `missing` more groups vary if as large a `share` of them varies as last time.
        """
        if not missing:
            return 1
        most = MAX_BATCHES - drawn // self.prompts
        varying = share * self.prompts  # expected groups of a batch
        return most if missing >= most * varying else max(1, round(missing / varying))

    def problems(
        self, step: int, earlier: Sequence[Indexed] = (), batches: int = 1
    ) -> list[Indexed]:
        """Return `batches` times --prompts problems, which a step takes after its `earlier` ones.

        They depend on nothing but the seed, the step, and the state of trainer and policy.
        """
        count = batches * self.prompts
        index = earlier[-1][0] + 1 if earlier else self.stream.next_index
        levels = self.curriculum.levels_for(self.config.seed, step, count, len(earlier))
        problems = self.stream.take(index, levels)
        memory = self.update_memory
        problems = doubtful_parts(self.stream, problems, memory, self.truncate, self.ranks)
        self.timer.lap("problems")
        return problems

    def rollout(self, step: int, problems: Sequence[Indexed]) -> list[Group]:
        """Sample, score and classify these problems; return a group for each.

        With `demonstrate`, a group without a right completion gets the action `demonstrate`, and a
        copy follows whose action is `keep` and whose last completion is the right answer.
        """
        # Each of several ranks samples and scores some of the groups.
        local = self.sample(step, self.ranks.share(problems))
        self.timer.lap("rollout")
        score_groups(self.task, local)
        groups = self.ranks.gather(local)

        # In a control experiment only: shuffle or flatten the rewards. For the 0 see `sample`.
        self.monitor.apply_control(groups, f"{self.config.seed}/{step}/0/{groups[0].index}")

        # Decide what happens to groups without variance: keep or skip.
        self.monitor.classify(groups)
        if self.demonstrates:
            groups += demonstrate(self.policy, self.task, groups, self.ranks)
        self.timer.lap("score")
        return groups

    def sample(self, step: int, problems: Sequence[Indexed]) -> list[Group]:
        """Return an unscored group for each problem."""
        if not problems:
            return []

        config = self.config
        indices, asked = zip(*problems)
        return sample_groups(
            self.policy,
            self.task,
            asked,
            indices=indices,
            # The 0 keeps the random numbers of runs made when a group could be sampled again.
            keys=[
                [sample_key(config.seed, step, index, n, 0) for n in range(config.group_size)]
                for index in indices
            ],
            temperature=config.temperature,
            budgets=budgets(self.policy, self.task, asked, config.max_new_tokens),
            truncate=self.truncate,
            drafting=self.drafting,
            stops_early=True,
            engine=self.engine,
        )

    def compute_advantages(self, kept: list[Group]) -> Sequence[Any]:
        """Return the advantages of each group: one number for each completion, or under
        --credit alignment a list with one number for each of its tokens, from credits that are
        added to the groups' scores.
        """
        if self.own_advantages:
            return own_advantages(self.own_advantages, kept) if kept else []
        if self.credits is None:
            return advantages([group.rewards for group in kept], scale=self.config.scale)

        # Each of several ranks does some of the groups.
        credits = [self.credits(group.problem, group.texts) for group in self.ranks.share(kept)]
        for group, earned in zip(kept, self.ranks.gather(credits), strict=True):
            for n, (score, credit) in enumerate(zip(group.scores, earned, strict=True)):
                # The penalty for not ending is charged to the last position.
                if penalty := score.parts.get("unended"):
                    credit = (*credit, (len(group.texts[n]), penalty))
                group.scores[n] = replace(score, credits=credit)
        return token_advantages(kept, self.policy.decode, scale=self.config.scale)

    def learning_rate(self, step: int, share: float = 1.0) -> float:
        """Return the learning rate at `step` (1, 2, ...).

        Unless the rate is constant, it is multiplied by the `share`, the varied groups by --prompts
        (above 1 it counts as 1): one varied group of 16 would otherwise move the policy as far as
        16. When it was multiplied by the root of the share, the entropy of one run of three
        exploded (runs/decisions.md).
        """
        rate = self.rate * lr_factor(step, self.anneal_from, self.anneal_steps)
        return rate * min(1.0, share) if self.anneal_steps else rate

    def update_policy(self, kept: list[Group], rate: float) -> dict[str, Any]:
        """Run `epochs` updates on the kept groups at a learning rate. Without groups there is none.

        Returns the means of the updates' metrics, as TRL does, with the first one's parity, which
        compares sampler and trainer before the weights change.
        """
        for parameters in self.optimizer.inner.param_groups:
            parameters["lr"] = rate
        if not kept:
            return {}

        first_pass: FirstPass = {}  # what the first update keeps for the later ones
        learning = self.policy, self.optimizer, kept, self.update_settings, self.update_memory
        history = [update(*learning, first_pass) for _ in range(self.epochs)]
        averaged = {
            name: value if name.startswith(PARITY) else fmean(one[name] for one in history)
            for name, value in history[0].items()
            if name != "loss_scale"
        }
        return history[-1] | averaged

    @cached_property
    def update_settings(self) -> UpdateSettings:
        """The settings of an update. dr_grpo divides by the same `max_length` in every step."""
        config = self.config
        clip_low, clip_high = config.clips
        return UpdateSettings(
            kind=config.loss,
            beta=config.beta,
            clip_low=clip_low,
            clip_high=clip_high,
            own_loss=self.own_loss,
            max_length=config.max_new_tokens or self.stream.largest_budget(self._levels),
            truncate=self.truncate,
            importance_limit=IMPORTANCE_LIMIT if self.engine else 0.0,
        )

    @property
    def anneal_steps(self) -> int:
        """The steps in which the learning rate falls to zero; 0 if it stays constant."""
        return 0 if self.config.schedule == "constant" else min(ANNEAL_STEPS, self.steps // 2)

    @property
    def anneal_from(self) -> int:
        """The steps before the learning rate falls: until the goal is nearly reached, or as many as
        leave time for it; all steps if it stays constant.
        """
        latest = self.steps - self.anneal_steps
        reached = self.curriculum.anneal_from if self.anneal_steps else None
        return latest if reached is None else min(reached, latest)

    def observe(
        self, step: int, problems: Sequence[Indexed], groups: list[Group], learned: dict[str, Any]
    ) -> StepReport:
        """Let the monitor, the watch for the end and the curriculum take note; report the step."""
        self.timer.lap("update")
        self.tokens += sum(group.tokens for group in groups)
        repeated = self.stream.mark_seen(problems)

        # Alarms and the end look at the hardest open level, or at all groups of mixed levels.
        level = None if self.stream.supply.mixed else self.curriculum.level
        events = self.policy.take_events() + self.stream.take_events()
        events += self.monitor.observe(groups, level)
        metrics = self.metrics(step, groups, learned)
        metrics |= {"problems/repeated": repeated, "events": events}

        self.end.observe(groups, level, is_last=self.curriculum.is_last)
        decisions = self.curriculum.observe(step, groups)
        if not self.anneal_steps:  # the rate stays
            decisions = [each for each in decisions if each.kind != "anneal"]

        self.done = step
        if self.stopped:
            metrics["stopped"] = self.stopped
        lines = events + [decision.line for decision in decisions]
        return StepReport(step, metrics, groups, lines, decisions)

    def metrics(self, step: int, groups: list[Group], learned: dict[str, Any]) -> dict[str, Any]:
        """Return the line of metrics.jsonl; `learned` are the metrics of the update."""
        sampled = originals(groups)
        lengths = [len(each.tokens) for group in sampled for each in group.completions]
        # The same on all ranks.
        seconds = self.ranks.on_rank0(lambda: time.perf_counter() - self.timer.start)

        return {
            "step": step,
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            **self.config.mark,
            **({"engine": self.config.engine} if self.engine else {}),
            "level": self.curriculum.level,
            **reward_metrics(sampled),
            **self.monitor.metrics(groups),
            **learned,
            **self.drafting.metrics(),
            **self.stream.metrics(self.curriculum.level),
            "learning_rate": self.optimizer.inner.param_groups[0]["lr"],
            "completions/mean_length": fmean(lengths),
            "completions/clipped_ratio": truncated_share(sampled),
            "num_tokens": self.tokens,
            "tokens_per_second": sum(group.tokens for group in groups) / seconds,
            "step_time": seconds,
            **self.timer.parts,
        }

    @property
    def stopped(self) -> str:
        """Why training failed and stops after this step; "" if it continues."""
        return self.end.stopped(self.curriculum.level)

    @property
    def ended(self) -> str:
        """Why no step follows although steps are left; "" if one does."""
        has_fallen = self.anneal_from + self.anneal_steps <= self.done < self.steps
        fallen = "the learning rate has fallen to zero" if has_fallen else ""
        return self.end.ended(self.curriculum.level) or fallen

    # --- before the first step ----------------------------------------------------------------

    def check_fit(self) -> None:
        """Raise UserError if problems, or the wish for demonstrations, do not suit the run."""
        self.stream.check(self._levels)
        if self.config.window and not hasattr(self.task, "window"):
            raise UserError(
                f"--config: window: task {self.config.task} has no windows of answers; leave it out"
            )
        if self.config.demonstrate and not self.knows_answers:
            raise UserError(
                f"--config: demonstrate: task {self.config.task} does not score the target of its "
                "problems as right, so there is nothing to show; leave it out"
            )

    @cached_property
    def demonstrates(self) -> bool:
        """Whether right answers are shown where no completion is right."""
        config = self.config
        if config.demonstrate is not None:
            return config.demonstrate
        is_wanted = config.model != "builtin" and getattr(self.task, "demonstrates", False)
        return is_wanted and config.may_demonstrate and self.knows_answers

    @property
    def _levels(self) -> list[int]:
        """The levels of the run, rising."""
        assert self.config.level is not None, "the configuration is resolved"
        return sorted({*self.curriculum.levels, self.config.level})

    @property
    def knows_answers(self) -> bool:
        """Whether the target of the first problem is scored as right, so that targets can be
        imitated: those of continuous rewards may be no better than other texts.
        """
        ((_, problem),) = self.stream.take(0, self.curriculum.levels[:1])
        score = target_score(self.stream, problem)
        return score is not None and score.exact

    def imitate(self, validate: Callable[[], float]) -> tuple[dict[str, Any], list[Group]]:
        """Imitate right answers until `validate` returns enough, see `warm_start`."""
        limit = most_updates(self.steps, self.prompts * self.config.group_size)
        learning = self.optimizer, self.update_memory
        return warm_start(self.stream, self.curriculum.level, *learning, validate, limit)

    # --- checkpoints --------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the state without tensors, as JSON types."""
        return {
            **{name: getattr(self, name) for name in VALUES},
            **self.stream.state_dict(),
            **{name: getattr(self, name).state_dict() for name in STATIONS},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a state that `state` returned."""
        for name in VALUES:
            setattr(self, name, state[name])
        self.stream.load_state_dict(state)
        for name in STATIONS:
            getattr(self, name).load_state_dict(state[name])


def resolve_for_model(config: Config, task: Task, policy: Policy) -> Config:
    """Fill in the automatic settings that depend on the size of the model."""
    is_builtin = config.model == "builtin"
    hidden_size = policy.causal.config.get_text_config(decoder=True).hidden_size
    is_small = hidden_size <= MEASURED_SIZE and not is_builtin
    default = BUILTIN_PROMPTS if is_builtin else SMALL_MODELS_PROMPTS if is_small else PROMPTS
    prompts = config.prompts or default
    will_vary = config.control != "constant-reward"
    rate = default_rate(hidden_size, is_lora=policy.is_lora)
    if policy.is_lora:
        rate *= getattr(task, "lora_rate_share", 1)

    found: dict[str, Any] = {
        "prompts": prompts,
        "epochs": SMALL_MODELS_EPOCHS if is_small else 1,
        "dynamic_sampling": math.ceil(prompts * VARIED_SHARE[is_builtin]) if will_vary else 0,
        "lora_rank": policy.lora_rank,
        "learning_rate": rate,
    }
    return replace(config, **{name: found[name] for name in found if getattr(config, name) is None})


def run_callback(callback: Callback, report: StepReport) -> None:
    """Call `callback`; UserError if it raises, changes a metric of the trainer's, or adds what is
    no metric or no reason to end.
    """
    where = f"callback {getattr(callback, '__name__', type(callback).__name__)}"
    own = dict(report.metrics)
    with calling(f"{where}, step {report.step}"):
        callback(report)

    for name, value in own.items():  # the record of the run, by which the best checkpoint is known
        if report.metrics.get(name, callback) is not value:
            raise UserError(f"{where}: it changed the metric {name!a}; give its own another name")
    for name in report.metrics.keys() - own.keys():
        if not isinstance(name, str) or not name.isprintable():
            raise UserError(f"{where}: its metric is called {name!a}; give a printable text")
        value = report.metrics[name]
        plain = value.tolist() if hasattr(value, "tolist") else value  # of NumPy or PyTorch
        if type(plain) not in (int, float):
            raise UserError(f"{where}: its metric {name!a} is {shown(value)}; give a number")
        report.metrics[name] = plain
    if not isinstance(report.end, str):
        raise UserError(f"{where}: report.end is {shown(report.end)}; give the reason as a text")


class StepTimer:
    """The seconds that each part of a step takes."""

    def __init__(self) -> None:
        self.start = self.last = time.perf_counter()
        self.parts: dict[str, float] = defaultdict(float)  # seconds by "time/NAME"

    def lap(self, name: str) -> None:
        """Add the time since the last lap to the part `name`."""
        now = time.perf_counter()
        self.parts[f"time/{name}"] += now - self.last
        self.last = now
