"""The rows of a rollout: what is drawn together, what counts of a draft, which decoder is used."""

import ast
import inspect
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_models import FAMILIES, PROMPTS, VOCABULARY, make_tiny_model, rollout, write_model

from grpo import fast
from grpo.fast import decoder as fast_decoder
from grpo.fast.decoder import EagerRows, accepted
from grpo.model.load import load_policy
from grpo.rollout.generate import RolloutRequest, generate
from grpo.rollout.sampling import sample_key


def test_completions_that_agree_so_far_are_one_row(tmp_path, monkeypatch):
    config = FAMILIES["llama-3 rotary scaling"]()
    policy = load_policy(write_model(config, tmp_path), device="cpu")
    policy.stops = tuple(range(0, VOCABULARY, 40))
    rows, extend = [], policy.forward.extend
    monkeypatch.setattr(
        policy.forward,
        "extend",
        lambda tokens, shared: rows.append(len(tokens)) or extend(tokens, shared),
    )
    _, groups = rollout(policy, samples=8, temperature=0.15)
    texts = [(p, answer.tokens) for p, group in enumerate(groups) for answer in group]
    assert rows == [
        len({(p, tokens[:n]) for p, tokens in texts if len(tokens) > n})
        for n in range(1, 1 + len(rows))
    ]
    assert rows[0] < max(rows) < len(texts) > rows[-1] > 0  # some agree, go apart, and end
    keys = [[sample_key(0, 1, prompt, sample, 0) for sample in range(8)] for prompt in PROMPTS]
    for prompt, row, group in zip(PROMPTS, keys, groups):
        one = RolloutRequest([policy.encode(prompt)], [[0]], 0.15, [24])
        alone = [generate(policy, replace(one, keys=[[key]]))[0][0] for key in row]
        assert [answer.tokens for answer in alone] == [answer.tokens for answer in group]


def test_what_counts_of_a_draft_by_hand():
    chosen = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4], [1, 9, 3, 4], [5, 2, 3, 4], [9, 9, 9, 9]])
    drafts = torch.tensor([[1, 2, 3], [1, 7, 3], [1, 9, 3], [1, 2, 3], [9, 9, 9]])
    # all as drafted, and the one behind; the first that differs is the sample; 9 ends the text;
    # the first differs; ended at once
    assert accepted(chosen, drafts, torch.tensor([9])).tolist() == [4, 2, 2, 1, 1]
    assert accepted(chosen[:, :1], drafts[:, :0], torch.tensor([9])).tolist() == [1] * 5


@pytest.mark.parametrize(
    "case",  # row, written, last; then sources, row and first
    [
        # two go on from row 0 with the same token, but one has read more; row 3 has ended, and
        # gives its place
        "00122 56555 11122 0120 03122 0231",
        # row 1 goes on with three tokens; the first part stays
        "01111 55555 79896 0111 03231 0421",
        # rows 0 and 1 have ended
        "233 555 111 23 011 01",
    ],
)
def test_splitting_rows_by_hand(case):
    *state, sources, row_then, first = ([*map(int, digits)] for digits in case.split())
    decoder = EagerRows.__new__(EagerRows)
    decoder.row, decoder.written, decoder.last = map(torch.tensor, state)
    assert decoder._split_rows().tolist() == sources
    assert decoder.row.tolist() == row_then and decoder.first.tolist() == first


class _Kernel:
    """Stands in for a kernel of `grpo.fast.decode_kernels`: checks the arguments, does nothing."""

    def __init__(self, kernel: ast.FunctionDef):
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(each.arg, kind) for each in kernel.args.args]
        self.signature = inspect.Signature(parameters)

    def __getitem__(self, grid):
        def launch(*arguments, **named):
            for option in ("num_warps", "num_stages"):
                named.pop(option, None)
            self.signature.bind(*arguments, **named)

        return launch


