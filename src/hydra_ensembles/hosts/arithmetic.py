"""Whether our own arithmetic computes a host's blocks, and what it must know for that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedModelError
from .attention import ARGUMENTS, FORMS, UNUSED
from .block import Block
from .block_arguments import (
    UnknownArgumentError,
    is_bias,
    read_arguments,
)
from .block_calls import BlockCall, parameter_names
from .probes import bare_call, check_block, structure_of
from .reasons import at_layer, describe_parameters, knows_argument
from .windows import differ, why_not_by_masks

_NO_NAMES = "its norms and its MLP have names that we do not know (register_family() tells them)"


@dataclass(frozen=True)
class Arithmetic:
    """What our own arithmetic must know of a host, found by comparing it with the host's blocks.

    Attributes:
        rotary: The form of rotary positions (see `rotary`), of all layers or of each; None: the
            host hands none over.
        biased: Whether a bias of each head is handed to its blocks.
        by_layer: Whether its blocks are handed other arguments layer by layer (masks, angles).
        keeps_heads: Whether its own blocks need all their heads, so that those that go are gated
            off in the trunk and zero in members that are cast.
    """

    rotary: str | tuple[str, ...] | None = None
    biased: bool = False
    by_layer: bool = False
    keeps_heads: bool = False

    def rotary_of(self, layer: int) -> str | None:
        """Return the form of rotary positions of a layer."""
        return self.rotary[layer] if isinstance(self.rotary, tuple) else self.rotary

    def settings(self) -> dict[str, Any]:
        """Return plain data; what is not set is left out."""
        rotary = list(self.rotary) if isinstance(self.rotary, tuple) else self.rotary
        found = {"rotary": rotary, "biased": self.biased, "by_layer": self.by_layer}
        found["keeps_heads"] = self.keeps_heads
        return {name: value for name, value in found.items() if value not in (None, False)}

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> Arithmetic:
        """Read what `settings` gave."""
        rotary, biased = settings.get("rotary"), settings.get("biased") is True
        return cls(
            rotary=tuple(rotary) if isinstance(rotary, list) else rotary,
            biased=biased,
            by_layer=settings.get("by_layer") is True,
            keeps_heads=biased or settings.get("keeps_heads") is True,
        )


def find_arithmetic(
    blocks: Sequence[Block],
    passes: Sequence[Sequence[BlockCall]],
    kinds: Sequence[str] | None = None,
) -> Arithmetic | str:
    """Compare our own arithmetic with a host's blocks; say what it needs, or why it does not do.

    Args:
        blocks: The blocks of a host, whose weights can be seen head by head.
        passes: What the host handed to each block in some forward passes; without any, blocks run
            on random states by themselves.
        kinds: What the host's config calls the kinds of its layers, where it does.
    """
    reason = _why_no_parts(blocks)
    if reason is not None:
        return reason
    by_layer = any(not _same(found[0].given, c.given) for found in passes for c in found[1:])
    if differ(blocks):
        reason = why_not_by_masks(blocks, passes[-1] if passes else None, kinds)
        if reason is not None:
            return reason
        by_layer = True
    forms: list[str | None] = []
    known: dict[Any, str | None] = {}
    for block in blocks:
        calls = [calls[block.index] for calls in passes] or [bare_call(block)]
        shapes = tuple((_shape_of(call.args), _shape_of(call.kwargs)) for call in calls)
        key = (structure_of(block.module), shapes)
        if key not in known:
            found = _find_form(block, calls)
            if isinstance(found, UnsupportedModelError):
                return at_layer(block.index, str(found))
            known[key] = found
        forms.append(known[key])
    rotary: str | tuple[str, ...] | None = forms[0]
    if len(set(forms)) > 1:
        rotary = tuple(form or UNUSED for form in forms)
    return Arithmetic(rotary, hands_bias(blocks, passes), by_layer)


def _why_no_parts(blocks: Sequence[Block]) -> str | None:
    """Say which parts of the blocks no family names, or None."""
    for block in blocks:
        named = block.norm1 is not None and block.norm2 is not None and block.mlp_names
        if not block.family.fusable or not named:
            return _NO_NAMES
        if block.has_experts:
            return at_layer(block.index, "its MLP is a mixture of experts")
        unknown = block.unknown_parameters()
        if unknown:
            words = describe_parameters(unknown, of_attention=False)
            return at_layer(block.index, f"its blocks also have {words}")
        if block.attention.table is not None and block.attention.table.index is None:
            return at_layer(block.index, "its table of relative positions has no index")
    return None


def _find_form(block: Block, calls: Sequence[BlockCall]) -> str | UnsupportedModelError | None:
    """Find the form of rotary positions in which we compute a block; an error where in none."""
    turned = any(_handed(block, call).keys() & set(ARGUMENTS) for call in calls)
    reason: str | None = None
    for form in (*FORMS, UNUSED) if turned else (None,):
        reason = next(filter(None, (check_block(block, call, form) for call in calls)), None)
        if reason is None:
            return form
    return UnsupportedModelError(f"{reason}, with rotary positions" if turned else f"{reason}")


def _handed(block: Block, call: BlockCall) -> dict[str, Any]:
    """Return what a block is handed beside its states, by name."""
    names = parameter_names(block.module)[1:]
    named = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
    return {name: value for name, value in named.items() if value is not None}


def hands_bias(blocks: Sequence[Block], passes: Sequence[Sequence[BlockCall]]) -> bool:
    """Tell whether a host hands a bias of each head to its blocks."""
    found = [_handed(blocks[0], calls[0]) for calls in passes]
    return any(is_bias(name, value) for named in found for name, value in named.items())


def why_not_understood(
    blocks: Sequence[Block], passes: Sequence[Sequence[BlockCall]]
) -> str | None:
    """Name an argument that our own arithmetic does not know and that has a name in words."""
    for calls in passes:
        for block in blocks:
            call = calls[block.index]
            names = parameter_names(block.module)[1:]
            heads = block.attention.num_heads
            try:
                read_arguments(
                    names, call.args, call.kwargs, call.hidden, rotary=FORMS[0], heads=heads
                )
            except UnknownArgumentError as error:
                if knows_argument(error.name):
                    return at_layer(block.index, str(error))
            except UnsupportedModelError as error:
                return at_layer(block.index, str(error))
    return None


def _same(a: Any, b: Any) -> bool:
    """Tell whether two arguments are equal, tensors by their values."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.shape == b.shape and bool(torch.equal(a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def _shape_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.dtype)
    if isinstance(value, dict):
        return tuple((name, _shape_of(inner)) for name, inner in value.items())
    if isinstance(value, (tuple, list)):
        return tuple(_shape_of(inner) for inner in value)
    return str(value)
