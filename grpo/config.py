"""The settings of a run: each once, with its default, meaning, limits and flag.

A setting comes from three places, each overriding the one before: its default, `--config` (YAML),
its flag. `parse` reads them, `Config` checks them, `resolve_config` fills in the automatic ones,
and `Config.save` writes the result to the run's config.yaml. Nothing here imports torch, so that
`--help` is quick.
"""

import argparse
import dataclasses
import difflib
import math
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import yaml

from data.errors import Parser, UserError
from data.files import load_yaml, read_yaml, write_whole
from grpo.model.prompts import (
    PromptFormat,
    format_of,
    system_text,
    template_arguments,
    wording_text,
)
from tasks.base import Task, default_steps_of
from tasks.registry import (
    REWARD_FILE,
    check_wording,
    flags_of_tasks,
    implied_task,
    is_allowed,
    require_trusted_task,
    split_options,
)
from tasks.supply import LADDER, fixed_size, parse_levels, ramp_to

# Each loss, and what the weight of a token is 1 over (see `learn.loss.token_weights`).
WEIGHTED_BY = {
    "grpo": "completion",
    "dr_grpo": "budget",
    "dapo": "step",
    "gspo": "completion",
    "cispo": "step",
}
LOSSES = tuple(WEIGHTED_BY)

# How `inspect why` says it.
WEIGHT_WORDS = {
    "completion": "({rows} completions × {length} tokens)",
    "budget": "({rows} completions × the token budget)",
    "step": "{tokens:,}, the tokens that the step trained on",
}

# How far below and above 1 the ratio is clipped, according to each loss's paper. Other losses have
# 0.2 and 0.2.
CLIP = {
    "dapo": (0.2, 0.28),
    "gspo": (3e-4, 4e-4),
    "cispo": (1.0, 0.28),
}
FROM_PYTHON = "python:"  # begins the name of a loss that is a function given in Python

SCALES = ("group", "batch", "none")
QUANTISED = ("none", "int8", "nf4")
TRACKERS = ("tensorboard", "wandb", "trackio")
SOURCES = ("base", "start", "dataset", "corpus", "config", "task", "loss")  # what a run depends on
MAX_DRAFTED = 127  # tokens
MAX_SHOTS = 64  # examples before a question; more would fill any context, and each is searched for
MAX_NUMBER = 10**9  # the upper limit of all counts and weights
MAX_NAME = 255  # bytes: the longest name of a folder that file systems take

# The mean score at which a level is left, unless the user gives one. The running mean has the lower
# mark because it lags behind the policy. At 0.9, a policy whose true mean is 0.96 is promoted
# within 100 steps of 2 prompts, and one of 0.8 hardly ever (runs/LOG.md, 2026-11-23: "Intervals
# near 1, promotion, step back").
PROMOTE_AT = {"running": 0.9, "heldout": 0.97}

# Defaults for models other than the embedded one: the rank of the adapter and the number of steps.
# A run whose last level is solved ends sooner.
LORA_RANK = 64
STEPS = 800

# Prompts a step, and how many groups must vary, or else dynamic sampling draws more prompts. The
# embedded model learns as fast by the step from 8 prompts as from 16 while most of its groups vary
# (runs/LOG.md, 2026-11-25: "Half the prompts").
PROMPTS = 16
BUILTIN_PROMPTS = 8
BUILTIN_VARIED = 4
MIN_VARIED = 8  # or half of fewer prompts, if held-out problems promote to the next level

# Settings that a resumed run can change.
ON_RESUME = (
    "steps",
    "log_every",
    "eval_every",
    "eval_problems",
    "samples_every",
    "save_every",
    "keep_best",
    "device",
    "on_alarm",
    "patience",
    "track",
)

# What the run itself finds when it starts. They are in its config.yaml, but are no settings.
FOUND = ("start", "mixed")

# Keys of a run's config.yaml that another run does not take over.
OF_ONE_RUN = ("facts", "name", "resume", "accept_changes", "mixed")

# Settings whose values may be the words on and off or a number, which YAML does not read as text.
WORDS = ("draft", "preflight", "warm_start")

# What TRL, or the command line, calls a setting that has another name here.
ELSEWHERE = {
    "num_generations": "group_size",
    "max_completion_length": "max_new_tokens",
    "max_steps": "steps",
    "num_iterations": "epochs",
    "loss_type": "loss",
    "scale_rewards": "scale",
    "epsilon": "clip_low",
    "epsilon_high": "clip_high",
    "mask_truncated_completions": "truncated",
    "words": "level",
}

EXAMPLES = """examples:
  {0} --task interleave --words 25
  {0} --model MODEL --task interleave --words 10
  {0} --curriculum 10,25,50 --name ladder
  {0} --resume runs/ladder --steps 400
"""


