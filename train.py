"""Train a language model by GRPO: `python train.py --task interleave --words 25`.

`python train.py --help` lists the flags. On several GPUs: `torchrun --nproc-per-node 4 train.py
...`, with the same flags. The program itself is in `grpo/tools/train.py`.
"""

import sys

from data.streams import interrupts_end

with interrupts_end():
    from grpo.flags import show_help

if __name__ == "__main__":
    show_help(sys.argv[1:])  # before torch is loaded, which takes seconds

    with interrupts_end():
        from grpo.run.background import end_process
        from grpo.tools.train import main

    end_process(main(sys.argv[1:]))
