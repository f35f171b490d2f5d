"""Open a run: a new one, one that starts from the policy of an earlier run, or a resumed one.

A resumed run goes on with what it began with. Every checkpoint holds the fingerprints of its
sources in sources.json: the base model, the adapter that the run started from, the dataset, the
corpus, the configuration, and the user's own task, reward and loss, which are files or Python
functions. `--resume` refuses if one of them has changed since. eval.py and grpo.export do the same
for the base model under an adapter.

A fingerprint is 16 hex digits of SHA-256, under the name of the file or document. Of a large file
of weights only PAGES evenly spaced pages are hashed, so that 6 GB take well under a second.
Fine-tuning changes every page of the matrices that it trains; a change that is confined to bytes
between the pages is missed. For a user's own task, the fingerprint covers its file but not what
that imports; for a function see `tasks.registry.function_digest`.
"""

import dataclasses
import hashlib
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from huggingface_hub import snapshot_download

from data.errors import UserError
from data.files import kind_of, read_json
from data.text import is_encodable, quoted, shortened
from grpo.config import (
    FROM_PYTHON,
    ON_RESUME,
    SOURCES,
    Config,
    is_run,
    load_config,
    program_of,
    programs_in,
    require_trusted,
    spelled,
)
from grpo.distributed import SINGLE, Ranks
from grpo.learn.loss import OwnLoss
from grpo.model import load
from grpo.model.adapter import layers_of
from grpo.model.gguf import is_gguf
from grpo.model.policy import Policy
from grpo.run.checkpoint import checkpoints, find_resume, seen_keys
from grpo.run.files import checkpoint_folders, new_folder, owner_of, step_of
from grpo.run.logs import read_config
from tasks.base import Task, python_functions_of, sources_of, summary_of
from tasks.registry import REWARD_FILE, function_digest, is_same_program, programs_of

# Task options that decide no result, and so may change when a run goes on.
FREE_OPTIONS = ("reward-timeout",)

# What a run that starts from an earlier run's policy takes over, unless a flag overrides it.
TAKEN_OVER = ("lora_rank", "quantise", "dtype", "system", "shots", "chat_template_kwargs")

# Of files of weights with more than PAGES * PAGE bytes (64 MiB), so many pages are hashed.
DIGITS = 16
PAGE = 1 << 16
PAGES = 1024
WEIGHTS = (".safetensors", ".gguf")

# A message names this many differences of a kind, and counts the others.
SHOWN = 3

# The files of a model that transformers reads. Others, such as a README or a license, may change.
BASE_FILES = (
    "config.json",
    "adapter_config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
)

LIBRARIES = ("torch", "transformers", "peft")

# The most threads for each core that a resumed run uses.
MAX_THREADS = 8


# --- a new run or a resumed one ---------------------------------------------------------------


@dataclass(frozen=True)
class OpenedRun:
    """Where a run is written, and what it continues.

    - `checkpoint`: where a resumed run continues; None for a new run;
    - `warnings`: what the user should know about the checkpoint;
    - `checkpoints`: all its checkpoints when it was opened;
    - `found`: the settings in config.yaml of a resumed run.
    """

    folder: Path
    checkpoint: Path | None = None
    warnings: Sequence[str] = ()
    checkpoints: Sequence[Path] = ()
    found: Mapping[str, Any] = field(default_factory=dict)


def open_run(
    config: Config, given: dict[str, Any], *, home: Path, ranks: Ranks = SINGLE
) -> tuple[OpenedRun, Config]:
    """Return the run and its configuration: a new one below `home`, or the one of --resume.

    `given` are the settings on the command line. Raises UserError if the new run's folder exists,
    or if a flag differs from a setting that a resumed run cannot change.
    """
    if config.resume is not None:
        return _open_resumed(config, given, home)

    config, warnings = start_from(config, given)
    named = home / config.name if config.name else None
    folder = ranks.on_rank0(lambda: named or new_folder(home, config))
    require_unicode(folder)
    if ranks.on_rank0(folder.exists):
        raise UserError(f"--name {config.name}: {folder} exists; {_other_ways(folder)}")
    return OpenedRun(folder, warnings=warnings), config


