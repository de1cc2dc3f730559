"""Sets with a guarantee on a page: what they cover by their size, by novelty and by class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..evaluation.tables import shown
from ..evaluation.task_metrics import by_novelty, by_size
from .rounding import percent
from .sections import Section
from .svg import axes, colour, page_axes, to_svg

if TYPE_CHECKING:
    from ..evaluation.results import Results

WORST = 12
"""Most classes that are listed, those with the lowest coverage."""
EACH = {"class": "each class is covered as often", "group": "each group is covered as often"}


def plot_set_sizes(results: Results, *, series: int = 0, ax: Any = None) -> Any:
    """Draw what share is covered of the examples whose sets are equally large."""
    ax = axes(ax)
    parts = by_size(results.examples["id"]["set_size"])
    covered = results.examples["id"]["covered"].double()
    count = len(covered)
    for place, rows in enumerate(parts.values()):  # the paler a bar, the fewer the examples
        share = float(rows.double().sum()) / count
        height = 100 * float(covered[rows].mean())
        ax.bar(place, height, color=colour(series), alpha=0.25 + 0.7 * share)
        ax.annotate(
            percent(share),
            (place, height),
            ha="center",
            va="bottom",
            fontsize=8,
            annotation_clip=False,
        )
    if "sets" in results.settings:
        asked = 100 * results.settings["sets"]["asked"]
        ax.axhline(asked, color=colour(1), linestyle="--", linewidth=1.2)
    ax.set_xticks(range(len(parts)), list(parts))
    ax.set(ylim=(0, 108), xlabel="size of the set", ylabel="covered, %")
    ax.set_title(f"{results.name}: coverage by size")
    return ax


def sets(results: Sequence[Results], names: Sequence[str]) -> Section | None:
    """Say of each model with sets what they cover, by size, by novelty and by class."""
    models = []
    for result in results:
        columns = result.examples.get("id", {})
        if "covered" not in columns:
            continue
        series, about = names.index(result.name), result.settings.get("sets", {})
        coverage = shown("set/Coverage", result["set/Coverage"])
        size = shown("set/Size", result["set/Size"])
        with page_axes((4.6, 3.0)) as ax:
            plot_set_sizes(result, series=series, ax=ax)
            label = (
                f"Coverage of the sets of {result.name} by their size: {coverage} percent in all"
            )
            drawing = to_svg(ax, label, name=f"sets-{series}")
        span = result.interval("set/Coverage")
        models.append(
            {
                "name": result.name,
                "drawing": drawing,
                "method": about.get("method"),
                "asked": percent(about.get("asked")),
                "each": EACH.get(about.get("by", ""), ""),
                "coverage": coverage,
                "interval": [shown("set/Coverage", end) for end in span] if span else None,
                "size": size,
                "tables": _tables(columns, about.get("classes")),
            }
        )
    return Section("sets", "Sets with a guarantee", {"models": models}) if models else None


def _tables(columns: Mapping[str, Tensor], classes: Sequence[str] | None) -> dict[str, Any]:
    """Return rows of name, examples, coverage and mean size, by the heading of their names."""
    covered, size = columns["covered"].double(), columns["set_size"]

    def row(name: str, chosen: Tensor) -> dict[str, Any]:
        count = int(chosen.sum())
        means = (float(values[chosen].mean()) for values in (covered, size))
        share, wide = means if count else (None, None)
        mean = "–" if wide is None else f"{wide:.3g}"
        return {"name": name, "count": count, "covered": share, "size": mean}

    tables: dict[str, Any] = {}
    if "novelty" in columns:
        bins = by_novelty(columns["novelty"]).items()
        tables["novelty"] = [row(name.replace("-", " to "), chosen) for name, chosen in bins]
    if "label" in columns:
        label = columns["label"]
        found = [
            row(classes[k] if classes else f"class {k}", label == k)
            for k in label.unique().tolist()
        ]
        worst = sorted(found, key=lambda part: part["covered"])[:WORST]
        tables["class" if len(found) <= WORST else f"class, the worst {WORST}"] = worst
    for rows in tables.values():
        for part in rows:
            part["covered"] = percent(part["covered"])
    return tables
