"""The report: one HTML file that needs nothing else, from plain results.

It embeds its style, script, charts and pictures, forbids every network request by its content
security policy, follows the reader's light or dark scheme, prints, and works by keyboard; without
a script all but the controls is still there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._records import write_whole
from ..errors import DataError
from ..heads.masks import HeadMask
from . import sections
from .curves import answered_at
from .examples import Example

if TYPE_CHECKING:
    from ..evaluation.results import Results

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


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
    frontier: Sequence[Mapping[str, Any]] = (),
    examples: Sequence[Example] = (),
    settings: Mapping[str, Any] | None = None,
    command: str = "",
    made: str | None = None,
) -> Path:
    """Write the report of one or several models evaluated on the same data.

    Args:
        path: The HTML file; written beside and renamed.
        results: One for each model, the main one first. Curves need their examples; without, the
            sections that show curves are left out.
        title, lead: Heading and the lines below it (plain text).
        summary: What was built, as the ensemble prints itself.
        masks: The members' masks, for the head maps.
        branch: First layer in which members differ.
        costs: Multiply-adds of models relative to the single model, by the results' names.
        frontier: Further points of cost against quality: mappings with `name`, `cost` and figures.
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
        sections.built(summary, masks, branch),
        sections.figures(results, costs or {}),
        sections.cost(results, costs or {}, frontier),
        sections.calibration(curved, names),
        sections.detection(curved, names),
        sections.abstention(curved, names),
        sections.shown_examples(examples),
        sections.reproduce(results, settings or {}, command),
    ]
    shown = [part for part in parts if part is not None]
    thresholds = {result.name: answered_at(result) for result in curved}
    page = _page(
        title,
        lead,
        shown,
        {"thresholds": thresholds},
        made or datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )
    target = Path(path)
    write_whole(target, page)
    return target


def _page(
    title: str, lead: str, parts: Sequence[sections.Section], data: dict[str, Any], made: str
) -> str:
    here = files(__package__)
    style, script = ((here / name).read_text("utf-8") for name in ("page.css", "page.js"))
    links = "".join(
        f'<li><a href="#{part.identity}">{escape(part.heading)}</a></li>' for part in parts
    )
    body = "".join(
        f'<section id="{part.identity}"{_long(part)} aria-labelledby="{part.identity}-h">'
        f'<h2 id="{part.identity}-h">{escape(part.heading)}</h2>{part.body}</section>'
        for part in parts
    )
    # "</" would end the script element early, whatever stands in a name
    plain = json.dumps(data, allow_nan=False).replace("</", "<\\/")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="generator" content="hydra-ensembles">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{style}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the results</a>
<header>
<h1>{escape(title)}</h1>
<p class="lead">{escape(lead).replace(chr(10), "<br>")}</p>
<nav aria-label="Sections"><ul>{links}</ul></nav>
</header>
<main id="main">
{body}
</main>
<footer>Made {escape(made)} by hydra-ensembles. This file is self-contained: it loads nothing.
Rates are in percent. Uncertainty is higher when the model is less sure; out-of-distribution
examples are the positive class of AUROC, AUPR and FPR95.</footer>
<script type="application/json" id="data">{plain}</script>
<script>{script}</script>
</body>
</html>
"""


def _long(part: sections.Section) -> str:
    return ' class="long"' if part.long else ""
