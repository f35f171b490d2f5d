"""Drafts save passes and change no sample; plans, their length, and the figures about them."""

import copy

import pytest
import torch
from tiny_models import FAMILIES, VOCABULARY, make_tiny_model, rollout
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo.model.load import BUILTIN, load_policy
from grpo.rollout.cuda_decoder import CudaDecoder
from grpo.rollout.eager_decoder import EagerDecoder
from grpo.rollout.sampling import sample_key, uniform
from grpo.rollout.speculative import (
    LENGTHS,
    NO_TOKEN,
    AcceptanceModel,
    DraftPlans,
    Observation,
    RowRecord,
)
from tasks.base import UserError, problem_at
from tasks.drafts import Guess
from tasks.interleave import Interleave


def guess_of(text: str, spoil: int):
    """A guess at `text` that, wherever it is asked, is wrong in every `spoil`-th character."""

    def guess(written):
        rest = text[len(written) :] if text.startswith(written) else text[len(written) // 2 :]
        return "".join(
            "#" if (len(written) + i) % spoil == spoil - 1 else c for i, c in enumerate(rest)
        )

    return guess


def tokens_of(groups):
    return [[answer.tokens for answer in group] for group in groups]


def first_difference(ours, theirs):
    """Return the place of the first token that differs, None where none does."""
    return next(
        (t for t, pair in enumerate(zip(ours.tokens, theirs.tokens)) if pair[0] != pair[1]), None
    )


@torch.no_grad()
def border_distance(policy, prompt, sample, ours, theirs, t, temperature):
    """Return how far the uniform number of place `t` lies from the border between the two tokens
    drawn there, in probability.
    """
    model = copy.deepcopy(policy.model)
    model.set_attn_implementation("sdpa")
    logits = model(
        input_ids=torch.tensor([[*policy.encode(prompt), *ours.tokens[:t]]]), use_cache=False
    ).logits[0, -1]
    cdf = (logits.double() / temperature).softmax(-1).cumsum(-1)
    low, high = sorted((ours.tokens[t], theirs.tokens[t]))
    u = uniform(torch.tensor(sample_key(0, 1, prompt, sample, 0)), t).item()
    return max(abs(u - cdf[low].item()), abs(u - cdf[high - 1].item()))


@pytest.mark.parametrize(
    "family, temperature, tail",
    [
        ("builtin", 0.7, False),
        ("builtin", 1.0, True),
        ("qwen3", 0.15, False),
        ("gpt2", 0.15, True),
        ("llama-3 rotary scaling", 0.15, False),
    ],
)
def test_drafted_is_undrafted_token_for_token(tmp_path, family, temperature, tail):
    # The same wherever the logits are: their last bits depend on how many tokens a product has,
    # and a uniform number that lies as near to the border between two tokens as these are wide
    # makes another one. That is the tail of the distribution, thousands of tokens of 1e-7 each, so
    # random models are cold here, and only where so rare a token was seen to be drawn (`tail`) may
    # one differ. All cases together: over 20,000 tokens.
    if family != "builtin":
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(FAMILIES[family]()).save_pretrained(tmp_path)
        AutoTokenizer.from_pretrained(BUILTIN).save_pretrained(tmp_path)
    policy = load_policy("builtin" if family == "builtin" else str(tmp_path), device="cpu")
    problems = [
        problem_at(Interleave(), level=10, split="train", seed=0, index=i) for i in range(9)
    ]
    settings = dict(
        prompts=[problem.prompt for problem in problems],
        samples=8,
        budget=64,
        temperature=temperature,
    )
    _, plain = rollout(policy, **settings)
    compared, others, texts = 0, [], [group[0].text for group in plain]
    assert len({answer.tokens for group in plain for answer in group}) > 32
    for length in ("1", "7", "auto"):
        drafting = AcceptanceModel(length)
        guesses = (
            [Interleave().draft(problem) for problem in problems]
            if family == "builtin"
            else [guess_of(text, 9) for text in texts]
        )
        _, drafted = rollout(policy, guesses=guesses, drafting=drafting, **settings)
        for problem, group, expected in zip(problems, drafted, plain, strict=True):
            for sample, (ours, theirs) in enumerate(zip(group, expected, strict=True)):
                t = first_difference(ours, theirs)
                if t is not None:
                    others.append(
                        border_distance(
                            policy, problem.prompt, sample, ours, theirs, t, temperature
                        )
                    )
                assert t is not None or len(ours.tokens) == len(theirs.tokens)
                torch.testing.assert_close(
                    torch.tensor(ours.logprobs[:t]),
                    torch.tensor(theirs.logprobs[:t]),
                    atol=5e-4,
                    rtol=0,
                )
                compared += len(ours.tokens[:t])
    assert (
        compared > 4000
        and max(others, default=0) < 1e-6
        and (len(others) <= compared / 500 if tail else not others)
    )


def test_right_drafts_save_passes_and_early_ends_are_seen(tmp_path):
    policy = load_policy(str(make_tiny_model(tmp_path)), device="cpu")
    policy.stops = tuple(range(0, VOCABULARY, 40))
    _, plain = rollout(policy, samples=1, temperature=0.0)
    drafting = AcceptanceModel("7")

    class Known(DraftPlans):  # texts of random models do not survive decoding and encoding
        def _plan(self, rows, tokens, written, k):
            for row, n in zip(rows.tolist(), written.tolist()):
                answer = plain[int(self.guesses[row](""))][0]
                self._set([row], n, answer.tokens[n:], True)

    import grpo.rollout.generate as engine

    kept, engine.DraftPlans = engine.DraftPlans, Known
    try:
        _, drafted = rollout(
            policy,
            samples=1,
            temperature=0.0,
            guesses=[lambda text, i=i: str(i) for i in range(3)],
            drafting=drafting,
        )
    finally:
        engine.DraftPlans = kept
    assert tokens_of(drafted) == tokens_of(plain)
    assert drafting.rejected == 1.0 and drafting.metrics()["draft/tokens_per_forward"] > 3


def test_what_a_pass_costs_is_counted_by_distinct_rows(tiny_policy, monkeypatch):
    asked = []
    monkeypatch.setattr(
        AcceptanceModel,
        "length",
        lambda self, record, fixed_cost_tokens, plan_cost_tokens, lengths: (
            asked.append((record.rows, lengths[-1])) or 0
        ),
    )
    _, groups = rollout(
        tiny_policy,
        samples=8,
        temperature=0.0,
        budget=70,
        guesses=[str] * 3,
        drafting=AcceptanceModel("auto"),
    )
    assert {rows for rows, _ in asked} <= {1, 2, 3} and asked[0][0] == 3
    assert {longest for _, longest in asked} == {63}  # of 70 tokens
    # four completions in one row wrote eight tokens each in a pass over 1 + 7 tokens; without
    # drafts that were eight passes over one
    drafting = AcceptanceModel("auto")
    drafting.observe(Observation(7, 1, 48, 28, 0, completions=4, tokens=32, seconds=1.0))
    assert drafting.metrics() == {
        "draft/acceptance": drafting.acceptance,
        "draft/tokens_per_forward": 8,
        "time/saved_by_drafts": 8 * 49 / 56 - 1,
    }


def test_plans_by_hand():
    class Words:  # a tokenizer of letters; 9 ends
        stops, end, tokenizer = (9,), 9, None

        def decode(self, tokens):
            return "".join("abcdefgh"[token] for token in tokens)

    policy = Words()
    policy.tokenizer = type(
        "T",
        (),
        {
            "__call__": lambda self, texts, **_: type(
                "E", (), {"input_ids": [["abcdefgh..\n".index(c) for c in text] for text in texts]}
            )(),
        },
    )()
    plans = DraftPlans(
        policy, [lambda text: "abcd"[len(text) :], lambda text: "hg"[len(text) :]], 38
    )
    rows, live, nothing = (
        torch.arange(2),
        torch.tensor([True, True]),
        torch.zeros(2, dtype=torch.long),
    )
    written = torch.zeros(2, 38, dtype=torch.long)
    assert plans.offer(rows, live, written, nothing, 3).tolist() == [[0, 1, 2], [7, 6, 9]]
    assert plans.offer(rows, live, written, nothing, 0).shape == (2, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "_plan", None)  # a plan up to the end of the text lasts
        assert plans.offer(rows, live, written, torch.tensor([2, 1]), 4).tolist() == [
            [2, 3, 9, NO_TOKEN],
            [6, 9, NO_TOKEN, NO_TOKEN],
        ]
    # row 0 writes a, then f for b; row 1 writes h, g, and ends
    chosen = torch.tensor([[0, 5, 0], [7, 6, 9]])
    assert plans.observe(rows, nothing, chosen, torch.tensor([2, 3])) == (1 + 3, 1)
    assert plans.is_stale.tolist() == [True, False]
    written[0, :2] = chosen[0, :2]
    assert plans.observe(rows, torch.tensor([2, 3]), chosen, torch.tensor([1, 0])) == (
        0,
        0,
    )  # a stale plan is no evidence
    assert plans.offer(rows, torch.tensor([True, False]), written, torch.tensor([2, 3]), 3)[
        0
    ].tolist() == [2, 3, 9]  # "cd", aimed anew
    assert plans.is_stale.tolist() == [False, False] and plans.planned[0, 5] == NO_TOKEN


def test_a_long_guess_is_planned_in_parts_and_its_seams_are_no_slips():
    policy = load_policy("builtin", device="cpu")
    words = " ".join(["the sea and the sea"] * 60)
    target = policy.tokenizer(words, add_special_tokens=False).input_ids
    assert len(target) == 5 * 60  # a token a word
    plans = DraftPlans(policy, [lambda text: words[len(text.lstrip()) :]], 2032)
    assert 0 < plans.until[0] < len(target)
    rows, live, tokens, place = (
        torch.tensor([0]),
        torch.tensor([True]),
        torch.zeros(1, 2000, dtype=torch.long),
        0,
    )
    tokens[0, : len(target)] = torch.tensor(target)
    while place + 8 <= len(target):
        k = 7 if place % 3 else 0
        written = torch.tensor([place])
        assert plans.offer(rows, live, tokens, written, k)[0].tolist() == target[place : place + k]
        assert (
            plans.observe(rows, written, tokens[:, place : place + k + 1], torch.tensor([k + 1]))[1]
            == 0
        )
        place += k + 1
    assert not plans.is_stale.any() and plans.until[0] > place


@pytest.mark.parametrize(
    "text",
    ["na\u00efve \u65e5\u672c\u8a9e \U0001f600 caf\u00e9 owl", "\ufffd a\ufffd\ufffd b \u00e9"],
)
def test_texts_are_decoded_as_they_grow(text):
    policy = load_policy("builtin", device="cpu")
    ids = torch.tensor(policy.tokenizer(text, add_special_tokens=False).input_ids)
    ids = torch.cat([ids, ids[-3:], ids[:-1]])  # bytes of characters out of place
    assert (
        sum(policy.decode([token]).endswith("\ufffd") for token in ids.tolist()) > 4
    )  # characters in parts
    plans, decoded = DraftPlans(policy, [str, str], 100), []
    policy.decode, decode = (
        lambda tokens: decoded.append(len(tokens)) or decode(tokens),
        policy.decode,
    )
    assert [plans._text(0, ids[:n]) for n in range(1, 1 + len(ids))] == [
        decode(ids[:n].tolist()) for n in range(1, 1 + len(ids))
    ]
    assert [plans._text(1, ids[:n]) for n in (2, 9, len(ids))] == [
        decode(ids[:n].tolist()) for n in (2, 9, len(ids))
    ]
    plans._text(0, torch.cat([ids, torch.tensor(policy.tokenizer(" owl").input_ids)]))
    decoded.clear()
    plans._text(0, torch.cat([ids, torch.tensor(policy.tokenizer(" owl sea").input_ids)]))
    assert max(decoded) < 6  # the new word alone, behind a token that is known


def test_a_space_that_a_tokenizer_drops_where_it_stands_first_is_kept():
    policy = load_policy("builtin", device="cpu")
    policy.decode = lambda tokens: "".join([" owl", " sea"][token] for token in tokens).lstrip()
    plans, ids = DraftPlans(policy, [str], 100), torch.tensor([0, 1, 1])
    assert [plans._text(0, ids[:n]) for n in (1, 2, 3)] == ["owl", "owl sea", "owl sea sea"]


def test_words_are_tokenized_once_and_as_they_stand_in_a_text():
    policy = load_policy("builtin", device="cpu")
    plans, asked = DraftPlans(policy, [str], 100), []
    encode = plans._encode
    plans._encode = lambda texts: asked.append(texts) or encode(texts)
    texts = ["l saw the sea,  and 12 owls.\n Then", " the sea, and na\u00efve owls", ""]
    whole = [encode(["\n" + text])[0][len(encode(["\n"])[0]) :] for text in texts]
    assert plans._tokens(texts) == whole and plans._tokens(texts[::-1]) == whole[::-1]
    assert len(asked) == 1 and len(set(asked[0])) == len(asked[0])


def test_every_row_asks_a_guess_of_its_own():
    policy, guess = load_policy("builtin", device="cpu"), Guess(["the", "owl"], ["a", "sea"])
    plans = DraftPlans(policy, [guess, guess], 64)
    assert plans.guesses[0] is not plans.guesses[1] and torch.equal(
        plans.planned[0], plans.planned[1]
    )


def test_rows_that_have_written_the_same_are_aimed_once():
    policy, asked = load_policy("builtin", device="cpu"), []
    words = "the sea and the owl"
    one, other = (
        lambda text, name=name: asked.append((name, text.strip())) or words[len(text.strip()) :]
        for name in "ab"
    )
    plans = DraftPlans(policy, [one, one, one, one, other], 64)
    assert asked == [("a", ""), ("b", "")]
    ids = policy.tokenizer([words, "the cat"], add_special_tokens=False).input_ids
    tokens, written, rows = (
        torch.zeros(5, 64, dtype=torch.long),
        torch.tensor([1, 1, 2, 2, 1]),
        torch.arange(5),
    )
    for row, source in enumerate((0, 0, 0, 1, 0)):
        tokens[row, : written[row]] = torch.tensor(ids[source][: written[row]])
    plans.is_stale[:] = True
    encoded, encode = [], plans._encode
    plans._encode = lambda texts: encoded.append(texts) or encode(texts)
    asked.clear()
    some = torch.tensor([0, 1, 2, 4])
    offered = plans.offer(some, some >= 0, tokens, written[some], 3)
    assert sorted(asked) == [("a", "the"), ("a", "the sea"), ("b", "the")] and len(encoded) == 1
    assert offered.tolist() == [ids[0][1:4], ids[0][1:4], ids[0][2:5], ids[0][1:4]]
    assert plans.is_stale.tolist() == [False, False, False, True, False]
    asked.clear()
    plans.offer(rows, rows >= 0, tokens, written, 3)
    assert asked == [("a", "the cat")]


def test_a_pass_has_only_as_many_tokens_as_the_decoder_has_room_for(tiny_policy, monkeypatch):
    decoder, longest = CudaDecoder.__new__(CudaDecoder), []
    for rows in (1, 64, 65, 1024, 9000):  # 65 are computed as 96
        decoder.written = torch.zeros(rows)
        longest.append(decoder.lengths[-1])
    assert longest == [127, 127, 63, 7, 0]
    widths, step = [], EagerDecoder.step
    monkeypatch.setattr(EagerDecoder, "lengths", (0, 1, 3))
    monkeypatch.setattr(
        EagerDecoder,
        "step",
        lambda self, drafts: widths.append(drafts.shape[1]) or step(self, drafts),
    )
    rollout(tiny_policy, guesses=[str] * 3, drafting=AcceptanceModel("7"))
    assert set(widths[1:]) == {3}


def test_lengths_follow_acceptance_and_batch():
    drafting = AcceptanceModel("auto")
    lengths = {}
    for acceptance in (0.05, 0.5, 0.9, 0.99):
        drafting.matched, drafting.rejected = 1000 * acceptance, 1000 * (1 - acceptance)
        lengths[acceptance] = [drafting.length(RowRecord(rows), 64, 3) for rows in (1, 16, 256)]
        assert lengths[acceptance] == sorted(
            lengths[acceptance], reverse=True
        )  # the more rows, the shorter
    assert lengths[0.05] == [0, 0, 0] and lengths[0.9][2] == 0
    assert drafting.length(RowRecord(16, matched=10, rejected=90), 64, 3) < drafting.length(
        RowRecord(16), 64, 3
    )  # the rows' own record
    assert drafting.length(RowRecord(16), 64, 400) < drafting.length(
        RowRecord(16), 64, 3
    )  # aiming anew is dear
    assert (
        all(a <= b for a, b in zip(lengths[0.5], lengths[0.9])) and lengths[0.99][0] == LENGTHS[-1]
    )


def test_a_fixed_length_off_and_nonsense():
    assert (
        AcceptanceModel("off").length(RowRecord(1), 64, 3) == 0
        and AcceptanceModel("5").length(RowRecord(1000), 64, 3) == 5
    )
    assert (
        AcceptanceModel("127").length(RowRecord(1), 64, 3) == 127
        and AcceptanceModel("127").length(RowRecord(1000), 64, 3, (0, 1, 3, 7)) == 7
    )  # as far as there is room
    for mode in ("on", "-1", "128", "1.5"):
        with pytest.raises(
            UserError, match=f"^draft {mode}: give auto, off, or a number of tokens up to 127"
        ):
            AcceptanceModel(mode)


def test_evidence_fades_and_is_kept_in_checkpoints():
    drafting = AcceptanceModel("auto")
    drafting.observe(Observation(3, 3, 64, 12, 4, completions=2, tokens=8, seconds=0.5))
    assert drafting.metrics()["draft/tokens_per_forward"] == 4
    other = AcceptanceModel("auto")
    other.load_state_dict(drafting.state_dict())
    assert other.acceptance == drafting.acceptance
    before = drafting.matched
    drafting.begin()
    assert drafting.matched == before / 2 and drafting.metrics() == {}
