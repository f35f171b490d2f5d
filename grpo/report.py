"""`python -m grpo.report`: see `grpo.tools.report.program`."""

import sys

from data.errors import interrupts_end

with interrupts_end():
    from grpo.tools.report.program import main

if __name__ == "__main__":
    sys.exit(main())
