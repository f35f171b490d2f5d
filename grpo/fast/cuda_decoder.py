"""The decoder for models of the Llama family on a GPU: one step, captured as CUDA graphs, and the
rows of a rollout that are fed to it.

Everything that changes from step to step is on the device, including the sampling and the test for
the end of a text. So a step can be replayed without the host, which would otherwise take longer to
launch the kernels than the GPU takes to run them. The host looks at what was written after each
draft, or else once every BURST steps.

Shapes: P prompts, R rows, T tokens of each at once, k = T - 1 drafted, M = R * T; L prompt tokens,
E hidden size, V vocabulary.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from grpo.fast.cuda_layers import MAX_TOKENS, WIDTH, Capacity, CudaLayers, DecodeMemory, bucket
from grpo.fast.forward import FastForward
from grpo.fast.llama import FastLlama
from grpo.fast.speculative import LENGTHS, Costs
from grpo.model.check import probe_adapters, probe_tokens
from grpo.model.policy import Policy
from grpo.rollout.generate import RolloutRequest

BURST = 8  # tokens a row between two checks for finished rows
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

    def free(self) -> None:
        """Give back the memory and the graphs that use it."""
        self.graphs: dict[tuple, torch.cuda.CUDAGraph] = {}
        self.pool: Any = None  # the memory that the graphs share
        self.memory: Any = None  # the buffers, a `DecodeMemory`, from `allocate` on

    def allocate(self, rows: int, prompts: int, prompt_room: int, row_room: int) -> None:
        """Allocate memory for this many rows and prompts, with this many tokens each.

        Memory that is large enough is kept, and with it the graphs.
        """
        # Rounded up, so that it can be used again.
        wanted = Capacity(
            bucket(rows), prompts, -(-prompt_room // 128) * 128, -(-row_room // 64) * 64
        )
        if self.memory is not None:
            given = self.memory.capacity
            is_enough = all(have >= need for have, need in zip(given, wanted))
            if is_enough and given.rows * given.row_room <= 4 * wanted.rows * wanted.row_room:
                return

        self.free()  # before the new memory is taken
        self.memory = DecodeMemory(self.layers.fast, wanted, self.policy.device)

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
            T=T, BLOCK=LOGITS_BLOCK,
        )  # fmt: skip
        self.kernels.sample[(M,)](
            logits_MV, temperature, state.key, state.written,
            maxima, sums, argmaxima, chosen, logprob,
            V, blocks,
            T=T, BLOCK=LOGITS_BLOCK, BLOCKS=max(2, 1 << (blocks - 1).bit_length()),
        )  # fmt: skip
        self.kernels.accept[(R,)](
            chosen, logprob, memory.feed, memory.out_tokens, memory.out_logprobs, self.stops,
            state.slot, state.budget, state.written, state.live,
            memory.capacity.row_room,
            T=T, WIDTH=WIDTH, STOPS=len(self.stops), num_warps=1,
        )  # fmt: skip


class CudaRows:
    """The rows of one rollout while they are written; the counterpart of `EagerRows`."""

    def __init__(self, step: CudaStep, request: RolloutRequest, room: int):
        self.cuda_step, self.truncate = step, request.truncate
        sample_keys, temperatures, self.budget = request.flat
        self.costs = step.costs
        prompts, rows = request.prompts, len(sample_keys)
        self.columns = rows // len(prompts)

        # `prefill` also takes over what the optimizer has changed.
        self.last_PE: Tensor | None
        self.last_PE, cache = step.forward_pass.prefill(prompts)
        longest = cache.padding_PL.shape[1]
        step.allocate(rows, len(prompts), longest, room)
        memory = step.memory
        for i, layer in cache.prompt.items():
            memory.prompt_cache[i, :, : len(prompts), :, :longest] = torch.stack(layer)
        memory.prompt_lengths[: len(prompts)] = cache.lengths_P

        state = memory.state
        state.live.zero_()
        state.slot[:rows] = torch.arange(rows)
        state.budget[:rows] = self.budget
        state.written[:rows] = 0
        state.live[:rows] = 1
        state.start[:rows] = cache.lengths_P.repeat_interleave(self.columns)
        state.key[:rows] = sample_keys
        state.temperature[:rows] = temperatures

        # The host's own view of the rows.
        self.prompt_of = torch.arange(len(prompts)).repeat_interleave(self.columns)
        self.written = torch.zeros(rows, dtype=torch.int64)
        self.live = torch.ones(rows, dtype=torch.bool)
        self.laid_out: tuple[int, int] | None = None  # T and the number of tiles

    @property
    def lengths(self) -> list[int]:
        """The draft lengths, in tokens, that a pass over the present rows has room for."""
        rows = bucket(len(self.written))
        return [k for k in LENGTHS if k == 0 or rows * (k + 1) <= MAX_TOKENS]

    def start(self, drafts_Rk: Tensor) -> None:
        """Start a pass, or several where nothing is drafted, in which a row writes up to `new`
        tokens.
        """
        step, memory, state = self.cuda_step, self.cuda_step.memory, self.cuda_step.memory.state
        R, T = len(self.written), 1 + drafts_Rk.shape[1]
        self.begin_R = state.slot[:R] * memory.capacity.row_room + state.written[:R]

        if self.last_PE is not None:  # the first tokens follow the prompts
            logits = step.policy.head(self.last_PE).repeat_interleave(self.columns, 0)
            step.sample(logits, R, 1, self.truncate)
            self.last_PE = None
            self.new = 1
            return

        tiles = self._lay_out(T)
        if T > 1:
            memory.feed[:R, 1:T] = drafts_Rk.clamp(min=0).to(memory.feed.device)
            self.new = T
        else:
            self.new = min(BURST, int((self.budget - self.written)[self.live].max()))
        for _ in range(1 if T > 1 else self.new):
            step.run(bucket(R), T, tiles, self.truncate)

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """Wait for the pass. Return the next tokens of each row, their log-probabilities
        (R, 1 + k or BURST), and how many of them count (R,), on the CPU.
        """
        memory, R, new = self.cuda_step.memory, len(self.begin_R), self.new
        places = self.begin_R[:, None] + torch.arange(new, device=self.begin_R.device)

        # One transfer, so that the host waits once.
        columns = [
            memory.out_tokens.take(places),
            memory.out_logprobs.take(places).view(torch.int32),
            memory.state.written[:R, None],
            memory.state.live[:R, None],
        ]
        chosen, logprobs, written, live = torch.cat(columns, 1).cpu().split([new, new, 1, 1], 1)

        count = written[:, 0] - self.written
        self.written, self.live = written[:, 0], live[:, 0] > 0
        return chosen, logprobs.int().view(torch.float32), count

    def retire(self) -> Tensor:
        """Drop finished rows, where fewer then fit a smaller step; return which rows stay, in
        order.
        """
        rows, kept = len(self.live), self.live.nonzero()[:, 0]
        if len(kept) and bucket(len(kept)) == bucket(rows):
            return torch.arange(rows)

        memory = self.cuda_step.memory
        on_device = kept.to(memory.feed.device)
        for tensor in (*memory.state, memory.feed):
            tensor[: len(kept)] = tensor[on_device]
        memory.state.live[len(kept) : rows] = 0

        self.written, self.budget = self.written[kept], self.budget[kept]
        self.live, self.prompt_of = self.live[kept], self.prompt_of[kept]
        self.laid_out = None
        return kept

    def _lay_out(self, T: int) -> int:
        """Divide the tokens into tiles that read a prompt's keys together; return how many tiles
        to run, some of them empty.
        """
        if self.laid_out is not None and self.laid_out[0] == T:
            return self.laid_out[1]

        size = self.cuda_step.layers.tile_tokens(T)
        tiles: list[tuple[int, int, int]] = []  # prompt, first token, number of tokens
        begin = 0
        prompts, rows = self.prompt_of.unique_consecutive(return_counts=True)
        for prompt, count in zip(prompts.tolist(), rows.tolist()):
            end = begin + T * count
            tiles += [(prompt, token, min(size, end - token)) for token in range(begin, end, size)]
            begin = end

        number = bucket(len(tiles))
        tiles += [(0, 0, 0)] * (number - len(tiles))
        memory = self.cuda_step.memory
        memory.tiles[:, :number] = torch.tensor(tiles, dtype=torch.int32).t()
        self.laid_out = (T, number)
        return number


@torch.no_grad()
def new_cuda_step(policy: Policy, forward: FastForward) -> CudaStep | None:
    """Return a new captured decode step, or None where device or model do not allow one.

    It is also refused, with a warning, where it disagrees with the model's own forward pass. What
    the adapters have learned does not count, see `probe_adapters`.
    """
    llama = forward.llama
    if policy.device.type != "cuda" or llama is None or llama.D not in (32, 64, 128):
        return None

    step = CudaStep(policy, forward)
    with probe_adapters(policy.causal):
        difference = disagreement(step)
    llama.refresh()

    # In bfloat16 rounding amounts to 0.03 in 28 layers.
    is_half = llama.embedding.weight.dtype in (torch.bfloat16, torch.float16)
    if difference <= (0.1 if is_half else 1e-3):
        return step
    warnings.warn(
        f"the fused decoder disagrees with the model by {difference:.1e} and is not used",
        stacklevel=2,
    )
    return None


@torch.no_grad()
def disagreement(step: CudaStep) -> float:
    """Return how much the hidden states after a few tokens differ from those of the model's own
    forward pass, relative to these.
    """
    policy, forward = step.policy, step.forward_pass
    prompts, completions = probe_tokens(policy.causal.get_input_embeddings().weight.shape[0])
    tokens = torch.tensor([tokens[:3] for tokens in completions], device=policy.device)

    _, cache = forward.prefill(prompts)
    cache.allocate(4, 3)
    expected = forward.extend(tokens, cache)

    request = RolloutRequest(prompts, [[1, 1]] * 2, [1.0] * 2, [9] * 2)
    decoder = CudaRows(step, request, room=9)
    step.memory.feed[:4, :3] = tokens
    step.memory.state.written[:4] = 1
    found = step.forward(4, 3, decoder._lay_out(3)).view(expected.shape)
    return ((found - expected).float().norm() / expected.float().norm()).item()
