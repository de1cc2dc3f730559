"""Read what `predict` is given, record by record; an error in one does not touch the others."""

from __future__ import annotations

import io
import json
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import DataError
from ..prediction import FIELDS
from . import processes
from .image_data import SUFFIXES
from .text_files import TEXT_COLUMNS, read_rows

MOST_BYTES = 2**20
"""Longer lines are refused: no host reads a text of a million letters."""

ANSWERED = frozenset((*FIELDS, "probabilities", "evidence", "error", "skipped", "line"))
"""Keys of an answer; an input's own values under these names do not pass into it."""


@dataclass
class Record:
    """One input.

    Attributes:
        value: A text, or the path of an image; None when there is none.
        echo: What comes back in the answer: the file, the line, the input's own fields.
        error: What is wrong with it, or None.
        skipped: Why it needs no answer, or None.
    """

    value: str | None = None
    echo: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    skipped: str | None = None


def read_records(files: Iterable[str], *, text: bool, column: str | None) -> Iterator[Record]:
    """Yield the records of files, folders and standard input (`-`), in order.

    Args:
        files: As the command line has them.
        text: Whether the model reads texts, not images.
        column: The name of the texts in tables and JSON objects; by default the usual ones.
    """
    for file in files:
        if file == "-":
            lines = getattr(sys.stdin, "buffer", None)  # a program may have put a text there
            lines = io.BytesIO(sys.stdin.read().encode()) if lines is None else lines
            yield from records_of_lines(lines, text=text, column=column)
        elif text:
            yield from _of_text_file(Path(file), column)
        else:
            yield from _of_images(file)


def _of_images(file: str) -> Iterator[Record]:
    """Yield a file, or the files of a folder; those that are not images are skipped."""
    path = Path(file)
    try:
        inside = sorted(p for p in path.rglob("*") if not p.is_dir()) if path.is_dir() else None
    except OSError as error:
        yield Record(echo={"file": file}, error=f"cannot list {file}: {error}")
        return
    for name in [path] if inside is None else inside:
        echo = {"file": file if inside is None else str(name)}
        if inside is None or name.suffix.lower() in SUFFIXES:
            yield Record(echo["file"], echo)
        else:
            yield Record(echo=echo, skipped=f"not an image by its ending {name.suffix!r}")


def _of_text_file(path: Path, column: str | None) -> Iterator[Record]:
    """Yield the texts of a file; one that cannot be read is one record with an error."""
    place, keys, suffix = {"file": str(path)}, _keys(True, column), path.suffix.lower()
    try:
        if suffix in (".jsonl", ".ndjson", ".txt"):
            with path.open("rb") as lines:
                objects = suffix != ".txt"
                yield from records_of_lines(
                    lines, text=True, column=column, objects=objects, place=place
                )
            return
        for number, row in read_rows(path):
            if isinstance(row, dict) and suffix != ".json" and not set(keys) & set(row):
                raise DataError(f"{path} has no text column; name one of {', '.join(row)}.")
            yield _record(row, keys, {**place, "line": number})
    except (OSError, DataError) as error:
        yield Record(echo=place, error=str(error))


def records_of_lines(
    lines: BinaryIO,
    *,
    text: bool,
    column: str | None = None,
    objects: bool | None = None,
    place: Mapping[str, Any] | None = None,
) -> Iterator[Record]:
    """Yield a record for every line: a text, a path, or a JSON object.

    Args:
        lines: Bytes; each line is decoded separately.
        text: Whether the model reads texts, not images.
        column: The key of the texts in JSON objects.
        objects: Whether every line is a JSON object; by default those that start with a brace.
        place: What every answer says of where its line comes from.
    """
    keys = _keys(text, column)
    number = 0
    while line := lines.readline(MOST_BYTES + 1):
        number += 1
        here = {**(place or {}), "line": number}
        if len(line) > MOST_BYTES and not line.endswith(b"\n"):
            while (rest := lines.readline(MOST_BYTES)) and not rest.endswith(b"\n"):
                pass
            yield Record(error=f"longer than {MOST_BYTES} bytes", echo=here)
            continue
        try:
            content = line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            yield Record(error=f"not UTF-8 ({error})", echo=here)
            continue
        content = content.removeprefix("\ufeff") if number == 1 else content
        given: Any = {keys[0]: content}
        if not content.strip():
            given = None
        elif objects or (objects is None and content.lstrip().startswith("{")):
            try:
                given = json.loads(content, parse_constant=_no_number)
            except (ValueError, RecursionError) as error:
                given = DataError(f"expected a JSON object with {keys[0]!r} ({error})")
            else:
                if not isinstance(given, dict):
                    problem = f"expected a JSON object with {keys[0]!r}, found {_kind(given)}"
                    given = DataError(problem)
        yield _record(given, keys, here)


def _keys(text: bool, column: str | None) -> Sequence[str]:
    """Return the names under which an input is looked for."""
    return ("file",) if not text else TEXT_COLUMNS if column is None else (column,)


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not a number in JSON")


def _record(
    given: dict[str, Any] | DataError | None, keys: Sequence[str], place: Mapping[str, Any]
) -> Record:
    """Check one input (an error: a row that cannot be read; None: a blank line)."""
    if given is None:
        return Record(echo=dict(place), skipped="a blank line")
    if isinstance(given, DataError):
        return Record(echo=dict(place), error=str(given))
    own = {name: value for name, value in given.items() if name not in ANSWERED}
    echo = {**place, **own}
    key = next((name for name in keys if name in given), None)
    if key is None:
        return Record(echo=echo, error=f"expected a JSON object with {keys[0]!r}")
    value = given[key]
    if not isinstance(value, str):
        return Record(echo=echo, error=f"{key!r} is {_kind(value)}, expected a string")
    if not value.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in value):
        return Record(echo=echo, error=f"{key!r} is not valid Unicode")
    return Record(value, echo)


def _kind(value: Any) -> str:
    names = {type(None): "null", dict: "an object", list: "a list", bool: "true or false"}
    return {**names, str: "a string"}.get(type(value), "a number")


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


def shared_answers(
    records: Iterable[Record], answer: Callable[[list[Record]], list[Any]], size: int
) -> Iterator[list[Any]]:
    """Yield the answers to batches of records, in order, when several processes share the work.

    The first process reads the records and gets the answers; the others get none.
    """
    several = processes.size()
    groups = batches(records, size * several) if processes.is_first() else iter(())
    while True:
        group = next(groups, None)
        told = None if group is None else [asdict(record) for record in group]
        shared = processes.exchange(told)[0]
        if shared is None:
            return
        start = size * processes.rank()
        mine = [Record(**plain) for plain in shared[start : start + size]]
        answers = processes.exchange(answer(mine) if mine else [])
        if processes.is_first():
            yield [one for part in answers for one in part]
