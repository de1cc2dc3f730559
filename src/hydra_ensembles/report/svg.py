"""Small charts as inline SVG: colours come from the page's style, so they follow light and dark.

Series differ by colour, dash and marker, never by colour alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

SERIES = 8
"""Styles `s0` to `s7` exist in the page's style sheet; further series start again."""

Point = tuple[float, float]
_LEFT, _TOP, _RIGHT, _BOTTOM = 60, 14, 26, 46


@dataclass
class Chart:
    """Axes to draw on; every `add` method returns nothing and draws above what is there.

    Args:
        title: What screen readers announce.
        x_label, y_label: Of the axes.
        x_range, y_range: What the axes span.
        percent: Whether ticks are fractions to be shown in percent, for x and for y.
        size: Width and height of the viewBox.
    """

    title: str
    x_label: str
    y_label: str
    x_range: Point = (0.0, 1.0)
    y_range: Point = (0.0, 1.0)
    percent: tuple[bool, bool] = (True, True)
    size: tuple[int, int] = (460, 340)
    parts: list[str] = field(default_factory=list)
    labels: list[Point] = field(default_factory=list)

    def x(self, value: float) -> float:
        """Place a value on the horizontal axis."""
        low, high = self.x_range
        width = self.size[0] - _LEFT - _RIGHT
        return round(_LEFT + (value - low) / ((high - low) or 1) * width, 2)

    def y(self, value: float) -> float:
        """Place a value on the vertical axis."""
        low, high = self.y_range
        height = self.size[1] - _TOP - _BOTTOM
        return round(_TOP + height - (value - low) / ((high - low) or 1) * height, 2)

    def add_line(self, points: Sequence[Point], series: int, name: str) -> None:
        """Draw a line through points."""
        path = " ".join(f"{self.x(a)},{self.y(b)}" for a, b in points)
        self.parts.append(
            f'<polyline class="line s{series % SERIES}" data-series="{series}" points="{path}">'
            f"<title>{escape(name)}</title></polyline>"
        )

    def add_guide(self, points: Sequence[Point], name: str) -> None:
        """Draw a thin dotted line for reference."""
        path = " ".join(f"{self.x(a)},{self.y(b)}" for a, b in points)
        self.parts.append(
            f'<polyline class="guide" points="{path}"><title>{escape(name)}</title></polyline>'
        )

    def add_bar(
        self, low: float, high: float, value: float, series: int, note: str, *, weight: float = 1.0
    ) -> None:
        """Draw a bar from the axis to a value, paler the less weight (0 to 1) it has."""
        left, right, top = self.x(low) + 0.75, self.x(high) - 0.75, self.y(value)
        height = max(0.0, self.y(self.y_range[0]) - top)
        self.parts.append(
            f'<rect class="bar s{series % SERIES}" x="{left:.2f}" y="{top}" '
            f'width="{max(0.5, right - left):.2f}" height="{height:.2f}" '
            f'fill-opacity="{0.3 + 0.7 * weight**0.5:.2f}">'
            f"<title>{escape(note)}</title></rect>"
        )

    def add_marker(self, at: Point, series: int, note: str, *, label: str = "") -> None:
        """Draw a point, its shape by series, with a label beside it."""
        x, y = self.x(at[0]), self.y(at[1])
        shapes = (
            f'<circle cx="{x}" cy="{y}" r="5.5"/>',
            f'<rect x="{x - 5}" y="{y - 5}" width="10" height="10"/>',
            f'<polygon points="{x},{y - 6.5} {x + 6},{y + 5} {x - 6},{y + 5}"/>',
            f'<polygon points="{x},{y - 7} {x + 6},{y} {x},{y + 7} {x - 6},{y}"/>',
        )
        text = ""
        if label:
            near_right = x > self.size[0] * 0.66
            anchor, shift = ("end", -10) if near_right else ("start", 10)
            below = y + 4
            while any(abs(a - x) < 60 and abs(b - below) < 13 for a, b in self.labels):
                below += 14  # models of one cost and quality must both be read
            self.labels.append((x, below))
            text = f'<text class="label" x="{x + shift}" y="{below}" text-anchor="{anchor}">'
            text += f"{escape(label)}</text>"
        self.parts.append(
            f'<g class="marker s{series % SERIES}" data-series="{series}">'
            f"<title>{escape(note)}</title>{shapes[series % len(shapes)]}{text}</g>"
        )

    def add_raw(self, svg: str) -> None:
        """Draw anything."""
        self.parts.append(svg)

    def render(self, *, identity: str = "") -> str:
        """Return the chart with axes and grid as one `<svg>` element."""
        width, height = self.size
        right, bottom = width - _RIGHT, height - _BOTTOM
        grid = []
        for value in ticks(*self.x_range):
            x = self.x(value)
            grid.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{_TOP}" y2="{bottom}"/>')
            grid.append(
                f'<text class="tick" x="{x}" y="{bottom + 16}" text-anchor="middle">'
                f"{tick_text(value, self.percent[0])}</text>"
            )
        for value in ticks(*self.y_range):
            y = self.y(value)
            grid.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y}" y2="{y}"/>')
            grid.append(
                f'<text class="tick" x="{_LEFT - 7}" y="{y + 4}" text-anchor="end">'
                f"{tick_text(value, self.percent[1])}</text>"
            )
        middle = (_TOP + bottom) / 2
        named = f' id="{identity}"' if identity else ""
        return (
            f'<svg{named} class="chart" viewBox="0 0 {width} {height}" role="img" '
            f'aria-label="{escape(self.title)}">{"".join(grid)}{"".join(self.parts)}'
            f'<text class="axis" x="{(_LEFT + right) / 2}" y="{height - 8}" text-anchor="middle">'
            f"{escape(self.x_label)}</text>"
            f'<text class="axis" transform="translate(14 {middle}) rotate(-90)" '
            f'text-anchor="middle">{escape(self.y_label)}</text></svg>'
        )


