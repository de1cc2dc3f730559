"""Printing and writing: tables and lines for people, JSON for machines; `--help` needs no more.

Click as typer has it: a dependency of its own in older versions, a part of it in newer ones.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from .errors import Stop

if TYPE_CHECKING:
    from ..evaluation import Results
    from ..fusion import HydraEnsemble
    from .models import Loaded


def click_module(name: str) -> Any:
    """Return a module of the click that typer runs on."""
    root = typer.BadParameter.__module__.rpartition(".")[0]
    return importlib.import_module(f"{root}.{name}")


# Which of several processes this is, by the launcher's environment; torch is not imported.
def number() -> int:
    """Return this process's number under `torchrun` or `accelerate launch`; 0 otherwise."""
    several = os.environ.get("WORLD_SIZE", "1") not in ("", "1")
    return int(os.environ.get("RANK", "0")) if several else 0


def is_first() -> bool:
    """Tell whether this process writes files and prints."""
    return number() == 0


class StatusLine:
    """A line on standard error while nothing else is printed: `Loading MODEL ...`.

    Importing torch takes seconds. The line appears after one second and then every ten.

    Attributes:
        quiet: Whether progress is not reported.
        folder: The folder that the command writes to.
    """

    def __init__(self) -> None:
        self.quiet = False
        self.folder: Path | None = None
        self._ended = threading.Event()

    def show_after(self, text: str) -> None:
        """Show a text until `cancel`."""
        self.cancel()
        if self.quiet:
            return
        self._ended = ended = threading.Event()

        def repeat() -> None:
            start = time.monotonic()
            if not ended.wait(1.0):
                typer.echo(f"{text} ...", err=True)
            while not ended.wait(10.0):
                typer.echo(f"{text} ({time.monotonic() - start:.0f} s) ...", err=True)

        threading.Thread(target=repeat, daemon=True).start()

    def cancel(self) -> None:
        """Show nothing more."""
        self._ended.set()


status = StatusLine()

FIGURES = {
    "cls/Acc": "Acc",
    "cls/NLL": "NLL",
    "cal/ECE": "ECE",
    "sc/AURC": "AURC",
    "fail/AUROC": "wrong\nAUROC",
    "cls/mAP": "mAP",
    "cls/F1_micro": "F1",
    "reg/RMSE": "RMSE",
    "reg/Pearson": "Pearson",
    "reg/NLL": "NLL",
    "reg/CRPS": "CRPS",
    "ent/F1": "entity\nF1",
    "qa/EM": "EM",
    "qa/F1": "F1",
    "ood/mean/AUROC": "OOD\nAUROC",
    "ood/mean/novelty/AUROC": "OOD by\nnovelty",
    "shift/mean/cls/Acc": "shifted\nAcc",
}
"""What the table on the command line shows: figures and the heads of their columns."""


def say(text: str, *, json: bool = False) -> None:
    """Print a line; on standard error when standard output is JSON."""
    status.cancel()
    if not (json and status.quiet):
        typer.echo(text, err=json)


def step(text: str, *, json: bool = False) -> None:
    """Print the next step, if progress is reported."""
    if not status.quiet:
        say(text, json=json)


def sizes(known: Any, outliers: Mapping[str, Any]) -> str:
    """Return the sizes of the data: `200 examples, outliers: questions 150`."""
    from ..data import count

    words = f"{count(known)} examples"
    if outliers:
        words += ", outliers: " + ", ".join(f"{n} {count(data)}" for n, data in outliers.items())
    return words


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """Show what is being done; in a log only if it takes longer than a second."""
    shown = sys.stderr.isatty() and not status.quiet
    if shown:
        status.cancel()
        typer.echo(f"{text} ...", err=True, nl=False)
    else:
        status.show_after(text)
    try:
        yield
    finally:
        status.cancel()
        if shown:
            typer.echo("\r\x1b[K", err=True, nl=False)


