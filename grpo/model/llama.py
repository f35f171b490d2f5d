"""The forward pass of a Llama-like model in few operations, each with its gradient by hand; for
any device, rollout and update alike.

The arithmetic is that of the `transformers` model, whose weights it uses, up to the order of
rounding; of other models nothing is changed. `peft` computes an adapter in float32 beside a
bfloat16 layer, with a copy of the input and four passes over the output; here its products are in
the layer's precision.
"""

import warnings

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from grpo.model.merged_linear import MergedLinear, is_plain_lora, refresh
from grpo.model.ops import add_norm, product, rotate

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


class Block:
    """One layer: its norms, its attention's module (for its norms of queries and keys, where it
    has any), its joined products.
    """

    def __init__(self, layer: nn.Module):
        self.attention, mlp = layer.self_attn, layer.mlp
        self.norm, self.second_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.qkv = MergedLinear(
            [self.attention.q_proj, self.attention.k_proj, self.attention.v_proj]
        )
        self.out = MergedLinear([self.attention.o_proj])
        self.gate_up, self.down = (
            MergedLinear([mlp.gate_proj, mlp.up_proj]),
            MergedLinear([mlp.down_proj]),
        )
        self.is_normed = hasattr(self.attention, "q_norm")

    @property
    def products(self) -> tuple[MergedLinear, ...]:
        return self.qkv, self.out, self.gate_up, self.down


class FastLlama:
    """The inner model (without head) of a causal language model. B sequences of T tokens, M = B *
    T, N hidden size, D head size.
    """

    def __init__(self, causal: nn.Module):
        inner = causal.base_model
        self.embedding, self.final_norm, self.rotary = (
            inner.embed_tokens,
            inner.norm,
            inner.rotary_emb,
        )
        self.blocks = [Block(layer) for layer in inner.layers]
        attention = self.blocks[0].attention
        self.D, self.scale = attention.head_dim, attention.scaling
        self.H, self.K = (
            getattr(layer, "base_layer", layer).out_features // self.D
            for layer in (attention.q_proj, attention.k_proj)
        )
        self.is_forgetful, self.is_adapted = False, True  # with or without the adapters

    def refresh(self):
        """Take over what has changed in weights that are copied, see `joined.refresh`; before each
        use.
        """
        refresh([joined for block in self.blocks for joined in block.products])

    def __call__(self, tokens_BT: Tensor, position_ids: Tensor, shared) -> Tensor:
        """Return the last hidden states (B, T, N); `shared` does the attention (see
        `model.prefix_cache`).
        """
        B, T = tokens_BT.shape
        cos_Md, sin_Md = (
            x.reshape(B * T, self.D)[:, : self.D // 2].contiguous()
            for x in self.rotary(self.embedding.weight, position_ids.expand(B, T))
        )
        x_MN, last_MN = F.embedding(tokens_BT.flatten(), self.embedding.weight), None
        for i, block in enumerate(self.blocks):
            if self.is_forgetful and torch.is_grad_enabled():
                x_MN, last_MN = checkpoint(
                    self._block,
                    i,
                    block,
                    x_MN,
                    last_MN,
                    cos_Md,
                    sin_Md,
                    shared,
                    B,
                    use_reentrant=False,
                )
            else:
                x_MN, last_MN = self._block(i, block, x_MN, last_MN, cos_Md, sin_Md, shared, B)
        _, hidden_MN = add_norm(
            x_MN, last_MN, self.final_norm.weight, self.final_norm.variance_epsilon
        )
        return hidden_MN.view(B, T, -1)

    def _block(
        self, i: int, block: Block, x_MN, last_MN, cos_Md, sin_Md, shared, B: int
    ) -> tuple[Tensor, Tensor]:
        """Return the hidden states within the layer, and what is to be added to them,
        (M, N) each.
        """
        H, K, D, is_adapted, second_norm = (
            self.H,
            self.K,
            self.D,
            self.is_adapted,
            block.second_norm,
        )
        x_MN, normed_MN = add_norm(x_MN, last_MN, block.norm.weight, block.norm.variance_epsilon)
        heads = product(normed_MN, block.qkv, is_adapted)
        if block.is_normed:
            q, k, v = heads.unflatten(1, (-1, D)).split([H, K, K], 1)
            norms = block.attention.q_norm, block.attention.k_norm
            q, k = (
                F.rms_norm(x, (D,), norm.weight, norm.variance_epsilon)
                for x, norm in zip((q, k), norms)
            )
            heads = torch.cat([q, k, v], 1).flatten(1)
        q, k, v = (
            x.view(B, -1, x.shape[1], D).transpose(1, 2)
            for x in rotate(heads, cos_Md, sin_Md, H, K)
        )
        attended = shared.attend(i, q, k, v, self.scale).reshape(-1, H * D)
        x_MN, normed_MN = add_norm(
            x_MN,
            product(attended, block.out, is_adapted),
            second_norm.weight,
            second_norm.variance_epsilon,
        )
        both = product(normed_MN, block.gate_up, is_adapted)
        return x_MN, product(both, block.down, is_adapted, is_gated=True)


def fast_llama(causal: nn.Module) -> FastLlama | None:
    """Return the fast forward pass of a model, its weights joined in place; None where there is
    none for it.
    """
    config = causal.config
    if (
        config.model_type not in FAMILIES
        or config.hidden_act != "silu"
        or getattr(config, "sliding_window", None)
        and getattr(config, "use_sliding_window", True)
        or any(
            hasattr(module, "lora_A") and not is_plain_lora(module) for module in causal.modules()
        )
    ):
        return None
    model = FastLlama(causal)
    inside = {
        id(module)
        for block in model.blocks
        for joined in block.products
        for module in joined.modules
    }
    return (
        model
        if all(id(module) in inside for module in causal.modules() if hasattr(module, "lora_A"))
        else None
    )


def relative_difference(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).float().norm() / expected.float().norm()).item()


def agrees(what: str, difference: float, dtype: torch.dtype) -> bool:
    """Tell whether a relative difference to the model's own hidden states may be rounding; warn,
    in the name of `what`, where not.
    """
    if difference <= (
        0.1 if dtype in (torch.bfloat16, torch.float16) else 1e-3
    ):  # in bfloat16 28 layers of rounding come to 0.03
        return True
    warnings.warn(
        f"the {what} disagrees with the model by {difference:.1e} and is not used", stacklevel=3
    )
    return False


def checkpoint_layers(model: nn.Module):
    """Let the layers of `model` forget their activations and compute them again in the backward
    pass (arXiv:1604.06174), in place.
    """
    layers = max(
        (module for module in model.modules() if isinstance(module, nn.ModuleList)), key=len
    )
    for layer in layers:
        layer.forward = _Forgetful(layer.forward)


class _Forgetful:
    def __init__(self, forward):
        self.forward = forward

    def __call__(self, *args, **kwargs):
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)
