"""Measure how much faster a decoding step could be with weights of 8 bits.

    python tests/benchmarks/bench_fp8.py --size 3b

It times the matrix products of one decoding step (all layers and the output layer, each with
weights of its own) in bfloat16, and in float8 (e4m3, one scale for each matrix) by
`torch._scaled_mm`, with inputs that are in float8 already. A real step must also round its inputs
to float8, so the difference is the most that a step can gain. Beside it stands the whole step of
our decoder, with LoRA, as in `bench_decode.py`, and the ratio that remains at best.
"""

import argparse

import torch
from bench_decode import make_policy, step_time, time_of
from bench_model import SHAPES
from torch import Tensor

from grpo.rollout.cuda_decoder import cuda_step

FP8 = torch.float8_e4m3fn


def sizes_of(shape: dict[str, int]) -> list[tuple[int, int]]:
    """Return (outputs, inputs) of each matrix of a decoding step."""
    E, D = shape["hidden_size"], shape["head_dim"]
    queries = shape["num_attention_heads"] * D
    keys = shape["num_key_value_heads"] * D
    inner = shape["intermediate_size"]
    layer = [(queries + 2 * keys, E), (E, queries), (2 * inner, E), (E, inner)]
    return layer * shape["num_hidden_layers"] + [(shape["vocab_size"], E)]


def product_times(shape: dict[str, int], rows: int) -> tuple[float, float]:
    """Return the seconds of all products of a step, in bfloat16 and in float8."""
    sizes = sizes_of(shape)
    inputs = {K: torch.randn(rows, K, device="cuda", dtype=torch.bfloat16) for _, K in sizes}
    weights = [torch.randn(N, K, device="cuda", dtype=torch.bfloat16) for N, K in sizes]

    def plain() -> None:
        for weight in weights:
            inputs[weight.shape[1]] @ weight.t()

    usual = time_of(captured(plain))
    one = torch.ones((), device="cuda")
    inputs = {K: x.to(FP8) for K, x in inputs.items()}
    weights = [weight.to(FP8) for weight in weights]

    def scaled() -> None:
        for weight in weights:
            x: Tensor = inputs[weight.shape[1]]
            torch._scaled_mm(x, weight.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    return usual, time_of(captured(scaled))


def captured(work):
    """Return a function that replays `work` as a CUDA graph."""
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SHAPES, default="3b")
    parser.add_argument("--lora", type=int, default=16)
    arguments = parser.parse_args()

    steps = {}
    policy = make_policy(arguments.size, arguments.lora)
    for rows in (16, 64, 256):
        for context in (256, 2816):
            steps[rows, context] = step_time(policy, rows, context)[0]
            cuda_step(policy).free()
    del policy
    torch.cuda.empty_cache()

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {arguments.size}")
    print("   rows  context  step, ms  products, ms  in float8, ms  step with float8 at best")
    times = {rows: product_times(SHAPES[arguments.size], rows) for rows, _ in steps}
    for (rows, context), seconds in steps.items():
        usual, scaled = times[rows]
        best = seconds - max(0.0, usual - scaled)
        print(
            f"{rows:>7}{context:>9}{1000 * seconds:>10.3f}{1000 * usual:>14.3f}"
            f"{1000 * scaled:>15.3f}{1000 * best:>15.3f}  ({seconds / best:.2f} x)",
            flush=True,
        )


if __name__ == "__main__":
    main()
