"""Checkpoints, e.g. checkpoints/step-000020/: written in the background, complete or absent.

A checkpoint holds the model (or adapter) and tokenizer in Hugging Face layout,
optimizer.safetensors with optimizer.json, rng.json, trainer.json, sources.json, and manifest.json
with a checksum of every file. All are safetensors or JSON; nothing is pickled.

It is written to a temporary folder, which is then renamed. If the process is killed meanwhile, all
earlier checkpoints remain, and the next start removes the partial folder.
"""

import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Hashable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from grpo.data.errors import UserError, blaming, shortened
from grpo.data.files import check_links, kind_of, read_json, sync
from grpo.learn.optimizer import Optimizer
from grpo.model.check import check_loaded
from grpo.records import StepReport
from grpo.run.logs import CHECKPOINT, checkpoint_folders, resume_hint, step_of
from grpo.trainer import Trainer

# Errors of the operating system as the writers in Rust (safetensors, tokenizers) report them.
_SYSTEM_ERROR = re.compile(r"\(os error \d+\)|Os \{ code")

# A state that takes a larger share of the host's memory is not copied: training waits until it is
# written.
COPIED_SHARE = 0.25


# --- when and what to save --------------------------------------------------------------------


@dataclass
class Saver:
    """Saves and restores the checkpoints of the run in `folder`.

    - `sources`: the contents of sources.json;
    - `saved`: the last step that is saved, or being saved; -1 if none is;
    - `best`: level, reward and name of the checkpoint that is highest in both, in this order.
    """

    folder: Path
    trainer: Trainer
    sources: dict[str, Any]
    saved: int = -1
    best: tuple[int, float, str] = (0, -1.0, "")
    memory: dict[Hashable, Tensor] = field(default_factory=dict)  # of the copies
    writer: Executor = field(default_factory=partial(ThreadPoolExecutor, 1))
    writing: Future[None] | None = None

    def save(self, report: StepReport | None = None, *, wait: bool = False) -> None:
        """Copy the state after this step, unless it is saved already, and write the copy while
        training continues.

        Training waits if it is asked to, or while a state that is too large to be copied is
        written. With the `report` of the step the checkpoint may become the best one.
        """
        self.collect(wait=True)
        trainer = self.trainer
        if self.saved == trainer.done:
            return
        self.saved = trainer.done
        if report:
            name = f"step-{self.saved:06d}"
            self.best = max(self.best, (report.metrics["level"], report.metrics["reward"], name))
        optimizer = trainer.optimizer.state_dict()  # gathered if it is divided among the ranks
        if not trainer.ranks.is_rank0:
            return

        weights, moments = trainer.policy.saved_tensors(), optimizer["moments"]
        size = sum(tensor.nbytes for tensor in (*weights.values(), *moments.values()))
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        is_copied = size <= COPIED_SHARE * memory
        if is_copied:
            weights = copied(weights, self.memory)
            if not trainer.optimizer.sharding:  # else they are copies already
                moments = copied(moments, self.memory)
        texts = {
            "optimizer.json": json.dumps({"loss_scale": optimizer["loss_scale"]}),
            "rng.json": rng_state(),
            "trainer.json": json.dumps({"trainer": trainer.state(), "best": self.best}),
            "sources.json": json.dumps(self.sources, indent=1) + "\n",
        }
        self.writing = self.writer.submit(self._write, weights, moments, texts)
        if wait or not is_copied:
            self.collect(wait=True)

    def _write(self, weights: dict, moments: dict, texts: dict) -> None:
        """Write the checkpoint in the thread. The next `save` waits before it changes `best`."""
        with new_checkpoint(self.folder, self.saved) as folder:
            self.trainer.policy.save(folder, weights)
            moments = {name: tensor.contiguous() for name, tensor in moments.items()}
            save_file(moments, folder / "optimizer.safetensors")
            for name, text in texts.items():
                (folder / name).write_text(text, "utf-8")

        # Only now, so that older ones remain if this one cannot be written.
        prune(self.folder, keep=self.best[2])

    def collect(self, *, wait: bool = False) -> None:
        """Raise the error of the checkpoint that was being written, once it is complete."""
        if self.writing is not None and (wait or self.writing.done()):
            written, self.writing = self.writing, None
            written.result()

    def restore(self, checkpoint: Path) -> None:
        """Restore the trainer, its optimizer and the random generators from a checkpoint."""
        path = checkpoint / "trainer.json"
        state = read_json(path)
        with blaming(f"{path}: is not the state of this run"):
            self.trainer.restore(state["trainer"])
            self.best = msgspec.convert(state["best"], tuple[int, float, str])
        self.saved = step_of(checkpoint)

        optimizer = self.trainer.optimizer
        load_optimizer(checkpoint, optimizer)
        check_loaded(optimizer.tensors(self.trainer.policy.model), str(checkpoint))
        load_rng(checkpoint)


@torch.no_grad()
def copied(tensors: Mapping[str, Tensor], memory: dict[Hashable, Tensor]) -> dict[str, Tensor]:
    """Return copies in host memory; tied weights share one.

    The `memory` is kept for the next copies, because to provide new memory takes the system several
    times as long as to copy. For GPU tensors it is page-locked.
    """
    copies = {}
    for name, tensor in tensors.items():
        place = tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
        if place not in memory:
            memory[place] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        copies[name] = memory[place].copy_(tensor, non_blocking=True)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return copies


