"""The gradients of one step, computed from parts of a batch that processes may share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..data import processes


class Gradients:
    """Gradients of the parts of one batch.

    Process k mod n computes part k. The sum over all parts equals the whole batch's gradients, up
    to rounding. Summed in the order of the parts, it has the same bits for any number of processes.

    Args:
        parameters: The trained parameters.
        parts: Number of parts per batch.
        ordered: Sum the parts in order, at the price of one message per part.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], parts: int, *, ordered: bool) -> None:
        self.parameters, self.parts, self.ordered = list(parameters), parts, ordered
        self._found: dict[int, list[Tensor | None]] = {}

    def take_(self, part: int) -> None:
        """Move the gradients that a part left on the parameters into this object."""
        self._found[part] = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None

    def put_(self) -> None:
        """Set the parameters' gradients to the sum over all parts of all processes."""
        used = torch.zeros(len(self.parameters))
        for row in self._found.values():
            used += torch.tensor([grad is not None for grad in row], dtype=torch.float32)
        processes.sum_over([used])
        trained = [p for p, count in zip(self.parameters, used.tolist(), strict=True) if count]
        flat = {part: self._flat(row, used) for part, row in self._found.items()}
        self._found = {}
        if not trained:
            return
        total = self._in_order(flat, trained) if self.ordered else self._at_once(flat, trained)
        sizes = [parameter.numel() for parameter in trained]
        for parameter, grad in zip(trained, total.split(sizes), strict=True):
            parameter.grad = grad.view_as(parameter).to(parameter.dtype)

    def _flat(self, row: Sequence[Tensor | None], used: Tensor) -> Tensor:
        """Return a part's gradients as one vector, zero where only other parts have gradients."""
        pieces = [
            (torch.zeros_like(parameter) if grad is None else grad).reshape(-1)
            for parameter, grad, count in zip(self.parameters, row, used.tolist(), strict=True)
            if count
        ]
        return torch.cat(pieces) if pieces else torch.zeros(0)

    def _in_order(self, flat: dict[int, Tensor], trained: Sequence[nn.Parameter]) -> Tensor:
        several = processes.size()
        total: Tensor | None = None
        for part in range(self.parts):
            grad = flat.pop(part) if part in flat else _empty(trained)
            processes.broadcast(grad, part % several)
            total = grad if total is None else total + grad
        assert total is not None
        return total

    def _at_once(self, flat: dict[int, Tensor], trained: Sequence[nn.Parameter]) -> Tensor:
        total = torch.stack(list(flat.values())).sum(0) if flat else _empty(trained).zero_()
        processes.sum_over([total])
        return total


def _empty(parameters: Sequence[nn.Parameter]) -> Tensor:
    return torch.cat([torch.empty_like(parameter).reshape(-1) for parameter in parameters])
