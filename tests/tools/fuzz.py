"""Fuzz the readers of files, guided by coverage: `python tests/tools/fuzz.py --seconds 180`.

Every input must be read, or refused with a UserError, as in `tests/test_fuzz.py`. There the input
is random; here it is mutated so that it covers more and more code. At the first other outcome the
program ends with the input and a traceback; otherwise it ends after the given time with exit status
0. It needs the extra `fuzz` (atheris).
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
import atheris  # noqa: E402
from sample_records import GROUP, MANIFEST, PROBLEM  # noqa: E402

with atheris.instrument_imports(include=["align", "data", "tasks", "grpo"]):
    import yaml
    import zstandard

    from data.corpus import load_corpus
    from data.errors import UserError
    from data.files import read_json
    from grpo.config import Config
    from grpo.config_file import load_config
    from grpo.run.checkpoint import verify
    from grpo.run.logs import read_metrics
    from grpo.run.rollouts import groups_of
    from tasks.answers import extract
    from tasks.supply import read_problems

# For each reader: the name of the file, how bytes are packed into it, the reader, a valid content.
READERS = [
    ("config.yaml", bytes, load_config, yaml.safe_dump(vars(Config())).encode()),
    ("a.jsonl", bytes, read_problems, json.dumps(PROBLEM).encode()),
    ("metrics.jsonl", bytes, read_metrics, b'{"step": 1}\n{"step": 2, "a": null}\n'),
    ("a.json", bytes, read_json, b'{"a": [1, 2.5, "b", null, true]}'),
    ("step-000001.jsonl.zst", zstandard.compress, groups_of, json.dumps(GROUP).encode() + b"\n"),
    ("manifest.json", bytes, lambda path: verify(path.parent), json.dumps(MANIFEST).encode()),
    (
        "a.txt",
        bytes,
        lambda path: load_corpus(path.parent),
        b"A title\n\nSome words of a text.\n" * 9,
    ),
    (
        "b.jsonl",
        bytes,
        lambda path: load_corpus(path.parent),
        b'{"title": "t", "text": "some words of a text"}\n',
    ),
    (
        "answer",
        bytes,
        lambda path: extract(path.read_bytes().decode(errors="replace")),
        b"= \\boxed{-1,234} or 52.",
    ),
]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=int, default=180)
    seconds = parser.parse_args(argv).seconds
    folder, seeds = tempfile.mkdtemp(), tempfile.mkdtemp()
    for i, (*_, whole) in enumerate(READERS):
        Path(seeds, str(i)).write_bytes(bytes([i]) + whole)

    def try_one(content: bytes):
        name, pack, reader, _ = READERS[content[0] % len(READERS) if content else 0]
        path = Path(folder, name)
        path.write_bytes(pack(content[1:]))
        try:
            reader(path)
        except UserError:
            pass
        finally:
            path.unlink()

    os.chdir(folder)
    atheris.Setup(
        [sys.argv[0], f"-max_total_time={seconds}", "-max_len=1500", "-print_final_stats=1", seeds],
        try_one,
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main()
