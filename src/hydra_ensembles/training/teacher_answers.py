"""The teachers' answers to every view of every example: computed once, kept on disk."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
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
from .views import ExampleSet

DIGEST = ".sha256"
"""Suffix of the file that holds a table's SHA-256."""


class TeacherLogits:
    """Log-probabilities of T teachers by set, view and example.

    A teacher with several members (an ensemble) counts as that many teachers. With a folder the
    answers are files that are read row by row. One teacher is open at a time, and answers that are
    in the folder already are not computed again. A teacher with another number of classes than
    `classes` is refused at its first answer.
    """

    def __init__(
        self,
        teachers: Sequence[Teacher],
        sets: Iterable[ExampleSet],
        *,
        classes: int,
        folder: Path | None,
        progress: bool = True,
    ) -> None:
        self.classes, self.folder, self.progress = classes, folder, progress
        self._tables: dict[tuple[str, int], list[np.ndarray]] = {}
        wanted = {
            (examples.name, view): examples for examples in sets for view in range(examples.views)
        }
        for teacher in teachers:  # tables first: they are known before the others have answered
            if teacher.table is not None:
                self._check_classes(teacher.name, teacher.table.shape[2])
        for place, teacher in enumerate(teachers):
            for key, table in self._answers_of(teacher, place, wanted).items():
                self._tables.setdefault(key, []).append(table)
        self.teachers = sum(table.shape[1] for table in next(iter(self._tables.values())))

    def rows(self, name: str, view: int, examples: Tensor) -> Tensor:
        """Return the answers to one view of a set's examples, `[example, teacher, class]`."""
        index = examples.numpy()
        tables = [np.asarray(table[index]) for table in self._tables[name, view]]
        return torch.from_numpy(np.concatenate(tables, 1))

    def _check_classes(self, name: str, found: int) -> None:
        if found != self.classes:
            raise DataError(
                f"{name} answers with {found} classes, but the model to teach has {self.classes}. "
                "Pass teachers of the same classes in the same order, or give the model another "
                "classifier."
            )

    def _answers_of(
        self, teacher: Teacher, place: int, wanted: Mapping[tuple[str, int], ExampleSet]
    ) -> dict[tuple[str, int], np.ndarray]:
        """Return a teacher's tables `[example, member, class]`; open it only if one is missing."""
        if teacher.table is not None:
            ((key, examples),) = wanted.items()  # a table covers the data itself, not other views
            if len(teacher.table) != examples.count:
                raise DataError(
                    f"The table of {teacher.name} has {len(teacher.table)} rows, but the data has "
                    f"{examples.count} examples. Give one row per example, in the data's order."
                )
            return {key: teacher.table}
        paths = {
            (name, view): self.folder / f"teacher-{place}-{name}-{view}.npy"
            for name, view in wanted
            if self.folder is not None
        }
        absent: list[int] = processes.on_first(
            lambda: [
                i for i, key in enumerate(wanted) if key not in paths or not paths[key].exists()
            ]
        )
        keys, tables = list(wanted), {}
        if absent:
            assert teacher.open is not None
            with teacher.open() as answer:
                for key in (keys[i] for i in absent):
                    tables[key] = self._table(answer, wanted[key], key[1], teacher.name)
                    if key in paths and processes.is_first():
                        _keep(paths[key], tables[key])
        processes.wait()
        return tables | {
            key: read_answers(path)
            for key, path in paths.items()
            if path.exists() or key not in tables
        }

    def _table(self, answer: Answer, examples: ExampleSet, view: int, name: str) -> np.ndarray:
        """Ask an open teacher about all examples of a view."""
        halving = Halving(examples.name)

        def work(index: int, batch: Any) -> dict[str, Tensor]:
            rows = torch.cat([rows for _, rows in halving(answer, batch)])
            self._check_classes(name, rows.shape[-1])
            if bool(rows.isnan().any()):
                raise DataError(
                    f"The answers of {name} to the {examples.name} hold NaN. Check its weights."
                )
            return {"answer": rows}

        label = f"{name} answers {examples.name}"
        if examples.views > 1:
            label += f", view {view + 1} of {examples.views}"
        answers = in_order(examples.batches(view), work, name=f"{examples.name} {view}")
        tables = []
        with Progress(label, examples.count, enabled=self.progress, unit="examples") as bar:
            for result in telling_lost_workers(answers, examples.name):
                tables.append(result["answer"])
                bar.update(len(tables[-1]))
        table = torch.cat(tables).numpy()
        if len(table) != examples.count:
            raise DataError(
                f"{name} gave {len(table)} answers for {examples.count} examples ({examples.name})."
            )
        return table


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
        table: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise FormatError(f"{path} is not a table of answers ({error}). {advice}") from None
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
