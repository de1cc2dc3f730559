"""The weights of attention layers: linear layers of any library, and their rows by heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class HeadWeights:
    """The weights of one attention layer, head by head.

    Shapes: `query`, `key`, `value` [heads, head width, model width], their biases
    [heads, head width] or None; `output` [heads, model width, head width]; `positions`
    [heads, entries], the heads' columns of a relative position table, or None.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    query_bias: Tensor | None
    key_bias: Tensor | None
    value_bias: Tensor | None
    output: Tensor
    positions: Tensor | None = None

    def queries(self, x: Tensor) -> Tensor:
        """Project states [batch, tokens, model width] to [batch, tokens, heads, head width]."""
        return _by_heads(x, self.query, self.query_bias)

    def keys(self, x: Tensor) -> Tensor:
        """Project states to keys, like `queries`."""
        return _by_heads(x, self.key, self.key_bias)

    def values(self, x: Tensor) -> Tensor:
        """Project states to values, like `queries`."""
        return _by_heads(x, self.value, self.value_bias)

    def spread(self, places: Sequence[int], number: int) -> HeadWeights:
        """Put these heads at their places among a number of heads; the others are zero."""

        def whole(part: Tensor | None) -> Tensor | None:
            if part is None:
                return None
            result = part.new_zeros(number, *part.shape[1:])
            result[torch.tensor(places, dtype=torch.long, device=part.device)] = part
            return result

        parts = (whole(getattr(self, name)) for name in self.__dataclass_fields__)
        return HeadWeights(*parts)  # type: ignore[arg-type]


def _by_heads(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    flat = None if bias is None else bias.flatten()
    return F.linear(x, weight.flatten(0, 1), flat).unflatten(-1, (-1, weight.shape[1]))


def linear_weight(module: nn.Module) -> Tensor:
    """Return a projection's weight as [out, in], also of `Conv1D` and `nn.MultiheadAttention`."""
    if isinstance(module, nn.MultiheadAttention):
        return module.in_proj_weight
    weight: Tensor = module.weight  # type: ignore[assignment]
    return weight.t() if type(module).__name__ == "Conv1D" else weight


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer, also in the transposed form of GPT-2."""
    named = isinstance(module, nn.Linear) or type(module).__name__ in ("Conv1D", "FalconLinear")
    return named and getattr(module.weight, "ndim", 0) == 2


def linear_bias(module: nn.Module) -> Tensor | None:
    """Return a projection's bias, also of `nn.MultiheadAttention`; None if it has none."""
    name = "in_proj_bias" if isinstance(module, nn.MultiheadAttention) else "bias"
    bias: Tensor | None = getattr(module, name)
    return bias


def parameter_like(old: Tensor, value: Tensor) -> nn.Parameter:
    """Copy a value into a parameter that learns if the old one did."""
    return nn.Parameter(value.detach().clone().contiguous(), requires_grad=old.requires_grad)


def set_linear_(module: nn.Module, weight: Tensor, bias: Tensor | None) -> None:
    """Replace a linear layer's weights, by any number of rows and columns, in place."""
    prefix = "in_proj_" if isinstance(module, nn.MultiheadAttention) else ""
    stored = weight.t() if type(module).__name__ == "Conv1D" else weight
    for name, value in ((f"{prefix}weight", stored), (f"{prefix}bias", bias)):
        old = getattr(module, name)
        if old is not None and value is not None:
            setattr(module, name, parameter_like(old, value))
    if not prefix:
        sizes = zip(("out_features", "in_features", "nf", "nx"), (*weight.shape,) * 2, strict=True)
        for name, size in sizes:
            if hasattr(module, name):
                setattr(module, name, size)
