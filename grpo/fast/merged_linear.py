"""Linear layers that read the same input, merged into one matrix product, with their adapters.

Queries, keys and values are one product instead of three, and so are gate and up. A LoRA adapter
(arXiv:2106.09685) adds s B A x to a layer's output W x. Its A stands below W in the same matrix,
so that W x and A x come out of one product.

On some CPUs an update's gradients come from bfloat16 products with float32 sums, which are two to
five times as fast with AMX tiles. A gradient is rounded without bias to three digits, as in any
mixed precision training (arXiv:1710.03740). The forward pass stays exact, so that sampler and
trainer compute the same log-probabilities.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from grpo.model.check import Model
from grpo.model.policy import linear_no_grad

ROW_MULTIPLE = 128  # some products are faster if the number of rows is a multiple of this
MIN_RANK = 16  # the least number of rows that the kernels' products take


def has_fast_bf16_matmul() -> bool:
    """Return whether oneDNN beats MKL once it may round float32 to bfloat16.

    It does with AMX, and with AVX512_BF16, too, although oneDNN 3.12 does not round there.
    """
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


@contextmanager
def gradient_products() -> Iterator[None]:
    """Within this context, float32 products on a CPU may round to bfloat16."""
    settings = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # made at run time
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


class LoraWeights(NamedTuple):
    """The adapter of one layer: the modules of A (r, I) and B (O, r), and the factor s."""

    a: nn.Linear
    b: nn.Linear
    scaling: float


def base_layer(module: Model) -> Model:
    """Return a linear layer without its adapter's wrapper."""
    return module.base_layer if hasattr(module, "base_layer") else module


def is_plain_lora(module: Model) -> bool:
    """Return whether a layer with adapters is linear and has one, W x + s B A x, and no more."""
    if len(module.active_adapters) != 1 or type(module.base_layer) is not nn.Linear:
        return False

    name = module.active_adapters[0]
    is_more = module.use_dora.get(name) or module.lora_bias.get(name)
    return not is_more and type(module.lora_dropout[name]) is nn.Identity


