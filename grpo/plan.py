"""`python -m grpo.plan`: see `grpo.tools.plan`."""

import sys

from grpo.tools.plan import main

if __name__ == "__main__":
    sys.exit(main())
