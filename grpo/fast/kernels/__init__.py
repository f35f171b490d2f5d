"""The Triton kernels of the decode step: everything between the matrix products.

PyTorch would launch some forty small kernels a layer between the products; here there are five.
The products themselves are left to the vendor's library, except those of few tokens on a Hopper
GPU (`multiply`).

A product comes out unfinished: the kernel that reads it sums its parts and applies the RMSNorm of
its input, the second half of its LoRA adapter, and its bias.

Arithmetic is in float32. Results are rounded where `transformers` rounds them, except inside the
norms. Rows that are not live write nothing that is ever read.

Shapes: R rows, T tokens of each in a pass, M = R * T tokens, E hidden size, H query heads, K key
heads, Q = H / K, D head size, P prompts, L tokens of a prompt, V vocabulary, S parts of a product,
r rank of an adapter. A row's first `written - 1` tokens are in the cache; the pass appends its T
tokens to them.
"""

from grpo.fast.kernels.attention import attend, combine_splits
from grpo.fast.kernels.launch import IS_HOPPER, LAUNCH
from grpo.fast.kernels.layers import add_and_weigh, rotate_and_store, silu_mul
from grpo.fast.kernels.products import multiply
from grpo.fast.kernels.sampling import accept, reduce_blocks, sample

__all__ = [
    "IS_HOPPER",
    "LAUNCH",
    "accept",
    "add_and_weigh",
    "attend",
    "combine_splits",
    "multiply",
    "reduce_blocks",
    "rotate_and_store",
    "sample",
    "silu_mul",
]
