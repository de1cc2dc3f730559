"""Tables in text files: CSV, TSV, JSON lines and plain lines, as columns."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import DataError

SUFFIXES = frozenset({".csv", ".tsv", ".tab", ".jsonl", ".ndjson", ".json", ".txt"})


def read_table(
    file: str | Path,
    *,
    columns: Sequence[str] | None = None,
    delimiter: str | None = None,
    quoted: bool | None = None,
) -> dict[str, list[Any]]:
    """Read a table as `{column: values}`; the file's suffix gives its format.

    Args:
        file: `.csv`, `.tsv`/`.tab`, `.jsonl`/`.ndjson` (one object per line), `.json` (a list of
            objects) or `.txt` (one column `text`, one text per line).
        columns: names for a CSV or TSV file that has no header line.
        delimiter: by default a comma, or a tab for TSV.
        quoted: whether `"` quotes fields: by default yes in CSV and no in TSV, whose texts usually
            hold stray quotes.
    """
    path = Path(file).expanduser()
    if not path.is_file():
        kind = "is a folder" if path.is_dir() else "does not exist"
        raise DataError(f"The file {path} {kind}. Give a table that ends in {_endings()}.")
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES and delimiter is None:
        raise DataError(
            f"Cannot tell what {path} is by its ending {suffix!r}; expected {_endings()}, or name "
            "its delimiter."
        )
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            if suffix in (".jsonl", ".ndjson"):
                table = _from_objects(_json_lines(lines, path), path)
            elif suffix == ".json":
                table = _from_objects(_json_list(lines.read(), path), path)
            elif suffix == ".txt" and delimiter is None:
                table = {"text": [line.rstrip("\r\n") for line in lines if line.strip()]}
            else:
                tabs = suffix in (".tsv", ".tab")
                mark = delimiter or ("\t" if tabs else ",")
                plain = tabs if quoted is None else not quoted
                with _long_fields():
                    reader = csv.reader(
                        lines, delimiter=mark, quoting=3 if plain else 0, strict=True
                    )
                    table = _from_rows(reader, columns, path)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text (byte {error.start}). Convert it, for example with iconv."
        ) from error
    if not table or not next(iter(table.values())):
        raise DataError(f"{path} holds no rows.")
    return table


def _from_rows(reader: Any, columns: Sequence[str] | None, path: Path) -> dict[str, list[Any]]:
    names = list(columns) if columns else None
    rows: list[list[str]] = []
    try:
        for row in reader:
            if not row:
                continue
            if names is None:
                names = [name.strip() for name in row]
                if len(set(names)) < len(names):
                    raise DataError(f"{path} has two columns of one name: {', '.join(names)}.")
                continue
            if len(row) != len(names):
                raise DataError(
                    f"Line {reader.line_num} of {path} has {len(row)} fields, but there are "
                    f"{len(names)} columns ({', '.join(names)}). Check its quotes and delimiters "
                    "(quoted=..., delimiter=...)."
                )
            rows.append(row)
    except csv.Error as error:
        raise DataError(f"Line {reader.line_num} of {path}: {error}.") from error
    return {name: [row[place] for row in rows] for place, name in enumerate(names or [])}


def _json_lines(lines: Iterable[str], path: Path) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"Line {number} of {path} is not JSON: {error}.") from error


def _json_list(text: str, path: Path) -> Iterator[tuple[int, Any]]:
    try:
        entries = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path} is not JSON: {error}. If it holds one object per line, end its name in .jsonl."
        ) from error
    if not isinstance(entries, list):
        raise DataError(f"{path} holds a {type(entries).__name__}; expected a list of objects.")
    yield from enumerate(entries, start=1)


def _from_objects(entries: Iterable[tuple[int, Any]], path: Path) -> dict[str, list[Any]]:
    table: dict[str, list[Any]] = {}
    for number, entry in entries:
        if not isinstance(entry, dict):
            raise DataError(f"Entry {number} of {path} is not an object but {entry!r:.60}.")
        if not table:
            table = {str(name): [] for name in entry}
        if missing := [name for name in table if name not in entry]:
            raise DataError(f"Entry {number} of {path} lacks {', '.join(missing)}.")
        for name, values in table.items():
            values.append(entry[name])
    return table


@contextmanager
def _long_fields() -> Iterator[None]:
    """Let csv read fields beyond 128 KiB; the limit is global, so restore it afterwards."""
    before = csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _endings() -> str:
    return ", ".join(sorted(SUFFIXES))