def setting(default: Any, help: str, *, kind: str = "setting", **limits: Any) -> Any:
    """Declare a setting that only `--config` can change.

    `limits`: `choices`, or the numbers `least`, `most`, `above` and `below`. `heading` begins a
    group of --help-all; the rest is about the flag (see `_add_flag`).
    """
    metadata = {"help": help, "kind": kind, **limits}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


flag = partial(setting, kind="flag")  # a setting that has a flag
basic = partial(setting, kind="basic flag")  # one whose flag `--help` lists


@dataclass(frozen=True)
class Config:
    """The settings of a run, which are checked when an object is made.

    None means automatic: `resolve_config` fills it in, and config.yaml has the result. Raises
    UserError for an invalid value or combination.
    """

    task: str = basic(
        "interleave",
        "a task's name, or path/to/file.py:ClassName for your own",
        metavar="NAME",
        heading="Run",
    )
    level: int | None = basic(
        None,
        "difficulty; for interleave the words of each text (default: the task's own)",
        flags=("--words", "--level"),
        least=1,
    )
    model: str = basic(
        "builtin",
        "builtin, a directory in Hugging Face layout, a GGUF file, a hub id, or the policy of an "
        "earlier run (runs/NAME, or one of its checkpoints)",
    )
    steps: int | None = basic(
        None,
        "training steps (default: the task's own for builtin, 800 for other models)",
        least=1,
    )
    seed: int = basic(0, "seed of problems, samples and adapter")
    name: str | None = basic(
        None, "write the run to runs/NAME (default: made from task, level and seed)"
    )
    resume: str | None = basic(
        None,
        "continue this run or checkpoint; without a value: the latest run",
        metavar="RUN",
        const="latest",
    )
    device: str = basic("auto", "cpu, cuda, cuda:N, or auto")

    reward: str | None = flag(
        None,
        "one of the task's rewards (default: its first)",
        metavar="NAME",
        heading="Task and data",
    )
    dataset: str | None = flag(
        None,
        "train on the problems of this JSON Lines file, shuffled each epoch: those of --words or "
        "--curriculum, else all",
        metavar="FILE",
    )
    problems: str = flag(
        "fresh",
        "fresh: new problems each step; fixed:N: the same N, shuffled each epoch",
        metavar="KIND",
    )
    control: str = flag(
        "none",
        "control experiment: shuffled-rewards (permuted over the batch) or constant-reward",
        choices=("none", "shuffled-rewards", "constant-reward"),
    )
    wording: str = flag(
        "",
        "a text file that replaces the task's prompt, with its placeholders: {a} and {b} for "
        "interleave, {expression} for arithmetic",
        metavar="FILE",
    )
    system: str = flag("", "text of a system turn before the user's, or @FILE", metavar="TEXT")
    shots: int = flag(
        0,
        "solved problems of the training split and the same level, shown before each question",
        least=0,
        most=MAX_SHOTS,
    )
    chat_template_kwargs: str = flag(
        "{}",
        "variables of the model's chat template, e.g. '{\"enable_thinking\": false}'",
        metavar="JSON",
    )
    task_options: dict = setting({}, "the task's own flags, e.g. {'family': 'product'}")

    dtype: str = flag(
        "auto",
        "float32; float16 or bfloat16 (with float32 masters of what is trained); auto: float32 on "
        "a CPU, with a bfloat16 backward pass if it has AMX; on a GPU float16 (bfloat16 if hidden "
        "states are too large for it), but float32 for all weights of the embedded model",
        choices=("auto", "float32", "bfloat16", "float16"),
        heading="Model",
    )
    lora_rank: int | None = basic(
        None,
        "rank of the LoRA adapter; 0: full fine-tuning (default: 0 for builtin, 64 for other "
        "models, that of an earlier run's policy)",
        least=0,
    )
    quantise: str = flag(
        "none",
        "keep the base model under LoRA in nf4 (4 bits) or int8 (slower; needs bitsandbytes, the "
        "extra `bits`)",
        choices=QUANTISED,
    )

    prompts: int | None = basic(
        None,
        "prompts a step (default: 8 for the embedded model, else 16)",
        least=1,
        heading="Sampling",
    )
    group_size: int = basic(16, "completions of each prompt", least=2)
    temperature: float = flag(1.0, "sampling temperature", above=0)
    max_new_tokens: int | None = flag(
        None,
        "completion budget in tokens (default: a quarter more than the target takes)",
        least=1,
    )
    top_k: int = setting(0, "sample from the k likeliest tokens (0: all)", least=0)
    top_p: float = setting(
        1.0, "sample from the likeliest tokens of this probability mass (1: all)", above=0, most=1
    )
    draft: str = setting(
        "auto",
        "speculative decoding, with the task's guess as the draft: auto, off, or a number of "
        "tokens; changes no sample",
    )

    loss: str = basic(
        "dapo",
        f"how tokens are weighted and clipped: {', '.join(LOSSES)}, or path/to/file.py:function "
        "for your own",
        heading="Algorithm",
    )
    scale: str = flag(
        "group",
        "what advantages are divided by: the standard deviation of the group, of the batch, or "
        "nothing",
        choices=SCALES,
    )
    credit: str = flag(
        "outcome",
        "outcome: one advantage for all tokens of a completion; alignment: one for each token, "
        "from what this and later tokens earn",
        choices=("outcome", "alignment"),
    )
    beta: float = flag(
        0.0, "weight of the KL divergence from the reference (0: no reference is kept)", least=0
    )
    clip_low: float | None = setting(
        None, "lower clip (default: that of the loss's paper)", above=0
    )
    clip_high: float | None = setting(
        None, "upper clip (default: that of the loss's paper)", above=0
    )
    truncated: str = setting(
        "learn",
        "completions that the budget cuts off: learn from them; mask: leave them out of the loss",
        choices=("learn", "mask"),
    )
    epochs: int = setting(1, "updates on each rollout", least=1)

    learning_rate: float | None = basic(
        None,
        "default: 2e-4 for builtin; for other models 1e-3 under LoRA and 1e-4 without, less where "
        "they are wider than 576; for an earlier run's policy, that run's",
        least=0,
        below=1,
        heading="Optimizer",
    )
    schedule: str | None = flag(
        None,
        "learning rate after the warm-up (default: constant for builtin; for other models cosine, "
        "which falls to zero from the last level on, or from half of the steps)",
        choices=("constant", "cosine"),
    )
    max_grad_norm: float = setting(1.0, "clip gradients to this norm (0: never)", least=0)
    gradient_checkpointing: bool = flag(
        False,
        "recompute activations in the backward pass; enabled automatically when memory runs out",
    )
    micro_tokens: int | None = setting(
        None,
        "most tokens of a micro-batch; changes no gradient (default: 4,096 on a CPU, by memory on "
        "a GPU)",
        least=1,
    )

    curriculum: str | None = basic(
        None,
        "climb these levels, e.g. 10,25,50; without a value: " + ",".join(map(str, LADDER)),
        metavar="LEVELS",
        const=",".join(map(str, LADDER)),
        heading="Curriculum",
    )
    ramp: bool = flag(True, "start at --words instead of easier levels")
    preflight: str = flag(
        "on",
        "before the first step, sample a few problems of each level, and start where groups vary "
        "and right answers are within reach; only: print that table and end",
        choices=("on", "off", "only"),
    )
    warm_start: str = flag(
        "auto",
        "imitation: imitate a few right answers before the first step; off: never; auto: only if "
        "the pre-flight finds every level out of reach",
        choices=("auto", "off", "imitation"),
    )
    promote_at: float | None = flag(
        None,
        "climb to the next level at this mean score (default: "
        f"{PROMOTE_AT['heldout']:g} by heldout problems, {PROMOTE_AT['running']:g} by the running "
        "mean)",
        least=0,
        most=1,
    )

    on_degenerate: str = flag(
        "skip",
        "groups without variance: keep, skip, or resample (hotter if texts repeat), then skip",
        choices=("keep", "skip", "resample"),
        heading="Degenerate groups",
    )
    dynamic_sampling: int | None = setting(
        None,
        "dynamic sampling: draw more prompts until this many groups of the step vary, at most four "
        "times --prompts (0: off; default: 4 for the embedded model unless --prompts is given; "
        "otherwise half of --prompts, at most 8, if held-out problems promote, else 0)",
        least=0,
    )
    demonstrate: bool = setting(
        False, "where no completion of a group is right, replace the last one by the right answer"
    )
    patience: int = flag(
        20,
        "end the run early: with status 3 after this many steps without a group to train on, with "
        "status 0 when the last level is solved (0: make all --steps)",
        least=0,
    )

    eval_every: int = flag(
        50,
        "steps between evaluations on held-out problems (0: only before and after)",
        least=0,
        heading="Evaluation, checkpoints and logs",
    )
    eval_problems: int = flag(200, "problems of each evaluation", least=1)
    save_every: int = flag(20, "steps between checkpoints", least=1)
    track: str | None = flag(
        None,
        f"also send the metrics to {', '.join(TRACKERS)} (separated by commas)",
        metavar="NAMES",
    )
    keep_best: bool = setting(
        False, "keep the best checkpoint, beside the first, the second to last and the last"
    )

    accept_changes: str | None = flag(
        None,
        "with --resume: continue although these have changed since the checkpoint: any of "
        f"{', '.join(SOURCES)} (separated by commas)",
        metavar="KINDS",
        heading="Rare",
    )
    keep_difficulty: list | None = setting(
        None,
        "before training, measure the mean score of every problem of --data or --dataset, and "
        "train on those within this range alone; true stands for [0.2, 0.8]",
    )
    lora_alpha: float = setting(32.0, "the LoRA scale is lora_alpha / lora_rank")
    step_tokens: int = setting(
        0,
        "most tokens of a step: it has fewer prompts if prompts x group size x completion budget "
        "exceeds this (0: no limit)",
        least=0,
    )
    importance_limit: float = setting(
        0.0,
        "truncated importance sampling: weight each token by the trainer's probability over the "
        "sampler's, up to this (0: off)",
        least=0,
    )
    warmup: int = setting(5, "steps of linear warm-up", least=0)
    weight_decay: float = setting(0.0, "weight decay of AdamW", least=0)
    shard: bool = flag(False, "shard the optimizer's state over the ranks (full fine-tuning)")
    promote_by: str | None = setting(
        None,
        "climb by the running mean of training, or by heldout problems (default: heldout with "
        "--curriculum, else running)",
        choices=("running", "heldout"),
    )
    promote_window: int = setting(
        3,
        "steps of the running mean, or more until they have enough groups for its interval",
        least=1,
    )
    promote_every: int = setting(
        10, "steps between validation checks once the running mean comes near", least=1
    )
    promote_problems: int = setting(128, "problems of each such check", least=1)
    replay: float = setting(
        0.25,
        "share of prompts drawn from earlier levels, most from those with the lowest scores",
        least=0,
        below=1,
    )
    retries: int = setting(2, "most times that a group is resampled", least=0)
    temperature_factor: float = setting(1.15, "factor by which temperature is raised", least=1)
    temperature_ceiling: float = setting(
        1.5, "upper limit of the factor by which temperature is raised in total", least=1
    )
    on_alarm: str = setting(
        "say",
        "when training collapses for five steps: say so, or stop with exit status 3",
        choices=("say", "stop"),
    )
    save_threshold: float = setting(
        0.3,
        "checkpoint when the reward first passes this (0 to 1: its place in the task's range)",
    )
    best_margin: float = setting(
        0.01, "checkpoint when the reward exceeds the best by this", least=0
    )
    samples_every: int = setting(10, "steps between entries of samples.log", least=1)
    log_every: int = setting(1, "steps between lines on the console", least=1)

    # What the run finds when it starts (FOUND): the checkpoint of an earlier run that it began
    # with, and whether it trains on all levels of the dataset, in its order.
    start: str | None = None
    mixed: bool = False

    def __post_init__(self) -> None:
        for name, is_good, fix in self._checks():
            if not is_good:
                raise UserError(f"{spelled(name)} {getattr(self, name)}: {fix}")
        if self.curriculum:
            parse_levels(self.curriculum, "--curriculum", must_rise=True)
        template_arguments(self.chat_template_kwargs)
        fixed_size(self.problems)

    def _checks(self) -> Iterator[tuple[str, bool, str]]:
        """Yield the name of each checked setting, whether it is valid, and what to do if not."""
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            for is_good, fix in _limit_checks(value, spec.metadata):
                yield spec.name, value is None or is_good, fix

        is_known = set(names_in(self.track)) <= set(TRACKERS)
        yield "track", is_known, f"give one of {', '.join(TRACKERS)}"
        is_known = set(names_in(self.accept_changes)) <= set(SOURCES)
        yield "accept_changes", is_known, f"give one of {', '.join(SOURCES)}"

        fix = f"give one of {', '.join(LOSSES)}, or path/to/file.py:function for your own"
        yield "loss", is_loss(self.loss), fix
        is_device = self.device.split(":")[0] in ("auto", "cpu", "cuda")
        yield "device", is_device, "give one of auto, cpu, cuda"
        fix = f"give auto, off, or a number of tokens up to {MAX_DRAFTED}"
        yield "draft", is_draft_mode(self.draft), fix
        limits = self.keep_difficulty
        fix = "give the lowest and the highest mean score, e.g. [0.2, 0.8]"
        yield "keep_difficulty", limits is None or is_score_range(limits), fix
        fix = f"give the plain name of a folder in runs, of up to {MAX_NAME} bytes"
        yield "name", self.name is None or is_folder_name(self.name), fix

        yield from self._combination_checks()

    def _combination_checks(self) -> Iterator[tuple[str, bool, str]]:
        is_only_source = self.problems == "fresh" or not self.dataset
        yield "problems", is_only_source, "leave it out: --dataset says which problems there are"

        weighs_tokens = self.credit == "outcome" or self.loss != "gspo"
        fix = "gspo weighs whole sequences, not tokens; give another --loss"
        yield "credit", weighs_tokens, fix

        is_trainable = self.quantise == "none" or self.lora_rank != 0
        fix = "give --lora-rank 16 too: what is quantised cannot be trained"
        yield "quantise", is_trainable, fix

        is_full = not (self.shard and self.lora_rank)
        fix = "give --lora-rank 0 too; an adapter is small, and each rank holds it whole"
        yield "shard", is_full, fix

        is_cut = self.demonstrate and (self.top_k > 0 or self.top_p < 1)
        fix = "top_k and top_p leave out what a right answer may need; leave out one or the other"
        yield "demonstrate", not is_cut, fix
        is_control = self.demonstrate and self.control != "none"
        fix = "a control experiment must not be shown right answers; leave out one or the other"
        yield "demonstrate", not is_control, fix

    @property
    def clips(self) -> tuple[float, float]:
        """How far below and above 1 the ratio is clipped: as set, or as in the loss's paper."""
        low, high = CLIP.get(self.loss, (0.2, 0.2))
        return self.clip_low or low, self.clip_high or high

    @property
    def promotion(self) -> tuple[str, float]:
        """What promotes to the next level, and the mean score that it takes."""
        promote_by = self.promote_by or ("heldout" if self.curriculum else "running")
        promote_at = PROMOTE_AT[promote_by] if self.promote_at is None else self.promote_at
        return promote_by, promote_at

    @property
    def loading(self) -> dict[str, Any]:
        """How the policy is loaded, besides its device: keywords of `load_policy`."""
        return {
            "dtype": self.dtype,
            "lora_rank": self.lora_rank,
            "seed": self.seed,
            "quantise": self.quantise,
            "start": self.start,
            "keep_reference": self.beta > 0,
        }

    def prompt_format(self, task: Task) -> PromptFormat:
        """Return how the prompts of the `task` are presented."""
        return format_of(
            task,
            system=self.system,
            shots=self.shots,
            chat_template_kwargs=self.chat_template_kwargs,
            seed=self.seed,
        )

    @property
    def mark(self) -> dict[str, str]:
        """The mark of each line that a control experiment writes; {} for an ordinary run."""
        return {} if self.control == "none" else {"control": self.control}

    def levels_for(self, task: Task) -> list[int]:
        """Return the levels of training, rising. Without --curriculum the last one is --words."""
        if self.curriculum:
            return parse_levels(self.curriculum, "--curriculum", must_rise=True)

        assert self.level is not None, "the configuration is resolved"
        climbs = self.ramp and getattr(task, "climbs", False) and not self.dataset
        return ramp_to(self.level) if climbs else [self.level]

    def save(self, path: Path, **facts: Any) -> None:
        """Write the configuration and `facts` (versions, device, commit) as YAML."""
        values = {**dataclasses.asdict(self), "facts": facts}
        write_whole(path, yaml.safe_dump(values, sort_keys=False).encode())


