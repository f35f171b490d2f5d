"""Speculative decoding: drafts change no sample, and how long they are."""

import copy
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from tiny_models import FAMILIES, VOCABULARY, make_tiny_model, rollout, write_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo.data.errors import UserError
from grpo.fast import decoder as fast_decoder
from grpo.fast import speculative
from grpo.fast.decoder import CudaRows, EagerRows, pass_costs
from grpo.fast.speculative import LENGTHS, NO_TOKEN, Costs, DraftPlans, draft_length
from grpo.model.load import BUILTIN, load_policy
from grpo.model.policy import Encodings, _word_tokens
from grpo.model.prompts import plain_tokens
from grpo.rollout.generate import Drafting, RolloutRequest, generate
from grpo.rollout.sampling import sample_key, uniform
from grpo.tasks.interleave import Interleave
from grpo.tasks.supply import problem_at


@pytest.fixture(scope="module")
def builtin():
    """The embedded model, which the tests of plans read."""
    return load_policy("builtin", device="cpu")


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
    [("builtin", 0.7, False), ("qwen3", 0.15, False), ("gpt2", 0.15, True)],
)
def test_drafted_is_undrafted_token_for_token(tmp_path, family, temperature, tail):
    # The same wherever the logits are: their last bits depend on how many tokens a product has,
    # and a uniform number that lies as near to the border between two tokens as these are wide
    # makes another one. That is the tail of the distribution, thousands of tokens of 1e-7 each, so
    # random models are cold here, and only where so rare a token was seen to be drawn (`tail`) may
    # one differ.
    model = family if family == "builtin" else write_model(FAMILIES[family](), tmp_path)
    policy = load_policy(model, device="cpu")
    task = Interleave()
    problems = [problem_at(task, level=10, split="train", seed=0, index=i) for i in range(4)]
    prompts = [problem.prompt for problem in problems]
    settings = dict(prompts=prompts, samples=8, budget=64, temperature=temperature)
    _, plain = rollout(policy, **settings)
    assert len({answer.tokens for group in plain for answer in group}) > 12
    guesses = [guess_of(group[0].text, 9) for group in plain]
    if family == "builtin":
        guesses = [task.draft(problem) for problem in problems]

    compared, others = 0, []
    for length in (1, None):
        _, drafted = rollout(policy, guesses=guesses, drafting=Drafting(length), **settings)
        for prompt, group, expected in zip(prompts, drafted, plain, strict=True):
            for sample, (ours, theirs) in enumerate(zip(group, expected, strict=True)):
                t = first_difference(ours, theirs)
                if t is not None:
                    place = prompt, sample, ours, theirs, t
                    others.append(border_distance(policy, *place, temperature))
                assert t is not None or len(ours.tokens) == len(theirs.tokens)
                assert ours.logprobs[:t] == pytest.approx(theirs.logprobs[:t], abs=5e-4, rel=0)
                compared += len(ours.tokens[:t])
    assert compared > 1000 and max(others, default=0) < 1e-6
    assert len(others) <= (compared / 500 if tail else 0)


def test_right_drafts_save_passes_and_early_ends_are_seen(tmp_path, monkeypatch):
    policy = load_policy(str(make_tiny_model(tmp_path)), device="cpu")
    policy.stops = tuple(range(0, VOCABULARY, 40))
    _, plain = rollout(policy, samples=1, temperature=0.0)
    drafting = Drafting(7)

    class Known(DraftPlans):  # texts of random models do not survive decoding and encoding
        def _plan(self, rows, tokens, written, k):
            for row, n in zip(rows.tolist(), written.tolist()):
                answer = plain[int(self.guesses[row](""))][0]
                self._set([row], n, answer.tokens[n:], True)

    monkeypatch.setattr(fast_decoder, "DraftPlans", Known)
    guesses = [lambda text, i=i: str(i) for i in range(3)]
    _, drafted = rollout(policy, samples=1, temperature=0.0, guesses=guesses, drafting=drafting)
    assert tokens_of(drafted) == tokens_of(plain)
    assert drafting.rejected == 1.0 and drafting.metrics()["draft/tokens_per_forward"] > 3


@pytest.mark.parametrize(
    "guess, error", [(lambda text: 1 / 0, "ZeroDivision"), (lambda text: None, "Type")]
)
def test_a_guesser_that_fails_is_named(tiny_policy, guess, error):
    with pytest.raises(UserError, match=f"the guesser of the task's draft.*{error}Error"):
        rollout(tiny_policy, guesses=[guess] * 3, drafting=Drafting())


