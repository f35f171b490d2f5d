"""The update against a plain `transformers` forward pass: log-probs, gradients, micro-batches,
degenerate groups.
"""

import math
import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from losses import step_loss
from tiny_models import VOCABULARY, loading
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import grpo.learn.update as update_module
from grpo.learn.advantages import advantages
from grpo.learn.batch import BatchSettings, micro_batches
from grpo.learn.loss import LOSSES, token_weights
from grpo.learn.optimizer import Optimizer
from grpo.learn.update import UpdateSettings, completion_logprobs
from grpo.learn.update import update as update_by
from grpo.model.load import load_policy
from grpo.model.matmul import has_fast_bf16_matmul
from grpo.records import Group
from grpo.rollout.generate import generate
from grpo.rollout.request import RolloutRequest
from grpo.rollout.sampling import sample_key, truncation
from tasks.base import Problem, Score

PROMPTS = [
    "Copy text A.\nA: the owl",
    "Copy A, then B.\nA: one two three four five six\nB: seven",
    "A",
]
HEATS = [
    0.75,
    1.25,
    0.875,
]  # a group that is drawn again is hotter; these are the same in float32 and float64
SETTINGS = dict(beta=0.0, clip_low=0.2, clip_high=0.2, max_length=24, max_grad_norm=0.0)


def update(policy, optimizer, groups, *, before=None, **settings):
    """One update by settings given as keywords."""
    return update_by(policy, optimizer, groups, UpdateSettings(**settings), before)


@pytest.fixture()
def groups(tiny_policy):
    """Three groups of four ragged completions with distinct rewards."""
    tiny_policy.stops = tuple(range(0, VOCABULARY, 15))
    ids = [tiny_policy.encode(prompt) for prompt in PROMPTS]
    keys = [[sample_key(5, prompt, sample) for sample in range(4)] for prompt in PROMPTS]
    answers = generate(
        tiny_policy, RolloutRequest(ids, keys=keys, temperatures=HEATS, budgets=[24] * 3)
    )
    rng = random.Random(0)
    made = [
        Group(
            i,
            Problem("t", 1, p, "x", str(i)),
            ids[i],
            HEATS[i],
            completions,
            scores=[Score(rng.random()) for _ in completions],
        )
        for i, (p, completions) in enumerate(zip(PROMPTS, answers))
    ]
    for group, values in zip(made, advantages([group.rewards for group in made], scale="group")):
        group.advantages = values
    assert len({len(c.tokens) for group in made for c in group.completions}) > 3
    return made


@pytest.fixture()
def float64(tiny_policy, monkeypatch):
    """The policy in float64 throughout: transformers computes this norm in float32 whatever the
    model's precision.
    """
    monkeypatch.setattr(
        LlamaRMSNorm,
        "forward",
        lambda self, x: (
            self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        ),
    )
    tiny_policy.model.double()


def sgd(policy, rate):
    return Optimizer(policy.parameters, partial(torch.optim.SGD, lr=rate))


def loss_and_gradients(policy, groups, kind="dapo", micro_tokens=0, **settings):
    metrics = update(
        policy,
        sgd(policy, 0.0),
        groups,
        kind=kind,
        micro_tokens=micro_tokens,
        **SETTINGS | settings,
    )
    return metrics["loss"], [p.grad.clone() for p in policy.parameters]


def plain_logprobs(model, group, completion):
    """Each completion by itself, whole sequence, full logits."""
    tokens = torch.tensor([[*group.prompt, *completion.tokens]])
    logits = model(input_ids=tokens).logits[0, len(group.prompt) - 1 : -1] / group.temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]


def plain_gradients(model, groups, kind):
    lengths = torch.tensor([len(c.tokens) for group in groups for c in group.completions])
    weights = iter(token_weights(kind, lengths, max_length=24))
    model.zero_grad()
    for group in groups:
        for completion, advantage in zip(group.completions, group.advantages):
            logp = plain_logprobs(model, group, completion)[None]
            old = torch.tensor([completion.logprobs], dtype=logp.dtype)
            loss, _ = step_loss(
                kind,
                logp,
                old,
                torch.tensor([advantage]),
                torch.ones(logp.shape, dtype=torch.bool),
                next(weights)[None],
                clip_low=0.2,
                clip_high=0.2,
            )
            loss.backward()
    return [p.grad for p in model.parameters()]


