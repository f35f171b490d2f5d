"""Checkpoints, e.g. checkpoints/step-000020/.

A checkpoint holds the model (or adapter) and tokenizer in Hugging Face layout,
optimizer.safetensors with optimizer.json, rng.json, trainer.json and manifest.json. All files are
safetensors or JSON; nothing is pickled.

A checkpoint is written to a temporary folder, read back and then renamed, so it is complete or
absent. Its manifest has a checksum of every file.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from data.errors import UserError
from data.files import check_links, forget_cached, kind_of, read_json, sync
from data.text import quoted, shortened, shown
from grpo.run.folders import CHECKPOINT, checkpoint_folders, has_checkpoint, step_of, way_on
from grpo.run.lock import owner_of
from grpo.run.schemas import OptimizerFile, read_checked

_FORMAT = 1

# Errors of the operating system as the writers in Rust (safetensors, tokenizers) report them.
_SYSTEM_ERROR = re.compile(r"\(os error \d+\)|Os \{ code")

# The results of `verify`, by (path, time of the manifest).
_verified: dict[tuple[str, int], str | None] = {}


def save_checkpoint(
    run: Path,
    step: int,
    write: Callable[[Path], None],
    *,
    note: Callable[[float], dict[str, Any]],
) -> Path:
    """Write checkpoints/step-NNNNNN by `write(folder)`, completely or not at all; return its path.

    `note` gets the seconds that it took to write all files and read them back, and returns the
    "note" in the manifest. Raises UserError if the files cannot be written; then an older
    checkpoint of the same step is kept.
    """
    final = Path(run) / "checkpoints" / f"step-{step:06d}"
    temporary = final.with_name(f".tmp-{final.name}")
    old = final.with_name(f".tmp-old-{final.name}")

    started = time.perf_counter()
    try:
        remove_partial(run)
        temporary.mkdir(parents=True)
        write(temporary)
        files = _on_disk(temporary)

        noted = note(time.perf_counter() - started)
        manifest = {"format": _FORMAT, "step": step, "note": noted, "files": files}
        (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", "utf-8")
        for path in (temporary / "manifest.json", temporary):
            sync(path)

        if final.exists():  # a resumed run has made the step again
            os.replace(final, old)
        os.replace(temporary, final)
        sync(final.parent)
    except Exception as error:
        if old.exists() and not final.exists():
            os.replace(old, final)
        shutil.rmtree(temporary, ignore_errors=True)

        if reason := disk_refusal(error):
            kept = "earlier checkpoints are unchanged: " if has_checkpoint(run) else ""
            raise UserError(
                f"{final}: cannot be written ({reason}); {kept}free some space and {way_on(run)}"
            ) from error
        raise

    shutil.rmtree(old, ignore_errors=True)
    _verified[_key(final / "manifest.json")] = None
    return final


def disk_refusal(error: BaseException) -> str | None:
    """Return why the disk refused a file, e.g. "No space left on device"; None for other errors."""
    if isinstance(error, OSError) or _SYSTEM_ERROR.search(str(error)):
        message = getattr(error, "strerror", None) or " ".join(str(error).split())
        return message or type(error).__name__
    return None


def _on_disk(folder: Path) -> dict[str, dict[str, Any]]:
    """Flush all files below `folder` to the disk; return checksum and size of each, by name.

    Raises OSError if a file does not read back as it was written.
    """
    files = {path: _sha256(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    for path in folder.rglob("*"):
        sync(path)

    for path, checksum in files.items():
        forget_cached(path)
        if _sha256(path) != checksum:
            raise OSError(errno.EIO, f"{path.name} does not read back as it was written")

    return {
        str(path.relative_to(folder)): {"sha256": checksum, "bytes": path.stat().st_size}
        for path, checksum in files.items()
    }


def verify(path: Path) -> str | None:
    """Return None if the checkpoint is intact, else one line that says what is wrong with it."""
    manifest = Path(path) / "manifest.json"
    if not manifest.is_file():
        return f"{path}: not a checkpoint (it has no manifest.json)"
    key = _key(manifest)
    if key not in _verified:
        _verified[key] = _damage(Path(path), manifest)
    return _verified[key]


def _key(manifest: Path) -> tuple[str, int]:
    return str(manifest), manifest.stat().st_mtime_ns


def _damage(path: Path, manifest: Path) -> str | None:
    """Compare the files of a checkpoint with its manifest; return what `verify` does."""
    try:
        saved = read_json(manifest)
        if saved.get("format") != _FORMAT:
            return (
                f"{path}: not a checkpoint that this version reads (its manifest.json has no "
                f'"format": {_FORMAT})'
            )

        for name, fact in saved["files"].items():
            file, escaped = path / name, shortened(name)
            if path.resolve() not in file.resolve().parents:
                return f"{path}: manifest.json names a file outside the checkpoint: {escaped}"
            if not file.is_file():
                return f"{path}: {escaped} is missing"
            size = file.stat().st_size
            if size != fact["bytes"]:
                return f"{path}: {escaped} has {size} bytes instead of {shown(fact['bytes'])}"
            if _sha256(file) != fact["sha256"]:
                return f"{path}: {escaped} is damaged (its checksum is wrong)"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{path}: manifest.json is damaged"
    return None


def checkpoints(run: Path) -> tuple[list[Path], list[str]]:
    """Return the valid checkpoints of a run by step, and a line for each damaged one."""
    damage = {path: verify(path) for path in checkpoint_folders(run)}
    valid = [path for path, reason in damage.items() if reason is None]
    return valid, [reason for reason in damage.values() if reason]


def find_resume(path: Path, flag: str = "--resume") -> tuple[Path, list[str]]:
    """Return the checkpoint to continue from, and warnings.

    It is `path` itself, or the latest valid checkpoint of the run `path`. Each warning names a
    damaged checkpoint that was skipped. Raises UserError, which names the `flag` ("" if the path
    stands alone), if there is no valid checkpoint.
    """
    path = Path(path)
    named = f"{flag} {path}".lstrip()
    if not kind_of(path):
        raise UserError(
            f"{named}: does not exist; give a run's directory or one of its checkpoints"
        )
    absolute = Path(os.path.abspath(path))
    is_checkpoint = CHECKPOINT.fullmatch(absolute.name) is not None
    if is_checkpoint and (len(path.parts) < 2 or ".." in path.parts):
        path = absolute  # the folders above it are not in its name
    run = path.parent.parent if is_checkpoint else path
    if not (run / "config.yaml").is_file():
        # Before anything else, because the folders above a copied checkpoint may be anybody's.
        if is_checkpoint or (path / "trainer.json").is_file():
            raise UserError(
                f"{named}: a checkpoint without its run (there is no {run / 'config.yaml'}); copy "
                "the run's config.yaml and its folder checkpoints with it, or give what python -m "
                "grpo.export writes"
            )
        raise UserError(
            f"{named}: not a run (it has no config.yaml); give a run's directory or one of its "
            "checkpoints"
        )
    check_links(run)

    if is_checkpoint:
        if reason := verify(path):
            said = f"{flag} {reason}".lstrip()
            raise UserError(f"{said}; give another checkpoint, or the run's directory")
        return path, []

    valid, damaged = checkpoints(path)
    if not valid:
        if owner := owner_of(path):
            raise UserError(
                f"{named}: {owner} is training this run, which has no valid checkpoint yet; wait "
                "for one"
            )
        reasons = f" ({'; '.join(damaged)})" if damaged else ""
        # Damaged checkpoints may be worth something, for example to a newer version.
        remove = "" if damaged else f", or remove it (rm -r {quoted(path)})"
        raise UserError(
            f"{named}: it has no valid checkpoint{reasons}; start a new run under another name"
            f"{remove}"
        )
    return valid[-1], [f"skipped {reason}" for reason in damaged]


def remove_partial(run: Path) -> None:
    """Remove the partial checkpoints and files that a killed process has left."""
    for path in (Path(run) / "checkpoints").glob(".tmp-*"):
        shutil.rmtree(path)
    for folder in (Path(run), Path(run) / "rollouts"):
        for path in folder.glob(".*.partial"):
            if not path.name.startswith(".report."):  # which another process may write now
                path.unlink()


def prune(run: Path, *, keep_best: Path | None = None) -> list[str]:
    """Remove all valid checkpoints except the first, the last two and `keep_best`.

    Returns a line for each that was removed. Damaged ones are kept, so that the user sees them.
    """
    valid, _ = checkpoints(run)
    keep = {valid[0], *valid[-2:], keep_best} if valid else set()
    return _remove([path for path in valid if path not in keep])


def remove_after(run: Path, step: int) -> list[str]:
    """Remove the valid checkpoints of steps after `step`; return a line for each.

    A run that is resumed after `step` makes them again. Until then `prune` would take the old ones
    for the most recent, keep them, and remove the new ones.
    """
    return _remove([path for path in checkpoints(run)[0] if step_of(path) > step])


def _remove(paths: list[Path]) -> list[str]:
    """Remove checkpoints; return a line for each."""
    for path in paths:
        # It is renamed first, so that a killed process leaves no partial checkpoint under its name.
        temporary = path.with_name(f".tmp-{path.name}")
        os.replace(path, temporary)
        shutil.rmtree(temporary)
    return [f"removed checkpoint {path.name}" for path in paths]


def save_optimizer(folder: Path, state: dict[str, Any]) -> None:
    """Write an optimizer's `state_dict()`: tensors to safetensors, the rest to optimizer.json.

    The tensors are split over optimizer.safetensors, optimizer-1.safetensors and so on, because
    each file must fit into host memory.
    """
    tensors: dict[str, torch.Tensor] = {}
    rest: dict[str, Any] = {}
    for index, entry in state["state"].items():
        for name, value in entry.items():
            target = tensors if isinstance(value, torch.Tensor) else rest
            target[f"{index}/{name}"] = value

    for number, part in enumerate(_parts(_separate(tensors))):
        save_file(part, folder / f"optimizer{f'-{number}' if number else ''}.safetensors")
    others = {name: value for name, value in state.items() if name != "state"}
    (folder / "optimizer.json").write_text(json.dumps({"rest": rest} | others), "utf-8")


def _separate(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors as safetensors requires: contiguous, and without shared memory."""
    seen: set[int] = set()
    separate = {}
    for name, value in tensors.items():
        separate[name] = value.clone() if value.data_ptr() in seen else value.contiguous()
        seen.add(value.data_ptr())
    return separate