def require_unicode(folder: Path) -> None:
    """Raise UserError unless the whole path of `folder` is UTF-8.

    The libraries that write models cannot write to any other, and would say so after the first
    steps.
    """
    if not is_encodable(str(folder.absolute())):
        raise UserError(
            f"{folder.absolute()}: the path is not UTF-8, so models cannot be written there; start "
            "in another folder, or give another name"
        )


def _other_ways(folder: Path) -> str:
    """Return what to do about a folder that already exists."""
    valid, damaged = checkpoints(folder)
    if valid:
        return f"give another name, or --resume {quoted(folder)}"
    if owner := owner_of(folder):
        return f"{owner} is training it: give another name"
    if damaged:
        return f"its checkpoints are not valid ({damaged[-1]}): give another name"
    return f"it has no checkpoint: give another name, or remove it (rm -r {quoted(folder)})"


def require_unchanged(opened: OpenedRun) -> None:
    """Raise UserError if a resumed run, which is locked now, was continued since it was opened.

    To continue it from the older checkpoint would remove the other process's steps.
    """
    if checkpoint_folders(opened.folder) != opened.checkpoints:
        raise UserError(
            f"{opened.folder}: another process has continued this run meanwhile; give --resume "
            "again"
        )


def latest_run(home: Path) -> Path:
    """Return the run below `home` that has a checkpoint and was started, or resumed, last.

    Raises UserError if there is none.
    """
    runs = [path.parent for path in home.glob("*/config.yaml") if checkpoint_folders(path.parent)]
    if not runs:
        raise UserError(
            f"--resume: no run in {home}{os.sep} has a checkpoint to continue from; start one "
            "without --resume"
        )
    return max(runs, key=_last_start)


def _last_start(run: Path) -> str:
    """Return when a run was started or resumed last, as its config.yaml says; "" if it does not."""
    facts: Mapping[str, Any] = read_config(run).get("facts", {})
    return max(str(one.get("started", "")) for one in (facts, *facts.get("resumed", ())))


def _find_checkpoint(resume: str, home: Path) -> tuple[Path, list[str]]:
    """Return what `find_resume` does for a path, or for the latest run below `home` ("latest")."""
    return find_resume(latest_run(home) if resume == "latest" else Path(resume))


def saved_options(resume: str, home: Path) -> dict[str, str]:
    """Return the task's options in the run that `resume` names."""
    checkpoint, _ = _find_checkpoint(resume, home)
    return config_of(checkpoint).task_options


def _open_resumed(config: Config, given: dict[str, Any], home: Path) -> tuple[OpenedRun, Config]:
    """Return the run that --resume names, with the settings that it may change."""
    assert config.resume is not None
    checkpoint, warnings = _find_checkpoint(config.resume, home)
    folder = checkpoint.parent.parent
    require_unicode(folder)
    before = checkpoint_folders(folder)

    steps, done = given.get("steps"), step_of(checkpoint)
    if steps is not None and steps < done:
        raise UserError(
            f"--steps {steps}: the run in {folder} has made {done} steps; give more, or leave the "
            "flag out"
        )

    saved = dataclasses.asdict(config_of(checkpoint))
    require_trusted(saved, programs_in(given), folder)

    # Task options that are left out stay as they are. A program may be named in another way.
    options = saved["task_options"]
    given_options = given.get("task_options", {})
    if is_same_program(given_options.get(REWARD_FILE), options.get(REWARD_FILE)):
        given_options = given_options | {REWARD_FILE: options[REWARD_FILE]}
    for name, value in given_options.items():
        if name not in FREE_OPTIONS and value != options.get(name):
            _refuse_change(f"--{name} {shortened(value)}", folder, options.get(name, ""))
    given = given | {"task_options": options | given_options}
    for name in ("task", "loss"):
        if is_same_program(given.get(name), saved[name]):
            given = given | {name: saved[name]}

    changed = {
        name: value for name, value in given.items() if name != "resume" and value != saved[name]
    }
    for name, value in changed.items():
        if name not in (*ON_RESUME, "task_options"):
            _refuse_change(f"{spelled(name)} {shortened(str(value))}", folder, saved[name])
    opened = OpenedRun(folder, checkpoint, warnings, before, saved)
    return opened, Config(**{**saved, **changed})


