"""A device that is not there: tensors that compute on the CPU but say that they are elsewhere.

    with PretendedDevice() as device:
        model.to(DEVICE)
        with device.counting() as moves:
            model(inputs)  # moves == {"to device": 1}

The numbers are real, as the CPU computes them. An operation on tensors of both places fails, as on
a GPU. Copies between the places are counted, and so are waits: operations whose result the host has
to know before it can go on, for which a GPU would have to finish all that it was given before.

To import this module registers the device in torch for good: use it in a process of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map_only


class Backend(backend_registration._DummyBackendModule):
    """What torch asks of the module of a device, such as `torch.cuda`."""

    def get_rng_state(self, device: object) -> Tensor:
        return torch.zeros(0)

    def set_rng_state(self, state: Tensor, device: object) -> None:
        pass


backend_registration._setup_privateuseone_for_python_backend("pretended", Backend())
DEVICE = torch.device("pretended:0")
aten = torch.ops.aten
WAITS = {
    aten._local_scalar_dense.default,  # item(), float(), bool(), int()
    aten.is_nonzero.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.bincount.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.repeat_interleave.Tensor,
}
INDEXED = (aten.index, aten.index_put, aten.index_put_)


class OnDevice(Tensor):
    """A tensor on the pretended device.

    Attributes:
        there: Its numbers.
    """

    there: Tensor

    @staticmethod
    def __new__(cls, there: Tensor) -> OnDevice:
        made = Tensor._make_wrapper_subclass(
            cls,
            there.size(),
            strides=there.stride(),
            storage_offset=there.storage_offset(),
            dtype=there.dtype,
            device=DEVICE,
        )
        made.there = there
        return made

    def tolist(self) -> Any:
        return self.cpu().tolist()  # torch has none for subclasses

    def __repr__(self, **_: Any) -> str:
        return f"OnDevice({self.there!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} on the device outside of `with PretendedDevice()`")


class PretendedDevice(TorchDispatchMode):
    """Runs the operations of the device and counts what goes to and fro."""

    def __init__(self) -> None:
        super().__init__()
        self._moves: Counter[str] = Counter()

    def __enter__(self) -> PretendedDevice:
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor() copies where a mode sees it
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch._C._set_only_lift_cpu_tensors(False)

    @contextmanager
    def counting(self) -> Iterator[Counter[str]]:
        """Count what goes `to device` and `to host`, and the `waits`, inside."""
        self._moves = Counter()
        yield self._moves
        self._moves = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        there = any(isinstance(x, OnDevice) for x in tensors)
        target = kwargs.get("device")
        if target is None:
            result_there = isinstance(tensors[0], OnDevice) if func is aten.copy_.default else there
        else:
            result_there = torch.device(target).type == DEVICE.type
        if func in (aten._to_copy.default, aten.copy_.default):
            if isinstance(tensors[-1], OnDevice) != result_there:
                self._moves["to device" if result_there else "to host"] += 1
        elif there:
            self._check(func, args, tensors)
        if not there and not result_there:
            return func(*args, **kwargs)
        if target is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        plain_args, plain_kwargs = tree_map_only(OnDevice, lambda x: x.there, (args, kwargs))
        result = func(*plain_args, **plain_kwargs)
        if not result_there:
            return result
        result = tree_map_only(Tensor, OnDevice, result)
        return return_and_correct_aliasing(func, args, kwargs, result)

    def _check(self, func: Any, args: Any, tensors: list[Tensor]) -> None:
        """Fail where a device would; a single number may join, and an index is copied."""
        indices = []
        if func.overloadpacket in INDEXED:
            indices = [x for x in args[1] if isinstance(x, Tensor)]
        self._moves["waits"] += func in WAITS or any(x.dtype == torch.bool for x in indices)
        for tensor in tensors:
            if isinstance(tensor, OnDevice):
                continue
            if any(tensor is x for x in indices):
                self._moves["to device"] += 1
            elif tensor.ndim:
                raise RuntimeError(
                    f"{func}: expected all tensors to be on one device, found {DEVICE} and cpu "
                    f"(of shape {list(tensor.shape)})."
                )
