"""Per-token advantages: by hand, on the embedded tokenizer, and as the policy gradient of every
answer of a small world.
"""

import itertools
import math
import zlib
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from losses import step_loss
from transformers import AutoTokenizer

from grpo.learn.advantages import (
    SCALES,
    advantages,
    divisors,
    token_advantages,
    token_ends,
    token_states,
)
from grpo.model.load import BUILTIN
from grpo.model.policy import Policy
from grpo.model.prompts import plain_tokens
from grpo.records import Completion, Group
from grpo.tasks.base import Problem, Score
from grpo.tasks.interleave import Interleave

LETTERS = ["a", "b", " ", "|"]  # tokens 0, 1, 2, and 3, which ends the text
TOKENIZER = AutoTokenizer.from_pretrained(BUILTIN)
END = TOKENIZER.eos_token_id


def write(tokens):
    return "".join(LETTERS[token] for token in tokens if token != 3)


def decode(tokens):
    """Decode as a policy does: the end token, where it stands last, writes nothing."""
    return Policy.decode(SimpleNamespace(tokenizer=TOKENIZER, stops=(END,)), list(tokens))


def ends_of(tokens):
    return token_ends(tokens, decode(tokens), decode, lambda token: decode([token]))


def group_of(texts, task, problem):
    """A group of completions of one letter a token, each with its end token."""
    completions = [
        Completion(tuple(map(LETTERS.index, text)), (-1.0,) * len(text), text[:-1], "stop")
        for text in texts
    ]
    scores = [
        Score(score.reward, credits=credits)
        for score, credits in zip(
            task.score(problem, [c.text for c in completions]),
            task.credits(problem, [c.text for c in completions]),
        )
    ]
    return Group(0, problem, (1,), 1.0, completions, scores=scores)


def test_a_group_by_hand():
    task = Interleave("prefix")
    problem = task.problem(["a"], ["b"])  # the target is "a b"
    group = group_of(["a b|", "a ba|", "b b|", "a b b|"], task, problem)
    rewards = [1, 1 / 2, 0, 2 / 3]
    assert group.rewards == pytest.approx(rewards)
    assert [score.credits for score in group.scores] == [
        ((1, 0.5), (3, 0.5)),
        ((1, 0.5), (4, 0.0)),
        ((1, 0.0), (3, 0.0)),
        ((1, 0.5), (3, 0.5), (5, pytest.approx(-1 / 3))),
    ]  # a word too many: 2 / 3 is left of 2 / 2
    everybody = (1 + 1 / 2 + 0 + 2 / 3) / 4
    began = (1 + 1 / 2 + 2 / 3) / 3  # after "a", after "a ", and after "a b"
    expected = [
        [1 - everybody, 1 - began, 1 - began, 1 - began],
        # "a b" was the third one's as well, until it wrote on; after "a ba" it is alone
        [1 / 2 - everybody, 1 / 2 - began, 1 / 2 - began, 1 / 2 - began, 0],
        [0 - everybody, 0, 0, 0],
        [2 / 3 - everybody, 2 / 3 - began, 2 / 3 - began, 2 / 3 - began, 0, 0],
    ]
    (made,) = token_advantages([group], write, scale="none")
    assert [pytest.approx(row, abs=1e-12) for row in expected] == made
    (scaled,) = token_advantages([group], write, scale="group")
    divisor = math.sqrt(sum((r - everybody) ** 2 for r in rewards) / 3) + 1e-4
    assert [pytest.approx([a / divisor for a in row], abs=1e-12) for row in expected] == scaled


@settings(max_examples=30)
@given(
    st.lists(st.text("ab ", max_size=6), min_size=2, max_size=6),
    st.sampled_from(SCALES),
    st.sampled_from(Interleave.rewards),
)
def test_the_first_token_has_the_outcomes_advantage_and_none_is_larger_than_rewards_differ(
    texts, scale, reward
):
    task = Interleave(reward)
    group = group_of([text + "|" for text in texts], task, task.problem(["a", "ab"], ["b"]))
    (made,) = token_advantages([group], write, scale=scale)
    (outcome,) = advantages([group.rewards], scale=scale)
    assert [row[0] for row in made] == outcome
    assert list(map(len, made)) == [len(completion.tokens) for completion in group.completions]
    most = max(group.rewards) - min(group.rewards)
    (divisor,) = divisors([group.rewards], scale=scale)
    assert all(abs(a) <= most / divisor * (1 + 1e-9) for row in made for a in row)


@given(
    st.lists(st.integers(0, len(TOKENIZER) - 1).filter(lambda token: token != END), max_size=20)
    | st.text(max_size=12).map(lambda text: plain_tokens(TOKENIZER, [text])[0])
)
@example(TOKENIZER("naïve café 猫 😀 e\u0301 “q”\u2003x", add_special_tokens=False).input_ids)
@example([0, *TOKENIZER("a", add_special_tokens=False).input_ids, 0, END])
def test_tokens_end_where_the_text_before_the_next_one_does(tokens):
    text = decode(tokens)
    ends, done = ends_of(tokens), 0
    for t, end in enumerate(ends):
        so_far = decode(tokens[: t + 1])
        if not so_far.endswith("\ufffd"):
            done = len(so_far)
            assert text.startswith(so_far)
        # What may become another character is not counted yet, whatever becomes of it.
        assert end == done
    assert len(ends) == len(tokens)


