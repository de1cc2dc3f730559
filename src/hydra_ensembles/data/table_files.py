"""Tables in text files: CSV, TSV, JSON lines and plain lines, as columns."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import DataError

SUFFIXES = frozenset({".csv", ".tsv", ".tab", ".jsonl", ".ndjson", ".json", ".txt"})
NOT_UTF8 = "It is not UTF-8 text. Convert it, for example with iconv."


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
    unit = "Entry" if path.suffix.lower() == ".json" else "Line"
    table: dict[str, list[Any]] = {}
    for number, row in read_rows(path, columns=columns, delimiter=delimiter, quoted=quoted):
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
    file: str | Path,
    *,
    columns: Sequence[str] | None = None,
    delimiter: str | None = None,
    quoted: bool | None = None,
) -> Iterator[tuple[int, dict[str, Any] | DataError | None]]:
    """Yield the rows of a table, each with the number of its first line (of its entry, in JSON).

    A row that cannot be read is an error in its place, a blank line is None, and the others go on.
    The arguments are those of `read_table`.
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
    # bytes that are not UTF-8 become lone surrogates, which are looked for row by row
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:
        if suffix == ".json":
            for number, entry in enumerate(_json_list(lines.read(), path), start=1):
                yield number, _object(entry)
        elif suffix in (".jsonl", ".ndjson") or (suffix == ".txt" and delimiter is None):
            for number, line in enumerate(lines, start=1):
                line = line.rstrip("\r\n")
                if not line.strip():
                    yield number, None
                elif not _is_utf8(line):
                    yield number, DataError(NOT_UTF8)
                else:
                    yield number, {"text": line} if suffix == ".txt" else _json_object(line)
        else:
            tabs = suffix in (".tsv", ".tab")
            mark = delimiter or ("\t" if tabs else ",")
            plain = tabs if quoted is None else not quoted
            with _long_fields():
                reader = csv.reader(lines, delimiter=mark, quoting=3 if plain else 0, strict=True)
                yield from _rows(reader, columns, path)


def _rows(
    reader: Any, columns: Sequence[str] | None, path: Path
) -> Iterator[tuple[int, dict[str, Any] | DataError | None]]:
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
            yield number, DataError(f"{error}{where}. Check its quotes (quoted=...).")
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
            yield (
                number,
                DataError(
                    f"It has {len(row)} field{'s' * (len(row) != 1)}, but there are {len(names)} "
                    f"columns ({', '.join(names)}). Check its quotes and delimiters (quoted=..., "
                    "delimiter=...)."
                ),
            )
        else:
            yield number, dict(zip(names, row, strict=True))


def _json_list(text: str, path: Path) -> list[Any]:
    try:
        if not _is_utf8(text):
            raise DataError(f"{path}: {NOT_UTF8}")
        entries = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(
            f"{path} is not JSON: {error}. If it holds one object per line, end its name in .jsonl."
        ) from error
    if not isinstance(entries, list):
        raise DataError(f"{path} holds a {type(entries).__name__}; expected a list of objects.")
    return entries


def _json_object(line: str) -> dict[str, Any] | DataError:
    try:
        return _object(json.loads(line))
    except (ValueError, RecursionError) as error:
        return DataError(f"It is not JSON: {error}.")


def _object(entry: Any) -> dict[str, Any] | DataError:
    return (
        entry if isinstance(entry, dict) else DataError(f"It is not an object but {entry!r:.60}.")
    )


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


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
