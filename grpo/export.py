"""`python -m grpo.export`: see `grpo.tools.export`."""

import sys

from grpo.tools.export import main

if __name__ == "__main__":
    sys.exit(main())
