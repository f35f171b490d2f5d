"""The package `grpo.tasks`."""

if __name__ == "tasks":
    from grpo import share_modules

    share_modules(__name__)