class MergedLinear:
    """Linear layers merged into one `weight` (out_features + layers * rank, I).

    `out_features` is the sum of the layers' outputs O, and `columns` says which of them belong to
    each layer. The modules' own weights are views of the first `out_features` rows. The other rows
    are the A of each adapter, padded to a common `rank`; without adapters `rank` is 0. `lora_b`
    (rank, out_features) is s B of each adapter, transposed. `lora_blocks` (layers * rank,
    out_features) has the same blocks on its diagonal and zeros beside them, so that one product
    applies all adapters. A, B and biases are copies in the layers' precision: see `copies`.

    `padded` is `weight` with rows of zeros below it, up to a multiple of ROW_MULTIPLE.

    `merge` makes them all. If FSDP has divided the modules, `gathered` makes them at each use.
    """

    def __init__(self, modules: Sequence[Model]):
        self.modules = modules
        self.layers = [base_layer(module) for module in modules]
        self.adapters = [_adapter_of(module) for module in modules]
        # One with an adapter, if there is any: all are switched on and off together.
        self.adapted = next((each for each, own in zip(modules, self.adapters) if own), None)

        sizes = [layer.out_features for layer in self.layers]
        self.out_features = sum(sizes)
        self.columns = [slice(*ends) for ends in pairwise((0, *accumulate(sizes)))]

        # A power of two, as the kernels' products need it.
        largest = max((adapter.a.out_features for adapter in self.adapters if adapter), default=0)
        self.rank = max(MIN_RANK, 1 << (largest - 1).bit_length()) if largest else 0

        # A context of the products of a backward pass.
        self.gradient_products: Callable[[], AbstractContextManager[None]] = nullcontext

        self.addresses: list[int] = []  # of the modules' weights, since the last `merge`
        self.is_divided = False

    def _allocate(self) -> None:
        """Make the buffers in the precision and on the device of the layers."""
        like = self.layers[0].weight.data
        rows = self.out_features + self.rank * len(self.layers)
        padded_rows = -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE if self.rank else rows

        self.padded = like.new_zeros(padded_rows, like.shape[1])
        self.weight = self.padded[:rows]
        # Transposed: column by column in memory.
        self.lora_b = self.lora_blocks = like.new_zeros(self.out_features, self.rank).t()
        if len(self.layers) > 1:
            inner = self.rank * len(self.layers)
            self.lora_blocks = like.new_zeros(self.out_features, inner).t()
        self.bias = None if self.layers[0].bias is None else like.new_zeros(rows)

    def merge(self) -> bool:
        """Copy the layers' weights into `weight`, and make the modules' weights views of it.

        Returns False, and does nothing, if they are views already. The buffers stay where they are
        in memory unless precision or device have changed.
        """
        if [layer.weight.data_ptr() for layer in self.layers] == self.addresses:
            return False

        like = self.layers[0].weight.data
        kind = (self.weight.dtype, self.weight.device) if self.addresses else None
        if kind != (like.dtype, like.device):
            self._allocate()

        for layer, rows in zip(self.layers, self.columns):
            self.weight[rows] = layer.weight.data
            layer.weight.data = self.weight[rows]
        self.addresses = [layer.weight.data_ptr() for layer in self.layers]
        return True

    def gathered(self) -> "MergedLinear":
        """Return this; or if it is divided, a copy merged from what FSDP has gathered for now."""
        if not self.is_divided:
            return self

        merged = copy.copy(self)
        merged._allocate()
        for layer, rows in zip(self.layers, self.columns):
            merged.weight[rows] = layer.weight
        for target, source, factor in merged.copies():
            torch.mul(source, factor, out=target)
        return merged

    def copies(self) -> Iterator[tuple[Tensor, Tensor, float]]:
        """Yield what must be copied whenever the parameters change: target, source and factor."""
        for i, (layer, adapter) in enumerate(zip(self.layers, self.adapters)):
            columns = self.columns[i]
            if self.bias is not None:
                yield self.bias[columns], layer.bias, 1.0

            if adapter:
                own = self._own_ranks(i, adapter)
                a, b = adapter.a.weight, adapter.b.weight
                yield self.weight[self.out_features :][own], a, 1.0
                yield self.lora_b.t()[columns, : len(a)], b, adapter.scaling
                if self.lora_blocks is not self.lora_b:
                    yield self.lora_blocks.t()[columns, own], b, adapter.scaling

    def _own_ranks(self, i: int, adapter: LoraWeights) -> slice:
        """Return which of all layers' ranks are those of layer `i`, whose adapter is given."""
        return slice(i * self.rank, i * self.rank + adapter.a.out_features)

    @property
    def parameters(self) -> list[nn.Parameter | None]:
        """All layers' weights, then their biases, then their A, then their B; None if absent."""
        return [
            *(layer.weight for layer in self.layers),
            *(layer.bias for layer in self.layers),
            *(adapter.a.weight if adapter else None for adapter in self.adapters),
            *(adapter.b.weight if adapter else None for adapter in self.adapters),
        ]

    def forward(self, x_NI: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the layers' outputs side by side (N, O), and A x of each layer (N, layers * rank).

        A x is None if there are no adapters, or if they are switched off.
        """
        if self.adapted is None or self.adapted.disable_adapters:
            bias = None if self.bias is None else self.bias[: self.out_features]
            return linear_no_grad(x_NI, self.weight[: self.out_features], bias), None

        both = linear_no_grad(x_NI, self.weight, self.bias)
        y_NO = both[:, : self.out_features]
        # A copy: the backward pass keeps it, and a view would keep all of `both` in memory.
        lora_hidden = both[:, self.out_features :].clone()
        return y_NO.addmm_(lora_hidden, self.lora_blocks), lora_hidden

    def gradients(
        self, dy_NO: Tensor, x_NI: Tensor, lora_hidden: Tensor | None, needed: Sequence[bool]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Return the gradient of x (N, I), and those `needed` of the `parameters`, else None."""
        n = len(self.layers)
        need_weight, need_bias, need_a, need_b = (needed[i * n : (i + 1) * n] for i in range(4))
        lora_a: list[Tensor | None] = [None] * n
        lora_b: list[Tensor | None] = [None] * n
        dy_parts = [dy_NO[:, columns] for columns in self.columns]
        dx_NI = dy_NO @ self.weight[: self.out_features]

        # One product for the weights of all layers.
        d_weight = dy_NO.t() @ x_NI if any(need_weight) else dy_NO
        weights = [d_weight[own] if need else None for own, need in zip(self.columns, need_weight)]
        biases = [dy.sum(0) if need else None for dy, need in zip(dy_parts, need_bias)]

        if lora_hidden is not None:
            # The gradient of A x, for all layers at once.
            d_hidden = dy_NO @ self.lora_blocks.t()
            wide = next(adapter.a.weight.dtype for adapter in self.adapters if adapter)
            d_lora_a = _product(d_hidden.t(), x_NI, wide) if any(need_a) else d_hidden
            for i, adapter in enumerate(self.adapters):
                if adapter is None:
                    continue
                own = self._own_ranks(i, adapter)
                if need_a[i]:
                    lora_a[i] = d_lora_a[own]
                if need_b[i]:
                    d_lora_b = _product(dy_parts[i].t(), lora_hidden[:, own], wide)
                    lora_b[i] = d_lora_b.mul_(adapter.scaling)
            dx_NI.addmm_(d_hidden, self.weight[self.out_features :])
        return dx_NI, [*weights, *biases, *lora_a, *lora_b]


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return left @ right in `dtype`. Only a GPU can write a wider type than it reads."""
    if left.is_cuda and dtype == torch.float32 and left.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(left, right, out_dtype=dtype)
    return (left @ right).to(dtype)


def _adapter_of(module: Model) -> LoraWeights | None:
    name = getattr(module, "active_adapters", (None,))[0]
    if not name:
        return None
    return LoraWeights(module.lora_A[name], module.lora_B[name], module.scaling[name])
