"""The four everyday changes of docs/design.md: a test names the file that was forgotten.

What a new reward needs is tested in `tasks/test_explanations.py` (its formula) and
`tasks/test_interleave.py` (its credits).
"""

import re
from configparser import ConfigParser
from pathlib import Path

from forced import trainer_for

from grpo.config import TRACKERS, WEIGHTED_BY, Config
from grpo.learn import loss
from grpo.model.load import load_policy
from grpo.run import trackers
from grpo.show.console import FIGURES
from grpo.tasks.interleave import Interleave
from grpo.tasks.supply import Supply
from grpo.trainer import Trainer

WEIGHTS = {
    "completion": "1 / (R * its length)",
    "budget": "1 / (R * max_length)",
    "step": "1 / (all tokens)",
}


def test_a_loss_has_a_term_and_a_weight():
    rows = re.findall(r"^    (\w+) +(1 / \(.+?\)) ", loss.__doc__, flags=re.MULTILINE)
    weights = {kind: WEIGHTS[weighted_by] for kind, weighted_by in WEIGHTED_BY.items()}
    assert dict(rows) == weights, (
        "another loss is in the table at the head of grpo/learn/loss.py, beside its policy term, "
        "than in WEIGHTED_BY of grpo/config.py"
    )


def test_a_metric_that_the_console_shows_is_measured(tiny_model):
    policy = load_policy(str(tiny_model), device="cpu", keep_reference=True)
    config = Config(task="interleave", level=4, window=4, steps=2, prompts=2, group_size=2)
    by_windows = Trainer(config, Supply(Interleave(), seed=0), policy)
    measured = trainer_for(policy, beta=0.1).step().metrics | by_windows.step().metrics
    missing = FIGURES.keys() - measured.keys()
    assert not missing, f"grpo/show/console.py has the format of what no step measures: {missing}"


def test_a_tracker_has_a_class_and_a_package():
    names = set(TRACKERS)
    assert set(trackers.CLASSES) == names, "CLASSES in grpo/run/trackers.py, TRACKERS in config.py"
    setup = ConfigParser()
    setup.read(Path(__file__).resolve().parents[1] / "setup.cfg")
    packages = re.findall(r"^[\w-]+", "\n".join(setup["options.extras_require"].values()), re.M)
    assert names <= set(packages), "setup.cfg: an extra installs each tracker"
