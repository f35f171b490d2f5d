"""Every flag of `train.py`: its default, its meaning, its check. The command line is made from
this one dataclass.
"""

import dataclasses
import difflib
import re
from argparse import SUPPRESS
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import yaml
from transformers import HfArgumentParser

from data.files import read_config, write_whole
from grpo.curriculum.ladder import LADDER, parse_rungs, problems_needed, ramp_to
from grpo.learn.advantages import SCALES
from grpo.learn.credit import CREDITS
from grpo.learn.loss import LOSSES
from grpo.learn.optimizer import OPTIMIZERS
from grpo.model.load import LORA_VARIANTS, QUANTISED
from grpo.model.prompts import (
    PromptFormat,
    format_of,
    system_text,
    template_arguments,
    wording_text,
)
from grpo.rollout.speculative import parse_mode
from tasks.base import Parser, Task, UserError, check_wording, flags_of_tasks, split_options
from tasks.supply import fixed_size

CLIP = {
    "dapo": (0.2, 0.28),
    "gspo": (3e-4, 4e-4),
    "cispo": (1.0, 0.28),
}  # low, high; each paper's own; else 0.2, 0.2
SOURCES = ("base", "start", "dataset", "corpus", "config", "task")  # what a run depends on
TRACKERS = ("tensorboard", "wandb", "trackio")
SCHEDULES = ("constant", "cosine")
WAYS = ("auto", "off", "imitation", "demonstrations")
PREFLIGHTS = ("on", "off", "only")
CONTROLS = ("none", "shuffled-rewards", "constant-reward")
ON_RESUME = (
    "steps",
    "log_every",
    "eval_every",
    "eval_problems",
    "samples_every",
    "save_every",
    "best_spacing",
    "keep_best",
    "device",
    "on_alarm",
    "patience",
    "track",
)


def names_in(text: str | None) -> list[str]:
    """Return the names of a list such as "wandb,trackio".

    >>> names_in("wandb, trackio"), names_in(None)
    (['wandb', 'trackio'], [])
    """
    return [part.strip() for part in text.split(",")] if text else []


def flag(default: Any, help: str, **extra: Any) -> Any:
    return field(default=default, metadata={"help": help, **extra})


