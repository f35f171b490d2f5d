"""The fallback for models that do not pass attention arguments on (see `prefix_cache`).

No keys are kept: every token is run again at each step. That is slow, but it gives the same tokens
and gradients. Prompt and completion stand in a row without a gap, padded on the right, so causal
attention alone is right for every architecture.
"""

import torch
from torch import Tensor


class FallbackCache:
    """The tokens of P prompts, and of the rows that follow them (a `RolloutCache`).

    Before `allocate` a cache remembers nothing that is appended. After it each row has a copy of
    its prompt.
    """

    def __init__(self, lengths_P: Tensor, tokens_PL: Tensor):
        self.lengths_P = lengths_P
        self.tokens_PL = tokens_PL
        self.filled_R: Tensor | None = None
        self.own_RS: Tensor | None = None  # the rows' own tokens

    def allocate(self, rows: int, room: int) -> None:
        """Give every prompt the same number of rows, in order, with `room` tokens each."""
        each = rows // len(self.lengths_P)
        self.lengths_P = self.lengths_P.repeat_interleave(each)
        self.tokens_PL = self.tokens_PL.repeat_interleave(each, 0)
        self.filled_R = self.lengths_P.new_zeros(rows)
        self.own_RS = self.lengths_P.new_zeros(rows, room)

    def append(self, tokens_RT: Tensor) -> tuple[Tensor, Tensor]:
        """Append tokens to each row.

        Returns the whole sequences (R, X), padded on the right, and the indices (R, T) of the new
        tokens in them. Before `allocate` each prompt may have several rows, in order.
        """
        R, T = tokens_RT.shape
        rows = R // len(self.lengths_P)

        new_RS = tokens_RT
        offsets_RT = torch.arange(T, device=tokens_RT.device).expand(R, T)
        if self.filled_R is not None:
            assert self.own_RS is not None
            offsets_RT = offsets_RT + self.filled_R[:, None]
            self.own_RS = self.own_RS.scatter(1, offsets_RT, tokens_RT)
            new_RS = self.own_RS[:, : int(offsets_RT.max()) + 1]

        # Write the rows' tokens over the padding behind each prompt.
        lengths_R1 = self.lengths_P.repeat_interleave(rows)[:, None]
        prompts_RL = self.tokens_PL.repeat_interleave(rows, 0)
        whole_RX = torch.nn.functional.pad(prompts_RL, (0, new_RS.shape[1]))
        indices_RS = lengths_R1 + torch.arange(new_RS.shape[1], device=tokens_RT.device)
        return whole_RX.scatter(1, indices_RS, new_RS), lengths_R1 + offsets_RT

    def reorder(self, rows_R: Tensor, filled_R: Tensor) -> None:
        """Make row i the first `filled_R[i]` tokens of the present row `rows_R[i]`."""
        assert self.own_RS is not None
        self.lengths_P = self.lengths_P[rows_R]
        self.tokens_PL = self.tokens_PL[rows_R]
        self.own_RS = self.own_RS[rows_R]
        self.filled_R = filled_R
