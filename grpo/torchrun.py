"""What torchrun tells a process: its number among the processes that it has started.

Nothing here imports torch, which takes seconds to load.
"""

import os


def _from_environment(name: str, default: int) -> int:
    """Return a number that torchrun sets.

    Whatever else the variable holds, `grpo.distributed.join_ranks` names.
    """
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else default


# A RANK without a WORLD_SIZE means nothing; another job may have left it.
SIZE = _from_environment("WORLD_SIZE", 1)
RANK = _from_environment("RANK", 0) if SIZE > 1 else 0
