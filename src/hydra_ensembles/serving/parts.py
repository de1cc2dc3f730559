"""Bulk prediction in parts: Parquet in, Parquet out, every row exactly once, resumable.

The rows of the input files are numbered and cut into parts of equal size. A part's answers are one
file, written beside its place and renamed when it is whole. So a part is there or not, whoever
wrote it and how often: a killed worker and two workers on one part do no harm. A run holds the
folder; a second one meanwhile is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._records import PARTIAL, check_same_run, sha256_of, write_whole
from ..errors import DataError, FormatError, MissingDependencyError

PLAN, DONE = "plan.json", "done.json"
ROW = "row"
"""The column that numbers the rows of all input files."""
_MARK = b"hydra_part"


@dataclass(frozen=True)
class Part:
    """Some rows of an input file.

    Attributes:
        number: Of the part.
        file: The input.
        start: Its first row in the file.
        rows: How many.
        first: Number of its first row among all rows.
    """

    number: int
    file: str
    start: int
    rows: int
    first: int


@dataclass(frozen=True)
class Plan:
    """Which rows are in which part, and what the answers depend on.

    Attributes:
        parts: In order.
        settings: Inputs, model and options: plain data.
    """

    parts: tuple[Part, ...]
    settings: dict[str, Any]

    @property
    def rows(self) -> int:
        """All rows."""
        return sum(part.rows for part in self.parts)

    def mark(self, part: Part) -> bytes:
        """Return what a part's file carries: it belongs to this plan and is whole."""
        key = sha256_of(json.dumps(self.settings, sort_keys=True).encode())
        return json.dumps({"plan": key, "part": part.number, "rows": part.rows}).encode()

    def path(self, folder: Path, part: Part) -> Path:
        """Return where a part's answers go."""
        return folder / f"part-{part.number:06d}-of-{len(self.parts):06d}.parquet"

    def is_done(self, folder: Path, part: Part) -> bool:
        """Tell whether a part's file is there, whole and of this plan."""
        parquet = _parquet()
        path = self.path(folder, part)
        if not path.exists():
            return False
        try:
            found = parquet.ParquetFile(path)
            held = (found.schema_arrow.metadata or {}).get(_MARK)
            return held == self.mark(part) and found.metadata.num_rows == part.rows
        except (OSError, ValueError):  # a damaged file is made again
            return False

    def missing(self, folder: Path) -> list[Part]:
        """Return the parts that are still to do."""
        return [part for part in self.parts if not self.is_done(folder, part)]

    def begin(self, folder: Path) -> None:
        """Write the plan into the folder; raise if another one began there."""
        path = folder / PLAN
        if path.exists():
            try:
                saved = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise FormatError(f"{path} is not a plan ({error}). Give another folder.") from None
            check_same_run(path, saved, self.settings)
        else:
            write_whole(path, json.dumps(self.settings, indent=1))

    def finish(self, folder: Path) -> dict[str, Any]:
        """Check that every row is answered once; write and return the totals."""
        left = self.missing(folder)
        if left:
            raise DataError(
                f"{len(left)} of {len(self.parts)} parts are missing in {folder}. Run the same "
                "command again: only these are computed."
            )
        totals = {"rows": self.rows, "parts": len(self.parts)}
        write_whole(folder / DONE, json.dumps(totals))
        return totals


def plan(
    sources: Sequence[str | os.PathLike[str]],
    *,
    rows_per_part: int = 16384,
    settings: Mapping[str, Any] | None = None,
) -> Plan:
    """Cut the rows of Parquet files, or of folders of them, into parts.

    Args:
        sources: Files and folders; a folder's files are taken in the order of their names.
        rows_per_part: Rows of a part; the last of a file may have fewer.
        settings: What the answers depend on besides the inputs: model and options.
    """
    if rows_per_part < 1:
        raise ValueError(f"rows_per_part is {rows_per_part}; expected 1 or more.")
    parts: list[Part] = []
    inputs = []
    first = 0
    for file in _files(sources):
        rows, footer = _look(file)
        inputs.append({"file": file.name, "rows": rows, "footer": footer})
        for start in range(0, rows, rows_per_part):
            size = min(rows_per_part, rows - start)
            parts.append(Part(len(parts), str(file), start, size, first + start))
        first += rows
    if not parts:
        raise DataError("There is nothing to predict: the Parquet files hold no row.")
    known = {"rows_per_part": rows_per_part, "inputs": inputs, **(settings or {})}
    return Plan(tuple(parts), json.loads(json.dumps(known)))


