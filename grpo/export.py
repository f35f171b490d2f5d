"""`python -m grpo.export`: see `grpo.tools.export`."""

import sys

from data.errors import interrupts_end

with interrupts_end():
    from grpo.tools.export import main

if __name__ == "__main__":
    sys.exit(main())
