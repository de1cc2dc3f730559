"""Arguments by layer: what the host passes to each of its blocks, kept for the body.

A host that chooses masks or angles layer by layer calls as many blocks as before. All but the last
are places, which record their arguments and pass the states on; the last is the body.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from torch import nn

from ..hosts.calling import Form, take_call

Given = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a block, without the states."""

# A context variable, not an attribute: other threads run the same module at the same time.
_handed: ContextVar[tuple[Given, ...]] = ContextVar("hydra_handed", default=())


class Place(nn.Module):
    """Takes the place of a block below the last."""

    def __init__(self, layer: int, form: Form, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.layer, self.form = layer, form
        show_(self, settings)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Record the arguments; pass the states on."""
        call = take_call(args, kwargs)
        _handed.set((*_handed.get()[: self.layer], (call.args, call.kwargs)))
        return self.form.fill(call.hidden)


def take_handed() -> tuple[Given, ...]:
    """Return what the places recorded in this pass, from the first block on."""
    handed = _handed.get()
    _handed.set(())  # keep nothing longer than the pass
    return handed


def plain_settings(block: nn.Module) -> dict[str, Any]:
    """Return the settings of a block that a host may read to choose its arguments."""
    return {
        name: value
        for name, value in vars(block).items()
        if isinstance(value, (bool, int, float, str)) and not name.startswith("_")
    }


def show_(module: nn.Module, settings: Mapping[str, Any]) -> None:
    """Give a module the settings of the block that it replaces, in place."""
    for name, value in settings.items():
        if not hasattr(module, name):
            setattr(module, name, value)
