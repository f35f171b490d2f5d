"""Checkpoints, e.g. checkpoints/step-000020/: written in the background, complete or absent.

A checkpoint holds the model (or adapter) and tokenizer in Hugging Face layout,
optimizer.safetensors with optimizer.json, rng.json, trainer.json, sources.json and manifest.json.
All files are safetensors or JSON; nothing is pickled.

It is written to a temporary folder, read back and then renamed. Its manifest has a checksum of
every file. Training waits only while the state is copied to host memory; a thread writes the copy,
one checkpoint at a time. If the process is killed meanwhile, all earlier checkpoints remain, and
the next start removes the partial folder.
"""

import errno
import hashlib
import json
import os
import random
import re
import shutil
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from data.errors import UserError, blaming
from data.files import check_links, forget_cached, json_kind, kind_of, read_json, sync
from data.text import quoted, shortened, shown
from grpo.learn.optimizer import Optimizer
from grpo.learn.update import named_tensors
from grpo.model.weights import check_loaded
from grpo.run.files import (
    CHECKPOINT,
    WRITER,
    checkpoint_folders,
    owner_of,
    resume_hint,
    step_of,
)
from grpo.trainer import Trainer

_FORMAT = 1

# Errors of the operating system as the writers in Rust (safetensors, tokenizers) report them.
_SYSTEM_ERROR = re.compile(r"\(os error \d+\)|Os \{ code")

# Share of the free host memory that copies may take, because training may need more later.
SHARE_OF_FREE = 0.5

# The results of `verify`, by (path, time of the manifest).
_verified: dict[tuple[str, int], str | None] = {}


# --- when and what to save --------------------------------------------------------------------


class Saver:
    """The checkpoints of one run: one every `save_every` steps, and one of the last step.

    - `saved`: the last step that is saved, or being saved;
    - `best`: level, reward and name of the saved checkpoint with the highest reward at the highest
      level.

    `sources` are the contents of sources.json. `say` shows a line; `warn` shows a warning and keeps
    it in warnings.log.
    """

    def __init__(
        self,
        folder: Path,
        trainer: Trainer,
        sources: dict[str, Any],
        say: Callable[[str], None],
        warn: Callable[[str], None],
    ):
        # Absolute, because a reward may change the working directory while a checkpoint is written.
        self.folder = folder.absolute()
        self.trainer = trainer
        self.sources = sources
        self.say = say
        self.warn = warn
        self.best = (0, -1.0, "")
        self.saved: int | None = None
        self.memory = HostMemory()
        self.writing: Future[str] | None = None
        self.has_warned_of_memory = False

    def save_if_due(self, step: int, level: int, reward: float, *, is_last: bool) -> None:
        """Save the state after `step` if that is due; report the previous save if it is complete.

        `reward` is the step's mean reward.
        """
        self.collect()
        every = self.trainer.config.save_every
        if step % every == 0 or is_last:
            self.best = max(self.best, (level, reward, f"step-{step:06d}"))
            self.save(f"every {every} steps" if step % every == 0 else "the last step")

    def save(self, reason: str) -> None:
        """Copy the state after this step, and write the copy while training continues.

        If host memory has no room for the copy, training waits until the checkpoint is written.
        """
        started = time.perf_counter()
        self.collect(wait=True)
        self.saved = self.trainer.done

        optimizer = self.trainer.optimizer.state_dict()  # all ranks take part
        if not self.trainer.ranks.is_rank0:
            return

        tensors = {"weights": self.trainer.policy.saved_tensors(), "optimizer": optimizer}
        is_copied = True
        try:
            tensors = self.memory.copy(tensors)
        except MemoryError as error:
            is_copied = False
            if not self.has_warned_of_memory:
                self.has_warned_of_memory = True
                self.warn(
                    f"not enough host memory for a copy of the state ({error}): training waits "
                    "while checkpoints are written"
                )

        texts = {
            "rng.json": json.dumps(rng_state()),
            "trainer.json": json.dumps({"trainer": self.trainer.state(), "best": self.best}),
            "sources.json": json.dumps(self.sources, indent=1) + "\n",
        }
        waited = time.perf_counter() - started
        arguments = (self.saved, tensors, texts, reason, waited, self.best[2])
        self.writing = Future()
        thread = threading.Thread(
            target=self._write, args=(self.writing, *arguments), name=WRITER, daemon=True
        )
        thread.start()
        if not is_copied:
            self.collect(wait=True)

    def _write(
        self,
        written: Future[list[str]],
        step: int,
        tensors: dict[str, Any],
        texts: Mapping[str, str],
        reason: str,
        waited: float,
        keep: str,
    ) -> None:
        """Write a checkpoint in the thread; its lines for the console go to `written`."""
        started = time.perf_counter()
        try:
            with new_checkpoint(self.folder, step, reason) as folder:
                self.trainer.policy.save(folder, tensors["weights"])
                save_optimizer(folder, tensors["optimizer"])
                for name, text in texts.items():
                    (folder / name).write_text(text, "utf-8")

            # Only now, so that older ones remain if this one cannot be written.
            removed = prune(self.folder, keep=keep)
            cost = f"training waited {waited:.1f} s; written in "
            cost += f"{time.perf_counter() - started:.1f} s"
            written.set_result([f"checkpoint step-{step:06d}: {reason} ({cost})", *removed])
        except BaseException as error:
            written.set_exception(error)

    def collect(self, *, wait: bool = False) -> None:
        """Report the checkpoint that is being written if it is complete, or raise its error.

        With `wait`, waits until it is complete.
        """
        if self.writing is not None and (wait or self.writing.done()):
            written, self.writing = self.writing, None
            for line in written.result():
                self.say(line)

    def restore(self, checkpoint: Path) -> None:
        """Restore the trainer, its optimizer and the random generators from a checkpoint.

        Raises UserError, which names the file, if one of them is not of this run.
        """
        path = checkpoint / "trainer.json"
        state = read_json(path)
        with blaming(f"{path}: is not the state of this run"):
            _check_like("trainer", state["trainer"], json.loads(json.dumps(self.trainer.state())))
            self.trainer.restore(state["trainer"])
            self.best = msgspec.convert(state["best"], tuple[int, float, str])
        self.saved = step_of(checkpoint)

        optimizer = self.trainer.optimizer
        load_optimizer(checkpoint, optimizer)
        check_loaded(named_tensors(self.trainer.policy, optimizer), str(checkpoint))
        load_rng(checkpoint)


