"""The training loop. It follows GRPO (arXiv:2402.03300), one station of the data after the other:

    problems ─► sample ─► score (─► control) ─► classify ─► advantages ─► update ─► observe

Departures from the paper: the loss is DAPO's, without a reference model, unless the settings say
otherwise; groups without variance are kept, skipped, replaced or sampled again; a curriculum
chooses the level of the problems; every update compares its log-probabilities with the sampler's.

The file is longer than 400 lines, because what a checkpoint saves of the trainer (`state`,
`restore`) stands beside the attributes that it saves.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property, partial
from statistics import fmean
from typing import Any

from grpo.config import Config
from grpo.curriculum.demonstrations import demonstrate
from grpo.curriculum.warm_start import WarmStart, most_updates, warm_start
from grpo.distributed import SINGLE, Ranks
from grpo.early_stop import EarlyStop
from grpo.evaluate import score_groups
from grpo.group_metrics import first_tries
from grpo.learn.advantages import advantages, token_advantages
from grpo.learn.loss import load_loss
from grpo.learn.optimizer import lr_factor
from grpo.learn.update import PARITY, FirstPass, UpdateMemory, imitate, update
from grpo.model.policy import Policy
from grpo.records import Group, StepReport, truncated_share
from grpo.rollout.memory import rollout_memory
from grpo.training.build import (
    Parts,
    build_curriculum,
    build_monitor,
    build_optimizer,
    reserved_bytes,
    update_settings,
)
from grpo.training.callbacks import run_callback
from grpo.training.control import apply_control
from grpo.training.host_memory import keep_freed_memory
from grpo.training.imitation import draw_answers, has_right_targets, no_answers
from grpo.training.metrics import (
    StepTimer,
    length_metrics,
    reward_metrics,
    speed_metrics,
    step_summary,
)
from grpo.training.problems import Indexed, ProblemStream
from grpo.training.sampler import GroupRequest, GroupSampler
from tasks.base import credits_of
from tasks.scoring import range_of
from tasks.supply import Supply

MAX_BATCHES = 4  # of --prompts each: the most that dynamic sampling takes for one step


class Trainer:
    """Owns everything that changes during a run; `step` makes one step and reports it.

    Every rank holds an identical trainer. `config` is resolved (`grpo.resolve`,
    `grpo.training.build.with_learning_rate`); `grpo.make_trainer` does that.
    """

    def __init__(self, config: Config, parts: Parts, policy: Policy, ranks: Ranks = SINGLE):
        assert config.prompts is not None, "the configuration is resolved"
        task = parts.task
        self.config = config
        self.prompts = config.prompts  # drawn at a time
        self.task = task
        self.policy = policy
        self.ranks = ranks

        policy.use(config.prompt_format(task))
        if policy.device.type == "cpu":
            keep_freed_memory()

        # Where problems and samples come from.
        supply = parts.supply or Supply(task, seed=config.seed, kind=config.problems)
        self.stream = ProblemStream(config, task, policy, supply)
        self.sampler = GroupSampler(config, task, policy, self.stream)
        self.curriculum = build_curriculum(config, config.levels_for(task))

        # How rewards become advantages.
        self.reward_range = range_of(task)
        self.monitor = build_monitor(config)
        self.credits = credits_of(task) if config.credit == "alignment" else None

        # How the policy learns from them.
        self.own_loss = parts.own_loss or load_loss(config.loss)
        self.optimizer = build_optimizer(config, policy, ranks)
        policy.reserved_bytes = reserved_bytes(policy)
        if config.gradient_checkpointing:
            policy.enable_gradient_checkpointing()
        self.update_memory = UpdateMemory(policy, config.micro_tokens)

        self.callbacks = list(parts.callbacks)

        # The progress of the run.
        self.done = 0  # steps
        self.tokens = 0  # sampled so far
        self.kept_share = 1.0  # of the last step's prompts, those whose group taught something
        self.early_stop = EarlyStop(config.patience)
        self.imitation: WarmStart | None = None  # the result of the warm start, if there was one
        self.solved_reason = ""  # why the run ends early, once a validation check has confirmed it
        self.current: list[Group] = []  # of the step in progress, to be saved if it fails

    def check_fit(self) -> None:
        """Raise UserError if a level of the run does not fit the context or the budget, if the chat
        template refuses or drops turns, or if right answers are to be shown and the task has none.
        """
        self.stream.check_conversations()
        for level in self._levels:
            self.stream.check_fit(level)
        if self.config.demonstrate and not self.knows_answers:
            raise no_answers("--config: demonstrate", self.config.task, "show; leave it out")

    @property
    def _levels(self) -> list[int]:
        """The levels of the run, rising."""
        assert self.config.level is not None, "the configuration is resolved"
        return sorted({*self.curriculum.levels, self.config.level})

    @cached_property
    def max_length(self) -> int:
        """The number of tokens by which dr_grpo divides, the same in every step.

        It is --max-new-tokens, or else the largest budget of the first problems of each level.
        """
        return self.config.max_new_tokens or self.stream.largest_budget(self._levels)

    def step(self) -> StepReport:
        """Make one step: sample groups, score them, keep those that teach, and learn from them."""
        step = self.done + 1
        timer = StepTimer()
        problems, groups = self.collect(step, timer)
        kept = [group for group in groups if group.action == "keep"]

        by_group: Sequence[Any] = self.compute_advantages(kept)
        for group, values in zip(kept, by_group, strict=True):
            group.advantages = values

        learned = self.update_policy(kept, self.learning_rate(step))
        timer.lap("update")

        report = self.observe(step, problems, groups, learned, timer)
        if self.ranks.is_rank0:
            for callback in self.callbacks:
                run_callback(callback, report)
        return report

    def collect(self, step: int, timer: StepTimer) -> tuple[list[Indexed], list[Group]]:
        """Sample until enough groups vary (`dynamic_sampling`); return the problems and the groups.

        The groups are those of every try, discarded ones included.
        """
        acceptance = self.sampler.acceptance
        acceptance.begin()
        problems: list[Indexed] = []
        groups = self.current = []
        wanted = missing = self.config.dynamic_sampling or 0
        while more := self.problems(step, problems, self.batches(missing, len(problems))):
            problems += more
            groups += self.rollout(step, more, timer)

            varied = sum(group.teaches for group in groups)
            self.kept_share = varied / len(problems)
            missing = wanted - varied
            if missing <= 0 or len(problems) >= MAX_BATCHES * self.prompts:
                break

        acceptance.take_mean(self.ranks.gather([acceptance.counts]))
        return problems, groups

    def batches(self, missing: int, drawn: int) -> int:
        """Return how many batches of --prompts to sample next, so that `missing` more groups vary.

        They are sampled together, which is faster than one after the other. Their number assumes
        that as large a share of the groups varies as last time. With the prompts that the step has
        `drawn` already, they are at most `MAX_BATCHES`.
        """
        if not missing:
            return 1
        most = MAX_BATCHES - drawn // self.prompts
        varying = self.kept_share * self.prompts  # expected groups of a batch
        return most if missing >= most * varying else max(1, round(missing / varying))

    def problems(
        self, step: int, earlier: Sequence[Indexed] = (), batches: int = 1
    ) -> list[Indexed]:
        """Return the problems that a step takes next, after its `earlier` ones.

        They are `batches` times --prompts, or fewer if the step's token budget is reached. They
        depend on nothing but the seed, the step and the trainer's state.
        """
        count = batches * self.prompts
        levels = self.curriculum.levels_for(self.config.seed, step, count, len(earlier))
        return self.stream.following(levels, earlier)

    def rollout(self, step: int, problems: Sequence[Indexed], timer: StepTimer) -> list[Group]:
        """Return the groups of these problems, sampled, scored and classified, every try.

        The monitor decides which degenerate groups are sampled again, and at which temperature.
        With `demonstrate`, copies follow that show the right answer where no completion is right.
        """
        groups: list[Group] = []
        attempt = 0
        temperature = self.monitor.temperature
        requests = [GroupRequest(index, problem, temperature) for index, problem in problems]

        while requests:
            local = self.sampler.sample(step, self.ranks.share(requests), attempt)
            timer.lap("rollout")

            self.score(local)
            timer.lap("score")

            tried = self.ranks.gather(local)
            if self.ranks.size > 1:
                timer.lap("wait")

            key = f"{self.config.seed}/{step}/{attempt}/{tried[0].index}"
            apply_control(tried, self.config.control, key, self.reward_range)
            self.monitor.classify(tried, self.reward_range)
            timer.lap("score")

            groups += tried
            attempt += 1
            requests = [
                GroupRequest(group.index, group.problem, self.monitor.retry_temperature(group))
                for group in tried
                if group.action == "resample"
            ]
        if self.config.demonstrate:
            groups += demonstrate(self.policy, self.score, groups, self.ranks)
            timer.lap("score")
        return groups

    def score(self, groups: Sequence[Group]) -> None:
        """Fill in the scores of groups."""
        score_groups(self.task, groups)

    def compute_advantages(self, kept: list[Group]) -> list[list[float]] | list[list[list[float]]]:
        """Return the advantages of each group: one number for each completion, or under
        --credit alignment a list with one number for each of its tokens.
        """
        if self.credits is None:
            return advantages([group.rewards for group in kept], scale=self.config.scale)

        # Each of several ranks does some of the groups.
        credits = [self.credits(group.problem, group.texts) for group in self.ranks.share(kept)]
        for group, earned in zip(kept, self.ranks.gather(credits), strict=True):
            group.scores = [
                # The end of the text settles what a right answer without an end loses.
                replace(score, credits=(*credit, (len(text), score.parts["unended"])))
                if score.parts.get("unended")
                else replace(score, credits=credit)
                for score, credit, text in zip(group.scores, earned, group.texts, strict=True)
            ]
        return token_advantages(kept, self.policy.decode, scale=self.config.scale, ranks=self.ranks)

    def update_policy(self, kept: list[Group], rate: float) -> dict[str, float]:
        """Run `epochs` updates on the kept groups at a learning rate. Without groups there is none.

        Returns the means of the updates' metrics, as TRL does, with the first one's parity, which
        compares sampler and trainer before the weights change. Under ``truncated: mask`` truncated
        completions take no part, and without others there is no update either.
        """
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = rate
        if not kept:
            return {}

        masked = {}
        if self.config.truncated == "mask":
            masked = {"completions/masked_ratio": truncated_share(kept)}
            if all(group.is_truncated for group in kept):
                return masked

        settings = update_settings(
            self.config,
            max_length=self.max_length,
            truncate=self.sampler.truncate,
            own_loss=self.own_loss,
        )
        first_pass: FirstPass = {}  # the first epoch fills it, see `update`
        history = [
            update(self.policy, self.optimizer, kept, settings, self.update_memory, first_pass)
            for _ in range(self.config.epochs)
        ]

        averaged = {
            name: value if name.startswith(PARITY) else fmean(one[name] for one in history)
            for name, value in history[0].items()
            if name != "loss_scale"
        }
        return history[-1] | averaged | masked

    @staticmethod
    def _number_worst_tokens(learned: dict[str, Any], groups: list[Group]) -> None:
        """Name the group of each of "parity/worst" by its number in the step, not in the stream."""
        numbers = {
            group.index: number for number, group in enumerate(groups) if group.action == "keep"
        }
        for token in learned.get("parity/worst", ()):
            token["group"] = numbers[token["group"]]

    def learning_rate(self, step: int) -> float:
        """Return the learning rate at `step` (1, 2, ...)."""
        assert self.config.learning_rate is not None, "the configuration is resolved"
        return self.config.learning_rate * self.lr_factor(step)

    def lr_factor(self, step: int) -> float:
        """Return the factor on the learning rate at `step` (1, 2, ...)."""
        return lr_factor(
            step,
            schedule=self.config.schedule or "constant",
            warmup=self.config.warmup,
            steps=self.config.steps,
            cosine_start=self.curriculum.steps_before_last,
        )

    def observe(
        self,
        step: int,
        problems: Sequence[Indexed],
        groups: list[Group],
        learned: dict[str, float],
        timer: StepTimer,
    ) -> StepReport:
        """Let the monitor, the early stop and the curriculum take note of a step; report it."""
        self._number_worst_tokens(learned, groups)
        self.tokens += sum(group.tokens for group in groups)
        metrics = self.metrics(step, groups, learned, timer)
        events = rollout_memory(self.policy).take_notes() + self.update_memory.take_notes()
        # In a mixed data set every group counts, on a ladder those of its level.
        level = self.curriculum.level
        events += self.monitor.observe(groups, None if self.config.mixed else level)
        metrics["events"] = events

        self.early_stop.observe(groups, level)
        decisions = self.curriculum.observe(step_summary(step, groups))
        if not decisions and self.early_stop.exhausted:
            decisions = self.curriculum.move_on(step, self.early_stop.exhausted)

        self.stream.mark_seen(problems)
        self.done = step
        if self.stopped:
            metrics["stopped"] = self.stopped
        lines = events + [decision.line for decision in decisions]
        return StepReport(step, metrics, groups, lines, decisions)

    def metrics(
        self, step: int, groups: list[Group], learned: dict[str, float], timer: StepTimer
    ) -> dict[str, Any]:
        """Return the step's line of metrics.jsonl. `groups` has every try; `learned` are the
        metrics of the update.

        Metrics of rewards and lengths count only first tries.
        """
        first = first_tries(groups)
        tokens = sum(group.tokens for group in groups)

        # Rank 0's time, so that all ranks agree when a level's budget of time is spent.
        seconds = self.ranks.on_rank0(timer.total)

        return {
            "step": step,
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            **self.config.mark,
            "level": self.curriculum.level,
            **reward_metrics(first),
            **self.monitor.metrics(groups),
            **learned,
            **self.sampler.acceptance.metrics(),
            **self.stream.metrics(first, self.curriculum.level),
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            **length_metrics(first),
            **speed_metrics(tokens, self.tokens, seconds),
            **timer.metrics(),
        }

    @property
    def stopped(self) -> str:
        """Why training failed and stops after this step; "" if it continues.

        Either an alarm of collapse was raised under `on_alarm: stop`, or no group taught anything
        for --patience steps.
        """
        collapse = self.monitor.collapse if self.config.on_alarm == "stop" else []
        stopped, position = self.early_stop.stopped, self.curriculum.position
        if stopped and position:
            below, level = self.curriculum.levels[position - 1 : position + 1]
            stopped = f"level {level} was not learned after level {below}: {stopped}"
        return "; ".join(collapse) or stopped

    @property
    def ended(self) -> str:
        """Why no step follows although steps are left; "" if one does.

        Solved groups of a lower level are no reason: its promotion follows.
        """
        exhausted = self.early_stop.exhausted if self._was_at_last_level else ""
        return self.stopped or self.solved_reason or exhausted

    @property
    def _was_at_last_level(self) -> bool:
        """Whether the last step was one of the last level, which a promotion has not changed."""
        level = self.curriculum.level
        return self.early_stop.level == level == self.curriculum.levels[-1]

    @property
    def seems_solved(self) -> bool:
        """Whether a validation check may end the run: nearly all recent groups are solved.

        Only at the last level, and again every `promote_every` steps while that lasts. The rewards
        of a control experiment say nothing about the policy.
        """
        if not self.early_stop.patience or self.config.control != "none":
            return False

        solved = self.early_stop.solved_steps
        is_due = solved > 0 and (solved - 1) % self.config.promote_every == 0
        return is_due and self._was_at_last_level

    @property
    def knows_answers(self) -> bool:
        """Whether the targets of the problems are right answers, which can be imitated."""
        return has_right_targets(self.stream, self.curriculum.level)

    def imitate(self, validate: Callable[[], float]) -> list[Group]:
        """Run the warm start; return the answers that were imitated.

        `validate` returns the held-out score. The result is kept in `imitation`.
        """
        learn = partial(
            imitate,
            self.policy,
            self.optimizer,
            micro_tokens=self.update_memory.micro_tokens,
            max_grad_norm=self.config.max_grad_norm,
        )
        self.imitation, answers = warm_start(
            partial(draw_answers, self.stream, self.curriculum.level),
            learn,
            validate,
            most_updates(self.config.steps or 0, self.prompts * self.config.group_size),
        )
        return answers

    def state(self) -> dict[str, Any]:
        """Return the state without tensors, as JSON types."""
        return {
            "done": self.done,
            "drawn": self.stream.next_index,
            "tokens": self.tokens,
            "kept_share": self.kept_share,
            "seen": list(self.stream.seen),
            "inherited": self.stream.inherited,
            "trained": sorted(self.stream.trained.items()),
            "curriculum": self.curriculum.state_dict(),
            "monitor": self.monitor.state_dict(),
            "progress": self.early_stop.state_dict(),
            "solved": self.solved_reason,
            "drafting": self.sampler.acceptance.state_dict(),
            "imitation": self.imitation.to_json() if self.imitation else None,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a state that `state` returned."""
        self.done = state["done"]
        self.tokens = state["tokens"]
        self.kept_share = state["kept_share"]
        self.stream.next_index = state["drawn"]
        self.stream.seen = dict.fromkeys(state["seen"])
        self.stream.inherited = state["inherited"]
        self.curriculum.load_state_dict(state["curriculum"])
        self.stream.trained = Counter(dict(state["trained"]))
        self.monitor.load_state_dict(state["monitor"])
        self.early_stop.load_state_dict(state["progress"])
        self.solved_reason = state["solved"]
        self.sampler.acceptance.load_state_dict(state["drafting"])
        if state["imitation"]:
            self.imitation = WarmStart(**state["imitation"])
