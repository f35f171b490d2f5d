"""The forward pass of a Llama-like model in few operations, each with its gradient by hand.

It runs on any device, in rollout and update alike, with the weights of the `transformers` model
and the same arithmetic up to the order of rounding.

Difference from `peft`: `peft` computes the adapter of a bfloat16 layer in float32, which takes a
copy of the input and four passes over the output. Here its products are in the layer's precision.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from grpo.fast.merged_linear import MergedLinear, base_layer, is_plain_lora
from grpo.model.check import Model, attention_window

aten = torch.ops.aten

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
SWIGLU_BLOCK = 1024  # columns of one program of the SwiGLU kernels

# What every layer reads: cosines and sines of the tokens' angles (N, d), what computes attention,
# and the number of sequences B.
Inputs = tuple[Tensor, Tensor, Any, int]


class Block:
    """One decoder layer: its norms, and its linear layers, merged."""

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
        self.linears = (self.qkv, self.out, self.gate_up, self.down)


class FastLlama:
    """The decoder layers of a causal language model, without its output layer.

    With `gradient_checkpointing` the activations of a layer are computed again in the backward pass
    (arXiv:1604.06174).
    """

    def __init__(self, causal: Model):
        decoder = causal.base_model
        self.embedding = decoder.embed_tokens
        self.final_norm = decoder.norm
        self.rotary = decoder.rotary_emb
        self.blocks = [Block(layer) for layer in decoder.layers]
        # What runs each block: its function, or if the model is divided a module.
        self.layers: list[Any] = [partial(self._block, i) for i in range(len(self.blocks))]

        attention = self.blocks[0].attention
        self.D: int = attention.head_dim
        self.scale: float = attention.scaling
        self.H = base_layer(attention.q_proj).out_features // self.D
        self.K = base_layer(attention.k_proj).out_features // self.D

        self.linears = [layer for block in self.blocks for layer in block.linears]
        self._copies: dict[float, tuple[list[Tensor], list[Tensor]]] | None = None
        self.gradient_checkpointing = False

    def divided(self, causal: Model, copies_of: Callable) -> "FastLlama":
        """Return the forward pass of a copy of the model that FSDP has divided.

        FSDP gathers a module's weights when the module is called, so each layer runs its block and
        returns copies (see `grpo.learn.shard`).
        """
        llama = FastLlama(causal)
        for i, layer in enumerate(causal.base_model.layers):
            layer.forward, llama.layers[i] = partial(copies_of, llama.layers[i]), layer
        for linear, whole in zip(llama.linears, self.linears):
            linear.is_divided, linear.gradient_products = True, whole.gradient_products
        llama.linears = []  # nothing to `refresh`: each is merged when it is used
        return llama

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy what has changed in adapters and biases; call it before each use.

        Weights are shared with the modules. Where one has been given others, all is merged again.
        """
        for layer in self.linears:
            if layer.merge():
                self._copies = None  # the buffers may be others

        # Listed once, because that takes as long as the copies; those of one factor are one kernel.
        if self._copies is None:
            self._copies = {}
            for target, source, factor in chain(*(layer.copies() for layer in self.linears)):
                targets, sources = self._copies.setdefault(factor, ([], []))
                targets.append(target)
                sources.append(source)

        for factor, (targets, sources) in self._copies.items():
            scaled = sources if factor == 1 else torch._foreach_mul(sources, factor)
            torch._foreach_copy_(targets, scaled)

    def __call__(self, tokens_BT: Tensor, position_ids: Tensor, shared: Any) -> Tensor:
        """Return the last hidden states (B, T, E); `shared` computes the attention."""
        B, T = tokens_BT.shape
        # `transformers` repeats the angles for both halves of a head.
        cos_Nd, sin_Nd = (
            x.reshape(B * T, self.D)[:, : self.D // 2].contiguous()
            for x in self.rotary(self.embedding.weight, position_ids.expand(B, T))
        )
        inputs = cos_Nd, sin_Nd, shared, B

        x_NE = functional.embedding(
            tokens_BT.flatten(), self.embedding.weight, self.embedding.padding_idx
        )
        y_NE = None  # the output of the layer before, which the next norm adds to x
        for layer in self.layers:
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x_NE = checkpoint(_summed, layer, x_NE, inputs, use_reentrant=False)
            else:
                x_NE, y_NE = layer(x_NE, y_NE, inputs)

        _, hidden_NE = add_norm(self.final_norm, x_NE, y_NE)
        return hidden_NE.view(B, T, -1)

    def _block(
        self, i: int, x_NE: Tensor, y_NE: Tensor | None, inputs: Inputs
    ) -> tuple[Tensor, Tensor]:
        """Return the hidden states after attention, and what the MLP adds to them, (N, E) each."""
        block, (cos_Nd, sin_Nd, shared, B) = self.blocks[i], inputs
        x_NE, normed_NE = add_norm(block.input_norm, x_NE, y_NE)
        heads_NO = linear(normed_NE, block.qkv)
        if block.has_qk_norm:
            heads_NO = self._norm_heads(block, heads_NO)
        q, k, v = (
            x.view(B, -1, x.shape[1], self.D).transpose(1, 2)
            for x in _apply(_Rotary, heads_NO, cos_Nd, sin_Nd, self.H, self.K)
        )

        attended = shared.attend(i, q, k, v, self.scale).reshape(-1, self.H * self.D)
        y_NE = linear(attended, block.out)

        x_NE, normed_NE = add_norm(block.post_attention_norm, x_NE, y_NE)
        gate_up = linear(normed_NE, block.gate_up)
        return x_NE, linear(gate_up, block.down, has_swiglu=True)

    def _norm_heads(self, block: Block, heads_NO: Tensor) -> Tensor:
        """Return queries, keys and values side by side, the former two normed head by head."""
        q, k, v = heads_NO.unflatten(1, (-1, self.D)).split([self.H, self.K, self.K], 1)
        norms = block.attention.q_norm, block.attention.k_norm
        q, k = (
            functional.rms_norm(x, (self.D,), norm.weight, norm.variance_epsilon)
            for x, norm in zip((q, k), norms)
        )
        return torch.cat([q, k, v], 1).flatten(1)


def build_fast_llama(causal: Model) -> FastLlama | None:
    """Return the fast forward pass of a model, whose linear layers are merged, or None.

    Modules that PEFT replaces (`modules_to_save`) would be used for the reference, too.
    """
    config, modules = causal.config, list(causal.modules())
    is_of_family = config.model_type in FAMILIES and config.hidden_act == "silu"
    adapted = [module for module in modules if hasattr(module, "lora_A")]
    if (
        not is_of_family
        or attention_window(config)
        or any(type(module).__name__ == "ModulesToSaveWrapper" for module in modules)
        or not all(map(is_plain_lora, adapted))
    ):
        return None

    model = FastLlama(causal)
    merged = {id(module) for layer in model.linears for module in layer.modules}
    return model if all(id(module) in merged for module in adapted) else None


def _summed(layer: Any, x_NE: Tensor, inputs: Inputs) -> Tensor:
    """Return the output (N, E) of a layer: one tensor to be kept, not two parts of a sum."""
    x_NE, y_NE = layer(x_NE, None, inputs)
    return x_NE + y_NE


# The operations and their gradients


def add_norm(norm: Model, x_NE: Tensor, y_NE: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return x + y, and its RMSNorm (arXiv:1910.07467) by a module. No y counts as 0."""
    return _apply(_AddNorm, x_NE, y_NE, norm.weight, norm.variance_epsilon)


def linear(x_NI: Tensor, layer: MergedLinear, has_swiglu: bool = False) -> Tensor:
    """Return the outputs (N, O) of merged linear layers, with their adapters if they are on.

    With `has_swiglu` the input x (N, 2 F) goes through `swiglu` first.
    """
    return _apply(_Linear, x_NI, layer, has_swiglu, *layer.parameters)


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up (N, F) (arXiv:2002.05202), without gradient, from (N, 2 F)."""
    N, F = len(gate_up), gate_up.shape[1] // 2
    if not gate_up.is_cuda:
        return functional.silu(gate_up[:, :F]).mul_(gate_up[:, F:])

    from grpo.fast import update_kernels as kernels

    out = gate_up.new_empty(N, F)
    grid = (N, -(-F // SWIGLU_BLOCK))
    kernels.swiglu[grid](gate_up, out, gate_up.stride(0), F, BLOCK=SWIGLU_BLOCK)
    return out


def _swiglu_backward(d_NF: Tensor, gate_up: Tensor) -> Tensor:
    """Return the gradients of gate and up, side by side (N, 2 F)."""
    N, F = d_NF.shape
    out = gate_up.new_empty(N, 2 * F)
    if not gate_up.is_cuda:
        gate_NF, up_NF = gate_up[:, :F], gate_up[:, F:]
        torch.mul(d_NF, functional.silu(gate_NF), out=out[:, F:])
        out[:, :F] = aten.silu_backward(d_NF * up_NF, gate_NF)
        return out

    from grpo.fast import update_kernels as kernels

    grid = (N, -(-F // SWIGLU_BLOCK))
    kernels.swiglu_backward[grid](d_NF, gate_up, out, gate_up.stride(0), F, BLOCK=SWIGLU_BLOCK)
    return out


def _apply(function: type[torch.autograd.Function], *inputs: Any) -> Any:
    """Apply a function; without gradients not by autograd, which costs 40 us per call on a CPU."""
    if torch.is_grad_enabled():
        return function.apply(*inputs)
    keep = set_materialize_grads = lambda *_: None  # there is no backward pass
    context = SimpleNamespace(save_for_backward=keep, set_materialize_grads=set_materialize_grads)
    return function.forward(context, *inputs)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layer: MergedLinear, has_swiglu: bool, *parameters: Tensor | None
    ) -> Tensor:
        # The parameters are inputs only so that autograd asks for their gradients.
        y, lora_hidden = layer.gathered().forward(swiglu(x) if has_swiglu else x)

        ctx.save_for_backward(x, lora_hidden)
        ctx.layer = layer
        ctx.has_swiglu = has_swiglu
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, lora_hidden = ctx.saved_tensors
        needed = ctx.needs_input_grad[3:]

        # SwiGLU is computed again: that is cheaper than keeping its output.
        inputs = swiglu(x) if ctx.has_swiglu else x
        with ctx.layer.gradient_products():
            dx, grads = ctx.layer.gathered().gradients(dy, inputs, lora_hidden, needed)

        if ctx.has_swiglu:
            dx = _swiglu_backward(dx, x)
        return dx, None, None, *grads


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # None, not zeros, where an output is not used
        total = x if y is None else x + y
        if x.is_cuda:
            normed, scale_N1 = aten._fused_rms_norm(total, [total.shape[1]], weight, eps)
        else:
            # The mean of squares and its root are float32 at least.
            wide = torch.promote_types(x.dtype, torch.float32)
            scale_N1 = (total.to(wide).square().mean(-1, keepdim=True) + eps).rsqrt()
            normed = (total * scale_N1).to(x.dtype) * weight

        ctx.save_for_backward(total, weight, scale_N1)
        ctx.has_y = y is not None
        return total, normed

    @staticmethod
    def backward(
        ctx: Any, d_total: Tensor | None, d_normed: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        total, weight, scale_N1 = ctx.saved_tensors
        if d_normed is None:
            return d_total, d_total if ctx.has_y else None, None, None

        E, needs_weight = total.shape[1], ctx.needs_input_grad[2]
        d_weight: Tensor | None = None
        if total.is_cuda:
            d_sum, d_weight = aten._fused_rms_norm_backward(
                d_normed.contiguous(), total, [E], scale_N1, weight, [True, needs_weight]
            )
        else:
            # With s = 1 / rms(x), a gradient d of s x is one of s d - s^3 mean(d x) x of x.
            d_scaled = d_normed * weight
            along_N1 = (d_scaled * total).sum(-1, keepdim=True, dtype=scale_N1.dtype)
            along_N1 = along_N1 * scale_N1**3 / -E
            d_sum = torch.addcmul(d_scaled * scale_N1, total, along_N1).to(total.dtype)
            if needs_weight:
                d_weight = (d_normed * (total * scale_N1).to(total.dtype)).sum(0)

        if d_total is not None:
            d_sum = d_sum.add_(d_total)
        return d_sum, d_sum if ctx.has_y else None, d_weight, None


class _Rotary(torch.autograd.Function):
    """Queries (N, H, D), keys and values (N, K, D) from these side by side, the first two rotated
    (arXiv:2104.09864): the pair (i, i + D / 2) by the angle in column i of cosines and sines.
    """

    @staticmethod
    def forward(
        ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor, H: int, K: int
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.sizes = H, K

        N, D = len(heads), 2 * cos.shape[1]
        parts = heads.view(N, H + 2 * K, D).split([H, K, K], 1)
        rotated = tuple(heads.new_empty(N, count, D) for count in (H, K, K))
        _rotate(parts, rotated, cos, sin)
        return rotated

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        H, K = ctx.sizes
        N, D = len(cos), 2 * cos.shape[1]

        heads = gradients[0].new_empty(N, (H + 2 * K) * D)
        parts = heads.view(N, H + 2 * K, D).split([H, K, K], 1)
        _rotate(gradients, parts, cos, -sin)  # back by the same angle
        return heads, None, None, None, None


def _rotate(
    sources: Sequence[Tensor], targets: Sequence[Tensor], cos_Nd: Tensor, sin_Nd: Tensor
) -> None:
    """Write rotated queries (N, H, D) and keys, and unchanged values (N, K, D), into `targets`."""
    N, half = cos_Nd.shape
    if not cos_Nd.is_cuda:
        cos, sin = cos_Nd[:, None], sin_Nd[:, None]
        for source, target in zip(sources[:2], targets):
            a, b = source[..., :half], source[..., half:]
            torch.mul(a, cos, out=target[..., :half]).addcmul_(b, sin, value=-1)
            torch.mul(b, cos, out=target[..., half:]).addcmul_(a, sin)
        targets[2].copy_(sources[2])
        return

    from grpo.fast import update_kernels as kernels

    H, K = sources[0].shape[1], sources[1].shape[1]
    # The kernel takes any stride between tokens, but heads must be dense.
    dense = [x if x.stride()[1:] == (2 * half, 1) else x.contiguous() for x in sources]
    strides = [x.stride(0) for x in (*dense, *targets)]
    kernels.rotary[(N,)](
        *dense, *targets, cos_Nd, sin_Nd, *strides,
        H=H, K=K, D=2 * half,
        BLOCK_H=1 << (H - 1).bit_length(), BLOCK_K=1 << (K - 1).bit_length(),
    )  # fmt: skip