# --- whole or absent --------------------------------------------------------------------------


@contextmanager
def new_checkpoint(run: Path, step: int) -> Iterator[Path]:
    """Yield a folder that becomes checkpoints/step-NNNNNN, or vanishes if the block fails."""
    final = run / "checkpoints" / f"step-{step:06d}"
    temporary = final.with_name(f".tmp-{final.name}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary

        files = {
            str(path.relative_to(temporary)): _sha256(path)
            for path in sorted(temporary.rglob("*"))
            if path.is_file()
        }
        manifest = {"step": step, "files": files}
        (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", "utf-8")
        for path in (*temporary.rglob("*"), temporary):
            sync(path)
        os.replace(temporary, final)
        sync(final.parent)
    except Exception as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if why := disk_refusal(error):
            raise UserError(
                f"{final}: cannot be written ({why}); free some space and {resume_hint(run)}"
            ) from error
        raise


def disk_refusal(error: BaseException) -> str | None:
    """Return why the disk refused a file, e.g. "No space left on device"; None for other errors."""
    if isinstance(error, OSError) or _SYSTEM_ERROR.search(str(error)):
        message = getattr(error, "strerror", None) or " ".join(str(error).split())
        return message or type(error).__name__
    return None


def verify(path: Path) -> str | None:
    """Return what is wrong with a checkpoint; None if it is intact."""
    manifest = path / "manifest.json"
    if not manifest.is_file():
        return f"{path}: not a checkpoint (it has no manifest.json)"
    try:
        for name, checksum in read_json(manifest)["files"].items():
            file, escaped = path / name, shortened(name)
            if not file.is_file():
                return f"{path}: {escaped} is missing"
            if _sha256(file) != checksum:
                return f"{path}: {escaped} is damaged (its checksum is wrong)"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{path}: manifest.json is damaged"
    return None


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- which ones there are ---------------------------------------------------------------------


def run_of(path: Path, flag: str = "--resume") -> Path:
    """Return the run that `path` is, or that a checkpoint `path` is of. `flag` gave the path."""
    run = path.parent.parent if CHECKPOINT.fullmatch(path.name) else path
    if kind_of(run / "config.yaml") != "file":
        raise UserError(f"{flag} {path}: not a run (there is no {run / 'config.yaml'})".lstrip())
    check_links(run)
    return run


def find_resume(path: Path, flag: str = "--resume") -> tuple[Path, list[str]]:
    """Return the checkpoint `path`, or the latest valid one of the run `path`; and warnings."""
    run = run_of(path, flag)
    candidates = [path] if run != path else checkpoint_folders(run)
    damaged: list[str] = []
    for candidate in reversed(candidates):
        reason = verify(candidate)
        if reason is None:
            return candidate, [f"skipped {each}" for each in damaged]
        damaged.append(reason)

    why = f" ({'; '.join(damaged)})" if damaged else ""
    advice = "; start a new run under another name" if flag == "--resume" else ""
    raise UserError(f"{flag} {path}: it has no valid checkpoint{why}{advice}".lstrip())


@contextmanager
def trainer_state(checkpoint: Path) -> Iterator[dict[str, Any]]:
    """Give the trainer's state in a checkpoint; within this context, blame it for what it lacks."""
    path = checkpoint / "trainer.json"
    with blaming(f"{path}: is not the state of a run"):
        yield read_json(path)["trainer"]


def prune(run: Path, keep: str = "") -> None:
    """Remove all checkpoints except the first, the last two and the one named `keep`."""
    _remove([path for path in checkpoint_folders(run)[1:-2] if path.name != keep])


def remove_checkpoints_after(run: Path, step: int) -> None:
    """Remove later checkpoints, and those that a killed process has not completed."""
    for path in (run / "checkpoints").glob(".tmp-*"):
        shutil.rmtree(path)
    _remove([path for path in checkpoint_folders(run) if step_of(path) > step])


def _remove(paths: list[Path]) -> None:
    for path in paths:
        # It is renamed first, so that a killed process leaves no partial checkpoint under its name.
        temporary = path.with_name(f".tmp-{path.name}")
        os.replace(path, temporary)
        shutil.rmtree(temporary)


# --- optimizer and random generators ----------------------------------------------------------


def load_optimizer(folder: Path, optimizer: Optimizer) -> None:
    """Load the state of an optimizer from a checkpoint, bit for bit."""
    path = folder / "optimizer.safetensors"
    with blaming(f"{path}: does not fit the optimizer of this run"):
        rest = read_json(folder / "optimizer.json")
        scale = msgspec.convert(rest["loss_scale"], dict[str, int | float])
        optimizer.load_state_dict({"moments": load_file(path), "loss_scale": scale})


def rng_state() -> str:
    """Return the state of the random generators that a reward may use, as JSON."""
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    return json.dumps(state, default=lambda numbers: numbers.tolist())


def load_rng(folder: Path) -> None:
    """Restore the `rng_state` in rng.json of a checkpoint."""
    path = folder / "rng.json"
    with blaming(f"{path}: holds no state of the random generators"):
        saved = read_json(path)
        version, state, gauss = saved["python"]
        random.setstate((version, tuple(state), gauss))
        np.random.set_state(tuple(saved["numpy"]))
        torch.set_rng_state(torch.tensor(saved["torch"], dtype=torch.uint8))
