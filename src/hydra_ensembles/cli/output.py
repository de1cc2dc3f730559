"""Printing: tables and lines for people on a terminal, JSON for machines on standard output.

Click as typer has it: a dependency of its own in older versions, a part of it in newer ones.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from .._records import holding, write_whole

if TYPE_CHECKING:
    from ..evaluation import Results


def click_module(name: str) -> Any:
    """Return a module of the click that typer runs on."""
    root = typer.BadParameter.__module__.rpartition(".")[0]
    return importlib.import_module(f"{root}.{name}")


# Which of several processes this is, by the launcher's environment; torch is not imported.
def number() -> int:
    """Return this process's number under `torchrun` or `accelerate launch`; 0 by itself."""
    several = os.environ.get("WORLD_SIZE", "1") not in ("", "1")
    return int(os.environ.get("RANK", "0")) if several else 0


def is_first() -> bool:
    """Tell whether this process writes files and talks."""
    return number() == 0


# A sign of life from commands whose first words take long: importing torch alone takes seconds.
FIRST, EVERY = 1.0, 10.0
"""Seconds without a word after which a command says what it does, and says so again."""


class SignOfLife:
    """A line on standard error while nothing else is said: `Loading MODEL ...`."""

    def __init__(self) -> None:
        self.quiet = False
        self.folder: Path | None = None  # that the command writes to
        self._ended = threading.Event()

    def soon(self, text: str) -> None:
        """Say so a second from now and every ten seconds, until something else is said."""
        self.cancel()
        if not self.quiet:
            self._ended = threading.Event()
            threading.Thread(target=_repeat, args=(text, self._ended), daemon=True).start()

    def cancel(self) -> None:
        """Say no more."""
        self._ended.set()


def _repeat(text: str, ended: threading.Event) -> None:
    start, wait = time.monotonic(), FIRST
    while not ended.wait(wait):
        passed = round(time.monotonic() - start)
        typer.echo(f"{text} ..." if wait == FIRST else f"{text} ({passed} s) ...", err=True)
        wait = EVERY


life = SignOfLife()


FIGURES = {
    "cls/Acc": "Acc",
    "cls/NLL": "NLL",
    "cal/ECE": "ECE",
    "sc/AURC": "AURC",
    "fail/AUROC": "wrong\nAUROC",
    "ood/mean/AUROC": "OOD\nAUROC",
    "ood/mean/novelty/AUROC": "OOD by\nnovelty",
    "shift/mean/cls/Acc": "shifted\nAcc",
}
"""What the table on the command line shows: figures and the heads of their columns."""


def say(text: str, *, json: bool = False) -> None:
    """Print a line for people: on standard error when standard output is for a machine."""
    life.cancel()
    if not (json and life.quiet):
        typer.echo(text, err=json)


def step(text: str, *, json: bool = False) -> None:
    """Say what is done next, where progress is reported."""
    if not life.quiet:
        say(text, json=json)


def sizes(known: Any, outliers: Mapping[str, Any]) -> str:
    """Say how much data there is: `200 examples, outliers: questions 150`."""
    from ..data import count

    words = f"{count(known)} examples"
    if outliers:
        words += ", outliers: " + ", ".join(f"{n} {count(data)}" for n, data in outliers.items())
    return words


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """Say what is going on while it lasts; into a log only when it takes longer than a second."""
    shown = sys.stderr.isatty() and not life.quiet
    if shown:
        life.cancel()
        typer.echo(f"{text} ...", err=True, nl=False)
    else:
        life.soon(text)
    try:
        yield
    finally:
        life.cancel()
        if shown:
            typer.echo("\r\x1b[K", err=True, nl=False)


def print_json(value: Any) -> None:
    """Print plain data as JSON."""
    typer.echo(json.dumps(value, indent=2, default=str))


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
    """Write a file whole, in a folder that need not be there; of several processes, one does."""
    if not is_first():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)


def write_config(folder: Path, *, begin: bool = False) -> dict[str, Any]:
    """Write the resolved options of the running command beside its results; return them.

    At the beginning of long work a file that is there stays: the work may yet be refused, and the
    results in the folder are those of the options that made them. The command holds the folder from
    here to its end.
    """
    import yaml

    context = click_module("globals").get_current_context()
    if is_first():
        context.with_resource(holding(folder))
        life.folder = folder
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
