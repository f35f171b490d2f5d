"""The configuration of a run: every setting with its default, its meaning and its check.

`grpo.flags` makes the command line of `train.py` from this dataclass. Nothing here imports torch,
so that `--help` is quick. The file is long because it holds all settings in one table, each with
its help text.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import yaml

from data.files import read_yaml, write_whole
from grpo.choices import (
    CONTROLS,
    CREDITS,
    LORA_VARIANTS,
    LOSSES,
    MAX_DRAFTED,
    MAX_SHOTS,
    OPTIMIZERS,
    PREFLIGHTS,
    PROMOTIONS,
    QUANTISED,
    SCALES,
    SCHEDULES,
    SOURCES,
    TRACKERS,
    TRUNCATED,
    WAYS,
    is_draft_mode,
    is_loss,
)
from grpo.curriculum.ladder import PROMOTE_AT, problems_needed, ramp_to
from grpo.model.options import AdapterSettings, LoadOptions
from grpo.model.prompts import PromptFormat, format_of, template_arguments
from grpo.older_runs import SETTINGS, renamed
from tasks.base import Task, UserError
from tasks.levels import LADDER, parse_levels
from tasks.supply import fixed_size

# How far below and above 1 the ratio is clipped, according to each loss's paper. Other losses have
# 0.2 and 0.2.
CLIP = {
    "dapo": (0.2, 0.28),
    "gspo": (3e-4, 4e-4),
    "cispo": (1.0, 0.28),
}

# Settings that a resumed run can change.
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

# The mean scores of the problems that `keep_difficulty: true` keeps.
MIDDLING = [0.2, 0.8]

# Groups of settings, in the order of --help-all.
RUN = "Run"
DATA = "Task and data"
MODEL = "Model"
SAMPLING = "Sampling"
ALGORITHM = "Algorithm"
OPTIMIZER = "Optimizer"
CURRICULUM = "Curriculum"
DEGENERATE = "Degenerate groups"
SAVING = "Evaluation, checkpoints and logs"

# The values that meant "automatic" in the config.yaml of older versions. It is None today. Renamed
# settings are in grpo.older_runs.
WERE_AUTOMATIC = {"max_new_tokens": 0, "micro_tokens": 0}

# The upper limit of all counts and weights.
MAX_NUMBER = 10**9


def setting(default: Any, help: str, **extra: Any) -> Any:
    """Declare a setting that only `--config` can change."""
    metadata = {"help": help, **extra}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


def flag(
    default: Any,
    help: str,
    *,
    is_basic: bool = False,
    flags: Sequence[str] = (),
    metavar: str | None = None,
    **extra: Any,
) -> Any:
    """Declare a setting that has a flag; a basic one is listed by `--help`."""
    is_flag = dict(is_flag=True, is_basic=is_basic, flags=flags, metavar=metavar)
    return setting(default, help, **is_flag, **extra)


def names_in(text: str | None) -> list[str]:
    """Return the names of a list such as "wandb,trackio".

    >>> names_in("wandb, trackio"), names_in(None)
    (['wandb', 'trackio'], [])
    """
    return [part.strip() for part in text.split(",")] if text else []


@dataclass(frozen=True)
class Config:
    """The settings of a run, which are checked when an object is made.

    Fields declared by `flag` are flags of `train.py`; fields declared by `setting` are given by
    `--config` only. None means automatic: `grpo.resolve` fills it in, and config.yaml has the
    result. Raises UserError for an invalid value or combination.
    """

    # Run
    task: str = flag(
        "interleave",
        "a task's name, or path/to/file.py:ClassName for your own",
        group=RUN,
        metavar="NAME",
        is_basic=True,
    )
    level: int | None = flag(
        None,
        "difficulty; for interleave the words of each text (default: the task's own)",
        group=RUN,
        metavar="N",
        is_basic=True,
        flags=("--words", "--level"),
    )
    model: str = flag(
        "builtin",
        "builtin, a directory in Hugging Face layout, a GGUF file, a hub id, or the policy of an "
        "earlier run (runs/NAME, or one of its checkpoints)",
        group=RUN,
        metavar="MODEL",
        is_basic=True,
    )
    steps: int | None = flag(
        None,
        "training steps (default: the task's own for builtin, 800 for other models)",
        group=RUN,
        metavar="N",
        is_basic=True,
    )
    seed: int = flag(
        0, "seed of problems, samples and adapter", group=RUN, metavar="N", is_basic=True
    )
    name: str | None = flag(
        None,
        "write the run to runs/NAME (default: made from task, level and seed)",
        group=RUN,
        metavar="NAME",
        is_basic=True,
    )
    resume: str | None = flag(
        None,
        "continue this run or checkpoint; without a value: the latest run",
        group=RUN,
        metavar="RUN",
        nargs="?",
        const="latest",
        is_basic=True,
    )
    accept_changes: str | None = flag(
        None,
        "with --resume: continue although these have changed since the checkpoint: any of "
        f"{', '.join(SOURCES)} (separated by commas)",
        group=RUN,
        metavar="KINDS",
    )
    device: str = flag("auto", "cpu, cuda, or auto", group=RUN, metavar="DEVICE", is_basic=True)

    # Task and data
    reward: str | None = flag(
        None, "one of the task's rewards (default: its first)", group=DATA, metavar="NAME"
    )
    dataset: str | None = flag(
        None,
        "train on the problems of this JSON Lines file, shuffled each epoch: those of --words or "
        "--curriculum, else all",
        group=DATA,
        metavar="FILE",
    )
    problems: str = flag(
        "fresh",
        "fresh: new problems each step; fixed:N: the same N, shuffled each epoch",
        group=DATA,
        metavar="KIND",
    )
    control: str = flag(
        "none",
        "control experiment: shuffled-rewards (permuted over the batch) or constant-reward",
        group=DATA,
        choices=CONTROLS,
    )
    wording: str = flag(
        "",
        "a text file that replaces the task's prompt, with its placeholders: {a} and {b} for "
        "interleave, {expression} for arithmetic",
        group=DATA,
        metavar="FILE",
    )
    system: str = flag(
        "", "text of a system turn before the user's, or @FILE", group=DATA, metavar="TEXT"
    )
    shots: int = flag(
        0,
        "solved problems of the training split and the same level, shown before each question",
        group=DATA,
        metavar="N",
    )
    chat_template_kwargs: str = flag(
        "{}",
        "variables of the model's chat template, e.g. '{\"enable_thinking\": false}'",
        group=DATA,
        metavar="JSON",
    )
    task_options: dict = setting({}, "the task's own flags, e.g. {'family': 'product'}", group=DATA)
    keep_difficulty: list | None = setting(
        None,
        "before training, measure the mean score of every problem of --data or --dataset, and "
        "train on those within this range alone; true stands for [0.2, 0.8]",
        group=DATA,
    )
    mixed: bool = setting(
        False, "train on all levels of the dataset, in its order (filled in)", group=DATA
    )

    # Model
    dtype: str = flag(
        "auto",
        "float32; float16 or bfloat16 (with float32 masters of what is trained); auto: float32 on "
        "a CPU, with a bfloat16 backward pass if it has AMX; on a GPU, for LoRA and for models "
        "saved in half precision, float16 (bfloat16 if hidden states are too large for it), else "
        "float32",
        group=MODEL,
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    lora_rank: int | None = flag(
        None,
        "rank of the LoRA adapter; 0: full fine-tuning (default: 0 for builtin, 64 for other "
        "models, that of an earlier run's policy)",
        group=MODEL,
        metavar="N",
        is_basic=True,
    )
    lora_alpha: float = setting(32.0, "the LoRA scale is lora_alpha / lora_rank", group=MODEL)
    lora_variant: str = setting(
        "lora",
        "lora, rslora (the scale is lora_alpha / sqrt(lora_rank)), or dora (magnitudes are trained "
        "separately; slower, because it uses the model's own forward pass)",
        group=MODEL,
        choices=LORA_VARIANTS,
    )
    quantise: str = flag(
        "none",
        "keep the base model under LoRA in nf4 (4 bits) or int8 (slower; needs bitsandbytes, the "
        "extra `bits`)",
        group=MODEL,
        choices=QUANTISED,
    )
    start: str | None = setting(
        None, "the checkpoint of an earlier run that this run began with (filled in)", group=MODEL
    )

    # Sampling
    prompts: int | None = flag(
        None,
        "prompts a step (default: 8 for the embedded model, else 16)",
        group=SAMPLING,
        metavar="N",
        is_basic=True,
    )
    group_size: int = flag(
        16, "completions of each prompt", group=SAMPLING, metavar="N", is_basic=True
    )
    temperature: float = flag(1.0, "sampling temperature", group=SAMPLING, metavar="T")
    max_new_tokens: int | None = flag(
        None,
        "completion budget in tokens (default: a quarter more than the target takes)",
        group=SAMPLING,
        metavar="N",
    )
    top_k: int = setting(0, "sample from the k likeliest tokens (0: all)", group=SAMPLING)
    top_p: float = setting(
        1.0, "sample from the likeliest tokens of this probability mass (1: all)", group=SAMPLING
    )
    draft: str = setting(
        "auto",
        "speculative decoding, with the task's guess as the draft: auto, off, or a number of "
        "tokens; changes no sample",
        group=SAMPLING,
    )
    step_tokens: int = setting(
        0,
        "most tokens of a step: it has fewer prompts if prompts x group size x completion budget "
        "exceeds this (0: no limit)",
        group=SAMPLING,
    )

    # Algorithm
    loss: str = flag(
        "dapo",
        "how tokens are weighted and clipped: " + ", ".join(LOSSES) + ", or "
        "path/to/file.py:function for your own",
        group=ALGORITHM,
        metavar="LOSS",
        is_basic=True,
    )
    scale: str = flag(
        "group",
        "what advantages are divided by: the standard deviation of the group, of the batch, or "
        "nothing",
        group=ALGORITHM,
        choices=SCALES,
    )
    credit: str = flag(
        "outcome",
        "outcome: one advantage for all tokens of a completion; alignment: one for each token, "
        "from what this and later tokens earn",
        group=ALGORITHM,
        choices=CREDITS,
    )
    beta: float = flag(
        0.0,
        "weight of the KL divergence from the reference (0: no reference is kept)",
        group=ALGORITHM,
        metavar="WEIGHT",
    )
    clip_low: float | None = setting(
        None, "lower clip (default: that of the loss's paper)", group=ALGORITHM
    )
    clip_high: float | None = setting(
        None, "upper clip (default: that of the loss's paper)", group=ALGORITHM
    )
    truncated: str = setting(
        "learn",
        "completions that the budget cuts off: learn from them; mask: leave them out of the loss; "
        "soft-penalty: take up to 1 off the reward of those that end near the budget or beyond",
        group=ALGORITHM,
        choices=TRUNCATED,
    )
    soft_penalty_tokens: int | None = setting(
        None,
        "tokens before the budget's end over which the soft penalty rises from 0 to 1 (default: a "
        "fifth of the budget)",
        group=ALGORITHM,
    )
    epochs: int = setting(1, "updates on each rollout", group=ALGORITHM)
    importance_limit: float = setting(
        0.0,
        "truncated importance sampling: weight each token by the trainer's probability over the "
        "sampler's, up to this (0: off)",
        group=ALGORITHM,
    )
    parity_limit: float = setting(
        0.0,
        "stop when trainer and sampler differ by more than this in a log-probability (0: never)",
        group=ALGORITHM,
    )

    # Optimizer
    learning_rate: float | None = flag(
        None,
        "default: 2e-4 for builtin; for other models 1e-3 under LoRA and 1e-4 without, less where "
        "they are wider than 576; for an earlier run's policy, that run's",
        group=OPTIMIZER,
        metavar="RATE",
        is_basic=True,
    )
    schedule: str | None = flag(
        None,
        "learning rate after the warm-up (default: constant for builtin; for other models cosine, "
        "which falls to zero from the last level on, or from half of the steps)",
        group=OPTIMIZER,
        choices=SCHEDULES,
    )
    warmup: int = setting(5, "steps of linear warm-up", group=OPTIMIZER)
    optimizer: str = flag(
        "adamw",
        "adamw8bit keeps the moments in a quarter of the memory (needs bitsandbytes, the extra "
        "`bits`)",
        group=OPTIMIZER,
        choices=OPTIMIZERS,
    )
    weight_decay: float = setting(0.0, "weight decay of AdamW", group=OPTIMIZER)
    max_grad_norm: float = setting(1.0, "clip gradients to this norm (0: never)", group=OPTIMIZER)
    shard: bool = flag(
        False,
        "shard the optimizer's state over the ranks (full fine-tuning)",
        group=OPTIMIZER,
    )
    gradient_checkpointing: bool = flag(
        False,
        "recompute activations in the backward pass; enabled automatically when memory runs out",
        group=OPTIMIZER,
    )
    micro_tokens: int | None = setting(
        None,
        "most tokens of a micro-batch; changes no gradient (default: 4,096 on a CPU, by memory on "
        "a GPU)",
        group=OPTIMIZER,
    )

    # Curriculum
    curriculum: str | None = flag(
        None,
        "climb these levels, e.g. 10,25,50; without a value: " + ",".join(map(str, LADDER)),
        group=CURRICULUM,
        metavar="LEVELS",
        nargs="?",
        const=",".join(map(str, LADDER)),
        is_basic=True,
    )
    ramp: bool = flag(
        True,
        "start at --words instead of easier levels",
        group=CURRICULUM,
    )
    preflight: str = flag(
        "on",
        "before the first step, sample a few problems of each level, and start where groups vary "
        "and right answers are within reach; only: print that table and end",
        group=CURRICULUM,
        choices=PREFLIGHTS,
    )
    warm_start: str = flag(
        "auto",
        "imitation: imitate a few right answers before the first step; off: never; auto: only if "
        "the pre-flight finds every level out of reach",
        group=CURRICULUM,
        choices=WAYS,
    )
    promote_at: float | None = flag(
        None,
        "climb to the next level at this mean score (default: "
        f"{PROMOTE_AT['heldout']:g} by heldout problems, {PROMOTE_AT['running']:g} by the running "
        "mean)",
        group=CURRICULUM,
        metavar="SCORE",
    )
    promote_by: str | None = setting(
        None,
        "climb by the running mean of training, or by heldout problems (default: heldout with "
        "--curriculum, else running)",
        group=CURRICULUM,
        choices=PROMOTIONS,
    )
    promote_window: int = setting(
        3,
        "steps of the running mean, or more until they have enough groups for its interval",
        group=CURRICULUM,
    )
    promote_every: int = setting(
        10, "steps between validation checks once the running mean comes near", group=CURRICULUM
    )
    promote_problems: int = setting(128, "problems of each such check", group=CURRICULUM)
    stop_when_climbed: bool = setting(
        False, "end the run when the last level of --curriculum is climbed, too", group=CURRICULUM
    )
    replay: float = setting(
        0.25,
        "share of prompts drawn from earlier levels, most from those with the lowest scores",
        group=CURRICULUM,
    )
    level_minutes: float = setting(
        0.0,
        "most minutes on a level, then go to the next; after the last one the run ends (0: no "
        "limit)",
        group=CURRICULUM,
    )
    level_tokens: int = setting(
        0, "most sampled tokens on a level, in the same way (0: no limit)", group=CURRICULUM
    )

    # Degenerate groups
    on_degenerate: str = flag(
        "skip",
        "groups without variance: keep, skip, or resample at a higher temperature, then skip",
        group=DEGENERATE,
        choices=("keep", "skip", "resample"),
    )
    dynamic_sampling: int | None = setting(
        None,
        "dynamic sampling: draw more prompts until this many groups of the step vary, at most four "
        "times --prompts (0: off; default: 4 with the embedded model's 8 prompts, else half of "
        "--prompts, at most 8, if held-out problems promote, else 0)",
        group=DEGENERATE,
    )
    variance_threshold: float = setting(
        1e-6, "a group is degenerate if its rewards span no more than this", group=DEGENERATE
    )
    retries: int = setting(2, "most times that a group is resampled", group=DEGENERATE)
    temperature_factor: float = setting(
        1.15, "factor by which temperature is raised", group=DEGENERATE
    )
    temperature_ceiling: float = setting(
        1.5, "upper limit of the factor by which temperature is raised in total", group=DEGENERATE
    )
    on_alarm: str = setting(
        "say",
        "when training collapses for five steps: say so, or stop with exit status 3",
        group=DEGENERATE,
        choices=("say", "stop"),
    )
    patience: int = flag(
        20,
        "end the run early: with status 3 after this many steps without a group to train on, with "
        "status 0 when the last level is solved (0: make all --steps)",
        group=DEGENERATE,
        metavar="STEPS",
    )

    # Evaluation, checkpoints and logs
    eval_every: int = flag(
        50,
        "steps between evaluations on held-out problems (0: only before and after)",
        group=SAVING,
        metavar="STEPS",
    )
    eval_problems: int = flag(200, "problems of each evaluation", group=SAVING, metavar="N")
    save_every: int = flag(20, "steps between checkpoints", group=SAVING, metavar="STEPS")
    track: str | None = flag(
        None,
        f"also send the metrics to {', '.join(TRACKERS)} (separated by commas)",
        group=SAVING,
        metavar="NAMES",
    )
    save_threshold: float = setting(
        0.3,
        "checkpoint when the reward first passes this (0 to 1: its place in the task's range)",
        group=SAVING,
    )
    best_margin: float = setting(
        0.01, "checkpoint when the reward exceeds the best by this", group=SAVING
    )
    best_spacing: int | None = setting(
        None,
        "least steps between checkpoints made only for a new best (default: chosen after the first "
        "checkpoint, so that they take 5 % of the time at most)",
        group=SAVING,
    )
    keep_best: bool = setting(
        False,
        "keep the best checkpoint, beside the first, the second to last and the last",
        group=SAVING,
    )
    samples_every: int = setting(10, "steps between entries of samples.log", group=SAVING)
    log_every: int = setting(1, "steps between lines on the console", group=SAVING)

    def __post_init__(self) -> None:
        for name, is_good, fix in self._checks():
            if not is_good:
                raise UserError(f"{spelled(name)} {getattr(self, name)}: {fix}")

    def _checks(self) -> Iterator[tuple[str, bool, str]]:
        """Yield the name of each checked setting, whether it is valid, and what to do if not."""
        yield from self._choice_checks()
        yield from self._range_checks()
        yield from self._combination_checks()

        if self.curriculum:
            parse_levels(self.curriculum, "--curriculum", must_rise=True)
        template_arguments(self.chat_template_kwargs)
        fixed_size(self.problems)

    def _choice_checks(self) -> Iterator[tuple[str, bool, str]]:
        for spec in dataclasses.fields(self):
            choices = spec.metadata.get("choices")
            value = getattr(self, spec.name)
            if choices and value is not None:
                yield spec.name, value in choices, f"give one of {', '.join(choices)}"

        for name, choices in (("accept_changes", SOURCES), ("track", TRACKERS)):
            is_good = set(names_in(getattr(self, name))) <= set(choices)
            yield name, is_good, f"give one of {', '.join(choices)}"
        fix = f"give one of {', '.join(LOSSES)}, or path/to/file.py:function for your own"
        yield "loss", is_loss(self.loss), fix

        is_device = self.device.split(":")[0] in ("auto", "cpu", "cuda")
        yield "device", is_device, "give one of auto, cpu, cuda"

    def _range_checks(self) -> Iterator[tuple[str, bool, str]]:
        for names, least in ((FROM_ZERO, 0), (FROM_ONE, 1)):
            for name in names:
                value = getattr(self, name)
                yield name, value is None or value >= least, f"give {least} or more"
                yield name, value is None or value <= MAX_NUMBER, f"give {MAX_NUMBER:,} or less"
        for name in ("clip_low", "clip_high"):
            value = getattr(self, name)
            yield (
                name,
                value is None or 0 < value <= MAX_NUMBER,
                f"give a number above 0, up to {MAX_NUMBER:,}",
            )

        fix = "a group of one has no variance and nothing to learn from; give 2 or more"
        yield "group_size", self.group_size >= 2, fix
        yield "shots", self.shots <= MAX_SHOTS, f"give {MAX_SHOTS} or less"
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            is_finite = not isinstance(value, float) or math.isfinite(value)
            yield spec.name, is_finite, "give a finite number"
        yield "temperature", self.temperature > 0, "give a number above 0"
        yield "top_p", 0 < self.top_p <= 1, "give a number above 0 and up to 1"
        yield "replay", 0 <= self.replay < 1, "give a share from 0 up to, not including, 1"

        rate = self.learning_rate
        yield "learning_rate", rate is None or 0 <= rate < 1, "give a number from 0 up to 1"
        limits = self.keep_difficulty
        fix = "give the lowest and the highest mean score, e.g. [0.2, 0.8]"
        yield "keep_difficulty", limits is None or is_score_range(limits), fix
        mark = self.promote_at
        yield "promote_at", mark is None or 0 <= mark <= 1, "give a score from 0 to 1"

        fix = f"give auto, off, or a number of tokens up to {MAX_DRAFTED}"
        yield "draft", is_draft_mode(self.draft), fix

    def _combination_checks(self) -> Iterator[tuple[str, bool, str]]:
        is_plain = self.name is None or (
            re.fullmatch(r"[^/\\\0]+", self.name) is not None and self.name.strip(".") != ""
        )
        yield "name", is_plain, "give the plain name of a folder in runs"

        is_only_source = self.problems == "fresh" or not self.dataset
        yield "problems", is_only_source, "leave it out: --dataset says which problems there are"

        weighs_tokens = self.credit == "outcome" or self.loss != "gspo"
        fix = "gspo weighs whole sequences, not tokens; give another --loss"
        yield "credit", weighs_tokens, fix
        is_used = self.soft_penalty_tokens is None or self.truncated == "soft-penalty"
        yield "soft_penalty_tokens", is_used, "give truncated: soft-penalty as well"

        is_trainable = self.quantise == "none" or self.lora_rank != 0
        fix = "give --lora-rank 16 too: what is quantised cannot be trained"
        yield "quantise", is_trainable, fix

        is_full = not (self.shard and self.lora_rank)
        fix = "give --lora-rank 0 too; an adapter is small, and each rank holds it whole"
        yield "shard", is_full, fix

        can_shard = not (self.shard and self.optimizer == "adamw8bit")
        yield "shard", can_shard, "give one of --shard and --optimizer adamw8bit"

        if self.promote_by == "heldout" and self.promote_at is not None:
            needed = problems_needed(min(self.promote_at, 1))
            fix = (
                f"give {needed} or more: fewer cannot show --promote-at {self.promote_at:g}, even "
                "if all are right"
            )
            yield "promote_problems", self.promote_problems >= needed, fix

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
    def adapter(self) -> AdapterSettings | None:
        """The adapter of a new run; None for full fine-tuning."""
        if not self.lora_rank:
            return None
        return AdapterSettings(self.lora_rank, self.lora_alpha, self.lora_variant, self.seed)

    @property
    def loading(self) -> LoadOptions:
        """How the policy is loaded, besides its device."""
        return LoadOptions(
            dtype=self.dtype,
            adapter=self.adapter,
            quantise=self.quantise,
            start=self.start,
            keep_reference=self.beta > 0,
        )

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


def is_score_range(limits: Sequence[Any]) -> bool:
    """Return whether `limits` are two scores, from 0 to 1, that do not fall.

    >>> is_score_range([0.2, 0.8]), is_score_range([0.8, 0.2]), is_score_range([0.2])
    (True, False, False)
    """
    are_numbers = all(type(end) in (int, float) for end in limits)
    return are_numbers and len(limits) == 2 and 0 <= limits[0] <= limits[1] <= 1


# Settings whose values may be the words on and off or a number, which YAML does not read as text.
WORDS = ("draft", "preflight", "warm_start")

# Settings that are at least 0.
FROM_ZERO = (
    "shots",
    "lora_rank",
    "top_k",
    "beta",
    "importance_limit",
    "parity_limit",
    "variance_threshold",
    "retries",
    "weight_decay",
    "max_grad_norm",
    "warmup",
    "eval_every",
    "best_margin",
    "level_minutes",
    "level_tokens",
    "step_tokens",
    "patience",
    "dynamic_sampling",
)

# Settings that are at least 1.
FROM_ONE = (
    "level",
    "steps",
    "prompts",
    "max_new_tokens",
    "micro_tokens",
    "epochs",
    "eval_problems",
    "save_every",
    "samples_every",
    "log_every",
    "promote_window",
    "promote_every",
    "promote_problems",
    "best_spacing",
    "temperature_factor",
    "temperature_ceiling",
    "soft_penalty_tokens",
)


def spelled(name: str) -> str:
    """Return how a user writes the setting `name`.

    >>> spelled("group_size"), spelled("level"), spelled("top_p")
    ('--group-size', '--words', '--config: top_p')
    """
    spec = Config.__dataclass_fields__[name]
    if not spec.metadata.get("is_flag"):
        return f"--config: {name}"
    return spec.metadata["flags"][0] if spec.metadata["flags"] else f"--{name.replace('_', '-')}"


def translated(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that an older version wrote, under today's names."""
    values = renamed(values, SETTINGS)
    for name, automatic in WERE_AUTOMATIC.items():
        if values.get(name) == automatic:
            values[name] = None

    # BNPO is DAPO's loss with another clip.
    if values.get("loss") == "bnpo":
        values |= {"loss": "dapo", "clip_high": values.get("clip_high") or 0.2}
    return values


