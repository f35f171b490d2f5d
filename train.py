"""Train a language model by GRPO: `python train.py --task interleave --words 25`. All flags:
`python train.py --help`.

On several GPUs: `torchrun --nproc-per-node 4 train.py ...`, with the same flags.
"""

import gc
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

if __name__ == "__main__":  # before torch is loaded, which takes seconds
    from grpo.flags import show_help

    show_help(sys.argv[1:])

from data.streams import reason_of
from grpo.config import Config, resolve_config
from grpo.distributed import RANK, Ranks, process_group
from grpo.flags import parse
from grpo.model.load import load_policy
from grpo.run.background import end_process
from grpo.run.interrupt import Interrupt
from grpo.run.session import Run, check_fit, open_run
from grpo.run.trackers import check_installed
from grpo.show.console import Console
from grpo.show.settings import settings
from grpo.trainer import Trainer
from tasks.base import Problem, Task, exit_status, load_task, range_of, worded
from tasks.dataset import read_problems
from tasks.supply import Supply


def main(argv: list[str]) -> int:
    """Train by these flags; return the exit status."""
    losses: list[str] = []  # what became of standard output and error: training goes on without

    def lose(name: str, error: Exception):
        losses.append(f"{name} is lost ({reason_of(error)}); training goes on without it")

    if RANK == 0:
        return exit_status("train.py", lambda: start(argv, losses), on_lost=lose)
    with (
        open(os.devnull, "w") as nowhere,
        redirect_stdout(nowhere),
    ):  # the first rank speaks for all
        return exit_status(f"train.py, rank {RANK}", lambda: start(argv, losses), on_lost=lose)


def start(argv: list[str], losses: list[str]) -> int:
    """Read the flags, and run on this rank."""
    config, given = parse(argv)
    with process_group(config.device) as ranks:
        return start_run(config, given, ranks, losses)


def start_run(config: Config, given: dict, ranks: Ranks, losses: list[str]) -> int:
    """Open or resume the run, and train."""
    run, config = open_run(config, given, home=Path("runs"), ranks=ranks)
    run.losses = losses
    task = load_task(config.task, config.reward, config.task_options, config.wording)
    dataset = read_problems(Path(config.dataset)) if config.dataset else []
    problems = [worded(task, problem) for problem in dataset]
    check_installed(config.track)
    run.config = config = resolve_config(config, task, {problem.level for problem in problems})
    if run.checkpoint:
        run.check_sources(task)
    try:
        with (
            run.held(),
            Interrupt() as interrupt,
            Console(
                config.steps,
                log_every=config.log_every,
                metric=getattr(task, "metric", "score"),
                reward_range=range_of(task),
            ) as console,
        ):
            return train(config, run, task, problems, console, interrupt)
    except KeyboardInterrupt:
        print(
            f"train.py: stopped at once; what is saved goes on with --resume {run.folder}",
            file=sys.stderr,
        )
        return 130


def train(
    config: Config,
    run: Run,
    task: Task,
    problems: Sequence[Problem],
    console: Console,
    interrupt: Interrupt,
) -> int:
    """Run the loop to its last step, and evaluate on held-out problems before, during and after.

    Returns the exit status: that of the verdict (0, or 3 where the run was stopped or has not
    learned), or 128 and the signal's number.
    """
    with console.loading(config.model):
        policy = load_policy(config.model, **config.loading, weights=run.checkpoint)
    config = run.settle_rate(policy)
    supply = Supply(
        task,
        seed=config.seed,
        kind=config.problems,
        dataset=problems,
        mixed=config.mixed,
    )
    trainer = Trainer(config, task, policy, supply, run.ranks)
    check_fit(trainer)
    run.attach(trainer, console)
    console.settings(settings(run.folder, config, trainer))
    run.show_prompt()
    run.restore()
    start = run.preflight()
    if config.preflight == "only":
        run.leave_untrained()
        return 0
    if run.ranks.on_rank0(lambda: not run.reports):
        run.evaluate()
    with run.saving():
        if run.wants_imitation(start):
            run.warm_start()
        with loaded():
            take_steps(config, run, trainer, console, interrupt)
        if number := run.ranks.max(interrupt.wanted or 0):
            run.leave(signal.Signals(number).name)
            run.note_losses()
            return 128 + number
        status = run.finish()
    run.note_losses()
    return status


@contextmanager
def loaded():
    """Within this context what has been loaded is not looked through for garbage, which takes a
    quarter of a second every few steps.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def take_steps(config: Config, run: Run, trainer: Trainer, console: Console, interrupt: Interrupt):
    """Make the steps that are left, and write down each."""
    while (
        trainer.done < config.steps
        and not trainer.ended
        and not run.ranks.max(interrupt.wanted or 0)
    ):
        try:
            report = trainer.step()
        except FloatingPointError as error:
            raise FloatingPointError(f"{error}{run.save_failed()}") from error
        run.files.step(report)
        console.step(report)
        run.note_losses()
        run.promote_if_due()
        run.end_if_solved()
        if (
            config.eval_every
            and report.step % config.eval_every == 0
            and report.step < config.steps
            and not trainer.ended
        ):
            run.evaluate()
        run.save_if_due(report)  # last, so that a run resumed here has lost nothing of the step


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
