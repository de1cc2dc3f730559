"""The report: one HTML file that needs nothing else, from plain results.

It embeds its style, script, charts and images, forbids every network request by its content
security policy, follows the reader's light or dark scheme, prints, and works by keyboard. Without
the script everything but the controls is still there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._records import write_whole
from ..errors import DataError
from ..heads.head_mask import HeadMask
from ..registry import imported
from . import sections, set_figures, task_figures
from .curves import answered_at
from .examples import Example
from .rounding import percent, three_digits

if TYPE_CHECKING:
    from ..evaluation.results import Results

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def check_packages() -> None:
    """Raise when a package of the extra `report` is missing; for commands that end with a page."""
    for package in ("jinja2", "matplotlib"):
        imported(package, "A report", "report")


def write_report(
    path: str | os.PathLike[str],
    results: Sequence[Results],
    *,
    title: str = "Hydra ensemble: report",
    lead: str = "",
    summary: str = "",
    masks: Sequence[HeadMask] = (),
    branch: int | None = None,
    costs: Mapping[str, float] | None = None,
    examples: Sequence[Example] = (),
    settings: Mapping[str, Any] | None = None,
    command: str = "",
    made: str | None = None,
) -> Path:
    """Write the report of one or several models evaluated on the same data.

    Example:
        >>> write_report("report.html", [evaluate(ensemble, test), evaluate(model, test)])

    Args:
        path: The HTML file; written beside and renamed.
        results: One per model, the main one first. Curves need their examples; without them the
            sections that show curves are left out.
        title, lead: Heading and the lines below it (plain text).
        summary: What was built, as the ensemble prints itself.
        masks: The members' masks, for the head maps.
        branch: First layer in which members differ.
        costs: Multiply-adds of models relative to the single model, by the results' names.
        examples: Single examples, in order; shown by their `group`.
        settings: What is needed to make the results again.
        command: The command line that made them.
        made: When, as text; now by default.

    Returns:
        The path.
    """
    results = list(results)
    if not results:
        raise DataError("There are no results to report: give those of at least one model.")
    names = [result.name for result in results]
    if len(set(names)) < len(names):
        raise DataError(f"Two results have the same name ({', '.join(names)}): rename one.")
    curved = [result for result in results if "id" in result.examples]
    parts = [
        sections.figures(results, costs or {}),
        sections.novelty(curved, examples),
        sections.detection(curved),
        task_figures.numbers(curved, names),
        sections.calibration(task_figures.labelled_by_class(curved), names),
        sections.abstention(task_figures.judged(curved)),
        set_figures.sets(curved, names),
        sections.shown_examples(examples),
        sections.cost(results, costs or {}),
        sections.built(summary, masks, branch),
        sections.reproduce(results, settings or {}, command),
    ]
    thresholds = {result.name: answered_at(result) for result in task_figures.judged(curved)}
    return write_page(path, parts, title=title, lead=lead, thresholds=thresholds, made=made)


def write_page(
    path: str | os.PathLike[str],
    parts: Sequence[sections.Section | None],
    *,
    title: str,
    lead: str = "",
    thresholds: Mapping[str, Any] | None = None,
    made: str | None = None,
) -> Path:
    """Write sections as a page; see `write_report`.

    Args:
        path: The HTML file; written beside and renamed.
        parts: The sections in order; None is left out.
        title, lead: Heading and the lines below it (plain text).
        thresholds: What the slider of the section `abstention` reads, by model.
        made: When, as text; now by default.
    """
    jinja2 = imported("jinja2", "A report", "report")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hydra_ensembles", "report/templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "percent": percent,
        "three_digits": three_digits,
        "parts": _parts,
    }
    page = environment.get_template("page.html").render(
        title=title,
        lead=lead,
        sections=[part for part in parts if part is not None],
        policy=POLICY,
        made=made or datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        data={"thresholds": dict(thresholds or {})},
    )
    target = Path(path)
    write_whole(target, page)
    return target


def _parts(name: str) -> list[str]:
    """Split the name of a file where a line may break."""
    return re.findall(r"[^/_-]*[/_-]+|[^/_-]+", name)
