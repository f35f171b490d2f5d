"""The package `grpo.tasks`."""

if __name__ == "tasks":
    import sys

    from grpo.top_level import SecondName

    sys.meta_path.insert(0, SecondName(__name__))  # type: ignore[arg-type]
