"""Masters, sums of gradients, parts of the state: against plain AdamW, and against each other."""

import copy
import math
from functools import partial

import pytest
import torch

from grpo.distributed import Ranks
from grpo.learn.optimizer import Optimizer, adamw
from grpo.run import checkpoint
from grpo.run.checkpoint import load_optimizer, save_optimizer

RATE = 1e-4


def made(dtype, seed=0, **shared):
    torch.manual_seed(seed)
    layers = torch.nn.Sequential(torch.nn.Linear(70, 90), torch.nn.Linear(90, 5)).to(dtype)
    return layers, Optimizer(layers.parameters(), adamw(RATE, weight_decay=0.01), **shared)


def take(layers, optimizer, seed, parts=1, max_norm=0.0, **options):
    """A step from the gradients of `parts` backward passes; return their norm."""
    optimizer.clear()
    inputs = torch.randn(24, 70, generator=torch.Generator().manual_seed(seed)).to(
        layers[0].weight.dtype
    )
    for part in inputs.chunk(parts):
        layers(part).float().square().sum().backward()
    norm = optimizer.collect(max_norm)
    optimizer.step(**options)
    return norm


def test_float32_weights_are_their_own_masters_and_step_as_by_adamw():
    layers, optimizer = made(torch.float32)
    theirs = copy.deepcopy(layers)
    plain = torch.optim.AdamW(theirs.parameters(), lr=RATE, betas=(0.9, 0.99), weight_decay=0.01)
    assert all(
        master is weight
        for master, weight in zip(optimizer.masters, layers.parameters(), strict=True)
    )
    for seed in range(3):
        norm = take(layers, optimizer, seed, max_norm=0.5)
        plain.zero_grad()
        theirs(
            torch.randn(24, 70, generator=torch.Generator().manual_seed(seed))
        ).square().sum().backward()
        assert (
            norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)))
            and norm > 1
        )
        plain.step()
    for mine, other in zip(layers.parameters(), theirs.parameters()):
        torch.testing.assert_close(mine, other, atol=1e-7, rtol=0)


@pytest.mark.parametrize("call", [1, 2, 7, 8])  # of the two moments of each of four weights
@pytest.mark.parametrize("failures", [1, 2])
def test_a_first_step_that_runs_out_of_memory_is_tried_again(monkeypatch, call, failures):
    """Once by itself, after room has been made; then it can be taken from the beginning."""
    expected, optimizer = made(torch.float32)
    take(expected, optimizer, seed=0)

    made_moments, failed, zeros_like = [], [], torch.zeros_like

    def hungry(*arguments, **options):
        made_moments.append(arguments[0])
        if len(made_moments) == call and len(failed) < failures:
            made_moments.clear()
            failed.append(call)
            raise torch.OutOfMemoryError("no room")
        return zeros_like(*arguments, **options)

    monkeypatch.setattr(torch, "zeros_like", hungry)
    found, optimizer = made(torch.float32)
    rooms = []
    if failures == 2:
        with pytest.raises(torch.OutOfMemoryError):
            take(found, optimizer, seed=0, make_room=lambda: rooms.append(1))
        take(found, optimizer, seed=0)
    else:
        take(found, optimizer, seed=0, make_room=lambda: rooms.append(1))
    assert len(failed) == failures and rooms == [1]
    for weight, wanted in zip(found.parameters(), expected.parameters(), strict=True):
        assert torch.equal(weight, wanted)


def test_steps_too_small_for_bfloat16_add_up_on_the_masters():
    layers, optimizer = made(torch.bfloat16)
    before = [weight.detach().clone() for weight in layers.parameters()]
    assert all(
        torch.equal(master, weight.float()) for master, weight in zip(optimizer.masters, before)
    )
    take(layers, optimizer, 0)
    first = [
        (weight.float() - old.float()).abs() for weight, old in zip(layers.parameters(), before)
    ]
    assert (
        torch.cat([change.flatten() for change in first]).eq(0).float().mean() > 0.5
    )  # a single step is lost on most of the weights
    for seed in range(1, 40):
        take(layers, optimizer, seed % 3)
    moved = (layers[0].weight.float() - before[0].float()).abs()
    assert moved.max() > 20 * RATE and moved.gt(0).float().mean() > 0.9
    for weight, master in zip(layers.parameters(), optimizer.masters):
        assert master.dtype == torch.float32 and torch.equal(weight, master.bfloat16())