def _refuse_change(given: str, folder: Path, saved: Any) -> None:
    """Raise UserError because a flag differs from a setting that a resumed run cannot change."""
    raise UserError(
        f"{given}: the run in {folder} has {shortened(str(saved)) or 'none'}; with --resume only "
        f"{', '.join([*ON_RESUME, *FREE_OPTIONS])} can be changed"
    )


# --- from the policy of an earlier run --------------------------------------------------------


def checkpoint_of(model: str) -> tuple[Path | None, list[str]]:
    """Return the checkpoint `model`, or the latest valid one of the run `model`; and warnings.

    Returns (None, []) if `model` is neither. Raises UserError if a run has no valid checkpoint.
    """
    path = Path(model)
    if not is_run(path):
        return None, []
    return find_resume(path, flag="--model")


def config_of(checkpoint: Path) -> Config:
    """Return the configuration of the run that wrote the `checkpoint`.

    Raises UserError if it cannot be read.
    """
    return load_config(checkpoint.parent.parent / "config.yaml")


def start_from(config: Config, given: Mapping[str, Any]) -> tuple[Config, list[str]]:
    """Return the configuration of a new run whose --model may be an earlier run; and warnings.

    A checkpoint of full fine-tuning is a model, which becomes the base model of the new run. A
    checkpoint of LoRA is an adapter: the new run trains it further on the adapter's base model. So
    the new run's checkpoints do not depend on the earlier run.

    The new run takes over the earlier run's settings of model and prompt, and its wording if the
    task is the same, unless a flag (`given`) overrides them. Raises UserError if the flags ask for
    a different adapter.
    """
    checkpoint, warnings = checkpoint_of(config.model)
    if checkpoint is None:
        return config, []

    given = {name: value for name, value in given.items() if value is not None}
    earlier = config_of(checkpoint)
    has_adapter = (checkpoint / "adapter_config.json").exists()
    if has_adapter and given.get("lora_rank", earlier.lora_rank) != earlier.lora_rank:
        raise UserError(
            f"--lora-rank {given['lora_rank']}: the adapter of {checkpoint} has "
            f"{earlier.lora_rank}; leave it out, or merge the adapter (python -m grpo.export "
            f"{checkpoint} FOLDER) and give --model FOLDER"
        )

    taken = {name: getattr(earlier, name) for name in TAKEN_OVER if name not in given}
    if config.task == earlier.task and "wording" not in given:
        taken["wording"] = earlier.wording

    # A learning rate suits one kind of training: an adapter of this rank, or all weights.
    rank = {**taken, **given}["lora_rank"]
    if "learning_rate" not in given and rank == earlier.lora_rank:
        taken["learning_rate"] = earlier.learning_rate

    base = earlier.model if has_adapter else str(checkpoint)
    return dataclasses.replace(config, **taken, model=base, start=str(checkpoint)), warnings


# --- what the run depends on ------------------------------------------------------------------


def sources_of_run(
    opened: OpenedRun, config: Config, task: Task, own_loss: OwnLoss | None, ranks: Ranks
) -> dict[str, Any]:
    """Return today's fingerprints of a run's sources, and compare them with its checkpoint's.

    This happens before anything is loaded or written, and again once a model of the hub has been
    downloaded: before that, its fingerprint is None. Raises UserError if a source has changed.
    """
    sources = ranks.on_rank0(lambda: sources_now(config, task, own_loss))
    if opened.checkpoint:
        saved = read_sources(opened.checkpoint)
        now = sources | {"config": opened.found}
        advice = f", or start a new run with --model {quoted(opened.folder)}"
        require_same(opened.checkpoint, saved, now, advice)
    return sources | {"config": dataclasses.asdict(config)}