def test_what_a_pass_costs_is_counted_by_distinct_rows(tiny_policy, monkeypatch):
    asked, settings = [], dict(samples=8, temperature=0.0, budget=70)

    def draft_length(drafting, costs, rows, *others):
        asked.append((rows, others[-1][-1]))
        return 0

    monkeypatch.setattr(speculative, "draft_length", draft_length)
    rollout(tiny_policy, guesses=[str] * 3, drafting=Drafting(), **settings)
    assert {rows for rows, _ in asked} <= {1, 2, 3} and asked[0][0] == 3
    assert {longest for _, longest in asked} == {63}  # of 70 tokens
    # four completions in one row wrote eight tokens each in a pass over 1 + 7 tokens; without
    # drafts that were eight passes over one
    drafting = Drafting()
    drafting.observe(draft_length=7, matched=28, rejected=0, completions=4, tokens=32)
    metrics = {"draft/acceptance": drafting.acceptance, "draft/tokens_per_forward": 8}
    assert drafting.metrics() == metrics


def test_a_pass_has_only_as_many_tokens_as_the_decoder_has_room_for(tiny_policy, monkeypatch):
    decoder, longest = CudaRows.__new__(CudaRows), []
    for rows in (1, 64, 65, 1024, 9000):  # 65 are computed as 96
        decoder.written = torch.zeros(rows)
        longest.append(decoder.lengths[-1])
    assert longest == [127, 127, 63, 7, 0]
    widths, start = [], EagerRows.start
    monkeypatch.setattr(EagerRows, "lengths", (0, 1, 3))

    def measured(self, drafts):
        widths.append(drafts.shape[1])
        start(self, drafts)

    monkeypatch.setattr(EagerRows, "start", measured)
    rollout(tiny_policy, guesses=[str] * 3, drafting=Drafting(7))
    assert set(widths[1:]) == {3}


class Scripted:
    """A decoder whose rows write given tokens, whatever is drafted."""

    lengths = (0, 3, 7, 15)

    def __init__(self, texts, costs):
        self.texts, self.places = texts, [0] * len(texts)
        self.costs, self.runs = costs, False
        self.passes = 0

    @property
    def live(self):
        return torch.tensor([place < len(text) for text, place in zip(self.texts, self.places)])

    def start(self, drafts):
        self.drafts, self.runs = drafts, True

    def finish(self):
        """Write what agrees with the draft and one token more, as many as 8 without drafts."""
        drafts, self.runs = self.drafts, False
        k = drafts.shape[1]
        width = k + 1 if k else (8 if self.passes else 1)
        self.passes += 1
        rows = []
        for row, (text, place) in enumerate(zip(self.texts, self.places)):
            rest = text[place : place + width]
            agreed = [drafted == token for drafted, token in zip(drafts[row].tolist(), rest)]
            rows.append(rest[: agreed.index(False) + 1] if False in agreed else rest)
            self.places[row] += len(rows[-1])
        chosen = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        return chosen, torch.zeros(chosen.shape), torch.tensor(list(map(len, rows)))

    def retire(self):
        return torch.arange(len(self.texts)) if self.live.any() else torch.arange(0)


def test_rows_are_planned_again_while_the_next_pass_runs(builtin, monkeypatch):
    """Each row writes a wrong word, is planned again during the next pass, and drafted then."""
    words = ["the", "sea", "and", "the", "owl"] * 20
    written = [*words[:40], "cat", *words[40:]]
    text = builtin.tokenizer(" ".join(written), add_special_tokens=False).input_ids + [builtin.end]

    decoder = Scripted([text] * 4, Costs(8, plan=1, meanwhile=True))
    planned_in, plan = [], DraftPlans._plan
    monkeypatch.setattr(builtin.decoder, "rows", lambda *_: decoder)
    monkeypatch.setattr(
        DraftPlans, "_plan", lambda *args: planned_in.append(decoder.runs) or plan(*args)
    )

    def guess(so_far):
        rest = words[len(so_far.split()) - ("cat" in so_far) :]
        return " " * bool(so_far) + " ".join(rest)

    request = RolloutRequest(
        [(1, 2)], [[1, 2, 3, 4]], 1.0, [len(text)], None, [guess], Drafting(15)
    )
    (answers,) = generate(builtin, request)
    assert [list(answer.tokens) for answer in answers] == [text] * 4
    assert planned_in[0] is False and planned_in[-1] is True
    assert decoder.passes < 16


