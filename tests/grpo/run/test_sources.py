"""Fingerprints of what a run depends on: what they notice, and how much they read."""

import json

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import make_tiny_model

from data.errors import UserError
from grpo.run import sources
from grpo.run.sources import (
    PAGE,
    PAGES,
    base_sources,
    check,
    differences,
    read_sources,
    weights_digest,
)
from tasks.base import sources_of, summary_of
from tasks.registry import load_task


def test_the_same_model_elsewhere_has_the_same_fingerprints(tmp_path):
    one, two = make_tiny_model(tmp_path / "one"), make_tiny_model(tmp_path / "two")
    (two / "README.md").write_text("about it")
    found = base_sources(str(one))
    assert found == base_sources(str(two))
    assert {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"} <= set(
        found
    )


def test_the_embedded_model_has_fingerprints():
    assert {"model.safetensors", "tokenizer.json"} <= set(base_sources("builtin"))


def test_a_model_of_the_hub_that_is_not_on_disk_has_none(monkeypatch, tmp_path):
    def absent(*_, **__):
        raise ValueError("not there")

    monkeypatch.setattr(sources, "snapshot_download", absent)
    assert base_sources("someone/something") is None
    monkeypatch.setattr(sources, "snapshot_download", lambda *_, **__: tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert set(base_sources("someone/something")) == {"config.json"}


def written(path, **tensors):
    save_file(tensors, path)
    return weights_digest(path)


@pytest.mark.parametrize("rank", [1, 8])
@pytest.mark.parametrize("name", ["a", "b", "bias"])
def test_fine_tuning_one_tensor_is_noticed(tmp_path, name, rank):
    """A LoRA update of one matrix that is merged, or a bias that moved: same shapes, same size."""
    torch.manual_seed(0)
    tensors = {
        "a": torch.randn(600, 500, dtype=torch.bfloat16),
        "b": torch.randn(700, 500, dtype=torch.bfloat16),
        "bias": torch.randn(900, dtype=torch.bfloat16),
    }
    before = written(tmp_path / "x", **tensors)
    assert written(tmp_path / "y", **tensors) == before
    tensor = tensors[name].view(-1, 500) if tensors[name].dim() > 1 else tensors[name][:, None]
    update = torch.randn(len(tensor), rank) @ torch.randn(rank, tensor.shape[1])
    tensors[name] = (tensor + 0.05 * update.bfloat16()).view(tensors[name].shape)
    assert written(tmp_path / "x", **tensors) != before


@pytest.mark.parametrize("place", [0, 1, 37, -1])
def test_each_byte_of_a_small_tensor_counts(tmp_path, place):
    tensor = torch.zeros(PAGE * PAGES, dtype=torch.uint8)
    before = written(tmp_path / "x", a=tensor, b=tensor.clone())
    changed = tensor.clone()
    changed[place] = 1
    assert written(tmp_path / "x", a=tensor, b=changed) != before
    assert written(tmp_path / "x", a=changed, b=tensor) != before


def test_the_first_and_last_page_of_a_large_tensor_count(tmp_path):
    tensor = torch.zeros(10 * PAGE * PAGES, dtype=torch.uint8)
    digests = {written(tmp_path / "x", a=tensor)}
    for place in (0, PAGE - 1, -PAGE, -1):
        changed = tensor.clone()
        changed[place] = 1
        digests.add(written(tmp_path / "x", a=changed))
    assert len(digests) == 5


def test_names_and_shapes_count(tmp_path):
    tensor = torch.zeros(6, 4)
    digests = {
        written(tmp_path / "x", a=tensor),
        written(tmp_path / "x", b=tensor),
        written(tmp_path / "x", a=tensor.view(4, 6)),
    }
    assert len(digests) == 3


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 100, b"\x02" + 7 * b"\0" + b"[]"])
def test_a_damaged_file_has_a_fingerprint_too(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    before = weights_digest(tmp_path / "x")
    (tmp_path / "x").write_bytes(content + b"!")
    assert weights_digest(tmp_path / "x") != before


def test_six_gigabytes_are_read_in_samples(tmp_path, monkeypatch):
    """The size of a 3B model, sparse on disk. What is read is counted, not timed."""
    layers = {f"layer.{i}": {"dtype": "U8", "shape": [23_600_000]} for i in range(254)}
    for i, entry in enumerate(layers.values()):
        entry["data_offsets"] = [i * 23_600_000, (i + 1) * 23_600_000]
    header = json.dumps(layers).encode()
    with open(tmp_path / "x", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 254 * 23_600_000)
    read, pread = [], sources.os.pread
    monkeypatch.setattr(sources.os, "pread", lambda *args: read.append(args[1]) or pread(*args))
    weights_digest(tmp_path / "x")
    assert 254 * PAGE * PAGES <= sum(read) < 20_000_000


def test_the_corpus_is_named_by_document():
    documents = sources_of(load_task("interleave"))
    assert len(documents) == 96 and "tale-flood" in documents
    assert sources_of(load_task("arithmetic")) == {}
    assert summary_of(documents).startswith("96 with fingerprint ")
    assert summary_of(documents) != summary_of(documents | {"tale-flood": "other"})


def test_differences_are_named_with_both_values():
    then = {"a.json": "1" * 16, "b.json": "2" * 16}
    now = {"a.json": "3" * 16, "c.json": "4" * 16}
    assert differences(then, now) == [
        "a.json 11111111 → 33333333",
        "b.json 22222222 → absent",
        "c.json absent → 44444444",
    ]
    assert differences(None, now) == differences(then, None) == differences(then, then) == []
    assert differences({"rate": 2e-4}, {"rate": 1e-3}, is_config=True) == ["rate 0.0002 → 0.001"]


def test_many_differences_are_counted(tmp_path):
    now = {"corpus": {f"tale-{i}": "5" * 16 for i in range(9)}}
    with pytest.raises(UserError, match=r"tale-2 absent → 55555555, and 6 more; undo that"):
        check(tmp_path, {"corpus": {}}, now, ["base"])
    assert list(check(tmp_path, {"corpus": {}}, now, ["base", "corpus"])) == ["corpus"]


@pytest.mark.parametrize("content", ["[]", '{"base": 3}', '{"accepted": {}}', "null"])
def test_what_holds_no_sources_is_one_line(tmp_path, content):
    (tmp_path / "sources.json").write_text(content)
    with pytest.raises(UserError, match="does not hold the sources of a run"):
        read_sources(tmp_path)
    (tmp_path / "sources.json").unlink()
    with pytest.raises(UserError, match="sources.json"):
        read_sources(tmp_path)