def dumps(value: Any) -> str:
    """Return plain data as indented JSON."""
    import json

    return json.dumps(value, indent=2, default=str)


def print_json(value: Any) -> None:
    """Print plain data as JSON."""
    typer.echo(dumps(value))


def show(text: object, record: Any, *, json: bool) -> None:
    """Print the outcome of a command: a text, or its record as JSON."""
    print_json(record) if json else typer.echo(str(text))


def finish(
    ensemble: HydraEnsemble,
    folder: Path,
    loaded: Loaded,
    data: Any,
    *,
    refused: str = "",
    names: bool = True,
    json: bool,
) -> None:
    """Save what was built with its class names, and print it.

    Args:
        ensemble: What was built.
        folder: The output.
        loaded: The model that it was built from.
        data: Names the classes if the model does not.
        refused: Why there is no policy; raised once the ensemble is saved.
        names: Whether to keep names of known examples.
        json: Whether standard output is for a machine.
    """
    class_names = loaded.class_names or getattr(data, "class_names", None)
    if class_names:
        ensemble.id2label = list(class_names)
    if not names:
        ensemble.forget_names_()
    save(ensemble, folder, loaded)
    write_config(folder)
    if refused:
        raise Stop(
            f"{refused} Written to {folder} without a policy: fit one with hydra-ensembles policy.",
            3,
        )
    show(ensemble, {"folder": str(folder), "summary": str(ensemble), **ensemble.record}, json=json)
    say(f"Written to {folder}. Next: hydra-ensembles eval {folder} --data TEST", json=json)


def save(ensemble: HydraEnsemble, folder: Path, loaded: Loaded) -> None:
    """Save an ensemble with its transform and tokenizer, so that the folder is complete."""
    from ..data import processes

    if is_first():
        if loaded.transform is not None:
            ensemble.transform = loaded.transform
        ensemble.tokenizer = loaded.tokenizer
        ensemble.save_pretrained(folder)
    processes.wait()  # the folder is complete when any process continues


def results_table(
    results: Sequence[Results],
    costs: Mapping[str, float] | None = None,
    *,
    figures: Mapping[str, str] = FIGURES,
) -> None:
    """Print results side by side, within 80 columns; `figures` are keys and heads of columns."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from ..evaluation.figures import direction
    from ..evaluation.tables import shown

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    table.add_column("model", overflow="fold")
    keys = [key for key in figures if any(key in result for result in results)]
    if costs:
        table.add_column("cost", justify="right", no_wrap=True)
    for key in keys:
        mark = {1: " ↑", -1: " ↓", 0: ""}[direction(key)]
        table.add_column(figures[key] + mark, justify="right", no_wrap=True)
    for result in results:
        cells = [result.name]
        if costs:
            ratio = costs.get(result.name)
            cells.append("–" if ratio is None else f"{ratio:.2f}x")
        table.add_row(*cells, *(shown(key, result.get(key)) for key in keys))
    Console().print(table)


def write_text(path: Path, text: str) -> None:
    """Write a file atomically, with its folder; only the first process writes."""
    from .._records import write_whole

    if not is_first():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)


def write_config(folder: Path, *, begin: bool = False) -> dict[str, Any]:
    """Write the resolved options of the running command beside its results; return them.

    With `begin`, an existing file stays: the work may yet be refused, and the results in the folder
    are those of the options that made them. The command holds the folder from here to its end.
    """
    import yaml

    from .._records import holding

    context = click_module("globals").get_current_context()
    if is_first():
        context.with_resource(holding(folder))
        status.folder = folder
    values = {
        key: str(value) if isinstance(value, Path) else value
        for key, value in context.params.items()
        if key not in ("config", "json") and value is not None
    }
    values = {key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}
    resolved = {"command": context.info_name, **values}
    if not (begin and (folder / "config.yaml").exists()):
        write_text(folder / "config.yaml", yaml.safe_dump(resolved, sort_keys=False))
    return resolved
