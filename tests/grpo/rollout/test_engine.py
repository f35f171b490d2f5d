"""Engines: the same samples and curves as by our own decoder; one line for what they get wrong."""

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from servers import completion, serving, vllm
from small_library import QUICK, ROWS, reward
from small_runs import BY_PLACE, FEW
from small_train import fails
from tiny_architectures import ARCHITECTURES, write

from grpo import make_trainer
from grpo import train as train_by_library
from grpo.data.errors import UserError
from grpo.model.load import load_policy
from grpo.rollout import engine, server
from grpo.rollout.engine import EngineDecoder, TransformersEngine
from grpo.rollout.generate import RolloutRequest
from grpo.rollout.sampling import sample_key
from grpo.run.logs import load_run
from grpo.tools import train
from grpo.tools.replay import replay

SMALL = [*FEW, *"--config {'eval_problems':2,'dynamic_sampling':0}".split()]
SMALL += "--eval-every 0 --save-every 9".split()


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(server, "PAUSES", (0, 0))


@pytest.mark.parametrize("lora_rank", [0, 4])
@pytest.mark.parametrize("name", ["transformers", "vllm:URL"])
def test_greedy_tokens_are_those_of_our_decoder_after_each_update(tiny_model, name, lora_rank):
    policy = load_policy(str(tiny_model), device="cpu", lora_rank=lora_rank)
    prompts = [(5, 8, 13), (21, 34)]
    request = RolloutRequest(prompts, [[sample_key(p, 0)] for p in range(2)], 0.0, [6, 9])
    with serving(vllm(tiny_model)) as (url, log):
        decoder, written = EngineDecoder(None, name.replace("URL", url), policy, 1.0), set()
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            for weight in policy.parameters:
                weight.data += 0.1 * torch.randn(weight.shape, generator=generator)
            decoder.update()
            found, wanted = decoder.decode(request), policy.decoder.decode(request)
            assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
            for (tokens, one), (_, other) in zip(found, wanted):
                torch.testing.assert_close(one, other, atol=1e-4, rtol=0)
                written.add(tuple(tokens))
    assert len(written) > 2  # the weights matter
    loads = [body for body in log.bodies if "lora_name" in body and "lora_path" not in body]
    assert len(loads) == 2 * (lora_rank > 0 and name != "transformers")


