"""The fallback for models that do not pass attention arguments on (see `prefix_cache`): no keys
are kept, every token is run again.

Slow, but the same tokens and gradients: prompt and completion stand in a row without a gap, padded
on the right, so causal attention alone is right for every architecture. `FallbackCache` has the
verbs of `cache.PrefixCache`.

Shapes: P prompts, R rows, as many for each prompt, in order, L prompt tokens, T new tokens.
"""

import torch


class FallbackCache:
    """The tokens of `P` prompts, and of the rows that follow them. A rollout remembers what is
    appended; from `allocate` on, each row has its prompt for itself.
    """

    def __init__(self, lengths_P: torch.Tensor, tokens_PL: torch.Tensor):
        self.lengths_P, self.tokens_PL = lengths_P, tokens_PL
        self.filled_R: torch.Tensor | None = None
        self.own_RT: torch.Tensor | None = None  # what a rollout has written

    def allocate(self, rows: int, room: int):
        each = rows // len(self.lengths_P)
        self.lengths_P, self.tokens_PL = (
            self.lengths_P.repeat_interleave(each),
            self.tokens_PL.repeat_interleave(each, 0),
        )
        self.filled_R = self.lengths_P.new_zeros(rows)
        self.own_RT = self.lengths_P.new_zeros(rows, room)

    def sequences(self, tokens_RT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens; return whole sequences, padded on the right, and the places (R, T) of
        those tokens in them.
        """
        R, T = tokens_RT.shape
        rows = R // len(self.lengths_P)
        offsets_RT = torch.arange(T, device=tokens_RT.device).expand(R, T)
        new_RT = tokens_RT
        if self.filled_R is not None:
            offsets_RT = offsets_RT + self.filled_R[:, None]
            self.own_RT = self.own_RT.scatter(1, offsets_RT, tokens_RT)
            new_RT = self.own_RT[:, : int(offsets_RT.max()) + 1]
        lengths_R1 = self.lengths_P.repeat_interleave(rows)[:, None]
        whole = torch.nn.functional.pad(
            self.tokens_PL.repeat_interleave(rows, 0), (0, new_RT.shape[1])
        )
        places = lengths_R1 + torch.arange(new_RT.shape[1], device=tokens_RT.device)
        return whole.scatter(1, places, new_RT), lengths_R1 + offsets_RT

    def keep(self, rows_R: torch.Tensor, filled_R: torch.Tensor):
        self.lengths_P, self.tokens_PL, self.own_RT = (
            self.lengths_P[rows_R],
            self.tokens_PL[rows_R],
            self.own_RT[rows_R],
        )
        self.filled_R = filled_R
