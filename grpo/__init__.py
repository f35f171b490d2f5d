"""A GRPO trainer. What a notebook wants of it: `from grpo import load_run`."""

from grpo.run.reader import RunData, load_run

__all__ = ["RunData", "load_run"]
