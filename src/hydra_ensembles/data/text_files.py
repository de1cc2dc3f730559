"""Text files: CSV, TSV, JSON lines or plain lines, through a tokenizer, padded batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError
from .batches import Batch
from .class_names import Names
from .labels import encode_labels, pick_column
from .loaders import Batches
from .table_files import read_table

TEXT_COLUMNS = ("text", "sentence", "content", "review", "question", "document")
LABEL_COLUMNS = ("label", "labels", "class", "target", "category")


def text_file(
    file: str | Path,
    tokenizer: Callable[..., Any],
    *,
    text_column: str | None = None,
    pair_column: str | None = None,
    label_column: str | None = None,
    labels: bool = True,
    class_names: Names | None = None,
    columns: Sequence[str] | None = None,
    delimiter: str | None = None,
    quoted: bool | None = None,
    max_length: int | None = None,
    batch_size: int = 32,
) -> TextBatches:
    """Read a text file as data for a host.

    Args:
        file: `.csv`, `.tsv`, `.jsonl`, `.json` or `.txt` (one text per line, no labels).
        tokenizer: the host's, as `AutoTokenizer.from_pretrained` returns it.
        text_column, pair_column, label_column: by default text and label are found under their
            usual names and there is no second text.
        labels: False leaves them out, as for outliers.
        class_names: see `image_folder`.
        columns, delimiter, quoted: see `read_table`.
        max_length: most tokens per text; by default the tokenizer's limit.
        batch_size: texts per batch.
    """
    table = read_table(file, columns=columns, delimiter=delimiter, quoted=quoted)
    where = str(file)
    texts = _strings(table[pick_column(text_column, table, TEXT_COLUMNS, "text", where)], where)
    pairs = None
    if pair_column is not None:
        pairs = _strings(table[pick_column(pair_column, table, (), "text", where)], where)
    numbers: Tensor | None = None
    info: dict[str, Any] = {}
    plain = Path(file).suffix.lower() == ".txt" and label_column is None
    if labels and not plain:
        values = table[pick_column(label_column, table, LABEL_COLUMNS, "label", where)]
        numbers, info = encode_labels(values, class_names, where=where)
    data = text_data(
        texts,
        tokenizer,
        pairs=pairs,
        labels=numbers,
        max_length=max_length,
        batch_size=batch_size,
    )
    data.info |= info
    return data


def text_data(
    texts: Sequence[str],
    tokenizer: Callable[..., Any],
    *,
    pairs: Sequence[str] | None = None,
    labels: Tensor | Sequence[int] | None = None,
    class_names: Sequence[str] | None = None,
    max_length: int | None = None,
    batch_size: int = 32,
) -> TextBatches:
    """Make data from strings, tokenized batch by batch and padded to the longest in the batch."""
    numbers = None if labels is None else torch.as_tensor(labels)
    for name, other in (("labels", numbers), ("second texts", pairs)):
        if other is not None and len(other) != len(texts):
            raise DataError(f"There are {len(texts)} texts but {len(other)} {name}.")
    return TextBatches(
        texts,
        tokenizer,
        pairs=pairs,
        labels=numbers,
        info={"class_names": None if class_names is None else list(class_names)},
        max_length=max_length,
        batch_size=batch_size,
    )


class TextBatches(Batches):
    """Data over strings, which are kept (`texts`) so that they can be corrupted or shown."""

    def __init__(
        self,
        texts: Sequence[str],
        tokenizer: Callable[..., Any],
        *,
        pairs: Sequence[str] | None = None,
        labels: Tensor | None = None,
        indices: Sequence[int] | None = None,
        info: Mapping[str, Any] | None = None,
        max_length: int | None = None,
        batch_size: int = 32,
    ) -> None:
        self._texts, self._pairs = list(texts), None if pairs is None else list(pairs)
        self.tokenizer, self.max_length = tokenizer, max_length
        super().__init__(
            self._encode,
            range(len(self._texts)) if indices is None else indices,
            batch_size=batch_size,
            labels=labels,
            info=info,
        )

    @property
    def texts(self) -> list[str]:
        """The strings, in order."""
        return [self._texts[index] for index in self.indices]

    def with_texts(self, texts: Sequence[str]) -> TextBatches:
        """Return the same data with other strings, in the same order."""
        if len(texts) != self.count:
            raise DataError(f"There are {self.count} texts to replace but {len(texts)} new ones.")
        replaced = list(self._texts)
        for index, text in zip(self.indices, texts, strict=True):
            replaced[index] = text
        return TextBatches(
            replaced,
            self.tokenizer,
            pairs=self._pairs,
            labels=self._all_labels,
            indices=self.indices,
            info=self.info,
            max_length=self.max_length,
            batch_size=self.batch_size,
        )

    def _encode(self, rows: Sequence[int]) -> Batch:
        texts = [self._texts[row] for row in rows]
        inputs: list[list[str]] = [texts]
        if self._pairs is not None:
            inputs.append([self._pairs[row] for row in rows])
        encoded = self.tokenizer(
            *inputs, padding=True, truncation=True, max_length=self.max_length, return_tensors="pt"
        )
        batch = dict(encoded)
        if self._all_labels is not None:
            batch["labels"] = self._all_labels[list(rows)]
        return batch


def _strings(values: Sequence[Any], where: str) -> list[str]:
    for row, value in enumerate(values):
        if not isinstance(value, str):
            raise DataError(f"Text {row + 1} of {where} is not a string but {value!r:.60}.")
    return list(values)