def sources_now(config: Config, task: Task, own_loss: OwnLoss | None) -> dict[str, Any]:
    """Return today's fingerprints of all kinds except the configuration."""
    dataset, start = config.dataset, config.start
    rewards = {f"{FROM_PYTHON}{name}": f for name, f in python_functions_of(task).items()}
    is_in_python = config.loss.startswith(FROM_PYTHON)
    losses = {config.loss: own_loss.function} if own_loss and is_in_python else {}
    return {
        "base": base_sources(config.model),
        # The adapter that a LoRA run started from. It may be gone: only the reference of --beta
        # still depends on it.
        "start": _digests(Path(start), ["adapter_*"]) if start and start != config.model else {},
        "dataset": {dataset: digest_of(Path(dataset))} if dataset else {},
        "corpus": sources_of(task),
        "task": {str(file): digest_of(file) for file in programs_of(config.task, task)}
        | {name: function_digest(reward) for name, reward in rewards.items()},
        "loss": {str(file): digest_of(file) for file in program_of(config.loss)}
        | {name: function_digest(loss) for name, loss in losses.items()},
    }


def base_sources(model: str) -> dict[str, str] | None:
    """Return the fingerprints of a model's files; of an adapter, also those of its base model.

    Returns None for a model of the hub that has not been downloaded yet.
    """
    whole, adapters = layers_of(model)
    if adapters:
        found = base_sources(whole)
        if found is not None:
            for each in adapters:
                digests = _digests(each, BASE_FILES) or {}
                found |= {f"{each.name}/{name}": value for name, value in digests.items()}
        return found

    if is_gguf(model):
        return {Path(model).name: digest_of(Path(model))} if kind_of(model) == "file" else None
    if model == "builtin":
        return _digests(load.BUILTIN, BASE_FILES)
    if kind_of(model):
        return _digests(Path(model), BASE_FILES)
    try:
        return _digests(Path(snapshot_download(model, local_files_only=True)), BASE_FILES)
    except (OSError, ValueError):
        return None


def _digests(folder: Path, patterns: Sequence[str]) -> dict[str, str] | None:
    """Return the fingerprints of the files in `folder`; None if there is no folder.

    A checkpoint may be a base. Its optimizer state is not read.
    """
    if kind_of(folder) != "folder":
        return None
    files = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    names = sorted(path for path in files if not path.name.startswith("optimizer"))
    return {path.name: digest_of(path) for path in names}


