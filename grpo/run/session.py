"""A run: its directory, its defaults, what is written when, and how it is taken up again.

The directory holds config.yaml, metrics.jsonl, eval.jsonl, curriculum.jsonl, rollouts/,
samples.log and checkpoints/ (see docs/run-files.md). Of several ranks the first one writes it; the
others go through the same motions and write nothing.
"""

import dataclasses
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import peft
import torch
import transformers

from data.files import read_json
from grpo.config import ON_RESUME, Config, load_config, names_in, spelled, translated
from grpo.curriculum.ladder import PROMOTE_AT, is_shown
from grpo.curriculum.preflight import (
    PROBLEMS,
    LevelSurvey,
    Perplexity,
    Start,
    SurveySettings,
    advice,
    choose_mixed_start,
    choose_start,
    figures_of,
    levels_to_survey,
    measure_perplexity,
    survey,
)
from grpo.distributed import ALONE, Ranks
from grpo.evaluate import (
    Sampling,
    budgets,
    evaluate,
    find_problems,
    summarise,
    truncated_share,
    truncation_warning,
)
from grpo.learn.optimizer import default_rate
from grpo.learn.update import named_tensors
from grpo.model.finite import check_loaded
from grpo.model.policy import Policy
from grpo.model.prompts import middle_left_out, sent_lines
from grpo.records import Decision, Group, StepReport
from grpo.rollout.generate import fitting
from grpo.run import checkpoint as checkpoints
from grpo.run.background import HostMemory, Save, Saved, Writer
from grpo.run.checkpoint import (
    CheckpointRules,
    find_resume,
    load_optimizer,
    load_rng,
    rng_state,
    save_optimizer,
)
from grpo.run.files import NoFiles, RunFiles
from grpo.run.lock import locked
from grpo.run.logs import read_metrics
from grpo.run.reader import load_run
from grpo.run.rollouts import file_of
from grpo.run.sources import (
    NAME,
    accepted,
    check,
    differences,
    read_sources,
    sources_now,
    unknown,
)
from grpo.run.start import start_from
from grpo.text import shortened
from grpo.trainer import Trainer, curriculum_of
from grpo.verdict import Verdict, reach_verdict, values_by_problem
from tasks.base import (
    REGISTRY,
    Task,
    UserError,
    plain_texts_of,
    problem_stream,
    rescaled,
    summary_of,
    trust,
)

EVAL_SEED = 1_000_003  # held-out problems are the same in every run and step, whatever its seed
BUILTIN_RATE = 2e-4
WARM_START_SEED = 3_000_017  # of the looks that end an imitation
WARM_START_PROBLEMS = 32
PROMOTION_SEED = (
    2_000_003  # of the looks that promotion hangs on: what is reported was not chosen by
)


class Display(Protocol):
    """Where a run says what it does, e.g. `grpo.show.console.Console`."""

    def say(self, line: str, style: str = "") -> None: ...
    def warn(self, line: str) -> None: ...
    def prompt(self, title: str, lines: Sequence[str]) -> None: ...
    def survey(self, rows: Sequence[Mapping[str, Any]]) -> None: ...
    def evaluation(self, line: Mapping[str, Any]) -> None: ...
    def summary(
        self,
        before: Sequence[Mapping[str, Any]],
        after: Sequence[Mapping[str, Any]],
        files: Mapping[str, str],
        next_commands: Sequence[str],
        verdict: Sequence[str] = (),
    ) -> None: ...