def check_logprobs(policy, plain, groups, atol):
    (batch,) = micro_batches(
        groups, BatchSettings("dapo", max_length=24), device=torch.device("cpu")
    )
    rows = [(group, completion) for group in groups for completion in group.completions]
    for logp, (group, completion) in zip(completion_logprobs(policy, batch)[0], rows, strict=True):
        expected = plain_logprobs(plain, group, completion)
        torch.testing.assert_close(logp[: len(expected)], expected, atol=atol, rtol=0)
        assert not logp[len(expected) :].any()


def test_logprobs_are_those_of_a_plain_forward(tiny_policy, tiny_model, groups):
    plain = AutoModelForCausalLM.from_pretrained(
        tiny_model, dtype=torch.float32, attn_implementation="eager"
    )
    check_logprobs(tiny_policy, plain, groups, 1e-5)


def test_logprobs_are_those_of_a_plain_forward_in_float64(tiny_policy, tiny_model, groups, float64):
    # sdpa, because transformers' eager attention takes its softmax in float32 whatever the model's
    # precision
    plain = AutoModelForCausalLM.from_pretrained(
        tiny_model, dtype=torch.float64, attn_implementation="sdpa"
    )
    check_logprobs(tiny_policy, plain, groups, 1e-10)


@pytest.mark.parametrize("kind", LOSSES)
def test_gradients_are_those_of_a_plain_forward(tiny_policy, tiny_model, groups, float64, kind):
    # those of a plain loss over completion tokens alone: prompt and padding get nothing, the end
    # token its share
    plain = AutoModelForCausalLM.from_pretrained(
        tiny_model, dtype=torch.float64, attn_implementation="sdpa"
    )
    ours_and_theirs = (
        loss_and_gradients(tiny_policy, groups, kind)[1],
        plain_gradients(plain, groups, kind),
    )
    for ours, theirs in zip(*ours_and_theirs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-11)


def each_token(groups):
    """Give every token an advantage of its own."""
    rng = random.Random(1)
    for group in groups:
        group.advantages = [
            [rng.uniform(-1, 1) for _ in completion.tokens] for completion in group.completions
        ]


@pytest.mark.parametrize("kind", [kind for kind in LOSSES if kind != "gspo"])
def test_gradients_of_advantages_of_tokens(tiny_policy, tiny_model, groups, float64, kind):
    each_token(groups)
    plain = AutoModelForCausalLM.from_pretrained(
        tiny_model, dtype=torch.float64, attn_implementation="sdpa"
    )
    expected = plain_gradients(plain, groups, kind)
    for micro_tokens in (0, 60):
        for ours, theirs in zip(
            loss_and_gradients(tiny_policy, groups, kind, micro_tokens)[1], expected, strict=True
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-11)


def test_logprobs_are_the_samplers(tiny_policy, groups):
    (batch,) = micro_batches(
        groups, BatchSettings("dapo", max_length=24), device=torch.device("cpu")
    )
    logp, entropy = completion_logprobs(tiny_policy, batch)
    assert (logp - batch.old_RT)[batch.mask_RT].abs().max() < 1e-5
    assert (logp[~batch.mask_RT] == 0).all() and (entropy[batch.mask_RT] > 0).all()


def test_every_completion_token_gets_its_gradient_and_no_other(tiny_policy, groups, monkeypatch):
    seen, linear = [], torch.nn.functional.linear

    def watch(
        module, hidden
    ):  # an output layer that is none of torch's is differentiated by autograd
        logits = linear(hidden, module.weight)
        logits.register_hook(seen.append)
        return logits

    monkeypatch.setattr(
        tiny_policy.model.lm_head,
        "__class__",
        type("Watched", (torch.nn.Linear,), {"forward": watch}),
    )
    loss_and_gradients(tiny_policy, groups)
    gradient_NV = torch.cat(seen[::-1])  # of the chunks, the last first
    rows = [
        (c, a, group.temperature)
        for group in groups
        for c, a in zip(group.completions, group.advantages)
    ]
    tokens = torch.tensor([token for c, *_ in rows for token in c.tokens])
    # -q A / N, with q = 1, by the logit of the token drawn: -A (1 - p) / (N temperature); end
    # tokens are among them
    expected = [
        -a * -math.expm1(logp) / (len(tokens) * heat) for c, a, heat in rows for logp in c.logprobs
    ]
    assert any(c.finish == "stop" for c, *_ in rows) and all(expected)
    assert len(gradient_NV) == len(tokens)  # nothing for prompt and padding
    of_tokens = gradient_NV.gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(of_tokens, torch.tensor(expected), rtol=1e-3, atol=1e-8)


