"""An update: KL, LoRA, clipping, limits, importance weights, and what is not finite."""

import math
from dataclasses import replace

import pytest
import torch
from updates import SETTINGS, loss_and_gradients, sgd, update

import grpo.learn.optimizer as optimizer_module
import grpo.learn.update as update_module
from data.errors import UserError
from grpo.learn.batch import micro_batches
from grpo.learn.update import UpdateMemory, UpdateSettings, completion_logprobs, imitate
from grpo.model.load import load_policy
from grpo.rollout.sampling import truncation


def test_kl_is_zero_at_the_reference_and_pulls_back_to_it(tiny_model, groups):
    policy = load_policy(str(tiny_model), device="cpu", keep_reference=True)
    step = dict(kind="grpo", micro_tokens=0, **SETTINGS | dict(beta=0.5))
    first = update(policy, sgd(policy, 0.05), groups, **step)
    assert first["kl"] == pytest.approx(0, abs=1e-9)
    assert update(policy, sgd(policy, 0.0), groups, **step)["kl"] > 1e-6


def test_the_reference_is_whole_where_sampling_is_cut(tiny_model, groups):
    """A reference that is cut as well would be no distribution beside the policy's."""
    policy = load_policy(str(tiny_model), device="cpu", keep_reference=True)
    cut = truncation(top_k=20)
    (batch,) = micro_batches(groups, "dapo", max_length=24, device=torch.device("cpu"))
    with torch.no_grad():
        logp_RT, _ = completion_logprobs(policy, batch, cut)
        whole_RT, _ = completion_logprobs(policy, batch)
    log_ratio_RT = (whole_RT - logp_RT)[batch.mask_RT]
    expected = (log_ratio_RT.exp() - log_ratio_RT - 1).mean()
    assert expected > 0.01

    step = dict(kind="dapo", micro_tokens=0, truncate=cut, **SETTINGS | dict(beta=0.5))
    metrics = update(policy, sgd(policy, 0.0), groups, **step)
    assert metrics["kl"] == pytest.approx(float(expected), rel=1e-4)


def test_lora_trains_the_adapter_alone_and_its_reference_is_the_base(tiny_model, groups):
    policy = load_policy(str(tiny_model), device="cpu", lora_rank=4)
    frozen = {name: p.clone() for name, p in policy.model.named_parameters() if not p.requires_grad}
    assert all("lora_" in name for name, p in policy.model.named_parameters() if p.requires_grad)
    (batch,) = micro_batches(groups, "dapo", max_length=24, device=torch.device("cpu"))
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


def test_gradients_that_were_switched_off_are_computed(tiny_policy, groups):
    """A user's own task or reward may do so, for a model of its own."""
    before = [p.clone() for p in tiny_policy.parameters]
    with torch.no_grad():
        update(tiny_policy, sgd(tiny_policy, 1.0), groups, kind="dapo", micro_tokens=0, **SETTINGS)
        imitate(tiny_policy, sgd(tiny_policy, 1.0), groups, micro_tokens=0, max_grad_norm=0)
    assert not all(torch.equal(a, b) for a, b in zip(before, tiny_policy.parameters))


def test_a_loss_that_is_not_finite_stops_before_the_weights_change(tiny_policy, groups):
    groups[0].advantages[0] = float("nan")
    before = [p.clone() for p in tiny_policy.parameters]
    with pytest.raises(FloatingPointError, match="the loss is nan$"):
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


def test_parity_is_the_kl_from_the_sampler_to_the_trainer(tiny_policy, groups):
    """The tokens are the sampler's, so k3 is exp(d) - d - 1 with d = trainer - sampler."""
    step = dict(kind="dapo", micro_tokens=60, **SETTINGS)
    equal = update(tiny_policy, sgd(tiny_policy, 0.0), groups, **step)["parity/kl"]
    assert 0 <= equal < 1e-9

    completion = groups[1].completions[0]
    groups[1].completions[0] = replace(
        completion, logprobs=(completion.logprobs[0] - 2.0, *completion.logprobs[1:])
    )
    tokens = sum(group.tokens for group in groups)
    metrics = update(tiny_policy, sgd(tiny_policy, 0.0), groups, **step)
    assert metrics["parity/kl"] == pytest.approx((math.exp(2) - 2 - 1) / tokens, rel=1e-4)


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
        micro_batches(groups, "dapo", micro_tokens=60, max_length=24, device=tiny_policy.device)
    )
    monkeypatch.setattr(update_module, "micro_batches", lambda *_, **__: iter(made))
    update(tiny_policy, sgd(tiny_policy, 0.0), groups, kind="dapo", micro_tokens=60, **SETTINGS)
    assert (
        len(made) > 3
        and happened[: len(made)] == ["backward"] * len(made)
        and "item" in happened[len(made) :]
    )