def open_run(
    config: Config, given: dict[str, Any], *, home: Path, ranks: Ranks = ALONE
) -> tuple["Run", Config]:
    """Return the run and its configuration: a new one below `home`, or the one that --resume
    names.
    """
    if config.resume is None:
        config, warnings = start_from(config, given)
        folder = ranks.first(lambda: home / config.name if config.name else _free(home, config))
        if ranks.first(folder.exists):
            raise UserError(
                f"--name {config.name}: {folder} exists; give another name, or --resume {folder}"
            )
        return Run(folder, warnings=warnings, ranks=ranks), config
    path = _latest(home) if config.resume == "latest" else Path(config.resume)
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
        ranks: Ranks = ALONE,
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
    def held(self):
        """Keep every other process from writing this run, from now on or from when its directory
        is made, to the end of the block.
        """
        with ExitStack() as self.locks:
            if self.checkpoint and self.ranks.is_first:
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

    def check_sources(self, task: Task):
        """Take the fingerprints of what the run depends on; raise UserError where a run that goes
        on has others.

        Called before anything is loaded or written, and by `attach` once more where a model of the
        hub was not on disk yet.
        """
        config = self.config
        self.sources = self.ranks.first(
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

    def attach(self, trainer: Trainer, console: Display):
        """Make the directory; from here on everything is written there."""
        self.trainer, self.console, config = trainer, console, self.config
        self.rules = CheckpointRules(
            config.save_every, config.save_threshold, config.best_margin, config.best_spacing
        )
        self.best: str | None = None  # the name of the checkpoint with the highest reward
        self.saved: int | None = None  # the last step that is saved, or being saved
        self.memory, self.writer = HostMemory(), Writer()
        self.step_times: list[float] = []  # in seconds, until the spacing of saves is chosen
        self.chosen_spacing: int | None = None  # by the last save, on the first rank
        self.warned: set[str] = set()
        self.files: RunFiles | NoFiles = NoFiles()
        if self.sources.get("base") is None:
            self.check_sources(trainer.task)
        if not self.ranks.is_first:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.checkpoint:
            self.locks.enter_context(locked(self.folder))
        self.about = self.facts()
        config.save(self.folder / "config.yaml", **self.about)
        done = checkpoints.step_of(self.checkpoint) if self.checkpoint else 0
        self.files = RunFiles(self.folder, dataclasses.asdict(config), config.mark, done, self.warn)

    def show_prompt(self):
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

    def warn(self, line: str):
        """Say a warning, and keep it in warnings.log."""
        self.console.warn(line)
        self.files.warned(line)

    def note_losses(self):
        """Say on standard error, if that is left, and in warnings.log that standard output or
        error was lost.
        """
        while self.losses and self.ranks.is_first:
            line = self.losses.pop(0)
            print(f"train.py: {line}", file=sys.stderr)
            self.files.warned(f"after step {self.trainer.done}: {line}")

    def restore(self):
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
        self.rules.load_state_dict(state["rules"])
        if self.rules.spacing is None:
            note = read_json(self.checkpoint / "manifest.json")["note"]
            self.rules.spacing = note.get("spacing")
        self.best, self.saved = state["best"], checkpoints.step_of(self.checkpoint)
        load_optimizer(self.checkpoint, self.trainer.optimizer)
        check_loaded(
            named_tensors(self.trainer.policy, self.trainer.optimizer), str(self.checkpoint)
        )
        load_rng(self.checkpoint)
        self._record_rungs()
        done = self.trainer.done
        self.files.rewind(done)
        ended = self.trainer.ended
        self.console.say(
            f"resumed {self.folder} after step {done}"
            + (f", which was its end: {ended}" if ended else "")
        )

    def _begin_after(self, start: Path):
        """Take over what the policy of the checkpoint `start` has been trained on: it stays out of
        evaluations.
        """
        state = json.loads((start / "trainer.json").read_text())["trainer"]
        self.trainer.begin_after(state)
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
            if self.ranks.is_first
            else ""
        )

    @contextmanager
    def saving(self):
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
                self._collect_save(wait=True)
            except UserError as error:  # what ends the run comes first
                self.warn(str(error))
            raise

    def save_if_due(self, report: StepReport):
        """Save the state of this step where the rules ask for it, and say what became of the save
        before.
        """
        self._collect_save()
        self._settle_spacing(report.metrics["step_time"])
        reward_range = self.trainer.reward_range
        earned = (
            rescaled(report.metrics["reward"], reward_range)
            if reward_range
            else report.metrics["value"]
        )
        reasons = self.rules.reasons(report.step, earned)
        if not reasons and (self.trainer.ended or report.step == self.config.steps):
            reasons = ["the last step"]
        if reasons:
            self._save(reasons)

    def _settle_spacing(self, step_time: float):
        """Until the rules know how far apart saves for a new best are, ask the last save; all
        ranks learn it alike.
        """
        if self.rules.spacing is not None:
            return
        self.step_times.append(step_time)
        if self.rules.last is not None:
            self.rules.spacing = self.ranks.first(lambda: self.chosen_spacing)

    def leave(self, signal: str):
        """Write a checkpoint of the last step, if it has none yet, because a signal ends the run
        here; say so.
        """
        if self.saved != self.trainer.done:
            self._save([signal])
        self._collect_save(wait=True)
        self.console.say(
            f"{signal}: stopped after step {self.trainer.done}, which is saved; go on with "
            f"--resume {self.folder}"
        )

    def _save(self, reasons: list[str]):
        """Copy the state as it is after this step, and have the copy written while training goes
        on.
        """
        begun = time.perf_counter()
        self._collect_save(wait=True)
        self.saved = self.trainer.done
        if any("best" in reason for reason in reasons):
            self.best = f"step-{self.saved:06d}"
        optimizer = self.trainer.optimizer.state_dict()  # of all ranks
        if not self.ranks.is_first:
            return

        tensors, is_copied = self._copied(self.trainer.policy.saved_tensors(), optimizer)
        best = self.folder / "checkpoints" / self.best if self.best else None
        save = Save(
            self.folder,
            self.saved,
            partial(self._write_state, tensors, self._state_texts()),
            reasons,
            waiting=time.perf_counter() - begun,
            spacing=self.rules.spacing or self.chosen_spacing,
            step_times=tuple(self.step_times),
            keep=best if self.config.keep_best else None,
            in_background=is_copied,
        )
        if is_copied:
            self.writer.start(save)
        else:
            self._say_saved(save())

    def _copied(
        self, weights: dict[str, torch.Tensor], optimizer: dict[str, Any]
    ) -> tuple[dict[str, Any], bool]:
        """Return "weights" and "optimizer" in host memory, or, where there is no room for them, as
        they are and False.
        """
        live = {"weights": weights, "optimizer": optimizer}
        if self.trainer.optimizer.is_shared:
            del live["optimizer"]  # has been gathered into host memory
        try:
            return {"optimizer": optimizer, **self.memory.copy(live)}, True
        except MemoryError as error:
            self._warn_once(
                f"no host memory for a copy of what is saved ({error}): training waits while "
                "checkpoints are written"
            )
            return {"optimizer": optimizer, "weights": weights}, False

    def _collect_save(self, *, wait: bool = False):
        """Say that the checkpoint under way is written, if it is; raise the writer's error. With
        `wait` none is under way after it.
        """
        if saved := self.writer.collect(wait=wait):
            self._say_saved(saved)

    def _say_saved(self, saved: Saved):
        for line in (saved.line, *saved.removed):
            self.console.say(line)
        if self.rules.spacing is self.chosen_spacing is None and saved.spacing:
            self.chosen_spacing = saved.spacing
            self.console.say(
                f"checkpoints for nothing but a new best are from now on {saved.spacing} steps "
                "apart or more, "
                f"to take {checkpoints.SHARE:.0%} of the time at most"
            )

    def _state_texts(self) -> dict[str, str]:
        """Return the JSON files of a checkpoint as they are now."""
        state = {
            "trainer": self.trainer.state(),
            "rules": self.rules.state_dict(),
            "best": self.best,
        }
        sources = self.sources | {
            "config": dataclasses.asdict(self.config),
            "accepted": self.accepted,
        }
        return {
            "rng.json": json.dumps(rng_state()),
            "trainer.json": json.dumps(state),
            NAME: json.dumps(sources, indent=1) + "\n",
        }

    def _write_state(self, tensors: dict[str, Any], texts: Mapping[str, str], folder: Path):
        self.trainer.policy.save(folder, tensors["weights"])
        save_optimizer(folder, tensors["optimizer"])
        for name, text in texts.items():
            (folder / name).write_text(text)

    def preflight(self) -> Start | None:
        """Sample a few problems of each level, show what came of it, and let the run start where
        it can learn.

        See `grpo.curriculum.preflight`. None, and nothing done, without a pre-flight and for a run
        that goes on, whose state holds what was decided.
        """
        config, trainer = self.config, self.trainer
        if self.checkpoint or config.preflight == "off":
            return None

        rungs = list(trainer.curriculum.rungs)
        rows, groups, perplexity = self._survey(rungs)

        # No easier level is the start without the ramp, nor of a dataset of which one level was
        # asked for.
        may_ease = config.ramp and (config.curriculum or not config.dataset)
        eligible = [row for row in rows if may_ease or row.level in rungs]
        start = (choose_mixed_start if config.mixed else choose_start)(eligible, rungs)
        if start.rungs != rungs:
            trainer.curriculum = curriculum_of(config, start.rungs)
            check_fit(trainer)

        level = trainer.curriculum.level
        figures = figures_of(rows, perplexity, start)
        decision = Decision(0, rungs[0], level, "preflight", start.why, figures)
        self.files.keep("preflight", 0, groups)
        self.files.decided([decision])
        self._record_rungs()
        self._show_preflight(start, rows, perplexity)
        return start

    def _survey(
        self, rungs: Sequence[int]
    ) -> tuple[list[LevelSurvey], list[Group], Perplexity | None]:
        """Return a row for each level up to the last of the `rungs`, the groups sampled, and the
        model's perplexity.
        """
        config, trainer = self.config, self.trainer
        mark = "".join(f"CONTROL {control}  " for control in config.mark.values())
        self.console.say(
            f"{mark}pre-flight: {PROBLEMS} problems a level, {config.group_size} completions each"
        )
        rows, groups = survey(
            trainer.policy,
            trainer.supply,
            levels_to_survey(trainer.supply, rungs),
            SurveySettings(self._sampling, config.group_size, config.variance_threshold),
            rungs=rungs,
            ranks=self.ranks,
        )
        texts = plain_texts_of(trainer.task, "validation")
        return (
            rows,
            groups,
            self.ranks.first(lambda: measure_perplexity(trainer.policy, texts)),
        )

    def _show_preflight(
        self, start: Start, rows: Sequence[LevelSurvey], perplexity: Perplexity | None
    ):
        """Print the table, the perplexity, the decision, and the warnings."""
        self.console.survey([dataclasses.asdict(row) for row in rows])
        if perplexity:
            self.console.say(perplexity.line())
            if warning := perplexity.warning(rows):
                self.warn(warning)

        level, rungs = start.rungs[0], start.rungs
        by_way = f" (by way of {' → '.join(map(str, rungs))})" if len(rungs) > 1 else ""
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

    def _record_rungs(self):
        """Keep in config.yaml the levels that the run climbs, which the pre-flight may have
        changed.
        """
        if not self.ranks.is_first:
            return
        self.about["rungs"] = list(self.trainer.curriculum.rungs)
        self.config.save(self.folder / "config.yaml", **self.about)

    def leave_untrained(self):
        """End a run that was to make its pre-flight only: say where it is and what comes next."""
        self.console.say(
            "--preflight only: nothing was trained; the pre-flight is in "
            f"{self.folder / 'curriculum.jsonl'}. To train, give "
            "the same command without --preflight only (and another --name, if any)"
        )
        self.files.finish()

    @property
    def _sampling(self) -> Sampling:
        """How training and evaluations alike sample."""
        config = self.config
        return Sampling(config.temperature, config.top_k, config.top_p, config.max_new_tokens or 0)

    def evaluate(self, is_final: bool = False):
        """Report the policy's score on held-out problems: a line for each level in eval.jsonl.

        The level is the one asked for, and on a ladder that is climbed by held-out problems the
        current one, too; at the end also the first one, which was evaluated before training.
        """
        config, curriculum = self.config, self.trainer.curriculum
        levels = {self.level}
        if config.promote_by == "heldout":
            levels |= {curriculum.level, curriculum.rungs[0]} if is_final else {curriculum.level}

        every = []
        for level in sorted(levels):
            every += self._evaluate(level, EVAL_SEED, config.eval_problems, "report")[1]
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

    def warm_start(self):
        """Imitate right answers before the first step, write what came of it, and save the policy
        as it is then.
        """
        trainer = self.trainer
        level = trainer.curriculum.level

        def look() -> float:
            line, _ = self._evaluate(level, WARM_START_SEED, WARM_START_PROBLEMS, "warm start")
            return line["mean"] if line else 0.0

        answers = trainer.imitate(look)
        made = trainer.started
        assert made is not None
        self.files.imitated(answers)
        decision = Decision(0, level, level, "imitation", made.why, made.to_json())
        self.files.decided([decision])
        self.console.say(decision.line)
        _, groups = self._evaluate(self.level, EVAL_SEED, self.config.eval_problems, "imitation")
        self.files.keep("imitated", 0, groups)
        self._save(["after imitation"])

    def promote_if_due(self):
        """Where the curriculum wants a look at held-out problems of its level, evaluate them and
        let it decide.
        """
        curriculum, step = self.trainer.curriculum, self.trainer.done
        if not curriculum.wants_look(step):
            return
        line, groups = self._evaluate(
            curriculum.level, PROMOTION_SEED, self.config.promote_problems, "promotion"
        )
        if line is None:
            return
        self.files.keep("promotion", step, groups)
        decisions = curriculum.judge(step, line)
        self.files.decided(decisions)
        for decision in decisions:
            self.console.say(decision.line)

    def _evaluate(
        self, level: int, seed: int, size: int, purpose: str
    ) -> tuple[dict[str, Any] | None, list[Group]]:
        """Score the policy on held-out problems that training has not seen.

        Writes and shows a line; returns it and the answers. Without such problems the evaluation is
        skipped with a warning, (None, []) is returned, and training goes on.
        """
        trainer, task = self.trainer, self.trainer.task
        sampling = self._sampling
        found = find_problems(
            trainer.policy,
            task,
            level=level,
            split="validation",
            seed=seed,
            size=size,
            seen=trainer.seen.keys(),
            sampling=sampling,
        )
        if not found.problems:
            self._warn_once(f"no {purpose} evaluation at level {level}: {found.why_none}")
            return None, []

        # A report and a promotion check may share a problem of a small family: never its
        # completion as well.
        mine = evaluate(
            trainer.policy,
            task,
            self.ranks.share(found.problems),
            sampling=sampling,
            seed=0 if seed == EVAL_SEED else seed,
        )
        groups = self.ranks.gather(mine)
        for index, group in enumerate(groups):
            group.index = index

        line = {
            "step": trainer.done,
            "purpose": purpose,
            **self._circumstances(level),
            "budget": max(budgets(trainer.policy, task, found.problems, sampling)),
            "asked": found.asked,
            "dropped": found.dropped,
            "too_long": found.too_long,
            "metric": getattr(task, "metric", "score"),
            **summarise(groups),
            "truncated": truncated_share(groups),
        }
        self.files.evaluated(line)
        self.console.evaluation(line)
        self._warn_of_truncation(line)
        return line, groups

    def _circumstances(self, level: int) -> dict[str, Any]:
        """Return what is evaluated and how it is sampled, for a line of eval.jsonl."""
        config = self.config
        return {
            **config.mark,
            "task": config.task,
            "level": level,
            "unit": getattr(self.trainer.task, "level_unit", ""),
            "split": "validation",
            "temperature": config.temperature,
            "top_k": config.top_k,
            "top_p": config.top_p,
        }

    def _warn_once(self, text: str):
        """Say a warning, unless it has been said since the run was opened."""
        if text not in self.warned:
            self.warned.add(text)
            self.console.warn(text)

    def _warn_of_truncation(self, line: dict[str, Any]):
        """Warn where most completions of an evaluation were truncated, again only after one where
        they were not.
        """
        text, key = truncation_warning(line), f"truncated/{line['purpose']}/{line['level']}"
        if not text:
            self.warned.discard(key)
        elif key not in self.warned:
            self.warned.add(key)
            self.console.warn(text)

    def end_if_solved(self):
        """End the run where the last level is solved in training and on held-out problems."""
        trainer, step = self.trainer, self.trainer.done
        if trainer.ended or not trainer.seems_solved:
            return

        level = trainer.curriculum.level
        line, groups = self._evaluate(
            level, PROMOTION_SEED, self.config.promote_problems, "promotion"
        )
        if line is None:
            return
        self.files.keep("promotion", step, groups)
        if not _is_solved(line):
            return

        trainer.solved = (
            f"every training group was solved for {trainer.progress.solved} steps, and the "
            f"held-out mean is {line['mean']:.3f} [{line['ci_low']:.3f}, {line['ci_high']:.3f}]"
        )
        figures = {name: line[name] for name in ("mean", "ci_low", "ci_high", "n")}
        self.files.decided([Decision(step, level, level, "solved", trainer.solved, figures)])

    def finish(self) -> int:
        """Evaluate the trained policy, say what the run came to, and return its exit status."""
        if self.ranks.first(lambda: self._last_report_step() < self.trainer.done):
            self.evaluate(is_final=True)
        self._collect_save(wait=True)
        return self.ranks.first(self._conclude)

    def _last_report_step(self) -> int:
        return max((line["step"] for line in self.reports), default=-1)

    def _conclude(self) -> int:
        """Write and show the verdict; return the exit status. Rank 0 alone."""
        trainer = self.trainer
        if trainer.ended and not trainer.stopped:
            self.console.say(f"ended after step {trainer.done}: {trainer.ended}")

        verdict = self._verdict()
        said = load_run(self.folder).verdict
        if said is None or said["step"] < trainer.done:
            self.files.concluded({**verdict.to_json(), **self.config.mark})
        self._show_summary(verdict)
        if trainer.stopped:
            self._record_stop(trainer.stopped)
        self.files.finish()
        return verdict.exit_status

    def _verdict(self) -> Verdict:
        """Return the verdict at the asked level; failing that, at an easier one that
        was learned.
        """
        run, trainer = load_run(self.folder), self.trainer
        first_step = min((line["step"] for line in run.reports), default=trainer.done)
        before = {line["level"]: line for line in run.reports if line["step"] == first_step}
        stored = run.steps("eval")
        imitated = run.groups(0, "imitated") if run.steps("imitated") else []
        groups = [
            run.groups(step, "eval") if step in stored else []
            for step in (first_step, trainer.done)
        ]

        verdicts = {
            level: reach_verdict(
                level,
                values_by_problem(groups[0], level),
                values_by_problem(groups[1], level),
                run.metrics,
                was_solved=level in before and _is_solved(before[level]),
                stopped=trainer.stopped,
                imitated=values_by_problem(imitated, level) or None,
            )
            for level in sorted({*before, self.level}, reverse=True)
        }
        learned = [verdict for verdict in verdicts.values() if verdict.kind == "learned"]
        asked = verdicts[self.config.level]
        return asked if asked in learned or not learned else learned[0]

    def _show_summary(self, verdict: Verdict):
        reports, config = self.reports, self.config
        files = {
            "metrics": self.folder / "metrics.jsonl",
            "rollouts": self.folder / "rollouts",
            "samples": self.folder / "samples.log",
            "checkpoints": self.folder / "checkpoints",
        }
        self.console.say(self._supplied())
        flag = "--words" if config.task == "interleave" else "--levels"
        options = "".join(
            f" --{name} {shlex.quote(value)}" for name, value in config.task_options.items()
        )
        before, after = (
            [line for line in reports if line["level"] == config.level][i:][:1] for i in (0, -1)
        )
        task = self.trainer.task
        self.console.summary(
            before,
            after,
            {name: str(path) for name, path in files.items()},
            [
                f"python eval.py --model {self.folder} --task {config.task}{options} {flag} "
                f"{config.level}",
                f"python -m grpo.inspect {self.folder} step {self.trainer.done}",
                f"python -m grpo.report {self.folder}",
                f"python -m tasks.audit {self.folder}"
                + (f" --task {config.task}" if config.task not in REGISTRY else ""),
            ],
            verdict.lines(
                getattr(task, "metric", "score"),
                getattr(task, "level_unit", ""),
                config.mark.get("control", ""),
            ),
        )

    def _record_stop(self, reason: str):
        """Keep in config.yaml why the run was stopped."""
        self.config.save(
            self.folder / "config.yaml",
            **self.about,
            stopped={"step": self.trainer.done, "reason": reason},
        )
        self.console.say(f"stopped after step {self.trainer.done}: {reason}")

    @property
    def reports(self) -> list[dict[str, Any]]:
        """Return the reported evaluations: the lines of eval.jsonl that are not looks."""
        return load_run(self.folder).reports

    def _supplied(self) -> str:
        """Return how many different problems were trained on, how often one came back, and the
        share of a finite family.
        """
        before = self.trainer.inherited
        seen = len(self.trainer.seen) - before
        drawn = sum(line["groups/count"] for line in read_metrics(self.folder / "metrics.jsonl"))
        imitated = self.trainer.started.answers if self.trainer.started else 0
        size = self.trainer.supply.family_size(self.level)
        share = f", {seen / size:.1%} of the {size:,} that there are" if size else ""
        earlier = f", besides {before:,} in earlier runs" if before else ""
        more = f" and {imitated:,} imitated answers" if imitated else ""
        return f"trained on {seen:,} different problems in {drawn:,} draws{more}{share}{earlier}"