def checked(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the settings `values`, which come from `where`, under today's names.

    Raises UserError for unknown names and for values of the wrong type.
    """
    values = translated(values)
    if isinstance(values.get("keep_difficulty"), bool):
        values["keep_difficulty"] = list(MIDDLING) if values["keep_difficulty"] else None
    kinds = get_type_hints(Config)
    for name, value in values.items():
        if name not in kinds:
            near = difflib.get_close_matches(str(name), kinds, 1)
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
    """Return what a user means by `value` where YAML reads something else.

    YAML 1.1 has no "1e-4" among its numbers, and reads "off" as False.
    """
    if name in WORDS:
        return _word(value)
    if float in allowed and str not in allowed and isinstance(value, str):
        with suppress(ValueError):
            return float(value)
    return value


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


def _word(value: Any) -> Any:
    """Return a word or number that YAML has read as something else, as it was written.

    >>> _word(False), _word(True), _word(8), _word("auto")
    ('off', 'on', '8', 'auto')
    """
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value) if isinstance(value, int) else value


def load_config(path: Path) -> Config:
    """Read the configuration of a run.

    Raises UserError if the file is not one, for unknown keys, and for values of the wrong type.
    """
    values = read_yaml(path)
    values.pop("facts", None)
    return Config(**checked(values, str(path)))


def _is(value: Any, kind: type) -> bool:
    """Return whether `value` has the type `kind`. An int also passes as a float; a bool never."""
    if isinstance(value, bool) != (kind is bool):
        return False
    return isinstance(value, (int, float) if kind is float else kind)
