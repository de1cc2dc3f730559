"""Columns of token sequences brought to one length, so that batches of texts can be joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError
from ..tasks import IGNORED as IGNORED

NEVER = -1e4
"""The logit of a token that a text does not have."""


def even_columns(
    batches: Sequence[Mapping[str, Any]],
    key: str,
    *,
    label: bool = False,
    like: Sequence[Mapping[str, Any]] = (),
    pad_id: int | None = None,
) -> list[Tensor]:
    """Bring one column of some batches to one length, padded on the right.

    Args:
        batches: Batches with an `attention_mask`, where they hold token sequences.
        key: The column.
        label: Whether it holds labels; padding gets the one that does not count.
        like: More batches in which the padding's value may be seen.
        pad_id: The value that pads `input_ids` when it is seen nowhere.
    """
    columns = [batch[key] for batch in batches]
    if not _uneven(columns):
        return columns
    masks: list[Any] = [batch.get("attention_mask") for batch in batches]
    masked = all(isinstance(mask, Tensor) for mask in masks)
    if label or key == "attention_mask":
        return even(columns, IGNORED if label else 0)
    value: float = pad_id if key == "input_ids" and pad_id is not None else 0
    for batch in [*batches, *like] if masked else []:  # what stands where the mask is 0
        padding = batch["attention_mask"] == 0
        if batch[key].shape == padding.shape and bool(padding.any()):
            value = batch[key][padding][0].item()
            break
    tokens = masked and all(c.shape[:2] == m.shape for c, m in zip(columns, masks, strict=True))
    if not tokens and not columns[0].is_floating_point():
        raise DataError(
            f"Texts of different lengths must be joined here, and {key!r} has no attention_mask "
            "of the same length that would tell padding from tokens. Give batches with an "
            "attention_mask, or texts of one length."
        )
    return even(columns, value, tokens=tokens)


def padded_one(batches: Sequence[Any]) -> list[Any]:
    """Return the first batch in which some token is padding, if there is one."""
    for batch in batches:
        inputs = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
        mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
        if isinstance(mask, Tensor) and bool((mask == 0).any()):
            return [batch]
    return []


def even(tensors: Sequence[Tensor], value: float, *, tokens: bool = False) -> list[Tensor]:
    """Pad sequences `[batch, length]` on the right to one length.

    Args:
        tensors: Columns of batches.
        value: What they are padded with.
        tokens: Whether the second axis counts tokens, whatever axes follow (boxes of words).
    """
    if not _uneven(tensors):
        return list(tensors)
    rest = {t.shape[2:] for t in tensors}
    if len(rest) > 1 or (tensors[0].ndim != 2 and not tokens):
        raise DataError(
            f"Cannot join examples of shapes {sorted({tuple(t.shape[1:]) for t in tensors})}; "
            "only token sequences can be padded. Give images of one size."
        )
    longest = max(t.shape[1] for t in tensors)
    after = [0] * (2 * (tensors[0].ndim - 2))
    pad = torch.nn.functional.pad
    return [pad(t, (*after, 0, longest - t.shape[1]), value=value) for t in tensors]


def joined_rows(outputs: Sequence[Tensor]) -> Tensor:
    """Join outputs `[example, member, ...]`; the last axis of those of shorter texts is padded."""
    longest = max(part.shape[-1] for part in outputs)
    pad = torch.nn.functional.pad
    return torch.cat([pad(o, (0, longest - o.shape[-1]), value=NEVER) for o in outputs])


def _uneven(tensors: Sequence[Tensor]) -> bool:
    return tensors[0].ndim > 1 and len({t.shape[1:] for t in tensors}) > 1