def _check_like(name: str, saved: Any, own: Any) -> None:
    """Raise ValueError unless the JSON `saved` has all keys of `own`, and values of their types.

    A value may be null on either side. The items of lists are not compared.
    """
    kind = int | float if isinstance(own, int | float) else type(own)
    if saved is not None and own is not None and not isinstance(saved, kind):
        raise ValueError(f"{name} is {json_kind(saved)} instead of {json_kind(own)}")
    for key, value in own.items() if isinstance(own, dict) else ():
        if key not in (saved or {}):
            raise ValueError(f"{name} has no {key}")
        _check_like(key, saved[key], value)


class HostMemory:
    """Copies of tensors in host memory, which are written while training changes the originals.

    Each call of `copy` overwrites the copies of the previous call, because the system has to zero
    and map new memory, which takes several times as long as the copy itself. Copies of GPU tensors
    are in page-locked memory.
    """

    def __init__(self) -> None:
        self._copies: list[Tensor] = []

    @torch.no_grad()
    def copy(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """Return nested dictionaries with a copy of each tensor, and everything else unchanged.

        Tensors that share memory (tied weights) share one copy. Raises MemoryError if there is not
        enough memory.
        """
        originals = {_address(tensor): tensor for tensor in _tensors(tree)}
        self._make_room(list(originals.values()))
        copies = dict(zip(originals, self._copies, strict=True))
        for address, tensor in originals.items():
            copies[address].copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in originals.values()):
            torch.cuda.synchronize()
        return _with_copies(tree, copies)

    def _make_room(self, originals: Sequence[Tensor]) -> None:
        """Allocate a copy for each tensor, unless the one in its place has its shape and type."""
        old = [
            copy if (copy.shape, copy.dtype) == (tensor.shape, tensor.dtype) else None
            for copy, tensor in zip(self._copies, originals)
        ]
        old += [None] * (len(originals) - len(old))
        needed = sum(tensor.nbytes for copy, tensor in zip(old, originals) if copy is None)
        try:
            if needed > SHARE_OF_FREE * free_host_memory():
                raise MemoryError
            self._copies = [
                torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                if copy is None
                else copy
                for copy, tensor in zip(old, originals)
            ]
        except (MemoryError, RuntimeError) as error:  # torch's, if page-locked memory runs out
            self._copies = []
            raise MemoryError(f"{needed / 1e9:.1f} GB") from error


