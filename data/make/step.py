"""One step of pretraining: loss, gradient, Muon for the matrices and AdamW for the rest."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import LlamaForCausalLM

from data.make.batches import LENGTHS
from data.make.muon import Muon

# Gradients are clipped to this norm.
MAX_GRAD_NORM = 1.0


def hidden_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the hidden states of the last layer, (rows, length, width).

    The layers are called one by one, so that all of them share one compiled layer.
    """
    hidden = model.model.embed_tokens(tokens)
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    rotary = model.model.rotary_emb(hidden, positions)
    for layer in model.model.layers:
        # Attention without a mask is causal.
        hidden = layer(
            hidden, attention_mask=None, position_ids=positions, position_embeddings=rotary
        )
    return hidden


def loss_of(
    model: Any, hidden: torch.Tensor, tokens: torch.Tensor, learned: torch.Tensor
) -> torch.Tensor:
    """Return the mean cross-entropy of the `learned` tokens, given all tokens before them.

    `hidden` is the result of `hidden_of`; `tokens` and `learned` are (rows, length).
    """
    logits = model.lm_head(model.model.norm(hidden))[:, :-1]
    targets = tokens[:, 1:].masked_fill(~learned[:, 1:], -100)
    return torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(), targets.reshape(-1)
    )


class Step:
    """Trains `model`, one batch at a time.

    On CUDA a whole step is captured as a graph, one for each row length: a step of a small model is
    a thousand small kernels, and the GPU runs them faster than the host can launch them.

    - `muon`, `adam`: the optimizers; `rate`: their learning rate, a tensor;
    - `graphs`: (graph, input tensors, loss) by row length.
    """

    def __init__(self, model: LlamaForCausalLM, device: str):
        self.model = model
        self.device = device

        # Muon is for matrices between hidden states. So the embedding is not among them.
        matrices = {
            name: p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name
        }
        rest = [p for name, p in model.named_parameters() if name not in matrices]

        self.rate = torch.zeros((), device=device)
        self.muon = Muon(matrices.values())
        self.adam = torch.optim.AdamW(
            rest,
            lr=self.rate,
            betas=(0.9, 0.95),
            weight_decay=0.0,
            capturable=device == "cuda",
        )

        self.loss_of = torch.compile(loss_of, dynamic=False) if device == "cuda" else loss_of
        for layer in model.model.layers if device == "cuda" else ():
            layer.compile(dynamic=False)

        # The graphs share one memory pool, because only one runs at a time.
        self.graphs: dict[int, tuple] = {}
        self.pool = torch.cuda.graph_pool_handle() if device == "cuda" else None

    def __call__(self, tokens: np.ndarray, learned: np.ndarray, rate: float) -> torch.Tensor:
        """Take one step with learning rate `rate`; return the loss, on the device."""
        batch = [torch.from_numpy(array).to(self.device) for array in (tokens, learned)]
        length = tokens.shape[1]
        if self.device == "cuda" and length not in self.graphs:
            self.graphs[length] = self.capture(batch)

        self.rate.fill_(rate)
        if self.device != "cuda":
            return self.compute(*batch)

        graph, inputs, loss = self.graphs[length]
        for tensor, array in zip(inputs, batch):
            tensor.copy_(array)
        graph.replay()
        return loss

    def prepare(self, batch_tokens: int, lengths: Sequence[int] = tuple(LENGTHS)) -> None:
        """Capture the graphs of all row lengths, before the time is measured; changes no weight."""
        for length in lengths if self.device == "cuda" else ():
            rows = batch_tokens // length
            self.graphs[length] = self.capture(
                [
                    torch.zeros(rows, length, dtype=torch.int16, device=self.device),
                    torch.ones(rows, length, dtype=torch.bool, device=self.device),
                ]
            )

        # The warm-up steps have changed the optimizers' moments.
        for name, value in self.state().items():
            if not name.startswith("model."):
                value.zero_()

    def capture(self, batch: Any) -> Any:
        """Return the graph of a step on batches of this shape, with its input and loss tensors."""
        # A graph can be captured only after warm-up steps. With a rate of 0 they change no weight.
        self.rate.zero_()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.compute(*batch)
        torch.cuda.current_stream().wait_stream(side)

        self.model.zero_grad()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            loss = self.compute(*batch)
        return graph, batch, loss

    def compute(self, tokens: torch.Tensor, learned: torch.Tensor) -> torch.Tensor:
        """Take one step on a batch with the current learning rate; return its loss."""
        self.model.zero_grad()
        with torch.autocast(self.device, torch.bfloat16):
            hidden = hidden_of(self.model, tokens.long())
            loss = self.loss_of(self.model, hidden, tokens.long(), learned)
        loss.backward()

        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self.muon.step(self.rate)
        self.adam.step()
        return loss.detach()

    def state(self) -> dict[str, torch.Tensor]:
        """Return every tensor that is needed to continue the training, by name.

        They are not copies; `load` overwrites them in place.
        """
        state: dict[str, torch.Tensor] = {
            f"model.{name}": value for name, value in self.model.named_parameters()
        }
        state |= {f"muon.{i}": momentum for i, momentum in enumerate(self.muon.momenta)}
        for i, p in enumerate(self.adam.param_groups[0]["params"]):
            state |= {f"adam.{i}.{name}": value for name, value in self.adam.state[p].items()}
        return state

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Continue from the result of `state`."""
        # AdamW has no state before its first step.
        for i, p in enumerate(self.adam.param_groups[0]["params"]):
            self.adam.state[p] = {
                name: state[f"adam.{i}.{name}"].to(self.device)
                for name in ("step", "exp_avg", "exp_avg_sq")
            }
        for name, value in self.state().items():
            value.data.copy_(state[name])
