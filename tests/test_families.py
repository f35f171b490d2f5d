"""Every architecture of `tiny_architectures.py` runs as the unmodified model does, for sampler and
trainer, or is refused in one line.

With `-s` it prints the rows of `support/architectures.md`.
"""

from collections.abc import Set

import pytest
from tiny_architectures import ARCHITECTURES, TELLING, Architecture, compare
from transformers.utils import logging as transformers_logging

TOLERANCE = 1e-4  # nats
PATHS = ("fast", "shared", "cached", "plain")


# Models with linear layers that can have no adapter (routers, groups of products, Mamba's, shared
# ones), and one whose adapter PEFT reads wrongly.
CHOOSY = {"llama4_text", "deepseek_v4", "mamba", "zamba", "laguna"}


def _cases(quick: Set[str] = TELLING) -> list:
    return [
        pytest.param(each, id=each.name, marks=[] if each.kind in quick else [pytest.mark.slow])
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


@pytest.mark.filterwarnings("ignore")  # PEFT's, of some architectures
@pytest.mark.parametrize("architecture", _cases(CHOOSY))
def test_an_adapter_runs_as_in_the_unmodified_model_that_loads_it(
    tmp_path, architecture: Architecture
):
    outcome = compare(architecture, tmp_path, lora_rank=4)
    if architecture.kind == "zamba":
        assert "layers of ZambaForCausalLM share weights" in outcome.reason
    elif architecture.outcome in PATHS:
        assert outcome.path == architecture.outcome
        assert outcome.sampler <= TOLERANCE and outcome.trainer <= TOLERANCE
    else:
        assert outcome.path == "refused"
