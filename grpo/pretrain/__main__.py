"""`python -m grpo.pretrain`: see `grpo.pretrain.train`."""

import sys

from grpo.pretrain.train import main

sys.exit(main())
