"""Engines of the user's choice, which sample the completions that a run trains on.

An engine is any object with the two methods of `Engine`: ``grpo.train(engine=OBJECT)``. Two are
here: `--engine transformers` and `--engine vllm:URL`. Evaluations and all that comes before the
first step use the policy's own decoder, so scores compare with those of other runs.

An engine draws its own random numbers, and its log-probabilities differ from the trainer's by
rounding. So a step cannot be replayed, and the update weights its tokens (`grpo.learn.update`).
"""

import logging
import math
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from operator import index
from pathlib import Path
from typing import Any, Protocol

import httpx
import torch
from transformers import GenerationConfig
from transformers.generation import ContinuousBatchingConfig

from grpo.config import FROM_PYTHON
from grpo.data.errors import EngineError, UserError, blaming
from grpo.distributed import SINGLE, Ranks
from grpo.model.policy import Policy, save_model
from grpo.records import Completion
from grpo.rollout.generate import RolloutRequest, Written
from grpo.rollout.server import Server, reason_of
from grpo.tasks.base import calling

VLLM = "vllm:"  # begins the setting of a vLLM server
KEY = "VLLM_API_KEY"  # the variable from which the server itself takes its key
LIMIT = 600.0  # seconds of a request to a server
AT_A_TIME = 64  # requests to a server

# Of `transformers`, by device: tokens of a block of keys and values, tokens of a forward pass, and
# completions at a time, all of whose keys each of them reads, masked (8 x 8 completions of the
# embedded model, 25 words, on a CPU: 64 take 8.8 s, 16 take 4.1 s, 8 take 4.8 s; 16 x 16 of a model
# of 0.5B, 96 tokens, on an H200: 64 write 1,650 tokens/s, 128 write 2,460, 256 write 2,530). By
# default it would take most of a GPU's free memory for each call.
SIZES = {"cpu": (32, 1024, 16), "cuda": (256, 2048, 128)}


@dataclass(frozen=True)
class EngineRequest:
    """Completions of one prompt. All requests of a call have the same n, temperature and top_p.

    The names are those of OpenAI's API, and of vLLM's.
    """

    prompt: tuple[int, ...]  # token ids
    n: int  # completions
    max_tokens: int  # of each, its end token included
    temperature: float  # 0: the likeliest token
    top_p: float  # 1: all tokens
    seed: int
    stop_token_ids: tuple[int, ...]  # of the tokens that end a completion, and are its last one


class Engine(Protocol):
    """What samples. An exception of either method ends the run in one line, after it is saved."""

    def update(self, policy: Policy) -> None:
        """Take the weights of `policy`, before the first call of `generate` and after each update.

        `policy.save(folder)` writes them in Hugging Face's layout, or PEFT's if `policy.is_lora`.
        """

    def generate(self, requests: Sequence[EngineRequest]) -> Sequence[Sequence[Completion]]:
        """Return the `n` completions of each request.

        A completion has its tokens with the end token, their log-probabilities under the
        distribution that they were drawn from (temperature and top_p included), the text, which
        may be "" (the policy decodes the tokens itself), and `finish`, "stop" or "length".
        """


class EngineDecoder:
    """Asks an engine, and checks what it returns. `name` is the setting `engine`."""

    def __init__(
        self, engine: Engine | None, name: str, policy: Policy, top_p: float, ranks: Ranks = SINGLE
    ):
        if ranks.size > 1:
            raise UserError("--engine: trains on one rank; leave it out, or start without torchrun")
        self.where, self.policy, self.top_p = f"--engine {name}", policy, top_p
        with self._calling():
            if engine is not None:
                self.engine = engine
            elif name.startswith(FROM_PYTHON):
                raise UserError("give the object again, as grpo.train(engine=OBJECT)")
            elif name.startswith(VLLM):
                self.engine = VllmEngine(name.removeprefix(VLLM))
            else:
                self.engine = TransformersEngine()

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Make all that goes wrong within this block an EngineError."""
        try:
            with calling(self.where):
                yield
        except UserError as error:
            where = "" if str(error).startswith("--engine") else f"{self.where}: "
            raise EngineError(f"{where}{error}") from error

    def update(self) -> None:
        """Give the engine the policy's weights."""
        with self._calling():
            self.engine.update(self.policy)

    def decode(self, request: RolloutRequest) -> Written:
        """Return the tokens of each completion, and their log-probabilities."""
        G, stops = request.group_size, self.policy.stops
        heat = request.temperature
        asked = [
            EngineRequest(prompt, G, budget, heat, self.top_p, keys[0] % 2**31, stops)
            for prompt, budget, keys in zip(request.prompts, request.budgets, request.keys)
        ]
        with self._calling():
            groups = [list(group) for group in self.engine.generate(asked)]
            counts = [len(group) for group in groups]
            if counts != [G] * len(asked):
                raise UserError(
                    f"returned {sum(counts)} completions of {len(counts)} prompts; {G} of each of "
                    f"{len(asked)} prompts were asked for"
                )
            for one, group in zip(asked, groups):
                for each in group:
                    if fault := fault_of(each, one, self.policy.vocabulary):
                        raise UserError(f"a completion {fault}")
            return [  # plain numbers: an engine of the user's own may give NumPy's or PyTorch's
                ([*map(index, each.tokens)], [*map(float, each.logprobs)])
                for group in groups
                for each in group
            ]


