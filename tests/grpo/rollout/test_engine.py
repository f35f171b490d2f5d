"""Engines: the same samples and curves as by our own decoder; one line for what they get wrong."""

import json
import time
from pathlib import Path

import pytest
import torch
from servers import completion, serving, vllm
from small_library import QUICK, ROWS, reward
from small_runs import BY_PLACE
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

SMALL = (
    "--prompts 2 --group-size 4 --preflight off --device cpu --eval-every 0 --save-every 9 "
    "--config {'eval_problems':2,'dynamic_sampling':0}"
).split()


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(server, "PAUSES", (0, 0))


def decoder_of(name, policy, url):
    return EngineDecoder(None, name.replace("URL", url), policy, top_p=1.0)


@pytest.mark.parametrize("lora_rank", [0, 4])
@pytest.mark.parametrize("name", ["transformers", "vllm:URL"])
def test_greedy_tokens_are_those_of_our_decoder_after_each_update(tiny_model, name, lora_rank):
    policy = load_policy(str(tiny_model), device="cpu", lora_rank=lora_rank)
    prompts = [(5, 8, 13), (21, 34)]
    keys = [[sample_key(p, n) for n in range(2)] for p in range(2)]
    request = RolloutRequest(prompts, keys, [0.0, 0.0], [6, 9])
    with serving(vllm(tiny_model)) as (url, log):
        decoder = decoder_of(name, policy, url)
        written = set()
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


def hang(choices):
    time.sleep(0.5)
    return choices


def each(change):
    """Return what does the same to all choices of an answer."""
    return lambda choices: [change(choice) or choice for choice in choices]


def set_logprobs(logprobs):
    return each(lambda choice: choice.update(logprobs=logprobs))


