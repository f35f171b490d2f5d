"""What the library does without a run directory: a trainer for a loop of your own, and a model."""

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from grpo.config import (
    ELSEWHERE,
    NEEDLESS,
    SETTINGS,
    Config,
    checked,
    is_run,
    python_name,
    with_texts,
)
from grpo.curriculum import load_supply
from grpo.data.errors import UserError, shown
from grpo.distributed import SIZE
from grpo.learn.loss import OwnLoss
from grpo.model.load import load_policy
from grpo.model.policy import Policy
from grpo.records import StepReport
from grpo.rollout.generate import RolloutRequest, generate
from grpo.rollout.sampling import sample_key, truncation
from grpo.tasks.base import calling, finite_number
from grpo.tasks.registry import REWARD_FILE
from grpo.tasks.rows import ROW_OPTIONS, Rows, as_flags
from grpo.trainer import Callback, Trainer


def make_trainer(
    data: Any = None,
    reward: str | Callable | Sequence[Callable] | None = None,
    *,
    callbacks: Sequence[Callback] = (),
    **options: Any,
) -> Trainer:
    """Return a trainer for a loop of your own, which takes the arguments of `train`.

    ``trainer.step()`` makes one step. A trainer has no run directory, and makes no pre-flight,
    imitation, evaluations or checkpoints. The events of a step name what is left out of training.
    Raises UserError as `train` does.
    """
    if SIZE > 1:
        raise UserError("make_trainer(): has no use for several ranks; use train()")
    given, values = arguments("make_trainer()", data, reward, callbacks, options)
    for name in ("resume", "name", "track"):
        if given.get(name):
            raise UserError(
                f"make_trainer(): {name} applies only to runs; use train(), or leave it out"
            )
    config = Config(**given)
    warned: list[str] = []
    if is_run(Path(config.model)):  # only an earlier run needs what reads it
        from grpo.run.resume import start_from

        config, warned = start_from(config, given)
    config, supply = load_supply(config, values.pop("task", None))
    policy = load_policy(config.model, device=config.device, **config.loading)
    trainer = Trainer(config, supply, policy, **values)
    trainer.check_fit()
    for text in (*warned, *getattr(supply.task, "notes", ()), *policy.notes):
        warnings.warn(text, stacklevel=2)
    return trainer


