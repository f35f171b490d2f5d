"""A run: when each file is written to its directory, and how it ends.

docs/run-files.md lists the files. Rank 0 writes them; the other ranks do the same work but write
nothing.
"""

import dataclasses
import gc
import signal
import sys
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from data.files import read_json
from grpo.config import Config
from grpo.curriculum import (
    PROMPT_PROBLEMS,
    PROMPT_SAMPLES,
    SURVEY_PROBLEMS,
    Curriculum,
    Start,
    choose_levels,
    levels_to_survey,
    prompts_to_try,
    survey,
    survey_prompts,
)
from grpo.distributed import Ranks
from grpo.ending import HeldOut, Verdict, conclude
from grpo.model.load import load_policy
from grpo.model.policy import Policy
from grpo.model.prompts import middle_left_out, sent_lines
from grpo.next_command import EndedRun, next_command, next_commands, remedy
from grpo.records import Decision, Group, StepReport
from grpo.run.checkpoint import Saver, remove_checkpoints_after, seen_keys
from grpo.run.files import resume_hint, step_of
from grpo.run.heldout import HeldOutEvaluator
from grpo.run.interrupt import Interrupt
from grpo.run.logs import NoFiles, RunData, RunFiles, load_run, rewind
from grpo.run.resume import OpenedRun, facts, open_run, sources_of_run
from grpo.run.rollouts import file_of
from grpo.run.trackers import check_installed
from grpo.show.console import Console, settings_of
from grpo.trainer import Parts, Trainer, load_parts


class RunResult(NamedTuple):
    """The exit status of the program, the run's folder, and the trained policy.

    There is no policy if Ctrl-C stopped the run at once.
    """

    status: int
    folder: Path
    policy: Policy | None = None


def start_run(config: Config, given: dict, ranks: Ranks, **values: Any) -> RunResult:
    """Open or resume the run, and train.

    `given` are those settings in `config` that the user gave. The `values` are those of
    `grpo.trainer.load_parts`.
    """
    with ExitStack() as locks:
        opened, config = open_run(config, given, locks, ranks)
        config, parts = load_parts(config, **values)
        check_installed(config.track)
        assert config.steps is not None, "the configuration is resolved"

        metric = getattr(parts.task, "metric", "score")
        console = Console(config.steps, metric)
        try:
            with Interrupt() as interrupt:
                with console.loading(config.model):
                    policy = load_policy(
                        config.model,
                        device=config.device,
                        weights=opened.checkpoint,
                        **config.loading,
                    )
                choice = None
                if not opened.checkpoint and config.preflight != "off":
                    config, choice = choose_prompt(config, parts, policy, ranks, console, given)
                trainer = Trainer(config, parts, policy, ranks)
                trainer.check_fit()
                run = Run(opened, trainer, console)
                if choice:
                    run.files.write_decisions([choice])
                return RunResult(run.train(interrupt), run.folder, policy)
        except KeyboardInterrupt:
            print(f"train.py: stopped immediately; {resume_hint(opened.folder)}", file=sys.stderr)
            return RunResult(130, opened.folder)


def choose_prompt(
    config: Config,
    parts: Parts,
    policy: Policy,
    ranks: Ranks,
    console: Console,
    given: Collection[str],
) -> tuple[Config, Decision | None]:
    """Return the configuration with the prompt by which the policy earns most, and the decision.

    There is none if the user has chosen the prompt, or the task leaves no choice.
    """
    level = config.levels_for(parts.task)[0]
    configs = prompts_to_try(policy, parts.task, config, given, level)
    if len(configs) == 1:
        return configs[0], None

    assert parts.supply is not None
    console.say(
        f"pre-flight: {len(configs)} prompts, {PROMPT_PROBLEMS} problems per level, "
        f"{PROMPT_SAMPLES} completions each"
    )
    with console.working("pre-flight"):
        best, rows = survey_prompts(policy, parts.supply, configs, level, ranks)

    console.prompts(rows)
    why = (
        f"prompt {best + 1} of {len(rows)} does best: reward {rows[best]['reward']:.3f}, score "
        f"{rows[best]['value']:.3f}"
    )
    console.say(why)
    return configs[best], Decision(0, level, level, "prompt", why, {"prompts": rows})


