"""Readers under anything: what they are given is read, or refused in one line (UserError); no
other way out.
"""

import contextlib
import json
import tempfile
from pathlib import Path

import yaml
import zstandard
from hostile import PROBLEM
from hypothesis import example, given, settings
from hypothesis import strategies as st
from report_runs import group

from grpo.config import Config, load_config, parse
from grpo.data.corpus import load_texts
from grpo.data.errors import UserError
from grpo.data.files import read_json, read_jsonl, read_jsonl_zst, read_text
from grpo.run.checkpoint import find_resume, verify
from grpo.run.logs import groups_of, load_run, read_metrics, write_rollouts
from grpo.tasks.supply import read_problems

MANY = settings(max_examples=60)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4)
    ),
    max_leaves=12,
)

# Valid records, to be damaged.
CONFIG = vars(Config())
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "step-000001.jsonl.zst")
    write_rollouts(path, [group(("a", 0.5), advantages=[0.1])], step=1)
    (GROUP,) = read_jsonl_zst(path)
MANIFEST = {"step": 1, "files": {"a.json": "0" * 64}}


def altered(record):
    """JSON objects that are `record` with some values replaced, some missing and some more."""
    return st.builds(
        lambda values, lost, more: (
            {name: values.get(name, value) for name, value in record.items() if name not in lost}
            | more
        ),
        st.dictionaries(st.sampled_from(sorted(record)), JSON, max_size=3),
        st.sets(st.sampled_from(sorted(record)), max_size=2),
        st.dictionaries(st.text(max_size=8), JSON, max_size=1),
    )


@contextlib.contextmanager
def file_of(content, name):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(content)
        with contextlib.suppress(UserError):
            yield path


def lines_of(records):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


@MANY
@given(st.binary(max_size=80) | altered(CONFIG).map(lambda values: yaml.safe_dump(values).encode()))
def test_configurations(content):
    with file_of(content, "config.yaml") as path:
        assert isinstance(load_config(path.parent), Config)


WORDS = "--words --lr --steps --task arithmetic --temperature 5 -1 1e99 nan".split()


@MANY
@given(st.lists(st.text(max_size=10) | st.sampled_from(WORDS), max_size=5))
def test_command_lines(arguments):
    if not {"-h", "--help", "--help-all"} & set(arguments):
        with contextlib.suppress(UserError):
            parse(arguments)


@MANY
@given(st.binary(max_size=80) | st.lists(JSON, max_size=3).map(lines_of))
def test_json_lines_and_logs(content):
    for reader in (lambda path: list(read_jsonl(path)), read_metrics, read_json, read_text):
        with file_of(content, "a.jsonl") as path:
            reader(path)


@MANY
@given(st.binary(max_size=80) | st.lists(altered(PROBLEM), max_size=3).map(lines_of))
def test_datasets(content):
    with file_of(content, "a.jsonl") as path:
        read_problems(path)


@MANY
@given(
    st.binary(max_size=60)
    | st.lists(JSON | altered(GROUP), max_size=2).map(
        lambda records: zstandard.compress(lines_of(records))
    )
)
def test_rollouts(content):
    for reader in (read_jsonl_zst, groups_of):
        with file_of(content, "step-000001.jsonl.zst") as path:
            reader(path)


@MANY
@given(
    st.binary(max_size=60)
    | JSON.map(lambda value: json.dumps(value).encode())
    | altered(MANIFEST).map(lambda value: json.dumps(value).encode())
)
@example(b'{"format": 1, "files": {"a\\nb": null}}')
@example(b'{"format": 1, "files": {"manifest.json": "a\\nb"}}')
def test_manifests(content):
    with tempfile.TemporaryDirectory() as folder:
        step = Path(folder) / "checkpoints" / "step-000001"
        step.mkdir(parents=True)
        (step / "manifest.json").write_bytes(content)
        reason = verify(step)
        assert reason is None or reason.count("\n") == 0
        (Path(folder) / "config.yaml").write_text("a: 1")
        with contextlib.suppress(UserError):
            find_resume(Path(folder))


@MANY
@given(
    st.dictionaries(
        st.sampled_from(
            ["metrics.jsonl", "eval.jsonl", "groups.jsonl", "curriculum.jsonl", "config.yaml"]
        ),
        st.binary(max_size=40) | st.lists(JSON, max_size=2).map(lines_of),
    )
)
def test_runs(files):
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        for look in ("metrics", "evals", "decisions", "group_index", "reports", "config"):
            with contextlib.suppress(UserError):
                getattr(load_run(folder), look)


@MANY
@given(
    st.sampled_from([".txt", ".json", ".md"]),
    st.binary(max_size=80)
    | JSON.map(lambda value: json.dumps(value).encode())
    | st.lists(altered({"title": "t", "text": "a b c"}), max_size=3).map(lines_of),
)
def test_corpora(suffix, content):
    with file_of(content, f"a{suffix}") as path:
        load_texts(path.parent)
