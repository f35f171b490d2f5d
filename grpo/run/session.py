"""A run: its directory, its defaults, what is written when, and how it is taken up again.

The directory holds config.yaml, metrics.jsonl, eval.jsonl, curriculum.jsonl, rollouts/,
samples.log and checkpoints/ (see docs/run-files.md). Of several ranks the first one writes it; the
others go through the same motions and write nothing.
"""

import dataclasses
import json
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from grpo.config import ON_RESUME, Config, load_config, names_in, spelled, translated
from grpo.curriculum.perplexity import Perplexity, measure_perplexity
from grpo.curriculum.preflight import (
    Start,
    advice,
    choose_mixed_start,
    choose_start,
    figures_of,
)
from grpo.curriculum.survey import (
    PROBLEMS,
    LevelSurvey,
    SurveySettings,
    levels_to_survey,
    survey,
)
from grpo.distributed import SINGLE, Ranks
from grpo.learn.optimizer import default_rate
from grpo.model.policy import Policy
from grpo.model.prompts import middle_left_out, sent_lines
from grpo.records import Decision, Group, StepReport
from grpo.rollout.generate import fitting
from grpo.run import checkpoint as checkpoints
from grpo.run.checkpoint import (
    find_resume,
)
from grpo.run.conclusion import files_of, is_solved, next_commands, supply_line, verdict_of
from grpo.run.display import Display
from grpo.run.files import NoFiles, RunFiles
from grpo.run.folders import latest_run, new_folder
from grpo.run.heldout import EVAL_SEED, PROMOTION_SEED, WARM_START_SEED, HeldOut
from grpo.run.lock import locked
from grpo.run.reader import load_run
from grpo.run.rollouts import file_of
from grpo.run.saver import Saver
from grpo.run.sources import (
    accepted,
    check,
    differences,
    read_sources,
    sources_now,
    unknown,
)
from grpo.run.start import start_from
from grpo.text import shortened
from grpo.trainer import Trainer
from grpo.training.build import build_curriculum
from grpo.verdict import Verdict
from tasks.base import (
    Task,
    UserError,
    plain_texts_of,
    problem_stream,
    rescaled,
    summary_of,
    trust,
)

BUILTIN_RATE = 2e-4
WARM_START_PROBLEMS = 32


def open_run(
    config: Config, given: dict[str, Any], *, home: Path, ranks: Ranks = SINGLE
) -> tuple["Run", Config]:
    """Return the run and its configuration: a new one below `home`, or the one that --resume
    names.
    """
    if config.resume is None:
        config, warnings = start_from(config, given)
        named = home / config.name if config.name else None
        folder = ranks.on_rank0(lambda: named or new_folder(home, config))
        if ranks.on_rank0(folder.exists):
            raise UserError(
                f"--name {config.name}: {folder} exists; give another name, or --resume {folder}"
            )
        return Run(folder, warnings=warnings, ranks=ranks), config
    path = latest_run(home) if config.resume == "latest" else Path(config.resume)
    checkpoint, warnings = find_resume(path)
    folder = checkpoint.parent.parent
    saved = dataclasses.asdict(load_config(folder / "config.yaml"))
    trust(saved["task"], given.get("task"), folder)
    changed = {
        name: value
        for name, value in given.items()
        if name not in ("resume", "accept_changes") and value != saved[name]
    }
    for name in changed:
        if name not in ON_RESUME:
            raise UserError(
                f"{spelled(name)} {shortened(str(changed[name]))}: the run in {folder} "
                "has "
                f"{shortened(str(saved[name])) or 'none'}; with "
                f"--resume only {', '.join(ON_RESUME)} can be changed"
            )
    run = Run(folder, checkpoint, warnings, ranks)
    run.found, run.accept = saved, names_in(config.accept_changes)
    return run, Config(**{**saved, **changed})


