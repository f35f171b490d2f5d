"""`python -m grpo.smollm2`: see `grpo.tools.smollm2`."""

import sys

from data.errors import interrupts_end

with interrupts_end():
    from grpo.tools.smollm2 import main

if __name__ == "__main__":
    sys.exit(main())
