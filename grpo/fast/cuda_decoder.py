"""The decoder for models of the Llama family on a GPU. It feeds the rows of a rollout to the
captured step of `cuda_graph.py`.

The host looks at what was written after each draft, or else once every BURST steps.

Shapes: P prompts, R rows, T tokens of each at once, k = T - 1 drafted, L prompt tokens.
"""

import warnings

import torch
from torch import Tensor

from grpo.fast.cuda_graph import CudaStep
from grpo.fast.cuda_memory import MAX_TOKENS, bucket
from grpo.fast.forward import FastForward
from grpo.fast.prefix_cache import PrefixCache
from grpo.fast.speculative import LENGTHS
from grpo.model.check import probe_adapters, probe_tokens
from grpo.model.policy import Policy
from grpo.rollout.generate import RolloutRequest

BURST = 8  # tokens a row between two checks for finished rows


class CudaRows:
    """The rows of one rollout while they are written; the counterpart of `EagerRows`."""

    def __init__(self, step: CudaStep, request: RolloutRequest, room: int):
        self.cuda_step, self.truncate = step, request.truncate
        keys, temperatures, self.budget = request.flat
        self.costs = step.costs
        prompts, rows = request.prompts, len(keys)
        self.columns = rows // len(prompts)

        # `prefill` also takes over what the optimizer has changed.
        last_PE, cache = step.forward_pass.prefill(prompts)
        assert isinstance(cache, PrefixCache)
        self.last_PE: Tensor | None = last_PE
        longest = cache.padding_PL.shape[1]
        step.allocate(rows, len(prompts), longest, room)
        memory = step.memory
        for i, (keys, values) in cache.prompt.items():
            memory.prompt_cache[i, 0, : len(prompts), :, :longest] = keys
            memory.prompt_cache[i, 1, : len(prompts), :, :longest] = values
        memory.prompt_lengths[: len(prompts)] = cache.lengths_P

        state = memory.state
        state.live.zero_()
        state.slot[:rows] = torch.arange(rows)
        state.budget[:rows] = self.budget
        state.written[:rows] = 0
        state.live[:rows] = 1
        state.start[:rows] = cache.lengths_P.repeat_interleave(self.columns)
        state.key[:rows] = keys
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
        """Start a pass, or several where nothing is drafted."""
        memory, R = self.cuda_step.memory, len(self.written)
        self.begin_R = memory.state.slot[:R] * memory.capacity.row_room + memory.state.written[:R]
        self.new = self._run(drafts_Rk)

    def _run(self, drafts_Rk: Tensor) -> int:
        """Launch one step, or several where nothing is drafted; return the most tokens of a row."""
        R, T = len(self.written), 1 + drafts_Rk.shape[1]
        step, truncate = self.cuda_step, self.truncate

        if self.last_PE is not None:  # the first tokens follow the prompts
            logits = step.policy.head(self.last_PE).repeat_interleave(self.columns, 0)
            step.sample(logits, R, 1, truncate)
            self.last_PE = None
            return 1

        tiles = self._lay_out(T)
        if T > 1:
            step.memory.feed[:R, 1:T] = drafts_Rk.clamp(min=0).to(step.memory.feed.device)
            step.run(bucket(R), T, tiles, truncate)
            return T

        new = min(BURST, int((self.budget - self.written)[self.live].max()))
        for _ in range(new):
            step.run(bucket(R), T, tiles, truncate)
        return new

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
    return step if _agrees(difference, llama.embedding.weight.dtype) else None


def _agrees(difference: float, dtype: torch.dtype) -> bool:
    """Return whether hidden states with this relative `difference` from the model's may be used.

    If rounding does not explain the difference, warn that the decoder is not used. In bfloat16
    rounding amounts to 0.03 in 28 layers.
    """
    tolerance = 0.1 if dtype in (torch.bfloat16, torch.float16) else 1e-3
    if difference <= tolerance:
        return True

    warnings.warn(
        f"the fused decoder disagrees with the model by {difference:.1e} and is not used",
        stacklevel=3,
    )
    return False


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