def _tensors(tree: Mapping) -> Iterator[Tensor]:
    """Yield each tensor in nested dictionaries."""
    for value in tree.values():
        if isinstance(value, Mapping):
            yield from _tensors(value)
        elif isinstance(value, Tensor):
            yield value


def _with_copies(tree: Mapping, copies: Mapping[Hashable, Tensor]) -> dict[str, Any]:
    """Return nested dictionaries in which the copy of each tensor replaces it."""
    copied = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            value = _with_copies(value, copies)
        elif isinstance(value, Tensor):
            value = copies[_address(value)]
        copied[key] = value
    return copied


def _address(tensor: Tensor) -> Hashable:
    """Return a key that is equal for two tensors exactly if they are the same numbers in memory."""
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def free_host_memory() -> float:
    """Return how many bytes of the host's memory are available, also to a container (cgroup 2).

    Infinite where that is not known, as on systems other than Linux.
    """
    free = float("inf")
    with suppress(OSError):
        found = re.search(r"MemAvailable: *(\d+)", Path("/proc/meminfo").read_text("utf-8"))
        free = 1024 * int(found[1]) if found else free

    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # ValueError: the limit is "max", which is none
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        # The kernel drops cached files when it needs their memory.
        cached = re.findall(r"^(?:in)?active_file (\d+)", (group / "memory.stat").read_text(), re.M)
        free = min(free, limit - used + sum(map(int, cached)))
    return free


# --- whole or absent --------------------------------------------------------------------------