def test_gradients_of_bfloat16_weights_are_added_up_in_float32():
    layers, optimizer = made(torch.bfloat16)
    optimizer.clear()
    weight, share = layers[1].bias, 1 / 512  # which a sum of 1 in bfloat16 no longer notices
    for gradient in [1.0] + [share] * 512:
        (weight * gradient).sum().backward()
        assert weight.grad is None  # given back at once
    assert optimizer.collect(0.0) == pytest.approx(2 * math.sqrt(5))
    assert (
        torch.equal(optimizer.masters[3].grad, torch.full((5,), 2.0))
        and optimizer.masters[0].grad is None
    )
    optimizer.clear()
    (weight * 3).sum().backward()
    optimizer.collect(1.0)
    torch.testing.assert_close(
        optimizer.masters[3].grad, torch.full((5,), 1 / math.sqrt(5)), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_saved_goes_on_bit_for_bit(tmp_path, dtype):
    one, two = made(dtype), made(dtype, seed=1)
    for seed in range(3):
        take(*one, seed)
    save_optimizer(tmp_path, one[1].state_dict())
    two[0].load_state_dict(one[0].state_dict())
    load_optimizer(tmp_path, two[1])
    for seed in range(3, 6):
        assert take(*one, seed) == take(*two, seed)
    assert all(
        torch.equal(mine, other) for mine, other in zip(one[1].masters, two[1].masters, strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_of_before_the_first_step_can_be_loaded(tmp_path, dtype):
    """There are no moments yet, and float32 weights have no masters beside them."""
    one, two = made(dtype), made(dtype, seed=1)
    save_optimizer(tmp_path, one[1].state_dict())
    two[0].load_state_dict(one[0].state_dict())
    load_optimizer(tmp_path, two[1])
    assert take(*one, 0) == take(*two, 0)
    assert all(
        torch.equal(mine, other) for mine, other in zip(one[1].masters, two[1].masters, strict=True)
    )


def test_a_large_state_is_written_in_parts(tmp_path, monkeypatch):
    one, two = made(torch.bfloat16), made(torch.bfloat16, seed=1)
    take(*one, 0)
    monkeypatch.setattr(checkpoint, "_parts", partial(checkpoint._parts, most=30_000))
    save_optimizer(tmp_path, one[1].state_dict())
    sizes = {path.name: path.stat().st_size for path in tmp_path.glob("*.safetensors")}
    assert {
        "optimizer.safetensors",
        "optimizer-1.safetensors",
        "optimizer-2.safetensors",
    } <= sizes.keys() and max(sizes.values()) < 31_000
    load_optimizer(tmp_path, two[1])
    assert take(*one, 1) == take(*two, 1)
    assert all(
        torch.equal(mine, other) for mine, other in zip(one[1].masters, two[1].masters, strict=True)
    )


def a_rank(rank, folder):
    """Three of these make the steps of one process, each from a third of the inputs; the second
    half of them after all has been read from disk.
    """
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=3
    )
    for half in (0, 1):
        layers, optimizer = made(torch.bfloat16, seed=half, ranks=Ranks(rank, 3), shard=True)
        if half:
            load_optimizer(folder, optimizer)
        norms = [take_third(layers, optimizer, 3 * half + seed, rank) for seed in range(3)]
        state = optimizer.state_dict()
        if rank == 0:
            save_optimizer(folder, state)
        torch.distributed.barrier()
    assert sum(master.numel() for master in optimizer.masters) < 0.4 * sum(
        weight.numel() for weight in layers.parameters()
    )
    torch.save(
        (norms, [weight.detach() for weight in layers.parameters()]), folder / f"rank-{rank}.pt"
    )
    torch.distributed.destroy_process_group()


def take_third(layers, optimizer, seed, rank):
    optimizer.clear()
    inputs = torch.randn(24, 70, generator=torch.Generator().manual_seed(seed)).bfloat16()
    if rank < 2:  # the last one has nothing
        layers(inputs.chunk(2)[rank]).float().square().sum().backward()
    norm = optimizer.collect(0.5)
    optimizer.step()
    return norm


def test_three_ranks_that_share_the_masters_step_as_one_that_has_them_all(tmp_path):
    layers, optimizer = made(torch.bfloat16)
    norms = [take(layers, optimizer, seed, parts=2, max_norm=0.5) for seed in range(6)]
    torch.multiprocessing.spawn(a_rank, (tmp_path,), nprocs=3)
    for rank in range(3):
        theirs, weights = torch.load(tmp_path / f"rank-{rank}.pt")
        assert theirs == pytest.approx(norms[3:], rel=1e-5)
        assert all(
            torch.equal(mine, other)
            for mine, other in zip(layers.parameters(), weights, strict=True)
        )
    again, alone = made(torch.bfloat16, seed=1)
    load_optimizer(tmp_path, alone)  # what three have written, for one
    for mine, other in zip(optimizer.masters, alone.masters):
        torch.testing.assert_close(mine, other, atol=1e-8, rtol=1e-6)
    assert all(
        torch.equal(mine, other)
        for mine, other in zip(layers.parameters(), again.parameters(), strict=True)
    )
