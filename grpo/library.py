"""The library: `train` trains, `make_trainer` prepares a loop of your own, `load_model` loads.

    from grpo import train

    def reward(prompt, completion, answer, **row):
        return float(completion.strip() == answer)

    run = train(data="problems.jsonl", reward=reward, steps=50)
    print(run.verdict, run.policy.generate(["What is 2 + 3?"]))

A run writes the same files as with `train.py`, so it can be resumed, replayed, inspected and
reported.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from grpo.api import Model, arguments, from_trl
from grpo.config import Config
from grpo.data.errors import Lasting
from grpo.data.files import check_output
from grpo.distributed import RANK, join_ranks
from grpo.model.load import load_policy
from grpo.model.policy import Policy
from grpo.model.prompts import PromptFormat, template_arguments
from grpo.run.logs import RunData
from grpo.run.resume import checkpoint_of, config_of, load_run_policy
from grpo.run.session import start_run
from grpo.trainer import Callback


def train(
    data: Any = None,
    reward: str | Callable | Sequence[Callable] | None = None,
    *,
    callbacks: Sequence[Callback] = (),
    **options: Any,
) -> "TrainedRun":
    """Train a model on rows and a reward function, and return the run.

    - `data`: a .jsonl or .parquet file, a dataset of the hub, a Hugging Face `Dataset`, a pandas
      DataFrame, or a list of mappings; see `grpo.tasks.rows` for the columns.
    - `reward`: a function, several, or "path/to/file.py:name"; see the same.
    - `callbacks`: functions that are called after each step, before it is stored, with its
      `grpo.records.StepReport`. Numbers that they add to its metrics are stored as well.

    The `options` are keywords for the rows, with their defaults, and settings of the run:

    - ``columns={}``: what the columns are called, e.g. ``{"prompt": "question"}``.
    - ``reward_range=(0, 1)``: where the sum of the rewards lies; None if that is not known.
    - ``reward_timeout=60``: the most seconds of a call.
    - any setting of `train.py --help-all`: `model`, `steps`, `system`, `name`, ... The `loss` may
      be a function (see `grpo.learn.loss`), and in place of `scale` one may give the `advantages`,
      a function of the groups that are trained on. With ``resume="runs/NAME"``, or True for the
      latest run, functions, `data` and the keywords for it are given again.

    Without `data`, the `task` is a setting, as on the command line, and `reward` names one of its
    rewards. Raises UserError, which says in one line what is wrong, and KeyboardInterrupt after
    Ctrl-C, when the last step has been saved.
    """
    given, values = arguments("train()", data, reward, callbacks, options)
    config = Config(**given)
    with redirect_stdout(Lasting(None)) if RANK else nullcontext():  # only rank 0 prints
        result = start_run(config, given, join_ranks(config.device), **values)
    if result.policy is None or result.status > 128:
        raise KeyboardInterrupt
    return TrainedRun(result.folder, result.policy, result.status)


class TrainedRun(RunData):
    """A run that `train` made: its data (see `grpo.run.logs`) and its policy.

    `status` is the exit status of `train.py`: 3 if the run failed (`grpo.ending.FAILED`) or was
    stopped because it learned nothing, else 0.
    """

    def __init__(self, folder: Path, policy: Policy, status: int):
        super().__init__(folder)
        self.policy = Model(policy)
        self.status = status

    def report(self, output: str | Path | None = None) -> Path:
        """Write the report, one HTML page, and return its path (by default in the run)."""
        from grpo.report import write_report  # which a loop does not need

        if output:
            check_output(str(output), "report()")
        return write_report([self], Path(output) if output else None)


class GRPOTrainer:
    """`train` for scripts that were written for TRL: its `GRPOTrainer`, by its names.

    Defaults are those of `train`. What has no counterpart here is a UserError that names it.
    """

    def __init__(
        self,
        model: Any = None,
        reward_funcs: Any = None,
        args: SimpleNamespace | None = None,
        train_dataset: Any = None,
        **options: Any,
    ):
        given = {"model": model, "reward_funcs": reward_funcs, "train_dataset": train_dataset}
        self.options = from_trl({**(vars(args) if args else {}), **given, **options})

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainedRun:
        """Train, and return the run."""
        resume = {"resume": resume_from_checkpoint} if resume_from_checkpoint else {}
        self.run = train(**self.options | resume)
        return self.run

    def save_model(self, output_dir: str | Path) -> None:
        """Write the trained policy: a model's directory, or an adapter's."""
        self.run.policy._policy.save(Path(output_dir))


GRPOConfig = SimpleNamespace  # TRL's settings, by its names


def load_model(model: str | Path, device: str = "auto") -> Model:
    """Return the policy of a run or checkpoint, or any model that `train.py --model` takes.

    Raises UserError if the model cannot be loaded.
    """
    checkpoint, _ = checkpoint_of(str(model))
    if checkpoint is None:
        return Model(load_policy(str(model), device=device))

    config = config_of(checkpoint)
    policy, _ = load_run_policy(checkpoint, config, device)
    policy.use(PromptFormat(config.system, None, template_arguments(config.chat_template_kwargs)))
    return Model(policy)
