"""The forward pass of a Llama-like model in few operations, each with its gradient by hand.

It runs on any device, in rollout and update alike, with the weights of the `transformers` model
and the same arithmetic up to the order of rounding. Models of other families stay as they are.

Difference from `peft`: `peft` computes the adapter of a bfloat16 layer in float32, which takes a
copy of the input and four passes over the output. Here its products are in the layer's precision.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from grpo.fast.merged_linear import Copies, MergedLinear, base_layer, is_plain_lora
from grpo.fast.ops import add_norm, apply_rotary, linear
from grpo.fast.prefix_cache import SharedAttention
from grpo.model.forward import Model
from grpo.model.sizes import attention_window

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


class Block:
    """One decoder layer: its norms, and its linear layers, merged.

    `attention` is the layer's own attention module. Only its norms of queries and keys are used,
    if `has_qk_norm`.
    """

    def __init__(self, layer: Model):
        mlp = layer.mlp
        self.attention = layer.self_attn
        self.input_norm = layer.input_layernorm
        self.post_attention_norm = layer.post_attention_layernorm
        self.has_qk_norm = hasattr(self.attention, "q_norm")

        self.qkv = MergedLinear(
            [self.attention.q_proj, self.attention.k_proj, self.attention.v_proj]
        )
        self.out = MergedLinear([self.attention.o_proj])
        self.gate_up = MergedLinear([mlp.gate_proj, mlp.up_proj])
        self.down = MergedLinear([mlp.down_proj])

    @property
    def linears(self) -> tuple[MergedLinear, ...]:
        """All linear layers."""
        return self.qkv, self.out, self.gate_up, self.down


class _Inputs(NamedTuple):
    """What every layer reads: the angles of each token, and how attention is computed."""

    cos: Tensor  # (N, d)
    sin: Tensor
    shared: SharedAttention
    batch: int  # sequences B


class FastLlama:
    """The decoder layers of a causal language model, without its output layer.

    `use_lora` switches the adapters on and off. With `gradient_checkpointing` the activations of a
    layer are computed again in the backward pass (arXiv:1604.06174).
    """

    def __init__(self, causal: Model):
        decoder = causal.base_model
        self.embedding = decoder.embed_tokens
        self.final_norm = decoder.norm
        self.rotary = decoder.rotary_emb
        self.blocks = [Block(layer) for layer in decoder.layers]

        attention = self.blocks[0].attention
        self.D: int = attention.head_dim
        self.scale: float = attention.scaling
        self.H = base_layer(attention.q_proj).out_features // self.D
        self.K = base_layer(attention.k_proj).out_features // self.D

        self.copies = Copies([layer for block in self.blocks for layer in block.linears])
        self.gradient_checkpointing = False
        self.use_lora = True

    def refresh(self) -> None:
        """Copy what has changed in adapters and biases. Call it before each use."""
        self.copies.refresh()

    def __call__(self, tokens_BT: Tensor, position_ids: Tensor, shared: SharedAttention) -> Tensor:
        """Return the last hidden states (B, T, E); `shared` computes the attention."""
        B, T = tokens_BT.shape
        # `transformers` repeats the angles for both halves of a head.
        cos_Nd, sin_Nd = (
            x.reshape(B * T, self.D)[:, : self.D // 2].contiguous()
            for x in self.rotary(self.embedding.weight, position_ids.expand(B, T))
        )
        inputs = _Inputs(cos_Nd, sin_Nd, shared, B)

        x_NE = functional.embedding(
            tokens_BT.flatten(), self.embedding.weight, self.embedding.padding_idx
        )
        y_NE = None  # the output of the layer before, which the next norm adds to x
        for i, block in enumerate(self.blocks):
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x_NE = checkpoint(self._summed_block, i, block, x_NE, inputs, use_reentrant=False)
            else:
                x_NE, y_NE = self._block(i, block, x_NE, y_NE, inputs)

        _, hidden_NE = _norm(self.final_norm, x_NE, y_NE)
        return hidden_NE.view(B, T, -1)

    def _block(
        self, i: int, block: Block, x_NE: Tensor, y_NE: Tensor | None, inputs: _Inputs
    ) -> tuple[Tensor, Tensor]:
        """Return the hidden states after attention, and the output of the MLP, (N, E) each.

        Their sum is the output of the layer.
        """
        x_NE, normed_NE = _norm(block.input_norm, x_NE, y_NE)
        heads_NO = linear(normed_NE, block.qkv, self.use_lora)
        if block.has_qk_norm:
            heads_NO = self._norm_heads(block, heads_NO)
        q, k, v = (
            x.view(inputs.batch, -1, x.shape[1], self.D).transpose(1, 2)
            for x in apply_rotary(heads_NO, inputs.cos, inputs.sin, self.H, self.K)
        )

        attended = inputs.shared.attend(i, q, k, v, self.scale).reshape(-1, self.H * self.D)
        y_NE = linear(attended, block.out, self.use_lora)

        x_NE, normed_NE = _norm(block.post_attention_norm, x_NE, y_NE)
        gate_up = linear(normed_NE, block.gate_up, self.use_lora)
        return x_NE, linear(gate_up, block.down, self.use_lora, has_swiglu=True)

    def _summed_block(self, i: int, block: Block, x_NE: Tensor, inputs: _Inputs) -> Tensor:
        """Return the output (N, E) of the layer for its input.

        To compute the layer again, one tensor has to be kept, not both parts of a sum.
        """
        x_NE, y_NE = self._block(i, block, x_NE, None, inputs)
        return x_NE + y_NE

    def _norm_heads(self, block: Block, heads_NO: Tensor) -> Tensor:
        """Return queries, keys and values side by side, the former two normed head by head."""
        q, k, v = heads_NO.unflatten(1, (-1, self.D)).split([self.H, self.K, self.K], 1)
        norms = block.attention.q_norm, block.attention.k_norm
        q, k = (
            functional.rms_norm(x, (self.D,), norm.weight, norm.variance_epsilon)
            for x, norm in zip((q, k), norms)
        )
        return torch.cat([q, k, v], 1).flatten(1)


def _norm(norm: Model, x_NE: Tensor, y_NE: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return x + y and its norm by the weights of an RMSNorm module."""
    return add_norm(x_NE, y_NE, norm.weight, norm.variance_epsilon)


def build_fast_llama(causal: Model) -> FastLlama | None:
    """Return the fast forward pass of a model, or None if the model has none.

    The model's linear layers are merged in place. Not supported are sliding windows, activations
    other than SiLU, and adapters that are more than plain LoRA or sit on other layers.
    """
    config = causal.config
    is_of_family = config.model_type in FAMILIES and config.hidden_act == "silu"
    if not is_of_family or attention_window(config):
        return None

    adapted = [module for module in causal.modules() if hasattr(module, "lora_A")]
    if not all(is_plain_lora(module) for module in adapted):
        return None

    model = FastLlama(causal)
    merged = {
        id(module) for block in model.blocks for layer in block.linears for module in layer.modules
    }
    return model if all(id(module) in merged for module in adapted) else None