class Run:
    """The directory of one run, and the rules by which it is written.

    `train` makes it: `begin` prepares it, `after_step` follows each step, and `finish` or
    `save_and_exit` ends it.
    """

    def __init__(self, opened: OpenedRun, trainer: Trainer, console: Console):
        self.opened = opened
        self.folder = opened.folder
        self.trainer = trainer
        self.config = trainer.config
        self.ranks = trainer.ranks
        self.console = console

        sources = self.ranks.on_rank0(
            lambda: sources_of_run(opened, self.config, trainer.task, trainer.own_loss)
        )
        self.saver = Saver(self.folder, trainer, sources, console.say)

        about = facts(opened, trainer.policy.device, self.ranks, self.config.model)
        self.files: RunFiles | NoFiles = NoFiles()
        if self.ranks.is_rank0:
            self.config.save(self.folder / "config.yaml", **about)
            done = step_of(opened.checkpoint) if opened.checkpoint else 0
            self.files = RunFiles(self.folder, self.config, done, self._warn)
        self.heldout = HeldOutEvaluator(trainer, self.files, console, self._warn)

    @property
    def level(self) -> int:
        """The level that the run was asked to train."""
        assert self.config.level is not None, "the configuration is resolved"
        return self.config.level

    @property
    def reported_levels(self) -> set[int]:
        """The levels at which the policy is evaluated now: the one asked for, and with --curriculum
        the hardest open one.
        """
        current = {self.trainer.curriculum.level} if self.config.curriculum else set()
        return {self.level} | current

    def _warn(self, line: str) -> None:
        self.console.warn(line)
        self.files.write_warning(line)

    def train(self, interrupt: Interrupt) -> int:
        """Make the steps, and evaluate on held-out problems before, during and after them.

        Returns the exit status. It is that of the verdict: 0, or 3 if the run was stopped or has
        failed. After a signal it is 128 plus the signal's number.
        """
        try:
            self.console.settings(settings_of(self.folder, self.config, self.trainer))
            start = self.begin()
            if self.config.preflight == "only":
                self.console.say(
                    "--preflight only: nothing was trained; to train, repeat the command without it"
                )
                self.files.finish()
                return 0

            if not self.opened.checkpoint:
                self.evaluate()
            if start and self.wants_imitation(start):
                self._imitate_answers()
                self.saver.save()
            self.take_steps(interrupt)
            if number := self.ranks.max(interrupt.wanted or 0):
                self.save_and_exit(signal.Signals(number).name)
                return 128 + number
            return self.finish()
        finally:
            gc.unfreeze()
            self.saver.writer.shutdown()  # waits for a checkpoint that is being written

    # --- before the first step ----------------------------------------------------------------

    def begin(self) -> Start | None:
        """Show the prompt, restore the checkpoint if there is one, and make the pre-flight.

        Returns the choice of the pre-flight, or None if none is made. A resumed run makes none.
        """
        self._show_prompt()
        notes = getattr(self.trainer.task, "notes", ())
        for warning in (*self.opened.warnings, *self.trainer.policy.notes, *notes):
            self._warn(warning)

        if self.opened.checkpoint:
            self._restore(self.opened.checkpoint)
            return None
        if self.config.start:
            self._begin_after(Path(self.config.start))
        return self._make_preflight() if self.config.preflight != "off" else None

    def _show_prompt(self) -> None:
        """Show the run's first prompt as it is sent to the model, and write it to prompt.txt."""
        policy = self.trainer.policy
        _, problem = self.trainer.problems(1)[0]
        lines = sent_lines(policy, problem)
        self.files.write_prompt(lines)

        number = len(policy.encode(problem))
        title = f"the first prompt as it is sent to the model, {number:,} tokens"
        if policy.tokenizer.chat_template is None:
            title += ", without a chat template: the model has none"
        self.console.prompt(title, middle_left_out(lines))

    def _restore(self, checkpoint: Path) -> None:
        """Continue from a checkpoint. Files of later steps are removed; they are made again."""
        self.saver.restore(checkpoint)
        done = self.trainer.done
        if self.ranks.is_rank0:
            remove_checkpoints_after(self.folder, done)
            rewind(self.folder, done)
        ended = f", where it had ended: {self.trainer.ended}" if self.trainer.ended else ""
        self.console.say(f"resumed {self.folder} after step {done}{ended}")

    def _begin_after(self, start: Path) -> None:
        """Exclude from evaluations the problems that the policy of checkpoint `start` has seen."""
        seen = seen_keys(start)
        self.trainer.stream.begin_after(read_json(start / "trainer.json")["trainer"])
        self.files.append("seen", {"step": 0, "keys": seen})
        self.console.say(
            f"started from {start}: the {len(seen):,} problems that it was trained on are excluded "
            "from evaluations"
        )

    def _make_preflight(self) -> Start:
        """Sample a few problems of each level, and choose the level where the run starts."""
        config, trainer = self.config, self.trainer
        levels = list(trainer.curriculum.levels)
        mark = "".join(f"CONTROL {control}  " for control in config.mark.values())
        self.console.say(
            f"{mark}pre-flight: {SURVEY_PROBLEMS} problems per level, "
            f"{config.group_size} completions each"
        )
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
        if self.wants_imitation(start):
            self.console.say(
                f"the run imitates right answers first, then trains on {listed}: {start.why}"
            )
        elif start.is_reachable:
            self.console.say(f"the run trains on {listed}: {start.why}")
        else:
            self._warn(
                f"{start.why}: the run trains on {listed}, and may learn nothing; give a "
                "--model that solves some of these problems, or an easier task"
            )
        return start

    def wants_imitation(self, start: Start) -> bool:
        """Return whether right answers are imitated before the first step: the first level is too
        far from all that the policy can do.
        """
        is_wanted = not start.is_near and not self.config.reward_alone
        return is_wanted and self.trainer.knows_answers

    def _imitate_answers(self) -> None:
        """Run the warm start, and report the result."""
        trainer = self.trainer
        level = trainer.curriculum.level

        with self.console.working("imitating right answers"):
            answers = trainer.imitate(lambda: self.heldout.warm_start_score(level))
        imitation = trainer.imitation
        assert imitation is not None

        self.files.write_imitation(answers)
        decision = Decision(0, level, level, "imitation", imitation["why"], imitation)
        self.files.write_decisions([decision])
        self.console.say(decision.line)
        if imitation["updates"]:  # so that the verdict can tell what imitation taught
            self.heldout.evaluate("imitation", self.reported_levels, rollouts="imitated")

    # --- during training ----------------------------------------------------------------------

    def take_steps(self, interrupt: Interrupt) -> None:
        """Make the remaining steps, and store each."""
        trainer = self.trainer
        assert trainer.config.steps is not None, "the configuration is resolved"
        # The collector would search all that exists now every few steps, for a quarter of a second.
        gc.collect()
        gc.freeze()
        # Shown beside the first step of the process, which takes longer than the others.
        note = " (the first also allocates memory and compiles kernels)"
        while (
            trainer.done < trainer.config.steps
            and not trainer.ended
            and not self.ranks.max(interrupt.wanted or 0)
        ):
            interrupt.renew()
            try:
                with self.console.working(f"step {trainer.done + 1}{note}"):
                    report = trainer.step()
            except FloatingPointError as error:
                raise FloatingPointError(f"{error}{self.save_failed()}") from error
            note = ""
            self.after_step(report)

    def after_step(self, report: StepReport) -> None:
        """Write and show a step; evaluate and save if that is due."""
        self.files.write_step(report)
        self.console.step(report)
        for warning in self.trainer.stream.take_warnings():
            self._warn(warning)

        self.heldout.end_if_solved()
        every, is_last = self.config.eval_every, report.step == self.config.steps
        if every and report.step % every == 0 and not is_last and not self.trainer.ended:
            self.evaluate()

        # Saved last, so that a run that is resumed here has everything about the step.
        self.save_if_due(report)

    def evaluate(self, is_final: bool = False) -> None:
        """Report the policy's score on held-out problems: a line for each level in eval.jsonl.

        At the end of a --curriculum so is the first level, which was evaluated before training.
        """
        levels = self.reported_levels
        if is_final and self.config.curriculum:
            levels |= {self.trainer.curriculum.levels[0]}
        self.heldout.evaluate("report", levels, rollouts="eval")

    def save_if_due(self, report: StepReport) -> None:
        """Save the state of this step if that is due; report the previous save."""
        is_last = bool(self.trainer.ended) or report.step == self.config.steps
        level, reward = report.metrics["level"], report.metrics["reward"]
        self.saver.save_if_due(report.step, level, reward, is_last=is_last)

    def save_failed(self) -> str:
        """Write the batch of a failed step, for inspection; return a phrase that says where."""
        step = self.trainer.done + 1
        self.files.write_rollouts("failed", step, self.trainer.current)
        return f"; its batch is saved in {file_of(self.folder, 'failed', step)}"

    # --- after the last step ------------------------------------------------------------------

    def save_and_exit(self, signal: str) -> None:
        """Save the last step, unless it is saved already, because a signal ends the run."""
        if self.saver.saved != self.trainer.done:
            self.saver.save()
        self.saver.collect(wait=True)
        self.console.say(
            f"{signal}: stopped after step {self.trainer.done}, which is saved; "
            f"{resume_hint(self.folder)}"
        )

    def finish(self) -> int:
        """Evaluate the trained policy, show the verdict, and return its exit status."""
        reports = self.ranks.on_rank0(lambda: load_run(self.folder).reports)
        if all(line["step"] < self.trainer.done for line in reports):
            self.evaluate(is_final=True)
        self.saver.collect(wait=True)
        return self.ranks.on_rank0(self._conclude)

    def _conclude(self) -> int:
        """Write and show the verdict; return the exit status. Called on rank 0 only."""
        trainer = self.trainer
        if trainer.ended and not trainer.stopped:
            self.console.say(f"ended after step {trainer.done}: {trainer.ended}")

        run = load_run(self.folder)
        ended = self._ended_run(run)
        verdict = self._verdict(run)
        verdict = dataclasses.replace(
            verdict, remedy=remedy(ended, verdict), next_command=next_command(ended, verdict)
        )
        if run.verdict is None or run.verdict["step"] < trainer.done:
            self.files.append("eval", verdict.to_json() | self.config.mark)
        self._show_summary(run, verdict, next_commands(ended))

        if trainer.stopped:
            self.console.say(f"stopped after step {trainer.done}: {trainer.stopped}")
        self.files.finish()
        return verdict.exit_status

    def _verdict(self, run: RunData) -> Verdict:
        """Return the verdict on the run, see `conclude`."""
        trainer = self.trainer

        def answers(kind: str, step: int) -> list[Group] | None:
            return run.groups(step, kind) if step in run.steps(kind) else None

        return conclude(
            self.level,
            HeldOut(
                before=answers("eval", 0) or [],
                after=answers("eval", trainer.done) or [],
                imitated=answers("imitated", 0),
            ),
            run.metrics,
            run.evals,
            stopped=trainer.stopped,
            words=getattr(trainer.task, "mistakes", {}),
        )

    def _ended_run(self, run: RunData) -> EndedRun:
        """Return what the next commands depend on."""
        trainer = self.trainer
        levels = list(trainer.curriculum.levels)
        survey = levels_to_survey(trainer.stream.supply, [*levels[:-1], self.level])
        return EndedRun(
            run.path,
            self.config,
            trainer.task,
            trainer.done,
            budget=run.reports[-1]["budget"] if run.reports else 0,
            levels=tuple(levels),
            easier=tuple(survey[:-1]),
            ended=trainer.ended,
        )

    def _show_summary(self, run: RunData, verdict: Verdict, commands: list[str]) -> None:
        trainer, mark = self.trainer, self.config.mark
        reports = [line for line in run.reports if line["level"] == self.level]
        names = ("metrics.jsonl", "rollouts", "checkpoints")
        self.console.summary(
            files={name.partition(".")[0]: str(self.folder / name) for name in names},
            next_commands=list(dict.fromkeys([verdict.next_command, *commands])),
            before=[line for line in reports if line["step"] == 0],
            after=reports[-1:],
            verdict=verdict.lines(
                getattr(trainer.task, "metric", "score"),
                getattr(trainer.task, "level_unit", ""),
                mark.get("control", ""),
            ),
            is_expected=verdict.is_expected(bool(mark)),
        )
