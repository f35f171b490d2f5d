"""Open a run: a new one, one that starts from the policy of an earlier run, or a resumed one.

A resumed run goes on with what it began with. Every checkpoint holds the fingerprints of its
sources in sources.json: the base model, the adapter that the run started from, the corpus, the
files and Python functions that the user gave (data set, task, reward, loss; not what they import),
and the configuration. `--resume` refuses if one of them has changed since. eval.py and grpo.export
do the same for the base model under an adapter.

A fingerprint is 16 hex digits of SHA-256. Of a large file of weights only PAGES evenly spaced pages
are hashed, so that 6 GB take well under a second. Fine-tuning changes every page of the matrices
that it trains; a change that is confined to bytes between the pages is missed.
"""

import dataclasses
import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import peft
import torch
import transformers
from huggingface_hub import snapshot_download

from grpo.config import FROM_PYTHON, ON_RESUME, Config, is_run, load_config, read_config, spelled
from grpo.data.errors import UserError, blaming, command_of, quoted, shortened
from grpo.data.files import kind_of, open_own, read_json
from grpo.distributed import Ranks
from grpo.model import load
from grpo.model.check import MODEL_FILES
from grpo.model.load import layers_of
from grpo.model.policy import Policy
from grpo.run.checkpoint import find_resume, run_of, trainer_state
from grpo.run.logs import checkpoint_folders, has_no_result, step_of
from grpo.tasks.base import key_of, sources_of
from grpo.tasks.registry import programs_in, require_trusted, source_text
from grpo.trainer import Trainer

# Where runs are written.
HOME = Path("runs")

# Task options that decide no result, and so may change when a run goes on.
FREE_OPTIONS = ("reward-timeout",)

# What a run that starts from an earlier run's policy takes over, unless a flag overrides it.
TAKEN_OVER = ("lora_rank", "quantise", "dtype", "system", "shots", "chat_template_kwargs")

# Of files of weights with more than PAGES * PAGE bytes (64 MiB), so many pages are hashed.
DIGITS = 16
PAGE = 1 << 16
PAGES = 1024
WEIGHTS = (".safetensors", ".gguf")


# --- a new run or a resumed one ---------------------------------------------------------------


class OpenedRun(NamedTuple):
    """Where a run is written, and the checkpoint where a resumed run continues."""

    folder: Path
    checkpoint: Path | None = None
    warnings: Sequence[str] = ()


def open_run(
    config: Config, given: dict[str, Any], locks: ExitStack, ranks: Ranks
) -> tuple[OpenedRun, Config]:
    """Return the run and its configuration: a new one, or the one of --resume.

    `given` are the settings on the command line. The run is locked until `locks` is closed.
    """
    if config.resume is not None:
        return _open_resumed(config.resume, given, locks, ranks)

    config, warnings = start_from(config, given)
    folder = ranks.on_rank0(lambda: locks.enter_context(new_run(config)))
    return OpenedRun(folder, warnings=warnings), config


def _open_resumed(
    resume: str, given: dict[str, Any], locks: ExitStack, ranks: Ranks
) -> tuple[OpenedRun, Config]:
    path = Path(resume)
    if resume == "latest":
        runs = [each.parent for each in HOME.glob("*/config.yaml")]
        saved_runs = [run for run in runs if checkpoint_folders(run)]
        if not saved_runs:
            raise UserError(f"--resume: no run in {HOME}{os.sep} has a checkpoint; start a new one")
        # It is written when a run is started or resumed.
        path = max(saved_runs, key=lambda run: (run / "config.yaml").stat().st_mtime_ns)
    folder = run_of(path)
    # Before the latest checkpoint is looked for: another process may be about to write one.
    ranks.on_rank0(lambda: locks.enter_context(locked(folder)))
    checkpoint, warnings = find_resume(path)

    saved = dataclasses.asdict(config_of(checkpoint))
    require_trusted(saved, programs_in(given).values(), folder)
    options = saved["task_options"] | given.get("task_options", {})
    merged = {**saved, **given, "resume": None, "task_options": options}
    saved["task_options"] |= {name: options[name] for name in FREE_OPTIONS if name in options}
    for name, value in merged.items():
        if value != saved[name] and name not in ON_RESUME:
            raise UserError(
                f"{spelled(name)} {shortened(str(value))}: the run in {folder} has "
                f"{shortened(str(saved[name])) or 'none'}; with --resume only "
                f"{', '.join([*ON_RESUME, *FREE_OPTIONS])} can be changed"
            )
    if (merged["steps"] or 0) < (step := step_of(checkpoint)):
        raise UserError(f"--steps {merged['steps']}: {checkpoint} is of step {step}; give more")
    return OpenedRun(folder, checkpoint, warnings), Config(**merged)


# --- the folder of a run ----------------------------------------------------------------------