@pytest.mark.slow
def test_the_same_run_by_each_engine_has_the_same_curve():
    flags = "--words 4 --prompts 8 --group-size 8 --preflight off --device cpu --steps 4"
    flags += " --eval-every 0 --config {'eval_problems':2,'temperature':0.9,'dynamic_sampling':0}"
    with serving(vllm("builtin")) as (url, _):
        for name in ("", "transformers", f"vllm:{url}"):
            of_engine = ["--engine", name] if name else []
            run = name.partition(":")[0] or "own"
            assert train.main([*flags.split(), *of_engine, "--name", run]) == 0
    own, *others = (load_run(f"runs/{name}") for name in ("own", "transformers", "vllm"))
    for run in others:
        for mine, line in zip(own.metrics, run.metrics, strict=True):
            assert line["parity/kl"] < 1e-8 and line["engine"]
            assert line["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-4)
            # Means of 64 rewards, whose standard deviation is 0.3: 4 of their difference.
            assert line["reward"] == pytest.approx(mine["reward"], abs=0.21)


def always(tokens, logprobs):
    """Return what makes the choices of an answer the same completion."""
    return lambda choices: [completion(tokens, logprobs) for _ in choices]


# What a server does from the second step on, and what the run then says. It answers at one address
# with a status, or it spoils the choices of its answers.
FAULTS = {
    "dies": (("/v1/completions", 503), "2 tries failed; the last: status 503: no"),
    "breaks": (("/v1/completions", 500), "/completions: status 500: no; step 1 is saved"),
    "refuses": (("/v1/completions", 400), "/completions: status 400: no"),
    "for users": (("/collective_rpc", 404), "--model and VLLM_SERVER_DEV_MODE=1 (or"),
    "fixed": (("/v1/load_lora_adapter", 404), "=True, --enable-lora and --max-lora-rank 128, w"),
    "busy": (("/reset_prefix_cache", 200, {"success": False}), "let it serve this run alone"),
    "raw": (always([3], [-2.0]), "start the server with --logprobs-mode processed_logprobs"),
    "hangs": (lambda choices: time.sleep(2.5), ": no answer within 2 s; step 1 is saved"),
    "count": (lambda choices: choices[1:], "returned 6 completions of 2 prompts; 4 of each of 2"),
    "no tokens": (lambda choices: [{"text": "a"}] * 4, "the response is not that of vLLM: {"),
    "null": (always([5] * 8, [None] * 8), "has a log-probability of None; give that of"),
    "nan": (always([5] * 8, [float("nan")] * 8), "has a log-probability of nan"),
    "few": (always([5] * 8, [-1.0]), "has 1 log-probabilities of 8 tokens"),
    "outside": (always([10**6] * 8, [-1.0] * 8), "has token 1000000; the policy has"),
    "fractions": (always([5.0] * 8, [-1.0] * 8), "'float' object cannot be interpreted as an int"),
    "short": (always([5], [-1.0]), "ends after 1 of 8 tokens without an end token"),
    "on": (always([3] * 8, [-1.0] * 8), "goes on after an end token"),
    "none": (always([], []), "has 0 tokens; give 1 to 8"),
    "other model": (
        lambda choices: [completion([5 + n % 4] * 8, [-0.01] * 8) for n in range(len(choices))],
        "nats a token from the policy's (KL); it must",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_an_engine_gets_wrong_is_one_line_and_the_run_goes_on(
    quick_flags, tiny_model, monkeypatch, capsys, fault
):
    monkeypatch.setattr(engine, "LIMIT", 2.0 if fault == "hangs" else 60.0)
    spoil, message = FAULTS[fault]
    good, updates = vllm(tiny_model), []

    def bad(body, number):
        status, headers, answer = good(body, number)
        updates.extend([1] * (body["path"] in ("/collective_rpc", "/v1/load_lora_adapter")))
        if len(updates) < 2:
            return status, headers, answer
        if isinstance(spoil, tuple):
            path, refusal, *words = spoil
            if body["path"] == path:
                return refusal, {}, words[0] if words else b"no"
            return status, headers, answer
        return status, headers, {"choices": spoil(answer["choices"])} if "prompt" in body else b""

    flags = [*SMALL, *quick_flags, "--steps", "3", "--name", "a"]
    flags += {"fixed": ["--lora-rank", "65"], "raw": ["--temperature", "0.7"]}.get(fault, [])
    with serving(bad) as (url, _):
        line = fails(capsys, *flags, "--engine", f"vllm:{url}")
    assert message in line and "step 1 is saved, continue with --resume runs/a" in line
    if fault == "dies":
        again = [*quick_flags, "--resume", "runs/a", "--engine"]
        assert "2 tries failed; the last: ConnectError" in fails(capsys, *again, f"vllm:{url}")
        with serving(good) as (url, log):
            assert train.main([*again, f"vllm:{url}"]) == 0
        assert [line["step"] for line in load_run("runs/a").metrics] == [1, 2, 3]
        assert len([body for body in log.bodies if "prompt" in body]) == 4


def test_a_server_with_a_short_context_is_one_line(quick_flags, tiny_model, capsys):
    """It would cut the completions off, and say that their budget did."""
    with serving(vllm(tiny_model, context=16)) as (url, log):
        line = fails(capsys, *SMALL, *quick_flags, "--steps", "1", "--engine", f"vllm:{url}")
    assert "the server takes 16; start it with --max-model-len" in line
    assert not any("prompt" in body for body in log.bodies)


def test_transformers_writes_many_completions_at_a_time(tiny_model, monkeypatch):
    monkeypatch.setitem(engine.SIZES, "cpu", (32, 64, 8))
    policy, passes = load_policy(str(tiny_model), device="cpu"), []
    policy.causal.register_forward_pre_hook(lambda *_: passes.append(1))
    (decoder := EngineDecoder(None, "transformers", policy, 1.0)).update()
    request = RolloutRequest([(p, 8, 13) for p in range(5, 9)], [range(8)] * 4, 1.0, [9] * 4)
    assert len(decoder.decode(request)) == 32 and len(passes) < 50


def test_an_architecture_that_transformers_cannot_batch_is_one_line(tmp_path, capsys):
    write(next(each for each in ARCHITECTURES if each.kind == "lfm2"), tmp_path / "lfm2")
    flags = [*SMALL, *BY_PLACE, "--model", str(tmp_path / "lfm2"), "--max-new-tokens", "8"]
    line = fails(capsys, *flags, "--steps", "1", "--engine", "transformers")
    assert "its continuous batching cannot run Lfm2ForCausalLM; leave it out (ValueError:" in line


class Mine(TransformersEngine):
    updates, requests = 0, ()

    def __len__(self):  # an engine that counts as false is one
        return 0

    def update(self, policy):
        self.policy, self.updates = policy, self.updates + 1

    def generate(self, requests):
        self.requests += tuple(requests)
        return [[as_arrays(one) for one in group] for group in super().generate(requests)]


def as_arrays(one):
    logprobs = np.array(one.logprobs, dtype=np.float32)
    return replace(one, tokens=np.array(one.tokens), logprobs=logprobs)


def test_an_object_is_an_engine(tiny_model):
    Path("tiny").symlink_to(tiny_model)
    run = train_by_library(ROWS, reward, **QUICK, engine=(mine := Mine()), name="a")
    assert mine.updates == 2 and run.metrics[0]["engine"] == "python:Mine"
    assert run.metrics[0]["parity/kl"] < 1e-8
    (one, two, *_) = mine.requests
    assert (one.n, one.max_tokens, one.temperature, one.top_p) == (4, 8, 1.0, 1.0)
    assert one.seed != two.seed
    with pytest.raises(UserError, match="step 1 was sampled by --engine .*not replayable"):
        replay(run, 1)
    with pytest.raises(UserError, match="give the object again, as grpo.train"):
        train_by_library(ROWS, reward, resume="runs/a", steps=3)
    assert len(train_by_library(ROWS, reward, resume="runs/a", steps=3, engine=mine).metrics) == 3

    mine.generate = lambda requests: 1 / 0
    with pytest.raises(UserError, match="--engine python:Mine raised ZeroDivisionError"):
        make_trainer(ROWS, reward, engine=mine, model="tiny").step()
