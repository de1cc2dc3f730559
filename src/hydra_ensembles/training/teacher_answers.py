"""The teachers' answers to every view of every example: computed once, kept on disk."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._records import sha256_of, sha256_of_file, write_whole
from ..data import processes
from ..data.memory import Halving, telling_lost_workers
from ..data.processes import in_order
from ..data.progress import Progress
from ..errors import DataError, FormatError
from .teachers import Answer, Teacher

DIGEST = ".sha256"
"""Suffix of the file that holds a table's SHA-256."""


@dataclass(frozen=True)
class Part:
    """Examples that teachers answer: the data, or the outliers.

    Attributes:
        name: Used in the names of its files.
        count: Number of examples.
        views: Views per example.
        batches: Returns the batches of view v, in the order of the examples.
    """

    name: str
    count: int
    views: int
    batches: Callable[[int], Iterable[Any]]


class Answers:
    """Log-probabilities of T teachers by part, view and example.

    A teacher with several members (an ensemble) counts as that many teachers. With a folder the
    answers are files that are read row by row. One teacher is open at a time, and answers that are
    in the folder already are not computed again. A teacher with another number of classes than
    `classes` is refused at its first answer.
    """

    def __init__(
        self,
        teachers: Sequence[Teacher],
        parts: Sequence[Part],
        *,
        classes: int,
        folder: Path | None,
        progress: bool = True,
    ) -> None:
        self.classes = classes
        self.parts = {part.name: part for part in parts}
        self._tables: dict[tuple[str, int], list[np.ndarray]] = {
            (part.name, view): [] for part in parts for view in range(part.views)
        }
        for teacher in teachers:  # tables first: they are known before the others have answered
            if teacher.table is not None:
                check_classes(teacher.name, teacher.table.shape[2], classes)
        for place, teacher in enumerate(teachers):
            tables = _answers_of(teacher, place, parts, classes, folder, progress)
            for key, table in tables.items():
                self._tables[key].append(table)
        self.teachers = sum(table.shape[1] for table in next(iter(self._tables.values())))

    def rows(self, part: str, view: int, examples: Tensor) -> Tensor:
        """Return the answers to one view of the given examples, `[example, teacher, class]`."""
        index = examples.numpy()
        tables = [np.asarray(table[index]) for table in self._tables[part, view]]
        return torch.from_numpy(np.concatenate(tables, 1))


def check_classes(name: str, found: int, expected: int) -> None:
    """Raise when a teacher's classes are not as many as those of the model that learns."""
    if found != expected:
        raise DataError(
            f"{name} answers with {found} classes, but the model to teach has {expected}. Pass "
            "teachers of the same classes in the same order, or give the model another classifier."
        )


def _answers_of(
    teacher: Teacher,
    place: int,
    parts: Sequence[Part],
    classes: int,
    folder: Path | None,
    progress: bool,
) -> dict[tuple[str, int], np.ndarray]:
    """Return one teacher's tables `[example, member, class]`, opening it only if one is missing."""
    if teacher.table is not None:
        (part,) = parts  # a table covers the data itself: no other view, no outliers
        if len(teacher.table) != part.count:
            raise DataError(
                f"The table of {teacher.name} has {len(teacher.table)} rows, but the data has "
                f"{part.count} examples. Give one row per example, in the data's order."
            )
        return {(part.name, 0): teacher.table}
    wanted = {(part.name, view): part for part in parts for view in range(part.views)}
    paths = {
        key: None if folder is None else folder / f"teacher-{place}-{key[0]}-{key[1]}.npy"
        for key in wanted
    }
    tables: dict[tuple[str, int], np.ndarray] = {}
    places = list(wanted)
    absent: list[int] = processes.on_first(
        lambda: [i for i, key in enumerate(places) if not _is_file(paths[key])]
    )
    missing = [places[i] for i in absent]
    if missing:
        assert teacher.open is not None
        with teacher.open() as answer:
            for key in missing:
                views = wanted[key].views
                view = f", view {key[1] + 1} of {views}" if views > 1 else ""
                label = f"{teacher.name} answers {key[0]}{view}" if progress else ""
                tables[key] = _table(answer, wanted[key], key[1], label, teacher.name, classes)
                path = paths[key]
                if path is not None and processes.is_first():
                    _keep(path, tables[key])
    processes.wait()
    for key, path in paths.items():
        if path is not None and (path.exists() or key not in tables):
            tables[key] = read_answers(path)
    return tables


def _is_file(path: Path | None) -> bool:
    return path is not None and path.exists()


def _keep(path: Path, table: np.ndarray) -> None:
    """Write a table's SHA-256, then the table, so that no table lacks its digest."""
    content = io.BytesIO()
    np.save(content, table, allow_pickle=False)
    write_whole(path.with_suffix(DIGEST), sha256_of(content.getvalue()) + "\n")
    write_whole(path, content.getvalue())


def read_answers(path: Path) -> np.ndarray:
    """Open a teacher's saved answers as a memory map; raise when the file is damaged."""
    advice = "Delete it: the teacher will be asked again."
    digest = path.with_suffix(DIGEST)
    if digest.exists() and digest.read_bytes().strip() != sha256_of_file(path).encode():
        raise FormatError(
            f"{path} is damaged: its SHA-256 is not the one in {digest.name}. {advice}"
        )
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise FormatError(f"{path} is not a table of answers ({error}). {advice}") from None


def _table(
    answer: Answer, part: Part, view: int, label: str, name: str, classes: int
) -> np.ndarray:
    halving = Halving(part.name)

    def work(index: int, batch: Any) -> dict[str, Tensor]:
        rows = torch.cat([rows for _, rows in halving(answer, batch)])
        check_classes(name, rows.shape[-1], classes)
        if bool(rows.isnan().any()):
            raise DataError(
                f"The answers of {name} to the {part.name} hold NaN. Check its weights."
            )
        return {"answer": rows}

    answers = in_order(part.batches(view), work, name=f"{part.name} {view}")
    parts = []
    with Progress(label, part.count, enabled=bool(label), unit="examples") as bar:
        for result in telling_lost_workers(answers, part.name):
            parts.append(result["answer"])
            bar.update(len(parts[-1]))
    table = torch.cat(parts).numpy()
    if len(table) != part.count:
        raise DataError(
            f"{name} gave {len(table)} answers for {part.count} examples ({part.name})."
        )
    return table


def assign(teachers: int, members: int) -> Tensor:
    """Return each member's share of each teacher, `[member, teacher]`; rows sum to one.

    One teacher per member when there are as many. With more teachers, member m learns from the
    mean of teachers m, m + M, m + 2 M, ...; with fewer, from teacher m mod T.
    """
    shares = torch.zeros(members, teachers)
    for number in range(max(teachers, members)):
        shares[number % members, number % teachers] = 1.0
    return shares / shares.sum(1, keepdim=True)
