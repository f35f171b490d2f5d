"""`python -m grpo.smollm2`: see `grpo.tools.smollm2`."""

import sys

from grpo.tools.smollm2 import main

if __name__ == "__main__":
    sys.exit(main())
