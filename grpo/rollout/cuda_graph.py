"""One step of the decoder for models of the Llama family on a GPU: few kernels a layer, captured
as CUDA graphs.

The weights are those of `model.llama`, joined where they read the same input, a LoRA adapter's
first matrices among them; what lies between the matrix products is in `kernels`. Prompts' keys and
values are held and read once a group. Everything that changes from step to step, the sampling and
the stop test included, lives on the device.

Shapes: R rows, T tokens of each at once, k = T - 1 drafted, M = R * T; L prompt tokens, H, K
heads, D head size, N hidden size.
"""

import os
from collections.abc import Callable
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from grpo.model.merged_linear import MergedLinear
from grpo.rollout.speculative import LENGTHS

BUCKETS = (
    1,
    2,
    4,
    8,
    16,
    24,
    32,
    48,
    64,
    96,
    128,
    192,
    256,
    384,
    512,
    768,
    1024,
)  # rows of a captured step
BLOCK = 128  # columns of the hidden states that one program adds
FEW = 64  # tokens whose products are `kernels.multiply`
WIDTH = LENGTHS[-1] + 1
TOKENS = 8192  # of a pass with drafts: their logits over a vocabulary of 128,000 take 2 GB


def bucket(rows: int) -> int:
    """Return how many rows a captured step has that fits `rows`."""
    return next((size for size in BUCKETS if size >= rows), -(-rows // BUCKETS[-1]) * BUCKETS[-1])


@contextmanager
def light_products(wanted: bool):
    """Let torch take its products from cuBLASLt, if wanted: the padded weights are multiplied some
    hundredths faster on a Hopper GPU.
    """
    before = torch.backends.cuda.preferred_blas_library()
    if wanted:
        with open(os.devnull, "wb") as nowhere:
            stderr = os.dup(2)
            os.dup2(nowhere.fileno(), 2)  # where torch says, once, that the choice is experimental
            try:
                torch.backends.cuda.preferred_blas_library("cublaslt")
            finally:
                os.dup2(stderr, 2)
                os.close(stderr)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


class CudaStep:
    """The decode step of one policy: its weights, caches and graphs. Kept by the policy from one
    rollout to the next.
    """

    def __init__(self, policy):
        from grpo.rollout import kernels  # Triton is there where CUDA is

        self.kernels, self.policy = kernels, policy
        fast = policy.fast_model
        self.D, self.K, self.H, self.scale = fast.D, fast.K, fast.H, fast.scale
        self.embedding, self.final_norm, self.rotary, self.blocks = (
            fast.embedding,
            fast.final_norm,
            fast.rotary,
            fast.blocks,
        )
        self.V, self.N = policy.head.weight.shape
        self.dtype, self.has_qk_norm = self.embedding.weight.dtype, self.blocks[0].has_qk_norm
        has_products = kernels.IS_HOPPER and self.dtype.itemsize == 2
        self.processors = (
            torch.cuda.get_device_properties(policy.device).multi_processor_count
            if has_products
            else 0
        )
        self.stops = torch.tensor(policy.stops or (-1,), device=policy.device)
        self.forget_graphs()
        self.rows = self.prompts = self.longest = self.room = 0

    def allocate(self, rows: int, prompts: int, longest: int, room: int):
        """Make caches for so many rows with `room` tokens each, and prompts of up to `longest`
        tokens; keep those that suffice.
        """
        rows, longest, room = bucket(rows), -(-longest // 128) * 128, -(-room // 64) * 64
        fits = (
            rows <= self.rows
            and prompts <= self.prompts
            and longest <= self.longest
            and room <= self.room
        )
        if fits and rows * room >= self.rows * self.room / 4:
            return
        self.forget_graphs()
        self.own = self.shared = None  # free them first
        self.rows, self.prompts, self.longest, self.room = rows, prompts, longest, room
        device, blocks = self.policy.device, len(self.blocks)
        self.own = torch.zeros(
            blocks, 2, rows, self.K, room, self.D, dtype=self.dtype, device=device
        )
        self.shared = torch.zeros(
            blocks, 2, prompts, self.K, longest, self.D, dtype=self.dtype, device=device
        )
        positions = torch.arange(longest + room, device=device)[None]
        cos, sin = self.rotary(self.embedding.weight[:1], positions)
        self.cos, self.sin = (x[0, :, : self.D // 2].contiguous() for x in (cos, sin))
        whole = {
            name: torch.zeros(rows, dtype=torch.int64, device=device)
            for name in ("slot", "budget", "written", "live", "start", "key")
        }
        self.state = whole | {"heat": torch.zeros(rows, dtype=torch.float32, device=device)}
        self.feed = torch.zeros(rows, WIDTH, dtype=torch.int64, device=device)
        self.tile = torch.zeros(
            3, max(rows, TOKENS), dtype=torch.int32, device=device
        )  # their prompts, first tokens, numbers of tokens
        self.lengths = torch.zeros(prompts, dtype=torch.int32, device=device)
        self.out_tokens = torch.zeros(rows, room, dtype=torch.int64, device=device)
        self.out_logprobs = torch.zeros(rows, room, dtype=torch.float32, device=device)

    def forget_graphs(self):
        self.graphs: dict[tuple, torch.cuda.CUDAGraph] = {}
        self.pool = None

    def tile_tokens(self, T: int) -> int:
        """How many tokens of a prompt's rows read its keys together: those of 32 queries, or of 64
        where a row has so many.
        """
        Q = self.H // self.K
        return max(1, 64 // Q if T * Q >= 64 else min(16, 32 // Q))

    def stretches(self, M: int) -> tuple[int, int]:
        """How many keys of a prompt, and of a row's own tokens, one program reads: the more there
        are to be joined, the longer that takes, but few tokens make few programs, and the GPU has
        processors to fill.
        """
        of_prompt, of_own = (128, 256) if M <= 16 else (256, 256) if M < 64 else (512, 1024)
        return 64 if self.longest <= 128 else of_prompt, of_own

    def run(self, R: int, T: int, tiles: int, truncate: Callable | None):
        """Do one step for the first R rows (a bucket): from a captured graph, which is made when
        first asked for.
        """
        if self.policy.device.type != "cuda":
            return self.step(R, T, tiles, truncate)
        key = (R, T, tiles, truncate)
        if key not in self.graphs:
            kept = {name: value.clone() for name, value in self.state.items()}
            feed = self.feed.clone()
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            self.state["live"].zero_()  # the rehearsal writes nothing
            graph = torch.cuda.CUDAGraph()
            with light_products(self.processors > 0):
                with torch.cuda.stream(stream):
                    self.step(R, T, tiles, truncate)
                torch.cuda.current_stream().wait_stream(stream)
                with torch.cuda.graph(graph, pool=self.pool):
                    self.step(R, T, tiles, truncate)
            self.pool = self.pool or graph.pool()
            self.graphs[key] = graph
            for name, value in kept.items():
                self.state[name].copy_(value)
            self.feed.copy_(feed)
        self.graphs[key].replay()

    def step(self, R: int, T: int, tiles: int, truncate: Callable | None):
        """Feed each row its last token and k drafted ones; sample after each; write down what
        counts.
        """
        hidden_MN = self.forward(R, T, tiles)
        self.sample(self.policy.head(hidden_MN), R, T, truncate)

    def forward(self, R: int, T: int, tiles: int) -> Tensor:
        """Return hidden states (M, N) of the tokens that stand in `feed`."""
        k, M, H, K, Q, D, state = (
            self.kernels,
            R * T,
            self.H,
            self.K,
            self.H // self.K,
            self.D,
            self.state,
        )
        x = nn.functional.embedding(self.feed[:R, :T].reshape(M), self.embedding.weight)
        h, q = torch.empty_like(x), x.new_empty(M, H, D)
        attended, squares = (
            x.new_empty(M, H * D),
            torch.empty(M, -(-self.N // BLOCK), dtype=torch.float32, device=x.device),
        )
        of_prompt, of_own = self.stretches(M)
        first = -(-self.longest // of_prompt)
        places = first + -(-self.room // of_own)
        tops, sums = (
            torch.empty(M, H, places, dtype=torch.float32, device=x.device) for _ in range(2)
        )
        partial = torch.empty(M, H, places, D, dtype=torch.float32, device=x.device)
        sizes, tokens = dict(T=T, H=H, K=K, D=D), dict(BLOCKS=squares.shape[1], BLOCK_M=16)
        queries = lambda tokens: max(16, 1 << (tokens * Q - 1).bit_length())  # noqa: E731
        of_tile, of_row = (
            queries(self.tile_tokens(T)),
            queries(min(T, max(1, 64 // Q))),
        )  # queries of a program
        programs = tiles * K * first + R * K * (places - first) * -(-T // (of_row // Q))
        stretches = dict(first=first, splits=places, PROMPT=of_prompt, OWN=of_own)
        spare = (
            dict(maxnreg=96) if T == 1 and self.processors else {}
        )  # five programs on a processor at once instead of four
        last = (None, None)  # what the layer before adds
        for i, layer in enumerate(self.blocks):
            qkv, gate_up, eps, (keys, values) = (
                layer.qkv,
                layer.gate_up,
                layer.input_norm.variance_epsilon,
                self.own[i],
            )
            self._add(x, *last, layer.input_norm, h, squares)
            heads = self._product(h, qkv)
            norms = (layer.attention.q_norm, layer.attention.k_norm) if self.has_qk_norm else ()
            k.rotate_and_store[(-(-M // 16), H + 2 * K)](
                heads,
                qkv.lora_b,
                qkv.bias,
                squares,
                q,
                keys,
                values,
                self.cos,
                self.sin,
                *([norm.weight for norm in norms] or (None, None)),
                state["start"],
                state["written"],
                state["slot"],
                state["live"],
                heads.stride(1),
                M,
                self.room,
                self.N,
                eps,
                norms[0].variance_epsilon if norms else 0.0,
                RANK=qkv.rank,
                SPLITS=len(heads),
                **tokens,
                **sizes,
                **k.EARLY,
            )
            k.attend[(programs,)](
                q,
                *self.shared[i],
                keys,
                values,
                *self.tile,
                self.lengths,
                state["written"],
                state["slot"],
                state["live"],
                sums,
                tops,
                partial,
                self.scale,
                self.longest,
                self.room,
                tiles,
                R,
                BLOCK_N=64,
                BLOCK_P=of_tile,
                BLOCK_R=of_row,
                num_warps=4,
                num_stages=2,
                **stretches,
                **sizes,
                **k.EARLY,
                **spare,
            )
            k.join[(-(-M * H // 4),)](
                attended,
                state["start"],
                state["written"],
                state["live"],
                sums,
                tops,
                partial,
                M,
                T=T,
                H=H,
                D=D,
                PAIRS=4,
                TOGETHER=4,
                num_warps=1,
                **stretches,
                **k.EARLY,
            )
            self._add(
                x,
                self._product(attended, layer.out),
                layer.out,
                layer.post_attention_norm,
                h,
                squares,
            )
            both, width = self._product(h, gate_up), gate_up.out_features // 2
            gated = x.new_empty(M, width)
            k.silu_mul[(-(-M // 16), -(-width // 128))](
                both,
                gate_up.lora_b,
                gate_up.bias,
                squares,
                gated,
                both.stride(1),
                M,
                width,
                self.N,
                layer.post_attention_norm.variance_epsilon,
                RANK=gate_up.rank,
                SPLITS=len(both),
                BLOCK=128,
                **tokens,
                **k.EARLY,
            )
            last = self._product(gated, layer.down), layer.down
        self._add(x, *last, self.final_norm, h, squares)
        return nn.functional.rms_norm(
            x, (self.N,), self.final_norm.weight, self.final_norm.variance_epsilon
        )

    def _add(
        self,
        x: Tensor,
        y: Tensor | None,
        joined: MergedLinear | None,
        norm: nn.Module,
        out: Tensor,
        squares: Tensor,
    ):
        """Add a product of `joined` to x, and begin the norm: `out` = x * weight, and the sums of
        squares.
        """
        up, bias, rank, stride, splits = (
            (joined.lora_b, joined.bias, joined.rank, y.stride(1), len(y))
            if joined
            else (None, None, 0, 0, 0)
        )
        self.kernels.add[(-(-len(x) // 16), squares.shape[1])](
            x,
            y,
            up,
            bias,
            norm.weight,
            out,
            squares,
            stride,
            len(x),
            self.N,
            RANK=rank,
            SPLITS=splits,
            BLOCK_M=16,
            BLOCK=BLOCK,
            **self.kernels.EARLY,
        )

    def _product(self, x: Tensor, joined: MergedLinear) -> Tensor:
        """Return x (M, K) times the weights of `joined`, in S parts that are to be added up (S, M,
        X).
        """
        (M, K), X = x.shape, len(joined.weight)
        if self.processors and M <= FEW and K % 128 == 0:
            wide = M > 32 and X > 32 * self.processors
            columns, part, stages = (
                (64, 128, 6) if M <= 32 else (128, 64, 5) if wide else (64, 64, 8)
            )
            blocks = -(-X // columns)
            y = x.new_empty(
                max(1, min(self.processors // blocks, K // part // 4)), M, X, dtype=torch.float32
            )
            self.kernels.multiply[(blocks, len(y))](
                x,
                joined.weight,
                y,
                M,
                X,
                K,
                SPLITS=len(y),
                BLOCK_M=max(16, 1 << (M - 1).bit_length()),
                BLOCK_X=columns,
                BLOCK_K=part,
                STAGES=stages,
                num_warps=4,
                **self.kernels.EARLY,
            )
            return y
        return (x @ joined.padded.t())[None]

    def sample(self, logits_MV: Tensor, R: int, T: int, truncate: Callable | None):
        """Draw a token from each distribution; write down those that count."""
        k, M, V, state, device = self.kernels, R * T, self.V, self.state, logits_MV.device
        heat = state["heat"]
        if truncate is not None:
            scale = torch.where(heat == 0, 1.0, heat)[:R].repeat_interleave(T, output_size=M)
            logits_MV, heat = truncate(logits_MV.float() / scale[:, None], None), (heat > 0).float()
        blocks = -(-V // 4096)
        tops, sums = (torch.empty(M, blocks, dtype=torch.float32, device=device) for _ in range(2))
        best, chosen = (
            torch.empty(M, blocks, dtype=torch.int32, device=device),
            torch.empty(M, dtype=torch.int32, device=device),
        )
        logprob = torch.empty(M, dtype=torch.float32, device=device)
        k.sum_blocks[(M, blocks)](
            logits_MV, heat, tops, sums, best, V, blocks, T=T, BLOCK=4096, **k.EARLY
        )
        k.pick[(M,)](
            logits_MV,
            heat,
            state["key"],
            state["written"],
            tops,
            sums,
            best,
            chosen,
            logprob,
            V,
            blocks,
            T=T,
            BLOCK=4096,
            BLOCKS=max(2, 1 << (blocks - 1).bit_length()),
            **k.EARLY,
        )
        k.advance[(R,)](
            chosen,
            logprob,
            self.feed,
            self.out_tokens,
            self.out_logprobs,
            self.stops,
            state["slot"],
            state["budget"],
            state["written"],
            state["live"],
            self.room,
            T=T,
            WIDTH=WIDTH,
            STOPS=len(self.stops),
            num_warps=1,
            **k.EARLY,
        )
