"""Tables of results side by side, in Markdown, at a prompt and in a notebook."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .._tables import markdown_table, table
from ..errors import DataError
from ..registry import check_name
from .figures import Measured, direction
from .intervals import winners

NOT_RATES = {
    *("NLL", "Brier", "MI", "PairwiseKL", "Loss", "Between", "Size"),
    *("RMSE", "MAE", "CRPS", "CRPS_members", "IntervalScore", "Width"),
    *("Pearson", "Spearman", "ErrorRank"),
}
HEADLINES = (
    *("cls/Acc", "cls/NLL", "cls/Brier", "cal/ECE", "cal/aECE"),
    *("cls/LabelAcc", "cls/mAP", "cls/F1_micro", "cls/F1_macro"),
    *("reg/RMSE", "reg/MAE", "reg/Pearson", "reg/Spearman", "reg/NLL", "reg/CRPS"),
    *("reg/IntervalScore", "reg/Coverage", "reg/Width", "reg/ErrorRank"),
    *("ent/F1", "ent/Precision", "ent/Recall", "ent/AUROC", "qa/EM", "qa/F1"),
    *("ood/mean/AUROC", "ood/mean/AUPR", "ood/mean/FPR95", "sc/AURC", "fail/AUROC"),
    *("ood/mean/novelty/AUROC", "ood/mean/novelty/FPR95", "ood/mean/novelty/Caught_5"),
    "novelty/Alarms_5",
    *("policy/Answered", "policy/WrongOfAll", "policy/WrongOfAnswered", "policy/New"),
    "ood/mean/policy/Answered",
    *("set/Coverage", "set/Size", "set/WorstClass", "set/WorstSize"),
    *("set/Coverage_novelty_0-0.5", "set/Coverage_novelty_0.95-1"),
    *("shift/mean/cls/Acc", "shift/mean/cls/NLL", "shift/mean/cal/ECE", "div/Disagreement"),
)


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
        # as in a path: `*` stays inside one part of the name, `**` crosses parts
        parts = re.split(r"(\*\*|\*)", pattern)
        expression = "".join({"*": "[^/]*", "**": ".*"}.get(p, re.escape(p)) for p in parts)
        found = [key for key in present if re.fullmatch(expression, key)]
        if not found and any(pattern in result for result in results):
            found = [pattern]  # another name of a figure
        if not found:
            raise DataError(f"No figure is called {pattern!r}. There are: {', '.join(present)}.")
        chosen |= dict.fromkeys(found)
    return list(chosen)


def compare_table(
    results: Sequence[Measured],
    *,
    keys: Sequence[str] | str | None = None,
    rows: str = "models",
) -> str:
    """Return several results side by side as one Markdown table, with their intervals.

    Bold is what is better than every other model by paired intervals, see `winners`; nothing
    where there is no clear winner.

    Example:
        >>> print(compare_table([single, hydra], keys=["cls/*", "ood/*/AUROC"]))

    Args:
        results: one for each model.
        keys: figures to show, by name or pattern (`ood/*/AUROC`, `post/**`), or `"all"`; headlines
            by default.
        rows: a row for each of the `models`, or of the `figures`.
    """
    check_name("rows", rows, ("models", "figures"))
    results = list(results)
    if not results:
        raise DataError("There are no results to show.")
    chosen = select_keys(results, keys)
    ahead = winners(results)
    body = []
    for place, result in enumerate(results):
        cells = []
        for key in chosen:
            text = shown(key, result.get(key))
            span = result.interval(key)
            between = f" [{shown(key, span[0])}, {shown(key, span[1])}]" if span else ""
            cells.append((f"**{text}**" if ahead.get(key) == place else text) + between)
        body.append(cells)
    names = [result.name for result in results]
    labels = [key + {1: " ↑", -1: " ↓", 0: ""}[direction(key)] for key in chosen]
    if rows == "models":
        pairs = zip(names, body, strict=True)
        return markdown_table([["", *labels], *([name, *cells] for name, cells in pairs)])
    turned = zip(labels, zip(*body, strict=True), strict=True)
    return markdown_table([["figure", *names], *([label, *cells] for label, cells in turned)])


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
        lines.append("  ... all figures: to_markdown(), to_pandas(), to_json()")
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
    note = f"{len(result)} figures in all: to_pandas(), to_markdown(), to_json()"
    return table(title, head, rows if spans else [row[:2] for row in rows], note=note)
