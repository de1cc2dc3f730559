"""Predict the rows of Parquet files into Parquet files, in one process or by Ray Data.

A part is some row groups of an input file. Its answers are one output file, written beside its
place and renamed when it is complete: however often workers are killed or repeat a part, every row
is answered exactly once. Ray's own `write_parquet` does not number rows and leaves half-written
files when a run is killed, so the actors read and write their parts by pyarrow.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .._records import PARTIAL, check_same_run, holding, sha256_of, write_whole
from ..data.class_names import class_count
from ..data.progress import Progress
from ..errors import DataError
from ..fusion.ensemble import HydraEnsemble
from ..prediction import Prediction
from ..registry import imported
from ..task_predictions import TokenPrediction
from .answer_types import json_type

SETTINGS = b"hydra_ensembles"
"""Where an output file keeps what it was made of: the model, the options and the input."""
_parquet = partial(imported, "pyarrow.parquet", "Reading Parquet files", "ray")
STORE_BYTES = 200 * 2**20
"""Memory for the object store of a Ray that is started here."""


@dataclass(frozen=True)
class Part:
    """Some row groups of an input file, and where their answers go.

    Attributes:
        file: The input.
        groups: Numbers of its row groups.
        first, rows: Number of the first row in the file, and how many there are.
        output: The file of answers.
        settings: What the answers depend on: plain data.
    """

    file: str
    groups: list[int]
    first: int
    rows: int
    output: str
    settings: dict[str, Any]

    def is_done(self) -> bool:
        """Tell whether the answers are there; raise when they were made with other settings."""
        try:
            saved = json.loads(_parquet().read_schema(self.output).metadata[SETTINGS])
        except (OSError, ValueError, KeyError, TypeError):  # missing or damaged: written again
            return False
        check_same_run(self.output, saved, self.settings)
        return True


def predict_files(
    ensemble: str | os.PathLike[str],
    sources: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    column: str | None = None,
    probabilities: bool = False,
    batch_size: int = 32,
    rows_per_part: int = 16384,
    device: str | None = None,
    ray: bool = False,
    workers: int = 1,
    progress: bool = True,
) -> dict[str, int]:
    """Predict the rows of Parquet files into Parquet files, each row exactly once.

    `rows.parquet` becomes `rows-00000.parquet`, `rows-00001.parquet`, ... with the column `row`
    (its number in the input), the input's columns without images, and `predicted_label`,
    `predicted_uncertainty`, ...; `predicted_error` says why a row has no answer. A run that was
    stopped goes on: only missing and damaged files are computed.

    Args:
        ensemble: A folder of `save_pretrained`; every worker loads it.
        sources: Parquet files, or folders of them.
        output: A folder.
        column: The column of texts or images; by default the usual names.
        probabilities: Whether to add the probabilities of all classes.
        batch_size: Rows that run through the model together.
        rows_per_part: Least rows of an output file (row groups stay whole).
        device: Where the model runs.
        ray: Work in a pool of Ray Data actors, on the cluster of `RAY_ADDRESS` or on this machine.
        workers: Actors of the pool.
        progress: Show a bar on a terminal, in rows.

    Returns:
        The totals: `rows`, `parts`, and `computed`, the parts of this run.

    Example:
        >>> predict_files("vit-hydra", ["photos/"], "answers", ray=True, workers=8)
        {'rows': 2000000, 'parts': 123, 'computed': 123}
    """
    folder, home = Path(output), str(Path(ensemble).resolve())
    answering = {"column": column, "probabilities": probabilities}
    with holding(folder):
        config = Path(home, "config.json")
        if not config.is_file():
            raise DataError(
                f"{ensemble} is not a saved ensemble (no config.json). Save one with "
                "ensemble.save_pretrained(folder), or build one with hydra-ensembles build."
            )
        # the config has the hashes of all other files
        settings = {"model": sha256_of(config.read_bytes()), **answering}
        parts = _parts(sources, folder.resolve(), rows_per_part, settings)
        for killed in folder.glob(f".*{PARTIAL}"):
            killed.unlink(missing_ok=True)
        missing = [part for part in parts if not part.is_done()]
        rows = sum(part.rows for part in parts)
        done = rows - sum(part.rows for part in missing)
        arguments = (home, missing, {**answering, "batch_size": batch_size}, device)
        with Progress("predict", rows, enabled=progress, unit="rows", done=done) as bar:
            if missing:
                for answered in (
                    _by_ray(arguments, workers) if ray else PartWorker(*arguments).run()
                ):
                    bar.update(answered)
    return {"rows": rows, "parts": len(parts), "computed": len(missing)}


def _parts(
    sources: Sequence[str | os.PathLike[str]],
    output: Path,
    rows_per_part: int,
    settings: dict[str, Any],
) -> list[Part]:
    """Return the parts of Parquet files, or of folders of them, in the order of their names."""
    if rows_per_part < 1:
        raise ValueError(f"rows_per_part={rows_per_part}: expected at least 1.")
    files: dict[str, Path] = {}
    for source in sources:
        path = Path(source).expanduser().resolve()
        for file in sorted(path.glob("*.parquet")) if path.is_dir() else [path]:
            if files.setdefault(file.stem, file) != file:
                raise DataError(f"Two input files have one name: {files[file.stem]} and {file}.")
    parts: list[Part] = []
    for stem, file in files.items():
        try:
            metadata = _parquet().read_metadata(file)
            with file.open("rb") as content:  # the footer describes all that is in the file
                content.seek(-8 - metadata.serialized_size, os.SEEK_END)
                footer = sha256_of(content.read())
        except (OSError, ValueError) as error:
            raise DataError(f"{file} cannot be read as Parquet: {error}") from error
        facts = {**settings, "rows_per_part": rows_per_part, "inputs": footer}
        number = first = end = 0
        groups: list[int] = []
        for group in range(metadata.num_row_groups):
            groups.append(group)
            end += metadata.row_group(group).num_rows
            if end - first >= rows_per_part or (end == metadata.num_rows and end > first):
                place = output / f"{stem}-{number:05d}.parquet"
                parts.append(Part(str(file), groups, first, end - first, str(place), facts))
                number, first, groups = number + 1, end, []
    if not parts:
        raise DataError("There is nothing to predict: found no Parquet file with a row.")
    return parts


class PartWorker:
    """Loads an ensemble once and answers parts: an actor of the pool.

    Args:
        ensemble: Its folder.
        parts: All parts.
        options: Those of `HydraEnsemble.as_map_function`.
        device: Where the model runs.
    """

    def __init__(
        self, ensemble: str, parts: Sequence[Part], options: dict[str, Any], device: str | None
    ) -> None:
        import torch

        from ..hosts import tiny_vit  # noqa: F401  (registers the demo's family)

        torch.set_num_threads(1)
        loaded = HydraEnsemble.from_pretrained(ensemble)
        self.parts = parts
        self.answer = (loaded.to(device) if device else loaded).as_map_function(**options)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Answer the parts of a batch of Ray Data; return their numbers of rows."""
        chosen = [self.parts[int(number)] for number in batch["id"]]
        for part in chosen:
            if not part.is_done():  # Ray repeats a part when it loses a worker
                self.write(part)
        return {"rows": [part.rows for part in chosen]}

    def run(self) -> Iterator[int]:
        """Answer all parts in this process; yield their numbers of rows."""
        for part in self.parts:
            self.write(part)
            yield part.rows

    def write(self, part: Part) -> None:
        """Answer a part and write it, completely or not at all."""
        import pyarrow

        table = _parquet().ParquetFile(part.file).read_row_groups(part.groups)
        read = self.answer.input_columns(table.column_names)
        answers = self.answer({name: table[name].to_pylist() for name in read})
        images = [n for n in read if not pyarrow.types.is_string(table.schema.field(n).type)]
        table = table.drop_columns(images)
        numbers = pyarrow.array(range(part.first, part.first + part.rows), pyarrow.int64())
        columns = {**dict(zip(table.column_names, table.columns, strict=True)), "row": numbers}
        # the type of a column must not depend on the rows of a part
        ensemble = self.answer.ensemble
        several = (class_count(ensemble) or 1) > 1
        for name, values in answers.items():
            plain = name.removeprefix(self.answer.prefix)
            kind = _parquet_type(ensemble.task.prediction, plain, several)
            if kind == pyarrow.string():  # records and nested lists as JSON
                values = [v if isinstance(v, (str, type(None))) else json.dumps(v) for v in values]
            columns[name] = pyarrow.array(values, kind)
        settings = {SETTINGS: json.dumps(part.settings).encode()}
        content = pyarrow.BufferOutputStream()
        _parquet().write_table(pyarrow.table(columns).replace_schema_metadata(settings), content)
        write_whole(part.output, content.getvalue().to_pybytes())


