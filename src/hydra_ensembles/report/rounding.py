"""How pages round shares and scores; figures in tables are rounded by `evaluation.tables.shown`."""

from __future__ import annotations


def percent(share: float | None) -> str:
    """Return a share in percent with one decimal; only a full share is shown as 100 and none as 0.

    Example:
        >>> percent(0.99996), percent(0.0002)
        ('99.9 %', '0.1 %')
    """
    if share is None:
        return "–"
    tenths = round(1000 * share)
    if 0 < share < 1:
        tenths = min(max(tenths, 1), 999)
    return f"{tenths / 10:.1f}\u00a0%"


def three_digits(value: float) -> str:
    """Return a score with three digits."""
    return f"{value:.3g}"