@pytest.mark.parametrize("meanwhile", [False, True])
def test_a_long_guess_is_drafted_in_every_pass(builtin, monkeypatch, meanwhile):
    words = " the sea and the owl" * 100
    text = builtin.tokenizer(words, add_special_tokens=False).input_ids + [builtin.end]
    decoder = Scripted([text], Costs(8, plan=1, meanwhile=meanwhile))
    monkeypatch.setattr(builtin.decoder, "rows", lambda *_: decoder)

    def guess(written):
        return words[1 + len(written.lstrip()) :] if written.strip() else words

    request = RolloutRequest([(1, 2)], [[1]], 1.0, [len(text)], None, [guess], Drafting(15))
    generate(builtin, request)
    assert decoder.passes == 1 + math.ceil((len(text) - 1) / 16)


@pytest.mark.parametrize(
    "parameters, layers, fixed, plan",
    [
        (134_515_008, 30, 630, 150),  # SmolLM2-135M: launching kernels, 1.26 ms of 2 us
        (3_212_749_824, 28, 213, 30),  # Llama-3.2-3B: reading 6.4 GB at 3 TB/s, 2.1 ms of 10 us
    ],
)
def test_what_passes_and_plans_cost_by_the_size_of_the_model(parameters, layers, fixed, plan):
    weights = torch.empty(parameters, dtype=torch.bfloat16, device="meta")
    policy = SimpleNamespace(
        causal=SimpleNamespace(parameters=lambda: [weights]),
        forward=SimpleNamespace(llama=SimpleNamespace(blocks=range(layers))),
    )
    costs = pass_costs(policy)
    assert costs.meanwhile
    assert costs.fixed == pytest.approx(fixed, rel=0.01)
    assert costs.plan == pytest.approx(plan, rel=0.01)


def test_plans_that_are_made_meanwhile_cost_no_time_unless_they_take_longer_than_the_pass():
    drafting = Drafting()
    drafting.matched, drafting.rejected = 985.0, 15.0

    def length(plan, meanwhile):
        return draft_length(drafting, Costs(630, plan, meanwhile), 256)

    assert length(150, True) > length(150, False) == 0
    assert length(0.0, True) <= length(0.0, False)  # the pass without a draft is lost
    assert length(5000, True) == 0


def test_lengths_follow_acceptance_and_batch():
    drafting = Drafting()
    costs, lengths = Costs(64, 3), {}
    for acceptance in (0.05, 0.5, 0.9, 0.99):
        drafting.matched, drafting.rejected = 1000 * acceptance, 1000 * (1 - acceptance)
        lengths[acceptance] = [draft_length(drafting, costs, rows) for rows in (1, 16, 256)]
        # The more rows, the shorter.
        assert lengths[acceptance] == sorted(lengths[acceptance], reverse=True)
    assert lengths[0.05] == [0, 0, 0] and lengths[0.9][2] == 0
    usual = draft_length(drafting, costs, 16)
    assert draft_length(drafting, costs, 16, 10, 90) < usual  # the rows' own record
    assert draft_length(drafting, Costs(64, 400), 16) < usual  # replanning is expensive
    assert all(a <= b for a, b in zip(lengths[0.5], lengths[0.9]))
    assert lengths[0.99][0] == LENGTHS[-1]


def test_a_fixed_length_and_off():
    costs = Costs(64, 3)
    assert draft_length(Drafting(0), costs, 1) == 0
    assert draft_length(Drafting(5), costs, 1000) == 5
    assert draft_length(Drafting(127), costs, 1) == 127
    assert draft_length(Drafting(127), costs, 1000, lengths=(0, 1, 3, 7)) == 7  # the room


def test_evidence_fades_and_is_kept_in_checkpoints():
    drafting = Drafting()
    drafting.observe(draft_length=3, matched=12, rejected=4, completions=2, tokens=8)
    assert drafting.metrics()["draft/tokens_per_forward"] == 4
    other = Drafting()
    other.load_state_dict(drafting.state_dict())
    assert other.acceptance == drafting.acceptance
    before = drafting.matched
    drafting.begin()
    assert drafting.matched == before / 2 and drafting.metrics() == {}


def test_a_guess_of_tokens_that_the_model_lacks_is_rejected(tmp_path):
    """Some tokenizers have more tokens than their model."""
    tokenizer = AutoTokenizer.from_pretrained(BUILTIN)
    texts = [tokenizer.decode([token]) for token in range(VOCABULARY)]
    lacking, text = max((max(tokenizer.encode(text), default=0), text) for text in texts)
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path))
    model.resize_token_embeddings(lacking)
    model.save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path), device="cpu")
    _, plain = rollout(policy)
    guesses = [lambda written: text] * 3
    _, drafted = rollout(policy, guesses=guesses, drafting=Drafting(7))
    assert tokens_of(drafted) == tokens_of(plain)


