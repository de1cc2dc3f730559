"""Read what `predict` is given, record by record; what is wrong with one stays with it."""

from __future__ import annotations

import io
import json
import queue
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import DataError

MOST_BYTES = 2**20
"""A longer line is refused: no host reads a text of a million letters."""

ANSWERED = frozenset(
    (
        *("label", "class", "probability", "probabilities", "uncertainty", "score", "novelty"),
        *("novelty_score", "decision", "abstain", "why", "error", "line"),
    )
)
"""Keys of an answer; an input's own values under these names do not pass into it."""

_LINES = (".jsonl", ".ndjson", ".txt")


@dataclass
class Record:
    """One input.

    Attributes:
        value: A text, or the path of a picture; None when there is none.
        echo: What comes back in the answer: the input itself, an id.
        error: What is wrong with it, or None.
    """

    value: str | None = None
    echo: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


def read_records(files: Iterable[str], *, text: bool, column: str | None) -> Iterator[Record]:
    """Yield the records of files, folders and standard input (`-`), in order.

    Args:
        files: As the command line has them.
        text: Whether the model reads texts, not pictures.
        column: The name of the texts in tables and JSON objects; by default the usual ones.
    """
    for file in files:
        if file == "-":
            yield from records_of_lines(_standard_input(), text=text, column=column)
        elif text:
            yield from _of_text_file(Path(file), column)
        else:
            yield from _of_pictures(file)


def _of_pictures(file: str) -> Iterator[Record]:
    from ..data.folders import SUFFIXES

    path, names = Path(file), [file]
    try:
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES)
            names = [str(p) for p in found]
    except OSError as error:
        yield Record(echo={"file": file}, error=f"cannot list {file}: {error}")
        return
    for name in names:
        yield Record(name, {"file": name})


def _of_text_file(path: Path, column: str | None) -> Iterator[Record]:
    """Yield the texts of a file; one that cannot be read is one record with an error."""
    from ..data.table_files import read_table
    from ..data.texts import TEXT_COLUMNS

    try:
        if path.suffix.lower() in _LINES:
            with path.open("rb") as lines:
                objects = path.suffix.lower() != ".txt"
                yield from records_of_lines(lines, text=True, column=column, objects=objects)
            return
        table = read_table(path)
        name = column or next((c for c in TEXT_COLUMNS if c in table), None)
        if name not in table:
            raise DataError(f"{path} has no text column; name one of {', '.join(table)}.")
        values = table[name]
    except (OSError, DataError) as error:
        yield Record(echo={"file": str(path)}, error=str(error))
        return
    for row, value in enumerate(values, start=1):
        yield _record({"text": value}, "text", {"line": row})


def records_of_lines(
    lines: BinaryIO, *, text: bool, column: str | None = None, objects: bool = True
) -> Iterator[Record]:
    """Yield a record for every line that is not blank: a text, a path, or a JSON object.

    Args:
        lines: Bytes; every line is decoded by itself.
        text: Whether the model reads texts, not pictures.
        column: The key of the texts in JSON objects.
        objects: Whether a line that starts with a brace is a JSON object.
    """
    key = (column or "text") if text else "file"
    number = 0
    while line := lines.readline(MOST_BYTES + 1):
        number += 1
        if len(line) > MOST_BYTES and not line.endswith(b"\n"):
            while (rest := lines.readline(MOST_BYTES)) and not rest.endswith(b"\n"):
                pass
            yield Record(error=f"longer than {MOST_BYTES} bytes", echo={"line": number})
            continue
        try:
            content = line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            yield Record(error=f"not UTF-8 ({error})", echo={"line": number})
            continue
        content = content.removeprefix("\ufeff") if number == 1 else content
        if not content.strip():
            continue
        if not (objects and content.lstrip().startswith("{")):
            yield _record({key: content}, key, {"line": number})
            continue
        try:
            given = json.loads(content, parse_constant=_no_number)
        except (ValueError, RecursionError) as error:
            problem = f"expected a JSON object with {key!r} ({error})"
            yield Record(error=problem, echo={"line": number})
            continue
        yield _record(given, key, {"line": number})


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number in JSON")


def _record(given: dict[str, Any], key: str, place: dict[str, Any]) -> Record:
    """Check one input; other fields, an id say, come back in its answer."""
    echo = {name: value for name, value in given.items() if name not in ANSWERED}
    value = given.get(key)
    if key not in given:
        problem = f"expected a JSON object with {key!r}"
    elif not isinstance(value, str):
        problem = f"{key!r} is {_kind(value)}, expected a string"
    elif not value.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in value):
        problem = f"{key!r} is not valid Unicode"
    else:
        return Record(value, echo)
    return Record(None, {**echo, **place}, problem)


def _kind(value: Any) -> str:
    names = {type(None): "null", dict: "an object", list: "a list", bool: "true or false"}
    return names.get(type(value), "a number")


def _standard_input() -> BinaryIO:
    stream = getattr(sys.stdin, "buffer", None)  # none when the text was put there by a program
    return io.BytesIO(sys.stdin.read().encode()) if stream is None else stream


def batches(records: Iterable[Record], size: int, *, idle: float = 0.05) -> Iterator[list[Record]]:
    """Group records; a batch that is not full goes on when no record came for `idle` seconds.

    A thread reads ahead, so that an answer follows its line whether or not another one comes.
    """
    waiting: queue.Queue[Record | BaseException | None] = queue.Queue(maxsize=4 * size)

    def read() -> None:
        try:
            for record in records:
                waiting.put(record)
            waiting.put(None)
        except BaseException as error:  # raised again where the batches are used
            waiting.put(error)

    threading.Thread(target=read, daemon=True).start()
    batch: list[Record] = []
    while True:
        try:
            got = waiting.get(timeout=idle) if batch else waiting.get()
        except queue.Empty:
            yield batch
            batch = []
            continue
        if isinstance(got, Record):
            batch.append(got)
        if batch and (len(batch) == size or not isinstance(got, Record)):
            yield batch
            batch = []
        if isinstance(got, BaseException):
            raise got
        if got is None:
            return