def ticks(low: float, high: float, *, most: int = 6) -> list[float]:
    """Return round numbers between two ends."""
    span = high - low
    if span <= 0:
        return [low]
    step = 10.0 ** _exponent(span / most)
    for factor in (1, 2, 2.5, 5, 10):
        if span / (step * factor) <= most:
            step *= factor
            break
    first = -(-low // step)
    found = []
    value = first * step
    while value <= high + 1e-9 * span:
        found.append(round(value, 10) + 0.0)
        value += step
    return found


def _exponent(value: float) -> int:
    text = f"{value:e}"
    return int(text.split("e")[1])


def tick_text(value: float, percent: bool) -> str:
    """Return a tick's text: `20 %`, or a short number."""
    return f"{100 * value:g} %" if percent else f"{value:.6g}"


def head_map(
    rows: Sequence[Sequence[bool]], *, title: str, series: int, branch: int | None = None
) -> str:
    """Draw one member's heads: filled where kept, an outline where pruned, layer 0 at the bottom.

    Args:
        rows: Kept or not, by layer and head.
        title: What screen readers announce.
        series: Of the colour.
        branch: First layer that is the member's own; the trunk below it is drawn paler.
    """
    cell, left, bottom = 16, 30, 20
    width = left + cell * max(len(row) for row in rows) + 6
    height = cell * len(rows) + bottom + 6
    parts = []
    for layer, row in enumerate(rows):
        y = 3 + cell * (len(rows) - 1 - layer)
        shade = " trunk" if branch is not None and layer < branch else ""
        for head, kept in enumerate(row):
            word = "kept" if kept else "pruned"
            parts.append(
                f'<rect class="head {word}{shade} s{series % SERIES}" x="{left + cell * head + 2}" '
                f'y="{y + 2}" width="{cell - 4}" height="{cell - 4}" rx="2">'
                f"<title>layer {layer}, head {head}: {word}</title></rect>"
            )
        if len(rows) <= 8 or layer % 2 == 0 or layer == len(rows) - 1:
            parts.append(
                f'<text class="tick" x="{left - 6}" y="{y + 12}" text-anchor="end">{layer}</text>'
            )
    middle = left + cell * max(len(row) for row in rows) / 2
    parts.append(
        f'<text class="tick" x="{middle}" y="{height - 5}" text-anchor="middle">heads</text>'
    )
    return (
        f'<svg class="heads" viewBox="0 0 {width} {height}" width="{width}" role="img" '
        f'aria-label="{escape(title)}">{"".join(parts)}</svg>'
    )