@pytest.mark.parametrize(
    "micro_tokens", [1, 60, 100, 120]
)  # of rows alone, of parts of a group, of whole groups
def test_micro_batches_change_neither_loss_nor_gradient(tiny_policy, groups, float64, micro_tokens):
    assert (
        len(
            list(
                micro_batches(
                    groups,
                    BatchSettings("dapo", micro_tokens=micro_tokens, max_length=24),
                    device="cpu",
                )
            )
        )
        > 1
    )
    loss, whole = loss_and_gradients(tiny_policy, groups)
    loss_of_parts, parts = loss_and_gradients(tiny_policy, groups, micro_tokens=micro_tokens)
    assert loss_of_parts == pytest.approx(loss, rel=1e-12)
    for a, b in zip(whole, parts, strict=True):
        assert (a - b).norm() <= 1e-12 * a.norm()


@pytest.mark.parametrize("limits", [dict(top_k=20), dict(top_p=0.9), dict(top_k=50, top_p=0.95)])
def test_truncated_logprobs_are_the_samplers(tiny_policy, groups, limits):
    truncate = truncation(**limits)
    keys = [[sample_key(6, group.index, sample) for sample in range(4)] for group in groups]
    answers = generate(
        tiny_policy,
        RolloutRequest(
            [group.prompt for group in groups],
            keys=keys,
            temperatures=HEATS,
            budgets=[24] * 3,
            truncate=truncate,
        ),
    )
    for group, completions in zip(groups, answers):
        group.completions = completions
    (batch,) = micro_batches(
        groups, BatchSettings("dapo", max_length=24), device=torch.device("cpu")
    )
    with torch.no_grad():
        cut, whole = (
            completion_logprobs(tiny_policy, batch, truncate)[0],
            completion_logprobs(tiny_policy, batch)[0],
        )
    assert (cut - batch.old_RT).abs().max() < 1e-4
    assert (cut - whole).max() > 0.05  # it makes a difference


def test_padding_does_not_matter(tiny_policy, groups):
    (batch,) = micro_batches(
        groups, BatchSettings("dapo", max_length=24), device=torch.device("cpu")
    )
    before, _ = completion_logprobs(tiny_policy, batch)
    batch.tokens_RT[~batch.mask_RT] = 77
    after, _ = completion_logprobs(tiny_policy, batch)
    assert torch.equal(before, after)


def test_kl_is_zero_at_the_reference_and_pulls_back_to_it(tiny_model, groups):
    policy = load_policy(str(tiny_model), device="cpu", options=loading(keep_reference=True))
    step = dict(kind="grpo", micro_tokens=0, **SETTINGS | dict(beta=0.5))
    first = update(policy, sgd(policy, 0.05), groups, **step)
    assert first["kl"] == pytest.approx(0, abs=1e-9)
    assert update(policy, sgd(policy, 0.0), groups, **step)["kl"] > 1e-6


def test_lora_trains_the_adapter_alone_and_its_reference_is_the_base(tiny_model, groups):
    policy = load_policy(str(tiny_model), device="cpu", options=loading(lora_rank=4))
    frozen = {name: p.clone() for name, p in policy.model.named_parameters() if not p.requires_grad}
    assert all("lora_" in name for name, p in policy.model.named_parameters() if p.requires_grad)
    (batch,) = micro_batches(
        groups, BatchSettings("dapo", max_length=24), device=torch.device("cpu")
    )
    base, _ = completion_logprobs(policy, batch)  # a fresh adapter changes nothing
    update(policy, sgd(policy, 1.0), groups, kind="dapo", micro_tokens=0, **SETTINGS)
    update(policy, sgd(policy, 1.0), groups, kind="dapo", micro_tokens=0, **SETTINGS)
    changed, _ = completion_logprobs(policy, batch)
    with policy.reference():
        reference, _ = completion_logprobs(policy, batch)
    assert not torch.equal(changed, base) and torch.equal(reference, base)
    assert all(
        torch.equal(p, frozen[name])
        for name, p in policy.model.named_parameters()
        if name in frozen
    )


def test_a_loss_that_is_not_finite_stops_before_the_weights_change(tiny_policy, groups):
    groups[0].advantages[0] = float("nan")
    before = [p.clone() for p in tiny_policy.parameters]
    with pytest.raises(FloatingPointError, match="the loss is nan"):
        update(tiny_policy, sgd(tiny_policy, 1.0), groups, kind="dapo", micro_tokens=0, **SETTINGS)
    assert all(torch.equal(a, b) for a, b in zip(before, tiny_policy.parameters))