def _is_solved(line: Mapping[str, Any]) -> bool:
    """Return whether a held-out evaluation passes the test that a ladder asks for."""
    return is_shown(line["mean"], line["ci_low"], PROMOTE_AT["heldout"])


def check_fit(trainer: Trainer, probes: int = 16):
    """Raise UserError before anything is trained where a level does not fit the context or the
    completion budget.
    """
    assert trainer.config.level is not None, "the configuration is resolved"
    for level in sorted({*trainer.curriculum.rungs, trainer.config.level}):
        stream = problem_stream(trainer.task, seed=trainer.config.seed, split="train", level=level)
        for problem in islice(fitting(trainer.policy, stream, []), probes):
            trainer.budget(trainer.policy.encode(problem), problem)


def _free(home: Path, config: Config) -> Path:
    """Return a directory that does not exist yet, named after task, level and seed."""
    task = re.sub(r"[^a-z0-9]+", "-", config.task.rpartition(":")[2].lower())
    level = f"-{config.level}" if config.level else ""
    options = "".join(
        f"-{part}"
        for value in config.task_options.values()
        if (part := re.sub(r"[^a-z0-9-]", "", Path(value).name.lower()))
    )
    supply = f"-{config.problems.replace(':', '')}" if config.problems != "fresh" else ""
    control = "".join(f"-{name}" for name in config.mark.values())
    base = f"{task}{options}{level}{supply}{control}-seed{config.seed}"
    names = [base, *(f"{base}-{i}" for i in range(2, 10_000))]
    return next(home / name for name in names if not (home / name).exists())


def _latest(home: Path) -> Path:
    runs = [path for path in home.glob("*") if (path / "config.yaml").exists()]
    if not runs:
        raise UserError(
            f"--resume: no run in {home}{os.sep} to go on with; start one without --resume"
        )
    return max(runs, key=lambda path: (path / "config.yaml").stat().st_mtime)