def fault_of(completion: Completion, asked: EngineRequest, vocabulary: int) -> str:
    """Return what is wrong with a completion; "" if nothing is."""
    tokens, logprobs = completion.tokens, completion.logprobs
    count, most = len(tokens), asked.max_tokens
    if not 0 < count <= most:
        return f"has {count} tokens; give 1 to {most}"
    for token in tokens:
        if not 0 <= token < vocabulary:
            return f"has token {token}; the policy has {vocabulary} tokens: serve the same model"
    if len(logprobs) != count:
        return f"has {len(logprobs)} log-probabilities of {count} tokens; give one of each"
    for logprob in logprobs:
        if logprob is None or not -math.inf < logprob < 0.01:  # rounded, it may be above 0
            return f"has a log-probability of {logprob}; give that of the token that was drawn"
    if any(token in asked.stop_token_ids for token in tokens[:-1]):
        return "goes on after an end token; end it there"
    if count < most and tokens[-1] not in asked.stop_token_ids:
        why = f"finish reason {completion.finish}"
        return f"ends after {count} of {most} tokens without an end token ({why}); go on until one"
    return ""


class TransformersEngine:
    """The continuous batching of `transformers`, in this process, on the policy's own weights.

    Its memory is taken for each call, and is free during the update. With `return_logprobs` it
    returns the log-probabilities of the processed logits, which are those that we need.
    """

    def update(self, policy: Policy) -> None:
        """Take the policy itself."""
        self.policy = policy

    def generate(self, requests: Sequence[EngineRequest]) -> list[list[Completion]]:
        """Return the completions; UserError if the architecture cannot be run in this way."""
        model, (first, *_) = self.policy.causal, requests
        block, most_tokens, rows = SIZES[model.device.type]
        longest = max(len(one.prompt) + one.max_tokens for one in requests)
        blocks = first.n * (longest // block + 1)  # of the completions of a prompt
        most = self.policy.prompts_at_once(1, 0, 2 * blocks * block)
        if len(requests) > most:
            return self.generate(requests[:most]) + self.generate(requests[most:])

        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
        generation = GenerationConfig(
            do_sample=first.temperature > 0,
            temperature=first.temperature or 1.0,
            top_p=first.top_p,
            top_k=0,
            eos_token_id=list(first.stop_token_ids),
            pad_token_id=first.stop_token_ids[0],
            num_return_sequences=first.n,
        )
        batching = ContinuousBatchingConfig(
            block_size=block,
            # With less than a fifth of them to spare, it writes one completion at a time.
            num_blocks=3 * len(requests) * blocks // 2 + 2,
            max_batch_tokens=most_tokens,
            max_requests_per_batch=rows,
            return_logprobs=True,
            seed=first.seed,
        )
        before = attention = model.config._attn_implementation
        if self.policy.path in ("fast", "shared"):  # it has the attention of our own rollouts
            attention = "sdpa"
        if model.dtype == torch.float32:
            # Otherwise it may choose flash attention, which needs half precision.
            attention = f"paged|{attention}"
        fault = f"its continuous batching cannot run {type(model).__name__}; leave it out"
        try:
            with blaming(fault):
                model.set_attn_implementation(attention)
                # It seeds torch, whose numbers belong to the user's reward.
                with (
                    torch.random.fork_rng([model.device] if model.device.type == "cuda" else []),
                    model.continuous_batching_context_manager(
                        generation_config=generation, continuous_batching_config=batching
                    ) as manager,
                ):
                    return self._collect(manager, requests)
        finally:
            model.set_attn_implementation(before)

    def _collect(self, manager: Any, requests: Sequence[EngineRequest]) -> list[list[Completion]]:
        groups: list[list[Completion]] = [[] for _ in requests]
        for p, one in enumerate(requests):
            manager.add_request(list(one.prompt), str(p), max_new_tokens=one.max_tokens)

        while sum(map(len, groups)) < sum(one.n for one in requests):
            result = manager.get_result(timeout=1)
            if result is None and not manager.is_running():
                raise RuntimeError(manager.background_thread_status.fatal_error)
            if result is not None and result.is_finished():
                if result.error:
                    raise RuntimeError(result.error)
                p = int(result.request_id.partition("__")[0])  # of a fork: "3__child#1"
                tokens = tuple(result.generated_tokens)
                finish = "stop" if tokens[-1] in requests[p].stop_token_ids else "length"
                groups[p].append(Completion(tokens, tuple(result.logprobs), "", finish))
        return groups


class VllmEngine:
    """A vLLM server (0.24 or newer) at an address that serves the base model of the policy.

    A LoRA adapter is written to a folder for POST /v1/load_lora_adapter, and the one before is
    unloaded (https://docs.vllm.ai/en/latest/features/lora). All weights are written as a checkpoint
    for the method `reload_weights` of POST /collective_rpc, and cached prefixes are forgotten
    (https://docs.vllm.ai/en/latest/training/layerwise, and /features/sleep_mode for the addresses).
    Both must see the folder, which is below TMPDIR.
    """

    def __init__(self, address: str):
        self.server = Server(f"--engine {VLLM}", address, key=KEY, timeout=LIMIT)
        response = self._call("/models")
        with self.server.reading(response, "vLLM"):
            # The base model has no parent; adapters do.
            base = next(one for one in response.json()["data"] if not one.get("parent"))
            self.base, self.context = base["id"], base["max_model_len"]
        self.model, self.updates = self.base, 0
        self.folder = tempfile.mkdtemp(prefix="grpo-engine-")
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    def _call(self, path: str, body: Any = None, needs: str = "") -> httpx.Response:
        response = self.server.ask(path, body)
        if response.is_success:
            return response
        reason = f"{path.removeprefix('/..')}: {reason_of(response)}"
        if needs:
            reason += f"; start the server with the model of --model and {needs}, where it can read"
            reason += f" {self.folder}"
        raise UserError(f"{self.server.where}: {reason}")

    def update(self, policy: Policy) -> None:
        """Write the weights to a folder of their own, and let the server load them."""
        self.updates += 1
        name = f"{Path(self.folder).name}-{self.updates}"  # no earlier run's
        folder = Path(self.folder, name)
        save_model(policy.model, folder)
        if policy.is_lora:
            needs = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, --enable-lora and --max-lora-rank "
            needs += str(max(64, 1 << (policy.lora_rank - 1).bit_length()))  # one that vLLM knows
            self._call("/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}, needs)
            before, self.model = self.model, name
            if before != self.base:
                self._call("/unload_lora_adapter", {"lora_name": before}, needs)
                shutil.rmtree(folder.with_name(before))
        else:
            needs = "VLLM_SERVER_DEV_MODE=1 (or give --lora-rank)"
            reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            self._call("/../collective_rpc", reload, needs)  # beside "/v1"
            if b"false" in self._call("/../reset_prefix_cache", {}, needs).content:
                raise UserError(
                    f"{self.server.where}: keeps the cached prefixes of the weights before, as it "
                    "is answering others; let it serve this run alone"
                )
            shutil.rmtree(folder)

    def generate(self, requests: Sequence[EngineRequest]) -> list[list[Completion]]:
        """Return the completions of each request, several of which are under way at once."""
        first = requests[0]
        longest = max(len(one.prompt) + one.max_tokens for one in requests)
        if longest > self.context:  # it would cut the completions off
            raise UserError(
                f"{self.server.where}: a prompt and its completion may have {longest} tokens, and "
                f"the server takes {self.context}; start it with --max-model-len {longest} or more"
            )
        if (first.temperature, first.top_p) != (1, 1):
            # The only token that is allowed has the log-probability 0, unless it is the model's
            # own, which leaves temperature and top_p out, as by default.
            only = {"n": 1, "max_tokens": 1, "allowed_token_ids": [first.stop_token_ids[0]]}
            (answer,) = self._ask(first, **only)
            if answer.logprobs[0] < -0.001:
                raise UserError(
                    f"{self.server.where}: its log-probabilities leave out temperature and top_p; "
                    "start the server with --logprobs-mode processed_logprobs"
                )
        with ThreadPool(min(AT_A_TIME, len(requests))) as pool:
            return list(pool.imap(self._ask, requests))

    def _ask(self, request: EngineRequest, **changes: Any) -> list[Completion]:
        # Else these come from the model's generation_config.json. There is no seed, because a
        # request with one crashes vLLM's build for CPUs (0.32) when it prefills a prompt in parts.
        neutral = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "seed": None}
        returned = {"logprobs": 1, "return_token_ids": True}
        body = {"model": self.model, **vars(request), **neutral, **returned, **changes}
        response = self._call("/completions", body)
        with self.server.reading(response, "vLLM"):
            return [
                Completion(
                    tuple(choice["token_ids"]),
                    tuple(choice["logprobs"]["token_logprobs"]),
                    choice["text"],
                    choice["finish_reason"],
                )
                for choice in response.json()["choices"]
            ]
