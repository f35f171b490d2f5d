"""The package `grpo.data`."""

if __name__ == "data":
    from grpo import share_modules

    share_modules(__name__)
