"""Validation checks at every step, and small: short runs have none otherwise."""


def check_often(monkeypatch, problems: int = 3) -> None:
    """Have each step of a ladder checked on a few held-out problems."""
    for module in ("grpo.ending", "grpo.curriculum"):
        monkeypatch.setattr(f"{module}.CHECK_EVERY", 1)
    monkeypatch.setattr("grpo.run.heldout.CHECK_PROBLEMS", problems)
