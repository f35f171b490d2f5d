"""`python -m grpo.inspect`: see `grpo.tools.inspect`."""

import sys

from grpo.tools.inspect import main

if __name__ == "__main__":
    sys.exit(main())
