"""The life of a run, from top to bottom: opened, prepared, trained step by step, and concluded.

Rank 0 writes its files; the other ranks do the same work but write nothing.
"""

import gc
import signal
import sys
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from grpo.config import Config, names_in
from grpo.curriculum import (
    VARIED,
    Curriculum,
    Start,
    choose_levels,
    doubtful_parts,
    easier_levels,
    finding,
    levels_to_survey,
    load_supply,
    prompts_to_try,
    survey,
    survey_prompts,
)
from grpo.data.errors import EngineError, UserError
from grpo.distributed import Interrupt, Ranks, peer_errors
from grpo.ending import CHECK_PROBLEMS, HeldOut, Verdict, conclude
from grpo.evaluate import budgets, evaluate, held_out_stream, select, summarise, truncation_warning
from grpo.learn.loss import load_loss
from grpo.model.load import load_policy
from grpo.model.policy import Policy
from grpo.model.prompts import middle_left_out, sent_lines
from grpo.next_command import EndedRun, advice, next_commands
from grpo.records import Decision, Group, StepReport, level_name
from grpo.run.checkpoint import Saver, remove_checkpoints_after, trainer_state
from grpo.run.logs import (
    NoFiles,
    RunData,
    RunFiles,
    file_of,
    load_run,
    resume_hint,
    rewind,
    step_of,
)
from grpo.run.resume import OpenedRun, facts, open_run, sources_of_run
from grpo.run.trackers import check_installed
from grpo.show.console import Console, control_mark, settings_of
from grpo.tasks.base import Task, compares
from grpo.tasks.supply import Supply
from grpo.trainer import Trainer

# The seeds of held-out problems do not depend on the run's seed, so they are the same in every run
# and at every step. Promotions use other problems than reports. Otherwise selection would bias the
# reported scores.
EVAL_SEED = 1_000_003
PROMOTION_SEED = 2_000_003

# Why the policy is evaluated: the seed of the problems, how many they are (0: eval_problems), and
# the kind as which their rollouts are stored.
PURPOSES = {
    "report": (EVAL_SEED, 0, "eval"),
    "imitation": (EVAL_SEED, 0, "imitated"),  # after it
    "promotion": (PROMOTION_SEED, CHECK_PROBLEMS, "promotion"),  # whether the run is solved
    "warm start": (3_000_017, 32, ""),  # whether imitation ends
}


class RunResult(NamedTuple):
    """The exit status, the run's folder, and the policy, unless Ctrl-C stopped the run at once."""

    status: int
    folder: Path
    policy: Policy | None = None


def start_run(
    config: Config, given: dict, ranks: Ranks, task: Task | None = None, **values: Any
) -> RunResult:
    """Open or resume the run, and train.

    `given` are those settings in `config` that the user gave. The `values` are the own loss and the
    callbacks of a `Trainer`.
    """
    with ExitStack() as locks, peer_errors():
        opened, config = open_run(config, given, locks, ranks)
        config, supply = load_supply(config, task)
        if "own_loss" not in values:
            values["own_loss"] = load_loss(config.loss)
        for name in names_in(config.track):
            check_installed(name)
        assert config.steps is not None, "the configuration is resolved"
        console = Console(config.steps, getattr(supply.task, "metric", "score"))
        try:
            with Interrupt() as interrupt:
                console.say(f"loading {config.model}")
                policy = load_policy(
                    config.model, device=config.device, weights=opened.checkpoint, **config.loading
                )
                choices: list[Decision] = []
                if not opened.checkpoint and config.preflight != "off":
                    config, choices = choose_prompt(config, supply, policy, ranks, console, given)
                trainer = Trainer(config, supply, policy, ranks, **values)
                trainer.check_fit()
                run = Run(opened, trainer, console)
                run.files.write_decisions(choices)
                return RunResult(run.train(interrupt), run.folder, policy)
        except KeyboardInterrupt:
            print(f"train.py: stopped immediately; {resume_hint(opened.folder)}", file=sys.stderr)
            return RunResult(130, opened.folder)


