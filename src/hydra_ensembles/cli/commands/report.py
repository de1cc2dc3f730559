"""`report`: one HTML page from saved results, no model needed."""

from __future__ import annotations

import json as json_module
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...errors import DataError, FormatError
from .. import options
from ..output import show

if TYPE_CHECKING:
    from ...evaluation import Results
    from ...report.examples import Example

TITLE = "Hydra ensemble: report"


def command(
    results: Annotated[
        list[Path],
        typer.Argument(
            help="Folders that `eval` wrote, or results*.json files, the main model first.",
            show_default=False,
        ),
    ],
    ensemble: Annotated[
        Path | None, typer.Option(help="Folder of the ensemble, for its summary and head maps.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="HTML file to write.")] = Path(
        "report.html"
    ),
    title: Annotated[str, typer.Option(help="Heading of the page.")] = TITLE,
    config: options.Config = None,
    json: options.Json = False,
) -> None:
    """Write one self-contained HTML page from saved results; no model is loaded or run."""
    from ...evaluation import Results
    from ...report.examples import Example

    files: list[Path] = []
    for path in results:
        if not path.exists():
            raise DataError(f"{path} does not exist. Give what `hydra-ensembles eval` wrote.")
        found = sorted(path.glob("results*.json")) if path.is_dir() else [path]
        if not found:
            raise DataError(f"{path} has no results*.json. Give what `eval` wrote.")
        files += found
    costs: dict[str, float] = {}
    examples: list[Example] = []
    settings: dict[str, Any] = {}
    for folder in dict.fromkeys(file.parent for file in files):
        costs |= _read(folder / "costs.json", {})
        if not examples:
            examples = [Example.from_dict(e) for e in _read(folder / "examples.json", [])]
        if not settings and (folder / "config.yaml").is_file():
            import yaml

            settings = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8")) or {}
    loaded = [Results.load(file) for file in files]
    order = list(costs)  # as the models were given to `eval`
    loaded.sort(key=lambda r: order.index(r.name) if r.name in order else len(order))
    page = make_report(
        output,
        loaded,
        folder=ensemble,
        costs=costs,
        examples=examples,
        settings=settings,
        title=title,
    )
    record = {"report": str(page), "models": [result.name for result in loaded]}
    show(f"Report: {page}", record, json=json)


def make_report(
    path: Path,
    results: Sequence[Results],
    *,
    model: Any = None,
    folder: Path | None = None,
    costs: Mapping[str, float],
    examples: Sequence[Example] = (),
    settings: Mapping[str, Any],
    title: str = TITLE,
) -> Path:
    """Write the page, with summary and head maps of an ensemble in memory or in a folder."""
    from ...heads.head_mask import HeadMask
    from ...report.page import write_report
    from .env import versions

    masks: Sequence[HeadMask] = ()
    summary, branch = "", None
    if folder is not None:
        from ...fusion.folder_schema import read_config

        saved = read_config(folder)
        masks = [HeadMask(rows) for rows in saved.masks]
        branch = saved.plan.trunk
        card = folder / "README.md"
        parts = card.read_text(encoding="utf-8").split("```") if card.is_file() else []
        summary = parts[1].strip() if len(parts) > 1 else ""
    elif hasattr(model, "plan"):
        masks, summary, branch = model.masks, str(model), model.plan.trunk
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_report(
        path,
        results,
        title=title,
        lead="\n".join(_lead(result, costs.get(result.name)) for result in results),
        summary=summary,
        masks=masks,
        branch=branch,
        costs=costs,
        examples=examples,
        settings={**settings, "versions": versions()},
        command=shlex.join(["hydra-ensembles", *sys.argv[1:]]),
    )


def _lead(result: Results, cost: float | None) -> str:
    """Return the headline figures of a model in a line."""
    from ...evaluation.tables import shown
    from ...report.sections import LABELS
    from ...report.task_figures import headlines

    words = [
        f"{LABELS.get(key, key)} {shown(key, result[key])}{unit}"
        for key, (unit, _) in headlines(result).items()
        if key != "cal/ECE"
    ]
    if "ood/mean/AUROC" in result:
        words.append(f"OOD AUROC {shown('AUROC', result['ood/mean/AUROC'])} %")
    if "ood/mean/novelty/AUROC" in result:
        words[-1] += f" ({shown('AUROC', result['ood/mean/novelty/AUROC'])} % by novelty)"
    if cost:
        words.append(f"at {cost:.2f}\u00a0× the cost")
    return f"{result.name}: {', '.join(words)}."


def _read(path: Path, default: Any) -> Any:
    if not path.is_file():
        return default
    try:
        return json_module.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FormatError(f"{path} is damaged: {error}.") from error
