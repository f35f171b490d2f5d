"""The decoder of `grpo.fast`: every forward pass writes one token of each completion, or several
with speculative decoding.

The forward passes are made by `CudaRows` if device and model allow it, otherwise by `EagerRows`:
the model's own forward pass, step by step. There the completions of a prompt share one row of the
forward pass as long as they have the same tokens, and each samples from the row's distribution with
its own uniform number. Where they diverge, the row is split.

`CudaRows` runs models of the Llama family on a GPU: one step, captured as CUDA graphs. Everything
that changes from step to step is on the device, so a step can be replayed without the host, which
would take longer to launch the kernels than the GPU to run them. The host looks at what was written
after each draft, or else once every BURST steps.

Shapes: P prompts, G completions each, C completions that are still being written (P * G at first),
R rows, k drafted tokens, T = 1 + k, M = R * T; L prompt tokens, E hidden size, V vocabulary.
"""

import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from grpo.fast.cuda_layers import MAX_TOKENS, WIDTH, Capacity, CudaLayers, DecodeMemory, bucket
from grpo.fast.speculative import LENGTHS, SHORT, Costs, Drafter, DraftPlans
from grpo.model.check import probe_adapters, probe_tokens
from grpo.model.policy import Policy
from grpo.model.rows import decoding
from grpo.rollout.generate import RolloutRequest, Written
from grpo.rollout.sampling import choose, uniform

BURST = 8  # tokens a row between two checks for finished rows
LOGITS_BLOCK = 4096  # logits that a program of the sampling handles

# Seconds on an H100, for `pass_costs`.
LAYER_SECONDS = 42e-6  # of a layer, however few the tokens: nine kernels (SmolLM2-135M)
BYTE_SECONDS = 1 / 3e12  # to read one byte of the weights
OPERATION_SECONDS = 1 / 640e12
LEAST_TOKEN_SECONDS = 2e-6  # a token more of SmolLM2-135M
PLAN_SECONDS = 3e-4  # of the host