def choose_prompt(
    config: Config, supply: Supply, policy: Policy, ranks: Ranks, console: Console, given: dict
) -> tuple[Config, list[Decision]]:
    """Return the configuration with the prompt by which the policy earns most, and the decision if
    there was a choice.
    """
    level = config.levels_for(supply.task)[0]
    configs = prompts_to_try(policy, supply.task, config, given, level)
    if len(configs) == 1:
        return configs[0], []

    console.say(f"pre-flight: {len(configs)} prompts")
    with console.working("pre-flight"):
        best, rows = survey_prompts(policy, supply, configs, level, ranks)

    console.survey(rows)
    why = (
        f"prompt {best + 1} of {len(rows)} does best: reward {rows[best]['reward']:.3f}, score "
        f"{rows[best]['value']:.3f}"
    )
    console.say(why)
    return configs[best], [Decision(0, level, level, "prompt", why, {"prompts": rows})]


class Run:
    """The directory of one run, and the order in which it is written."""

    def __init__(self, opened: OpenedRun, trainer: Trainer, console: Console):
        self.opened = opened
        self.folder = opened.folder
        self.trainer = trainer
        self.config = trainer.config
        self.ranks = trainer.ranks
        self.console = console
        assert self.config.level is not None, "the configuration is resolved"
        self.level = self.config.level  # the one that the run was asked to train

        sources = self.ranks.on_rank0(lambda: sources_of_run(opened, trainer))
        # Absolute, because a reward may change the working directory while a checkpoint is written.
        self.saver = Saver(self.folder.absolute(), trainer, sources)

        self.warned: set[str] = set()  # keys of the warnings that were shown
        about = facts(opened, trainer)
        self.files: RunFiles | NoFiles = NoFiles()
        if self.ranks.is_rank0:
            self.config.save(self.folder / "config.yaml", **about)
            done = step_of(opened.checkpoint) if opened.checkpoint else 0
            self.files = RunFiles(self.folder, self.config)
            self.files.start_trackers(self.config, done, self._warn)

    def _warn(self, line: str, key: str = "") -> None:
        """Show and store a warning, once for each `key`, by default the line."""
        if line and (key or line) not in self.warned:
            self.warned.add(key or line)
            self.console.warn(line)
            self.files.write_warning(line)

    def train(self, interrupt: Interrupt) -> int:
        """Make the steps, with held-out evaluations before, during and after them.

        Returns the exit status: that of the verdict, or 128 plus the number of a signal.
        """
        try:
            self.console.settings(settings_of(self.folder, self.config, self.trainer))
            self._show_prompt()
            notes = getattr(self.trainer.task, "notes", ())
            for warning in (*self.opened.warnings, *self.trainer.policy.notes, *notes):
                self._warn(warning)

            if self.opened.checkpoint:
                self._restore(self.opened.checkpoint)
            else:
                start = self._find_start()
                if self.config.preflight == "only":
                    self.console.say(
                        "--preflight only: nothing was trained; to train, repeat the command "
                        "without it"
                    )
                    self.files.finish()
                    return 0

                self.evaluate("report", self.reported_levels)
                if start and self.wants_imitation(start):
                    self._imitate_answers()
                    self.saver.save()

            self.take_steps(interrupt)
            if number := self.ranks.max(interrupt.wanted or 0):
                self.saver.save(wait=True)
                self.console.say(
                    f"{signal.Signals(number).name}: stopped after step {self.trainer.done}, which "
                    f"is saved; {resume_hint(self.folder)}"
                )
                return 128 + number
            return self._finish()
        finally:
            gc.unfreeze()
            self.saver.writer.shutdown()  # waits for a checkpoint that is being written

    # --- before the first step ----------------------------------------------------------------

    def _show_prompt(self) -> None:
        trainer, policy = self.trainer, self.trainer.policy
        first = trainer.stream.take(trainer.stream.next_index, [trainer.curriculum.level])
        looking = trainer.update_memory, trainer.truncate, trainer.ranks
        ((_, problem),) = doubtful_parts(trainer.stream, first, *looking)
        lines = sent_lines(policy, problem)
        self.files.write_prompt(lines)

        number = len(policy.encode(problem))
        title = f"the first prompt as it is sent to the model, {number:,} tokens"
        if policy.tokenizer.chat_template is None:
            title += ", without a chat template: the model has none"
        self.console.part(title, [f"  {line}" for line in middle_left_out(lines)], "dim")

    def _restore(self, checkpoint: Path) -> None:
        """Continue from a checkpoint. Files of later steps are removed; they are made again."""
        self.saver.restore(checkpoint)
        done = self.trainer.done
        if self.ranks.is_rank0:
            remove_checkpoints_after(self.folder, done)
            for warning in rewind(self.folder, done):
                self._warn(warning)
        ended = f", where it had ended: {self.trainer.ended}" if self.trainer.ended else ""
        if not ended and done == self.trainer.steps:
            ended = f", its last; give more --steps than {done} to train on"
        self.console.say(f"resumed {self.folder} after step {done}{ended}")

    def _find_start(self) -> Start | None:
        """Exclude what an earlier run has seen from evaluations; return the pre-flight's choice."""
        if self.config.start:
            start, stream = Path(self.config.start), self.trainer.stream
            with trainer_state(start) as state:
                stream.begin_after(state)
            self.files.write_seen(0, sorted(stream.seen))
            self.console.say(
                f"started from {start}: the {len(stream.seen):,} problems that it was trained on "
                "are excluded from evaluations"
            )
        return self._make_preflight() if self.config.preflight != "off" else None

    def _make_preflight(self) -> Start:
        """Sample a few problems of each level, and choose the level where the run starts."""
        config, trainer = self.config, self.trainer
        levels = list(trainer.curriculum.levels)
        self.console.say(f"{control_mark(config.mark)}pre-flight: levels")
        with self.console.working("pre-flight"):
            rows, groups = survey(trainer.policy, trainer.stream.supply, config, levels, self.ranks)

        # Easier levels are added to those asked for, unless a dataset was asked for at one level.
        may_ease = bool(config.curriculum) or not config.dataset
        eligible = [row for row in rows if may_ease or row["level"] in levels]
        start = choose_levels(eligible, levels, mixed=trainer.stream.supply.mixed)
        varied = {row["level"]: row["varied"] for row in eligible}
        trainer.curriculum = Curriculum(start.levels, start.open_to, varied)
        if start.levels != levels:
            trainer.check_fit()

        figures = {
            "start": start.open_to if start.is_reachable else None,
            "training_levels": start.levels,
            "levels": rows,
        }
        decision = Decision(0, levels[0], start.open_to, "preflight", start.why, figures)
        self.files.write_rollouts("preflight", 0, groups)
        self.files.write_decisions([decision])

        self.console.survey(rows)
        listed = ", ".join(map(str, start.levels))
        if len(start.levels) > 1:
            listed = f"levels {listed}, open to {start.open_to}"
        # Without a right answer there is a gradient, too, where rewards differ.
        trained = [row for row in rows if row["level"] in start.levels]
        varying = [row for row in trained if row["varied"] >= VARIED]
        if self.wants_imitation(start):
            self.console.say(
                f"the run imitates right answers first, then trains on {listed}: {start.why}"
            )
        elif start.is_reachable or varying:
            why = start.why if start.is_reachable else finding(varying[-1])
            self.console.say(f"the run trains on {listed}: {why}")
        else:
            self._warn(
                f"{start.why}: the run trains on {listed}, and may learn nothing; give a "
                "--model that solves some of these problems, or an easier task"
            )
        for note in trainer.policy.notes:  # those of levels that were added are new
            self._warn(note)
        return start

    def wants_imitation(self, start: Start) -> bool:
        """Return whether right answers are imitated first, because the first level is too far."""
        return not start.is_near and not self.config.reward_alone and self.trainer.knows_answers

    def _imitate_answers(self) -> None:
        trainer = self.trainer
        level = trainer.curriculum.level

        def score() -> float:
            lines = self.evaluate("warm start", [level])
            return lines[0]["mean"] if lines else 0.0

        with self.console.working("imitating right answers"):
            imitation, answers = trainer.imitate(score)

        self.files.write_rollouts("imitation", 0, answers)
        self.files.write_seen(0, [group.problem.key for group in answers], imitated=True)
        decision = Decision(0, level, level, "imitation", imitation["why"], imitation)
        self.files.write_decisions([decision])
        self.console.say(decision.line)
        if imitation["updates"]:  # so that the verdict can tell what imitation taught
            self.evaluate("imitation", self.reported_levels)

    # --- during training ----------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether no step follows."""
        return bool(self.trainer.ended) or self.trainer.done >= self.trainer.steps

    def take_steps(self, interrupt: Interrupt) -> None:
        """Make the remaining steps, and store each."""
        trainer = self.trainer
        # The collector would search all that exists now every few steps, for a quarter of a second.
        gc.collect()
        gc.freeze()
        while not self.is_over and not self.ranks.max(interrupt.wanted or 0):
            interrupt.renew()
            step = trainer.done + 1
            try:
                with self.console.working(f"step {step}"):
                    report = trainer.step()
            except FloatingPointError as error:
                if not trainer.current:
                    raise
                self.files.write_rollouts("failed", step, trainer.current)
                saved = file_of(self.folder, "failed", step)
                raise FloatingPointError(f"{error}; its batch is saved in {saved}") from error
            except UserError as error:
                # After sampling, weights may have changed; and of several ranks all know only what
                # an engine does wrong.
                is_harmless = trainer.is_sampling and self.ranks.size == 1
                if not (is_harmless or isinstance(error, EngineError)):
                    raise
                self.saver.save(wait=True)
                raise UserError(
                    f"{error}; step {trainer.done} is saved, {resume_hint(self.folder)}"
                ) from error
            self.after_step(report)

    def after_step(self, report: StepReport) -> None:
        """Write and show a step; evaluate and save if that is due."""
        trainer = self.trainer
        self.files.write_step(report)
        self.console.step(report)

        # The run ends if its last level is solved in training and on held-out problems.
        level = trainer.curriculum.level
        if trainer.end.wants_check(level):
            for line in self.evaluate("promotion", [level]):
                self.files.write_decisions(trainer.end.take_check(trainer.done, line))

        every = self.config.eval_every
        if every and report.step % every == 0 and not self.is_over:
            self.evaluate("report", self.reported_levels)

        # Saved last, so that a run that is resumed here has everything about the step.
        self.save_if_due(report)

    def save_if_due(self, report: StepReport) -> None:
        """Save the state of this step if that is due; raise the error of the previous save."""
        self.saver.collect()
        if report.step % self.config.save_every == 0 or self.is_over:
            self.saver.save(report)

    # --- held-out evaluations -----------------------------------------------------------------

    @property
    def reported_levels(self) -> set[int]:
        """The level asked for; with --curriculum the hardest open one, and at the end the first."""
        levels = {self.level}
        if self.config.curriculum:
            levels.add(self.trainer.curriculum.level)
            if self.is_over:
                levels.add(self.trainer.curriculum.levels[0])
        return levels

    def evaluate(self, purpose: str, levels: Collection[int]) -> list[dict[str, Any]]:
        """Score the policy for one of PURPOSES, on problems that it was not trained on.

        Writes, shows and returns a line of eval.jsonl for each level that has such problems, unless
        the reward judged none of the answers.
        """
        measured = [self._measure(purpose, level) for level in sorted(levels)]
        groups = [group for _, answers in measured for group in answers]
        if not groups:
            return []

        # The lines come last, because a resumed run takes them as a sign that this step has been
        # evaluated: the final evaluation follows the last checkpoint.
        lines = [line for line, _ in measured if line]
        *_, kind = PURPOSES[purpose]
        if kind:
            self.files.write_rollouts(kind, self.trainer.done, groups)
        self.files.write_evaluations(*lines)
        for line in lines:
            self.console.evaluation(line)
            # A policy that is still imitating right answers is not expected to stop by itself.
            if purpose != "warm start":
                warning = truncation_warning(line, f"level {line['level']}")
                self._warn(warning, f"truncated/{purpose}/{line['level']}")
        return lines

    def _measure(self, purpose: str, level: int) -> tuple[dict[str, Any] | None, list[Group]]:
        """Return the line of eval.jsonl of a level, and the groups. There is no line if there are
        no problems, or if the reward judged no answer.
        """
        trainer, config = self.trainer, self.trainer.config
        policy, task, asked = trainer.policy, trainer.task, config.max_new_tokens
        seed, size, _ = PURPOSES[purpose]
        size = size or config.eval_problems
        stream, fruitless = held_out_stream(task, level, "validation", seed=seed, size=size)
        # Those of the data set, too, before training has drawn them: otherwise the first evaluation
        # would use problems that later ones lack.
        seen = trainer.stream.seen | {problem.key for problem in trainer.stream.supply.dataset}
        if purpose == "warm start":  # as in training
            windows = (trainer.stream.windows([each]) for each in enumerate(stream))
            stream = (problem for ((_, problem),) in windows)
        found = select(policy, stream, size, seen, asked, fruitless)
        if not found.problems:
            self._warn(f"no {purpose} evaluation at level {level}: {found.why_none}")
            return None, []

        # In a small family of problems a report and a validation check may share a problem. With
        # different seeds they do not share its completion.
        own_seed = 0 if seed == EVAL_SEED else seed
        sampling = config, own_seed, config.group_size if compares(task) else 1
        unit = getattr(task, "level_unit", "")
        with self.console.working(f"evaluating at {level_name(level, unit)}") as progress:
            mine = trainer.ranks.share(found.problems)
            groups = trainer.ranks.gather(evaluate(policy, task, mine, *sampling, progress))
        for index, group in enumerate(groups):
            group.index = index
        if not any(group.judged for group in groups):
            none = f"the reward judged no answer to its {len(groups)} problems"
            self._warn(f"no {purpose} evaluation at level {level}: {none}")
            return None, groups

        line = {
            "step": trainer.done,
            "purpose": purpose,
            **config.mark,
            "task": config.task,
            "level": level,
            "unit": unit,
            "split": "validation",
            "temperature": config.temperature,
            "top_p": config.top_p,
            "budget": max(budgets(policy, task, found.problems, asked)),
            "asked": found.asked,
            "dropped": found.dropped,
            "too_long": found.too_long,
            "metric": getattr(task, "metric", "score"),
            **summarise(groups),
        }
        return line, groups

    # --- after the last step ------------------------------------------------------------------

    def _finish(self) -> int:
        """Evaluate the trained policy, show the verdict, and return its exit status."""
        reports = self.ranks.on_rank0(lambda: load_run(self.folder).reports)
        if all(line["step"] < self.trainer.done for line in reports):
            self.evaluate("report", self.reported_levels)
        self.saver.collect(wait=True)
        return self.ranks.on_rank0(self._conclude)

    def _conclude(self) -> int:
        """Write and show the verdict; return the exit status. Called on rank 0 only."""
        trainer, mark = self.trainer, self.config.mark
        if trainer.ended:
            how = "stopped" if trainer.stopped else "ended"
            self.console.say(f"{how} after step {trainer.done}: {trainer.ended}")

        run = load_run(self.folder)
        supply, curriculum = trainer.stream.supply, trainer.curriculum
        offered = levels_to_survey(supply, [*curriculum.levels[:-1], self.level])
        unit = getattr(supply.task, "level_unit", "")
        ended = EndedRun(
            run.path,
            self.config,
            trainer.task,
            trainer.done,
            budget=run.reports[-1]["budget"] if run.reports else 0,
            levels=tuple(curriculum.levels),
            easier=easier_levels(
                offered, curriculum.level, run.decisions, unit == "words" and not supply.dataset
            ),
            best=trainer.monitor.best,
            ended=trainer.ended,
        )
        verdict = self._verdict(run)
        remedy, command = advice(ended, verdict)
        verdict = replace(verdict, remedy=remedy, next_command=command)
        if run.verdict is None or run.verdict["step"] < trainer.done:
            self.files.write_evaluations(verdict.to_json() | mark)

        style = "bold red" if verdict.exit_status else "bold"
        said, *details = verdict.lines(getattr(trainer.task, "metric", "score"), unit)
        self.console.part(control_mark(mark) + said, details, style)
        commands = dict.fromkeys([command, *next_commands(ended)])
        self.console.part("next", [f"  {each}" for each in commands], is_whole=True)
        self.files.finish()
        return verdict.exit_status

    def _verdict(self, run: RunData) -> Verdict:
        trainer = self.trainer
        places = ("before", "eval", 0), ("after", "eval", trainer.done), ("imitated", "imitated", 0)
        held_out = HeldOut(
            **{what: run.groups(n, kind) for what, kind, n in places if n in run.steps(kind)}
        )
        return conclude(self.level, held_out, run.metrics, run.evals, stopped=trainer.stopped)
