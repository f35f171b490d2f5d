"""Rollout files under damage and at the edges of what floats and texts can be."""

from contextlib import suppress

from hypothesis import given, settings
from hypothesis import strategies as st

from data.files import read_jsonl_zst
from grpo.records import Completion, Group
from grpo.run.rollouts import groups_of, write_rollouts
from tasks.base import Problem, Score, UserError


def group(texts, logprob=-0.25, rewards=(0.0, 1.0)):
    return Group(
        3,
        Problem("t", 2, texts[0], texts[-1], "k", {"a": texts}),
        (1, 2),
        1.0,
        [Completion(tuple(range(9)), (logprob,) * 9, text, "stop") for text in texts],
        scores=[Score(reward) for reward in rewards],
        advantages=[-1.0, 1.0],
    )


WILD = st.text(st.characters() | st.sampled_from("\x00\x1b\r\n\x85\u2028\ufeff"))


@settings(deadline=None)
@given(st.lists(WILD, min_size=2, max_size=2), st.floats(allow_nan=False))
def test_wild_texts_and_extreme_floats_come_back_exactly(tmp_path_factory, texts, number):
    path = tmp_path_factory.getbasetemp() / "step-000001.jsonl.zst"
    groups = [group(texts, number), group(texts[::-1])]
    write_rollouts(path, groups, step=1)
    back = groups_of(path)
    assert back == groups
    assert repr(back) == repr(groups)  # -0.0 and 0.0 are equal, and are not the same number


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 99), st.floats(allow_nan=False)), max_size=3).map(tuple),
    st.lists(st.floats(allow_nan=False), min_size=9, max_size=9),
)
def test_credits_and_advantages_of_tokens_come_back_exactly(tmp_path_factory, credits, advantages):
    path = tmp_path_factory.getbasetemp() / "step-000002.jsonl.zst"
    one = group(["a", "b"])
    one.scores = [Score(0.5, credits=credits), Score(1.0, credits=())]
    one.advantages = [advantages, advantages[::-1]]
    write_rollouts(path, [one], step=2)
    back = groups_of(path)
    assert back == [one] and repr(back) == repr([one])


def test_no_flipped_bit_passes_for_what_was_written(tmp_path):
    path = tmp_path / "step-000001.jsonl.zst"
    groups = [group(["one two three", "three two one"])]
    write_rollouts(path, groups, step=1)
    whole = path.read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        with suppress(UserError):  # a bit of the frame's header may mean nothing
            assert groups_of(path) == groups, position


def test_rollout_lines_hold_what_the_docs_say(tmp_path):
    path = tmp_path / "step-000003.jsonl.zst"
    write_rollouts(path, [group(["a", "b"])], step=3)
    (line,) = read_jsonl_zst(path)
    assert set(line) == set(
        "step group index attempt task level temperature class action trap problem prompt_tokens "
        "completions".split()
    )
    assert line["completions"][1] == {
        "tokens": list(range(9)),
        "logprobs": [-0.25] * 9,
        "text": "b",
        "finish": "stop",
        "reward": 1.0,
        "value": 1.0,
        "exact": False,
        "advantage": 1.0,
        "parts": {},
    }
