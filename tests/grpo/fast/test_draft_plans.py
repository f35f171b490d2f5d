"""The plans of speculative decoding: which tokens the guesses become."""

import pytest
import torch

from grpo.fast.speculative import NO_TOKEN, DraftPlans, DraftRequest
from grpo.model.load import load_policy
from tasks.drafts import Guess


def offer(plans, rows, live, tokens, written, k):
    """The drafts of k tokens, once the plans that they need are made."""
    request = DraftRequest(rows, written, live, length=k, needed=k)
    plans.make(request, tokens)
    return plans.drafts(request)


def test_plans_by_hand():
    class Words:  # a tokenizer of letters; 9 ends
        stops, end, tokenizer, vocabulary = (9,), 9, None, 11

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
    assert offer(plans, rows, live, written, nothing, 3).tolist() == [[0, 1, 2], [7, 6, 9]]
    assert offer(plans, rows, live, written, nothing, 0).shape == (2, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "_plan", None)  # a plan up to the end of the text lasts
        assert offer(plans, rows, live, written, torch.tensor([2, 1]), 4).tolist() == [
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
    assert offer(plans, rows, torch.tensor([True, False]), written, torch.tensor([2, 3]), 3)[
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
        assert offer(plans, rows, live, tokens, written, k)[0].tolist() == target[place : place + k]
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
    offered = offer(plans, some, some >= 0, tokens, written[some], 3)
    assert sorted(asked) == [("a", "the"), ("a", "the sea"), ("b", "the")] and len(encoded) == 1
    assert offered.tolist() == [ids[0][1:4], ids[0][1:4], ids[0][2:5], ids[0][1:4]]
    assert plans.is_stale.tolist() == [False, False, False, True, False]
    asked.clear()
    offer(plans, rows, rows >= 0, tokens, written, 3)
    assert asked == [("a", "the cat")]


def test_a_row_whose_plan_is_not_made_yet_has_no_draft():
    policy = load_policy("builtin", device="cpu")
    words = "the sea and the owl"
    plans = DraftPlans(policy, [lambda text: words[len(text) :]] * 2, 64)
    rows, nothing = torch.arange(2), torch.zeros(2, 64, dtype=torch.long)
    plans.is_stale[1] = True

    request = DraftRequest(rows, nothing[:, 0], rows >= 0, length=3, needed=3)
    first, second = plans.drafts(request).tolist()
    assert policy.decode(first).strip() == "the sea and" and second == [NO_TOKEN] * 3

    plans.make(request, nothing)
    assert policy.decode(plans.drafts(request)[1].tolist()).strip() == "the sea and"
    assert not plans.is_stale.any()
