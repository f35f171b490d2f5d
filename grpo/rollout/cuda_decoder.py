"""The decoder for models of the Llama family on a GPU: the rows of a rollout, fed to the captured
step of `cuda_graph.py`.

The host looks at what was written once in `BURST` steps, or after each draft.

Shapes: R rows, T tokens of each at once, k = T - 1 drafted, L prompt tokens.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from grpo.model.llama import agrees, relative_difference
from grpo.rollout.cuda_graph import TOKENS, CudaStep, bucket
from grpo.rollout.speculative import LENGTHS

BURST = 8  # tokens a row between looks at who has finished


class CudaDecoder:
    """The rows of one rollout, as they are written; see `eager_decoder.EagerDecoder` for the same
    on any device.
    """

    # See AcceptanceModel.length. Products over 206 tokens take as long as the reading of their
    # weights (990 TFLOP/s, 4.8 TB/s), and there is some overhead; one token more of Llama-3.2-3B
    # takes 10 us then, and aiming anew 0.4 ms of the host.
    flat, aim = 256, 40

    def __init__(
        self,
        model: CudaStep,
        prompts,
        keys: Tensor,
        heat: Tensor,
        budget: Tensor,
        truncate: Callable | None,
        room: int,
    ):
        self.model, self.truncate, policy = model, truncate, model.policy
        self.last_PN, shared = policy.prefill(
            prompts
        )  # which takes over what the optimizer has changed
        longest, rows = shared.padding_PL.shape[1], len(keys)
        model.allocate(rows, len(prompts), longest, room)
        for i, (prompt_keys, prompt_values) in shared.prompt.items():
            model.shared[i, 0, : len(prompts), :, :longest] = prompt_keys
            model.shared[i, 1, : len(prompts), :, :longest] = prompt_values
        model.lengths[: len(prompts)] = shared.lengths_P
        self.columns = rows // len(prompts)
        self.prompt_of = torch.arange(len(prompts)).repeat_interleave(self.columns)
        start = shared.lengths_P.repeat_interleave(self.columns)
        fresh = dict(
            slot=torch.arange(rows),
            budget=budget,
            written=0,
            live=1,
            start=start,
            key=keys,
            heat=heat,
        )
        model.state["live"].zero_()
        for name, value in fresh.items():
            model.state[name][:rows] = value
        self.written = torch.zeros(rows, dtype=torch.int64)
        self.budget = budget
        self.live = torch.ones(rows, dtype=torch.bool)
        self.laid_out = None

    @property
    def lengths(self) -> list[int]:
        """The lengths of drafts, in tokens, that a pass over the present rows has room for."""
        return [k for k in LENGTHS if not k or bucket(len(self.written)) * (k + 1) <= TOKENS]

    def step(self, drafts_Rk: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the next tokens of each row, their log-probabilities (R, 1 + k or BURST), and how
        many of them count (R,), on the CPU.
        """
        model, state, R, T, new = (
            self.model,
            self.model.state,
            len(self.written),
            1 + drafts_Rk.shape[1],
            1,
        )
        begin = (
            state["slot"][:R] * model.room + state["written"][:R]
        )  # where the new tokens will stand
        if self.last_PN is not None:
            logits = model.policy.head(self.last_PN).repeat_interleave(self.columns, 0)
            model.sample(logits, R, 1, self.truncate)
            self.last_PN = None
        else:
            tiles = self._lay_out(T)
            if T > 1:
                model.feed[:R, 1:T] = drafts_Rk.clamp(min=0).to(model.feed.device)
            else:
                new = min(BURST, int((self.budget - self.written)[self.live].max()))
            for _ in range(new):
                model.run(bucket(R), T, tiles, self.truncate)
            new = max(new, T)
        places = begin[:, None] + torch.arange(new, device=begin.device)
        together = torch.cat(
            [
                model.out_tokens.take(places),
                model.out_logprobs.take(places).view(torch.int32),
                state["written"][:R, None],
                state["live"][:R, None],
            ],
            1,
        ).cpu()  # one transfer, one wait
        chosen, logprobs, (written, live) = (
            together[:, :new],
            together[:, new : 2 * new],
            together[:, 2 * new :].unbind(1),
        )
        count, self.written, self.live = written - self.written, written, live > 0
        return chosen, logprobs.int().view(torch.float32), count

    def retire(self) -> Tensor:
        """Let finished rows go when fewer then fit a smaller step; return the rows that stay, by
        their present places, in order.
        """
        rows, kept = len(self.live), self.live.nonzero()[:, 0]
        if len(kept) and bucket(len(kept)) == bucket(rows):
            return torch.arange(rows)
        there = kept.to(self.model.feed.device)
        for tensor in (*self.model.state.values(), self.model.feed):
            tensor[: len(kept)] = tensor[there]
        self.model.state["live"][len(kept) : rows] = 0
        self.written, self.budget, self.live, self.prompt_of = (
            x[kept] for x in (self.written, self.budget, self.live, self.prompt_of)
        )
        self.laid_out = None
        return kept

    def _lay_out(self, T: int) -> int:
        """Write down which neighbouring tokens read a prompt's keys together; return how many such
        tiles to run, some perhaps empty.
        """
        if self.laid_out is None or self.laid_out[0] != T:
            size, tiles = self.model.tile_tokens(T), []
            prompts, counts = self.prompt_of.unique_consecutive(return_counts=True)
            for prompt, after, count in zip(
                prompts.tolist(), (T * counts.cumsum(0)).tolist(), (T * counts).tolist()
            ):
                tiles += [
                    (prompt, token, min(size, after - token))
                    for token in range(after - count, after, size)
                ]
            number = bucket(len(tiles))
            tiles += [(0, 0, 0)] * (number - len(tiles))
            self.model.tile[:, :number] = torch.tensor(tiles, dtype=torch.int32).t()
            self.laid_out = (T, number)
        return self.laid_out[1]


def cuda_step(policy) -> CudaStep | None:
    """Return the captured decode step of `policy`, made once and kept with it, or None if it has
    none.
    """
    if "cuda" not in policy.decoder_cache:
        policy.decoder_cache["cuda"] = new_cuda_step(policy)
    return policy.decoder_cache["cuda"]


@torch.no_grad()
def new_cuda_step(policy) -> CudaStep | None:
    """Return a new captured decode step of `policy`, or None where device or model have none."""
    if (
        policy.device.type != "cuda"
        or policy.fast_model is None
        or policy.fast_model.D not in (32, 64, 128)
    ):
        return None
    model = CudaStep(policy)
    return model if agrees("fused decoder", disagreement(model), model.dtype) else None


@torch.no_grad()
def disagreement(model: CudaStep) -> float:
    """Return by how much the hidden states after a few tokens differ from those of the model's own
    forward pass, relative to these.
    """
    policy = model.policy
    prompts = [tuple(range(5, 12)), tuple(range(20, 23))]
    ones = torch.ones(4, dtype=torch.int64)
    decoder = CudaDecoder(model, prompts, ones, ones.float(), 9 * ones, None, 9)
    tokens = torch.arange(12, device=policy.device).view(4, 3) + 7
    _, shared = policy.prefill(prompts)
    shared.allocate(4, 3)
    expected = policy.extend(tokens, shared)
    model.feed[:4, :3] = tokens
    model.state["written"][:4] = 1
    found = model.forward(4, 3, decoder._lay_out(3)).view(expected.shape)
    return relative_difference(found, expected)
