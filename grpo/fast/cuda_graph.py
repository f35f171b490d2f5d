"""One step of the decoder on a GPU, captured as CUDA graphs.

Everything that changes from step to step is on the device, including the sampling and the test for
the end of a text. So a step can be replayed without the host, which would otherwise take longer to
launch the kernels than the GPU takes to run them.

Shapes: R rows, T tokens of each at once, of which T - 1 are drafted, M = R * T; E hidden size, V
vocabulary.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from grpo.fast.cuda_layers import CudaLayers
from grpo.fast.cuda_memory import WIDTH, Capacity, DecodeMemory
from grpo.fast.forward import FastForward
from grpo.fast.llama import FastLlama
from grpo.fast.speculative import Costs
from grpo.model.policy import Policy

LOGITS_BLOCK = 4096  # logits that a program of the sampling handles

# Seconds on an H100, for `pass_costs`.
LAYER_SECONDS = 42e-6  # of a layer, however few the tokens: nine kernels (SmolLM2-135M)
BYTE_SECONDS = 1 / 3e12  # to read one byte of the weights
OPERATION_SECONDS = 1 / 640e12
LEAST_TOKEN_SECONDS = 2e-6  # a token more of SmolLM2-135M
PLAN_SECONDS = 3e-4  # of the host


def pass_costs(policy: Policy, llama: FastLlama) -> Costs:
    """Return how long the passes and plans of a model take, estimated from its size.

    Estimates, because a measured time would make drafts, and so the rounding of the logits, differ
    from run to run.
    """
    weights = list(policy.causal.parameters())
    parameters = sum(weight.numel() for weight in weights)

    reading = BYTE_SECONDS * parameters * weights[0].element_size()
    fixed = max(LAYER_SECONDS * len(llama.blocks), reading)
    token = max(LEAST_TOKEN_SECONDS, OPERATION_SECONDS * 2 * parameters)
    return Costs(fixed / token, PLAN_SECONDS / token, meanwhile=True)


@contextmanager
def cublaslt(wanted: bool) -> Iterator[None]:
    """Within this block PyTorch multiplies matrices by cuBLASLt, if `wanted`.

    On a Hopper GPU it multiplies the padded weights a few percent faster.
    """
    before = torch.backends.cuda.preferred_blas_library()
    if wanted:
        # PyTorch announces once, on the C level, that the choice is experimental.
        with open(os.devnull, "wb") as nowhere:
            stderr = os.dup(2)
            os.dup2(nowhere.fileno(), 2)
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
    """The decode step of one policy: its layers, memory and graphs.

    The policy keeps it from one rollout to the next. Call `allocate` before anything else.
    """

    def __init__(self, policy: Policy, forward: FastForward):
        assert forward.llama is not None
        self.policy = policy
        self.forward_pass = forward
        self.layers = CudaLayers(forward.llama)
        self.kernels = self.layers.kernels
        self.stops = torch.tensor(policy.stops or (-1,), device=policy.device)
        self.costs = pass_costs(policy, forward.llama)
        self.free()

    @property
    def memory(self) -> DecodeMemory:
        """The buffers. Call `allocate` first."""
        assert self._memory is not None
        return self._memory

    def free(self) -> None:
        """Give back the memory and the graphs that use it."""
        self.graphs: dict[tuple, torch.cuda.CUDAGraph] = {}
        self.pool: Any = None  # the memory that the graphs share
        self._memory: DecodeMemory | None = None

    def allocate(self, rows: int, prompts: int, prompt_room: int, row_room: int) -> None:
        """Allocate memory for this many rows and prompts, with this many tokens each.

        Memory that is large enough is kept, and with it the graphs.
        """
        wanted = Capacity.rounded(rows, prompts, prompt_room, row_room)
        if self._memory is not None and self._memory.capacity.suits(wanted):
            return

        self.free()  # before the new memory is taken
        self._memory = DecodeMemory(self.layers.fast, wanted, self.policy.device)

    def run(self, R: int, T: int, tiles: int, truncate: Callable | None) -> None:
        """Do one step for the first R rows (a bucket), by a captured graph.

        The graph is captured when it is first asked for. Other devices just do the step.
        """
        if self.policy.device.type != "cuda":
            self.step(R, T, tiles, truncate)
            return

        key = (R, T, tiles, truncate)
        if key not in self.graphs:
            self.graphs[key] = self._capture(R, T, tiles, truncate)
        self.graphs[key].replay()

    def _capture(
        self, R: int, T: int, tiles: int, truncate: Callable | None
    ) -> torch.cuda.CUDAGraph:
        memory = self.memory
        state = [x.clone() for x in memory.state]
        feed = memory.feed.clone()

        # A rehearsal compiles the kernels. It writes nothing, because no row is live.
        memory.state.live.zero_()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with cublaslt(self.layers.processors > 0):
            with torch.cuda.stream(stream):
                self.step(R, T, tiles, truncate)
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(graph, pool=self.pool):
                self.step(R, T, tiles, truncate)
        self.pool = self.pool or graph.pool()

        for target, source in zip(memory.state, state):
            target.copy_(source)
        memory.feed.copy_(feed)
        return graph

    def step(self, R: int, T: int, tiles: int, truncate: Callable | None) -> None:
        """Feed each row its last and its drafted tokens; sample after each; keep what counts."""
        hidden_ME = self.forward(R, T, tiles)
        self.sample(self.policy.head(hidden_ME), R, T, truncate)

    def forward(self, R: int, T: int, tiles: int) -> Tensor:
        """Return the hidden states (M, E) of the tokens to be fed."""
        return self.layers.forward(R, T, tiles, self.memory)

    def sample(self, logits_MV: Tensor, R: int, T: int, truncate: Callable | None) -> None:
        """Sample a token from each distribution; write down those that count."""
        memory, state = self.memory, self.memory.state
        temperature = state.temperature
        M, V = logits_MV.shape

        # Truncation works on logits that are already divided by the temperature. Behind it, only
        # whether the choice is greedy matters.
        if truncate is not None:
            divisor = torch.where(temperature == 0, 1.0, temperature)[:R]
            divisor = divisor.repeat_interleave(T, output_size=M)
            logits_MV = truncate(logits_MV.float() / divisor[:, None], None)
            temperature = (temperature > 0).float()

        blocks = -(-V // LOGITS_BLOCK)

        def empty(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(size, dtype=dtype, device=logits_MV.device)

        maxima, sums = empty(M, blocks), empty(M, blocks)
        argmaxima = empty(M, blocks, dtype=torch.int32)
        chosen, logprob = empty(M, dtype=torch.int32), empty(M)

        self.kernels.reduce_blocks[(M, blocks)](
            logits_MV, temperature, maxima, sums, argmaxima, V, blocks,
            T=T, BLOCK=LOGITS_BLOCK, **self.kernels.LAUNCH,
        )  # fmt: skip
        self.kernels.sample[(M,)](
            logits_MV, temperature, state.key, state.written,
            maxima, sums, argmaxima, chosen, logprob,
            V, blocks,
            T=T, BLOCK=LOGITS_BLOCK, BLOCKS=max(2, 1 << (blocks - 1).bit_length()),
            **self.kernels.LAUNCH,
        )  # fmt: skip
        self.kernels.accept[(R,)](
            chosen, logprob, memory.feed, memory.out_tokens, memory.out_logprobs, self.stops,
            state.slot, state.budget, state.written, state.live,
            memory.capacity.row_room,
            T=T, WIDTH=WIDTH, STOPS=len(self.stops), num_warps=1,
            **self.kernels.LAUNCH,
        )  # fmt: skip