@dataclass(frozen=True)
class Config:
    """A run, resolved. Frozen, checked when made; an unknown key is an error."""

    # task
    task: str = flag("interleave", "a task's name, or path/to/file.py:ClassName for your own")
    level: int = flag(
        0,
        "difficulty; for interleave the words of each text (0: the task's default)",
        aliases=["--words"],
    )
    reward: str | None = flag(
        None, "what the policy is paid: one of the task's rewards (default: the task's first)"
    )
    problems: str = flag(
        "fresh",
        "fresh: new problems each step; fixed:N: the same N over and over, shuffled each epoch",
    )
    dataset: str | None = flag(
        None,
        "train on the problems of this JSONL file instead, shuffled each epoch: on those of "
        "--words or --curriculum, "
        "else on all",
    )
    mixed: bool = field(
        default=False, metadata={"help": "train on all levels of the dataset, as they come"}
    )
    control: str = flag(
        "none",
        "no real run: shuffled-rewards (permuted over the batch) or constant-reward; none: a real "
        "one",
    )
    task_options: dict = field(
        default_factory=dict, metadata={"help": "the task's own flags, e.g. {'family': 'product'}"}
    )
    curriculum: str | None = flag(
        None,
        "climb these levels, e.g. 10,25,50; alone: " + ",".join(map(str, LADDER)),
        nargs="?",
        const=",".join(map(str, LADDER)),
    )
    ramp: bool = flag(
        True,
        "start with the levels of the ladder below the asked one (interleave only, and not with "
        "--dataset), or easier ones "
        "where the pre-flight finds the first out of reach",
    )
    preflight: str = flag(
        "on",
        "on: before the first step sample a few problems of each level, and start where groups "
        "vary and right answers are "
        "within reach; only: print that table and end; off",
    )
    promote_by: str | None = flag(
        None,
        "climb by the running mean of training, or by heldout problems (default: heldout with "
        "--curriculum, "
        "else running)",
    )
    promote_at: float = flag(
        0.0,
        "climb to the next level at this mean score (0: 0.97 by heldout problems, 0.9 by the "
        "running mean)",
    )
    promote_window: int = flag(
        3, "steps of the running mean, or more until they have enough groups for its interval"
    )
    promote_every: int = flag(
        10,
        "steps between looks at held-out problems, which are made once the running mean comes near",
    )
    promote_problems: int = flag(128, "problems of each such look")
    stop_when_climbed: bool = flag(
        False, "end the run when the last level of --curriculum is climbed, too"
    )
    replay: float = flag(
        0.25, "share of prompts drawn from earlier levels, most from those with the lowest scores"
    )
    rung_minutes: float = flag(
        0.0,
        "minutes of training steps on a level, then go on to the next; after the last the run ends "
        "(0: no limit)",
    )
    rung_tokens: int = flag(0, "sampled tokens on a level, likewise (0: no limit)")
    step_tokens: int = flag(
        0,
        "most tokens of a step: fewer prompts where prompts x group size x completion budget "
        "exceed it (0: no limit)",
    )
    # model
    model: str = flag(
        "builtin",
        "builtin, a directory in Hugging Face layout, a GGUF file, a hub id, or the policy of an "
        "earlier run "
        "(runs/NAME, or one of its checkpoints)",
    )
    start: str | None = field(
        default=None, metadata={"help": "the checkpoint of an earlier run that this one began with"}
    )
    device: str = flag("auto", "cpu, cuda, or auto")
    dtype: str = flag(
        "auto",
        "float32, bfloat16 (what is trained has float32 masters), or auto: float32 on a CPU, with "
        "gradients by bfloat16 "
        "products where it has AMX; bfloat16 on a GPU under LoRA, and for a model that is saved so",
    )
    lora_rank: int = flag(
        -1,
        "rank of the LoRA adapter; 0: full fine-tuning; -1: 0 for builtin, 64 for other models, "
        "that of an earlier "
        "run's policy",
    )
    lora_alpha: float = flag(32.0, "LoRA scale is lora_alpha / lora_rank")
    lora_variant: str = flag(
        "lora",
        "lora, rslora (the scale is lora_alpha / sqrt(lora_rank)), or dora (magnitudes are trained "
        "apart; by the "
        "model's own forward pass, slower)",
    )
    quantise: str = flag(
        "none",
        "the base under LoRA in fewer bits: nf4 (4 bits), int8, or none (needs bitsandbytes: the "
        "extra bits; slower)",
    )
    # prompt
    system: str = flag("", "text of a system turn before the user's, or @FILE")
    shots: int = flag(
        0,
        "solved problems of the training split and the same level that are shown before each "
        "question",
    )
    chat_template_kwargs: str = flag(
        "{}", "variables of the model's chat template as JSON, e.g. '{\"enable_thinking\": false}'"
    )
    wording: str = flag(
        "",
        "a text file that replaces the task's prompt, with its placeholders: {a} and {b} for "
        "interleave, {expression} "
        "for arithmetic",
    )
    # rollout
    prompts: int = flag(16, "prompts a step")
    group_size: int = flag(16, "completions of each prompt: the group")
    temperature: float = flag(1.0, "sampling temperature")
    top_k: int = flag(0, "sample from the k likeliest tokens (0: all)")
    top_p: float = flag(1.0, "sample from the likeliest tokens of this mass (1: all)")
    max_new_tokens: int = flag(0, "completion budget (0: a quarter more than the target takes)")
    draft: str = flag(
        "auto",
        "verify the task's guess at the next tokens at once: auto, off, or how many; changes no "
        "sample",
    )
    # degenerate groups
    on_degenerate: str = flag(
        "skip", "groups without variance: keep, skip, or resample hotter, then skip"
    )
    dynamic_sampling: int = flag(
        -1,
        "draw further prompts until so many groups of the step vary, at most four times --prompts "
        "(0: no; -1: 8 "
        "when levels are climbed by heldout problems, else 0)",
    )
    variance_threshold: float = flag(
        1e-6, "a group is degenerate when its rewards span no more than this"
    )
    retries: int = flag(2, "most times that a group is resampled")
    heat: float = flag(1.15, "factor by which temperature is raised")
    heat_ceiling: float = flag(1.5, "most that temperature is raised in all, as a factor")
    on_alarm: str = flag(
        "say",
        "when training collapses for five steps: say so, or stop after that step with "
        "exit status 3",
    )
    patience: int = flag(
        20,
        "end the run early: with exit status 3 when no group could be trained on for so many "
        "steps, with 0 when the last level is solved "
        "in training and on held-out problems (0: make all --steps)",
    )
    warm_start: str = flag(
        "auto",
        "how a policy that earns nothing begins: imitation (of a few right answers, before the "
        "first step), demonstrations "
        "(the right answer joins groups that fail), off; auto: imitation where the pre-flight "
        "finds the first level out of "
        "reach, else off",
    )
    # learning
    loss: str = flag("dapo", " | ".join(LOSSES))
    scale: str = flag(
        "group", "what advantages are divided by: the std of the group, of the batch, or none"
    )
    credit: str = flag(
        "outcome",
        "outcome: one advantage for all tokens of a completion; alignment: each token's own, by "
        "what had been earned before it",
    )
    beta: float = flag(0.0, "weight of the KL to the reference (0: no reference is held)")
    clip_low: float | None = flag(None, "lower clip (default: that of the loss's paper)")
    clip_high: float | None = flag(None, "upper clip (default: that of the loss's paper)")
    epochs: int = flag(1, "updates on each rollout")
    learning_rate: float = flag(
        0.0,
        "0: 2e-4 for builtin; for other models 1e-3 under LoRA and 1e-4 without, less where they "
        "are wider than 576; of an "
        "earlier run's policy: that run's",
    )
    schedule: str | None = flag(
        None,
        "learning rate after the warm-up: constant, or cosine (falls to zero at the last step) "
        "(default: constant for builtin, "
        "cosine for other models)",
    )
    warmup: int = flag(5, "steps of linear warm-up")
    optimizer: str = flag(
        "adamw",
        "adamw, or adamw8bit: its moments in a quarter of the memory (needs bitsandbytes: the "
        "extra bits)",
    )
    shard: bool = flag(
        False,
        "several ranks: each holds its part of the optimizer's state alone (full fine-tuning)",
    )
    weight_decay: float = flag(0.0, "of AdamW")
    max_grad_norm: float = flag(1.0, "gradients are clipped to this norm (0: not)")
    micro_tokens: int = flag(
        0,
        "most tokens of a micro-batch, which changes no gradient (0: 4,096 on cpu, by its memory "
        "on a GPU)",
    )
    forget_activations: bool = flag(
        False,
        "compute activations twice instead of keeping them; done by itself where memory runs out",
    )
    importance_limit: float = flag(
        0.0, "weigh tokens by trainer's over sampler's probability, up to this (0: not)"
    )
    parity_limit: float = flag(
        0.0,
        "stop when trainer and sampler differ by more than this in a log-probability (0: never)",
    )
    # run
    steps: int = flag(
        0, "training steps (0: the default of the task for builtin, 800 for other models)"
    )
    seed: int = flag(0, "of everything: problems, samples, adapter")
    name: str | None = flag(
        None, "the run is written to runs/NAME (default: made from task, level and seed)"
    )
    resume: str | None = flag(
        None,
        "go on with this run or checkpoint; alone: with the latest run",
        nargs="?",
        const="latest",
    )
    accept_changes: str | None = flag(
        None,
        "with --resume: go on although these have changed since the checkpoint: any of "
        + ", ".join(SOURCES)
        + " (several: commas between them)",
    )
    eval_every: int = flag(
        50, "steps between evaluations on held-out problems (0: only before and after)"
    )
    eval_problems: int = flag(200, "problems of each evaluation")
    save_every: int = flag(20, "steps between checkpoints")
    save_threshold: float = flag(
        0.3, "checkpoint when the reward (0 to 1: its place in the task's range) first passes this"
    )
    best_margin: float = flag(0.01, "checkpoint at each reward that beats the best by this")
    best_spacing: int | None = flag(
        None,
        "steps between checkpoints for nothing but a new best, at least (default: chosen when the "
        "first checkpoint is written, so that they "
        "take a twentieth of the time at most)",
    )
    keep_best: bool = flag(
        False, "keep the best checkpoint, beside the first, the second to last and the last"
    )
    samples_every: int = flag(10, "steps between entries of samples.log")
    log_every: int = flag(1, "steps between lines on the console")
    track: str | None = flag(
        None, "send the figures to " + ", ".join(TRACKERS) + " too (several: commas between them)"
    )

    def __post_init__(self):
        for name, good, fix in self._checks():
            if not good:
                raise UserError(f"--{name.replace('_', '-')} {getattr(self, name)}: {fix}")

    def _checks(self):
        one_of = lambda *names: "give one of " + ", ".join(names)  # noqa: E731
        yield "control", self.control in CONTROLS, one_of(*CONTROLS)
        yield (
            "problems",
            self.problems == "fresh" or not self.dataset,
            "leave it out: --dataset says which problems there are",
        )
        yield (
            "name",
            self.name is None
            or re.fullmatch(r"[^/\\\0]+", self.name)
            and self.name.strip(".") != "",
            "give the plain name of a folder in runs",
        )
        yield "preflight", self.preflight in PREFLIGHTS, one_of(*PREFLIGHTS)
        yield "level", self.level >= 0, "give a positive number of words"
        yield "shots", self.shots >= 0, "give 0 or more"
        yield (
            "group_size",
            self.group_size >= 2,
            "a group of one has no variance and nothing to learn from; give 2 or more",
        )
        yield "prompts", self.prompts >= 1, "give 1 or more"
        yield "temperature", self.temperature > 0, "give a number above 0"
        yield "top_p", 0 < self.top_p <= 1, "give a number above 0 and up to 1"
        yield "top_k", self.top_k >= 0, "give 0 (all tokens) or more"
        yield "max_new_tokens", self.max_new_tokens >= 0, "give 0 (computed) or more"
        yield (
            "dtype",
            self.dtype in ("auto", "float32", "bfloat16"),
            one_of("auto", "float32", "bfloat16"),
        )
        yield (
            "device",
            self.device.split(":")[0] in ("auto", "cpu", "cuda"),
            one_of("auto", "cpu", "cuda"),
        )
        yield (
            "on_degenerate",
            self.on_degenerate in ("keep", "skip", "resample"),
            one_of("keep", "skip", "resample"),
        )
        yield "warm_start", self.warm_start in WAYS, one_of(*WAYS)
        yield "on_alarm", self.on_alarm in ("say", "stop"), one_of("say", "stop")
        yield "loss", self.loss in LOSSES, one_of(*LOSSES)
        yield "scale", self.scale in SCALES, one_of(*SCALES)
        yield "credit", self.credit in CREDITS, one_of(*CREDITS)
        yield (
            "credit",
            self.credit == "outcome" or self.loss != "gspo",
            "gspo weighs whole sequences, not tokens; give another --loss",
        )
        yield "schedule", self.schedule in (None, *SCHEDULES), one_of(*SCHEDULES)
        yield (
            "promote_by",
            self.promote_by in (None, "running", "heldout"),
            one_of("running", "heldout"),
        )
        yield "replay", 0 <= self.replay < 1, "give a share from 0 up to, not including, 1"
        yield "learning_rate", 0 <= self.learning_rate < 1, "give a number from 0 up to 1"
        yield "lora_rank", self.lora_rank >= -1, "give 0 (full fine-tuning) or more"
        yield "lora_variant", self.lora_variant in LORA_VARIANTS, one_of(*LORA_VARIANTS)
        yield "quantise", self.quantise in QUANTISED, one_of(*QUANTISED)
        yield (
            "quantise",
            self.quantise == "none" or self.lora_rank != 0,
            "give --lora-rank 16 too: what is quantised cannot be trained",
        )
        yield "optimizer", self.optimizer in OPTIMIZERS, one_of(*OPTIMIZERS)
        yield (
            "shard",
            not (self.shard and self.lora_rank > 0),
            "give --lora-rank 0 too; an adapter is small, and each rank holds it whole",
        )
        yield (
            "shard",
            not (self.shard and self.optimizer == "adamw8bit"),
            "give one of --shard and --optimizer adamw8bit",
        )
        yield "promote_at", 0 <= self.promote_at <= 1, "give a score from 0 to 1"
        if self.promote_by == "heldout":
            needed = problems_needed(min(self.promote_at, 1))
            yield (
                "promote_problems",
                self.promote_problems >= needed,
                f"give {needed} or more: fewer cannot show --promote-at {self.promote_at:g}, even "
                "if all are right",
            )
        yield "dynamic_sampling", self.dynamic_sampling >= -1, "give -1 (the default) or more"
        yield "heat", self.heat >= 1, "give 1 or more"
        yield "heat_ceiling", self.heat_ceiling >= 1, "give 1 or more"
        for name in (
            "beta",
            "importance_limit",
            "parity_limit",
            "variance_threshold",
            "retries",
            "weight_decay",
            "max_grad_norm",
            "warmup",
            "micro_tokens",
            "steps",
            "eval_every",
            "best_margin",
            "rung_minutes",
            "rung_tokens",
            "step_tokens",
            "patience",
        ):
            yield name, getattr(self, name) >= 0, "give 0 or more"
        for name in (
            "epochs",
            "eval_problems",
            "save_every",
            "samples_every",
            "log_every",
            "promote_window",
            "promote_every",
            "promote_problems",
        ):
            yield name, getattr(self, name) >= 1, "give 1 or more"
        yield (
            "best_spacing",
            self.best_spacing is None or self.best_spacing >= 1,
            "give 1 or more",
        )
        for name in ("clip_low", "clip_high"):
            yield (
                name,
                getattr(self, name) is None or getattr(self, name) > 0,
                "give a number above 0",
            )
        yield (
            "accept_changes",
            set(names_in(self.accept_changes)) <= set(SOURCES),
            one_of(*SOURCES),
        )
        yield "track", set(names_in(self.track)) <= set(TRACKERS), one_of(*TRACKERS)
        parse_mode(self.draft)
        template_arguments(self.chat_template_kwargs)
        if self.curriculum:
            parse_rungs(self.curriculum)
        fixed_size(self.problems)

    @property
    def clips(self) -> tuple[float, float]:
        low, high = CLIP.get(self.loss, (0.2, 0.2))
        return self.clip_low or low, self.clip_high or high

    @property
    def loading(self) -> dict[str, Any]:
        """How the policy is loaded: keywords of `grpo.model.load.load_policy`, beside the model's
        name.
        """
        return {
            "device": self.device,
            "dtype": self.dtype,
            "lora_rank": self.lora_rank,
            "lora_alpha": self.lora_alpha,
            "lora_variant": self.lora_variant,
            "quantise": self.quantise,
            "start": self.start,
            "seed": self.seed,
            "keep_reference": self.beta > 0,
        }

    def prompt_format(self, task: Task) -> PromptFormat:
        """What stands around the prompts of the `task`."""
        return format_of(
            task,
            system=self.system,
            shots=self.shots,
            chat_template_kwargs=self.chat_template_kwargs,
            seed=self.seed,
        )

    @property
    def mark(self) -> dict[str, str]:
        """What every line of a control run carries, so that it is never taken for a real one;
        nothing for a real run.
        """
        return {} if self.control == "none" else {"control": self.control}

    @property
    def rungs(self) -> list[int]:
        """The levels of training, rising; without --curriculum the last is the one that was asked
        for.
        """
        if self.curriculum:
            return parse_rungs(self.curriculum)
        climbs = self.ramp and self.task == "interleave" and not self.dataset
        return ramp_to(self.level) if climbs else [self.level]

    def save(self, path: Path, **facts: Any):
        """Write the configuration and `facts` (versions, device, commit) as YAML."""
        write_whole(
            path,
            yaml.safe_dump({**dataclasses.asdict(self), "facts": facts}, sort_keys=False).encode(),
        )