@pytest.mark.parametrize("lora", [0, 4])
def test_updates_and_imitation_survive_an_overflow(tiny_model, groups, monkeypatch, lora):
    """The factor at first is so large that the first passes overflow; the result is the same."""
    norms = []
    for largest in (2.0**16, 2.0**40):
        monkeypatch.setattr(optimizer_module, "LARGEST", largest)
        policy = load_policy(str(tiny_model), device="cpu", dtype="float16", lora_rank=lora)
        optimizer = sgd(policy, 0.0)
        metrics = update(policy, optimizer, groups, kind="dapo", micro_tokens=60, **SETTINGS)
        assert metrics["loss_scale"] == optimizer.loss_scale.factor
        answers = [replace(group, advantages=[1.0] * len(group.completions)) for group in groups]
        imitated = imitate(policy, optimizer, answers, micro_tokens=60, max_grad_norm=1.0)
        norms.append((metrics["grad_norm"], imitated["grad_norm"]))
        assert optimizer.loss_scale.factor < 2.0**40
    assert norms[0] == pytest.approx(norms[1], rel=1e-2) and all(norm > 0 for norm in norms[0])


def test_one_of_several_ranks_does_not_repeat_what_the_others_have_ended(
    tiny_policy, groups, monkeypatch
):
    """When gradients have been exchanged, the others are not in the same place any more."""

    def hungry(policy, optimizer, *others):
        optimizer.has_exchanged = True  # as `collect` does with several ranks
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(update_module, "_try_update", hungry)
    with pytest.raises(UserError, match="out of memory while the ranks exchanged .* --resume"):
        update(tiny_policy, sgd(tiny_policy, 0.0), groups, kind="dapo", **SETTINGS)


def test_out_of_memory_is_answered_step_by_step(tiny_policy, groups, monkeypatch):
    """By halves to single completions, without the decoder's memory, by checkpointing; an error."""
    memory, most, tried, freed = UpdateMemory(tiny_policy, 1000), 500, [], []
    monkeypatch.setattr(tiny_policy, "free_decoder", lambda: freed.append(1) or True)
    plain = update_module._try_update

    def hungry(policy, optimizer, groups, settings, memory, first_pass):
        tried.append((memory.micro_tokens, len(freed), policy.gradient_checkpointing))
        if not policy.gradient_checkpointing or memory.micro_tokens > most:
            raise torch.OutOfMemoryError("no room")
        return plain(policy, optimizer, groups, settings, memory, first_pass)

    monkeypatch.setattr(update_module, "_try_update", hungry)
    settings = UpdateSettings("dapo", **SETTINGS)

    def step():
        return update_module.update(tiny_policy, sgd(tiny_policy, 0.0), groups, settings, memory)

    assert math.isfinite(step()["loss"])
    *halves, without_decoder, checkpointed, last = tried
    sizes = [size for size, _, _ in halves]
    single = sizes[-1]
    assert sizes[:2] == [1000, 500] and sizes == sorted(sizes, reverse=True) and single < 200
    assert {each[1:] for each in halves} == {(0, False)}
    assert without_decoder == (single, 1, False)
    assert checkpointed == (1000, 1, True)  # larger again
    assert last == (500, 1, True)

    same = " from now on (the gradient stays the same)"
    notes = memory.take_notes()
    assert notes[0] == "out of memory: micro-batches of 500 tokens" + same
    assert notes[-3:] == [
        "out of memory: the sampler's memory is freed before each update" + same,
        "out of memory: gradient checkpointing, and micro-batches of 1,000 tokens" + same,
        "out of memory: micro-batches of 500 tokens" + same,
    ]

    step()
    assert tried[-1] == (500, 2, True) and tried[-2] == last and memory.take_notes() == []

    most = 0
    with pytest.raises(UserError, match="the update of a single completion of .* tokens"):
        step()


def test_without_a_decoder_there_is_nothing_to_free(tiny_policy, groups):
    memory = UpdateMemory(tiny_policy, 1)
    memory.save_more(groups)
    assert not memory.frees_decoder and tiny_policy.gradient_checkpointing
    assert memory.micro_tokens > 24  # no completion is cut


def test_a_step_without_room_frees_the_decoders_memory(tiny_policy, groups, monkeypatch):
    optimizer, freed = sgd(tiny_policy, 1.0), []
    plain = optimizer.step

    def step():
        if not freed:
            raise torch.OutOfMemoryError("no room")
        plain()

    optimizer.step = step
    monkeypatch.setattr(tiny_policy, "free_decoder", lambda: freed.append(1) or True)
    update(tiny_policy, optimizer, groups, kind="dapo", **SETTINGS)
    assert freed == [1]
