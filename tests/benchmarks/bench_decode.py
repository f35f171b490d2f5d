"""Measure how fast tokens are sampled on a GPU: `python tests/benchmarks/bench_decode.py`.

The model is a Llama with random weights in bfloat16. There are three tables:

1. The decoding step alone, by batch and context; half of the context is a prompt that groups of 16
   share. Beside it stands its floor, the larger of two times measured in the same run: to read the
   weights, and the keys and values with those of a prompt once for each group, at the bandwidth of
   a copy; and to multiply, at the rate of a large matrix product.
2. Whole rollouts, by prompts, completions and new tokens, prefill included.
3. The same with speculative decoding, for a given share of right drafts. Random weights write
   nothing predictable, so a competent policy is simulated. The logits are computed as usual; then
   one of them is raised, so that the sample is the next token of a fixed text. That text is
   drafted, with each token changed at the given probability. After a rejected draft the task does
   its real work (decode, draft again, tokenise) on a real problem with as many words, for its
   time. What is written must be the fixed text, which is checked.

`--tables generate` compares rollouts of small models with `generate` of `transformers`, on any
device: 8 layers of width 64 and 16 of width 1,024, in float32; 8 completions of a prompt of 64
tokens, 32 new tokens; the least of 8 times. Beside them its continuous batching, the less of two.
"""

import argparse
import random
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from bench_model import SHAPES, adapter_of, device_name, least_time, rates
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from grpo.data.errors import UserError
from grpo.fast import decoder as fast_decoder
from grpo.fast.accelerate import accelerate
from grpo.fast.cuda_layers import bucket
from grpo.fast.decoder import CudaRows
from grpo.fast.speculative import DraftPlans
from grpo.model.load import BUILTIN, load_policy
from grpo.model.policy import Policy
from grpo.rollout.engine import EngineRequest, TransformersEngine
from grpo.rollout.generate import Drafting, RolloutRequest, generate
from grpo.tasks.interleave import Interleave
from grpo.tasks.supply import problem_at

sys.path.append(str(Path(__file__).parents[1] / "support"))
import tiny_architectures  # noqa: E402


@dataclass(frozen=True)
class Size:
    """The work of a rollout: P prompts of `prompt` tokens, G completions of `new` tokens each."""

    P: int
    G: int
    new: int
    prompt: int


ROLLOUTS = (
    Size(4, 16, 128, 150),
    Size(1, 16, 1024, 600),
    Size(8, 16, 700, 700),
    Size(16, 16, 128, 150),
    Size(1, 16, 1300, 1300),
)

# By new tokens: the words of a problem whose answer takes about as many tokens.
WORDS = {128: 25, 700: 140, 1024: 200, 1300: 250}


def make_policy(size: str, lora: int) -> Policy:
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPES[size], tie_word_embeddings=True)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    if lora:
        from peft import get_peft_model

        model = get_peft_model(model, adapter_of(lora))
    policy = Policy(model, AutoTokenizer.from_pretrained(BUILTIN), name=size)
    accelerate(policy)
    policy.stops = ()
    return policy


def time_of(work, repeats: int = 20) -> float:
    """Return the median time of `work` in seconds, by events."""
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return sorted(times)[len(times) // 2]


@torch.no_grad()
def step_time(policy: Policy, rows: int, context: int) -> tuple[float, int, int]:
    """Return the seconds of one step, the bytes that it must read, and its operations."""
    model = policy.decoder.step
    prompt = context // 2
    prompts = [tuple(random.choices(range(1000), k=prompt)) for _ in range(rows // 16)]
    room = context - prompt + 64
    P = len(prompts)
    keys = torch.randint(1 << 60, (P, 16)).tolist()
    request = RolloutRequest(prompts, keys, 1.0, [room] * P)
    decoder = CudaRows(model, request, room)
    model.memory.row_cache.normal_()
    written = model.memory.state.written
    written[:rows] = context - prompt
    tiles = decoder._lay_out(1)
    kept = written.clone()

    def run():
        written.copy_(kept)
        model.run(bucket(rows), 1, tiles, None)

    seconds = time_of(run)
    fast, size = policy.forward.llama, model.memory.row_cache.element_size()
    weights = sum(p.numel() for p in policy.causal.parameters())
    of_token = 2 * len(fast.blocks) * fast.K * fast.D  # numbers in the cache
    read = weights + of_token * (len(prompts) * prompt + rows * (context - prompt))
    multiplied = rows * (weights + len(fast.blocks) * 2 * fast.H * fast.D * context)
    return seconds, read * size, 2 * multiplied


# The architectures of `--tables generate`.
KINDS = "qwen3 gemma3_text gpt_oss qwen3_5_text qwen3_next lfm2 falcon_h1 deepseek_v3".split()
DELTA = [*["linear_attention"] * 3, "full_attention"]
LAYERS = {
    "qwen3_5_text": DELTA,
    "qwen3_next": DELTA,
    "lfm2": ["conv", "conv", "full_attention", "conv"],
}
# The sizes of the larger models.
WIDE: dict[str, Any] = {
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "linear_num_value_heads"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 16),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads"), 8),
    **dict.fromkeys(("head_dim", "linear_key_head_dim", "linear_value_head_dim"), 64),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 64),
    **dict.fromkeys(("mamba_d_head", "mamba_d_state"), 64),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 256),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 256),
    "hidden_size": 1024,
    "initializer_range": 0.03,
    "intermediate_size": 2816,
    "mamba_n_heads": 32,
    "mamba_d_ssm": 2048,
}