def _parquet_type(kind: type[Prediction], name: str, several: bool) -> Any:
    """Return the type of a column of answers; records and lists of lists are JSON texts.

    Args:
        kind: The answers.
        name: A field, `probabilities` or `error`.
        several: Whether the model gives several numbers.
    """
    import pyarrow

    def of(found: dict[str, Any]) -> Any:
        if "anyOf" in found:  # one number, or a list of several
            by_count = name in ("value", "spread", "sigma", "set")
            return of(found["anyOf"][several]) if by_count else pyarrow.string()
        given = found.get("type", "string")
        plain = given if isinstance(given, str) else given[0]
        if plain == "array":
            inner = of(found["items"])
            nested = found["items"].get("type") in ("object", "array")
            return pyarrow.string() if nested else pyarrow.list_(inner)
        return {"integer": pyarrow.int64(), "number": pyarrow.float32()}.get(
            plain, pyarrow.string()
        )

    if name == "probabilities":
        return pyarrow.string() if kind is TokenPrediction else pyarrow.list_(pyarrow.float32())
    return pyarrow.string() if name == "error" else of(json_type(kind, name))


def _by_ray(arguments: tuple[Any, ...], workers: int) -> Iterator[int]:
    """Answer parts in a pool of actors; a part whose actor dies is given to another one."""
    imported("ray.data", "A pool of workers", "ray")
    import ray

    started, local = not ray.is_initialized(), not os.environ.get("RAY_ADDRESS")
    if started:
        sizes: dict[str, Any] = {"num_cpus": workers + 1, "object_store_memory": STORE_BYTES}
        ray.init(log_to_driver=False, **sizes if local else {}, include_dashboard=False)
    try:
        ray.data.DataContext.get_current().enable_progress_bars = False
        _, parts, _, device = arguments
        numbers = ray.data.range(len(parts), override_num_blocks=min(len(parts), 4096))
        pool = numbers.map_batches(
            PartWorker,
            fn_constructor_args=arguments,
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=min(workers, len(parts))),
            num_cpus=1,
            num_gpus=1 if (device or "").startswith("cuda") else 0,
        )
        for row in pool.iter_rows():
            yield int(row["rows"])
    finally:
        if started:
            ray.shutdown()