def test_a_gradient_that_is_not_finite_stops_before_the_weights_change(tiny_policy, groups):
    tiny_policy.parameters[3].register_hook(lambda gradient: gradient * float("inf"))
    before = [p.clone() for p in tiny_policy.parameters]
    with pytest.raises(FloatingPointError, match="the gradient norm is (nan|inf)"):
        update(tiny_policy, sgd(tiny_policy, 1.0), groups, kind="dapo", micro_tokens=0, **SETTINGS)
    assert all(torch.equal(a, b) for a, b in zip(before, tiny_policy.parameters))


def test_gradient_clipping(tiny_policy, groups):
    norm = lambda grads: torch.stack([g.norm() for g in grads]).norm()  # noqa: E731
    whole = norm(loss_and_gradients(tiny_policy, groups)[1])
    clipped = norm(loss_and_gradients(tiny_policy, groups, max_grad_norm=float(whole) / 2)[1])
    assert clipped == pytest.approx(float(whole) / 2, rel=1e-3)


def test_the_worst_tokens_are_told(tiny_policy, groups):
    sample = max(range(4), key=lambda k: len(groups[1].completions[k].tokens))
    completion = groups[1].completions[sample]
    place = len(completion.tokens) // 2
    wrong = [*completion.logprobs]
    wrong[place] -= 2.5
    groups[1].completions[sample] = replace(completion, logprobs=tuple(wrong))
    metrics = update(
        tiny_policy, sgd(tiny_policy, 0.0), groups, kind="dapo", micro_tokens=60, **SETTINGS
    )
    worst, second, _ = metrics["parity/worst"]
    assert (worst["group"], worst["sample"], worst["position"], worst["token"]) == (
        1,
        sample,
        place,
        completion.tokens[place],
    )
    assert worst["trainer"] - worst["sampler"] == pytest.approx(2.5, abs=1e-4)
    assert metrics["sampling/sampling_logp_difference/max"] == pytest.approx(2.5, abs=1e-4)
    assert abs(second["trainer"] - second["sampler"]) < 1e-4


def test_parity_beyond_its_limit_stops_before_anything_changes(tiny_policy, groups):
    before = [p.clone() for p in tiny_policy.parameters]
    groups[0].completions[0] = replace(
        groups[0].completions[0], logprobs=tuple(x - 0.5 for x in groups[0].completions[0].logprobs)
    )
    optimizer = sgd(tiny_policy, 1.0)
    with pytest.raises(
        FloatingPointError,
        match="sampler and trainer differ by 0.5 in a log-probability .*parity_limit is 0.1",
    ):
        update(
            tiny_policy,
            optimizer,
            groups,
            kind="dapo",
            micro_tokens=0,
            parity_limit=0.1,
            **SETTINGS,
        )
    assert all(torch.equal(p, q) for p, q in zip(tiny_policy.parameters, before))
    update(
        tiny_policy, optimizer, groups, kind="dapo", micro_tokens=0, parity_limit=0.6, **SETTINGS
    )
    assert not all(torch.equal(p, q) for p, q in zip(tiny_policy.parameters, before))


def test_importance_weights_are_truncated_and_remembered(tiny_policy, groups, float64):
    # a sampler that gave every token of one completion half the probability: weight 2, or the limit
    plain = loss_and_gradients(tiny_policy, groups)[1]
    completion = groups[0].completions[0]
    other = [g for g in groups]
    other[0] = replace(
        groups[0],
        completions=[
            replace(completion, logprobs=tuple(x - math.log(2) for x in completion.logprobs)),
            *groups[0].completions[1:],
        ],
    )
    by_limit = {}
    for limit in (1.0, 1.5, 5.0):
        before = {}
        by_limit[limit] = loss_and_gradients(
            tiny_policy, other, importance_limit=limit, before=before, micro_tokens=60
        )[1]
        assert len(before) == 12 and len(before[0, 0]) == len(completion.tokens)
        again = loss_and_gradients(
            tiny_policy, other, importance_limit=limit, before=before, micro_tokens=0
        )[1]
        for one, two in zip(by_limit[limit], again):
            torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)
    for one, at1, at15, at5 in zip(plain, by_limit[1.0], by_limit[1.5], by_limit[5.0]):
        torch.testing.assert_close(
            at1, one, rtol=1e-3, atol=1e-6
        )  # the sampler's float32 rounding alone
        torch.testing.assert_close(
            (at5 - at1), 2 * (at15 - at1), rtol=1e-2, atol=1e-6
        )  # 2 - 1 against 1.5 - 1


