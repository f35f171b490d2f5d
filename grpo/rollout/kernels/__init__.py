"""The decode step's own kernels, in Triton: everything between the matrix products.

Products are left to the vendor's library, but for those of few tokens on a Hopper GPU; what lies
between them would otherwise be some forty small kernels a layer. A product is bare: the norm of
its inputs, the second half of its adapter and its bias are left to the kernel that reads it.
Arithmetic is in float32, roundings stand where `transformers` has them, but for those of the
norms. Rows that are not live write nothing that anyone reads.

Shapes: R rows, T tokens of each that are fed at once, M = R * T, N hidden size, H query heads, K
key heads, Q = H / K, D head size, L tokens of a prompt, V vocabulary. A row's first `written - 1`
tokens are in the cache; those fed stand behind them.
"""

from grpo.rollout.kernels.attention import attend, join
from grpo.rollout.kernels.launch import EARLY, IS_HOPPER
from grpo.rollout.kernels.layers import add, multiply, rotate_and_store, silu_mul
from grpo.rollout.kernels.sampling import advance, pick, sum_blocks

__all__ = [
    "EARLY",
    "IS_HOPPER",
    "add",
    "advance",
    "attend",
    "join",
    "multiply",
    "pick",
    "rotate_and_store",
    "silu_mul",
    "sum_blocks",
]
