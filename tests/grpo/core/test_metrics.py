"""Logs under damage: what a reader may do to them, and where a killed writer can have stopped."""

import json

from hypothesis import example, given, settings
from hypothesis import strategies as st

from grpo.records import Completion, Group
from grpo.run.logs import MetricsLog, SamplesLog, read_metrics
from tasks.base import Problem, Score


def test_reading_a_log_that_grows_does_not_write_to_it(tmp_path):
    log = MetricsLog(tmp_path)
    log.path.write_bytes(
        b'{"step": 1}\n{"step": 2, "re'
    )  # the writer is in the middle of its second line
    assert read_metrics(log.path) == [{"step": 1}]
    assert log.path.read_bytes() == b'{"step": 1}\n{"step": 2, "re'


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    )
)
@example([float("nan"), {"a": (float("inf"),)}])
@settings(deadline=None)
def test_whatever_is_logged_is_strict_json(tmp_path_factory, value):
    log = MetricsLog(tmp_path_factory.mktemp("log"), "any.jsonl")
    log.append({"step": 1, "value": value})

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    json.loads(log.path.read_text(), parse_constant=refuse)
    assert len(read_metrics(log.path)) == 1


def test_samples_go_on_wherever_the_writer_was_stopped(tmp_path):
    problem, answer = Problem("t", 1, "p", "é → ж", "k"), Completion((2,), (-0.1,), "é → ж", "stop")
    group = Group(0, problem, (1,), 1.0, [answer], scores=[Score(0.5)])
    log = SamplesLog(tmp_path, every=1)
    log.append(1, [group])
    first = log.path.read_bytes()
    log.append(2, [group])
    whole = log.path.read_bytes()
    for end in range(
        len(first), len(whole) + 1
    ):  # in a header, in a character of two or three bytes, anywhere
        log.path.write_bytes(whole[:end])
        log.truncate_after(1)
        assert log.path.read_bytes() == first
