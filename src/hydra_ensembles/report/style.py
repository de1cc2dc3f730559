"""What all pictures share: axes without global state, colours, dashes, markers, files.

Colours are Okabe and Ito's, safe for colour-blind readers; series differ by dash or marker too.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

from .._records import write_whole

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
DASHES = ("-", "--", ":", "-.", (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1)), (0, (8, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def axes(ax: Any, size: tuple[float, float] = (4.8, 3.6)) -> Any:
    """Return the axes to draw on: those given, or new ones of a size in inches."""
    if ax is not None:
        return ax
    from matplotlib.figure import Figure

    return Figure(figsize=size, layout="constrained").subplots()


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
    """Write the picture that axes stand in; the file's ending says the format."""
    content = io.BytesIO()
    ax.figure.savefig(content, format=Path(path).suffix.lstrip(".") or "png", dpi=130)
    write_whole(path, content.getvalue())