@pytest.mark.parametrize(
    "units, expected", [((True, False), True), ((False, True), True), ((False, False), False)]
)
def test_on_which_cpus_onednn_is_faster(monkeypatch, units, expected):
    for name, has in zip(("_is_amx_tile_supported", "_is_avx512_bf16_supported"), units):
        monkeypatch.setattr(torch.cpu, name, lambda has=has: has)
    assert has_fast_bf16_matmul() is expected


def test_low_precision_gradients_leave_the_log_probabilities_as_they_are(tiny_model, groups):
    if not has_fast_bf16_matmul():
        pytest.skip("this CPU takes no other products for gradients")
    results = []
    for dtype in ("float32", "auto"):
        policy = load_policy(str(tiny_model), device="cpu", options=loading(dtype=dtype))
        assert policy.low_precision_backward == (dtype == "auto")
        (batch,) = micro_batches(
            groups, BatchSettings("dapo", max_length=24), device=torch.device("cpu")
        )
        results.append((completion_logprobs(policy, batch)[0], *loss_and_gradients(policy, groups)))
    (exact_logp, exact_loss, exact), (rough_logp, rough_loss, rough) = results
    assert torch.equal(exact_logp, rough_logp) and exact_loss == rough_loss
    one, other = (torch.cat([g.flatten() for g in gradients]) for gradients in (exact, rough))
    assert 0 < (one - other).norm() < 0.02 * one.norm()
    assert torch.backends.mkldnn.matmul.fp32_precision != "bf16"


@pytest.mark.parametrize("lora", [0, 4])
def test_bfloat16_has_the_gradient_of_float32_to_its_rounding(
    tiny_model, tiny_policy, groups, lora
):
    exact, rough = (
        load_policy(str(tiny_model), device="cpu", options=loading(dtype=dtype, lora_rank=lora))
        for dtype in ("float32", "bfloat16")
    )
    for policy in (exact, rough):
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:  # zero at first
                torch.nn.init.normal_(
                    parameter, std=0.05, generator=torch.Generator().manual_seed(len(name))
                )
        assert policy.fast_model is not None
        optimizer = sgd(policy, 0.0)
        optimizer.step = lambda: None  # the gradients stay
        policy.norm = update(policy, optimizer, groups, kind="dapo", micro_tokens=60, **SETTINGS)[
            "grad_norm"
        ]
        policy.gradient = torch.cat([master.grad.flatten() for master in optimizer.masters])
        assert policy.gradient.dtype == torch.float32
    assert rough.norm == pytest.approx(exact.norm, rel=0.05)
    assert torch.cosine_similarity(rough.gradient, exact.gradient, dim=0) > 0.99


def test_full_fine_tuning_in_bfloat16_moves_the_masters(tiny_model, tiny_policy, groups):
    policy = load_policy(str(tiny_model), device="cpu", options=loading(dtype="bfloat16"))
    before = [parameter.detach().clone() for parameter in policy.parameters]
    optimizer = sgd(policy, 1e-3)
    update(policy, optimizer, groups, kind="dapo", micro_tokens=60, **SETTINGS)
    moved = torch.cat(
        [(master - old.float()).flatten() for master, old in zip(optimizer.masters, before)]
    )
    shown = torch.cat(
        [parameter.ne(old).flatten() for parameter, old in zip(policy.parameters, before)]
    )
    assert moved.ne(0).float().mean() > 0.5 > shown.float().mean()
    qkv = policy.fast_model.blocks[0].qkv  # what the decoder reads is what was stepped on
    assert torch.equal(
        qkv.weight[: qkv.out_features], torch.cat([layer.weight for layer in qkv.layers])
    )


def test_the_host_asks_for_no_number_before_all_micro_batches_are_under_way(
    tiny_policy, groups, monkeypatch
):
    """On a GPU it would wait there, and the next micro-batch would be made while the GPU idles."""
    happened = []
    for name in ("item", "backward"):
        real = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor,
            name,
            lambda self, *args, name=name, real=real: happened.append(name) or real(self, *args),
        )
    made = list(
        micro_batches(
            groups, BatchSettings("dapo", micro_tokens=60, max_length=24), device=tiny_policy.device
        )
    )
    monkeypatch.setattr(update_module, "micro_batches", lambda *_, **__: iter(made))
    update(tiny_policy, sgd(tiny_policy, 0.0), groups, kind="dapo", micro_tokens=60, **SETTINGS)
    assert (
        len(made) > 3
        and happened[: len(made)] == ["backward"] * len(made)
        and "item" in happened[len(made) :]
    )
