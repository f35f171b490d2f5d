"""Train a language model by GRPO: `python train.py --task interleave --words 25`.

`python train.py --help` lists the flags. On several GPUs: `torchrun --nproc-per-node 4 train.py
...`, with the same flags. The program itself is in `grpo/tools/train.py`.
"""

import sys

from grpo.tools.train import main

if __name__ == "__main__":
    sys.exit(main())