def new_folder(config: Config) -> Path:
    """Return a directory that does not exist yet, named after task, level and seed."""
    parts = [config.task.rpartition(":")[2][:60]]
    for value in config.task_options.values():
        if "," not in value:  # a list of numbers says little
            parts.append(Path(value.partition(":")[0]).stem[:60])
    parts += [str(config.level or ""), *config.mark.values(), f"seed{config.seed}"]

    base = "-".join(filter(None, (re.sub(r"[^a-z0-9-]+", "-", part.lower()) for part in parts)))
    names = [base, *(f"{base}-{number}" for number in range(2, 10_000))]
    return next(HOME / name for name in names if not (HOME / name).exists())


@contextmanager
def new_run(config: Config) -> Iterator[Path]:
    """Make and lock the folder of a run; at the end of the block, remove it without a result."""
    folder = HOME / config.name if config.name else new_folder(config)
    try:
        folder.mkdir(parents=True)
    except FileExistsError as error:
        way = f"--resume {quoted(folder)}"
        if not checkpoint_folders(folder):
            way = f"remove it (rm -r {quoted(folder)})"
            with locked(folder):  # unless it is being trained
                pass
        raise UserError(
            f"--name {folder.name}: {folder} exists; give another name, or {way}"
        ) from error
    except OSError as error:
        raise UserError(f"{shortened(str(folder))}: cannot be made: {error.strerror}") from error
    try:
        with locked(folder):
            yield folder
    finally:
        with suppress(OSError):
            if has_no_result(folder):
                shutil.rmtree(folder)
                folder.parent.rmdir()  # unless other runs are there


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock `folder` until the block or the process ends; UserError if another process has.

    Some network file systems have no locks (Lustre without the option `flock`).
    """
    try:
        file = open_own(folder / ".lock")
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror}") from error
    with file:
        # A forked process, such as a reward's, inherits the open file, and with it the lock, which
        # it would still hold when this process has been killed.
        os.register_at_fork(after_in_child=file.close)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"{folder}: another process is training this run; wait, or give another --name"
            ) from error
        except OSError:
            pass
        yield


# --- from the policy of an earlier run --------------------------------------------------------


def checkpoint_of(model: str) -> tuple[Path | None, list[str]]:
    """Return the checkpoint `model`, or the latest valid one of the run `model`; and warnings.

    Returns (None, []) if `model` is neither.
    """
    path = Path(model)
    return find_resume(path, flag="--model") if is_run(path) else (None, [])


def config_of(checkpoint: Path) -> Config:
    """Return the configuration of the run that wrote the `checkpoint`."""
    return load_config(checkpoint.parent.parent)


def start_from(config: Config, given: Mapping[str, Any]) -> tuple[Config, list[str]]:
    """Return the configuration of a new run whose --model may be an earlier run; and warnings.

    A checkpoint of full fine-tuning becomes the base model of the new run. A checkpoint of LoRA is
    an adapter, which is trained further on its own base model. The earlier run's settings of model
    and prompt are taken over unless a flag (`given`) overrides them.
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
            f"{earlier.lora_rank}; leave it out, or merge it ({command_of('export')} {checkpoint} "
            "FOLDER) and give --model FOLDER"
        )

    taken = {name: getattr(earlier, name) for name in TAKEN_OVER if name not in given}
    if config.task == earlier.task and "wording" not in given:
        taken["wording"] = earlier.wording

    # Learning rate and batch suit one kind of training: an adapter of this rank, or all weights.
    if {**taken, **given}["lora_rank"] == earlier.lora_rank:
        also = {"learning_rate", "prompts", "epochs"} - given.keys()
        taken |= {name: getattr(earlier, name) for name in also}

    base = earlier.model if has_adapter else str(checkpoint)
    return dataclasses.replace(config, **taken, model=base, start=str(checkpoint)), warnings


# --- what the run depends on ------------------------------------------------------------------


def sources_of_run(opened: OpenedRun, trainer: Trainer) -> dict[str, Any]:
    """Return the fingerprints of a run's sources, by kind and name; UserError if those of a resumed
    run have changed.
    """
    config, task = trainer.config, trainer.task
    settings = dataclasses.asdict(config)
    for name in FREE_OPTIONS:
        settings["task_options"].pop(name, None)

    files = [Path(spec.rpartition(":")[0]) for spec in programs_in(settings).values()]
    files += [Path(config.dataset)] if config.dataset else []
    functions = dict(getattr(task, "python_functions", {}))
    if trainer.own_loss and config.loss.startswith(FROM_PYTHON):
        functions[config.loss] = trainer.own_loss.function
    if trainer.own_advantages:
        functions[f"scale {config.scale}"] = trainer.own_advantages

    start: dict[str, str] | None = {}
    if config.start and config.start != config.model:  # the adapter that a LoRA run started from
        # If it is gone, only the reference of --beta still depends on it.
        start = _digests(Path(config.start)) if kind_of(config.start) else None

    sources = {
        "base": base_sources(config.model),
        "start": start,
        "corpus": sources_of(task),
        "files": {str(file): digest_of(file) for file in files},
        "functions": {name: key_of(source_text(each)) for name, each in functions.items()},
        "config": {name: value for name, value in settings.items() if name not in ON_RESUME},
    }
    if opened.checkpoint:
        advice = f", or start a new run with --model {quoted(opened.folder)}"
        require_same(opened.checkpoint, sources, advice)
    return sources


