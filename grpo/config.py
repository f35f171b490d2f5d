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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import yaml

from grpo import __version__
from grpo.data.errors import Parser, UserError, blaming, command_of, shown
from grpo.data.files import kind_of, load_yaml, read_yaml, write_whole
from grpo.model.prompts import system_text, template_arguments, wording_text
from grpo.tasks.base import Task, asked, problems_of
from grpo.tasks.registry import (
    flags_of_tasks,
    implied_task,
    programs_in,
    require_trusted,
    split_options,
)
from grpo.tasks.supply import LADDER, parse_levels

# Each loss, and what the weight of a token is 1 over (see `learn.loss.token_weights`).
WEIGHTED_BY = {
    "grpo": "completion",
    "dr_grpo": "budget",
    "dapo": "step",
    "gspo": "completion",
    "cispo": "step",
}
LOSSES = tuple(WEIGHTED_BY)
FROM_PYTHON = "python:"  # begins the name of a function that was given in Python

# How far below and above 1 the ratio is clipped, by the loss's paper; by the others 0.2 and 0.2.
CLIP = {"dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4), "cispo": (1.0, 0.28)}

ALL_LEVELS = ",".join(map(str, LADDER))
SCALES = ("group", "batch", "none")
TRACKERS = ("tensorboard", "wandb")

# The default for models other than the embedded one. A run whose last level is solved ends sooner.
STEPS = 800

# Settings that a resumed run can change.
ON_RESUME = "steps eval_every eval_problems save_every device patience track engine shard".split()

LIKE = 0.75  # how much an unknown name is like the one that it means (`difflib`)
MAX_NUMBER = 10**9  # of all counts and weights: larger ones overflow somewhere

# What the run itself finds when it starts. They are in its config.yaml, but are no settings.
FOUND = ("start", "mixed")

# Other names of settings, and of arguments of `grpo.train`: the flag's, and TRL's.
ELSEWHERE = {
    "words": "level",
    "lr": "learning_rate",
    "bf16": "dtype",
    "epsilon": "clip",
    "epsilon_high": "clip",
    "eval_steps": "eval_every",
    "eval_strategy": "eval_every",
    "fp16": "dtype",
    "gradient_accumulation_steps": "prompts",
    "loss_type": "loss",
    "lr_scheduler_type": "schedule",
    "max_completion_length": "max_new_tokens",
    "max_steps": "steps",
    "num_generations": "group_size",
    "num_iterations": "epochs",
    "output_dir": "name",
    "peft_config": "lora_rank",
    "per_device_train_batch_size": "prompts",
    "report_to": "track",
    "resume_from_checkpoint": "resume",
    "reward_funcs": "reward",
    "save_steps": "save_every",
    "scale_rewards": "scale",
    "train_dataset": "data",
    "use_cpu": "device",
}
# What to do about TRL's names that no setting stands for.
ADVICE = {
    "args": "give its settings as keywords, or use GRPOTrainer",
    "eval_dataset": "give rows a column split: train, validation or test",
    "importance_sampling_level": "give loss: gspo",
    "num_train_epochs": "give steps",
    "reward_weights": "multiply by them in the reward functions",
} | dict.fromkeys(("data_seed", "num_generations_eval", "top_k"), "there is none; leave it out")
# TRL's names of what is done without being asked, or only shows or speeds up the training there.
NEEDLESS = re.compile(
    "(bf16_full|cache_impl|dataloader|ddp|disable_tqdm|ds3|enable_jit|eval_(acc|do|on|use)|fp16_full"
    "|gradient_checkpoint|local_rank|log_|logging|num_completions|per_device_eval|processing_class"
    "|remove_unused|restore_callback|run_name|save_(only|on|strategy|total)|tf32|torch"
    "|use_(cache|liger|transformers|vllm)|vllm_(?!structured))"
)

EXAMPLES = """examples:
  {0} --task interleave --words 25
  {0} --model MODEL --task interleave --words 10
  {0} --curriculum 10,25,50 --name ladder
  {0} --resume runs/ladder --steps 400
"""


def setting(default: Any, help: str, *, kind: str = "setting", **limits: Any) -> Any:
    """Declare a setting that only `--config` can change.

    `limits`: `choices`, or the numbers `least`, `most`, `above` and `below`. `heading` begins a
    group of the help. About the flag are `flags` (its spellings), `metavar` and `const` (its value
    if it is given without one).
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
        "interleave", "a task's name, or path/to/file.py:ClassName for your own", heading="Run"
    )
    level: int | None = basic(
        None,
        "difficulty: words of each text (default: by task)",
        flags=("--words", "--level"),
        least=1,
    )
    model: str = basic(
        "builtin",
        "builtin, a directory in Hugging Face layout, a GGUF file, a hub id, or the policy of an "
        "earlier run (runs/NAME, or one of its checkpoints)",
    )
    steps: int | None = basic(
        None, "training steps (default: the task's own for builtin, 800 for other models)", least=1
    )
    seed: int = basic(0, "seed of problems, samples and adapter")
    name: str | None = basic(None, "write to runs/NAME (default: from task, level and seed)")
    resume: str | None = basic(
        None,
        "continue this run or checkpoint; without a value: the latest run",
        metavar="RUN",
        const="latest",
    )
    device: str = basic("auto", "cpu, cuda, cuda:N, or auto")

    reward: str | None = flag(
        None, "one of the task's rewards (default: its first)", heading="Task and data"
    )
    dataset: str | None = flag(
        None, "a JSON Lines file of problems to train on, shuffled each epoch", metavar="FILE"
    )
    control: str = flag(
        "none",
        "a control experiment: rewards permuted over the batch, or all equal",
        choices=("none", "shuffled-rewards", "constant-reward"),
    )
    wording: str = flag(
        "", "a text file that replaces the task's prompt, with its placeholders", metavar="FILE"
    )
    system: str = flag("", "text of a system turn before the user's, or @FILE", metavar="TEXT")
    shots: int = flag(
        0, "solved problems of the same level that each prompt shows", least=0, most=64
    )
    chat_template_kwargs: str = flag(
        "{}", "variables of the chat template, e.g. '{\"enable_thinking\": false}'", metavar="JSON"
    )
    task_options: dict = setting({}, "the task's own flags, e.g. {'family': 'product'}")

    dtype: str = flag(
        "auto",
        "precision of the weights; what is trained has float32 masters (auto: by model and device)",
        choices=("auto", "float32", "bfloat16", "float16"),
        heading="Model",
    )
    lora_rank: int | None = basic(
        None,
        "rank of the LoRA adapter; 0: full fine-tuning (default: 0 for models of hidden size 576 "
        "or less, 64 for larger ones and with `quantise`, that of an earlier run's policy)",
        least=0,
    )
    quantise: str = setting(
        "none",
        "keep the base model under LoRA in 8 or 4 bits (slower; needs the extra `bits`)",
        choices=("none", "int8", "nf4"),
    )

    prompts: int | None = basic(
        None,
        "prompts a step (default: 8 for builtin, 64 for other models of hidden size 576 or less, "
        "else 32; for an earlier run's policy, that run's)",
        least=1,
        heading="Sampling",
    )
    group_size: int = basic(16, "completions of each prompt", least=2)
    temperature: float = flag(1.0, "sampling temperature", above=0)
    max_new_tokens: int | None = flag(
        None, "completion budget in tokens (default: a quarter more than the target takes)", least=1
    )
    top_p: float = setting(
        1.0, "sample from the likeliest tokens of this probability mass (1: all)", above=0, most=1
    )
    engine: str | None = flag(
        None,
        "what samples the completions of training: transformers, or vllm:URL for a vLLM server "
        "(default: the project's own decoder)",
    )

    loss: str = basic(
        "dapo",
        f"how tokens are weighted and clipped: {', '.join(LOSSES)}, or path/to/file.py:function "
        "for your own",
        heading="Algorithm",
    )
    scale: str = flag(
        "group",
        "the standard deviation that advantages are divided by, if any",
        metavar="{" + ",".join(SCALES) + "}",
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
    clip: list | None = setting(
        None, "how far below and above 1 the ratio may be (default: [0.2, 0.28] for dapo)"
    )
    epochs: int | None = setting(
        None,
        "updates on each rollout (default: 2 for models of hidden size 576 or less other than "
        "builtin, else 1; for an earlier run's policy, that run's)",
        least=1,
    )

    learning_rate: float | None = basic(
        None,
        "default: 1e-3 under LoRA and 2e-4 without, less for models of hidden size above 576; for "
        "an earlier run's policy, that run's",
        least=0,
        below=1,
        heading="Optimizer",
    )
    shard: bool = setting(
        False,
        "divide masters, gradients and moments among the ranks of torchrun, and gather each layer "
        "as it runs, for models that no GPU can train alone",
    )
    schedule: str | None = setting(
        None,
        "learning rate after the warm-up (default: constant for builtin; for other models cosine: "
        "times the share of groups that vary, and once the last level is nearly solved falling to "
        "zero within 120 steps, which ends the run)",
        choices=("constant", "cosine"),
    )

    curriculum: str | None = basic(
        None,
        f"climb these levels, e.g. 10,25,50; without a value: {ALL_LEVELS}",
        metavar="LEVELS",
        const=ALL_LEVELS,
        heading="Curriculum",
    )
    preflight: str = flag(
        "on",
        "before the first step, take the best of a few prompts, and add easier levels if the first "
        "is out of reach; only: print the tables and end",
        choices=("on", "off", "only"),
    )
    reward_alone: bool = flag(
        False, "show no right answers: no imitation before the first step, and no demonstrate"
    )

    on_degenerate: str = flag(
        "skip",
        "what happens to groups without variance",
        choices=("keep", "skip"),
        heading="Degenerate groups",
    )
    dynamic_sampling: int | None = setting(
        None,
        "draw more prompts, at most four times --prompts, until this many groups of the step vary "
        "(0: off; default: a quarter of --prompts, half for builtin)",
        least=0,
    )
    demonstrate: bool | None = setting(
        None,
        "where no completion of a group is right, replace the last one by the right answer "
        "(default: for interleave, but not with builtin or --reward-alone)",
    )
    window: int | None = setting(
        None,
        "where a right answer is longer, show its beginning, and sample and score this many words "
        "around one where the policy is likely to go wrong (0: whole answers; default: 50 for "
        "interleave above 25 words, but 0 with builtin or --reward-alone)",
        least=0,
    )
    patience: int = setting(
        20,
        "end the run after this many steps without a group to train on (status 3), or when the "
        "last level is solved (0: make all --steps)",
        least=0,
    )

    eval_every: int = flag(
        50,
        "steps between evaluations on held-out problems (0: only before and after)",
        least=0,
        heading="Evaluation, checkpoints and logs",
    )
    eval_problems: int = setting(200, "problems of each evaluation", least=1)
    save_every: int = flag(20, "steps between checkpoints", least=1)
    track: str | None = flag(
        None, f"also send the metrics to {', '.join(TRACKERS)} (separated by commas)"
    )

    # What the run finds when it starts (FOUND): the checkpoint of an earlier run that it began
    # with, and whether it trains on all levels of the dataset, in its order.
    start: str | None = None
    mixed: bool = False

    def __post_init__(self) -> None:
        for name, spec in SETTINGS.items():
            self._check_limits(name, spec.metadata)
        if self.curriculum:
            parse_levels(self.curriculum, "--curriculum")
        template_arguments(self.chat_template_kwargs)

        require = self._require
        is_known = set(names_in(self.track)) <= set(TRACKERS)
        require("track", is_known, f"give one of {', '.join(TRACKERS)}")
        is_device = self.device.split(":")[0] in ("auto", "cpu", "cuda")
        require("device", is_device, "give one of auto, cpu, cuda")

        where, _, function = self.loss.rpartition(":")
        is_own = bool(function) and (where.endswith(".py") or f"{where}:" == FROM_PYTHON)
        fix = f"give one of {', '.join(LOSSES)}, or path/to/file.py:function for your own"
        require("loss", is_own or self.loss in LOSSES, fix)

        where, _, rest = (self.engine or "").partition(":")
        is_engine = bool(rest) if where in ("vllm", "python") else where in ("", "transformers")
        require("engine", is_engine, "give transformers, or vllm:URL of a server")

        is_scale = self.scale in SCALES or self.scale.startswith(FROM_PYTHON)
        require("scale", is_scale, f"give one of {', '.join(SCALES)}")

        name = "a" if self.name is None else self.name
        is_name = name.isprintable() and name.strip(".") != "" and not {*name} & {*"/\\"}
        require("name", is_name, "give the plain name of a folder in runs")

        bounds = self.clip or (1, 1)
        is_clip = len(bounds) == 2 and all(type(b) in (int, float) and b > 0 for b in bounds)
        require("clip", is_clip, "give how far below and above 1, both above 0, e.g. [0.2, 0.28]")
        self._check_combinations()

    def _check_combinations(self) -> None:
        require = self._require
        weighs_tokens = self.credit == "outcome" or self.loss != "gspo"
        require("credit", weighs_tokens, "gspo weighs whole sequences; give another --loss")
        is_one_source = self.credit == "outcome" or self.scale in SCALES
        require("credit", is_one_source, "the advantages are those of a function; leave it out")
        is_trainable = self.quantise == "none" or self.lora_rank != 0
        require("quantise", is_trainable, "give --lora-rank 16: quantised weights are not trained")

        is_plain = self.quantise == "none" or not self.shard
        require("shard", is_plain, "quantised weights are not divided; leave one out")

        fix = "the beginnings of answers are not shown with --reward-alone; leave one out"
        require("window", not (self.window and self.reward_alone), fix)
        fix = "right answers are not shown with top_p, --reward-alone or --control; leave one out"
        require("demonstrate", self.may_demonstrate or not self.demonstrate, fix)

    def _require(self, name: str, is_good: bool, fix: str) -> None:
        if not is_good:
            raise UserError(f"{spelled(name)} {getattr(self, name)}: {fix}")

    def _check_limits(self, name: str, limits: Mapping[str, Any]) -> None:
        """Raise UserError unless the value of a setting keeps each of its `limits`."""
        value, choices = getattr(self, name), limits.get("choices")
        if choices and value is not None:
            self._require(name, value in choices, f"give one of {', '.join(choices)}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            return

        least, above = limits.get("least", -math.inf), limits.get("above", -math.inf)
        is_count = "least" in limits or "above" in limits  # any number may be a seed
        most = limits.get("most", MAX_NUMBER if is_count else math.inf)
        below = limits.get("below", math.inf)
        is_finite = -math.inf < value < math.inf  # a whole number may be too large for a float
        self._require(name, is_finite, "give a finite number")
        self._require(name, value >= least, f"give {least} or more")
        self._require(name, value > above, f"give a number above {above}")
        self._require(name, value <= most, f"give {most} or less")
        self._require(name, value < below, f"give a number below {below}")

    @property
    def may_demonstrate(self) -> bool:
        """Whether right answers may be shown where no completion of a group is right."""
        return self.top_p == 1 and not self.reward_alone and self.control == "none"

    @property
    def clips(self) -> tuple[float, float]:
        """How far below and above 1 the ratio is clipped: as set, or as in the loss's paper."""
        low, high = self.clip or CLIP.get(self.loss, (0.2, 0.2))
        return low, high

    @property
    def loading(self) -> dict[str, Any]:
        """How the policy is loaded, besides its device: keywords of `load_policy`."""
        names = ("dtype", "lora_rank", "seed", "quantise", "start")
        return {name: getattr(self, name) for name in names} | {"keep_reference": self.beta > 0}

    @property
    def mark(self) -> dict[str, str]:
        """The mark of each line that a control experiment writes; {} for an ordinary run."""
        return {} if self.control == "none" else {"control": self.control}

    def levels_for(self, task: Task) -> list[int]:
        """Return the levels of training, rising. Without --curriculum the last one is --words."""
        if self.curriculum:
            return parse_levels(self.curriculum, "--curriculum")

        assert self.level is not None, "the configuration is resolved"
        # With windows, answers of every length take equally long.
        climbs = getattr(task, "climbs", False) and not self.dataset and not self.window
        return [*(each for each in LADDER if climbs and each < self.level), self.level]

    def save(self, path: Path, **facts: Any) -> None:
        """Write the configuration and `facts` (versions, device, commit) as YAML."""
        values = {**dataclasses.asdict(self), "facts": facts}
        write_whole(path, yaml.safe_dump(values, sort_keys=False).encode())


SETTINGS = {name: spec for name, spec in Config.__dataclass_fields__.items() if name not in FOUND}
KINDS = get_type_hints(Config)


def names_in(text: str | None) -> list[str]:
    """Return the names of a list such as "wandb,tensorboard"; [] for None."""
    return [part.strip() for part in text.split(",")] if text else []


def python_name(function: Callable) -> str:
    """Return how config.yaml names a function that was given in Python."""
    return FROM_PYTHON + getattr(function, "__name__", type(function).__name__)


def spelled(name: str) -> str:
    """Return how a user writes the setting `name`.

    >>> spelled("group_size"), spelled("level"), spelled("top_p")
    ('--group-size', '--words', '--config: top_p')
    """
    info = SETTINGS[name].metadata
    if info["kind"] == "setting":
        return f"--config: {name}"
    return info["flags"][0] if "flags" in info else f"--{name.replace('_', '-')}"


# Automatic values


def resolve_config(config: Config, task: Task, levels: Collection[int] = ()) -> Config:
    """Fill in the automatic settings, except for those that need the model: `resolve_for_model` of
    `grpo.trainer` does that.

    `levels` are those of the --dataset. Raises UserError if it lacks a level to be trained on.
    """
    is_builtin = config.model == "builtin"
    level = config.level
    if level is None:
        offered: Collection[int] = levels
        if config.curriculum:
            offered = config.levels_for(task)
        elif held_out := {each.level for each in problems_of(task, "validation")}:
            offered = {*levels} & held_out or levels  # one that can be measured
        level = max(offered, default=getattr(task, "default_level", 1))

    steps = int(asked(task, "default_steps", level, default=100)) if is_builtin else None
    window = config.window
    if window is None and config.may_demonstrate and not is_builtin:
        window = int(asked(task, "default_window", level, default=0))

    is_level_given = bool(config.level or config.curriculum)
    resolved = dataclasses.replace(
        config,
        level=level,
        window=window or 0,
        mixed=config.mixed or (len(levels) > 1 and not is_level_given),
        schedule=config.schedule or ("constant" if is_builtin else "cosine"),
        reward=config.reward or getattr(task, "reward", None),
        steps=config.steps or steps or STEPS,
    )
    missing = {*resolved.levels_for(task)} - {*levels} if levels and not resolved.mixed else ()
    if missing:
        flag = "--curriculum" if config.curriculum else "--words"
        raise UserError(
            f"{flag} {config.curriculum or level}: {config.dataset or 'the data'} has no problem "
            f"of level {min(missing)}; it has those of {', '.join(map(str, sorted(levels)))}"
        )
    return resolved


# Settings from a file, and from Python


def is_run(path: Path) -> bool:
    """Return whether `path` is a run's directory, or a checkpoint in one."""
    return any(kind_of(path / name) == "file" for name in ("config.yaml", "trainer.json"))


def read_config(run: Path) -> dict[str, Any]:
    """Return what a run's config.yaml holds: the settings, and the "facts"."""
    values = read_yaml(run / "config.yaml")
    facts = values.pop("facts", {})
    return checked(values, str(run / "config.yaml"), known=KINDS) | {"facts": facts}


def load_config(run: Path) -> Config:
    """Return the configuration of a run."""
    return Config(**{name: x for name, x in read_config(run).items() if name != "facts"})


def checked(
    values: Mapping[str, Any], where: str, known: Collection[str] = SETTINGS
) -> dict[str, Any]:
    """Return the settings `values`, which come from `where`.

    Raises UserError for names that are not `known`, and for values of the wrong type.
    """
    values, wrong = dict(values), []
    for name, value in values.items():
        if name not in known:
            wrong.append(f"unknown key {name} ({_hint(str(name), known)})")
            continue

        # YAML 1.1 reads the words on and off as True and False, and "1e-4" as a text.
        choices = Config.__dataclass_fields__[name].metadata.get("choices", ())
        if isinstance(value, bool) and "off" in choices:
            value = "on" if value else "off"
        if name == "task_options" and isinstance(value, dict):
            value = {str(option): str(text) for option, text in value.items()}
        try:
            values[name] = msgspec.convert(value, KINDS[name], strict=False)
        except msgspec.ValidationError:
            kind = getattr(KINDS[name], "__name__", KINDS[name])
            wrong.append(f"{name} is {shown(value)}, and should be {kind}")
    if wrong:
        raise UserError(f"{where}: {'; '.join(wrong)}")
    return values


def _hint(name: str, known: Collection[str]) -> str:
    if name in ADVICE:
        return ADVICE[name]
    if NEEDLESS.match(name):
        return "leave it out, nothing here needs it"
    near = _nearest(name, known)
    return f"did you mean {near}?" if near else "this version has no such setting"


def _nearest(name: str, known: Collection[str]) -> str:
    """Return the setting that an unknown `name` means; "" if none is like it."""
    near = next(iter(difflib.get_close_matches(name, [*known, *ELSEWHERE], 1, LIKE)), "")
    return ELSEWHERE.get(near, near)


def _read_settings(source: str) -> dict[str, Any]:
    """Return the settings of `--config FILE`: a YAML file, or a run's config.yaml.

    A run's config.yaml gives everything except what belongs to that run only, such as its name, so
    the same training starts again.
    """
    where = f"--config {source}"
    values = read_yaml(Path(source))
    if "facts" not in values:
        return with_texts(checked(values, where))

    # The config.yaml of a run, which has the texts themselves.
    start, mixed = values.get("start"), values.get("mixed")
    left_out = {"facts", "name", "resume", *FOUND, *(["level"] if mixed else [])}  # all levels
    values = {name: value for name, value in values.items() if name not in left_out}
    return checked(values | ({"model": start} if start else {}), where)


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


# The command line


def parse(argv: Sequence[str]) -> tuple[Config, dict[str, Any]]:
    """Return the configuration of a command line, and the settings that it gave, by name.

    Raises UserError for an unknown flag, with the nearest known one, and for a bad value. Exits
    with status 0 after `--help`.
    """
    parser = make_parser(lists_all="--help-all" in argv)
    found, unknown = parser.parse_known_args(argv)
    flags = with_texts(vars(found))

    # Flags override --config, and a later --config overrides an earlier one.
    given: dict[str, Any] = {}
    files = []
    allowed = [*programs_in(flags).values()]  # that the command line itself names, and no file
    for source in flags.pop("config", []):
        if source.lstrip().startswith("{"):
            with blaming(f"--config {source}: not YAML; give '{{name: value, ...}}'"):
                values = load_yaml(source)
            settings = with_texts(checked(values, "--config"))
            allowed += programs_in(settings).values()
        else:
            settings = _read_settings(source)
            files.append(source)
        given |= settings
    given |= flags

    # Before the task is loaded, which tells its flags.
    where = f"--config {', '.join(files)}"
    require_trusted({"task": given.get("task")}, allowed, where)

    # What the parser does not know may be flags of the task.
    if "task" not in given and (implied := implied_task(unknown)):
        given["task"] = implied
    if unknown:
        options, unknown = split_options(given.get("task", Config.task), unknown)
        if unknown:
            raise UserError(_no_such_flag(unknown[0]))
        given["task_options"] = given.get("task_options", {}) | options
        allowed += programs_in({"task_options": options}).values()
    require_trusted(given, allowed, where)
    return Config(**given), given


def make_parser(lists_all: bool = False) -> Parser:
    """Return the parser. Its help lists the basic flags, or all flags and settings."""
    name = command_of("train")
    examples = EXAMPLES.format(name)
    parser = Parser(
        prog=name,
        usage=f"{name} [flags]",
        description="Train a language model by GRPO.",
        epilog=f"{_settings_text()}\n{flags_of_tasks()}\n\n{examples}" if lists_all else examples,
        add_help=False,
        argument_default=argparse.SUPPRESS,
    )
    group: Any = parser
    for name, spec in SETTINGS.items():
        if heading := spec.metadata.get("heading"):
            group = parser.add_argument_group(heading)
        if spec.metadata["kind"] != "setting":
            _add_flag(group, name, is_listed=lists_all or spec.metadata["kind"] == "basic flag")

    group = parser.add_argument_group("Help and files")
    group.add_argument(
        "--config",
        metavar="FILE",
        action="append",
        help="a YAML file of settings, a run's own config.yaml, or '{name: value, ...}'; may be "
        "repeated: a later one overrides an earlier one, and flags override both",
    )
    group.add_argument("--help", "-h", action="help", help="the basic flags")
    group.add_argument("--help-all", action="help", help="all flags and settings")
    group.add_argument("--version", action="version", version=__version__, help="that of grpo")
    return parser


def _add_flag(group: Any, name: str, is_listed: bool) -> None:
    info = SETTINGS[name].metadata
    flags = info.get("flags", [spelled(name)])
    text = _help_of(name) if is_listed else argparse.SUPPRESS

    # The type of a setting that may be None is the other member of the union.
    kind = KINDS[name]
    kind = get_args(kind)[0] if get_args(kind) else kind
    if kind is bool:
        group.add_argument(*flags, action="store_true", help=text)
        return

    if "choices" in info:
        metavar = "{" + ",".join(info["choices"]) + "}"
    else:
        metavar = info.get("metavar", {int: "N", float: "X"}.get(kind, name.upper()))
    extra = {"nargs": "?", "const": info["const"]} if "const" in info else {}
    group.add_argument(*flags, dest=name, type=kind, metavar=metavar, help=text, **extra)


def _help_of(name: str) -> str:
    """Return the help of a setting, with its default unless the text mentions one."""
    text, default = SETTINGS[name].metadata["help"], SETTINGS[name].default
    is_said = "default" in text or isinstance(default, bool)
    if not is_said and default not in (None, "", "{}", dataclasses.MISSING):
        text += f" (default: {default})"
    return text.replace("%", "%%")


def _settings_text() -> str:
    """Return the list of settings that have no flag, for the end of --help-all."""
    lines = ["settings without a flag, given by --config FILE or --config '{top_p: 0.9}':"]
    for name, spec in SETTINGS.items():
        if spec.metadata["kind"] == "setting":
            choices = ", ".join(spec.metadata.get("choices", ()))
            lines.append(f"  {name:<24}{choices}{': ' if choices else ''}{_help_of(name)}")
    return "\n".join(lines).replace("%%", "%")


def _no_such_flag(given: str) -> str:
    """Return the message for an unknown flag: the nearest known one, or how to give the setting."""
    if not given.startswith("-"):
        return f"{given}: no such flag; did you mean --resume {given}, or --model {given}?"
    word = given.split("=")[0].lstrip("-").replace("-", "_")
    name = _nearest(word, SETTINGS)
    if not name:
        return f"{given}: no such flag; {command_of('train')} --help-all lists all"
    if name not in SETTINGS:
        return f"{given}: no such flag; did you mean --{name}?"  # of rows
    is_setting = SETTINGS[name].metadata["kind"] == "setting"
    near = f"--config '{{{name}: ...}}'" if is_setting else spelled(name)
    return f"{given}: no such flag; did you mean {near}?"
