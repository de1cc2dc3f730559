"""Texts and tables in files: CSV, TSV, JSON lines or plain lines; texts go through a tokenizer.

Tables are read here and not by the library `datasets`: it fills short rows with None, reads texts
such as `123`, `NA` or `2020-01-01` as numbers, missing values or times, and fails as a whole where
one row is bad.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError
from .batches import Batch
from .class_names import Names, encode_labels, pick_column
from .loaders import Batches

SUFFIXES = frozenset({".csv", ".tsv", ".tab", ".jsonl", ".ndjson", ".json", ".txt"})
TEXT_COLUMNS = ("text", "sentence", "content", "review", "question", "document")
PAIR_COLUMNS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("text", "text_pair"),
)
"""Columns of two texts that are read together, as GLUE and others name them."""
LABEL_COLUMNS = ("label", "labels", "class", "target", "category")
NOT_UTF8 = "It is not UTF-8 text. Convert it, for example with iconv."

Row = dict[str, Any] | DataError | None
"""A row of a table, the reason why it cannot be read, or None for a blank line."""


def text_file(
    file: str | Path,
    tokenizer: Callable[..., Any],
    *,
    text_column: str | None = None,
    pair_column: str | None = None,
    label_column: str | None = None,
    labels: bool = True,
    class_names: Names | None = None,
    max_length: int | None = None,
    batch_size: int = 32,
) -> TextBatches:
    """Read a text file as data for a host.

        data = text_file("reviews.csv", AutoTokenizer.from_pretrained(name), label_column="stars")

    Args:
        file: `.csv`, `.tsv`, `.jsonl`, `.json` or `.txt` (one text per line, no labels).
        tokenizer: the host's, as `AutoTokenizer.from_pretrained` returns it.
        text_column, pair_column, label_column: by default found under their usual names; there is
            a second text only under two names of `PAIR_COLUMNS`.
        labels: False leaves them out, as for outliers.
        class_names: see `image_folder`.
        max_length: most tokens per text; by default the tokenizer's limit.
        batch_size: texts per batch.
    """
    table = read_table(file)
    numbers: Tensor | None = None
    info: dict[str, Any] = {}
    plain = Path(file).suffix.lower() == ".txt" and label_column is None
    if labels and not plain:
        column = pick_column(label_column, table, LABEL_COLUMNS, "label", str(file))
        numbers, info = encode_labels(table[column], class_names, where=str(file))
    return read_texts(
        table,
        table.__getitem__,
        tokenizer,
        where=str(file),
        text_column=text_column,
        pair_column=pair_column,
        labels=numbers,
        info=info,
        max_length=max_length,
        batch_size=batch_size,
    )


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
    """Make data from strings, tokenized batch by batch and padded to the longest in the batch.

    data = text_data(["a good film", "a bad film"], tokenizer, labels=[1, 0])
    """
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


def read_texts(
    names: Collection[str],
    read: Callable[[str], Sequence[Any]],
    tokenizer: Callable[..., Any],
    *,
    where: str,
    text_column: str | None,
    pair_column: str | None,
    labels: Tensor | None,
    info: Mapping[str, Any],
    max_length: int | None,
    batch_size: int,
) -> TextBatches:
    """Make data from the text columns of a table: their names, and what reads a column by name."""

    if text_column is None and pair_column is None:
        both = next((pair for pair in PAIR_COLUMNS if set(pair) <= set(names)), (None, None))
        text_column, pair_column = both

    def strings(column: str) -> list[str]:
        values = list(read(column))
        for row, value in enumerate(values):
            if not isinstance(value, str):
                raise DataError(f"Text {row + 1} of {where} is not a string but {value!r:.60}.")
        return values

    column = pick_column(text_column, names, TEXT_COLUMNS, "text", where)
    pairs = None if pair_column is None else pick_column(pair_column, names, (), "text", where)
    return TextBatches(
        strings(column),
        tokenizer,
        pairs=None if pairs is None else strings(pairs),
        labels=labels,
        info={"class_names": None, **info},
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
        columns = [self._texts] if self._pairs is None else [self._texts, self._pairs]
        encoded = self.tokenizer(
            *([column[row] for row in rows] for column in columns),
            padding=True,
            truncation=True,
            max_length=self.max_length,
            return_tensors="pt",
        )
        labels = self._all_labels
        return {**encoded, **({} if labels is None else {"labels": labels[list(rows)]})}


def read_table(file: str | Path, *, columns: Sequence[str] | None = None) -> dict[str, list[Any]]:
    """Read a table as `{column: values}`; the file's suffix gives its format.

    Args:
        file: `.csv`, `.tsv`/`.tab` (where `"` quotes nothing: texts there hold stray quotes),
            `.jsonl`/`.ndjson` (one object per line), `.json` (a list of objects) or `.txt` (one
            column `text`, one text per line).
        columns: names for a CSV or TSV file that has no header line.
    """
    path = Path(file).expanduser()
    unit = "Entry" if path.suffix.lower() == ".json" else "Line"
    table: dict[str, list[Any]] = {}
    for number, row in read_rows(path, columns=columns):
        if row is None:
            continue
        if isinstance(row, DataError):
            raise DataError(f"{unit} {number} of {path}: {row}")
        if not table:
            table = {str(name): [] for name in row}
        if missing := [name for name in table if name not in row]:
            raise DataError(f"{unit} {number} of {path} lacks {', '.join(missing)}.")
        for name, values in table.items():
            values.append(row[name])
    if not table:
        raise DataError(f"{path} holds no rows.")
    return table


def read_rows(
    file: str | Path, *, columns: Sequence[str] | None = None
) -> Iterator[tuple[int, Row]]:
    """Yield the rows of a table, each with the number of its first line (of its entry, in JSON).

    A row that cannot be read is an error in its place, a blank line is None, and the others go on.
    The arguments are those of `read_table`.
    """
    path = Path(file).expanduser()
    suffix, endings = path.suffix.lower(), ", ".join(sorted(SUFFIXES))
    if not path.is_file():
        kind = "is a folder" if path.is_dir() else "does not exist"
        raise DataError(f"The file {path} {kind}. Give a table that ends in {endings}.")
    if suffix not in SUFFIXES:
        raise DataError(f"Cannot tell what {path} is by its ending {suffix!r}; expected {endings}.")
    # bytes that are not UTF-8 become lone surrogates, which are looked for row by row
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:
        if suffix == ".json":
            for number, entry in enumerate(_json_list(lines.read(), path), start=1):
                yield number, _object(entry)
        elif suffix in (".jsonl", ".ndjson", ".txt"):
            for number, line in enumerate(lines, start=1):
                line = line.rstrip("\r\n")
                if not line.strip():
                    yield number, None
                elif not _is_utf8(line):
                    yield number, DataError(NOT_UTF8)
                elif suffix == ".txt":
                    yield number, {"text": line}
                else:
                    try:
                        yield number, _object(json.loads(line))
                    except (ValueError, RecursionError) as error:
                        yield number, DataError(f"It is not JSON: {error}.")
        else:
            tabs = suffix in (".tsv", ".tab")
            form: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if tabs else {}
            before = csv.field_size_limit(2**31 - 1)  # 128 KiB; the limit is global
            try:
                yield from _csv_rows(csv.reader(lines, strict=True, **form), columns, path)
            finally:
                csv.field_size_limit(before)


def _csv_rows(reader: Any, columns: Sequence[str] | None, path: Path) -> Iterator[tuple[int, Row]]:
    names = list(columns) if columns else None
    while True:
        number = reader.line_num + 1
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            last = reader.line_num
            where = f" (in lines {number} to {last})" if last > number else ""
            yield number, DataError(f"{error}{where}. Check its quotes.")
            continue
        if not row:
            yield number, None
        elif not all(map(_is_utf8, row)):
            if names is None:
                raise DataError(f"{path}: {NOT_UTF8}")
            yield number, DataError(NOT_UTF8)
        elif names is None:
            names = [name.strip() for name in row]
            if len(set(names)) < len(names):
                raise DataError(f"{path} has two columns of one name: {', '.join(names)}.")
        elif len(row) != len(names):
            found = f"It has {len(row)} field{'s' * (len(row) != 1)}"
            problem = (
                f"{found}, but there are {len(names)} columns ({', '.join(names)}). Check its "
                "quotes and delimiters."
            )
            yield number, DataError(problem)
        else:
            yield number, dict(zip(names, row, strict=True))


def _json_list(text: str, path: Path) -> list[Any]:
    if not _is_utf8(text):
        raise DataError(f"{path}: {NOT_UTF8}")
    try:
        entries = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(
            f"{path} is not JSON: {error}. If it holds one object per line, end its name in .jsonl."
        ) from error
    if not isinstance(entries, list):
        raise DataError(f"{path} holds a {type(entries).__name__}; expected a list of objects.")
    return entries


def _object(entry: Any) -> Row:
    if isinstance(entry, dict):
        return entry
    return DataError(f"It is not an object but {entry!r:.60}.")


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