def arguments(
    where: str, data: Any, reward: Any, callbacks: Sequence[Callback], options: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings that the arguments of `train` give, and the task, the own loss and the
    callbacks, by name.

    Raises UserError, which begins with `where`, the function that the user called.
    """
    of_rows = {name: options[name] for name in ROW_OPTIONS if name in options}
    settings = {name: value for name, value in options.items() if name not in ROW_OPTIONS}
    if settings.get("resume") is True:
        settings["resume"] = "latest"

    values: dict[str, Any] = {"callbacks": _followers(where, callbacks, options)}
    if callable(settings.get("loss")):
        values["own_loss"] = OwnLoss(settings["loss"])
        settings["loss"] = values["own_loss"].spec
    if "engine" in settings and not isinstance(settings["engine"], str | None):
        values["engine"] = settings["engine"]
        settings["engine"] = python_name(settings["engine"])
    if function := settings.pop("advantages", None):
        if not callable(function) or "scale" in settings:
            raise UserError(f"{where}: advantages must be a function, and takes the place of scale")
        values["own_advantages"], settings["scale"] = function, python_name(function)

    if data is not None:
        for name in ("task", "task_options"):
            if settings.get(name):
                raise UserError(f"{where}: {name} and data; give one of them")
        values["task"], own = _rows(where, data, reward, of_rows)
        return with_texts(checked(settings, where)) | own, values

    if reward is not None and (not isinstance(reward, str) or ":" in reward):
        raise UserError(
            f"{where}: a reward function without data; give the data (again, to resume a run), or "
            "the name of a reward of the task"
        )
    if of_rows:
        name, *_ = of_rows
        raise UserError(f"{where}: {name} applies only to rows; give data and a reward, too")
    if reward is not None:
        settings["reward"] = reward
    return with_texts(checked(settings, where)), values


def from_trl(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return as arguments of `train` what those of TRL's `GRPOTrainer` and `GRPOConfig` say.

    What is off there, or needs nothing here, is left out. A name that means nothing here stays, so
    that `train` refuses it.
    """
    found = {
        name: value
        for name, value in given.items()
        if value is not None and not NEEDLESS.match(name)
    }
    take = found.pop
    settings: dict[str, Any] = {"reward_range": found.pop("reward_range", None)}

    size, passes = take("per_device_train_batch_size", 0), take("gradient_accumulation_steps", 0)
    if size or passes:  # in completions, and 8 and 1 there by default
        group_size = found.setdefault("num_generations", 8)
        settings["prompts"] = max(1, (size or 8) * (passes or 1) * SIZE // group_size)
    take("max_steps" if found.get("max_steps", -1) < 1 else "num_train_epochs", None)
    if "eval_dataset" in found and not isinstance(found.get("train_dataset", ""), str):
        parts = ("train", found["train_dataset"]), ("validation", take("eval_dataset"))
        try:
            settings["data"] = [{**row, "split": split} for split, rows in parts for row in rows]
        except TypeError as error:
            raise UserError(
                "GRPOTrainer(): eval_dataset and train_dataset must be lists or datasets of rows"
            ) from error
    if take("eval_strategy", "") == "no":
        settings["eval_every"] = 0

    ratios = found.get("importance_sampling_level", "token")
    if ratios == "token" or found.get("loss_type", "grpo") == "grpo":  # of other losses it stays
        take("importance_sampling_level", None)
    if ratios == "sequence":
        settings["loss"] = "gspo"
    if found.keys() & {"epsilon", "epsilon_high"}:
        low = take("epsilon", 0.2)
        high = take("epsilon_high", low)
        # Of CISPO it is the bound itself, and there is no lower one.
        settings["clip"] = [1.0, high - 1] if found.get("loss_type") == "cispo" else [low, high]
    if "scale_rewards" in found:
        scale = take("scale_rewards")
        settings["scale"] = {True: "group", False: "none"}.get(scale, scale)
    if adapter := take("peft_config", None):
        settings["lora_rank"] = getattr(adapter, "r", adapter)
        warnings.warn("of peft_config, r is taken; the alpha is 32", stacklevel=3)
    for name, value in {"bf16": "bfloat16", "fp16": "float16", "use_cpu": "cpu"}.items():
        if take(name, False):
            settings[ELSEWHERE[name]] = value

    if "callbacks" in found:  # they may ask for `args` by TRL's names
        settings["callbacks"] = _followers("GRPOTrainer()", take("callbacks"), given)
    if "output_dir" in found:
        settings["name"] = Path(take("output_dir")).name
    trackers = take("report_to", "none")
    if trackers not in ("none", []):
        settings["track"] = trackers if isinstance(trackers, str) else ",".join(trackers)
    if isinstance(arguments := found.get("chat_template_kwargs"), Mapping):
        settings["chat_template_kwargs"] = json.dumps(arguments)
    renamed = {ELSEWHERE.get(name, name): value for name, value in found.items()}
    known = *SETTINGS, "data", "reward"
    return {name: x for name, x in renamed.items() if name in known or x} | settings


def _rows(
    where: str, data: Any, reward: Any, of_rows: Mapping[str, Any]
) -> tuple[Rows, dict[str, Any]]:
    """Return the task of rows and reward functions, and the settings that name it.

    They are recorded in config.yaml, so that the command line can load the task again.
    """
    named = reward if isinstance(reward, str) else None
    functions = tuple(reward) if isinstance(reward, Sequence) and not named else (reward,)
    if functions in ((), (None,)):
        raise UserError(f"{where}: data without a reward; give reward=FUNCTION")

    task = Rows(data, named, () if named else functions, **of_rows)
    options = {"data": str(data)} if isinstance(data, str | Path) else {}
    if named:
        options[REWARD_FILE] = named
    options |= as_flags(**of_rows)
    return task, {"task": "data", "task_options": options}


def _followers(where: str, callbacks: Any, options: Mapping[str, Any]) -> list[Callback]:
    """Return the callbacks as functions; UserError unless all are, or are of `transformers`."""
    if not isinstance(callbacks, Sequence):
        raise UserError(f"{where}: callbacks must be a list of functions")
    return [each if callable(each) else _Follower(each, where, options) for each in callbacks]


class _Follower:
    """Tells a `TrainerCallback` of `transformers` of each step, and ends the run if it asks."""

    def __init__(self, callback: Any, where: str, options: Mapping[str, Any]):
        from transformers import TrainerCallback, TrainerControl, TrainerState  # slow to import

        if not isinstance(callback, TrainerCallback):
            raise UserError(f"{where}: callbacks must be a list of functions")
        self.__name__ = type(callback).__name__
        self.callback, self.args = callback, SimpleNamespace(**options)
        self.state, self.control = TrainerState(), TrainerControl()

        for name, default in vars(TrainerCallback).items():
            is_told = name in ("on_init_end", "on_train_begin", "on_step_end", "on_log")
            if name.startswith("on_") and not is_told and getattr(type(callback), name) != default:
                raise UserError(
                    f"{where}: callback {self.__name__}: {name} is never called; use on_step_end "
                    "or on_log, which are called after each step"
                )
        with calling(f"callback {self.__name__}"):
            self._tell("on_init_end")
            self._tell("on_train_begin")

    def __call__(self, report: StepReport) -> None:
        self.state.global_step = report.step
        self.state.log_history.append(dict(report.metrics))
        self._tell("on_step_end")
        self._tell("on_log", logs=report.metrics)
        if self.control.should_training_stop:
            report.end = f"callback {self.__name__} asked for it"

    def _tell(self, event: str, **more: Any) -> None:
        getattr(self.callback, event)(self.args, self.state, self.control, **more)


class Model:
    """A policy that answers prompts: `run.policy`, or what `load_model` returns.

    `Model(trainer.policy)` is that of a trainer, between its steps.
    """

    def __init__(self, policy: Policy):
        self._policy = policy

    def generate(
        self,
        prompts: Sequence[str],
        *,
        max_new_tokens: int = 256,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> list[str]:
        """Return one completion of each prompt, which is the user's turn of a chat.

        The run's system turn comes first. A `temperature` of 0 always takes the likeliest token.
        The same `seed` gives the same completions. A completion ends with the model's context, too;
        raises UserError if a prompt leaves no room in it.
        """
        if isinstance(prompts, str) or not all(isinstance(prompt, str) for prompt in prompts):
            raise UserError("generate: give a list of prompts, which are texts")
        given = (finite_number(each) for each in (max_new_tokens, temperature, top_p))
        room, heat, share = (-1.0 if each is None else each for each in given)
        if not (room >= 1 and room.is_integer() and heat >= 0 and 0 < share <= 1):
            raise UserError(
                f"generate: max_new_tokens is {shown(max_new_tokens)}, temperature "
                f"{shown(temperature)}, top_p {shown(top_p)}; give 1 or more, 0 or more, and above "
                "0 up to 1"
            )
        if not prompts:
            return []

        context = self._policy.context
        encoded = [self._policy.encode(prompt) for prompt in prompts]
        if max(map(len, encoded)) >= context:
            raise UserError(
                f"generate: a prompt is longer than the model's context of {context} tokens"
            )

        request = RolloutRequest(
            encoded,
            keys=[[sample_key("generate", seed, number)] for number in range(len(prompts))],
            temperature=heat,
            budgets=[min(int(room), context - len(prompt)) for prompt in encoded],
            truncate=truncation(share),
        )
        return [completion.text for (completion,) in generate(self._policy, request)]
