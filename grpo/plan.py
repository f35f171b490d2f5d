"""`python -m grpo.plan`: see `grpo.tools.plan`."""

import sys

from data.streams import interrupts_end

with interrupts_end():
    from grpo.tools.plan import main

if __name__ == "__main__":
    sys.exit(main())
