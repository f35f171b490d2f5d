"""Linear layers that read the same input, as one matrix product, with their LoRA adapters."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from grpo.model.matmul import linear


def refresh(products: Sequence["MergedLinear"]):
    """Take over what is no view and may have changed: adapters and biases, or all, where the
    modules have been given other weights.
    """
    for joined in products:
        if joined.is_apart():
            joined.join()
    copies = [copy for joined in products for copy in joined.copies()]
    for factor in {factor for *_, factor in copies}:
        targets, sources = zip(*(copy[:2] for copy in copies if copy[2] == factor))
        torch._foreach_copy_(
            targets, sources if factor == 1 else torch._foreach_mul(sources, factor)
        )


def is_plain_lora(module: nn.Module) -> bool:
    """Tell whether `module` is a linear layer with one adapter, W x + s B A x, and nothing else
    (no dropout, DoRA or bias).
    """
    if (
        not hasattr(module, "lora_A")
        or len(module.active_adapters) != 1
        or type(module.base_layer) is not nn.Linear
    ):  # a quantised one is another
        return False
    name = module.active_adapters[0]
    return not (
        module.use_dora.get(name)
        or module.lora_bias.get(name)
        or type(module.lora_dropout[name]) is not nn.Identity
    )


class MergedLinear:
    """Layers as one matrix `weight` (sum of outputs + layers * rank, inputs), of which the modules
    keep views.

    With adapters its last rows are their first matrices (LoRA's A), `rank` for each layer, and
    `up` (rank, sum of outputs) is s B of each, transposed, column by column in memory; without,
    `rank` is 0. These are copies in the layers' precision, and so are biases: see `refresh`.
    `padded` is the matrix with rows of zeros behind it, up to a multiple of 128, which is faster
    for some products.
    """

    def __init__(self, modules: Sequence[nn.Module]):
        self.modules = modules
        self.layers = [getattr(module, "base_layer", module) for module in modules]
        names = [getattr(module, "active_adapters", (None,))[0] for module in modules]
        self.adapters = [
            (module.lora_A[name].weight, module.lora_B[name].weight, module.scaling[name])
            if name
            else None
            for module, name in zip(modules, names)
        ]
        sizes = [layer.out_features for layer in self.layers]
        self.outputs, self.columns = (
            sum(sizes),
            [slice(*ends) for ends in pairwise((0, *accumulate(sizes)))],
        )
        most = max((len(adapter[0]) for adapter in self.adapters if adapter), default=0)
        self.rank = (
            max(16, 1 << (most - 1).bit_length()) if most else 0
        )  # as the kernels' products want it
        self.weight: Tensor | None = None
        self.join()

    def join(self):
        """Copy the weights into one matrix, and make the modules' weights views of it. Where it
        may, it stays where it is in memory.
        """
        like = self.layers[0].weight.data
        if self.weight is None or (self.weight.dtype, self.weight.device) != (
            like.dtype,
            like.device,
        ):
            rows = self.outputs + self.rank * len(self.layers)
            self.padded = like.new_zeros(
                -(-rows // 128) * 128 if self.rank else rows, like.shape[1]
            )
            self.weight = self.padded[:rows]
            self.up = like.new_zeros(self.outputs, self.rank).t()
            self.bias = None if self.layers[0].bias is None else like.new_zeros(len(self.weight))
        for layer, rows in zip(self.layers, self.columns):
            self.weight[rows] = layer.weight.data
            layer.weight.data = self.weight[rows]
        self.addresses = [layer.weight.data_ptr() for layer in self.layers]

    def is_apart(self) -> bool:
        """Tell whether the modules have been given other weights."""
        return [layer.weight.data_ptr() for layer in self.layers] != self.addresses

    def copies(self) -> list[tuple[Tensor, Tensor, float]]:
        """Return what is to be kept up to date: (copy, original, factor)."""
        found = []
        for i, (layer, adapter, columns) in enumerate(
            zip(self.layers, self.adapters, self.columns)
        ):
            if self.bias is not None:
                found.append((self.bias[columns], layer.bias.data, 1.0))
            if adapter:
                first, second, scaling = adapter
                start = self.outputs + i * self.rank
                found.append((self.weight[start : start + len(first)], first.data, 1.0))
                found.append((self.up.t()[columns, : len(first)], second.data, scaling))
        return found

    @property
    def parameters(self) -> list[nn.Parameter | None]:
        """Weights, biases (or None), and the adapters' two matrices (or None), of each layer."""
        adapters = [adapter or (None, None) for adapter in self.adapters]
        return [
            *(layer.weight for layer in self.layers),
            *(layer.bias for layer in self.layers),
            *(first for first, *_ in adapters),
            *(second for _, second, *_ in adapters),
        ]

    def product(self, x_MN: Tensor, is_adapted: bool) -> tuple[Tensor, Tensor | None]:
        """Return the layers' outputs side by side (M, outputs), and the adapters' inner values (M,
        layers * rank) where they count.
        """
        if not (self.rank and is_adapted):
            bias = None if self.bias is None else self.bias[: self.outputs]
            return linear(x_MN, self.weight[: self.outputs], bias), None
        y = linear(x_MN, self.weight, self.bias)
        y, inner = y[:, : self.outputs], y[:, self.outputs :].clone()
        for inner_Mr, columns in zip(inner.split(self.rank, 1), self.columns):
            y[:, columns].addmm_(inner_Mr, self.up[:, columns])
        return y, inner

    def gradients(
        self, dy: Tensor, x: Tensor, inner: Tensor | None, needed: Sequence[bool]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Return the gradients of x (M, N) and of the `needed` ones among `parameters`, from that
        of the outputs.
        """
        parts = [dy[:, columns] for columns in self.columns]
        weights, biases, firsts, seconds = (
            needed[i * len(parts) : (i + 1) * len(parts)] for i in range(4)
        )
        dx = dy @ self.weight[: self.outputs]
        on = [None] * len(needed)
        whole = dy.t() @ x if any(weights) else None
        for i, (part, columns) in enumerate(zip(parts, self.columns)):
            on[i] = whole[columns] if weights[i] else None
            on[i + len(parts)] = part.sum(0) if biases[i] else None
        if inner is not None:
            d_inner = torch.cat(
                [part @ self.up[:, columns].t() for part, columns in zip(parts, self.columns)], 1
            )
            dx.addmm_(d_inner, self.weight[self.outputs :])
            both = d_inner.t() @ x if any(firsts) else None
            for i, (part, adapter) in enumerate(zip(parts, self.adapters)):
                start = i * self.rank
                if firsts[i]:
                    on[2 * len(parts) + i] = both[start : start + len(adapter[0])].to(
                        adapter[0].dtype
                    )
                if seconds[i]:
                    inner_Mr = inner[:, start : start + len(adapter[0])]
                    on[3 * len(parts) + i] = (part.t() @ inner_Mr).to(adapter[1].dtype) * adapter[2]
        return dx, on