class Run:
    """The directory of one run, and the rules by which it is written."""

    def __init__(
        self,
        folder: Path,
        checkpoint: Path | None = None,
        warnings: Sequence[str] = (),
        ranks: Ranks = SINGLE,
    ):
        self.folder, self.checkpoint, self.warnings, self.ranks = (
            folder,
            checkpoint,
            warnings,
            ranks,
        )
        self.config: Config  # the resolved one, which train.py sets
        self.found: dict[str, Any] = {}  # the settings in config.yaml, of a run that goes on
        self.accept: list[str] = []  # kinds of sources that may have changed since its checkpoint
        self.losses: list[str] = []  # what became of standard output and error, not yet noted
        self.sources: dict[str, Any] = {}
        self.notes: list[str] = []  # what is to be said of them
        self.accepted: list[dict[str, Any]] = []  # changes of the sources in the life of the run

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep every other process from writing this run, from now on or from when its directory
        is made, to the end of the block.
        """
        with ExitStack() as self.locks:
            if self.checkpoint and self.ranks.is_rank0:
                self.locks.enter_context(locked(self.folder))
            yield

    @property
    def level(self) -> int:
        """The level that was asked for, once the configuration is resolved."""
        assert self.config.level is not None
        return self.config.level

    def settle_rate(self, policy: Policy) -> Config:
        """Fill in the learning rate where none was asked for: it depends on the size of
        the model.
        """
        config = self.config
        rate = config.learning_rate
        if rate is None and config.model == "builtin" and not config.lora_rank:
            rate = BUILTIN_RATE
        elif rate is None:
            rate = default_rate(policy.causal.config.hidden_size, is_lora=policy.is_lora)
        self.config = dataclasses.replace(config, learning_rate=rate)
        return self.config

    def check_sources(self, task: Task) -> None:
        """Take the fingerprints of what the run depends on; raise UserError where a run that goes
        on has others.

        Called before anything is loaded or written, and by `attach` once more where a model of the
        hub was not on disk yet.
        """
        config = self.config
        self.sources = self.ranks.on_rank0(
            lambda: sources_now(config.model, config.dataset, config.task, task, config.start)
        )
        if self.checkpoint is None:
            return

        saved = read_sources(self.checkpoint)
        if saved is None:
            self.notes = [unknown(self.checkpoint)]
            return

        # A setting that an older version did not have has its default.
        then = dataclasses.asdict(Config()) | translated(saved.get("config") or {})
        free = {name: then[name] for name in ON_RESUME}
        settings = {name: then[name] for name in self.found if name not in free}
        found = {name: value for name, value in self.found.items() if name not in free}
        changes = check(
            self.checkpoint,
            saved | {"config": settings},
            self.sources | {"config": found},
            self.accept,
        )
        step = checkpoints.step_of(self.checkpoint)
        self.accepted = saved.get("accepted", []) + [
            {"step": step, "kind": kind, "change": change} for kind, change in changes.items()
        ]
        since = differences(free, {name: self.found[name] for name in free}, is_config=True)
        self.notes = [
            *(accepted(self.checkpoint, kind, change) for kind, change in changes.items()),
            *(f"config.yaml, since {self.checkpoint.name} was saved: {line}" for line in since),
        ]

    def _dependencies(self) -> dict[str, Any]:
        """Return what the run depends on, as each checkpoint keeps it."""
        config = dataclasses.asdict(self.config)
        return self.sources | {"config": config, "accepted": self.accepted}

    def attach(self, trainer: Trainer, console: Display) -> None:
        """Make the directory; from here on everything is written there."""
        self.trainer, self.console, config = trainer, console, self.config
        self.saver = Saver(self.folder, config, trainer, self.ranks, console, self._dependencies)
        self.files: RunFiles | NoFiles = NoFiles()
        if self.sources.get("base") is None:
            self.check_sources(trainer.task)
        if self.ranks.is_rank0:
            self._make_files()
        self.heldout = HeldOut(config, trainer, self.ranks, self.files, console)

    def _make_files(self) -> None:
        config = self.config
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.checkpoint:
            self.locks.enter_context(locked(self.folder))
        self.about = self.facts()
        config.save(self.folder / "config.yaml", **self.about)
        done = checkpoints.step_of(self.checkpoint) if self.checkpoint else 0
        self.files = RunFiles(self.folder, dataclasses.asdict(config), config.mark, done, self.warn)

    def show_prompt(self) -> None:
        """Show what the model is sent for the run's first problem, and keep it in prompt.txt.
        Called before `restore`.
        """
        _, problem = self.trainer.problems(1)[0]
        lines = sent_lines(self.trainer.policy, problem)
        self.files.prompted(lines)

        number = len(self.trainer.policy.encode(problem))
        self.console.prompt(
            f"the first prompt as the model is sent it, {number:,} tokens", middle_left_out(lines)
        )

    def facts(self) -> dict[str, Any]:
        """Return versions, device, commit and fingerprints, for the record."""
        policy = self.trainer.policy
        device = (
            torch.cuda.get_device_name(policy.device)
            if policy.device.type == "cuda"
            else platform.processor() or "cpu"
        )
        git = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True
        )
        return {
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
            "peft": peft.__version__,
            "device": device,
            "ranks": self.ranks.size,
            "threads": torch.get_num_threads(),
            "commit": git.stdout.strip() or None,
            "fingerprints": {
                kind: summary_of(found) for kind, found in self.sources.items() if found
            },
            **({"accepted_changes": self.accepted} if self.accepted else {}),
        }

    def warn(self, line: str) -> None:
        """Say a warning, and keep it in warnings.log."""
        self.console.warn(line)
        self.files.warned(line)

    def note_losses(self) -> None:
        """Say on standard error, if that is left, and in warnings.log that standard output or
        error was lost.
        """
        while self.losses and self.ranks.is_rank0:
            line = self.losses.pop(0)
            print(f"train.py: {line}", file=sys.stderr)
            self.files.warned(f"after step {self.trainer.done}: {line}")

    def restore(self) -> None:
        """Take the run up at its checkpoint: what later steps wrote is removed, for they will be
        made again.

        A new run that starts from an earlier one's policy takes over which problems that has been
        trained on.
        """
        for warning in [*self.warnings, *self.notes, *self.trainer.policy.notes]:
            self.warn(warning)
        if self.checkpoint is None:
            if self.config.start:
                self._begin_after(Path(self.config.start))
            return
        state = json.loads((self.checkpoint / "trainer.json").read_text())
        try:
            self.trainer.restore(state["trainer"])
        except KeyError as error:
            raise UserError(
                f"{self.checkpoint}: its state lacks {error}; the run was made by another version"
            ) from error
        self.saver.restore(self.checkpoint, state)
        self._record_levels()
        done = self.trainer.done
        self.files.rewind(done)
        ended = self.trainer.ended
        self.console.say(
            f"resumed {self.folder} after step {done}"
            + (f", which was its end: {ended}" if ended else "")
        )

    def _begin_after(self, start: Path) -> None:
        """Take over what the policy of the checkpoint `start` has been trained on: it stays out of
        evaluations.
        """
        state = json.loads((start / "trainer.json").read_text())["trainer"]
        self.trainer.stream.begin_after(state)
        self.files.began(state["seen"])
        self.console.say(
            f"started from {start}: {len(state['seen']):,} problems that it was trained on stay "
            "out of evaluations"
        )

    def save_failed(self) -> str:
        """Write the batch of a step that could not be finished, for inspection; return where it
        is, in words.
        """
        self.files.keep("failed", self.trainer.done + 1, self.trainer.current)
        return (
            f"; its batch is saved in {file_of(self.folder, 'failed', self.trainer.done + 1)}"
            if self.ranks.is_rank0
            else ""
        )

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Within this block checkpoints are written in the background; the one under way when it
        fails is finished first.

        A second Ctrl-C waits for nothing: the folder that is half written is removed by the next
        start.
        """
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException:
            try:
                self.saver.collect(wait=True)
            except UserError as error:  # what ends the run comes first
                self.warn(str(error))
            raise

    def save_if_due(self, report: StepReport) -> None:
        """Save the state of this step where the rules ask for it, and say what became of the save
        before.
        """
        reward_range = self.trainer.reward_range
        earned = (
            rescaled(report.metrics["reward"], reward_range)
            if reward_range
            else report.metrics["value"]
        )
        is_last = bool(self.trainer.ended) or report.step == self.config.steps
        self.saver.save_if_due(report.step, earned, report.metrics["step_time"], is_last=is_last)

    def leave(self, signal: str) -> None:
        """Write a checkpoint of the last step, if it has none yet, because a signal ends the run
        here; say so.
        """
        if self.saver.saved != self.trainer.done:
            self.saver.save([signal])
        self.saver.collect(wait=True)
        self.console.say(
            f"{signal}: stopped after step {self.trainer.done}, which is saved; go on with "
            f"--resume {self.folder}"
        )

    def preflight(self) -> Start | None:
        """Sample a few problems of each level, show what came of it, and let the run start where
        it can learn.

        See `grpo.curriculum.preflight`. None, and nothing done, without a pre-flight and for a run
        that goes on, whose state holds what was decided.
        """
        config, trainer = self.config, self.trainer
        if self.checkpoint or config.preflight == "off":
            return None

        levels = list(trainer.curriculum.levels)
        rows, groups, perplexity = self._survey(levels)

        # No easier level is the start without the ramp, nor of a dataset of which one level was
        # asked for.
        may_ease = config.ramp and (config.curriculum or not config.dataset)
        eligible = [row for row in rows if may_ease or row.level in levels]
        start = (choose_mixed_start if config.mixed else choose_start)(eligible, levels)
        if start.levels != levels:
            trainer.curriculum = build_curriculum(config, start.levels)
            check_fit(trainer)

        level = trainer.curriculum.level
        figures = figures_of(rows, perplexity, start)
        decision = Decision(0, levels[0], level, "preflight", start.why, figures)
        self.files.keep("preflight", 0, groups)
        self.files.decided([decision])
        self._record_levels()
        self._show_preflight(start, rows, perplexity)
        return start

    def _survey(
        self, levels: Sequence[int]
    ) -> tuple[list[LevelSurvey], list[Group], Perplexity | None]:
        """Return a row for each level up to the last of the `levels`, the groups sampled, and the
        model's perplexity.
        """
        config, trainer = self.config, self.trainer
        mark = "".join(f"CONTROL {control}  " for control in config.mark.values())
        self.console.say(
            f"{mark}pre-flight: {PROBLEMS} problems a level, {config.group_size} completions each"
        )
        rows, groups = survey(
            trainer.policy,
            trainer.stream.supply,
            levels_to_survey(trainer.stream.supply, levels),
            SurveySettings(self.heldout.sampling, config.group_size, config.variance_threshold),
            training_levels=levels,
            ranks=self.ranks,
        )
        texts = plain_texts_of(trainer.task, "validation")
        return (
            rows,
            groups,
            self.ranks.on_rank0(lambda: measure_perplexity(trainer.policy, texts)),
        )

    def _show_preflight(
        self, start: Start, rows: Sequence[LevelSurvey], perplexity: Perplexity | None
    ) -> None:
        """Print the table, the perplexity, the decision, and the warnings."""
        self.console.survey([dataclasses.asdict(row) for row in rows])
        if perplexity:
            self.console.say(perplexity.line())
            if warning := perplexity.warning(rows):
                self.warn(warning)

        level, levels = start.levels[0], start.levels
        by_way = f" (by way of {' → '.join(map(str, levels))})" if len(levels) > 1 else ""
        if start.level is not None:
            self.console.say(f"the run starts at level {level}{by_way}: {start.why}")
        elif self.wants_imitation(start):
            self.console.say(
                f"the run starts at level {level}{by_way} and imitates right answers first: "
                f"{start.why}"
            )
        else:
            self.warn(
                f"{start.why}: training starts at level {level}, as asked, and may well learn "
                "nothing; " + advice(rows)
            )

    def _record_levels(self) -> None:
        """Keep in config.yaml the levels that the run climbs, which the pre-flight may have
        changed.
        """
        if not self.ranks.is_rank0:
            return
        self.about["training_levels"] = list(self.trainer.curriculum.levels)
        self.config.save(self.folder / "config.yaml", **self.about)

    def leave_untrained(self) -> None:
        """End a run that was to make its pre-flight only: say where it is and what comes next."""
        self.console.say(
            "--preflight only: nothing was trained; the pre-flight is in "
            f"{self.folder / 'curriculum.jsonl'}. To train, give "
            "the same command without --preflight only (and another --name, if any)"
        )
        self.files.finish()

    def evaluate(self, is_final: bool = False) -> None:
        """Report the policy's score on held-out problems: a line for each level in eval.jsonl.

        The level is the one asked for, and on a ladder that is climbed by held-out problems the
        current one, too; at the end also the first one, which was evaluated before training.
        """
        config, curriculum = self.config, self.trainer.curriculum
        levels = {self.level}
        if config.promote_by == "heldout":
            levels |= {curriculum.level, curriculum.levels[0]} if is_final else {curriculum.level}

        every = []
        for level in sorted(levels):
            every += self.heldout.evaluate(level, EVAL_SEED, config.eval_problems, "report")[1]
        if every:
            self.files.keep("eval", self.trainer.done, every)

    def wants_imitation(self, start: Start | None) -> bool:
        """Return whether right answers are imitated before the first step: as asked, or where no
        level is within reach.

        `start` is what the pre-flight chose; None without one. A run that goes on has imitated
        already. Raises UserError where imitation is asked for and the task's targets are not right
        answers.
        """
        way = self.config.warm_start
        if self.checkpoint or way not in ("auto", "imitation"):
            return False

        is_needed = way == "imitation" or start is not None and start.level is None
        if way == "imitation" and not self.trainer.knows_answers:
            raise UserError(
                f"--warm-start imitation: task {self.config.task} does not score the target of its "
                "problems as right, so "
                "there is nothing to imitate; give --warm-start off"
            )
        return is_needed and self.trainer.knows_answers

    def warm_start(self) -> None:
        """Imitate right answers before the first step, write what came of it, and save the policy
        as it is then.
        """
        trainer = self.trainer
        level = trainer.curriculum.level

        def validate() -> float:
            size = WARM_START_PROBLEMS
            line, _ = self.heldout.evaluate(level, WARM_START_SEED, size, "warm start")
            return line["mean"] if line else 0.0

        answers = trainer.imitate(validate)
        made = trainer.imitation
        assert made is not None
        self.files.imitated(answers)
        decision = Decision(0, level, level, "imitation", made.why, made.to_json())
        self.files.decided([decision])
        self.console.say(decision.line)
        size = self.config.eval_problems
        _, groups = self.heldout.evaluate(self.level, EVAL_SEED, size, "imitation")
        self.files.keep("imitated", 0, groups)
        self.saver.save(["after imitation"])

    def promote_if_due(self) -> None:
        """Make the validation check of the current level, if the curriculum wants one, and let it
        decide.
        """
        curriculum, step = self.trainer.curriculum, self.trainer.done
        if not curriculum.wants_validation(step):
            return
        line, groups = self.heldout.evaluate(
            curriculum.level, PROMOTION_SEED, self.config.promote_problems, "promotion"
        )
        if line is None:
            return
        self.files.keep("promotion", step, groups)
        decisions = curriculum.observe_validation(step, line)
        self.files.decided(decisions)
        for decision in decisions:
            self.console.say(decision.line)

    def end_if_solved(self) -> None:
        """End the run where the last level is solved in training and on held-out problems."""
        trainer, step = self.trainer, self.trainer.done
        if trainer.ended or not trainer.seems_solved:
            return

        level = trainer.curriculum.level
        line, groups = self.heldout.evaluate(
            level, PROMOTION_SEED, self.config.promote_problems, "promotion"
        )
        if line is None:
            return
        self.files.keep("promotion", step, groups)
        if not is_solved(line):
            return

        trainer.solved = (
            f"every training group was solved for {trainer.progress.solved} steps, and the "
            f"held-out mean is {line['mean']:.3f} [{line['ci_low']:.3f}, {line['ci_high']:.3f}]"
        )
        figures = {name: line[name] for name in ("mean", "ci_low", "ci_high", "n")}
        self.files.decided([Decision(step, level, level, "solved", trainer.solved, figures)])

    def finish(self) -> int:
        """Evaluate the trained policy, say what the run came to, and return its exit status."""
        if self.ranks.on_rank0(lambda: self._last_report_step() < self.trainer.done):
            self.evaluate(is_final=True)
        self.saver.collect(wait=True)
        return self.ranks.on_rank0(self._conclude)

    def _last_report_step(self) -> int:
        return max((line["step"] for line in self.reports), default=-1)

    def _conclude(self) -> int:
        """Write and show the verdict; return the exit status. Rank 0 alone."""
        trainer = self.trainer
        if trainer.ended and not trainer.stopped:
            self.console.say(f"ended after step {trainer.done}: {trainer.ended}")

        verdict = verdict_of(self.folder, trainer, self.level)
        said = load_run(self.folder).verdict
        if said is None or said["step"] < trainer.done:
            self.files.concluded({**verdict.to_json(), **self.config.mark})
        self._show_summary(verdict)
        if trainer.stopped:
            self._record_stop(trainer.stopped)
        self.files.finish()
        return verdict.exit_status

    def _show_summary(self, verdict: Verdict) -> None:
        config, task = self.config, self.trainer.task
        self.console.say(supply_line(self.folder, self.trainer, self.level))
        reports = [line for line in self.reports if line["level"] == config.level]
        self.console.summary(
            reports[:1],
            reports[-1:],
            files_of(self.folder),
            next_commands(self.folder, config, self.trainer.done),
            verdict.lines(
                getattr(task, "metric", "score"),
                getattr(task, "level_unit", ""),
                config.mark.get("control", ""),
            ),
        )

    def _record_stop(self, reason: str) -> None:
        """Keep in config.yaml why the run was stopped."""
        self.config.save(
            self.folder / "config.yaml",
            **self.about,
            stopped={"step": self.trainer.done, "reason": reason},
        )
        self.console.say(f"stopped after step {self.trainer.done}: {reason}")

    @property
    def reports(self) -> list[dict[str, Any]]:
        """The reported evaluations: the lines of eval.jsonl with the purpose "report"."""
        return load_run(self.folder).reports


def check_fit(trainer: Trainer, probes: int = 16) -> None:
    """Raise UserError before anything is trained where a level does not fit the context or the
    completion budget.
    """
    assert trainer.config.level is not None, "the configuration is resolved"
    for level in sorted({*trainer.curriculum.levels, trainer.config.level}):
        stream = problem_stream(trainer.task, seed=trainer.config.seed, split="train", level=level)
        for problem in islice(fitting(trainer.policy, stream, []), probes):
            trainer.stream.budget(trainer.policy.encode(problem), problem)
