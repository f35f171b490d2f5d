"""The folder of a user of the library."""

import json
from pathlib import Path

import pytest
from small_library import OWN, ROWS


@pytest.fixture
def home(tmp_path, monkeypatch, tiny_model):
    monkeypatch.chdir(tmp_path)
    Path("tiny").symlink_to(tiny_model)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    Path("own.py").write_text(OWN)
    return tmp_path