FAULTS = {  # of an answer's choices from the second step on, and what is said
    "dies": (lambda choices: 1 / 0, "2 tries failed; the last: status 500: dead"),
    "hangs": (hang, ": no answer within 0.2 s; step 1 is saved"),
    "count": (lambda choices: choices[1:], "returned 6 completions of 2 prompts; 4 of each of 2"),
    "no logprobs": (set_logprobs(None), "the response is not that of vLLM: {"),
    "one null": (set_logprobs({"token_logprobs": [None] * 8}), "has a log-probability of None"),
    "few": (set_logprobs({"token_logprobs": [-1.0]}), "has 1 log-probabilities of 8 tokens"),
    "nan": (set_logprobs({"token_logprobs": [float("nan")] * 8}), "a log-probability of nan"),
    "outside": (
        lambda choices: [completion([10**6] * 8, [-1.0] * 8)] * 4,
        "has token 1000000; the policy has",
    ),
    "short": (lambda choices: [completion([5], [-1.0])] * 4, "ends after 1 of 8 tokens without"),
    "none": (lambda choices: [completion([], [])] * 4, "has 0 tokens; give 1 to 8"),
    "other model": (
        lambda choices: [completion([5] * 8, [-0.01] * 8)] * 4,
        "nats a token from the policy's (KL); it must sample from the model of --model",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_an_engine_gets_wrong_is_one_line_and_the_run_goes_on(
    quick_flags, tiny_model, monkeypatch, capsys, fault
):
    monkeypatch.setattr(engine, "LIMIT", 0.2 if fault == "hangs" else 60.0)
    spoil, message = FAULTS[fault]
    good, asked = vllm(tiny_model), []

    def bad(body, number):
        status, headers, answer = good(body, number)
        if "prompt" in body:
            asked.append(body)
            try:
                answer = {"choices": spoil(answer["choices"])} if len(asked) > 2 else answer
            except ZeroDivisionError:
                status, answer = 500, b"dead"
        return status, headers, answer

    flags = [*SMALL, *quick_flags, "--steps", "3", "--name", "a"]
    with serving(bad) as (url, _):
        line = fails(capsys, *flags, "--engine", f"vllm:{url}")
    assert message in line and "step 1 is saved, continue with --resume runs/a" in line
    if fault == "dies":
        by_hand = [*quick_flags, "--resume", "runs/a", "--engine"]
        assert "tries failed" in fails(capsys, *by_hand, f"vllm:{url}")
        with serving(good) as (url, log):
            assert train.main([*by_hand, f"vllm:{url}"]) == 0
        assert [line["step"] for line in load_run("runs/a").metrics] == [1, 2, 3]
        assert len([body for body in log.bodies if "prompt" in body]) == 4


def test_an_architecture_that_transformers_cannot_batch_is_one_line(tmp_path, capsys):
    write(next(each for each in ARCHITECTURES if each.kind == "lfm2"), tmp_path / "lfm2")
    flags = [*SMALL, *BY_PLACE, "--model", str(tmp_path / "lfm2"), "--max-new-tokens", "8"]
    line = fails(capsys, *flags, "--steps", "1", "--engine", "transformers")
    assert "its continuous batching cannot run Lfm2ForCausalLM; leave it out (ValueError:" in line


@pytest.mark.parametrize(
    ("answers", "flags", "message"),
    [
        ({"/v1/models": (404, {}, b"no")}, "", "status 404: no"),
        ({"/v1/models": (200, {}, {"data": []})}, "", "the response is not that of vLLM"),
        ({"/collective_rpc": (404, {}, b"")}, "", "start the server with VLLM_SERVER_DEV_MODE=1"),
        (
            {"/v1/load_lora_adapter": (404, {}, b"")},
            "--lora-rank 2",
            "start the server with --enable-lora, --max-lora-rank and VLLM_ALLOW_RUNTIME_LORA",
        ),
        (
            {"/v1/completions": (200, {}, {"choices": [completion([3], [-2.0])]})},
            "--temperature 0.7",
            "start the server with --logprobs-mode processed_logprobs",
        ),
    ],
)
def test_a_server_that_was_started_otherwise_is_one_line(
    quick_flags, tiny_model, capsys, answers, flags, message
):
    good = vllm(tiny_model)
    with serving(lambda body, n: answers.get(body["path"]) or good(body, n)) as (url, _):
        flags = [*SMALL, *quick_flags, *flags.split(), "--steps", "2", "--engine", f"vllm:{url}"]
        assert message in fails(capsys, *flags)


class Mine(TransformersEngine):
    def __init__(self):
        self.updates, self.requests = 0, []

    def update(self, policy):
        self.policy, self.updates = policy, self.updates + 1

    def generate(self, requests):
        self.requests += requests
        return super().generate(requests)


def test_an_object_is_an_engine(tiny_model):
    Path("tiny").symlink_to(tiny_model)
    mine = Mine()
    run = train_by_library(ROWS, reward, **QUICK, engine=mine, on_degenerate="keep", name="a")
    assert mine.updates == 2 and json.loads(json.dumps(run.metrics))[0]["engine"] == "python:Mine"
    assert run.config["facts"]["replayable"] is False and run.metrics[0]["parity/kl"] < 1e-8
    with pytest.raises(UserError, match="step 1 was sampled by --engine .*not replayable"):
        replay(run, 1)
    (first, *_) = mine.requests
    assert (first.n, first.max_tokens, first.temperature, first.top_p) == (4, 8, 1.0, 1.0)
    assert len({one.seed for one in mine.requests}) == len(mine.requests)
    with pytest.raises(UserError, match="give the object again, as grpo.train"):
        train_by_library(ROWS, reward, resume="runs/a", steps=3)
    more = train_by_library(ROWS, reward, resume="runs/a", steps=3, engine=Mine())
    assert len(more.metrics) == 3

    mine.generate = lambda requests: 1 / 0
    trainer = make_trainer(ROWS, reward, engine=mine, model="tiny")
    with pytest.raises(UserError, match="--engine python:Mine raised ZeroDivisionError"):
        trainer.step()
