"""Whether our own arithmetic computes a host's blocks, and what it must know for that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import UnsupportedModelError
from .attention import ARGUMENTS, FORMS, UNUSED
from .block import Block
from .block_arguments import (
    UnknownArgumentError,
    is_bias,
    read_arguments,
)
from .block_calls import BlockCall, parameter_names
from .multihead_attention import opened
from .probes import (
    bare_call,
    check_block,
    largest_difference,
    random_states,
    randomized,
    structure_of,
)
from .reasons import at_layer, describe_parameters, knows_argument

_NO_NAMES = (
    "its norms and its MLP have names that we do not know (describe them by register_family())"
)


@dataclass(frozen=True)
class Arithmetic:
    """What our own arithmetic must know of a host, found by comparing it with the host's blocks.

    Attributes:
        rotary: The form of rotary positions (see `attention.FORMS`), of all layers or per layer;
            None if the host passes none.
        biased: Whether the host passes a bias per head to its blocks.
        by_layer: Whether the arguments of the blocks (masks, angles) differ between layers.
        keeps_heads: Whether the host's own blocks need all their heads: pruned heads are then gated
            off in the trunk, and zero in a member that is taken out.
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
        every = {**asdict(self), "rotary": rotary}
        return {name: value for name, value in every.items() if value not in (None, False)}

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
    """Compare our own arithmetic with a host's blocks; return what it needs, or why it fails.

    Args:
        blocks: The blocks of a host, whose weights can be seen head by head.
        passes: What the host passed to each block in some forward passes; without any, blocks run
            on random states without arguments.
        kinds: The config's names for the kinds of layers, if any.
    """
    reason = _why_no_parts(blocks)
    if reason is not None:
        return reason
    by_layer = any(not _same(found[0].given, c.given) for found in passes for c in found[1:])
    if len({reach(block.module) for block in blocks}) > 1:
        reason = why_not_by_masks(blocks, passes[-1] if passes else None, kinds)
        if reason is not None:
            return reason
        by_layer = True
    forms: list[str | None] = []
    known: dict[Any, str | None] = {}
    for block in blocks:
        calls = [calls[block.index] for calls in passes] or [bare_call(block)]
        key = (structure_of(block.module), tuple(call.shape for call in calls))
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
    """Say which parts of the blocks the family does not name, or None."""
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
    """Find the form of rotary positions in which we compute a block; an error if there is none."""
    rotates = any(_named(block, call).keys() & set(ARGUMENTS) for call in calls)
    reason: str | None = None
    for form in (*FORMS, UNUSED) if rotates else (None,):
        reason = next(filter(None, (check_block(block, call, form) for call in calls)), None)
        if reason is None:
            return form
    return UnsupportedModelError(f"{reason}, with rotary positions" if rotates else f"{reason}")


def _named(block: Block, call: BlockCall) -> dict[str, Any]:
    """Return a block's arguments beside its states, by name."""
    names = parameter_names(block.module)[1:]
    named = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
    return {name: value for name, value in named.items() if value is not None}


def hands_bias(blocks: Sequence[Block], passes: Sequence[Sequence[BlockCall]]) -> bool:
    """Return whether a host passes a bias per head to its blocks."""
    named = [_named(blocks[0], calls[0]) for calls in passes]
    return any(is_bias(name, value) for one in named for name, value in one.items())


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
    """Return whether two arguments are equal, tensors by their values."""
    (a, form), (b, other) = pytree.tree_flatten(a), pytree.tree_flatten(b)
    return form == other and all(x is y or _equal(x, y) for x, y in zip(a, b, strict=True))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and bool(torch.equal(a, b))
    return type(a) is type(b) and bool(a == b)


# --- windows: blocks that attend only to nearby tokens --------------------------------------------
# A window that is longer than our examples does not show in a mask: settings are also compared.

_REACH = ("sliding", "window", "attention_type", "layer_type", "chunk", "is_local")
"""Parts of the names of settings that say which tokens a block attends to."""

_UNKNOWN = "its blocks look at tokens in different ways (windows in some of them)"


def reach(module: nn.Module) -> tuple[tuple[str, str, Any], ...]:
    """Return the settings and own masks that say which tokens a block attends to."""
    settings: list[tuple[str, str, Any]] = []
    for path, inner in module.named_modules():
        settings += [
            (path, name, value)
            for name, value in vars(inner).items()
            if any(word in name for word in _REACH)
            and isinstance(value, (bool, int, float, str, type(None)))
        ]
        settings += [
            (path, name, int(buffer.sum()))
            for name, buffer in inner.named_buffers(recurse=False)
            if buffer.dtype == torch.bool
        ]
    return tuple(sorted(settings, key=str))


def why_not_by_masks(
    blocks: Sequence[Block], calls: Sequence[BlockCall] | None, kinds: Sequence[str] | None
) -> str | None:
    """Say why the masks may not be the only difference in what blocks attend to, or None.

    They are the only difference if the config names a kind per layer, by which the host chooses the
    mask, and a block with another kind's settings computes the same from the same mask.

    Args:
        blocks: The blocks of a host.
        calls: How the host called them in one forward pass.
        kinds: The config's names for the kinds of layers, if any.
    """
    if calls is None or kinds is None or len(kinds) != len(blocks):
        return _UNKNOWN
    by_kind: dict[str, set[Any]] = {}
    for block, kind in zip(blocks, kinds, strict=True):
        by_kind.setdefault(kind, set()).add(reach(block.module))
    if any(len(reaches) > 1 for reaches in by_kind.values()):
        return _UNKNOWN
    firsts = {kind: blocks[list(kinds).index(kind)] for kind in by_kind}
    for block in firsts.values():
        for other in firsts.values():
            if other is not block and _looks(block, other, calls[block.index]):
                return _UNKNOWN
    return None


def _looks(block: Block, other: Block, call: BlockCall) -> bool:
    """Return whether a block itself reads the settings in which another block differs."""
    original, changed = randomized(block.module), randomized(block.module)
    settings = {(path, name): value for path, name, value in reach(other.module)}
    for path, inner in changed.named_modules():
        for name in vars(inner).keys() & {n for p, n in settings if p == path}:
            setattr(inner, name, settings[path, name])
    call = random_states(call)
    twins = [Block.of(block.index, module, block.family) for module in (original, changed)]
    try:
        with torch.no_grad(), opened([twin.attention.module for twin in twins]):
            difference = largest_difference(call.run(changed), call.run(original))
    except Exception:  # its code does not accept the other settings
        return True
    return not difference <= 1e-6