def load_config(path: Path) -> Config:
    """Read the configuration of a run. Raises UserError for a file that is none, for unknown keys,
    and for values of another kind.
    """
    values = read_config(path)
    values.pop("facts", None)
    unknown = set(values) - {f.name for f in dataclasses.fields(Config)}
    if unknown:
        raise UserError(
            f"{path}: unknown key {sorted(unknown, key=str)[0]}; the run was made by another "
            "version"
        )
    for name, kind in get_type_hints(Config).items():
        kinds = [
            get_origin(one) or one
            for one in (get_args(kind) if isinstance(kind, UnionType) else (kind,))
        ]
        if name in values and not any(_is(values[name], one) for one in kinds):
            raise UserError(
                f"{path}: {name} is {values[name]!r}, and should be "
                f"{' or '.join(one.__name__ for one in kinds)}"
            )
    return Config(**values)


def _is(value: Any, kind: type) -> bool:
    """Whether `value` is a `kind`; whole numbers pass for fractions, True and False for
    no number.
    """
    return isinstance(value, bool) == (kind is bool) and isinstance(
        value, (int, float) if kind is float else kind
    )


class _Parser(Parser, HfArgumentParser):
    """The flags of a dataclass, and mistakes in one line."""


def parse(argv: list[str]) -> tuple[Config, dict[str, Any]]:
    """Return the configuration of a command line, and the flags that were given by name.

    Raises UserError for an unknown flag (naming the nearest known one) and for a bad value.
    """
    parser = _Parser(
        Config,
        prog="python train.py",
        description="Train a language model by GRPO.",
        allow_abbrev=False,
        epilog=flags_of_tasks(),
    )
    _remove(parser, "task_options")  # the task's own flags are read by name, below
    _remove(parser, "start")  # follows from --model, see `grpo.run.start`
    _remove(parser, "mixed")  # follows from the dataset, see `Run.settle`
    known = [option for action in parser._actions for option in action.option_strings]
    for (
        action
    ) in parser._actions:  # what is not given is left to Config, so that what was given is known
        if any(option.startswith("--no-") for option in action.option_strings):
            action.help = "do not " + action.help
        elif action.default not in (None, SUPPRESS) and "(default" not in action.help:
            action.help += f" (default: {action.default})".replace("%", "%%")
        action.default = SUPPRESS
    values, unknown = parser.parse_known_args(argv)
    given = vars(values)
    options, unknown = (
        split_options(given.get("task", Config.task), unknown) if unknown else ({}, [])
    )
    if unknown:
        near = difflib.get_close_matches(unknown[0].split("=")[0], known, 1)
        raise UserError(
            f"{unknown[0]}: no such flag; "
            + (f"did you mean {near[0]}?" if near else "see python train.py --help")
        )
    if options:
        given["task_options"] = options
    return Config(**_with_files(given)), given


def _with_files(given: dict[str, Any]) -> dict[str, Any]:
    """Put the texts of files that flags name into `given`, so that the run holds them whatever
    becomes of the files.
    """
    if "system" in given:
        given["system"] = system_text(given["system"])
    if file := given.get("wording"):
        given["wording"] = wording_text(file)
        if "resume" not in given:  # else the task is the run's, which is not read yet
            check_wording(given.get("task", Config.task), given["wording"], file)
    return given


def _remove(parser: HfArgumentParser, name: str):
    action = next(action for action in parser._actions if action.dest == name)
    parser._remove_action(action)
    action.help = SUPPRESS  # its group knows it still
    for option in action.option_strings:
        del parser._option_string_actions[option]
