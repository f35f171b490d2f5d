"""Settings and fixtures of all tests: a tiny random model that runs in milliseconds."""

import copy
import gc
import os
import signal

import pytest
import torch
from hypothesis import settings
from small_runs import BY_PLACE
from tiny_models import make_tiny_model

from grpo.model.load import load_policy
from grpo.records import Completion

# No deadline: on a shared machine a slow example is no failure.
settings.register_profile("default-without-deadline", deadline=None)
settings.load_profile("default-without-deadline")

# A shell that starts the tests in the background makes them, and their processes, ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

# `pytest -n` starts a worker per core, so each worker gets one thread. The processes that a test
# starts need the same number of threads, or their runs differ in the last bit.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"


def pytest_collection_finish():
    """Keep the garbage collector from searching all modules and tests, as every run would have it
    do before its first step: that is a third of a second each.
    """
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_flags(tiny_model):
    """Flags for `train.py`: full fine-tuning of the tiny model, five times as fast as the
    embedded one.
    """
    return ["--model", str(tiny_model), "--lora-rank", "0"]


@pytest.fixture(scope="session")
def quick_flags(tiny_flags):
    """Flags for `train.py`: the tiny model learns something in every step."""
    return [*tiny_flags, *BY_PLACE, "--max-new-tokens", "8"]


@pytest.fixture(scope="session")
def loaded_policy(tiny_model):
    return load_policy(str(tiny_model), device="cpu")


@pytest.fixture()
def tiny_policy(loaded_policy):
    """A policy of its own for each test, which takes a fifth of the time to load one."""
    return copy.deepcopy(loaded_policy)


@pytest.fixture()
def all_end(monkeypatch):
    """No completion counts as cut off: a random model hardly ever writes an end token."""
    monkeypatch.setattr(Completion, "is_truncated", False)
