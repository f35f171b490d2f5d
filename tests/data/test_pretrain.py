"""The recipe of the embedded model: its optimizer, its step, and that a training in parts is the
training in one go.
"""

import math

import numpy as np
import pytest
import torch

from data.make import train as pretrain
from data.make.batches import FILL, LONG, SHORTEST, STRANGE_FILL, Batches
from data.make.muon import Muon, orthogonal
from data.make.step import Step, hidden_of, loss_of
from data.make.tokenizer import make_tokenizer

SHAPE = ["--layers", "2", "--width", "32", "--inner", "48", "--heads", "2", "--kv-heads", "1"]
VOCABULARY = 64


def small_model(seed=0):
    torch.manual_seed(seed)
    return pretrain.build(pretrain.parse(SHAPE), range(VOCABULARY))


def batches(count, length=24, rows=6):
    rng = np.random.default_rng(0)
    for _ in range(count):
        tokens = rng.integers(4, VOCABULARY, (rows, length)).astype(np.int16)
        tokens[:] = tokens[:, :1]  # there is something to learn
        learned = np.zeros((rows, length), bool)
        learned[:, length // 2 :] = True
        yield tokens, learned


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def test_muon_is_torchs_for_every_shape():
    torch.manual_seed(0)
    ours = [
        torch.nn.Parameter(torch.randn(*shape)) for shape in ((8, 8), (16, 8), (8, 16), (16, 8))
    ]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    muon = Muon(ours, momentum=0.9, weight_decay=0.1)
    reference = torch.optim.Muon(
        theirs, lr=0.02, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    for _ in range(4):
        for p, q in zip(ours, theirs):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        muon.step(torch.tensor(0.02))
        reference.step()
        for p, q in zip(
            ours, theirs
        ):  # the products are in bfloat16 and may round otherwise: 2^-8 of a step of about 0.02
            torch.testing.assert_close(p, q, rtol=0, atol=1e-4)


def test_an_orthogonal_matrix_has_singular_values_near_one():
    torch.manual_seed(0)
    for shape in ((3, 12, 5), (2, 5, 12)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(shape)).float())
        assert values.min() > 0.6 and values.max() < 1.3


def test_the_loss_is_that_of_transformers():
    model = small_model()
    tokens, learned = (torch.from_numpy(array) for array in next(batches(1)))
    labels = tokens.long().masked_fill(~learned, -100)
    ours = loss_of(model, hidden_of(model, tokens.long()), tokens.long(), learned)
    torch.testing.assert_close(ours, model(input_ids=tokens.long(), labels=labels).loss)


def test_a_step_learns():
    step = Step(small_model(), "cpu")
    losses = [step(*batch, rate=0.01).item() for batch in batches(60)]
    assert losses[0] > 0.8 * math.log(VOCABULARY) and sum(losses[-5:]) / 5 < 0.2 * losses[0]


@pytest.mark.parametrize("scale", [0.01, 1.0])
def test_gradients_are_clipped_at_norm_one(scale):
    model, batch = small_model(), next(batches(1))
    step = Step(model, "cpu")
    step.loss_of = lambda *arguments: scale * loss_of(*arguments)
    norm = lambda gradients: torch.stack([g.norm() for g in gradients]).norm().item()  # noqa: E731
    with torch.autocast("cpu", torch.bfloat16):
        tokens, learned = torch.from_numpy(batch[0]).long(), torch.from_numpy(batch[1])
        loss = step.loss_of(model, hidden_of(model, tokens), tokens, learned)
    unclipped = norm(torch.autograd.grad(loss, list(model.parameters())))
    step(*batch, rate=0.0)
    assert norm([p.grad for p in model.parameters()]) == pytest.approx(
        min(1.0, unclipped), rel=1e-3
    )
    assert (unclipped > 1) == (scale == 1)


def test_parts_are_the_whole():
    whole = Step(small_model(), "cpu")
    for batch in batches(5):
        whole(*batch, rate=0.01)
    first = Step(small_model(), "cpu")
    for batch in list(batches(5))[:3]:
        first(*batch, rate=0.01)
    state = {name: value.detach().clone() for name, value in first.state().items()}
    second = Step(small_model(seed=1), "cpu")
    second.load(state)
    for batch in list(batches(5))[3:]:
        second(*batch, rate=0.01)
    assert all(
        torch.equal(a, b) for a, b in zip(weights(whole.model), weights(second.model), strict=True)
    )


def test_a_training_stopped_and_gone_on_with_ends_by_the_schedule(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(pretrain, "accuracy_by_skill", lambda *_, **__: {})
    flags = [
        *SHAPE,
        "--vocabulary",
        "400",
        "--batch-tokens",
        "4096",
        "--workers",
        "1",
        "--steps",
        "6",
        "--state",
        str(tmp_path / "state.safetensors"),
        "--output",
        str(tmp_path / "model"),
    ]
    pretrain.train(pretrain.parse([*flags, "--part-minutes", "0"]))
    assert "0 steps in" in capsys.readouterr().out and not (tmp_path / "model").exists()
    pretrain.train(pretrain.parse(flags))
    recipe = pretrain.json.loads((tmp_path / "model" / "recipe.json").read_text())
    assert recipe["steps"] == 6 and recipe["layers"] == 2 and "state" not in recipe


def test_a_row_is_filled_by_what_its_length_is_for():
    made = Batches(make_tokenizer(400), 0, 4096)
    for length in (SHORTEST, 160, 640, 1280):
        lessons = [made.lesson(length) for _ in range(25)]
        assert all(len(tokens) <= length for tokens, _, _ in lessons)
        skills = {skill.removesuffix(", strange") for _, _, skill in lessons}
        assert (skills == {"arithmetic"}) == (length == SHORTEST)
        assert ("interleave" in skills) == (SHORTEST < length <= 640)
        if length > LONG:
            for tokens, _, skill in lessons:
                least = STRANGE_FILL if skill.endswith(", strange") else FILL
                assert len(tokens) >= least * length or skill.startswith("interleave")


def test_to_prepare_teaches_nothing():
    step, untouched = Step(small_model(), "cpu"), weights(small_model())
    step.prepare(96, [24])
    assert all(torch.equal(a, b) for a, b in zip(weights(step.model), untouched, strict=True))


@pytest.mark.gpu
@pytest.mark.filterwarnings(
    "ignore:.torch.jit:DeprecationWarning"
)  # torch's compiler imports what torch deprecates,
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor:UserWarning"
)  # and asks tensors between layers for their gradient
def test_a_captured_step_is_the_step():
    captured, plain = (
        Step(small_model().cuda(), "cuda"),
        Step(small_model().cuda(), "cuda"),
    )
    untouched = weights(captured.model)
    captured.prepare(144, [24, 32])
    assert all(torch.equal(a, b) for a, b in zip(weights(captured.model), untouched, strict=True))
    assert not any(
        value.any() for name, value in captured.state().items() if not name.startswith("model.")
    )
    for length in (24, 32, 24):
        for batch in batches(3, length, rows=144 // length):
            # from the same weights each time, for nine steps at this rate would drift apart by
            # rounding alone
            with torch.no_grad():
                for p, q in zip(weights(captured.model), plain.model.parameters(), strict=True):
                    q.copy_(p)
            loss = captured(*batch, rate=0.01).item()
            plain.rate.fill_(0.01)
            with torch.compiler.set_stance("force_eager"):
                expected = plain.compute(
                    *(torch.from_numpy(array).cuda() for array in batch)
                ).item()
            assert loss == pytest.approx(expected, rel=0.02)
    mine, other = captured.state(), plain.state()
    for name in (
        mine.keys() & other.keys()
    ):  # weights after one step from the same ones, and momenta of all nine
        p, q = (state[name].float().flatten() for state in (mine, other))
        assert p.numel() == 1 or torch.corrcoef(torch.stack([p, q]))[0, 1] > 0.99, name
