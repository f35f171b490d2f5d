"""The package `grpo.align`."""

if __name__ == "align":
    from grpo import share_modules

    share_modules(__name__)