def is_parquet(source: str | os.PathLike[str]) -> bool:
    """Tell whether a source is a Parquet file, or a folder that holds some."""
    path = Path(source)
    return path.suffix == ".parquet" or (path.is_dir() and any(path.glob("*.parquet")))


def write_part(
    work: Plan,
    part: Part,
    folder: Path,
    answer: Any,
    *,
    keep: Sequence[str] | None = None,
) -> None:
    """Answer the rows of a part and write them, whole or not at all.

    Args:
        work: The plan.
        part: Of it.
        folder: Where the answers go.
        answer: A `RowAnswers`.
        keep: Columns of the input that come along; by default all but the one that is read, unless
            that is a column of texts.
    """
    import pyarrow

    table = _read(part)
    read = answer.input_column(table.column_names)
    found = answer({read: table[read].to_pylist()})
    if keep is None:
        heavy = not pyarrow.types.is_string(table.schema.field(read).type)
        keep = [name for name in table.column_names if not (heavy and name == read)]
    numbers = pyarrow.array(range(part.first, part.first + part.rows), pyarrow.int64())
    columns = {ROW: numbers, **{name: table[name] for name in keep if name != ROW}}
    columns |= {name: _column(name, values) for name, values in found.items()}
    result = pyarrow.table(columns).replace_schema_metadata({_MARK: work.mark(part)})
    content = pyarrow.BufferOutputStream()
    _parquet().write_table(result, content)
    write_whole(work.path(folder, part), content.getvalue().to_pybytes())


def clean(folder: Path) -> None:
    """Remove what killed workers left half written."""
    for path in folder.glob(f".*{PARTIAL}"):
        path.unlink(missing_ok=True)


def _column(name: str, values: list[Any]) -> Any:
    """Return a column whose type does not depend on the rows of a part."""
    import pyarrow

    kinds = {
        "label": pyarrow.string(),
        "decision": pyarrow.string(),
        "error": pyarrow.string(),
        "class": pyarrow.int64(),
        "why": pyarrow.string(),
        "probabilities": pyarrow.list_(pyarrow.float32()),
    }
    kind = next((k for end, k in kinds.items() if name.endswith(end)), pyarrow.float32())
    return pyarrow.array(values, kind)


def _read(part: Part) -> Any:
    """Read the rows of a part: the row groups that hold them, then a slice."""
    file = _parquet().ParquetFile(part.file)
    groups, start, first = [], 0, None
    for number in range(file.metadata.num_row_groups):
        end = start + file.metadata.row_group(number).num_rows
        if start < part.start + part.rows and end > part.start:
            groups.append(number)
            first = start if first is None else first
        start = end
    table = file.read_row_groups(groups).slice(part.start - (first or 0), part.rows)
    if table.num_rows != part.rows:
        raise DataError(
            f"{part.file} holds {start} rows, fewer than planned: it was changed meanwhile. Give "
            "the same files, or another output folder."
        )
    return table


def _files(sources: Sequence[str | os.PathLike[str]]) -> list[Path]:
    files: list[Path] = []
    for source in sources:
        path = Path(source).expanduser().resolve()
        found = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
        if not found or not all(file.is_file() for file in found):
            raise DataError(f"There is no Parquet file {source}, and no folder with some.")
        files += found
    return files


def _look(file: Path) -> tuple[int, str]:
    """Return a file's number of rows and a hash of its footer, which names all its content."""
    try:
        rows = _parquet().ParquetFile(file).metadata.num_rows
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read as Parquet: {error}") from error
    with file.open("rb") as content:
        content.seek(-8, os.SEEK_END)
        length = int.from_bytes(content.read(4), "little")
        content.seek(-8 - length, os.SEEK_END)
        return rows, hashlib.sha256(content.read(length)).hexdigest()


def _parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise MissingDependencyError(
            "Parquet files need pyarrow: pip install 'hydra-ensembles[ray]'."
        ) from error
    return pyarrow.parquet
