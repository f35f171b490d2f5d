"""The fallback for models that do not pass attention arguments on (see `cache`): no keys are kept, every token is run again.

Slow, but the same tokens and gradients: prompt and completion stand in a row without a gap, padded on the right, so
causal attention alone is right for every architecture. `PlainPrompt` has the verbs of `cache.SharedPrompt`.

Shapes: P prompts, G completions of each, R = P * G rows (row r belongs to prompt r // G), L prompt tokens, T new tokens.
"""
import torch


class PlainPrompt:
    """The tokens of `P` prompts, and of the completions that follow them."""

    def __init__(self, lengths_P: torch.Tensor, tokens_PL: torch.Tensor):
        self.lengths_P, self.tokens_PL = lengths_P, tokens_PL
        self.own_RT: torch.Tensor | None = None  # what a rollout has written
        self.filled, self.room = 0, 0

    def allot(self, room: int):
        """End the prefill; a rollout (`room` > 0) remembers the tokens that are appended, the update does not."""
        self.room = room

    def sequences(self, tokens_RT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens; return whole sequences, padded on the right, and the places (R, T) of those tokens in them."""
        T = tokens_RT.shape[1]
        if self.own_RT is not None:
            tokens_RT = torch.cat([self.own_RT[:, :self.filled], tokens_RT], 1)
        if self.room:
            self.own_RT = tokens_RT
        rows = len(tokens_RT) // len(self.lengths_P)
        lengths_R = self.lengths_P.repeat_interleave(rows)
        places_RT = lengths_R[:, None] + torch.arange(tokens_RT.shape[1], device=tokens_RT.device)
        whole = torch.nn.functional.pad(self.tokens_PL.repeat_interleave(rows, 0), (0, tokens_RT.shape[1]))
        return whole.scatter(1, places_RT, tokens_RT), places_RT[:, -T:]

    def retire(self, prompts: torch.Tensor, rows: torch.Tensor):
        """Keep only the prompts and rows of these indices, in this order."""
        self.lengths_P, self.tokens_PL = self.lengths_P[prompts], self.tokens_PL[prompts]
        if self.own_RT is not None:
            self.own_RT = self.own_RT[rows]
