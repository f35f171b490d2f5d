"""The package `grpo.align`."""

if __name__ == "align":
    from grpo.top_level import share_modules

    share_modules(__name__)
