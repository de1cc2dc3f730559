"""P-values by rank among held-out known data, continued beyond the largest value seen.

    p(x) = (1 + #{held-out >= x}) / (n + 1)

is valid for exchangeable data (a conformal p-value), but everything beyond the largest held-out
value ties at 1 / (n + 1). There the tail goes on: -log p grows by log(1 + excess / scale), with the
mean excess over the 90 % quantile as the scale: a heavy (Pareto) tail, so that no single tap can
outvote all others. Ranks below the largest value are untouched, so the p-value stays valid.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TAIL = 0.1


@dataclass(frozen=True)
class Ranks:
    """Held-out values, sorted, and the scale of their upper tail.

    Attributes:
        values: Sorted in rising order, `[term, example]`.
        scale: Mean excess over the 90 % quantile, `[term]`.
    """

    values: Tensor
    scale: Tensor

    @classmethod
    def of(cls, held_out: Tensor) -> Ranks:
        """Sort held-out values `[example, term]`."""
        values = held_out.T.sort(-1).values.contiguous()
        tail = values[:, -max(2, int(TAIL * values.shape[1])) :]
        scale = (tail - tail[:, :1]).mean(-1)
        spread = (values[:, -1] - values[:, 0]).clamp_min(1e-12)
        return cls(values, torch.where(scale > 0, scale, spread))

    def above(self, values: Tensor) -> Tensor:
        """Count the held-out values that are as large or larger, `[example, term]`."""
        return (self.values.shape[1] - count_below(self.values, values.T)).T

    def held_out_surprise(self, values: Tensor) -> Tensor:
        """Return -log p of the held-out values themselves, each ranked among the others."""
        count = self.values.shape[1]
        rank = self.above(values).to(values.dtype) / count  # it counts itself, in place of the 1
        others = self.values[:, -2] if count > 1 else self.values[:, -1]
        alone = values == self.values[:, -1]
        excess = torch.where(alone, values - others, 0.0) / self.scale
        return excess.log1p() - rank.log()

    def surprise(self, values: Tensor) -> Tensor:
        """Return -log p of values `[example, term]`, unbounded and rising."""
        rank = (1.0 + self.above(values)) / (self.values.shape[1] + 1)
        excess = (values - self.values[:, -1]).clamp_min(0) / self.scale
        return excess.log1p() - rank.log()


def count_below(rows: Tensor, values: Tensor) -> Tensor:
    """Count the entries of each sorted row below each value, `[row, value]`; NaN is above all.

    This is `torch.searchsorted`. ONNX has none, so a graph that is exported gets a binary search
    made of comparisons and gathers, as many as the row's length has bits.
    """
    exports = torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()
    if not exports:
        return torch.searchsorted(rows, values.contiguous())
    length = rows.shape[1]
    bits = length.bit_length()
    padded = torch.nn.functional.pad(rows, (0, 2**bits - 1 - length), value=torch.inf)
    below = torch.zeros_like(values, dtype=torch.long)
    for bit in reversed(range(bits)):
        step = 2**bit
        reached = padded.gather(1, below + (step - 1))
        below = torch.where(reached >= values, below, below + step)
    return below.clamp_max(length)