@contextmanager
def new_checkpoint(run: Path, step: int, reason: str = "") -> Iterator[Path]:
    """Yield a folder that becomes checkpoints/step-NNNNNN when the block ends, and vanishes if it
    fails.

    Raises UserError if the files cannot be written; then an older checkpoint of the same step is
    kept.
    """
    final = Path(run) / "checkpoints" / f"step-{step:06d}"
    temporary = final.with_name(f".tmp-{final.name}")
    old = final.with_name(f".tmp-old-{final.name}")
    try:
        _remove_partial_checkpoints(run)
        temporary.mkdir(parents=True)
        yield temporary

        manifest = {"format": _FORMAT, "step": step, "reason": reason, "files": _on_disk(temporary)}
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

        if why := disk_refusal(error):
            kept = "earlier checkpoints are unchanged: " if checkpoint_folders(run) else ""
            raise UserError(
                f"{final}: cannot be written ({why}); {kept}free some space and {resume_hint(run)}"
            ) from error
        raise

    shutil.rmtree(old, ignore_errors=True)
    _verified[_key(final / "manifest.json")] = None


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


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- which ones there are ---------------------------------------------------------------------


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
        raise UserError(
            f"{named}: not a run, or a checkpoint without its run (there is no "
            f"{run / 'config.yaml'}); give a run's directory or one of its checkpoints"
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


def seen_keys(checkpoint: Path) -> list[str]:
    """Return the keys of the problems that the policy of a checkpoint has seen."""
    path = checkpoint / "trainer.json"
    with blaming(f"{path}: is not the state of a run"):
        return [str(key) for key in read_json(path)["trainer"]["seen"]]


def _remove_partial_checkpoints(run: Path) -> None:
    for path in (Path(run) / "checkpoints").glob(".tmp-*"):
        shutil.rmtree(path)


def remove_partial(run: Path) -> None:
    """Remove the partial checkpoints and files that a killed process has left.

    Not while the run goes on: it may be writing a file beside the checkpoint.
    """
    _remove_partial_checkpoints(run)
    for folder in (Path(run), Path(run) / "rollouts"):
        for path in folder.glob(".*.partial"):
            if not path.name.startswith(".report."):  # which another process may write now
                path.unlink()


def prune(run: Path, keep: str = "") -> list[str]:
    """Remove all valid checkpoints except the first, the last two and the one named `keep`.

    Returns a line for each that was removed. Damaged ones are kept, so that the user sees them.
    """
    valid, _ = checkpoints(run)
    kept = {*valid[:1], *valid[-2:]}
    return _remove([path for path in valid if path not in kept and path.name != keep])


def remove_checkpoints_after(run: Path, step: int) -> list[str]:
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


# --- optimizer and random generators ----------------------------------------------------------


def save_optimizer(folder: Path, state: dict[str, Any]) -> None:
    """Write an optimizer's `state_dict()`: tensors to safetensors, the rest to optimizer.json.

    The tensors are split over optimizer.safetensors, optimizer-1.safetensors and so on, because
    each file must fit into host memory. What the configuration decides is not written.
    """
    tensors = {
        f"{number}/{name}": tensor
        for number, entry in state["state"].items()
        for name, tensor in entry.items()
    }
    for number, part in enumerate(_parts(_separate(tensors))):
        save_file(part, folder / f"optimizer{f'-{number}' if number else ''}.safetensors")
    rest = {"loss_scale": state["loss_scale"]}
    (folder / "optimizer.json").write_text(json.dumps(rest), "utf-8")


def _separate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors as safetensors requires: contiguous, and without shared memory."""
    seen: set[int] = set()
    separate = {}
    for name, value in tensors.items():
        separate[name] = value.clone() if value.data_ptr() in seen else value.contiguous()
        seen.add(value.data_ptr())
    return separate


def _parts(tensors: dict[str, Tensor], most: int = 1 << 32) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors in dictionaries of up to `most` bytes; a larger tensor has one of its own.

    Without tensors, one empty dictionary is yielded.
    """
    part: dict[str, Tensor] = {}
    size = 0
    for name, value in tensors.items():
        if part and size + value.nbytes > most:
            yield part
            part, size = {}, 0
        part[name] = value
        size += value.nbytes
    yield part


def load_optimizer(folder: Path, optimizer: Optimizer) -> None:
    """Load the state that `save_optimizer` wrote, bit for bit.

    Raises UserError, which names the file, if it is of another optimizer.
    """
    state: dict[int, dict[str, Tensor]] = {}
    for path in sorted(folder.glob("optimizer*.safetensors")):
        with blaming(f"{path}: does not fit the optimizer of this run"), safe_open(path, "pt") as f:
            for key in f.keys():
                number, name = key.split("/", 1)
                tensor = state.setdefault(int(number), {})[name] = f.get_tensor(key)
                shape = optimizer.weights[int(number)].shape
                if tensor.dim() and tensor.shape != shape:
                    raise ValueError(f"{key} has shape {tuple(tensor.shape)}, not {tuple(shape)}")

    if len({frozenset(entry) - {"master"} for entry in state.values()}) > 1:
        raise UserError(f"{folder}: some weights lack a moment; give another checkpoint")

    path = folder / "optimizer.json"
    rest = read_json(path)
    with blaming(f"{path}: does not fit the optimizer of this run"):
        scale = msgspec.convert(rest["loss_scale"], dict[str, int | float])
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": state, "param_groups": groups, "loss_scale": scale})


def rng_state() -> dict[str, Any]:
    """Return the state of the random generators of Python, NumPy and torch, for rng.json."""
    kind, keys, *numbers = np.random.get_state(legacy=True)
    assert isinstance(keys, np.ndarray)
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "python": random.getstate(),
        "numpy": [kind, keys.tolist(), *numbers],
        "torch": torch.get_rng_state().tolist(),
        "cuda": [state.tolist() for state in cuda],
    }


def load_rng(folder: Path) -> None:
    """Restore the `rng_state` in rng.json of a checkpoint."""
    path = folder / "rng.json"
    saved = read_json(path)
    with blaming(f"{path}: holds no state of the random generators"):
        version, state, gauss = saved["python"]
        random.setstate((version, tuple(state), gauss))

        kind, keys, *numbers = saved["numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), *numbers))

        torch.set_rng_state(torch.tensor(saved["torch"], dtype=torch.uint8))
        if torch.cuda.is_available() and len(saved["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(
                [torch.tensor(state, dtype=torch.uint8) for state in saved["cuda"]]
            )
