"""The table of settings: each with its default, its meaning, its flag and its limits.

`grpo.flags` makes the command line of `train.py` from it. Nothing here imports torch, so that
`--help` is quick. The file is long because it holds all settings, each with its help text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo.choices import (
    CONTROLS,
    CREDITS,
    LOSSES,
    PREFLIGHTS,
    PROMOTE_AT,
    PROMOTIONS,
    QUANTISED,
    SCALES,
    SCHEDULES,
    SOURCES,
    TRACKERS,
    TRUNCATED,
    WARM_STARTS,
)
from tasks.supply import LADDER

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


@dataclass(frozen=True)
class Settings:
    """The settings of a run, unchecked: `grpo.config.Config` checks them.

    Fields declared by `flag` are flags of `train.py`; fields declared by `setting` are given by
    `--config` only. `choices` are the values that a setting may have, `least` is the smallest one.
    None means automatic: `grpo.resolve` fills it in, and config.yaml has the result.
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
        least=1,
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
        least=1,
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
    device: str = flag(
        "auto", "cpu, cuda, cuda:N, or auto", group=RUN, metavar="DEVICE", is_basic=True
    )

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
        least=0,
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
        "a CPU, with a bfloat16 backward pass if it has AMX; on a GPU float16 (bfloat16 if hidden "
        "states are too large for it), but float32 for all weights of the embedded model",
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
        least=0,
    )
    lora_alpha: float = setting(32.0, "the LoRA scale is lora_alpha / lora_rank", group=MODEL)
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
        least=1,
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
        least=1,
    )
    top_k: int = setting(0, "sample from the k likeliest tokens (0: all)", group=SAMPLING, least=0)
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
        least=0,
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
        least=0,
    )
    clip_low: float | None = setting(
        None, "lower clip (default: that of the loss's paper)", group=ALGORITHM
    )
    clip_high: float | None = setting(
        None, "upper clip (default: that of the loss's paper)", group=ALGORITHM
    )
    truncated: str = setting(
        "learn",
        "completions that the budget cuts off: learn from them; mask: leave them out of the loss",
        group=ALGORITHM,
        choices=TRUNCATED,
    )
    epochs: int = setting(1, "updates on each rollout", group=ALGORITHM, least=1)
    importance_limit: float = setting(
        0.0,
        "truncated importance sampling: weight each token by the trainer's probability over the "
        "sampler's, up to this (0: off)",
        group=ALGORITHM,
        least=0,
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
    warmup: int = setting(5, "steps of linear warm-up", group=OPTIMIZER, least=0)
    weight_decay: float = setting(0.0, "weight decay of AdamW", group=OPTIMIZER, least=0)
    max_grad_norm: float = setting(
        1.0, "clip gradients to this norm (0: never)", group=OPTIMIZER, least=0
    )
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
        least=1,
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
        choices=WARM_STARTS,
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
        least=1,
    )
    promote_every: int = setting(
        10,
        "steps between validation checks once the running mean comes near",
        group=CURRICULUM,
        least=1,
    )
    promote_problems: int = setting(128, "problems of each such check", group=CURRICULUM, least=1)
    replay: float = setting(
        0.25,
        "share of prompts drawn from earlier levels, most from those with the lowest scores",
        group=CURRICULUM,
    )

    # Degenerate groups
    on_degenerate: str = flag(
        "skip",
        "groups without variance: keep, skip, or resample (hotter if texts repeat), then skip",
        group=DEGENERATE,
        choices=("keep", "skip", "resample"),
    )
    dynamic_sampling: int | None = setting(
        None,
        "dynamic sampling: draw more prompts until this many groups of the step vary, at most four "
        "times --prompts (0: off; default: 4 for the embedded model unless --prompts is given; "
        "otherwise half of --prompts, at most 8, if held-out problems promote, else 0)",
        group=DEGENERATE,
        least=0,
    )
    demonstrate: bool = setting(
        False,
        "where no completion of a group is right, replace the last one by the right answer",
        group=DEGENERATE,
    )
    retries: int = setting(2, "most times that a group is resampled", group=DEGENERATE, least=0)
    temperature_factor: float = setting(
        1.15, "factor by which temperature is raised", group=DEGENERATE, least=1
    )
    temperature_ceiling: float = setting(
        1.5,
        "upper limit of the factor by which temperature is raised in total",
        group=DEGENERATE,
        least=1,
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
        least=0,
    )

    # Evaluation, checkpoints and logs
    eval_every: int = flag(
        50,
        "steps between evaluations on held-out problems (0: only before and after)",
        group=SAVING,
        metavar="STEPS",
        least=0,
    )
    eval_problems: int = flag(
        200, "problems of each evaluation", group=SAVING, metavar="N", least=1
    )
    save_every: int = flag(20, "steps between checkpoints", group=SAVING, metavar="STEPS", least=1)
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
        0.01, "checkpoint when the reward exceeds the best by this", group=SAVING, least=0
    )
    keep_best: bool = setting(
        False,
        "keep the best checkpoint, beside the first, the second to last and the last",
        group=SAVING,
    )
    samples_every: int = setting(10, "steps between entries of samples.log", group=SAVING, least=1)
    log_every: int = setting(1, "steps between lines on the console", group=SAVING, least=1)
