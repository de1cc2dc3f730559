"""Predict millions of rows: Parquet files through a saved ensemble, in processes or by Ray Data."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._records import sha256_of
from ..data import processes
from ..data.processes import own_numbers
from ..data.progress import Progress
from ..data.ray_cluster import import_ray, start_ray
from ..errors import DataError
from ..fusion.ensemble import HydraEnsemble
from ..fusion.row_function import RowAnswers
from .parts import Part, Plan, clean, plan, write_part


@dataclass(frozen=True)
class BulkOptions:
    """How rows are answered.

    Attributes:
        column: Of the texts or pictures; by default the usual names.
        keep: Columns of the input that come along; by default all but pictures.
        probabilities: Add all classes' probabilities.
        batch_size: Rows that run through the model together.
        rows_per_part: Rows of one output file, which is also what a stop can lose.
        device: Where the model runs.
        threads: Of torch, per worker.
    """

    column: str | None = None
    keep: tuple[str, ...] | None = None
    probabilities: bool = False
    batch_size: int = 32
    rows_per_part: int = 16384
    device: str | None = None
    threads: int = 1

    def settings(self) -> dict[str, Any]:
        """Return what the answers depend on."""
        return {
            "column": self.column,
            "keep": None if self.keep is None else list(self.keep),
            "probabilities": self.probabilities,
        }


@processes.holds("output")
def predict_files(
    ensemble: str | os.PathLike[str],
    sources: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    options: BulkOptions | None = None,
    ray: bool = False,
    workers: int = 1,
    progress: bool = True,
) -> dict[str, Any]:
    """Predict the rows of Parquet files into Parquet files, each row exactly once.

    The output has one file per part with the column `row`, the input's columns and
    `predicted_label`, `predicted_uncertainty`, ...; `predicted_error` says why a row has no answer.
    A run that was stopped goes on: only what is missing is computed. `done.json` is written last.

    Args:
        ensemble: A folder of `save_pretrained`; every worker loads it.
        sources: Parquet files, or folders of them.
        output: A folder.
        options: See `BulkOptions`.
        ray: Work in a pool of Ray Data actors, on the cluster of `RAY_ADDRESS` or on this machine.
            Without it, in this process, or in all processes of `torchrun`.
        workers: Actors of the pool.
        progress: Report progress, in rows.

    Returns:
        The totals: `rows`, `parts`, and `computed`, the parts of this run.
    """
    chosen, folder, home = options or BulkOptions(), Path(output), Path(ensemble)
    work = _plan(home, sources, chosen)
    processes.on_first(lambda: work.begin(folder))
    processes.on_first(lambda: clean(folder))
    numbers: list[int] = processes.on_first(lambda: [p.number for p in work.missing(folder)])
    todo = [work.parts[number] for number in numbers]
    steps = (
        _by_ray(home, work, todo, folder, chosen, workers)
        if ray
        else _here(home, work, todo, folder, chosen)
    )
    done = work.rows - sum(part.rows for part in todo)
    with Progress("predict", work.rows, enabled=progress, unit="rows", done=done) as bar:
        for rows in steps:
            bar.update(rows)
    processes.wait()
    totals: dict[str, Any] = processes.on_first(lambda: work.finish(folder))
    return {**totals, "computed": len(todo)}


def _plan(home: Path, sources: Sequence[Any], options: BulkOptions) -> Plan:
    config = home / "config.json"
    if not config.is_file():
        raise DataError(
            f"{home} is not a folder of a saved ensemble (no config.json). Save one with "
            "ensemble.save_pretrained(folder), or build it with hydra-ensembles build."
        )
    # it holds the hashes of all other files
    settings = {"model": sha256_of(config.read_bytes()), **options.settings()}
    return plan(sources, rows_per_part=options.rows_per_part, settings=settings)


def _here(
    home: Path, work: Plan, todo: Sequence[Part], folder: Path, options: BulkOptions
) -> Iterator[int]:
    """Do the parts in this process, or the share of this process."""
    mine = [todo[number] for number in own_numbers(len(todo))]
    if not mine:
        return
    with processes.alone():
        worker = PartWorker(str(home), work, str(folder), options)
    for part in mine:
        worker.write(part)
        yield part.rows * processes.size()  # the others do as much at the same time


class PartWorker:
    """Loads an ensemble once and does parts: what an actor of the pool is."""

    def __init__(self, home: str, work: Plan, folder: str, options: BulkOptions) -> None:
        import torch

        from ..hosts import tiny_vit  # noqa: F401  (makes the demo's family known)

        torch.set_num_threads(options.threads)
        ensemble = HydraEnsemble.from_pretrained(home)
        self.ensemble = ensemble.to(options.device) if options.device else ensemble
        self.work, self.folder, self.options = work, Path(folder), options
        self.answers = RowAnswers(
            self.ensemble,
            column=options.column,
            probabilities=options.probabilities,
            batch_size=options.batch_size,
        )

    def write(self, part: Part) -> None:
        """Do a part, unless somebody has done it."""
        if not self.work.is_done(self.folder, part):
            write_part(self.work, part, self.folder, self.answers, keep=self.options.keep)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Do the parts of a batch of Ray Data; return what was done, not the answers."""
        numbers = [int(number) for number in batch["number"]]
        for number in numbers:
            self.write(self.work.parts[number])
        return {"number": batch["number"], "rows": batch["rows"]}


def _by_ray(
    home: Path, work: Plan, todo: Sequence[Part], folder: Path, options: BulkOptions, workers: int
) -> Iterator[int]:
    """Do the parts in a pool of actors; a part whose actor dies is given to another one."""
    if not todo:
        return
    import_ray()  # or it says what to install
    import ray
    import ray.data

    started = start_ray(workers + 1)
    try:
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.execution_options.verbose_progress = False
        items = [{"number": part.number, "rows": part.rows} for part in todo]
        pool = ray.data.from_items(items, override_num_blocks=min(len(items), 4096)).map_batches(
            PartWorker,
            fn_constructor_args=(
                str(home.resolve()),
                work,
                str(folder.resolve()),
                options,
            ),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=min(workers, len(items))),
            num_cpus=options.threads,
            num_gpus=1 if (options.device or "").startswith("cuda") else 0,
        )
        for row in pool.iter_rows():
            yield int(row["rows"])
    finally:
        if started:
            ray.shutdown()
