"""The package `grpo.align`."""

if __name__ == "align":
    import sys

    from grpo.top_level import SecondName

    sys.meta_path.insert(0, SecondName(__name__))  # type: ignore[arg-type]