def base_sources(model: str) -> dict[str, str] | None:
    """Return the fingerprints of a model's files, under an adapter also those of its base; None for
    a model of the hub that is not on the disk.
    """
    whole, adapters = layers_of(model)
    place = load.BUILTIN if whole == "builtin" else Path(whole)
    if not kind_of(place):
        try:
            place = Path(snapshot_download(whole, local_files_only=True))
        except (OSError, ValueError):
            return None

    found = _digests(place)
    for each in adapters:
        found |= {f"{each.name}/{name}": value for name, value in _digests(each).items()}
    return found


def _digests(place: Path) -> dict[str, str]:
    files = [place] if kind_of(place) == "file" else sorted(place.iterdir())
    return {
        path.name: digest_of(path)
        for path in files
        # Other files, such as a README, may change. A checkpoint may be a base.
        if path.suffix in (*MODEL_FILES, ".gguf") and not path.name.startswith("optimizer")
    }


def digest_of(path: Path) -> str:
    """Return the fingerprint of a file; of large weights, that of their size and of some pages."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if path.suffix not in WEIGHTS or size <= PAGES * PAGE:
            return hashlib.file_digest(file, "sha256").hexdigest()[:DIGITS]

        digest = hashlib.sha256(str(size).encode())
        for number in range(PAGES):
            file.seek((size - PAGE) * number // (PAGES - 1))
            digest.update(file.read(PAGE))
        return digest.hexdigest()[:DIGITS]


def require_same(checkpoint: Path, now: Mapping[str, Any], advice: str = "") -> None:
    """Raise UserError if a source of a checkpoint is not as it is `now`; None means unknown."""
    path = checkpoint / "sources.json"
    with blaming(f"{path}: does not hold the sources of a run"):
        saved = msgspec.convert(read_json(path), dict[str, dict[str, Any] | None])

    found = []
    for kind, new in now.items():
        old = saved.get(kind)
        if old is None or new is None:
            continue
        changed = [
            f"{name} {shortened(str(old.get(name, 'absent')))} → "
            f"{shortened(str(new.get(name, 'absent')))}"
            for name in sorted({*old, *new})
            if old.get(name) != new.get(name)
        ]
        if changed:
            found.append(f"{kind}: {', '.join(changed)}")
    if found:
        raise UserError(
            f"{checkpoint}: changed since it was saved: {'; '.join(found)}; undo that{advice}"
        )


def check_base(checkpoint: Path, model: str) -> None:
    """Raise UserError if the base model under the adapter of `checkpoint`, if any, has changed."""
    if (checkpoint / "adapter_config.json").exists():
        require_same(checkpoint, {"base": base_sources(model)})


def load_run_policy(checkpoint: Path, config: Config, device: str) -> tuple[Policy, set[str]]:
    """Return the policy of a checkpoint, and the keys of the problems that it was trained on."""
    with trainer_state(checkpoint) as state:
        seen = set(map(str, state["seen"]))
    options = config.loading | {"keep_reference": False}
    is_local = bool(kind_of(config.model))
    if is_local:
        check_base(checkpoint, config.model)
    policy = load.load_policy(config.model, device=device, weights=checkpoint, **options)
    if not is_local:  # only now it is on the disk
        check_base(checkpoint, config.model)
    return policy, seen


# --- facts ------------------------------------------------------------------------------------


def facts(opened: OpenedRun, trainer: Trainer) -> dict[str, Any]:
    """Return what config.yaml records beside the settings: time, versions, device, commit, where
    the model comes from, and the data and the reward functions that were given in Python.

    On a CPU, a resumed run gets the number of threads back that it has used until now: it decides
    in which order sums are added, and so whether the run stays the same to the last bit.
    """
    device = trainer.policy.device
    is_cuda = device.type == "cuda"
    before = read_config(opened.folder)["facts"] if opened.checkpoint else {}
    if not is_cuda and "threads" in before:
        torch.set_num_threads(before["threads"])

    found = {
        "started": before.get("started", datetime.now(UTC).isoformat()),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "peft": peft.__version__,
        "device": torch.cuda.get_device_name(device) if is_cuda else platform.processor() or "cpu",
        "ranks": trainer.ranks.size,
        "threads": torch.get_num_threads(),
        "commit": commit(),
        "is_local_model": bool(kind_of(trainer.config.model)),
        "data": getattr(trainer.task, "description", None),
        "functions": {
            name: source_text(each)
            for name, each in getattr(trainer.task, "python_functions", {}).items()
        },
    }
    if opened.checkpoint:
        found["resumed"] = [*before.get("resumed", []), step_of(opened.checkpoint)]
    return found


def commit(top: Path = Path(__file__).parents[2]) -> str | None:
    """Return the commit of the repository whose top folder is `top`; None if there is none."""
    if not (top / ".git").exists() or not shutil.which("git"):
        return None
    command = ["git", "rev-parse", "--verify", "--quiet", "HEAD"]
    done = subprocess.run(command, cwd=top, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None
