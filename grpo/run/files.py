"""The files that a run writes as it goes on. Rank 0 has `RunFiles`, other ranks have `NoFiles`."""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from data.errors import UserError
from data.files import write_whole, wrong_lines
from data.text import escape_control
from grpo.records import Decision, Group, StepReport
from grpo.run import checkpoint as checkpoints
from grpo.run.folders import way_on
from grpo.run.logs import MetricsLog, SamplesLog, append, read_metrics
from grpo.run.rollouts import file_of, remove_after, steps_of, write_rollouts
from grpo.run.trackers import Trackers
from grpo.show.group import summaries


class RunFiles:
    """The log files and rollouts of the run in `folder`, and its trackers.

    The files are metrics.jsonl, groups.jsonl, seen.jsonl, eval.jsonl, curriculum.jsonl,
    samples.log, prompt.txt, warnings.log and rollouts/.

    - `config`: the run's settings by name; "track" and "samples_every" are used here;
    - `mark`: the mark of a control experiment, added to each line of metrics and decisions;
    - `done`: how many steps the run has made;
    - `warn`: shows a warning.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        mark: Mapping[str, str],
        done: int,
        warn: Callable[[str], None],
    ):
        self.folder = folder
        self.mark = mark
        self.warn = warn
        self.metrics = MetricsLog(folder)
        self.evals = MetricsLog(folder, "eval.jsonl")
        self.seen = MetricsLog(folder, "seen.jsonl")
        self.decisions = MetricsLog(folder, "curriculum.jsonl")
        self.groups = MetricsLog(folder, "groups.jsonl")
        self.samples = SamplesLog(folder, every=config["samples_every"])
        self.trackers = Trackers(config["track"], folder, config, done, warn)

    def write_inherited_keys(self, keys: Sequence[str]) -> None:
        """Write the keys of problems that an earlier run was trained on, under step 0."""
        self.seen.append({"step": 0, "keys": list(keys)})

    def write_step(self, report: StepReport) -> None:
        """Write a step: rollouts, metrics, problem keys, groups, decisions and samples."""
        self.write_rollouts("step", report.step, report.groups)
        self.metrics.append(report.metrics)
        self.trackers.step(report)
        keys = dict.fromkeys(group.problem.key for group in report.groups)
        self.seen.append({"step": report.step, "keys": list(keys)})
        self.groups.append({"step": report.step, "groups": summaries(report.groups)})
        self.write_decisions(report.decisions)
        self.samples.append(report.step, report.groups)

    def write_imitation(self, groups: list[Group]) -> None:
        """Write the right answers that were imitated before the first step, and their keys."""
        self.write_rollouts("imitation", 0, groups)
        keys = [group.problem.key for group in groups]
        self.seen.append({"step": 0, "imitated": True, "keys": keys})

    def write_decisions(self, decisions: Sequence[Decision]) -> None:
        """Write decisions to curriculum.jsonl."""
        for decision in decisions:
            self.decisions.append({**decision.to_json(), **self.mark})

    def write_evaluations(self, lines: Sequence[dict[str, Any]]) -> None:
        """Write lines to eval.jsonl, all of them at once."""
        self.evals.append(*lines)
        for line in lines:
            self.trackers.evaluated(line)

    def write_verdict(self, verdict: dict[str, Any]) -> None:
        """Append the verdict to eval.jsonl."""
        self.evals.append(verdict)

    def write_rollouts(self, kind: str, step: int, groups: list[Group]) -> None:
        """Write groups of a kind (`grpo.run.rollouts.KINDS`) with all their texts to rollouts/."""
        try:
            write_rollouts(file_of(self.folder, kind, step), groups, step=step)
        except UserError as error:
            raise UserError(f"{error}; {way_on(self.folder)}") from error

    def rewind(self, done: int) -> None:
        """Remove everything about steps after `done`, because they are made again.

        Warns of logs that are damaged.
        """
        checkpoints.remove_partial(self.folder)
        for log in (self.metrics, self.evals, self.seen, self.decisions, self.groups, self.samples):
            log.truncate_after(done)
        remove_after(self.folder, done)
        checkpoints.remove_after(self.folder, done)
        self.warn_of_damage(done, ("metrics.jsonl", "seen.jsonl", "groups.jsonl", "eval.jsonl"))

    def warn_of_damage(self, done: int, logs: Sequence[str]) -> None:
        """Warn of each of the `logs` that lacks a line on one of `done` steps, or has it twice."""
        for path in (self.folder / name for name in logs):
            lines = read_metrics(path)
            if path.name == "eval.jsonl":
                lines = [line for line in lines if line["purpose"] == "report"]
                found = [f"step {line['step']} at level {line['level']}" for line in lines]
                # The groups of each report are in rollouts/. That of the last step may still come.
                evaluated = {*steps_of(self.folder, "eval")} - {line["step"] for line in lines}
                expected = [f"step {step}" for step in sorted(evaluated) if step < done]
            else:
                found = [f"step {line['step']}" for line in lines if line["step"]]
                expected = [f"step {step}" for step in range(1, done + 1)]
            for damage in wrong_lines(found, expected):
                self.warn(f"{path}: is damaged: it {damage}; figures that come from it are wrong")

    def write_prompt(self, lines: Sequence[str]) -> None:
        """Write the first prompt, as it is sent to the model, to prompt.txt unless that exists."""
        path = self.folder / "prompt.txt"
        if not path.exists():
            write_whole(path, "".join(f"{line}\n" for line in lines).encode())

    def write_warning(self, line: str) -> None:
        """Append a warning to warnings.log, because the console may be closed or lost."""
        append(
            self.folder / "warnings.log",
            f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC  {escape_control(line)}\n",
        )

    def finish(self) -> None:
        """Close the trackers."""
        self.trackers.finish()


class NoFiles:
    """Has the methods of `RunFiles` and writes nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None
