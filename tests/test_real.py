"""On a real model: `GRPO_REAL_MODEL=DIR python -m pytest -m real -s`. Minutes on a CPU, for 135 M
parameters.

The log-probabilities of sampler and trainer are those of plain `transformers`; a run that was
killed and resumed is the one that was not, to the bit; what is exported answers as the checkpoint
does. Figures are printed (`-s`).
"""

import os
import time
from pathlib import Path

import pytest
import torch
from compare_runs import assert_same_run
from peft import PeftModel
from small_train import killed_in
from tiny_architectures import own_logprobs
from transformers import AutoModelForCausalLM

from grpo import export
from grpo.learn.batch import token_logprobs
from grpo.model.load import load_policy
from grpo.model.prompts import end_of_turn
from grpo.rollout.generate import RolloutRequest, generate
from grpo.rollout.sampling import sample_key
from grpo.run.logs import read_metrics
from grpo.tasks.registry import load_task
from grpo.tasks.supply import problem_at
from grpo.tools import train

MODEL = os.environ.get("GRPO_REAL_MODEL", "")
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not MODEL, reason="GRPO_REAL_MODEL names no model"),
    pytest.mark.filterwarnings("default"),  # a real model's files may be of any age
]

ROUNDING = 1e-3  # nats, of one token, in float32
LORA = (
    "--task interleave --words 2 --reward similarity --lora-rank 16 --learning-rate 1e-4 "
    "--prompts 2 "
    "--group-size 4 --steps 3 --save-every 1 --config {'eval_problems':4} --device cpu"
).split()


def test_log_probabilities_are_those_of_transformers():
    task = load_task("interleave")
    problems = [problem_at(task, seed=0, split="train", level=5, index=i) for i in range(3)]
    policy = load_policy(MODEL, device="cpu", dtype="float32")
    prompts = [policy.encode(problem.prompt) for problem in problems]
    keys = [[sample_key(i, j) for j in range(4)] for i in range(3)]
    start = time.perf_counter()
    groups = generate(policy, RolloutRequest(prompts, keys=keys, temperature=1.0, budgets=[40] * 3))
    sampled = time.perf_counter() - start
    completions = [completion for group in groups for completion in group]

    start = time.perf_counter()
    tokens = [completion.tokens for completion in completions]
    with torch.no_grad():
        packing = policy.forward.pack(prompts, tokens)
        together_M = torch.tensor([token for each in tokens for token in each])
        targets_U = packing.distinct(together_M)
        trained_U, _ = token_logprobs(policy.forward.predict(packing), policy.head, targets_U, 1.0)
        trained_M = packing.of_tokens(trained_U)
    packed = time.perf_counter() - start

    plain = AutoModelForCausalLM.from_pretrained(
        MODEL, dtype=torch.float32, attn_implementation="eager"
    )
    wanted_M = torch.cat(
        [own_logprobs(plain, prompts[i // 4], each) for i, each in enumerate(tokens)]
    )
    sampled_M = torch.tensor([value for each in completions for value in each.logprobs])
    sampler, trainer = ((x_M - wanted_M).abs().max().item() for x_M in (sampled_M, trained_M))
    print(
        f"\n{len(together_M)} tokens by path {policy.path}: largest difference to transformers "
        f"{sampler:.2e} "
        f"(sampler, {sampled:.1f} s), {trainer:.2e} (trainer, {packed:.1f} s)"
    )
    assert sampler < ROUNDING and trainer < ROUNDING
    assert wanted_M.std() > 0.1  # tokens of many probabilities


def test_the_chat_template_ends_answers_with_a_stop_token():
    policy = load_policy(MODEL, device="cpu", dtype="float32")
    assert policy.end in policy.stops
    assert end_of_turn(policy.tokenizer) in (policy.end, None)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run of three steps."""
    folder = tmp_path_factory.mktemp("real")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        start = time.perf_counter()
        assert train.main([*LORA, "--model", MODEL, "--name", "whole"]) in (0, 3)
        print(
            f"\nthree steps of 8 completions, two evaluations: {time.perf_counter() - start:.0f} s"
        )
    return folder


def test_a_step_trains(whole):
    lines = read_metrics(whole / "runs/whole/metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert any(line.get("grad_norm", 0) > 0 for line in lines)
    parity = [line["sampling/sampling_logp_difference/max"] for line in lines if "loss" in line]
    print(f"\nsampler against trainer within the run: {max(parity):.2e}")
    assert max(parity) < ROUNDING


def test_killed_and_resumed_is_the_run_that_was_not(whole, monkeypatch):
    monkeypatch.chdir(whole)
    with killed_in(2, is_saved=True):
        train.main([*LORA, "--model", MODEL, "--name", "cut"])
    assert train.main(["--resume", "runs/cut"]) in (0, 3)
    assert_same_run(Path("runs/whole"), Path("runs/cut"))


def test_what_is_exported_is_the_checkpoint(whole, monkeypatch):
    monkeypatch.chdir(whole)
    assert export.main(["runs/whole", "merged"]) == 0
    assert export.main(["runs/whole", "adapter", "--adapter"]) == 0
    checkpoint = Path("runs/whole/checkpoints/step-000003")
    policy = load_policy(MODEL, device="cpu", weights=checkpoint, dtype="float32")
    prompt, completion = policy.encode("Name three towns."), (500, 600, 700, policy.end)

    def logprobs(model):
        return own_logprobs(model.float(), prompt, completion)

    def base():
        return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)

    wanted = logprobs(PeftModel.from_pretrained(base(), checkpoint))
    alone = logprobs(PeftModel.from_pretrained(base(), "adapter"))
    merged = logprobs(AutoModelForCausalLM.from_pretrained("merged"))
    assert torch.equal(alone, wanted)
    print(f"\nthe merged export against the checkpoint: {(merged - wanted).abs().max():.2e}")
    torch.testing.assert_close(merged, wanted, atol=ROUNDING, rtol=0)
    assert not torch.equal(wanted, logprobs(base()))  # the adapter does something
