"""The tokenizer of a run, which turns stored tokens into text without the model."""

from pathlib import Path
from typing import Any

from data.errors import blaming

# A tokenizer takes tokens of 32 bits; a larger number, from a foreign file, has no text.
MOST_TOKENS = 1 << 32


def tokenizer_of(run: Path) -> Any | None:
    """Return the tokenizer of the run's last checkpoint; None if it has no checkpoint."""
    files = sorted((run / "checkpoints").glob("step-*/tokenizer.json"))
    if not files:
        return None
    from tokenizers import Tokenizer

    with blaming(f"{files[-1]}: is not a tokenizer"):
        return Tokenizer.from_file(str(files[-1]))
