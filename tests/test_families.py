"""Every architecture of `tiny_architectures.py` runs as the unmodified model does, for sampler and
trainer, or is refused in one line.

With `-s` it prints the rows of `support/architectures.md`.
"""

import pytest
from tiny_architectures import ARCHITECTURES, Architecture, compare
from transformers.utils import logging as transformers_logging

TOLERANCE = 1e-4  # nats
PATHS = ("fast", "shared", "cached", "plain")


def _cases() -> list:
    return [
        pytest.param(each, id=each.name, marks=[pytest.mark.slow] if each.is_slow else [])
        for each in ARCHITECTURES
    ]


@pytest.fixture(autouse=True)
def quiet():
    transformers_logging.set_verbosity_error()


@pytest.mark.filterwarnings("ignore::UserWarning")  # of some architectures' own code
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("architecture", _cases())
def test_it_runs_as_the_unmodified_model_or_is_refused(tmp_path, architecture: Architecture):
    outcome = compare(architecture, tmp_path)

    reason = outcome.reason.split(" is not supported: ")[-1].split("; give")[0]
    figures = " | " if reason else f"{outcome.sampler:.1e} | {outcome.trainer:.1e}"
    print(f"| {architecture.name} | {outcome.path} | {figures} | {reason} |")

    if architecture.outcome in PATHS:
        assert outcome.path == architecture.outcome
        assert outcome.sampler <= TOLERANCE and outcome.trainer <= TOLERANCE
    else:
        assert outcome.path == "refused" and architecture.outcome in outcome.reason
        assert f"--model {tmp_path}: " in outcome.reason and "\n" not in outcome.reason
