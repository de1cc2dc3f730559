"""Splits, fingerprints and hashes: which examples go where, and whether they were seen before."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .._tensors import tensor_bytes
from ..errors import DataError
from .batches import columns as columns_of
from .batches import labels_of
from .loaders import Batches, Data, indexable

BESIDE = frozenset({"attention_mask", "token_type_ids", "position_ids"})
"""Inputs that follow from the others, and that callers may leave out."""


def split(data: Data, fractions: Mapping[str, float], *, seed: int = 0) -> dict[str, Batches]:
    """Split data into named parts, stratified by label and seeded.

    Every class spreads over the parts as evenly as whole examples allow, also when a class has
    fewer examples than there are parts; the sizes of the parts are within one of those requested.

    Args:
        data: any data; all but `Batches` is read into memory once.
        fractions: part name to share, for example `{"select": 0.6, "stop": 0.2, "temperature":
            0.2}`; what remains to 1 is dropped.
        seed: seed of the draw.
    """
    total = sum(fractions.values())
    if not fractions or min(fractions.values()) <= 0 or total > 1 + 1e-6:
        raise DataError(
            f"The fractions are {dict(fractions)}; expected positive shares whose sum is at most 1."
        )
    source = indexable(data)
    order = _stratified_order(_class_numbers(source), seed)
    names = [*fractions, None]
    shares = [*fractions.values(), max(0.0, 1 - total)]
    taken = [0] * len(names)
    rows: dict[str | None, list[int]] = {name: [] for name in names}
    for position, row in enumerate(order, start=1):
        # the part that lags behind most (ties: the first)
        part = max(range(len(names)), key=lambda i: shares[i] * position - taken[i])
        taken[part] += 1
        rows[names[part]].append(row)
    empty = [name for name in fractions if not rows[name]]
    if empty:
        raise DataError(
            f"{source.count} examples are too few for the parts {dict(fractions)}: "
            f"{', '.join(empty)} would be empty. Give more examples or fewer parts."
        )
    return {name: source.subset(sorted(rows[name])) for name in fractions}


def sample(data: Data, count: int, *, seed: int = 0) -> Batches:
    """Draw `count` examples, stratified by label and seeded, in their original order."""
    source = indexable(data)
    if count >= source.count:
        return source
    if count < 1:
        raise DataError(f"Cannot draw {count} examples; expected 1 or more.")
    order = _stratified_order(_class_numbers(source), seed)
    # evenly spaced over the order by class, so that every class gives its share
    places = torch.linspace(0, len(order), count + 1, dtype=torch.float64)[:-1].long()
    return source.subset(sorted(order[place] for place in places.tolist()))


def fingerprint(data: Data) -> str:
    """Return a SHA-256 over the content of data: the same for any batch size and padding length.

    Columns are hashed apart, each with its dtype and the shape of a row; of token sequences only
    what the attention mask keeps counts.
    """
    columns: dict[str, Any] = {}
    lengths: dict[str, int] = {}
    for batch in data:
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        for name, value in columns_of(batch):
            if isinstance(value, Tensor):
                value = value.detach().cpu().contiguous()
                sequence = mask is not None and value.shape == mask.shape
                if name not in columns:
                    row = "tokens" if sequence else list(value.shape[1:])
                    columns[name] = hashlib.sha256(f"{name} {value.dtype} {row}".encode())
                if sequence and mask is not None:
                    kept = mask.detach().cpu().bool()
                    ends = columns.setdefault(f"{name} lengths", hashlib.sha256())
                    ends.update(tensor_bytes(kept.sum(1)))
                    value = value[kept]
                columns[name].update(tensor_bytes(value))
            else:
                columns.setdefault(name, hashlib.sha256(f"{name} {type(value).__name__}".encode()))
                for item in value if isinstance(value, (list, tuple)) else [value]:
                    columns[name].update(f"{item!r}\n".encode())
            lengths[name] = lengths.get(name, 0) + (len(value) if hasattr(value, "__len__") else 1)
    if not columns:
        raise DataError("The data is empty: it gave no batch.")
    total = hashlib.sha256()
    for name in sorted(columns):
        total.update(f"{name} {lengths.get(name, 0)} {columns[name].hexdigest()}\n".encode())
    return total.hexdigest()


def input_hashes(inputs: Mapping[str, Any]) -> Tensor | None:
    """Return a hash of every example, int64 `[example]`; None when no input is a tensor.

    It tells whether an input is one of the known examples, to the bit (`Novelty.hashes`). It is of
    the tensors that the host gets: floats in single precision, the rest as 64-bit integers; of a
    token sequence only what the attention mask keeps, whatever it is padded to.

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


def _class_numbers(source: Batches) -> Tensor:
    """Return the class number of every example; zeros if there is nothing to stratify by."""
    labels = source.labels
    if labels is None:
        first = labels_of(next(iter(source.subset([0]))))
        if first is None or first.ndim != 1:  # tags, spans: nothing to stratify by
            return torch.zeros(source.count, dtype=torch.long)
        batches = [labels_of(batch) for batch in source]
        labels = torch.cat([label for label in batches if label is not None])
    if labels.ndim != 1 or labels.is_floating_point() or len(labels) != source.count:
        return torch.zeros(source.count, dtype=torch.long)
    return labels.long()


def _stratified_order(classes: Tensor, seed: int) -> list[int]:
    """Return the examples class after class, both in a seeded random order."""
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(classes), generator=generator)
    kinds, numbers = classes[shuffled].unique(return_inverse=True)
    place = torch.randperm(len(kinds), generator=generator)  # classes in random order
    return shuffled[place[numbers].argsort(stable=True)].tolist()
