"""Tables of results side by side: Markdown, LaTeX, CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence

from .._html import table
from ..errors import DataError
from .figures import Measured, direction
from .intervals import winners

NOT_RATES = {"NLL", "Brier", "MI", "PairwiseKL"}
HEADLINES = (
    *("cls/Acc", "cls/NLL", "cls/Brier", "cal/ECE", "cal/aECE"),
    *("ood/mean/AUROC", "ood/mean/AUPR", "ood/mean/FPR95", "sc/AURC", "fail/AUROC"),
    *("ood/mean/novelty/AUROC", "ood/mean/novelty/FPR95", "ood/mean/novelty/Caught_5"),
    "novelty/Alarms_5",
    *("policy/Answered", "policy/WrongOfAll", "policy/WrongOfAnswered", "policy/New"),
    "ood/mean/policy/Answered",
    *("shift/mean/cls/Acc", "shift/mean/cls/NLL", "shift/mean/cal/ECE", "div/Disagreement"),
)


CSV_COLUMNS = ("model", "figure", "value", "low", "high")


def is_rate(key: str) -> bool:
    """Tell whether a figure is a fraction that tables show in percent."""
    return key.rsplit("/", 1)[-1] not in NOT_RATES


def shown(key: str, value: float | None) -> str:
    """Return a figure as tables show it: rates in percent, the rest with four digits."""
    if value is None:
        return "–"
    return f"{100 * value:.2f}" if is_rate(key) else f"{value:.4f}"


def select_keys(results: Sequence[Measured], keys: Sequence[str] | str | None) -> list[str]:
    """Return the figures to show: headlines by default, `all`, or names and patterns."""
    present = list({key: None for result in results for key in result})
    if keys is None:
        return [key for key in HEADLINES if key in present]
    if keys == "all":
        return present
    wanted = [keys] if isinstance(keys, str) else list(keys)
    chosen: dict[str, None] = {}
    for pattern in wanted:
        found = [key for key in present if _matches(key, pattern)]
        if not found and any(pattern in result for result in results):
            found = [pattern]  # another name of a figure
        if not found:
            raise DataError(f"No figure is called {pattern!r}. There are: {', '.join(present)}.")
        chosen |= dict.fromkeys(found)
    return list(chosen)


def _matches(key: str, pattern: str) -> bool:
    """Match like a path: `*` stays inside one part of the name, `**` crosses parts."""
    parts = re.split(r"(\*\*|\*)", pattern)
    expression = "".join({"*": "[^/]*", "**": ".*"}.get(part, re.escape(part)) for part in parts)
    return re.fullmatch(expression, key) is not None


def compare_table(
    results: Sequence[Measured],
    *,
    keys: Sequence[str] | str | None = None,
    form: str = "markdown",
    rows: str = "models",
    best: bool = True,
    intervals: bool = True,
) -> str:
    """Return several results side by side as one table.

    Example:
        >>> print(compare_table([single, hydra], keys=["cls/*", "ood/*/AUROC"]))

    Args:
        results: one for each model.
        keys: figures to show, by name or pattern (`ood/*/AUROC`, `post/**`), or `"all"`; headlines
            by default.
        form: `markdown`, `latex` (booktabs) or `csv` (one line for each figure, full precision).
        rows: a row for each of the `models`, or of the `figures`.
        best: set in bold what the paired intervals tell better than every other model, see
            `winners`; nothing where they tell no winner.
        intervals: show bootstrap intervals where there are any.
    """
    if form not in ("markdown", "latex", "csv") or rows not in ("models", "figures"):
        raise ValueError(
            f"form={form!r}, rows={rows!r}: expected markdown, latex or csv, and models or figures."
        )
    results = list(results)
    if not results:
        raise DataError("There are no results to show.")
    chosen = select_keys(results, keys)
    if form == "csv":
        return _csv(results, chosen)
    bold = "**{}**" if form == "markdown" else r"\textbf{{{}}}"
    special = "|" if form == "markdown" else "&%$#_{}"
    escape = str.maketrans({character: f"\\{character}" for character in special})
    up, down = ("↑", "↓") if form == "markdown" else (r"$\uparrow$", r"$\downarrow$")
    head = ["" if rows == "models" else "figure"]
    labels = [
        key.translate(escape) + {1: f" {up}", -1: f" {down}", 0: ""}[direction(key)]
        for key in chosen
    ]
    ahead = winners(results) if best else {}
    body = []
    for place, result in enumerate(results):
        cells = []
        for key in chosen:
            value = result.get(key)
            text = shown(key, value)
            if ahead.get(key) == place:
                text = bold.format(text)
            span = result.interval(key) if intervals else None
            if span is not None:
                text += f" [{shown(key, span[0])}, {shown(key, span[1])}]"
            cells.append(text)
        body.append(cells)
    names = [result.name.translate(escape) for result in results]
    if rows == "models":
        grid = [head + labels, *([name, *cells] for name, cells in zip(names, body, strict=True))]
    else:
        turned = zip(labels, zip(*body, strict=True), strict=True)
        grid = [head + names, *([label, *cells] for label, cells in turned)]
    return markdown_table(grid) if form == "markdown" else _latex(grid)


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Align the rows of a table (the first is its head): the first column left, the rest right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        first, *rest = (f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        lines.append("| " + " | ".join([row[0].ljust(len(first)), *rest]) + " |")
    rule = ["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]
    return "\n".join([lines[0], "|" + "|".join(rule) + "|", *lines[1:]])


def _latex(grid: list[list[str]]) -> str:
    rows = [" & ".join(row).replace("–", "--") + r" \\" for row in grid]
    return "\n".join(
        [
            rf"\begin{{tabular}}{{l{'r' * (len(grid[0]) - 1)}}}",
            r"\toprule",
            rows[0],
            r"\midrule",
            *rows[1:],
            r"\bottomrule",
            r"\end{tabular}",
        ]
    )


def _csv(results: Sequence[Measured], keys: Sequence[str]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for result in results:
        for key in keys:
            if key in result:
                low, high = result.interval(key) or ("", "")
                writer.writerow([result.name, key, repr(result[key]), low, high])
    return text.getvalue()


def plain_text(result: Measured) -> str:
    """Return a result for reading at a prompt: headlines, then what each set gave."""
    sizes = result.settings.get("examples", {})
    lines = [
        f"Results of {result.name} on {sizes.get('id', '?')} examples, score {result.scores[0]}"
    ]
    for key in select_keys([result], None):
        span = result.interval(key)
        between = f"  [{shown(key, span[0])}, {shown(key, span[1])}]" if span else ""
        mark = {1: "↑", -1: "↓", 0: " "}[direction(key)]
        lines.append(f"  {key:<20} {mark} {shown(key, result[key]):>8}{between}")
    for name, size in sizes.items():
        if name.startswith("ood/"):
            auroc, fpr = result.get(f"{name}/AUROC"), result.get(f"{name}/FPR95")
            lines.append(
                f"  {name} ({size}): AUROC {shown('AUROC', auroc)}, FPR95 {shown('FPR95', fpr)}"
            )
    more = len(result) - len(lines) + 1
    if "disagreement" in result.settings:
        lines.append(f"  {result.settings['disagreement']['sentence']}")
    if more > 0:
        lines.append("  ... all figures: to_markdown(), to_latex(), to_csv(), to_json()")
    lines += [f"  no {key}: {why}" for key, why in result.notes.items()]
    return "\n".join(lines)


def html_text(result: Measured) -> str:
    """Return a result for a notebook: the headlines with their intervals."""
    examples = result.settings.get("examples", {}).get("id", "?")
    rows = []
    for key in select_keys([result], None):
        span = result.interval(key)
        between = f"{shown(key, span[0])} to {shown(key, span[1])}" if span else ""
        mark = {1: "↑", -1: "↓", 0: ""}[direction(key)]
        rows.append([f"{key} {mark}", shown(key, result[key]), between])
    spans = any(row[2] for row in rows)
    head = ["figure", "value", "95 % interval"] if spans else ["figure", "value"]
    title = f"Results of {result.name} on {examples} examples, score {result.scores[0]}"
    note = f"{len(result)} figures in all: to_pandas(), to_markdown(), to_csv(), to_json()"
    return table(title, head, rows if spans else [row[:2] for row in rows], note=note)
