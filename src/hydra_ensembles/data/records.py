"""Read what `predict` is given, record by record; an error in one does not touch the others."""

from __future__ import annotations

import io
import json
import queue
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import DataError
from ..prediction import FIELDS
from ..tasks import Task
from . import processes
from .image_data import SUFFIXES
from .task_data import CONLL, TOKEN_COLUMNS, read_conll
from .text_files import PAIR_COLUMNS, TEXT_COLUMNS, read_rows

MOST_BYTES = 2**20
"""Longer lines are refused: no host reads a text of a million letters."""

ANSWERED = ("probabilities", "evidence", "error", "skipped", "line")
"""Keys of an answer beside its fields; an input's own values under them do not pass into it."""


@dataclass(frozen=True)
class Form:
    """What an input is, and where it stands in tables and JSON objects.

    Attributes:
        text: Whether the model reads texts, not images.
        columns: Names of one text or of two that are read together, the first that are there.
        named: Names under which two texts are handed on; None for one text.
        fields: Fields of the answers.
    """

    text: bool
    columns: tuple[tuple[str, ...], ...] = ()
    named: tuple[str, str] = ("text", "text_pair")
    fields: Collection[str] = tuple(FIELDS)

    @classmethod
    def of(
        cls, task: Task | None, *, text: bool, column: str | None = None, pair: str | None = None
    ) -> Form:
        """Return how a model of a task is asked.

        Args:
            task: What the model does; by default it has one class per input.
            text: Whether it reads texts.
            column, pair: Names of the texts in tables and JSON objects; by default the usual ones.
        """
        fields = tuple(FIELDS if task is None else task.prediction.FIELDS)
        if not text:
            return cls(False, (("file",),), fields=fields)
        if "answer" in fields:
            return cls(True, (("question", "context"),), ("question", "context"), fields)
        if column is not None:
            return cls(True, ((column,) if pair is None else (column, pair),), fields=fields)
        single = tuple((name,) for name in TEXT_COLUMNS)
        if task is not None and task.by_token:
            return cls(True, (*single, *((name,) for name in TOKEN_COLUMNS)), fields=fields)
        return cls(True, (*PAIR_COLUMNS, *single), fields=fields)

    @property
    def usual(self) -> tuple[str, ...]:
        """The names to say when none is there, and the ones under which a line is a text."""
        single = next((names for names in self.columns if len(names) == 1), self.columns[0])
        return single


@dataclass
class Record:
    """One input.

    Attributes:
        value: A text, two texts by name, or the path of an image; None when there is none.
        echo: What comes back in the answer: the file, the line, the input's own fields.
        error: What is wrong with it, or None.
        skipped: Why it needs no answer, or None.
    """

    value: str | dict[str, str] | None = None
    echo: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    skipped: str | None = None


def read_records(files: Iterable[str], form: Form) -> Iterator[Record]:
    """Yield the records of files, folders and standard input (`-`), in order.

    Args:
        files: As the command line has them.
        form: What an input is.
    """
    for file in files:
        if file == "-":
            lines = getattr(sys.stdin, "buffer", None)  # a program may have put a text there
            lines = io.BytesIO(sys.stdin.read().encode()) if lines is None else lines
            yield from records_of_lines(lines, form)
        elif form.text:
            yield from _of_text_file(Path(file), form)
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


def _of_text_file(path: Path, form: Form) -> Iterator[Record]:
    """Yield the texts of a file; one that cannot be read is one record with an error."""
    place, suffix = {"file": str(path)}, path.suffix.lower()
    try:
        if suffix in (".jsonl", ".ndjson", ".txt"):
            with path.open("rb") as lines:
                objects = suffix != ".txt"
                yield from records_of_lines(lines, form, objects=objects, place=place)
            return
        if suffix in CONLL:
            for number, words in enumerate(read_conll(path)["tokens"], start=1):
                yield _record({"tokens": words}, form, {**place, "sentence": number})
            return
        for number, row in read_rows(path):
            known = isinstance(row, dict) and any(set(names) <= set(row) for names in form.columns)
            if isinstance(row, dict) and suffix != ".json" and not known:
                wanted = " and ".join(form.columns[0]) if len(form.columns) == 1 else "text"
                raise DataError(f"{path} has no {wanted} column; name one of {', '.join(row)}.")
            yield _record(row, form, {**place, "line": number})
    except (OSError, DataError) as error:
        yield Record(echo=place, error=str(error))


def records_of_lines(
    lines: BinaryIO,
    form: Form,
    *,
    objects: bool | None = None,
    place: Mapping[str, Any] | None = None,
) -> Iterator[Record]:
    """Yield a record for every line: a text, a path, or a JSON object.

    Args:
        lines: Bytes; each line is decoded separately.
        form: What an input is; the text of a line that is not an object.
        objects: Whether every line is a JSON object; by default those that start with a brace.
        place: What every answer says of where its line comes from.
    """
    name = form.usual[0]
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
        given: Any = {name: content}
        if not content.strip():
            given = None
        elif objects or (objects is None and content.lstrip().startswith("{")):
            try:
                given = json.loads(content, parse_constant=_no_number)
            except (ValueError, RecursionError) as error:
                given = DataError(f"expected a JSON object with {name!r} ({error})")
            else:
                if not isinstance(given, dict):
                    problem = f"expected a JSON object with {name!r}, found {_kind(given)}"
                    given = DataError(problem)
        yield _record(given, form, here)


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not a number in JSON")


def _record(
    given: dict[str, Any] | DataError | None, form: Form, place: Mapping[str, Any]
) -> Record:
    """Check one input (an error: a row that cannot be read; None: a blank line)."""
    if given is None:
        return Record(echo=dict(place), skipped="a blank line")
    if isinstance(given, DataError):
        return Record(echo=dict(place), error=str(given))
    taken = {*form.fields, *ANSWERED}
    echo = {**place, **{name: value for name, value in given.items() if name not in taken}}
    names = next((names for names in form.columns if set(names) <= set(given)), None)
    if names is None:
        wanted = " and ".join(map(repr, form.usual))
        return Record(echo=echo, error=f"expected a JSON object with {wanted}")
    texts = []
    for name in names:
        value = given[name]
        if name in TOKEN_COLUMNS and isinstance(value, list):
            value = " ".join(map(str, value))
        if not isinstance(value, str):
            return Record(echo=echo, error=f"{name!r} is {_kind(value)}, expected a string")
        if not value.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in value):
            return Record(echo=echo, error=f"{name!r} is not valid Unicode")
        texts.append(value)
    single = len(texts) == 1
    return Record(texts[0] if single else dict(zip(form.named, texts, strict=True)), echo)


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
