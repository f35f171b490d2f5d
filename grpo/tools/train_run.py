"""What `train.py` and `grpo.train` do with a configuration: open a run, make its steps, end it."""

import gc
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from data.errors import UserError
from grpo.config import Config, resolve_config
from grpo.distributed import SINGLE, Ranks
from grpo.learn.loss import OwnLoss, load_loss
from grpo.model.load import load_policy
from grpo.model.policy import Policy
from grpo.run.folders import HOME, locked, resume_hint
from grpo.run.interrupt import Interrupt
from grpo.run.resume import open_run, require_unchanged, sources_of_run
from grpo.run.session import Run
from grpo.run.trackers import check_installed
from grpo.show.console import Console
from grpo.show.settings import settings
from grpo.trainer import Callback, Parts, Trainer, with_learning_rate
from tasks.base import Problem, Task, problems_of, watch_scoring, worded
from tasks.registry import load_task
from tasks.scoring import range_of
from tasks.supply import Supply, read_problems, split_of


class RunResult(NamedTuple):
    """What a run leaves behind: the program's exit status, its folder, and the trained policy.

    There is no policy if Ctrl-C stopped the run at once.
    """

    status: int
    folder: Path
    policy: Policy | None = None


@dataclass(frozen=True)
class FromPython:
    """Parts of a run that `grpo.train` gets as Python values, which no setting can name."""

    task: Task | None = None
    own_loss: OwnLoss | None = None
    callbacks: Sequence[Callback] = ()


def start_run(
    config: Config,
    given: dict,
    ranks: Ranks,
    lost_streams: list[str],
    values: FromPython = FromPython(),
) -> RunResult:
    """Open or resume the run, and train.

    `given` are those settings in `config` that the user gave. `lost_streams` gets a line for each
    output stream that is lost during the run. The `values` replace parts that the settings name.
    """
    opened, config = open_run(config, given, home=HOME, ranks=ranks)
    config, parts = load_parts(config, values)
    task = parts.task
    check_installed(config.track)

    assert config.steps is not None, "the configuration is resolved"

    # Before anything is loaded or written.
    sources = None
    if opened.checkpoint:
        sources = sources_of_run(opened, config, task, parts.own_loss, ranks)

    metric = getattr(task, "metric", "score")
    console = Console(config.steps, metric, range_of(task))
    watch_scoring(task, console.scoring)
    try:
        with ExitStack() as locks:
            # A resumed run is locked from here on, a new one when its directory is made.
            if opened.checkpoint and ranks.is_rank0:
                if warning := locks.enter_context(locked(opened.folder)):
                    console.warn(warning)
                require_unchanged(opened)

            with Interrupt() as interrupt, console:
                with console.loading(config.model):
                    policy = load_policy(
                        config.model,
                        device=config.device,
                        weights=opened.checkpoint,
                        **config.loading,
                    )
                trainer = build_trainer(config, parts, policy, ranks)
                run = Run(opened, trainer, sources, console, lost_streams, locks)
                status = train(run, trainer, console, interrupt)
                return RunResult(status, run.folder, trainer.policy)
    except KeyboardInterrupt:
        print(f"train.py: stopped immediately; {resume_hint(opened.folder)}", file=sys.stderr)
        return RunResult(130, opened.folder)


def training_set(config: Config, task: Task) -> list[Problem]:
    """Return the problems of --dataset, or those of a task that has a fixed set; [] if neither."""
    if config.dataset:
        if (split := split_of(Path(config.dataset))) not in ("", "train"):
            raise UserError(
                f"--dataset {config.dataset}: its problems are of the {split} split, which "
                "evaluations use; give a data set of the train split"
            )
        return [worded(task, one) for one in read_problems(Path(config.dataset), task)]
    problems = problems_of(task, "train")
    if not problems and any(problems_of(task, split) for split in ("validation", "test")):
        raise UserError(
            f"task {task.name}: none of its problems is of the train split; give some that are"
        )
    return problems


def load_parts(config: Config, values: FromPython) -> tuple[Config, Parts]:
    """Return the configuration, resolved, and the parts: the given `values`, or what it names."""
    task = values.task or load_task(config.task, config.reward, config.task_options, config.wording)
    own_loss = values.own_loss or load_loss(config.loss)
    problems = training_set(config, task)
    config = resolve_config(config, task, {problem.level for problem in problems})
    supply = Supply(
        task, seed=config.seed, kind=config.problems, dataset=problems, mixed=config.mixed
    )
    return config, Parts(task, supply, own_loss, values.callbacks)


def build_trainer(config: Config, parts: Parts, policy: Policy, ranks: Ranks = SINGLE) -> Trainer:
    """Return the trainer of a policy."""
    trainer = Trainer(with_learning_rate(config, policy), parts, policy, ranks)
    trainer.check_fit()
    return trainer


def train(run: Run, trainer: Trainer, console: Console, interrupt: Interrupt) -> int:
    """Run the loop to its last step, and evaluate on held-out problems before, during and after.

    Returns the exit status. It is that of the verdict: 0, or 3 if the run was stopped or has
    failed. After a signal it is 128 plus the signal's number.
    """
    config = trainer.config
    console.settings(settings(run.folder, config, trainer))
    start = run.begin()
    if config.preflight == "only":
        run.leave_untrained()
        return 0

    if run.is_new:
        run.evaluate()
    with run.saving():
        run.warm_start_if_needed(start)
        with frozen_garbage():
            take_steps(run, trainer, interrupt)

        if number := run.ranks.max(interrupt.wanted or 0):
            run.save_and_exit(signal.Signals(number).name)
            run.note_lost_streams()
            return 128 + number
        status = run.finish()

    run.note_lost_streams()
    return status


@contextmanager
def frozen_garbage() -> Iterator[None]:
    """Exempt all objects that exist now from garbage collection within this block.

    Otherwise the collector searches them every few steps, which takes a quarter of a second.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def take_steps(run: Run, trainer: Trainer, interrupt: Interrupt) -> None:
    """Make the remaining steps, and store each."""
    assert trainer.config.steps is not None, "the configuration is resolved"
    # Shown beside the first step of the process, which takes longer than the others.
    note = " (the first also allocates memory and compiles kernels)"
    while (
        trainer.done < trainer.config.steps
        and not trainer.ended
        and not run.ranks.max(interrupt.wanted or 0)
    ):
        interrupt.renew()
        try:
            with run.console.working(f"step {trainer.done + 1}{note}"):
                report = trainer.step()
        except FloatingPointError as error:
            raise FloatingPointError(f"{error}{run.save_failed()}") from error
        note = ""
        run.after_step(report)
