"""Imported as `grpo.data`: under a second name, each class would exist twice."""

if __name__ != "grpo.data":
    raise ImportError(f"{__name__} is imported as grpo.{__name__}")