def test_a_token_after_a_part_of_a_character_is_compared_with_those_that_have_that_part():
    """ü and ö begin with the same byte: what comes after it is not drawn where "a" was drawn."""
    parts = [b"a", "ü".encode()[:1], "ü".encode()[1:], "ö".encode()[1:], b""]

    def decode(tokens):
        return b"".join(parts[token] for token in tokens).decode(errors="replace")

    rows = [(1, 2, 4), (1, 3, 4), (0, 4), (0, 4)]
    completions = [Completion(row, (-1.0,) * len(row), decode(row), "stop") for row in rows]
    assert [completion.text for completion in completions] == ["ü", "ö", "a", "a"]
    rewards = [1.0, 0.0, 0.5, 0.25]
    scores = [Score(reward, credits=((1, reward),)) for reward in rewards]
    problem = Problem("t", 1, "p", "ü", "k")
    group = Group(0, problem, (1,), 1.0, completions, scores=scores)
    (made,) = token_advantages([group], decode, scale="none")
    everybody, with_byte, wrote_a = 1.75 / 4, 1 / 2, 0.75 / 2
    assert made == [
        [1 - everybody, 1 - with_byte, 0],
        [-everybody, -with_byte, 0],
        [0.5 - everybody, 0.5 - wrote_a],
        [0.25 - everybody, 0.25 - wrote_a],
    ]


class DropsFirstSpace:
    """Decodes as tokenizers of the SentencePiece kind do: the space that stands first
    is dropped.
    """

    words = [" the", " owl", "s", " saw", "\ufffd"]

    def __call__(self, tokens):
        return "".join(self.words[token] for token in tokens).removeprefix(" ")


def test_a_tokenizer_that_drops_the_first_space():
    drops = DropsFirstSpace()
    ends = token_ends([0, 1, 2, 3], "the owls saw", drops, lambda token: drops([token]))
    assert ends == [3, 7, 8, 12]


# The world: every text of at most 4 letters; the logits of a token depend on the two before it.


def answers(length):
    texts = ["".join(each) for n in range(length) for each in itertools.product("ab ", repeat=n)]
    longest = map("".join, itertools.product("ab ", repeat=length))
    return [text + "|" for text in texts] + list(longest)


@pytest.mark.parametrize("kind", ["dapo", "cispo"])
@pytest.mark.parametrize("reward", Interleave.rewards)
def test_the_expected_gradient_is_that_of_the_reward(reward, kind):
    """REINFORCE by hand: E[sum_t grad logp_t (R_t - b(s_t))] = grad E[reward], whatever b is, if
    the state depends on no later token.
    """
    task, generator = Interleave(reward), torch.Generator().manual_seed(0)
    problem = task.problem(["a"], ["b"])
    tokens = [[LETTERS.index(letter) for letter in text] for text in answers(5)]
    T = max(map(len, tokens))

    logits = torch.randn(5, 5, 4, dtype=torch.float64, generator=generator).requires_grad_()
    rows = []
    for row in tokens:
        past = [4, 4, *row]
        logp_V = [logits[past[t], past[t + 1]].log_softmax(-1) for t in range(len(row))]
        rows.append(torch.stack([each[token] for each, token in zip(logp_V, row)]))
    logp_RT = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask_RT = torch.arange(T) < torch.tensor([len(row) for row in tokens])[:, None]
    probability_R = logp_RT.sum(1).exp()
    assert probability_R.sum().item() == pytest.approx(1)  # these are all answers that there are

    written = [write(row) for row in tokens]
    rewards = [score.reward for score in task.score(problem, written)]
    advantages_RT = torch.zeros(logp_RT.shape, dtype=torch.float64)
    for r, (row, text, credits) in enumerate(zip(tokens, written, task.credits(problem, written))):
        ends = token_ends(row, text, write, lambda token: write([token]))
        states = token_states(Completion(tuple(row), (), text, "stop"), ends, credits)
        # The baseline is any number, the same in the same state.
        baseline = [zlib.crc32(repr(state).encode()) / 2**32 for state in states]
        values = [rewards[r] - state[1] - b for state, b in zip(states, baseline)]
        advantages_RT[r, : len(row)] = torch.tensor(values, dtype=torch.float64)

    given = logp_RT, logp_RT.detach(), advantages_RT, mask_RT, probability_R.detach()
    loss, _ = step_loss(kind, *given, clip_low=0.2, clip_high=0.2)
    (ours,) = torch.autograd.grad(-loss, logits, retain_graph=True)
    mean = (probability_R * torch.tensor(rewards, dtype=torch.float64)).sum()
    (expected,) = torch.autograd.grad(mean, logits)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)