def digest_of(path: Path) -> str:
    """Return the fingerprint of a file; of large weights, that of their size and of some pages."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if path.suffix not in WEIGHTS or size <= PAGES * PAGE:
                return hashlib.file_digest(file, "sha256").hexdigest()[:DIGITS]

            digest = hashlib.sha256(str(size).encode())
            for number in range(PAGES):
                file.seek((size - PAGE) * number // (PAGES - 1))
                digest.update(file.read(PAGE))
            return digest.hexdigest()[:DIGITS]
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


def read_sources(checkpoint: Path) -> dict[str, Any]:
    """Return the sources that a checkpoint holds. Raises UserError if they are damaged."""
    path = checkpoint / "sources.json"
    saved = read_json(path)
    if not isinstance(saved, dict) or not all(
        isinstance(saved.get(kind) or {}, dict) for kind in SOURCES
    ):
        raise UserError(f"{path}: does not hold the sources of a run; give another checkpoint")
    return saved


def require_same(
    checkpoint: Path, saved: Mapping[str, Any], now: Mapping[str, Any], advice: str = ""
) -> None:
    """Raise UserError, which names all changes, if a source is not as it was.

    `saved` are the sources from `read_sources`, `now` those of today. Kinds that one of them lacks
    are not compared, nor are settings that a resumed run may change.
    """
    found = []
    for kind in SOURCES:
        old, new = saved.get(kind), now.get(kind)
        if old is None or new is None:
            continue
        changed = [
            f"{name} {shortened(str(old.get(name, 'absent')))} → "
            f"{shortened(str(new.get(name, 'absent')))}"
            for name in sorted({*old, *new} - {*ON_RESUME})
            if old.get(name) != new.get(name)
        ]
        if len(changed) > SHOWN:
            changed[SHOWN:] = [f"and {len(changed) - SHOWN} more"]
        if changed:
            found.append(f"{kind}: {', '.join(changed)}")
    if found:
        raise UserError(
            f"{checkpoint}: changed since it was saved: {'; '.join(found)}; undo that{advice}"
        )


def check_base(checkpoint: Path, model: str) -> None:
    """Raise UserError if the base model under the adapter of `checkpoint` has changed.

    A checkpoint that is a whole model does not depend on its base.
    """
    if (checkpoint / "adapter_config.json").exists():
        require_same(checkpoint, read_sources(checkpoint), {"base": base_sources(model)})


def load_run_policy(checkpoint: Path, config: Config, device: str) -> tuple[Policy, set[str]]:
    """Return the policy of a checkpoint, and the keys of the problems that it was trained on.

    Raises UserError if its base model has changed since the checkpoint.
    """
    check_base(checkpoint, config.model)
    seen = seen_keys(checkpoint)
    policy = load.load_policy(
        config.model,
        device=device,
        weights=checkpoint,
        dtype=config.dtype,
        quantise=config.quantise,
    )
    # Again, because loading may have downloaded a model of the hub.
    check_base(checkpoint, config.model)
    return policy, set(seen)


# --- facts ------------------------------------------------------------------------------------


def facts(device: torch.device, ranks: Ranks, model: str) -> dict[str, Any]:
    """Return time, versions, device, commit and where the model comes from, for config.yaml."""
    is_cuda = device.type == "cuda"
    return {
        "started": datetime.now(UTC).isoformat(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "peft": peft.__version__,
        "device": torch.cuda.get_device_name(device) if is_cuda else platform.processor() or "cpu",
        "ranks": ranks.size,
        "threads": torch.get_num_threads(),
        "commit": commit(),
        "is_local_model": bool(kind_of(model)),
    }


def fingerprints(sources: Mapping[str, Any]) -> dict[str, str]:
    """Return the fingerprints of a run's sources in short, for config.yaml."""
    kinds = [kind for kind in SOURCES if kind != "config" and sources[kind]]
    return {kind: summary_of(sources[kind]) for kind in kinds}


def commit(top: Path = Path(__file__).parents[2]) -> str | None:
    """Return the commit of the repository whose top folder is `top`.

    None if there is no such repository, as for an installed package, or git is not installed.
    """
    if not (top / ".git").exists():
        return None
    try:
        command = ["git", "rev-parse", "HEAD"]
        done = subprocess.run(command, cwd=top, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def restore_threads(before: Mapping[str, Any], device: torch.device) -> str:
    """Compute on a CPU with as many threads as the run has used until now; return a warning, or "".

    The number of threads decides in which order sums are added, so with another number a resumed
    run is no longer the same to the last bit. `before` are the facts in its config.yaml.
    """
    threads = before.get("threads")
    if device.type != "cpu" or not threads or threads == torch.get_num_threads():
        return ""
    if threads > MAX_THREADS * (os.cpu_count() or 1):
        return f"the run used {threads} threads, too many here: its sums are rounded differently"
    torch.set_num_threads(threads)
    return ""


def changed_versions(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return a warning if torch or a model library is not the one that the run used last; or "".

    Other versions may round differently, and then a resumed run is no longer the same to the last
    bit.
    """
    last = {**before, **(before.get("resumed") or [{}])[-1]}
    changed = [
        f"{name} {last[name]} → {now[name]}"
        for name in LIBRARIES
        if last.get(name, now[name]) != now[name]
    ]
    said = "the run used other versions until now, which may round differently"
    return f"{said}: {', '.join(changed)}" if changed else ""


def with_resumption(before: Mapping[str, Any], now: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Return the facts of a run that is started, or resumed after `step`.

    The facts of its start stay; each resumption adds an entry to "resumed" with those that differ.
    """
    if not before:
        return dict(now)
    # "stopped" says why the run ended before. It no longer holds.
    kept = {name: value for name, value in before.items() if name != "stopped"}
    changed = {name: value for name, value in now.items() if value != before.get(name)}
    return {**kept, "resumed": [*before.get("resumed", []), {"step": step, **changed}]}