# Plans: which tokens the guesses become


def offer(plans, rows, live, tokens, written, k):
    """The drafts of k tokens, once the plans that they need are made."""
    plans.make(rows, written, live, k, tokens)
    return plans.drafts(rows, written, k)


def test_plans_by_hand():
    def tokenizer(texts, **_):  # of letters; 9 ends
        ids = [["abcdefgh..\n".index(letter) for letter in text] for text in texts]
        return SimpleNamespace(input_ids=ids)

    policy = SimpleNamespace(stops=(9,), end=9, tokenizer=tokenizer, vocabulary=11)
    policy.decode = lambda tokens: "".join("abcdefgh"[token] for token in tokens)
    policy.words = lambda words: tokenizer(words).input_ids
    guesses = [lambda text: "abcd"[len(text) :], lambda text: "hg"[len(text) :]]
    plans = DraftPlans(policy, guesses, 38)
    rows, live, nothing = torch.arange(2), torch.tensor([True, True]), torch.tensor([0, 0])
    written = torch.zeros(2, 38, dtype=torch.long)
    assert offer(plans, rows, live, written, nothing, 3).tolist() == [[0, 1, 2], [7, 6, 9]]
    assert offer(plans, rows, live, written, nothing, 0).shape == (2, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "_plan", None)  # a plan up to the end of the text lasts
        lasting = offer(plans, rows, live, written, torch.tensor([2, 1]), 4).tolist()
        assert lasting == [[2, 3, 9, NO_TOKEN], [6, 9, NO_TOKEN, NO_TOKEN]]
    # row 0 writes a, then f for b; row 1 writes h, g, and ends
    chosen, place = torch.tensor([[0, 5, 0], [7, 6, 9]]), torch.tensor([2, 3])
    assert plans.observe(rows, nothing, chosen, place) == (1 + 3, 1)
    assert plans.is_stale.tolist() == [True, False]
    written[0, :2] = chosen[0, :2]
    # A stale plan is no evidence.
    assert plans.observe(rows, place, chosen, torch.tensor([1, 0])) == (0, 0)
    replanned = offer(plans, rows, torch.tensor([True, False]), written, place, 3)[0]
    assert replanned.tolist() == [2, 3, 9]  # "cd"
    assert plans.is_stale.tolist() == [False, False] and plans.planned[0, 5] == NO_TOKEN


def test_a_long_guess_is_planned_in_parts_and_its_seams_are_no_slips(builtin):
    words = " ".join(["the sea and the sea"] * 60)
    target = builtin.tokenizer(words, add_special_tokens=False).input_ids
    assert len(target) == 5 * 60  # a token a word
    plans = DraftPlans(builtin, [lambda text: words[len(text.lstrip()) :]], 2032)
    rows, live, place = torch.tensor([0]), torch.tensor([True]), 1
    tokens = torch.tensor([target + [0] * (2000 - len(target))])
    offer(plans, rows, live, tokens, torch.tensor([place]), 7)
    assert 0 < plans.until[0] < len(target)
    while place + 8 <= len(target):
        k = 7 if place % 3 else 0
        written = torch.tensor([place])
        assert offer(plans, rows, live, tokens, written, k)[0].tolist() == target[place : place + k]
        chosen = tokens[:, place : place + k + 1]
        assert plans.observe(rows, written, chosen, torch.tensor([k + 1]))[1] == 0
        place += k + 1
    assert not plans.is_stale.any() and plans.until[0] > place


@pytest.mark.parametrize(
    "text",
    ["na\u00efve \u65e5\u672c\u8a9e \U0001f600 caf\u00e9 owl", "\ufffd a\ufffd\ufffd b \u00e9"],
)
def test_texts_are_decoded_as_they_grow(builtin, monkeypatch, text):
    ids = torch.tensor(builtin.tokenizer(text, add_special_tokens=False).input_ids)
    ids = torch.cat([ids, ids[-3:], ids[:-1]])  # bytes of characters out of place
    in_parts = [builtin.decode([token]).endswith("\ufffd") for token in ids.tolist()]
    assert sum(in_parts) > 4
    plans, decoded, decode = DraftPlans(builtin, [str, str], 100), [], builtin.decode
    monkeypatch.setattr(builtin, "decode", lambda ids: decoded.append(len(ids)) or decode(ids))
    for row, lengths in enumerate((range(1, 1 + len(ids)), (2, 9, len(ids)))):
        for n in lengths:
            assert plans._text(row, ids[:n]) == decode(ids[:n].tolist())
    plans._text(0, torch.cat([ids, torch.tensor(builtin.tokenizer(" owl").input_ids)]))
    decoded.clear()
    plans._text(0, torch.cat([ids, torch.tensor(builtin.tokenizer(" owl sea").input_ids)]))
    assert max(decoded) < 6  # the new word alone, behind a token that is known


