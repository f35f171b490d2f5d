"""Log-probabilities of given tokens and entropies of their distributions, without ever holding all the logits.

For a vocabulary of 128,256 and 16 completions of 1,000 tokens the float32 logits alone are 8.2 GB, and autograd keeps
several tensors of that size. So the head is applied to `chunk` tokens at a time and applied again in the backward pass
(gradient checkpointing, arXiv:1604.06174): about four tensors of chunk x V live at once instead of three of N x V, for
one more product with the head.

Shapes: N tokens (all completions of a micro-batch, flat), V vocabulary, H hidden.
"""
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Head = Callable[[Tensor], Tensor]  # hidden (n, H) -> logits (n, V)
Truncate = Callable[[Tensor, Tensor], Tensor]  # logits (n, V), targets (n,) -> logits (n, V), excluded entries -inf


def token_logprobs(hidden_NH: Tensor, head: Head, targets_N: Tensor, temperature_N: Tensor, *, chunk: int = 1024,
                   truncate: Truncate | None = None) -> tuple[Tensor, Tensor]:
    """Return log softmax(head(hidden) / temperature) at `targets_N`, and the entropy in nats, (N,) each.

    Both are float32 whatever the head's precision (float64 from a float64 head). Gradients flow through the
    log-probabilities to `hidden_NH` and to the parameters of `head`; the entropy is detached. `head` must act on each
    token by itself, as a linear layer does, with LoRA or without. `truncate` (top-k, top-p) gets the logits already
    divided by the temperature and must keep the targets: then log-probability and entropy are of what it leaves.
    """
    chunks = zip(hidden_NH.split(chunk), targets_N.split(chunk), temperature_N.split(chunk), strict=True)
    parts = [checkpoint(_chunk_logprobs, hidden_nH, head, targets_n, temperature_n, truncate, use_reentrant=False)
             for hidden_nH, targets_n, temperature_n in chunks]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk_logprobs(hidden_nH: Tensor, head: Head, targets_n: Tensor, temperature_n: Tensor,
                    truncate: Truncate | None) -> tuple[Tensor, Tensor]:
    logits_nV = head(hidden_nH)
    logits_nV = logits_nV.to(torch.promote_types(logits_nV.dtype, torch.float32))
    logits_nV = logits_nV / temperature_n.to(logits_nV.dtype)[:, None]
    if truncate is not None:
        logits_nV = truncate(logits_nV, targets_n)
    all_nV = logits_nV.log_softmax(-1)
    logprobs_n = all_nV.gather(-1, targets_n[:, None])[:, 0]
    # Last, because the recomputation stops at the last tensor that the backward pass needs. entr(p) = -p log p, and
    # entr(0) = 0, where p * log p would be NaN for what `truncate` excluded.
    return logprobs_n, torch.special.entr(all_nV.detach().exp()).sum(-1)
