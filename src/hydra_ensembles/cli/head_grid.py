"""Tables of heads for a terminal: one row per layer, one column per head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..heads.head_mask import HeadScores
    from ..search.headmap import Circuit


def scores_grid(name: str, scores: HeadScores) -> str:
    """Show scores of heads; higher = keep."""
    unit = _unit(scores.tolist())
    title = f"{name}: higher = keep{_in_units(unit)}"
    return "\n".join([title, *_rows(scores.tolist(), unit)])


def circuit_grid(found: Circuit) -> str:
    """Show the harm of removing each head, which heads are kept, and what is within noise."""
    assert found.effects.standard_error is not None
    effects, errors = found.effects.tolist(), found.effects.standard_error.tolist()
    unit = _unit(effects)
    most = max(error for row in errors for error in row) / unit
    total = sum(found.mask.shape)
    lines = [
        f"Circuit for {found.objective} ({found.condition}): {found.mask.total_kept} of {total} "
        "heads kept (■)",
        f"Harm of removing each head{_in_units(unit)}, standard errors up to {most:.1f}",
        *_rows(effects, unit, found.mask.tolist()),
    ]
    close = [str(n) for n, gap in enumerate(found.margins()) if gap is not None and gap < 2]
    if close:
        where = "every layer" if len(close) == len(effects) else f"layers {', '.join(close)}"
        lines.append(f"In {where} the last head kept is within noise of the first one left out.")
    return "\n".join(lines)


def _rows(
    values: Sequence[Sequence[float]], unit: float, kept: Sequence[Sequence[bool]] | None = None
) -> list[str]:
    most = max(len(row) for row in values)
    lines = [" head  " + " ".join(f"{head:>5}" for head in range(most))]
    for layer, row in enumerate(values):
        cells = []
        for head, value in enumerate(row):
            mark = "" if kept is None else "■" if kept[layer][head] else "·"
            text = f"{round(value / unit, 1) + 0.0:.1f}"  # no -0.0
            cells.append(f"{mark}{text:>{5 - len(mark)}}")
        lines.append(f"{layer:>5}  " + " ".join(cells))
    return lines


def _unit(values: Sequence[Sequence[float]]) -> float:
    """Return the power of ten of the largest value."""
    most = max((abs(value) for row in values for value in row if math.isfinite(value)), default=0)
    return 10.0 ** math.floor(math.log10(most)) if most else 1.0


def _in_units(unit: float) -> str:
    return "" if unit == 1 else f", in units of {unit:g}"
