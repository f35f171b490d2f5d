"""Validation checks at every step, and small: short runs have none otherwise."""

from grpo.run.session import PROMOTION_SEED, PURPOSES


def check_often(monkeypatch, problems: int = 3) -> None:
    """Have each step checked on a few held-out problems, and levels open at once."""
    monkeypatch.setattr("grpo.ending.CHECK_EVERY", 1)
    monkeypatch.setattr("grpo.curriculum.OPEN_AT", 0.051)
    monkeypatch.setitem(PURPOSES, "promotion", (PROMOTION_SEED, problems, "promotion"))
