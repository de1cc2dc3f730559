"""Remove heads of one block physically where its code allows it; gate them off where it does not.

Cuts are tested, not guessed: a block with random weights is cut and compared with the same block
whose heads are gated off, called as the host calls it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .attention_site import AttentionSite
from .block import Block
from .block_calls import BlockCall, Form, repeat_for_streams, states_of
from .multihead_attention import open_attention_, opened
from .probes import TOLERANCE, largest_difference, random_states, randomized


class HeadGate:
    """A hook at the input of an output projection that sets the heads that are off to zero."""

    def __init__(self, row: Tensor, head_dim: int) -> None:
        self.row, self.head_dim = row, head_dim

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x = inputs[0]
        row = self.row.to(device=x.device, dtype=x.dtype)[:, None]
        by_head = x.unflatten(-1, (len(row), self.head_dim))
        return ((by_head * row).flatten(-2), *inputs[1:])


@dataclass(frozen=True)
class Cut:
    """The remaining heads of a block.

    Attributes:
        there: Heads that physically remain, by their place in the block.
        on: Those of them that are not gated off.
    """

    there: tuple[int, ...]
    on: tuple[int, ...]

    def apply_(self, block: Block) -> None:
        """Cut and gate a block, in place."""
        site = block.attention
        if len(self.there) != site.num_heads:
            site.cut_(list(self.there))
        if self.there != self.on:
            row = torch.tensor([float(head in self.on) for head in self.there])
            gate_(site, row)


def gate_(site: AttentionSite, row: Tensor) -> Any:
    """Gate heads off at the input of the output projection, in place; return the hook's handle."""
    open_attention_(site.module)
    return site.output.register_forward_pre_hook(HeadGate(row, site.head_dim))


def best_cut(block: Block, heads: Sequence[int], call: BlockCall | None) -> Cut:
    """Choose the cut that keeps these heads: physical if it passes the test, otherwise gates.

    With grouped queries, only groups without any kept head are removed; within a group, heads are
    gated off.
    """
    site = block.attention
    everything = tuple(range(site.num_heads))
    on = tuple(heads)
    if on == everything or call is None:
        return Cut(everything, on)
    cut = whole_groups(block, on)
    if cut.there == everything:
        return cut
    return cut if why_not_cut(block, cut.there, call) is None else Cut(everything, on)


def whole_groups(block: Block, heads: Sequence[int]) -> Cut:
    """Return the cut that removes all other heads, but groups of queries only as a whole."""
    site = block.attention
    group = max(1, site.num_heads // max(1, site.kv_heads))
    groups = {head // group for head in heads}
    remaining = tuple(head for head in range(site.num_heads) if head // group in groups)
    return Cut(remaining, tuple(heads))


def why_not_cut(block: Block, there: Sequence[int], call: BlockCall) -> str | None:
    """Say why all other heads cannot be removed physically; None if the test passes.

    Everything that the block returns is compared, not only its states.
    """
    reason = block.attention.why_not_removable()
    if reason is not None:
        return reason
    gated = Block.of(block.index, randomized(block.module), block.family)
    cut = Block.of(block.index, copy.deepcopy(gated.module), block.family)
    everything = tuple(range(gated.attention.num_heads))
    call = random_states(call)
    if not there:  # a batch of two would pass for a pair of results, where a pair is expected
        many = partial(repeat_for_streams, streams=5, batch=len(call.hidden))
        kwargs = {name: many(value) for name, value in call.kwargs.items()}
        call = replace(call, hidden=many(call.hidden), args=many(call.args), kwargs=kwargs)
    try:
        Cut(tuple(there), tuple(there)).apply_(cut)
        Cut(everything, tuple(there)).apply_(gated)
        with torch.no_grad(), opened([gated.attention.module, cut.attention.module]):
            expected, expected_form = states_of(call.call(gated.module))
            actual, form = states_of(call.call(cut.module))
    except Exception as error:  # its code needs all heads
        line = str(error).strip().partition("\n")[0][:120]
        return f"its code needs all heads ({type(error).__name__}: {line})"
    difference = largest_difference(actual, expected)
    if not difference <= TOLERANCE:
        return f"without some heads its block computes something else (off by {difference:.2g})"
    if not _same_rest(form, expected_form):
        return "its block passes something with one value per head to the blocks above"
    return None


def _same_rest(a: Form, b: Form) -> bool:
    if len(a.rest) != len(b.rest):
        return False
    return all(
        not isinstance(x, Tensor) or (isinstance(y, Tensor) and largest_difference(x, y) < 1e-3)
        for x, y in zip(a.rest, b.rest, strict=True)
    )
