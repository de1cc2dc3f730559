"""Small tables: HTML for notebooks, where every text is escaped, and Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_CELL = "padding:2px 10px;border:none;"
_SQUARE = (
    "width:14px;height:14px;padding:0;border:2px solid transparent;background-clip:padding-box;"
)
INK = (58, 95, 140)
"""Colour of a full square: red, green, blue."""


def table(
    title: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    texts: int = 1,
    note: str = "",
) -> str:
    """Return a titled table; the first `texts` columns stand left, the others, numbers, right."""

    def line(cells: Sequence[str], tag: str) -> str:
        sides = ["left" if i < texts else "right" for i in range(len(cells))]
        return "".join(
            f'<{tag} style="{_CELL}text-align:{side}">{escape(cell)}</{tag}>'
            for cell, side in zip(cells, sides, strict=True)
        )

    header = f"<thead><tr>{line(head, 'th')}</tr></thead>" if head else ""
    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return _frame(title, f"{header}<tbody>{body}</tbody>", note)


def squares(title: str, rows: Sequence[Sequence[float]], notes: Sequence[str]) -> str:
    """Return a grid: one square per value in [0, 1], darker when higher, and a note per row."""
    widest = max(len(row) for row in rows)
    lines = []
    for number, (row, note) in enumerate(zip(rows, notes, strict=True)):
        cells = "".join(
            f'<td style="{_SQUARE}background-color:rgba{(*INK, round(0.08 + 0.92 * value, 3))}">'
            "</td>"
            for value in row
        )
        blank = f'<td style="{_SQUARE}"></td>' * (widest - len(row))
        lines.append(
            f'<tr><td style="{_CELL}">{number}</td>{cells}{blank}'
            f'<td style="{_CELL}">{escape(note)}</td></tr>'
        )
    return _frame(title, f"<tbody>{''.join(lines)}</tbody>", "")


def _frame(title: str, content: str, note: str) -> str:
    below = f"<div><small>{escape(note)}</small></div>" if note else ""
    return (
        f"<div><strong>{escape(title)}</strong>"
        f'<table style="border-collapse:collapse">{content}</table>{below}</div>'
    )


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown; the first row is its head, the first column stands left."""
    rows = [[cell.replace("|", r"\|") for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        first, *rest = (f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        lines.append("| " + " | ".join([row[0].ljust(len(first)), *rest]) + " |")
    rule = ["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]
    return "\n".join([lines[0], "|" + "|".join(rule) + "|", *lines[1:]])
