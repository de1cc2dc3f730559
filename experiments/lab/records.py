"""Records of a table: one line per row and draw, and paired differences, as two CSV files.

All figures come from `hydra_ensembles.evaluate` and `compare`, under the names of `Results`. Rates
are fractions. `commit` is that of the code which made the line. A figure that a run did not compute
is missing; it is never carried over from another run.
"""

from __future__ import annotations

import csv
import io
import math
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra_ensembles import Results, compare
from hydra_ensembles._records import write_whole

PAGES = Path(__file__).parents[2] / "docs" / "results"
FIXED = ("row", "draw", "commit", "cost", "temperature")
KEPT = re.compile(
    r"(post/)?(cls/(Acc|NLL|Brier)|cal/(a?ECE)|sc/(AURC|AUGRC)|fail/AUROC)"
    r"|div/(MI|Disagreement)"
    r"|shift/mean/(cls/(Acc|NLL)|cal/ECE)"
    r"|ood/.*(AUROC|FPR95)"
    r"|post/ood/(\w+/)?mean/.*(AUROC|FPR95)"
)
COMPARED = re.compile(
    r"(post/)?(cls/(Acc|NLL)|cal/ECE|sc/AURC|fail/AUROC)"
    r"|ood/(\w+/)?mean/.*(AUROC|FPR95)"
    r"|shift/mean/cls/(Acc|NLL)"
)


@dataclass
class Records:
    """The lines of a table.

    Attributes:
        rows: {(row, draw): {column: value}}.
        differences: {(row, against, figure): (difference, low, high, commit)}.
    """

    rows: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    differences: dict[tuple[str, str, str], tuple[float, float, float, str]] = field(
        default_factory=dict
    )

    @classmethod
    def read(cls, name: str, folder: Path = PAGES) -> Records:
        """Read a table's files; empty where there are none."""
        found = cls()
        path = folder / f"{name}.csv"
        if path.exists():
            for line in csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))):
                values: dict[str, Any] = {
                    k: float(v) for k, v in line.items() if v and k not in ("row", "draw", "commit")
                }
                found.rows[line["row"], int(line["draw"])] = {"commit": line["commit"], **values}
        path = folder / f"{name}-differences.csv"
        if path.exists():
            for line in csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))):
                key = (line["row"], line["against"], line["figure"])
                span = [float(line[k]) for k in ("difference", "low", "high")]
                found.differences[key] = (span[0], span[1], span[2], line["commit"])
        return found

    def write(self, name: str, order: Sequence[str], folder: Path = PAGES) -> None:
        """Write both files, rows in the table's order."""
        place = {row: i for i, row in enumerate(order)}
        keys = sorted(self.rows, key=lambda key: (place.get(key[0], len(place)), key))
        names = {column: None for key in keys for column in self.rows[key]}
        columns = [*FIXED, *sorted((c for c in names if c not in FIXED), key=_figure_order)]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        for key in keys:
            line = {"row": key[0], "draw": key[1], **self.rows[key]}
            writer.writerow([_shown(line.get(column, "")) for column in columns])
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / f"{name}.csv", text.getvalue())
        if not self.differences:
            return
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["row", "against", "figure", "difference", "low", "high", "commit"])
        for (row, against, figure), span in sorted(
            self.differences.items(), key=lambda one: (place.get(one[0][0], len(place)), one[0][1])
        ):
            writer.writerow([row, against, figure, *map(_shown, span)])
        write_whole(folder / f"{name}-differences.csv", text.getvalue())

    def draws(self, row: str) -> list[dict[str, Any]]:
        """Return a row's lines by draw."""
        return [line for (name, _), line in sorted(self.rows.items()) if name == row]

    def mean(self, row: str, figure: str) -> float | None:
        """Return a figure's mean over a row's draws, None where it is missing."""
        values = [line[figure] for line in self.draws(row) if figure in line]
        return sum(values) / len(values) if values else None

    @property
    def commits(self) -> list[str]:
        """The commits whose code made the rows, in the order of the rows."""
        return list(dict.fromkeys(line["commit"] for line in self.rows.values()))

    def add(
        self,
        results: Mapping[str, Mapping[int, Results]],
        costs: Mapping[str, float],
        *,
        against: Mapping[str, Sequence[str]],
        count: int,
        matched: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Replace rows by fresh results, and compare each with some of them (`count` resamples).

        With those in `matched` a row is compared on its own draws only (of one host, that host's).
        """
        commit = this_commit()
        for row, by_draw in results.items():
            self.rows = {key: line for key, line in self.rows.items() if key[0] != row}
            self.differences = {
                key: span
                for key, span in self.differences.items()
                if key[0] != row or key[1] not in results
            }
            for draw, result in by_draw.items():
                figures = {k: v for k, v in result.figures.items() if KEPT.fullmatch(k)}
                self.rows[row, draw] = {
                    "commit": commit,
                    "cost": costs[row],
                    "temperature": result.settings["temperature"],
                    **figures,
                }
            for other in against[row]:
                if other == row or other not in results or not count:
                    continue
                others = results[other]
                if matched and other in matched[row] and by_draw.keys() <= others.keys():
                    others = {draw: others[draw] for draw in by_draw}
                pair = list(by_draw.values()), list(others.values())
                for figure, d in compare(*pair, count=count).items():
                    if COMPARED.fullmatch(figure):
                        span = (d.difference, d.low, d.high, commit)
                        self.differences[row, other, figure] = span


def this_commit() -> str:
    """Return the commit of the code that runs, with a plus where `src` or `experiments` differ."""
    place = Path(__file__).parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=place, capture_output=True, text=True)
        return done.stdout.strip()

    watched = (":/src", ":/experiments", ":(top,exclude)experiments/results")
    changed = git("status", "--porcelain", "--", *watched)
    return (git("rev-parse", "--short=7", "HEAD") or "unknown") + ("+" if changed else "")


def _figure_order(figure: str) -> tuple[int, str]:
    groups = ("cls/", "cal/", "sc/", "fail/", "ood/mean", "ood/", "shift/", "div/", "post/")
    return next((i for i, g in enumerate(groups) if figure.startswith(g)), len(groups)), figure


def _shown(value: Any) -> Any:
    """Return a number with four digits after the point, as many as the test sets can tell."""
    if not isinstance(value, float):
        return value
    return f"{value:.4f}".rstrip("0").rstrip(".") if math.isfinite(value) else ""