FIELDS = Config.__dataclass_fields__
SETTINGS = {name: spec for name, spec in FIELDS.items() if name not in FOUND}


def _limit_checks(value: Any, limits: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    """Yield whether `value` keeps each of the `limits` of its setting, and what to give."""
    if choices := limits.get("choices"):
        yield value in choices, f"give one of {', '.join(choices)}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return

    yield math.isfinite(value), "give a finite number"
    if "least" in limits:
        yield value >= limits["least"], f"give {limits['least']} or more"
    if "above" in limits:
        yield value > limits["above"], f"give a number above {limits['above']}"
    if "below" in limits:
        yield value < limits["below"], f"give a number below {limits['below']}"
    elif "least" in limits or "above" in limits:
        most = limits.get("most", MAX_NUMBER)
        yield value <= most, f"give {most:,} or less"


def names_in(text: str | None) -> list[str]:
    """Return the names of a list such as "wandb,trackio".

    >>> names_in("wandb, trackio"), names_in(None)
    (['wandb', 'trackio'], [])
    """
    return [part.strip() for part in text.split(",")] if text else []


def is_loss(spec: str) -> bool:
    """Return whether `spec` is a value of the setting `loss`.

    >>> is_loss("dapo"), is_loss("my.py:loss"), is_loss("python:loss"), is_loss("mse")
    (True, True, True, False)
    """
    where, _, name = spec.rpartition(":")
    is_function = bool(name) and (where.endswith(".py") or spec == FROM_PYTHON + name)
    return spec in LOSSES or is_function


def program_of(spec: str) -> list[Path]:
    """Return the file of a loss ``path/to/file.py:function``; [] for any other loss."""
    if spec in LOSSES or spec.startswith(FROM_PYTHON):
        return []
    return [Path(spec.rpartition(":")[0])]


def is_draft_mode(mode: str) -> bool:
    """Return whether `mode` is a value of the setting `draft`: auto, off, or a number of tokens."""
    return mode in ("auto", "off") or (mode.isdecimal() and int(mode) <= MAX_DRAFTED)


def is_folder_name(name: str) -> bool:
    """Return whether a folder may have this name.

    A name that is not UTF-8 holds halves of surrogate pairs: `open_run` refuses it, and says why.
    """
    return (
        re.fullmatch(r"[^/\\\0]+", name) is not None
        and all(c.isprintable() or "\ud800" <= c <= "\udfff" for c in name)
        and name.strip(".") != ""
        and len(name.encode(errors="replace")) <= MAX_NAME
    )


def is_score_range(limits: Sequence[Any]) -> bool:
    """Return whether `limits` are two scores, from 0 to 1, that do not fall."""
    are_numbers = all(type(end) in (int, float) for end in limits)
    return are_numbers and len(limits) == 2 and 0 <= limits[0] <= limits[1] <= 1


def spelled(name: str) -> str:
    """Return how a user writes the setting `name`.

    >>> spelled("group_size"), spelled("level"), spelled("top_p")
    ('--group-size', '--words', '--config: top_p')
    """
    info = FIELDS[name].metadata
    if info.get("kind", "setting") == "setting":
        return f"--config: {name}"
    return info["flags"][0] if "flags" in info else f"--{name.replace('_', '-')}"


# Automatic values


def resolve_config(config: Config, task: Task, levels: Collection[int] = ()) -> Config:
    """Fill in the automatic settings, except the learning rate, which needs the loaded model.

    `levels` are those of the --dataset. Raises UserError if it lacks a level to be trained on.
    """
    if config.keep_difficulty and not levels:
        raise UserError(
            f"--config: keep_difficulty {config.keep_difficulty}: task {config.task} makes new "
            "problems without end; give a set of problems by --data or --dataset"
        )
    if config.problems != "fresh" and levels:
        raise UserError(
            f"--problems {config.problems}: task {config.task} has a set of problems; leave the "
            "flag out"
        )
    is_builtin = config.model == "builtin"

    level = config.level
    if level is None and config.curriculum:
        level = config.levels_for(task)[-1]
    elif level is None:
        level = max(levels, default=getattr(task, "default_level", 1))
    is_level_given = bool(config.level or config.curriculum)

    rank = config.lora_rank
    if rank is None:
        rank = 0 if is_builtin else LORA_RANK

    steps = config.steps
    if steps is None and is_builtin:
        steps = default_steps_of(task, level)

    promote_by, promote_at = config.promotion
    resolved = dataclasses.replace(
        config,
        level=level,
        mixed=config.mixed or (len(levels) > 1 and not is_level_given),
        prompts=config.prompts or (BUILTIN_PROMPTS if is_builtin else PROMPTS),
        promote_by=promote_by,
        promote_at=promote_at,
        dynamic_sampling=_least_varied(config),
        lora_rank=rank,
        schedule=config.schedule or ("constant" if is_builtin else "cosine"),
        reward=config.reward or getattr(task, "reward", None),
        steps=steps or STEPS,
        resume=None,
        accept_changes=None,
    )
    if levels and not resolved.mixed:
        _check_levels(resolved, task, levels)
    return resolved


def _least_varied(config: Config) -> int:
    """Return how many groups of a step must vary, or else dynamic sampling draws more prompts."""
    if config.dynamic_sampling is not None:
        return config.dynamic_sampling
    if config.control == "constant-reward":
        return 0  # no group will ever vary
    if config.model == "builtin" and config.prompts is None:
        return BUILTIN_VARIED
    if config.promotion[0] == "running":
        return 0
    prompts = config.prompts or PROMPTS
    return min(MIN_VARIED, -(-prompts // 2))


def _check_levels(config: Config, task: Task, levels: Collection[int]) -> None:
    """Raise UserError if a level to be trained on is not among the `levels` of the dataset."""
    missing = [level for level in config.levels_for(task) if level not in levels]
    if missing:
        flag = "--curriculum" if config.curriculum else "--words"
        data = config.dataset or "the data"
        raise UserError(
            f"{flag} {config.curriculum or config.level}: {data} has no problem of level "
            f"{missing[0]}; it has those of {', '.join(map(str, sorted(levels)))}"
        )


# Settings from a file, and from Python


def load_config(path: Path) -> Config:
    """Read the configuration of a run.

    Raises UserError if the file is not one, for unknown keys, and for values of the wrong type.
    """
    values = read_yaml(path)
    values.pop("facts", None)
    return Config(**checked(values, str(path)))


def checked(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the settings `values`, which come from `where`.

    Raises UserError for unknown names and for values of the wrong type.
    """
    values = dict(values)
    if isinstance(values.get("keep_difficulty"), bool):
        values["keep_difficulty"] = [0.2, 0.8] if values["keep_difficulty"] else None
    kinds = get_type_hints(Config)
    for name, value in values.items():
        if name not in kinds:
            elsewhere = ELSEWHERE.get(str(name))
            near = [elsewhere] if elsewhere else difflib.get_close_matches(str(name), kinds, 1)
            hint = f"did you mean {near[0]}?" if near else "this version has no such setting"
            raise UserError(f"{where}: unknown key {name}; {hint}")

        kind = kinds[name]
        members = get_args(kind) if isinstance(kind, UnionType) else (kind,)
        allowed = [get_origin(member) or member for member in members]
        values[name] = value = _as_meant(value, name, allowed)
        if not any(_is(value, each) for each in allowed):
            names = " or ".join(each.__name__ for each in allowed if each is not NoneType)
            raise UserError(f"{where}: {name} is {value!r}, and should be {names}")
        if name == "task_options":
            values[name] = _options(value, where)
    return values


def _as_meant(value: Any, name: str, allowed: Collection[type]) -> Any:
    """Return what a user means by `value` where YAML 1.1 reads something else.

    It reads "off" as False, and has no "1e-4" among its numbers.
    """
    if name in WORDS and isinstance(value, bool):
        return "on" if value else "off"
    if name in WORDS and isinstance(value, int):
        return str(value)
    if float in allowed and str not in allowed and isinstance(value, str):
        with suppress(ValueError):
            return float(value)
    return value


def _is(value: Any, kind: type) -> bool:
    """Return whether `value` has the type `kind`. An int also passes as a float; a bool never."""
    if isinstance(value, bool) != (kind is bool):
        return False
    return isinstance(value, (int, float) if kind is float else kind)


def _options(options: Mapping[Any, Any], where: str) -> dict[str, str]:
    """Return the options of a task as texts. Raises UserError for values that are no text."""
    found = {}
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise UserError(
                f"{where}: task_options has {name}: {value!r}; give it as on the command line, as "
                "a text"
            )
        found[str(name)] = str(value)
    return found


def is_inline(source: str) -> bool:
    """Return whether `source`, of --config, is YAML in the argument, and not a file."""
    return source.lstrip().startswith("{")


def read_settings(source: str) -> dict[str, Any]:
    """Return the settings of `--config`: a YAML file, a run's config.yaml, or YAML in the argument.

    A run's config.yaml gives everything except what belongs to that run only, such as its name, so
    the same training starts again. Raises UserError if the file cannot be read, a name is unknown,
    or a value has the wrong type.
    """
    where = f"--config {source}"
    if not is_inline(source):
        values = read_yaml(Path(source))
    else:
        try:
            values = load_yaml(source)
        except yaml.MarkedYAMLError as error:
            raise UserError(f"{where}: not YAML; give '{{name: value, ...}}'") from error
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise UserError(f"--config: {str(error).splitlines()[0]}") from error
        where = "--config"

    if "facts" not in values:  # not the config.yaml of a run
        for name in FOUND:
            if name in values:
                raise UserError(f"{where}: {name} is filled in by the run; leave it out")
        return with_texts(checked(values, where))

    left_out = (*OF_ONE_RUN, "level") if values.get("mixed") else OF_ONE_RUN  # all levels again
    values = {name: value for name, value in values.items() if name not in left_out}
    values = checked(values, where)
    if start := values.pop("start", None):
        values["model"] = start
    return values


def with_texts(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given` with the contents of the text files that it names instead of their paths.

    So a run keeps the texts even if the files change later.
    """
    given = dict(given)
    if "system" in given:
        given["system"] = system_text(given["system"])
    if file := given.get("wording"):
        given["wording"] = wording_text(file)
    return given


def programs_in(values: Mapping[str, Any]) -> list[str | None]:
    """Return the programs that settings name: the task, the reward and the loss."""
    reward = values.get("task_options", {}).get(REWARD_FILE)
    return [values.get("task"), reward, values.get("loss")]


def require_trusted(
    values: Mapping[str, Any], allowed: Collection[str | None], where: str | Path
) -> None:
    """Check that the user has allowed the programs that the settings `values` of a file name.

    The file may come from a stranger, and a task, reward or loss in a file of its own is executed.
    Raises UserError, which names `where` the settings come from, for one that is not `allowed`.
    """
    task, _, loss = programs_in(values)
    require_trusted_task(task or Config.task, values.get("task_options", {}), allowed, where)
    if loss and program_of(loss) and not is_allowed(loss, allowed):
        raise UserError(
            f"{where}: its loss is a program that would be executed, {loss}; if you trust it, give "
            f"--loss {loss} as well"
        )


# The command line


def program(name: str = "train") -> str:
    """Return how the user starts the program "train" or "eval": by its file in a checkout, unless
    the installed command was started or there is no checkout.
    """
    is_checkout = (Path(__file__).parents[1] / "train.py").is_file()
    is_command = Path(sys.argv[0]).name.startswith("grpo-")
    return f"python {name}.py" if is_checkout and not is_command else f"grpo-{name}"


def parse(argv: Sequence[str]) -> tuple[Config, dict[str, Any]]:
    """Return the configuration of a command line, and the settings that it gave, by name.

    Raises UserError for an unknown flag, with the nearest known one, and for a bad value. Exits
    with status 0 after `--help`.
    """
    if asked := {"-h", "--help", "--help-all"} & set(argv):
        make_parser(lists_all="--help-all" in asked).print_help()
        sys.exit(0)

    parser = make_parser()
    values, unknown = parser.parse_known_args(argv)
    flags = vars(values)

    # Flags override --config, and a later --config overrides an earlier one.
    sources = flags.pop("config", [])
    wording_file = flags.get("wording", "--config")
    given: dict[str, Any] = {}
    written: dict[str, Any] = {}  # on the command line itself, and not in a file
    for source in sources:
        settings = read_settings(source)
        given |= settings
        written |= settings if is_inline(source) else {}
    flags = with_texts(flags)
    given |= flags
    written |= flags

    # Before the task is loaded, which tells its flags.
    files = f"--config {', '.join(source for source in sources if not is_inline(source))}"
    require_trusted({"task": given.get("task")}, programs_in(written), files)

    # What the parser does not know may be flags of the task.
    if "task" not in given and (implied := implied_task(unknown)):
        given["task"] = implied
    if unknown:
        options, unknown = split_options(given.get("task", Config.task), unknown)
        if unknown:
            raise UserError(_no_such_flag(unknown[0], parser))
        if options:
            for settings in (given, written):
                settings["task_options"] = settings.get("task_options", {}) | options
    require_trusted(given, programs_in(written), files)

    # With --resume the task is the run's own, which has not been read yet.
    if given.get("wording") and "resume" not in given:
        check_wording(given.get("task", Config.task), given["wording"], wording_file)
    return Config(**given), given


def make_parser(lists_all: bool = False) -> Parser:
    """Return the parser. Its help lists the basic flags, or all flags and settings."""
    examples = EXAMPLES.format(program())
    parser = Parser(
        prog=program(),
        usage=f"{program()} [flags]",
        description="Train a language model by GRPO.",
        epilog=examples,
        allow_abbrev=False,
        add_help=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    first = group = parser.add_argument_group("Run" if lists_all else "basic flags")
    group.add_argument(
        "--config",
        metavar="FILE",
        action="append",
        help="a YAML file of settings, a run's own config.yaml, or '{name: value, ...}'; may be "
        "repeated: a later one overrides an earlier one, and flags override both",
    )
    for spec in SETTINGS.values():
        heading = spec.metadata.get("heading", "Run")
        if lists_all and heading != "Run":
            group = parser.add_argument_group(heading)
        if spec.metadata["kind"] != "setting":
            _add_flag(group, spec, is_listed=lists_all or spec.metadata["kind"] == "basic flag")

    first.add_argument("--help", "-h", action="store_true", help="the basic flags")
    first.add_argument("--help-all", action="store_true", help="all flags and settings")
    if lists_all:
        parser.epilog = f"{_settings_text()}\n{flags_of_tasks()}\n\n{examples}"
    return parser


def _add_flag(group: Any, spec: dataclasses.Field, is_listed: bool) -> None:
    """Add the flag of one setting to the argument group.

    Its metadata may have `flags` (its spellings), `metavar`, and `const` (its value if it is given
    without one).
    """
    info = spec.metadata
    options = info.get("flags", [f"--{spec.name.replace('_', '-')}"])
    text = _help_of(spec) if is_listed else argparse.SUPPRESS

    # The type of a setting that may be None is the other member of the union.
    kind = get_type_hints(Config)[spec.name]
    kind = get_args(kind)[0] if get_args(kind) else kind

    if kind is bool:
        action = "store_false" if spec.default else "store_true"
        options = [f"--no-{option[2:]}" if spec.default else option for option in options]
        group.add_argument(*options, dest=spec.name, action=action, help=text)
        return

    if "choices" in info:
        metavar = "{" + ",".join(info["choices"]) + "}"
    else:
        metavar = info.get("metavar", {int: "N", float: "X"}.get(kind, spec.name.upper()))
    extra = {"nargs": "?", "const": info["const"]} if "const" in info else {}
    group.add_argument(*options, dest=spec.name, type=kind, metavar=metavar, help=text, **extra)


def _help_of(spec: dataclasses.Field) -> str:
    """Return the help of a setting, with its default unless the text mentions one."""
    text = spec.metadata["help"]
    has_default = not isinstance(spec.default, bool) and spec.default not in (None, "", "{}")
    if has_default and spec.default is not dataclasses.MISSING and "default" not in text:
        text += f" (default: {spec.default})"
    return text.replace("%", "%%")


def _settings_text() -> str:
    """Return the list of settings that have no flag, for the end of --help-all."""
    lines = ["settings without a flag, given by --config FILE or --config '{top_p: 0.9}':"]
    for name, spec in SETTINGS.items():
        if spec.metadata["kind"] == "setting":
            lines.append(f"  {name:<22}{_help_of(spec)}")
    return "\n".join(lines).replace("%%", "%")


def _no_such_flag(given: str, parser: Parser) -> str:
    """Return the message for an unknown flag: the nearest known one, or how to give the setting."""
    word = given.split("=")[0]
    name = word.lstrip("-").replace("-", "_")
    if name in SETTINGS and SETTINGS[name].metadata["kind"] == "setting":
        return f"{given}: this setting has no flag; give --config '{{{name}: ...}}'"

    known = [option for action in parser._actions for option in action.option_strings]
    if name in ELSEWHERE:
        flag = "--" + ELSEWHERE[name].replace("_", "-")
        near = flag if flag in known else f"--config '{{{ELSEWHERE[name]}: ...}}'"
    else:
        near = parser.nearest(word)
    hint = f"did you mean {near}?" if near else f"{program()} --help-all lists all"
    return f"{given}: no such flag; {hint}"