class FastDecoder:
    """Samples completions of a policy; see `grpo.rollout.generate.PlainDecoder`."""

    def __init__(self, policy: Policy):
        self.policy = policy

    @cached_property
    @torch.no_grad()
    def step(self) -> "CudaStep | None":
        """The captured decode step, made when it is first asked for; None where device or model do
        not allow one.

        It is also refused, with a warning, where it disagrees with the model's own forward pass.
        """
        policy = self.policy
        llama = getattr(policy.forward, "llama", None)
        if policy.device.type != "cuda" or llama is None or llama.D not in (32, 64, 128):
            return None

        step = CudaStep(policy)
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

    def free(self) -> None:
        """Free the memory and the graphs of the captured step."""
        if "step" in vars(self) and self.step:
            self.step.free()

    def rows(self, request: RolloutRequest, room: int) -> Any:
        """Return the rows of a rollout, with `room` tokens each: on a GPU those of the step."""
        if self.step:
            return CudaRows(self.step, request, room)
        return EagerRows(self.policy, request, room)

    def room(self, request: RolloutRequest) -> int:
        """Return the room for the tokens of a completion, and for drafts beyond its budget."""
        return max(request.budgets) + _longest_draft(request) + 1

    @torch.no_grad()
    def decode(self, request: RolloutRequest) -> Written:
        """Return the tokens of each completion, and their log-probabilities.

        Should the captured step write a log-probability that is not finite, the rollout is repeated
        without it: the same uniform numbers draw the same tokens, up to rounding.
        """
        room = self.room(request)
        rows = self.rows(request, room)
        completions = len(request.prompts) * request.group_size
        # Where tokens are drafted, a row reads many.
        with nullcontext() if request.is_drafted else decoding(self.policy.causal, completions):
            written = self._decode(rows, request, room)
        if self.step and not all(math.isfinite(sum(values)) for _, values in written):
            self.policy.events.append(
                "the captured decode step gave numbers that are not finite: this rollout was "
                "repeated without it"
            )
            written = self._decode(EagerRows(self.policy, request, room), request, room)
        return written

    def _decode(self, decoder: Any, request: RolloutRequest, room: int) -> Written:
        policy, G = self.policy, request.group_size
        C = len(request.prompts) * G

        drafter = None
        if request.is_drafted:
            guesses = [guess for guess in request.guesses for _ in range(G)]
            plans = DraftPlans(policy, guesses, room, request.answers)
            drafter = Drafter(decoder, plans, request.drafting, _longest_draft(request))

        tokens = torch.zeros(C, room, dtype=torch.long)
        logprobs = torch.zeros(tokens.shape)
        lengths = torch.zeros(C, dtype=torch.long)
        rows = torch.arange(C)  # the completion that each row of the decoder is writing
        drafts = torch.empty(C, 0, dtype=torch.long)

        while len(rows):
            # One forward pass: the drafts are verified, and one more token is drawn.
            decoder.start(drafts)
            if drafter is not None:
                drafter.plan_meanwhile(tokens)
            chosen, chosen_logprobs, count = decoder.finish()
            written = lengths[rows]
            if drafter is not None:
                drafter.observe(rows, written, chosen, count)

            # Tokens after a rejected draft are overwritten later, or cut off at the end.
            positions = written[:, None] + torch.arange(chosen.shape[1])
            tokens[rows[:, None], positions] = chosen
            logprobs[rows[:, None], positions] = chosen_logprobs
            lengths[rows] = written + count

            if request.is_enough is not None:
                # Many completions of a prompt are the same so far.
                ids_R = tokens[rows, : int(lengths.max())].tolist()
                texts = zip((rows // G).tolist(), ids_R, lengths[rows].tolist())
                written_R = [(p, tuple(ids[:length])) for p, ids, length in texts]
                ends = {(p, ids): request.ends_at(p * G, ids) for p, ids in set(written_R)}
                decoder.stop(torch.tensor([ends[each] for each in written_R]))
            rows = rows[decoder.retire()]
            drafts = torch.empty(len(rows), 0, dtype=torch.long)
            if drafter is not None and len(rows):
                drafts = drafter.propose(rows, tokens, lengths)

        return [
            (ids[:n], values[:n])
            for ids, values, n in zip(tokens.tolist(), logprobs.tolist(), lengths.tolist())
        ]


def _longest_draft(request: RolloutRequest) -> int:
    """Return the largest number of tokens that one pass may draft."""
    most = max(request.budgets) if request.is_drafted else 0
    return max(k for k in LENGTHS if k <= max(SHORT, most))


def accepted(chosen_CT: Tensor, drafts_Ck: Tensor, stops: Tensor) -> Tensor:
    """Return how many of the chosen tokens count (C,): up to the first that ends the text, or that
    differs from the draft, which is itself a valid sample.
    """
    goes_on = (chosen_CT[:, :-1] == drafts_Ck) & ~torch.isin(chosen_CT[:, :-1], stops)
    return 1 + goes_on.long().cumprod(1).sum(1)


class EagerRows:
    """The completions of one rollout while they are written.

    - `row` (C,): the row of the forward pass that each completion shares;
    - `first` (R,): the first completion of each row, which speaks for the others;
    - `live` (C,): whether a draft is wanted, which is so for the first of each row;
    - `last` (C,): each completion's last token, which the model has not read yet;
    - `drafts_Rk` and `drawn`: the drafts of the pass, and its tokens with log-probabilities.
    """

    costs = Costs(fixed=48, plan=3)  # measured with the embedded model on two CPU cores
    lengths = LENGTHS
    live: Tensor

    def __init__(self, policy: Any, request: RolloutRequest, room: int):
        self.policy, self.forward, self.truncate = policy, policy.forward, request.truncate
        prompts, G = len(request.prompts), request.group_size
        self.last_PE, self.cache = self.forward.prefill(request.prompts)
        self.cache.allocate(prompts, room)

        self.keys, self.budget = request.flat
        self.temperature = request.temperature
        self.stops = torch.tensor(policy.stops)
        self.written = torch.zeros_like(self.keys)
        self.last: Tensor | None = None

        self.row = torch.arange(prompts).repeat_interleave(G)
        self.first = torch.arange(prompts) * G

    def start(self, drafts_Ck: Tensor) -> None:
        """Start a pass. All completions of a row use the draft of the first of them."""
        device, drafts_Rk = self.policy.device, drafts_Ck[self.first]
        if self.last is None:  # the first tokens follow the prompts
            drafts_Rk = drafts_Rk[:, :0]
            hidden_RTE = self.last_PE[:, None]
        else:
            tokens = torch.cat([self.last[self.first, None], drafts_Rk.clamp(min=0)], 1)
            hidden_RTE = self.forward.extend(tokens.to(device), self.cache)

        places_CT = self.written[:, None] + torch.arange(hidden_RTE.shape[1])
        self.drafts_Rk = drafts_Rk
        self.drawn = choose(
            self.policy.logits(hidden_RTE),
            self.temperature,
            uniform(self.keys[:, None], places_CT).to(device),
            self.row.to(device),
            self.truncate,
        )

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the next tokens and log-probabilities (C, T), and how many count, on the CPU."""
        chosen, logprobs = (drawn.cpu() for drawn in self.drawn)
        count = accepted(chosen, self.drafts_Rk[self.row], self.stops)
        count = count.minimum(self.budget - self.written)
        self.last = chosen.gather(1, count[:, None] - 1)[:, 0]
        self.written = self.written + count
        return chosen, logprobs, count

    def stop(self, ends: Tensor) -> None:
        """End the completions that `ends` (C,) marks."""
        self.budget = torch.where(ends, self.written, self.budget)

    def retire(self) -> Tensor:
        """Drop finished completions, and split rows that diverged; return which stay, in order."""
        assert self.last is not None  # `finish` comes first
        goes_on = ~torch.isin(self.last, self.stops) & (self.written < self.budget)
        stay = goes_on.nonzero()[:, 0]
        if not len(stay):
            return stay

        sources_R = torch.arange(len(self.first))
        if len(stay) < len(self.last) or len(self.first) < len(self.last):
            for name in ("keys", "budget", "written", "row", "last"):
                setattr(self, name, getattr(self, name)[stay])
            sources_R = self._split_rows()

        # The last token written is not in the cache yet.
        cached_R = self.written[self.first] - 1
        self.cache.reorder(sources_R.to(self.policy.device), cached_R.to(self.policy.device))
        self.live = torch.zeros(len(stay), dtype=torch.bool).index_fill(0, self.first, True)
        return stay

    def _split_rows(self) -> Tensor:
        """Give one row to the completions that have read the same and continue with the same token;
        return the row that each new row is a copy of.

        To save copies, the first part of a row stays in its place if that exists still.
        """
        assert self.last is not None
        state = torch.stack([self.row, self.written, self.last])
        parts, part_C = state.unique(dim=1, return_inverse=True)
        source_R = parts[0]  # in ascending order
        R = len(source_R)

        is_first_part = source_R.diff(prepend=source_R.new_tensor([-1])) > 0
        stays_R = is_first_part & (source_R < R)
        is_free_R = torch.ones(R, dtype=torch.bool).index_fill(0, source_R[stays_R], False)
        place_R = source_R.masked_scatter(~stays_R, is_free_R.nonzero())

        self.row = place_R[part_C]
        completions = torch.arange(len(part_C))
        first = torch.full((R,), len(part_C))
        self.first = first.scatter_reduce(0, self.row, completions, "amin")
        return source_R.scatter(0, place_R, source_R)


# On a GPU: one step, captured as CUDA graphs, and the rows that are fed to it


def pass_costs(policy: Any) -> Costs:
    """Estimate how long passes and plans take: measured times would make drafts, and so the
    rounding of the logits, differ from run to run.
    """
    weights = list(policy.causal.parameters())
    parameters = sum(weight.numel() for weight in weights)

    reading = BYTE_SECONDS * parameters * weights[0].element_size()
    fixed = max(LAYER_SECONDS * len(policy.forward.llama.blocks), reading)
    token = max(LEAST_TOKEN_SECONDS, OPERATION_SECONDS * 2 * parameters)
    return Costs(fixed / token, PLAN_SECONDS / token, meanwhile=True)


class CudaStep:
    """The decode step of one policy: its layers, memory and graphs.

    The policy keeps it from one rollout to the next. Call `allocate` before anything else.
    """

    def __init__(self, policy: Any):
        self.policy, self.forward = policy, policy.forward
        self.layers = CudaLayers(self.forward.llama)
        self.kernels = self.layers.kernels
        self.stops = torch.tensor(policy.stops or (-1,), device=policy.device)
        self.costs = pass_costs(policy)
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
        """Do one step for the first R rows (a bucket), by a graph that is captured once."""
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
        hidden_ME = self.layers.forward(R, T, tiles, self.memory)
        self.sample(self.policy.head(hidden_ME), R, T, truncate)

    def sample(self, logits_MV: Tensor, R: int, T: int, truncate: Callable | None) -> None:
        """Sample a token from each distribution; write down those that count."""
        memory, state, temperature = self.memory, self.memory.state, self.memory.temperature
        M, V = logits_MV.shape

        # Truncation works on logits that are already divided by the temperature. Behind it, only
        # whether the choice is greedy matters.
        if truncate is not None:
            divisor = torch.where(temperature == 0, 1.0, temperature)
            logits_MV = truncate(logits_MV.float() / divisor, None)
            temperature = (temperature > 0).float()

        blocks = -(-V // LOGITS_BLOCK)

        def empty(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(size, dtype=dtype, device=logits_MV.device)

        maxima, sums = empty(M, blocks), empty(M, blocks)
        argmaxima = empty(M, blocks, dtype=torch.int32)
        chosen, logprob = empty(M, dtype=torch.int32), empty(M)

        self.kernels.reduce_blocks[(M, blocks)](
            logits_MV, temperature, maxima, sums, argmaxima, V, blocks, BLOCK=LOGITS_BLOCK
        )
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
        sample_keys, self.budget = request.flat
        self.costs = step.costs
        prompts, rows = request.prompts, len(sample_keys)
        self.columns = rows // len(prompts)

        # `prefill` also takes over what the optimizer has changed.
        self.last_PE: Tensor | None
        self.last_PE, cache = step.forward.prefill(prompts)
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
        memory.temperature.fill_(request.temperature)

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
        """Start a pass, or where nothing is drafted several: a row writes up to `new` tokens."""
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
        """Wait for the pass. Return the same as `EagerRows.finish`, (R, 1 + k or BURST)."""
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

    def stop(self, ends: Tensor) -> None:
        """End the completions that `ends` (R,) marks."""
        if (self.live & ends).any():
            self.live &= ~ends
            self.cuda_step.memory.state.live[: len(ends)] = self.live

    def retire(self) -> Tensor:
        """Drop finished rows if the others fit a smaller step; return which stay, in order."""
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
        """Divide the tokens into tiles that read a prompt's keys together; return their number."""
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
def disagreement(step: CudaStep) -> float:
    """Return how much the hidden states differ from the model's own, relative to these."""
    policy = step.policy
    prompts, completions = probe_tokens(policy.causal.get_input_embeddings().weight.shape[0])
    tokens = torch.tensor([tokens[:3] for tokens in completions], device=policy.device)

    _, cache = step.forward.prefill(prompts)
    cache.allocate(4, 3)
    expected = step.forward.extend(tokens, cache)

    rows = CudaRows(step, RolloutRequest(prompts, [[1, 1]] * 2, 1.0, [9] * 2), room=9)
    step.memory.feed[:4, :3] = tokens
    step.memory.state.written[:4] = 1
    found = step.layers.forward(4, 3, rows._lay_out(3), step.memory).view(expected.shape)
    return ((found - expected).float().norm() / expected.float().norm()).item()