def rollout(policy: Policy, size: Size, repeats: int = 2, **drafts):
    """Return the least time of a whole rollout, and its completions."""
    P = size.P
    rng = random.Random(0)
    prompts = [tuple(rng.choices(range(1000), k=size.prompt)) for _ in range(P)]
    keys = [[rng.getrandbits(62) for _ in range(size.G)] for _ in range(P)]
    request = RolloutRequest(prompts, keys, 1.0, [size.new] * P, **drafts)
    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        answers = generate(policy, request)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return times[0], min(times[1:]), answers


def drafted(policy: Policy, size: Size, right: float):
    """Return the first and the best time of the rollout with drafts, and the drafting metrics.

    A share `right` of the drafted tokens is right.
    """
    P, G, new = size.P, size.G, size.new
    task = Interleave()
    rng = random.Random(1)
    model = policy.decoder.step
    problem = problem_at(task, level=WORDS[new], split="train", seed=0, index=0)
    ids = torch.tensor(policy.tokenizer(problem.target, add_special_tokens=False).input_ids)
    vocabulary = len(policy.head.weight)
    truth = [rng.choices(range(vocabulary), k=new) for _ in range(P * G)]
    plans = [
        [token if rng.random() < right else (token + 1) % vocabulary for token in row]
        for row in truth
    ]
    fixed = torch.tensor(truth, device=policy.device)

    class Simulated(DraftPlans):
        def _set(self, rows, start, plan, is_whole):
            for row in rows:  # each has a text of its own
                super()._set([row], start, plans[row][start:], True)

        def _text(self, row, tokens):
            return super()._text(row, ids[: len(ids) * len(tokens) // new])

    def sample(logits_MV, R, T, truncate):
        state = model.memory.state
        places = state.written[:R, None] + torch.arange(T, device=policy.device)
        wanted = fixed[state.slot[:R]].gather(1, places.clamp(max=new - 1))
        logits_MV.scatter_(1, wanted.view(-1, 1), 60.0)
        type(model).sample(model, logits_MV, R, T, truncate)

    fast_decoder.DraftPlans, model.sample = Simulated, sample
    model.free()
    try:
        drafting = Drafting()
        first, best, found = rollout(
            policy, size, guesses=[task.draft(problem) for _ in range(P)], drafting=drafting
        )
    finally:
        fast_decoder.DraftPlans = DraftPlans
        del model.sample
        model.free()
    assert [list(answer.tokens) for group in found for answer in group] == truth
    return first, best, drafting.metrics()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SHAPES, default="3b")
    parser.add_argument("--lora", type=int, default=16)
    parser.add_argument(
        "--right",
        type=float,
        default=0.995,
        help="share of drafted tokens that are right; 0.995 is that of the embedded model at 100 "
        "words where it scores 0.94",
    )
    parser.add_argument(
        "--tables",
        default="steps,1,2,3,4,5",
        help="steps, and the numbers of the rollouts; or generate",
    )
    arguments = parser.parse_args()
    if arguments.tables == "generate":
        return generate_table()
    if not torch.cuda.is_available():
        parser.error("no GPU was found, and the CUDA decoder needs one")

    policy = make_policy(arguments.size, arguments.lora)
    speed = rates()
    bandwidth, rate = speed["bandwidth"], speed["flops"]
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {arguments.size}, LoRA "
        f"{arguments.lora}; copies {bandwidth / 1e12:.2f} TB/s, products {rate / 1e12:.0f} TFLOPS"
    )

    tables = arguments.tables.split(",")
    if "steps" in tables:
        step_table(policy, bandwidth, rate)
    if tables != ["steps"]:
        cases = [case for number, case in enumerate(ROLLOUTS, 1) if str(number) in tables]
        rollout_table(policy, cases, arguments.right)