def test_words_are_tokenized_once_and_as_they_stand_in_a_text(builtin, monkeypatch):
    asked, known = [], Encodings(partial(_word_tokens, builtin.tokenizer), 100)
    encode = known.encode
    known.encode = lambda words: asked.append(words) or encode(words)
    monkeypatch.setattr(builtin, "words", known)
    plans = DraftPlans(builtin, [str], 100)
    texts = ["l saw the sea,  and 12 owls.\n Then", " the sea, and na\u00efve owls", ""]
    line_end, *encoded = plain_tokens(builtin.tokenizer, ["\n", *("\n" + text for text in texts)])
    whole = [tokens[len(line_end) :] for tokens in encoded]
    assert plans._tokens(texts) == whole and plans._tokens(texts[::-1]) == whole[::-1]
    assert len(asked) == 1 and len(set(asked[0])) == len(asked[0])


def test_rows_that_have_written_the_same_are_aimed_once(builtin):
    asked = []
    words = "the sea and the owl"
    one, other = (
        lambda text, name=name: asked.append((name, text.strip())) or words[len(text.strip()) :]
        for name in "ab"
    )
    plans = DraftPlans(builtin, [one, one, one, one, other], 64)
    assert asked == []
    ids = builtin.tokenizer([words, "the cat"], add_special_tokens=False).input_ids
    tokens = torch.zeros(5, 64, dtype=torch.long)
    written, rows = torch.tensor([1, 1, 2, 2, 1]), torch.arange(5)
    for row, source in enumerate((0, 0, 0, 1, 0)):
        tokens[row, : written[row]] = torch.tensor(ids[source][: written[row]])
    plans.is_stale[:] = True
    some = torch.tensor([0, 1, 2, 4])
    offered = offer(plans, some, some >= 0, tokens, written[some], 3)
    assert sorted(asked) == [("a", "the"), ("a", "the sea"), ("b", "the")]
    assert offered.tolist() == [ids[0][1:4], ids[0][1:4], ids[0][2:5], ids[0][1:4]]
    assert plans.is_stale.tolist() == [False, False, False, True, False]
    asked.clear()
    offer(plans, rows, rows >= 0, tokens, written, 3)
    assert asked == [("a", "the cat")]


def test_a_row_whose_plan_is_not_made_yet_has_no_draft(builtin):
    words = "the sea and the owl"
    plans = DraftPlans(builtin, [lambda text: words[len(text) :]] * 2, 64)
    rows, nothing = torch.arange(2), torch.zeros(2, 64, dtype=torch.long)
    plans.make(rows, nothing[:, 0], rows == 0, 3, nothing)

    first, second = plans.drafts(rows, nothing[:, 0], 3).tolist()
    assert builtin.decode(first).strip() == "the sea and" and second == [NO_TOKEN] * 3

    plans.make(rows, nothing[:, 0], rows >= 0, 3, nothing)
    assert builtin.decode(plans.drafts(rows, nothing[:, 0], 3)[1].tolist()).strip() == "the sea and"
    assert not plans.is_stale.any()


def test_the_right_answer_is_drafted_first_and_no_guess_is_asked_until_a_row_departs(builtin):
    end = builtin.end
    asked, answers = [], [[5, 6, 7, builtin.vocabulary, end], [8, 9, end]]
    guesses = [lambda text, p=p: asked.append(p) or "the sea" for p in (0, 0, 1, 1)]
    plans = DraftPlans(builtin, guesses, 64, answers)
    rows, tokens = torch.arange(4), torch.zeros(4, 64, dtype=torch.long)
    written = torch.zeros(4, dtype=torch.long)
    first = [[5, 6, 7, NO_TOKEN]] * 2 + [[8, 9, end, NO_TOKEN]] * 2
    assert offer(plans, rows, rows >= 0, tokens, written, 4).tolist() == first and not asked

    tokens[:, 0] = torch.tensor([5, 5, 8, 7])  # the last row departs
    plans.observe(rows, written, tokens[:, :1], written + 1)
    assert offer(plans, rows, rows >= 0, tokens, written + 1, 2)[:3].tolist() == [
        [6, 7],
        [6, 7],
        [9, end],
    ]
    assert asked == [1]
