"""Relative position tables: each head adds a learnt number to the score of a pair of tokens.

An index [tokens, tokens] selects the entry of the table [entries, heads], as in BEiT and Swin. Each
head owns one column, which is removed with the head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_NAME = "relative_position_bias_table"


@dataclass(frozen=True)
class Grid:
    """The image size that an index is made for.

    Attributes:
        tokens: Number of tokens.
        resolution: Height and width, if they are passed to the blocks, else None.
    """

    tokens: int
    resolution: tuple[int, int] | None


class PositionTable:
    """The table of one block.

    Args:
        owner: The module that holds it.
        block: The block that holds the module.
    """

    def __init__(self, owner: nn.Module, block: nn.Module) -> None:
        self.owner, self.block = owner, block

    @property
    def weight(self) -> nn.Parameter:
        """The table [entries, heads]."""
        return self.owner._parameters[_NAME]  # type: ignore[return-value]

    @property
    def index(self) -> Tensor | None:
        """The entry for each pair of tokens [tokens, tokens]; None if unknown."""
        index: Any = getattr(self.owner, "relative_position_index", None)
        if index is None and hasattr(self.owner, "generate_relative_position_index"):
            index = self.owner.generate_relative_position_index(self.owner.window_size)  # type: ignore[operator]
        if not isinstance(index, Tensor):
            return None
        side = math.isqrt(index.numel())
        return index.reshape(side, side) if side * side == index.numel() else None

    @property
    def grid(self) -> Grid | None:
        """The image size that the index is made for, if known."""
        index = self.index
        if index is None:
            return None
        window, patch = (
            getattr(self.owner, "window_size", None),
            getattr(self.block, "patch_size", 0),
        )
        known = isinstance(window, tuple) and isinstance(patch, int) and patch > 0
        size = (window[0] * patch, window[1] * patch) if known else None  # type: ignore[index]
        return Grid(len(index), size)

    def put_(self, columns: Tensor) -> None:
        """Replace all columns by those of other heads, in place; without heads, change nothing."""
        if columns.shape[1]:  # an attention without heads does not read it
            learns = self.weight.requires_grad
            value = columns.detach().clone().contiguous()
            setattr(self.owner, _NAME, nn.Parameter(value, requires_grad=learns))

    def cut_(self, heads: Sequence[int]) -> None:
        """Keep the columns of these heads, in place."""
        index = torch.tensor(list(heads), dtype=torch.long, device=self.weight.device)
        self.put_(self.weight.index_select(1, index))


def find_table(block: nn.Module) -> PositionTable | None:
    """Find the table of a block; None if it has none or several."""
    owners = [
        module
        for module in block.modules()
        if getattr(module._parameters.get(_NAME), "ndim", 0) == 2
    ]
    return PositionTable(owners[0], block) if len(owners) == 1 else None


def bias_of(table: Tensor, index: Tensor) -> Tensor:
    """Look up each head's bias: [heads, entries] and [batch, queries, keys] to
    [batch, heads, queries, keys].
    """
    return table[:, index].transpose(0, 1)
