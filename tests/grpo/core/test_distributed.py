"""What torchrun leaves in the environment is checked, and may be another job's."""

import importlib.util
import re

import pytest

from grpo import distributed
from grpo.data.errors import UserError

HERE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}


@pytest.fixture()
def started_in(monkeypatch):
    """Return a function that loads `grpo.distributed` again, in another environment."""

    def start(environment):
        for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

        spec = importlib.util.spec_from_file_location("started_anew", distributed.__file__)
        again = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(again)
        return again

    return start


@pytest.mark.parametrize(
    "left", [{}, {"RANK": "3"}, {"WORLD_SIZE": "1", "RANK": "1"}, {"WORLD_SIZE": ""}]
)
def test_a_process_that_torchrun_did_not_start_is_rank_0_of_one(started_in, left):
    module = started_in(left)
    assert module.RANK == 0 and module.join_ranks("cpu") is module.SINGLE


@pytest.mark.parametrize(
    ("left", "said"),
    [
        ({"WORLD_SIZE": "4"}, "None:None (Error initializing torch.distributed using env://"),
        ({"RANK": "0"} | HERE | {"MASTER_PORT": "999999"}, "127.0.0.1:999999 (port must"),
    ],
)
def test_variables_that_another_job_has_left_are_one_line(started_in, left, said):
    with pytest.raises(UserError, match=f"^{re.escape(f'the 4 ranks do not meet at {said}')}"):
        started_in({"WORLD_SIZE": "4"} | left).join_ranks("cpu")


def test_more_ranks_than_gpus(started_in, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    module = started_in({"WORLD_SIZE": "4", "RANK": "2", "LOCAL_RANK": "2"} | HERE)
    with pytest.raises(UserError, match="rank 2 has no GPU of its own, because there are 2 here"):
        module.join_ranks("auto")


def test_ranks_share_items_without_overlap():
    assert [distributed.Ranks(rank, 3).share(range(7)) for rank in range(3)] == [
        [0, 3, 6],
        [1, 4],
        [2, 5],
    ]