def test_the_captured_step_launches_its_kernels_as_they_are_declared(policy, monkeypatch):
    """Everything but the kernels runs here, on a CPU, and the rows are those of the request."""
    source = ast.parse(Path(fast.__file__).with_name("decode_kernels.py").read_text())
    kernels = SimpleNamespace()
    for kernel in source.body:
        if isinstance(kernel, ast.FunctionDef):
            setattr(kernels, kernel.name, _Kernel(kernel))
    monkeypatch.setitem(sys.modules, "grpo.fast.decode_kernels", kernels)
    monkeypatch.setattr(fast, "decode_kernels", kernels, raising=False)
    monkeypatch.setattr(fast_decoder.CudaStep, "run", fast_decoder.CudaStep.step)  # no graph

    step = fast_decoder.CudaStep(policy)
    prompts, keys = [(1, 2, 3), (4, 5)], [[11, 12], [13, 14]]
    request = RolloutRequest(prompts, keys, temperature=0.5, budgets=[5, 6])
    rows = fast_decoder.CudaRows(step, request, room=9)
    state = step.memory.state
    assert state.key[:4].tolist() == [11, 12, 13, 14] and state.live[:4].tolist() == [1] * 4
    assert step.memory.temperature.tolist() == [0.5]
    assert state.budget[:4].tolist() == [5, 5, 6, 6] and state.start[:4].tolist() == [3, 3, 2, 2]

    # The tokens after the prompts, tokens without drafts, and drafts of three tokens.
    for drafted, passes in ((0, 1), (0, 6), (3, 4)):
        rows.start(torch.zeros(4, drafted, dtype=torch.long))
        assert rows.new == passes
    rows.live[:] = torch.tensor([True, False, True, False])
    assert rows.retire().tolist() == [0, 2] and state.key[:2].tolist() == [11, 13]


@pytest.fixture
def policy(tmp_path):
    return load_policy(str(make_tiny_model(tmp_path)), device="cpu", lora_rank=4)


def b_matrices(policy):
    return [w for name, w in policy.model.named_parameters() if ".lora_B." in name]


def test_a_rollout_whose_numbers_are_not_finite_is_repeated_without_the_captured_step(
    policy, monkeypatch
):
    class BrokenRows(EagerRows):
        def finish(self):
            chosen, logprobs, count = super().finish()
            return chosen, logprobs.masked_fill(self.written[:, None] > 3, math.nan), count

    keys = [[sample_key(0, 1, prompt, sample, 0) for sample in range(4)] for prompt in "ab"]
    request = RolloutRequest([(5, 6, 7), (8, 9)], keys, 1.0, [8] * 2)
    decoder = policy.decoder
    expected = decoder.decode(request)

    monkeypatch.setattr(decoder, "step", object())
    monkeypatch.setattr(decoder, "rows", lambda *arguments: BrokenRows(policy, *arguments))
    assert decoder.decode(request) == expected
    (note,) = policy.take_events()
    assert "not finite: this rollout was repeated" in note


@pytest.mark.parametrize(("difference", "is_used"), [(1e-5, True), (0.5, False)])
def test_the_comparison_does_not_see_what_the_adapters_have_learned(
    policy, monkeypatch, difference, is_used
):
    """It sees the same small adapters in every run; afterwards the policy is as before."""
    for weight in b_matrices(policy):
        weight.data.fill_(7.0)
    policy.forward.llama.refresh()
    layers = policy.forward.llama.linears
    targets = [target for layer in layers for target, _, _ in layer.copies()]
    merged = [target.clone() for target in targets]
    seen = []

    def compare(step):
        policy.forward.llama.refresh()  # as a rollout does
        seen.extend(weight.std().item() for weight in b_matrices(policy))
        return difference

    monkeypatch.setattr(fast_decoder, "CudaStep", lambda policy: "the step")
    monkeypatch.setattr(fast_decoder, "disagreement", compare)
    cuda = torch.device("cuda")
    on_gpu = SimpleNamespace(device=cuda, causal=policy.causal, forward=policy.forward)
    monkeypatch.setattr(policy.forward.llama, "D", 32)
    if is_used:
        assert fast_decoder.FastDecoder(on_gpu).step == "the step"
    else:
        with pytest.warns(
            UserWarning, match="the fused decoder disagrees with the model by 5.0e-01"
        ):
            assert fast_decoder.FastDecoder(on_gpu).step is None

    assert len(seen) == len(b_matrices(policy)) and all(0.01 < each < 0.05 for each in seen)
    assert all((weight == 7.0).all() for weight in b_matrices(policy))
    assert all(torch.equal(new, old) for new, old in zip(targets, merged, strict=True))
