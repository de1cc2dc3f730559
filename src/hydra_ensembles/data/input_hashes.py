"""Short hashes of inputs, that tell whether an input is one of the known examples, to the bit.

A hash has 64 bits and is of the tensors that the host gets: floats in single precision, the rest as
64-bit integers. Of a token sequence only what the attention mask keeps counts, so that one text has
one hash whatever it is padded to. `fit_novelty_` keeps those of the known data (`Novelty.hashes`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .._tensors import tensor_bytes

BESIDE = frozenset({"attention_mask", "token_type_ids", "position_ids"})
"""Inputs that follow from the others, and that callers may leave out."""


def input_hashes(inputs: Mapping[str, Any]) -> Tensor | None:
    """Return the hash of every example, int64 `[example]`; None when no input is a tensor.

    Args:
        inputs: Inputs of the host by name, without labels.
    """
    mask = inputs.get("attention_mask")
    columns = [
        value.detach().cpu()
        for name, value in sorted(inputs.items())
        if isinstance(value, Tensor) and value.ndim > 0 and name not in BESIDE
    ]
    if not columns:
        return None
    kept = mask.detach().cpu().bool() if isinstance(mask, Tensor) else None
    found = []
    for place in range(len(columns[0])):
        digest = hashlib.blake2b(digest_size=8)
        for column in columns:
            row = column[place] if len(column) == len(columns[0]) else column
            if kept is not None and column.shape == kept.shape:
                row = row[kept[place]]
            # adding 0.0 turns -0.0 into 0.0
            plain = row.float() + 0.0 if row.is_floating_point() else row.long()
            digest.update(repr(list(plain.shape)).encode())
            digest.update(tensor_bytes(plain))
        found.append(int.from_bytes(digest.digest(), "little", signed=True))
    return torch.tensor(found, dtype=torch.int64)
