"""Peak memory of a call on a CPU, measured where operators allocate their results."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Track the bytes of tensors that are born while it is active, as long as they live.

    What an operator allocates for itself and frees before it returns is not seen.

    Attributes:
        peak: The largest number of bytes that were alive at once.
        alive: Bytes alive now.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self.alive = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if not isinstance(leaf, Tensor):
                continue
            key = _storage(leaf)
            if key in given or key in self._known:
                continue  # a view, or written in place
            storage = leaf.untyped_storage()
            size = storage.nbytes()
            self._known.add(key)
            self.alive += size
            self.peak = max(self.peak, self.alive)
            weakref.finalize(storage, self._freed, key, size)
        return result

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.alive -= size


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