def step_table(policy, bandwidth: float, rate: float) -> None:
    """Measure and print the time of a decode step."""
    print("   rows  context    ms a step    floor, ms   x floor   floor is")
    for batch in (16, 64, 256, 1024):
        for context in (256, 2816):
            try:
                seconds, read, operations = step_time(policy, batch, context)
            except torch.OutOfMemoryError:
                print(f"{batch:>7}{context:>9}   not enough memory", flush=True)
                policy.decoder.step.free()
                continue
            times = {"memory": read / bandwidth, "products": operations / rate}
            bound = max(times, key=times.__getitem__)
            floor = times[bound]
            print(
                f"{batch:>7}{context:>9}{1000 * seconds:>13.3f}{1000 * floor:>13.3f}"
                f"{seconds / floor:>10.2f}   {bound}",
                flush=True,
            )
            policy.decoder.step.free()  # the next case makes its own caches


def generate_table() -> None:
    """Measure and print rollouts of tiny models, and `generate` beside them."""
    prompt, G, new = tuple(range(100, 164)), 8, 32
    request = RolloutRequest([prompt], [list(range(G))], 1.0, [new])
    batched = EngineRequest(prompt, G, new, 1.0, 1.0, 0, stop_token_ids=(0,))
    print(f"{device_name()}\n| model | width | path | ms a token | generate | ratio | batching |")
    print("|---|---|---|---|---|---|---|")
    for kind, width in product(KINDS, (64, 1024)):
        with tempfile.TemporaryDirectory() as folder:
            tiny_architectures.write(
                tiny_architectures.Architecture(kind, "", changes_of(kind, width)), Path(folder)
            )
            policy = load_policy(folder, dtype="float32")
            model = AutoModelForCausalLM.from_pretrained(folder).to(policy.device).eval()
        policy.stops = ()
        tokens = torch.tensor([prompt] * G, device=policy.device)
        settings = dict(min_new_tokens=new, max_new_tokens=new, do_sample=True, top_k=0)
        mask = torch.ones_like(tokens)
        ours = least_time(partial(generate, policy, request)) / new
        theirs = least_time(partial(model.generate, tokens, attention_mask=mask, **settings)) / new
        engine, batching = TransformersEngine(), "not supported"
        engine.update(policy)
        with suppress(UserError):
            seconds = least_time(partial(engine.generate, [batched]), repeats=2)
            batching = f"{1000 * seconds / new:.1f}"
        times = f"{1000 * ours:.1f} | {1000 * theirs:.1f} | {ours / theirs:.2f} | {batching}"
        print(f"| {kind} | {width} | {policy.path} | {times} |", flush=True)


def changes_of(kind: str, width: int) -> dict[str, Any]:
    """Return what the configuration of a model of this `width` has beside the tiny sizes."""
    wide = WIDE if width > 64 else {"num_hidden_layers": 8}
    changes = dict(wide)
    if kind in LAYERS:
        changes["layer_types"] = LAYERS[kind] * (wide["num_hidden_layers"] // 4)
    if kind == "gpt_oss" and width > 64:
        changes["intermediate_size"] = WIDE["moe_intermediate_size"]  # of an expert
    if kind == "deepseek_v3":  # as many keys as queries, whose size follows from their parts
        changes |= tiny_architectures.LATENT
        changes["num_key_value_heads"] = wide.get("num_attention_heads", 4)
    return changes


def rollout_table(policy, cases: list[Size], right: float) -> None:
    """Measure and print rollouts, with and without drafts."""
    print(
        "  rollout: prompts x completions x new, prompt     first s   then s   tokens/s | "
        "drafted: first s   then s   acceptance   a forward"
    )
    for size in cases:
        first, best, _ = rollout(policy, size)
        d_first, d_best, figures = drafted(policy, size, right)
        print(
            f"{size.P:>20} x {size.G} x {size.new}, {size.prompt:<12}{first:>12.2f}{best:>9.2f}"
            f"{size.P * size.G * size.new / best:>11.0f} "
            f"|{d_first:>17.2f}{d_best:>9.2f}"
            f"{figures['draft/acceptance']:>13.3f}{figures['draft/tokens_per_forward']:>12.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
