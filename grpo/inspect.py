"""`python -m grpo.inspect`: see `grpo.tools.inspect`."""

import sys

from data.errors import interrupts_end

with interrupts_end():
    from grpo.tools.inspect import main

if __name__ == "__main__":
    sys.exit(main())
