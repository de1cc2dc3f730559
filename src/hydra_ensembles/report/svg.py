"""Matplotlib figures as SVG inside an HTML page, in the page's colours.

Colours become the page's variables, so that a figure follows light and dark; ids that nothing
points at go, because ids must be unique on a page; series can be shown and hidden by script.

What all figures share: axes without global state, colours, dashes, markers, files.

Colours are Okabe and Ito's, safe for colour-blind readers; series differ by dash or marker too.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._records import write_whole
from ..registry import imported

if TYPE_CHECKING:
    from markupsafe import Markup

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
DASHES = ("-", "--", ":", "-.", (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1)), (0, (8, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def axes(ax: Any, size: tuple[float, float] = (4.8, 3.6)) -> Any:
    """Return the axes to draw on: those given, or new ones of a size in inches."""
    if ax is not None:
        return ax
    figure = imported("matplotlib.figure", "A figure", "report")
    return figure.Figure(figsize=size, layout="constrained").subplots()


def colour(series: int) -> str:
    """Return the colour of a series."""
    return COLOURS[series % len(COLOURS)]


def marker(series: int) -> str:
    """Return the marker of a series."""
    return MARKERS[series % len(MARKERS)]


def line_style(series: int) -> dict[str, Any]:
    """Return colour and dash of a series, for `ax.plot`."""
    return {"color": colour(series), "linestyle": DASHES[series % len(DASHES)]}


def save(ax: Any, path: str | os.PathLike[str]) -> None:
    """Write the figure of some axes; the file's suffix chooses the format."""
    content = io.BytesIO()
    ax.figure.savefig(content, format=Path(path).suffix.lstrip(".") or "png", dpi=130)
    write_whole(path, content.getvalue())


RULE = "#b0b0b0"
VARIABLES = {
    **{shade.lower(): f"var(--s{i})" for i, shade in enumerate(COLOURS)},
    "#000000": "var(--ink)",
    "#999999": "var(--soft)",
    RULE: "var(--rule)",
    "#ffffff": "var(--paper)",
}
STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": RULE,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.5,
    "grid.alpha": 0.7,
    "lines.linewidth": 1.8,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.major.pad": 7,
    "ytick.major.pad": 6,
    "svg.fonttype": "none",
    "svg.hashsalt": "hydra",
    "path.simplify": False,
}


@contextmanager
def page_axes(size: tuple[float, float] = (4.6, 3.4)) -> Iterator[Any]:
    """Give axes in the style of the page; draw on them and call `to_svg` inside."""
    mpl = imported("matplotlib", "A report", "report")
    figure = imported("matplotlib.figure", "A report", "report")
    with mpl.rc_context(STYLE):
        # 72 dots per inch are SVG's units: what is measured on the figure holds on the page
        yield figure.Figure(figsize=size, dpi=72, layout="constrained").subplots()


def to_svg(ax: Any, label: str, *, name: str) -> Markup:
    """Return the figure of the axes as an `<svg>` element, without title and legend.

    Args:
        ax: From `page_axes`.
        label: What screen readers announce; empty for decoration.
        name: Unique on the page; starts the ids that must stay.
    """
    ax.set_title("")
    if ax.get_legend() is not None:
        ax.get_legend().remove()
    content = io.StringIO()
    ax.figure.savefig(
        content, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
    )
    text = content.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r' clip-path="url\(#[^)]*\)"|<clipPath.*?</clipPath>', "", text, flags=re.S)
    view = re.search(r'viewBox="([^"]+)"', text)
    assert view is not None
    told = f'role="img" aria-label="{escape(label)}"' if label else 'aria-hidden="true"'
    opening = f'<svg class="chart" viewBox="{view[1]}" {told}>'
    text = re.sub(r"<svg[^>]*>", lambda _: opening, text, count=1)
    text = re.sub(r'id="series-(\d+)"', r'data-series="\1"', text)
    text = re.sub(r'xlink:href="#', f'href="#{name}-', text)
    text = re.sub(r'<g id="(?!cursor")[^"]*"', "<g", text)
    text = re.sub(r'<(path|style) id="([^"]+)"', rf'<\1 id="{name}-\2"', text)
    text = re.sub(r"font(-family)?: ([\d.]+px )?'[^;\"]*", _font, text)
    text = re.sub(r"<style[^>]*>.*?</style>", "", text, flags=re.S)
    for shade, variable in VARIABLES.items():
        text = re.sub(shade, variable, text, flags=re.I)
    markup = imported("markupsafe", "A report", "report")
    # drawn by us; names in it are escaped by matplotlib
    safe: Markup = markup.Markup(text.strip())
    return safe


def _font(match: re.Match[str]) -> str:
    family = "system-ui, sans-serif"
    return f"font: {match[2]}{family}" if match[2] else f"font-family: {family}"