def _parts(
    tensors: dict[str, torch.Tensor], most: int = 1 << 32
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors in dictionaries of up to `most` bytes; a larger tensor has one of its own.

    Without tensors, one empty dictionary is yielded.
    """
    part: dict[str, torch.Tensor] = {}
    size = 0
    for name, value in tensors.items():
        if part and size + value.nbytes > most:
            yield part
            part, size = {}, 0
        part[name] = value
        size += value.nbytes
    yield part


def load_optimizer(folder: Path, optimizer: Any) -> None:
    """Load the state that `save_optimizer` wrote into an `Optimizer`, bit for bit."""
    saved = read_checked(folder / "optimizer.json", OptimizerFile)
    state: dict[int, dict[str, Any]] = {}
    for path in folder.glob("optimizer*.safetensors"):
        with safe_open(path, "pt") as file:
            for key in file.keys():
                number, name = key.split("/", 1)
                state.setdefault(int(number), {})[name] = file.get_tensor(key)

    for key, value in saved["rest"].items():
        number, name = key.split("/", 1)
        state.setdefault(int(number), {})[name] = value

    for group in saved["param_groups"]:
        if "betas" in group:
            group["betas"] = tuple(group["betas"])  # JSON has no tuples
    optimizer.load_state_dict({**saved, "state": state})


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
