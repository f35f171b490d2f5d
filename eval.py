"""Evaluate a model on held-out problems: `python eval.py --model runs/NAME --words 10,25`.

`python eval.py --help` lists the flags. The program itself is in
`grpo/tools/evaluation.py`.
"""

import sys

from grpo.tools.evaluation import main

if __name__ == "__main__":
    sys.exit(main())
