"""The forward pass of a decode step on a GPU, for models of the Llama family.

The weights are the merged ones of `grpo.fast.llama`, the first matrices of a LoRA adapter among
them. Matrix products go to the vendor's library; everything between them is five kernels a layer
(`grpo.fast.decode_kernels`). The keys and values of a prompt are kept, and read, once for all its
rows. The memory is allocated once and stays where it is, because captured CUDA graphs refer to its
addresses.

Shapes: P prompts, R rows, T tokens of each, M = R * T; E hidden size, H query heads, K key heads,
Q = H / K, D head size.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from grpo.fast.llama import Block, FastLlama
from grpo.fast.merged_linear import MergedLinear
from grpo.fast.speculative import LENGTHS

# Tokens and columns that a program handles.
BLOCK_M = 16
BLOCK = 128

# How many rows a captured step has: the smallest of these that suffices.
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)

WIDTH = LENGTHS[-1] + 1  # the most tokens of a row in one pass
MAX_TOKENS = 8192  # of a pass with drafts: their logits over a vocabulary of 128,000 take 2 GB


def bucket(rows: int) -> int:
    """Return how many rows a captured step has that is used for `rows` rows."""
    for size in BUCKETS:
        if size >= rows:
            return size
    return -(-rows // BUCKETS[-1]) * BUCKETS[-1]


class Capacity(NamedTuple):
    """How much room there is; `prompt_room` and `row_room` in tokens of a prompt and of a row."""

    rows: int
    prompts: int
    prompt_room: int
    row_room: int


class RowState(NamedTuple):
    """What is known of each row on the device, (R,) each.

    `slot` is the row's place in cache and outputs, `budget` the most tokens it may write, `written`
    how many it has written, `live` 1 until it is finished, `start` the length of its prompt, `key`
    its sample key.
    """

    slot: Tensor
    budget: Tensor
    written: Tensor
    live: Tensor
    start: Tensor
    key: Tensor


class DecodeMemory:
    """The buffers of a decode step; see the attributes' comments for their shapes."""

    def __init__(self, fast: FastLlama, capacity: Capacity, device: torch.device):
        self.capacity = capacity
        rows, prompts, prompt_room, row_room = capacity
        weight, blocks = fast.embedding.weight, len(fast.blocks)

        # Keys and values (2) of each layer.
        self.row_cache = weight.new_zeros(blocks, 2, rows, fast.K, row_room, fast.D)
        self.prompt_cache = weight.new_zeros(blocks, 2, prompts, fast.K, prompt_room, fast.D)
        self.prompt_lengths = torch.zeros(prompts, dtype=torch.int32, device=device)

        # The angles of every position (positions, D / 2).
        positions = torch.arange(prompt_room + row_room, device=device)[None]
        cos, sin = fast.rotary(weight[:1], positions)
        self.cos = cos[0, :, : fast.D // 2].contiguous()
        self.sin = sin[0, :, : fast.D // 2].contiguous()

        numbers = [torch.zeros(rows, dtype=torch.int64, device=device) for _ in RowState._fields]
        self.state = RowState(*numbers)
        # The temperature of all rows (1,), which a graph reads whenever it is replayed.
        self.temperature = torch.ones(1, device=device)

        # The tokens to be fed (R, WIDTH): the last one written, then the drafted ones.
        self.feed = torch.zeros(rows, WIDTH, dtype=torch.int64, device=device)

        # Tiles, i.e. neighbouring tokens that share a prompt: its number, their first token, how
        # many they are (3, tiles).
        self.tiles = torch.zeros(3, max(rows, MAX_TOKENS), dtype=torch.int32, device=device)

        # What has been written, by slot (R, row_room).
        self.out_tokens = torch.zeros(rows, row_room, dtype=torch.int64, device=device)
        self.out_logprobs = torch.zeros(rows, row_room, dtype=torch.float32, device=device)


# A matrix product (M, X) whose adapter, bias and norm are still to be applied, and the layer it
# belongs to.
Product = tuple[Tensor, MergedLinear]


def multiply(x_MI: Tensor, linear: MergedLinear) -> Product:
    """Multiply x with the weights of `linear`, adapters' first matrices included."""
    return x_MI @ linear.padded.t(), linear


class AttentionPlan:
    """How the attention of one pass is divided among programs (see `kernels.attend`)."""

    def __init__(self, layers: "CudaLayers", R: int, T: int, tiles: int, capacity: Capacity):
        self.tiles = tiles

        # The keys of a prompt, and of a row, that a program reads. Many splits take long to
        # combine, but few tokens make few programs, and the GPU has processors to fill. Measured on
        # an H100 and an H200.
        M = R * T
        if M <= 16:
            self.prompt_split, self.row_split = 128, 256
        elif M < 64:
            self.prompt_split, self.row_split = 256, 256
        else:
            self.prompt_split, self.row_split = 512, 1024
        if capacity.prompt_room <= 128:
            self.prompt_split = 64
        self.prompt_splits = -(-capacity.prompt_room // self.prompt_split)
        row_splits = -(-capacity.row_room // self.row_split)
        self.splits = self.prompt_splits + row_splits  # of prompt and row together

        # A program's queries are a power of two, and at least 16 for the tensor cores.
        def queries(tokens: int) -> int:
            return max(16, 1 << (tokens * layers.Q - 1).bit_length())

        self.prompt_queries = queries(layers.tile_tokens(T))
        self.row_queries = queries(min(T, max(1, 64 // layers.Q)))
        parts_of_row = -(-T // (self.row_queries // layers.Q))
        self.programs = layers.K * (tiles * self.prompt_splits + R * row_splits * parts_of_row)


class PassBuffers:
    """Intermediate results of one pass, which the kernels write, in all layers in turn."""

    def __init__(self, x_ME: Tensor, H: int, D: int, splits: int):
        M, E = x_ME.shape

        def floats(*size: int) -> Tensor:
            return torch.empty(size, dtype=torch.float32, device=x_ME.device)

        # The residual stream, that times the weight of the next norm, and its sums of squares.
        self.residual_ME = x_ME
        self.weighted_ME = torch.empty_like(x_ME)
        self.squares_MB = floats(M, -(-E // BLOCK))

        self.query_MHD = x_ME.new_empty(M, H, D)
        self.attended = x_ME.new_empty(M, H * D)

        # Partial results of the attention, see `kernels.attend`.
        self.maxima = floats(M, H, splits)
        self.sums = floats(M, H, splits)
        self.outputs = floats(M, H, splits, D)


class CudaLayers:
    """The layers of one policy's model, as the decode step runs them."""

    def __init__(self, fast: FastLlama):
        from grpo.fast import decode_kernels  # they need Triton, which only comes with CUDA

        self.kernels = decode_kernels
        self.fast = fast
        self.D, self.K, self.H = fast.D, fast.K, fast.H
        self.Q = fast.H // fast.K
        self.E = fast.embedding.weight.shape[1]

    def tile_tokens(self, T: int) -> int:
        """Return how many tokens that share a prompt read its keys together.

        They have 32 queries together, or 64 if a single row has as many.
        """
        return max(1, 64 // self.Q if T * self.Q >= 64 else min(16, 32 // self.Q))

    def forward(self, R: int, T: int, tiles: int, memory: DecodeMemory) -> Tensor:
        """Return the last hidden states (M, E) of the first T tokens to be fed in each of R rows.

        Their keys and values are appended to the rows' caches.
        """
        plan = AttentionPlan(self, R, T, tiles, memory.capacity)
        tokens_M = memory.feed[:R, :T].reshape(R * T)
        x_ME = functional.embedding(tokens_M, self.fast.embedding.weight)
        buffers = PassBuffers(x_ME, self.H, self.D, plan.splits)

        product = None  # of the layer before, which the next norm's kernel adds to x
        for i, block in enumerate(self.fast.blocks):
            self._add(product, block.input_norm, buffers)
            self._attention(i, T, plan, memory, buffers)
            product = multiply(buffers.attended, block.out)

            self._add(product, block.post_attention_norm, buffers)
            product = self._mlp(block, buffers)

        norm = self.fast.final_norm
        self._add(product, norm, buffers)
        return functional.rms_norm(x_ME, (self.E,), norm.weight, norm.variance_epsilon)

    def _add(self, product: Product | None, norm: nn.Module, buffers: PassBuffers) -> None:
        """Add a product to the residual stream, and begin the norm of the sum."""
        x_ME = buffers.residual_ME
        y = lora_b = bias = None
        rank = stride = 0
        if product is not None:
            y, linear = product
            lora_b, bias, rank, stride = linear.lora_b, linear.bias, linear.rank, y.stride(0)

        grid = (-(-len(x_ME) // BLOCK_M), buffers.squares_MB.shape[1])
        self.kernels.add_and_weigh[grid](
            x_ME, y, lora_b, bias, norm.weight, buffers.weighted_ME, buffers.squares_MB,
            stride, len(x_ME), self.E,
            RANK=rank, BLOCK_M=BLOCK_M, BLOCK=BLOCK,
        )  # fmt: skip

    def _attention(
        self, i: int, T: int, plan: AttentionPlan, memory: DecodeMemory, buffers: PassBuffers
    ) -> None:
        """Compute the attention of layer `i`, up to its output projection, into `attended`."""
        self._rotate_and_store(i, T, memory, buffers)
        keys, values = memory.row_cache[i]
        state = memory.state
        H, K, D = self.H, self.K, self.D
        partial = (buffers.maxima, buffers.sums, buffers.outputs)

        self.kernels.attend[(plan.programs,)](
            buffers.query_MHD, *memory.prompt_cache[i], keys, values,
            *memory.tiles,
            memory.prompt_lengths, state.written, state.slot, state.live,
            *partial,
            self.fast.scale, memory.capacity.prompt_room, memory.capacity.row_room,
            plan.tiles, len(buffers.query_MHD) // T, T,
            plan.prompt_split, plan.row_split, plan.prompt_splits, plan.splits,
            H=H, K=K, D=D,
            PROMPT_QUERIES=plan.prompt_queries, ROW_QUERIES=plan.row_queries, BLOCK_KEYS=64,
            num_warps=4, num_stages=2,
        )  # fmt: skip

        M = len(buffers.attended)
        self.kernels.combine_splits[(-(-M * H // 4),)](
            buffers.attended, state.start, state.written, state.live, *partial,
            M, T, plan.prompt_split, plan.row_split, plan.prompt_splits, plan.splits,
            H=H, D=D,
            PAIRS=4, TOGETHER=4, num_warps=1,
        )  # fmt: skip

    def _rotate_and_store(self, i: int, T: int, memory: DecodeMemory, buffers: PassBuffers) -> None:
        """Compute queries, keys and values; keys and values go into the rows' caches."""
        block = self.fast.blocks[i]
        y, qkv = multiply(buffers.weighted_ME, block.qkv)
        state = memory.state
        M, H, K = len(buffers.weighted_ME), self.H, self.K

        q_weight = k_weight = None
        head_eps = 0.0
        if block.has_qk_norm:
            q_weight = block.attention.q_norm.weight
            k_weight = block.attention.k_norm.weight
            head_eps = block.attention.q_norm.variance_epsilon

        self.kernels.rotate_and_store[(-(-M // BLOCK_M), H + 2 * K)](
            y, qkv.lora_b, qkv.bias, buffers.squares_MB, buffers.query_MHD,
            *memory.row_cache[i],
            memory.cos, memory.sin, q_weight, k_weight,
            state.start, state.written, state.slot, state.live,
            y.stride(0), M, memory.capacity.row_room, self.E,
            block.input_norm.variance_epsilon, head_eps, T,
            H=H, K=K, D=self.D,
            RANK=qkv.rank, BLOCKS=buffers.squares_MB.shape[1], BLOCK_M=BLOCK_M,
        )  # fmt: skip

    def _mlp(self, block: Block, buffers: PassBuffers) -> Product:
        y, gate_up = multiply(buffers.weighted_ME, block.gate_up)
        M, F = len(buffers.weighted_ME), gate_up.out_features // 2
        gated_MF = buffers.weighted_ME.new_empty(M, F)

        self.kernels.silu_mul[(-(-M // BLOCK_M), -(-F // BLOCK))](
            y, gate_up.lora_b, gate_up.bias, buffers.squares_MB, gated_MF,
            y.stride(0), M, F, self.E, block.post_attention_norm.variance_epsilon,
            RANK=gate_up.rank, BLOCKS=buffers.squares_MB.shape[1],
            BLOCK_M=BLOCK_M, BLOCK=BLOCK,
        )  # fmt: skip
        return multiply(gated_MF, block.down)
