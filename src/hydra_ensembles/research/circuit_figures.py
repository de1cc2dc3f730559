"""Pictures of circuits: what heads do, which are kept, how circuits overlap. `ax` in, axes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..report.svg import axes


def _grid(rows: Sequence[Any]) -> Any:
    """Make a rectangle of rows of any length; what is missing is NaN."""
    import numpy as np

    width = max(len(row) for row in rows)
    grid = np.full((len(rows), width), np.nan)
    for i, row in enumerate(rows):
        grid[i, : len(row)] = [float(v) for v in row]
    return grid


def plot_effects(scores: Any, *, mask: Any = None, ax: Any = None, title: str = "") -> Any:
    """Draw a table of effects, layers bottom up; dots mark effects within two standard errors.

    Layers of zeros were not looked at: they stay grey.

    Args:
        scores: `HeadScores`, with standard errors if known.
        mask: A `HeadMask` whose kept heads are framed, in layers that do not keep all.
        ax: Where to draw.
        title: Above the picture.
    """
    import numpy as np

    grid = _grid(list(scores))
    ax = axes(ax, (1.2 + 0.45 * grid.shape[1], 1.2 + 0.32 * grid.shape[0]))
    limit = float(np.nanmax(np.abs(grid))) or 1.0
    grid[np.nansum(np.abs(grid), 1) == 0] = np.nan
    ax.set_facecolor("0.9")
    picture = ax.imshow(grid, cmap="RdBu_r", vmin=-limit, vmax=limit, origin="lower", aspect="auto")
    ax.figure.colorbar(picture, ax=ax, label="harm when edited")
    if scores.standard_error is not None:
        noise = np.abs(grid) < 2 * _grid(list(scores.standard_error))
        y, x = np.nonzero(noise)
        ax.plot(x, y, ".", color="0.45", markersize=3)
    if mask is not None:
        _frame(ax, mask)
    _nameaxes(ax, grid.shape)
    ax.set_title(title or scores.name)
    return ax


def _nameaxes(ax: Any, shape: tuple[int, ...]) -> None:
    """Name every head and layer, or every second or fourth where there are many."""
    layers, heads = shape
    ax.set_xticks(range(0, heads, 1 + heads // 13))
    ax.set_yticks(range(0, layers, 1 + layers // 13))
    ax.set_xlabel("head")
    ax.set_ylabel("layer")


def _frame(ax: Any, mask: Any) -> None:
    from matplotlib.patches import Rectangle

    for layer, head in mask.pairs():
        if bool(mask[layer].all()):
            continue
        ax.add_patch(Rectangle((head - 0.5, layer - 0.5), 1, 1, fill=False, lw=1.4, ec="black"))


def plot_members(masks: Sequence[Any], *, ax: Any = None, title: str = "members") -> Any:
    """Draw how many members keep each head."""
    total = [sum(m[layer].int() for m in masks) for layer in range(len(masks[0]))]
    grid = _grid(total)
    ax = axes(ax, (1.2 + 0.45 * grid.shape[1], 1.2 + 0.32 * grid.shape[0]))
    picture = ax.imshow(
        grid, cmap="viridis", vmin=0, vmax=len(masks), origin="lower", aspect="auto"
    )
    ax.figure.colorbar(
        picture, ax=ax, label=f"kept by, of {len(masks)}", ticks=range(len(masks) + 1)
    )
    _nameaxes(ax, grid.shape)
    ax.set_title(title)
    return ax


def plot_overlaps(overlaps: Mapping[tuple[str, str], float], *, ax: Any = None) -> Any:
    """Draw the Jaccard index of pairs of circuits as a matrix."""
    import numpy as np

    names = list(dict.fromkeys(name for pair in overlaps for name in pair))
    grid = np.eye(len(names))
    for (a, b), value in overlaps.items():
        i, j = names.index(a), names.index(b)
        grid[i, j] = grid[j, i] = value
    ax = axes(ax, (1.6 + 0.6 * len(names), 1.4 + 0.6 * len(names)))
    ax.imshow(grid, cmap="Blues", vmin=0, vmax=1)
    for i in range(len(names)):
        for j in range(len(names)):
            color = "white" if grid[i, j] > 0.6 else "black"
            ax.text(j, i, f"{grid[i, j]:.2f}", ha="center", va="center", color=color, fontsize=8)
    ax.set_xticks(range(len(names)), names, rotation=45, ha="right")
    ax.set_yticks(range(len(names)), names)
    ax.set_title("overlap of circuits")
    return ax
