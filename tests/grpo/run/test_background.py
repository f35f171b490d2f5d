"""Checkpoints written while training goes on hold the state of their own step, and whatever goes
wrong is said at the next.
"""

import errno
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from small_runs import OWN

from data.errors import UserError
from grpo.model.load import load_policy
from grpo.run import background, checkpoint
from grpo.run.background import HostMemory, Save, Writer, free_host_memory
from grpo.run.checkpoint import checkpoints, verify
from grpo.run.logs import read_metrics
from grpo.tools import train
from grpo.trainer import Trainer

SMALL = [
    "--task",
    "own.py:Own",
    "--prompts",
    "2",
    "--group-size",
    "4",
    "--steps",
    "4",
    "--eval-problems",
    "2",
    "--save-every",
    "2",
    "--config",
    "{save_threshold: 9}",
    "--config",
    "{best_margin: 9}",
    "--max-new-tokens",
    "8",
    "--learning-rate",
    "0.01",
    "--config",
    "{warmup: 0}",
    "--lora-rank",
    "0",
    "--device",
    "cpu",
]


@pytest.fixture()
def options(tiny_model, tmp_path, monkeypatch):
    """The flags of a run of four steps, each of which learns, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    return [*SMALL, "--model", str(tiny_model)]


def test_a_copy_is_of_its_moment_and_reuses_its_memory():
    live = {"a": torch.arange(6.0).view(2, 3).t(), "deep": {1: {"step": torch.tensor(3), "n": 7}}}
    memory = HostMemory()
    before = memory.copy(live)
    live["a"].add_(10)
    live["deep"][1]["step"].add_(1)
    assert before["a"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert before["deep"] == {1: {"step": torch.tensor(3), "n": 7}}

    after = memory.copy(live)
    assert after["a"].tolist() == [[10, 13], [11, 14], [12, 15]]
    assert after["a"].data_ptr() == before["a"].data_ptr()


def test_tied_tensors_share_a_copy_and_views_do_not():
    weight = torch.arange(4.0)
    live = {"embedding": weight, "head": weight, "view": weight[:2], "other": weight.view(2, 2)}
    copy = HostMemory().copy(live)
    assert copy["embedding"].data_ptr() == copy["head"].data_ptr()
    assert len({tensor.data_ptr() for tensor in copy.values()}) == 3
    assert all(torch.equal(copy[name], live[name]) for name in live)


def test_a_tensor_of_another_shape_gets_another_copy():
    memory = HostMemory()
    memory.copy({"a": torch.zeros(2)})
    assert memory.copy({"a": torch.ones(3), "b": torch.ones(1).double()})["a"].tolist() == [1] * 3
    assert memory.copy({"a": torch.ones(3), "b": torch.ones(1)})["b"].dtype == torch.float32


def test_where_there_is_no_room_for_a_copy(monkeypatch):
    monkeypatch.setattr(background, "free_host_memory", lambda: 15.9)
    with pytest.raises(MemoryError):
        HostMemory().copy({"a": torch.zeros(1), "b": torch.zeros(1)})
    monkeypatch.setattr(background, "free_host_memory", lambda: 16)
    HostMemory().copy({"a": torch.zeros(1), "b": torch.zeros(1)})


def test_free_memory_is_the_system_s_or_the_control_group_s(tmp_path):
    assert free_host_memory(tmp_path) == float("inf")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 90 kB\nMemAvailable:    40 kB\n")
    assert free_host_memory(tmp_path) == 40 * 1024

    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.current").write_text("700\n")
    (group / "memory.stat").write_text("anon 600\ninactive_file 30\nactive_file 40\n")
    (group / "memory.max").write_text("max\n")
    assert free_host_memory(tmp_path) == 40 * 1024
    (group / "memory.max").write_text("1000\n")
    assert free_host_memory(tmp_path) == 1000 - 700 + 70


@pytest.mark.parametrize("lora", [{}, {"lora_rank": 2}], ids=str)
def test_what_is_written_of_a_copy_is_what_was_written_of_the_model(tiny_model, tmp_path, lora):
    policy = load_policy(str(tiny_model), device="cpu", **lora)
    policy.save(tmp_path / "live")
    copy = HostMemory().copy(policy.saved_tensors())
    with torch.no_grad():
        for weight in policy.parameters:
            weight.add_(1)
    policy.save(tmp_path / "copy", copy)

    names = [path.name for path in (tmp_path / "live").iterdir()]
    assert sorted(names) == sorted(path.name for path in (tmp_path / "copy").iterdir())
    assert any(name.endswith(".safetensors") for name in names)
    for name in names:
        assert (tmp_path / "copy" / name).read_bytes() == (tmp_path / "live" / name).read_bytes()


def save_of(run: Path, write, step: int = 1, **options) -> Save:
    settings = {"reasons": ["why"], "waiting": 0.0, "spacing": 5, "step_times": (), "keep": None}
    return Save(run, step, write, **settings | options)


def test_the_writer_hands_over_what_is_whole_and_once(tmp_path):
    may_end = threading.Event()

    def write(folder: Path):
        (folder / "file").touch()
        assert may_end.wait(60)

    writer = Writer()
    assert writer.collect() is writer.collect(wait=True) is None
    writer.start(save_of(tmp_path, write))
    assert writer.collect() is None and checkpoints(tmp_path) == ([], [])
    may_end.set()
    saved = writer.collect(wait=True)
    assert saved.path.name == "step-000001" and verify(saved.path) is None
    assert saved.line.startswith("checkpoint step-000001: why (training waited 0.0 s; written in ")
    assert writer.collect(wait=True) is None


def test_the_writer_s_error_is_raised_where_it_is_collected(tmp_path):
    def write(folder: Path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    writer = Writer()
    writer.start(save_of(tmp_path, write))
    with pytest.raises(UserError, match="step-000001: cannot be written .No space left"):
        writer.collect(wait=True)
    assert writer.collect(wait=True) is None


def test_the_cost_chooses_the_spacing_where_none_is_given(tmp_path):
    def write(folder: Path):
        (folder / "file").touch()

    times = (9.0, 1.0, 1.0)
    assert save_of(tmp_path, write, waiting=2.0, step_times=times)().spacing == 5
    chosen = save_of(tmp_path, write, waiting=2.0, step_times=times, spacing=None)().spacing
    assert 40 <= chosen <= 60  # 2 s of waiting, and a little of work, in 5 % of the time


@pytest.fixture()
def slow_disk(monkeypatch):
    """Returns when training may go on: checkpoints of a step are written only when the next step
    has been made.
    """
    made = {}
    save_file, step = checkpoint.save_file, Trainer.step

    def wait_for_next(tensors, path):
        number = int(path.parent.name.rpartition("-")[2])
        if number < 4:
            assert made.setdefault(number + 1, threading.Event()).wait(60)
        save_file(tensors, path)

    def note(self):
        try:
            return step(self)
        finally:
            made.setdefault(self.done, threading.Event()).set()

    monkeypatch.setattr(checkpoint, "save_file", wait_for_next)
    monkeypatch.setattr(Trainer, "step", note)


def files_of(run: str) -> dict[str, bytes]:
    """Return the files of all checkpoints of a run, but for those that hold a time or the run's
    name.
    """
    return {
        f"{path.parent.name}/{path.name}": path.read_bytes()
        for path in Path("runs", run, "checkpoints").rglob("*")
        if path.is_file() and path.name not in ("manifest.json", "sources.json")
    }


def test_a_checkpoint_belongs_to_its_step_and_training_goes_on(
    options, monkeypatch, capsys, request
):
    """The same files as where there is no memory for a copy, and training waits for the write."""
    with monkeypatch.context() as patch:
        patch.setattr(background, "free_host_memory", lambda: 0)
        assert train.main([*options, "--name", "waits"]) == 0
    said = capsys.readouterr().out
    warned = Path("runs/waits/warnings.log").read_text()
    for text in (said, warned):
        assert text.count("not enough host memory for a copy of the state") == 1
    assert "in the background" not in said

    request.getfixturevalue("slow_disk")
    assert train.main([*options, "--name", "goes-on"]) == 0
    said = capsys.readouterr().out
    assert said.index("  step 3/4") < said.index("checkpoint step-000002: every 2 steps (")
    assert said.count("in the background") == 2
    files = files_of("waits")
    assert files == files_of("goes-on") and len(files) >= 16
    weights = [files[f"step-00000{step}/model.safetensors"] for step in (2, 4)]
    assert weights[0] != weights[1]


def test_a_disk_that_is_full_ends_the_run_at_the_next_step(options, monkeypatch, capsys):
    def full(tensors, path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint, "save_file", full)
    collect = Writer.collect
    monkeypatch.setattr(Writer, "collect", lambda self, wait=False: collect(self, wait=True))
    assert train.main([*options, "--steps", "9", "--name", "a"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "step-000002: cannot be written (No space left on device)" in line
    assert len(read_metrics(Path("runs/a/metrics.jsonl"))) == 3
    assert list(Path("runs/a/checkpoints").iterdir()) == []


def test_a_run_that_fails_finishes_the_checkpoint_under_way(
    options, monkeypatch, capsys, slow_disk
):
    step = Trainer.step

    def fails(self):
        report = step(self)
        if self.done == 3:
            raise FloatingPointError("the loss is not finite")
        return report

    monkeypatch.setattr(Trainer, "step", fails)
    assert train.main([*options, "--name", "a"]) == 1
    assert "the loss is not finite" in capsys.readouterr().err
    (saved,) = checkpoints(Path("runs/a"))[0]
    assert saved.name == "step-000002"


def test_what_does_not_read_back_is_no_checkpoint(tmp_path, monkeypatch):
    def decays(path: Path):
        path.write_bytes(b"x" + path.read_bytes()[1:])

    monkeypatch.setattr(checkpoint, "forget_cached", decays)
    with pytest.raises(UserError, match="step-000001: cannot be written .file does not read back"):
        save_of(tmp_path, lambda folder: (folder / "file").write_text("file"))()
    assert list((tmp_path / "checkpoints").iterdir()) == []


@pytest.mark.slow
def test_a_program_that_ends_at_once_has_its_own_status(tmp_path):
    """The interpreter would abort where it ends while a thread writes from within Rust."""
    code = (
        "import time, torch; from safetensors.torch import save_file\n"
        "from grpo.run.background import Save, Writer\n"
        "from grpo.run.interrupt import end_process\n"
        "tensors = {'a': torch.zeros(100)}\n"
        "def write(folder):\n    while True: save_file(tensors, folder / 'a')\n"
        "Writer().start(Save('.', 1, write, [], 0.0, 1, (), None))\n"
        "time.sleep(0.3); end_process(130)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment)
    assert ended.returncode == 130
    shutil.rmtree(tmp_path / "checkpoints")
