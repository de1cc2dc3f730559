"""The sections of the report: plain results to what a template shows, None if there is nothing.

A section is a function here and a template of the same name in `templates/`; `write_report` lists
them in the order of the page. To add a panel, write the two and add a line there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import DataError
from ..evaluation.figures import direction
from ..evaluation.intervals import compare, winners
from ..evaluation.tables import select_keys, shown
from ..heads.head_mask import HeadMask
from . import figures as charts
from .curves import ood_names
from .examples import Example
from .rounding import percent, three_digits
from .svg import page_axes, to_svg

if TYPE_CHECKING:
    from ..evaluation.results import Results

NEWEST = 12
"""Newest test examples that are listed."""
NEWEST_HEADING = "Newest: least like the known data"
"""Heading of the newest test examples."""
FRONTIERS = ("ood/mean/AUROC", "cls/NLL", "cls/Acc", "cal/ECE")

LABELS = {
    "cls/Acc": "accuracy",
    "cls/NLL": "NLL",
    "cls/Brier": "Brier",
    "cls/LabelAcc": "labels right",
    "cls/mAP": "mAP",
    "cls/F1_micro": "micro F1",
    "cls/F1_macro": "macro F1",
    "reg/RMSE": "RMSE",
    "reg/MAE": "MAE",
    "reg/Pearson": "Pearson",
    "reg/Spearman": "Spearman",
    "reg/NLL": "NLL",
    "reg/CRPS": "CRPS",
    "reg/IntervalScore": "interval score",
    "reg/Coverage": "in the 90 % interval",
    "reg/Width": "width of the 90 % interval",
    "reg/ErrorRank": "error rank",
    "ent/F1": "entity F1",
    "ent/Precision": "entity precision",
    "ent/Recall": "entity recall",
    "ent/AUROC": "entity error AUROC",
    "cls/Loss": "loss",
    "qa/EM": "exact match",
    "qa/F1": "answer F1",
    "cal/ECE": "ECE",
    "cal/aECE": "adaptive ECE",
    "ood/mean/AUROC": "OOD AUROC",
    "ood/mean/mutual-information/AUROC": "OOD AUROC by mutual information",
    "ood/mean/AUPR": "OOD AUPR",
    "ood/mean/FPR95": "OOD FPR95",
    "sc/AURC": "AURC",
    "fail/AUROC": "error AUROC",
    "ood/mean/novelty/AUROC": "OOD AUROC by novelty",
    "ood/mean/novelty/FPR95": "OOD FPR95 by novelty",
    "ood/mean/novelty/Caught_5": "OOD caught at 5 % alarms",
    "novelty/Alarms_5": "alarms on test data at 5 %",
    "policy/Answered": "answered by the policy",
    "policy/WrongOfAll": "answered and wrong, of all",
    "policy/WrongOfAnswered": "wrong, of the answered",
    "policy/New": "called new",
    "ood/mean/policy/Answered": "OOD answered by the policy",
    "set/Coverage": "covered by the sets",
    "set/Size": "mean size of a set",
    "set/WorstClass": "covered, worst class",
    "set/WorstSize": "covered, worst size of set",
    "set/Coverage_novelty_0-0.5": "covered, novelty below 0.5",
    "set/Coverage_novelty_0.95-1": "covered, novelty above 0.95",
    "shift/mean/cls/Acc": "shifted accuracy",
    "shift/mean/cls/NLL": "shifted NLL",
    "shift/mean/cal/ECE": "shifted ECE",
    "div/Disagreement": "disagreement",
}

MEANINGS = {
    "cls/NLL": "negative log-likelihood of the true class, in nats: how good the probabilities are",
    "cls/Brier": "squared error of the probabilities, summed over classes",
    "cls/mAP": "area under precision and recall of each label, mean over labels (%)",
    "cls/F1_micro": "harmonic mean of precision and recall over all labels together (%)",
    "cls/F1_macro": "the same by label, mean over labels (%)",
    "reg/NLL": "negative log-likelihood of the true numbers, in nats",
    "reg/CRPS": "distance of the predicted distribution to the true number, in its own unit",
    "reg/IntervalScore": "width of the 90 % interval and a penalty for numbers outside",
    "reg/ErrorRank": "rank correlation of the error and the uncertainty",
    "ent/F1": "harmonic mean of precision and recall of whole entities (%)",
    "ent/AUROC": "how well uncertainty ranks wrong entities above right ones (%; 50 is chance)",
    "qa/F1": "shared tokens of the answer and the true one (%)",
    "cal/ECE": "gap between confidence and accuracy, in 15 bins of equal width (%)",
    "cal/aECE": "the same, in bins of equally many examples (%)",
    "sc/AURC": "error rate among the answered, averaged over all shares that may be answered (%)",
    "fail/AUROC": "how well uncertainty ranks wrong answers above right ones (%; 50 is chance)",
    "ood/mean/AUROC": "how well uncertainty ranks outliers (out of distribution, mean of all sets) "
    "above test data (%; 50 is chance)",
    "ood/mean/AUPR": "area under precision and recall of finding outliers (%)",
    "ood/mean/FPR95": "test data called outliers where 95 % of the outliers are found (%)",
    "ood/mean/novelty/AUROC": "how well novelty ranks outliers above test data (%; 50 is chance)",
    "ood/mean/novelty/FPR95": "test data called new where 95 % of the outliers are found (%)",
    "ood/mean/novelty/Caught_5": "outliers that are newer than 95 % of the known data (%)",
    "novelty/Alarms_5": "test data that is newer than 95 % of the known data (%; 5 is expected)",
    "div/Disagreement": "pairs of members that give different answers (%)",
}
"""Of the figures whose names do not say it."""

SPOKEN = {
    key: LABELS[key]
    for key in (
        *("cls/Acc", "cls/NLL", "cal/ECE", "cal/aECE", "sc/AURC", "fail/AUROC", "ood/mean/AUROC"),
        *("ood/mean/novelty/AUROC", "shift/mean/cls/Acc", "shift/mean/cls/NLL"),
        *("cls/mAP", "cls/F1_micro", "reg/RMSE", "reg/Pearson", "reg/NLL", "reg/CRPS"),
        *("ent/F1", "qa/EM", "qa/F1", "cls/Loss"),
    )
}
"""The figures that verdicts speak of."""


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        name: Its id on the page, and the name of its template.
        heading: What stands above it.
        content: What the template reads.
        long: Whether it may be broken over printed pages.
    """

    name: str
    heading: str
    content: dict[str, Any]
    long: bool = False


def built(summary: str, masks: Sequence[HeadMask], branch: int | None) -> Section | None:
    """Say what was built and draw the members' heads."""
    if not summary and not masks:
        return None
    maps = []
    for member, mask in enumerate(masks):
        kept = f"{mask.total_kept} of {sum(mask.shape)}"
        size = (0.5 + 0.22 * max(mask.shape), 0.3 + 0.22 * len(mask))
        with page_axes(size) as ax:
            charts.plot_head_map(mask, names=[""], branch=branch, series=member, ax=ax)
            label = f"Heads of member {member + 1}: {kept} kept"
            drawing = to_svg(ax, label, name=f"heads-{member}")
        maps.append({"drawing": drawing, "member": member + 1, "kept": kept, "inches": size[0]})
    content = {"summary": summary, "maps": maps, "branch": branch or 0}
    return Section("built", "What was built", content)


def figures(results: Sequence[Results], costs: Mapping[str, float]) -> Section:
    """Set the headline figures of all models side by side, and say what can be told apart."""
    rows = []
    ahead = winners(results)
    for key in select_keys(results, None):
        cells = []
        for number, result in enumerate(results):
            span, best = result.interval(key), ahead.get(key) == number
            interval = f"[{shown(key, span[0])}, {shown(key, span[1])}]" if span else None
            text = shown(key, result.get(key))
            cells.append({"text": text, "interval": interval, "best": best})
        label = LABELS.get(key, key)
        rows.append({"key": key, "label": label, "direction": direction(key), "cells": cells})
    notes = {f"{r.name}: no {key}, {why}" for r in results for key, why in r.notes.items()}
    content = {
        "names": [result.name for result in results],
        "costs": [costs.get(result.name) for result in results] if costs else [],
        "rows": rows,
        "verdicts": verdicts(results),
        "intervals": any(result.intervals for result in results),
        "notes": sorted(notes),
        "meanings": {r["label"]: MEANINGS[r["key"]] for r in rows if r["key"] in MEANINGS},
    }
    return Section("figures", "Figures", content)


def verdicts(results: Sequence[Results]) -> list[str]:
    """Say in one line per rival where the first model is better and worse, by paired intervals."""
    first, *rivals = results
    if not first.settings.get("bootstrap"):
        return []
    on = f"{first.settings['examples']['id']:,} examples"
    lines = []
    for other in rivals:
        try:
            count, seed = first.settings["bootstrap"], first.settings["seed"]
            words = compare(first, other, count=count, seed=seed).in_words(SPOKEN, on)
        except DataError as error:
            words = f"not compared. {error}".rstrip(".")
        lines.append(f"{first.name} against {other.name}: {words}.")
    return lines


def cost(results: Sequence[Results], costs: Mapping[str, float]) -> Section | None:
    """Draw quality against counted cost."""
    priced = [result for result in results if result.name in costs]
    drawings: list[dict[str, Any]] = []
    for key in FRONTIERS:
        here = {r.name: (costs[r.name], r[key]) for r in priced if key in r}
        if len(here) < 2 or len(drawings) == 2:
            continue
        label = LABELS.get(key, key)
        with page_axes() as ax:
            charts.plot_cost_quality(here, figure=key, label=label, ax=ax)
            told = f"{label} against counted cost of {len(here)} models"
            drawing = to_svg(ax, told, name=f"cost-{len(drawings)}")
        drawings.append({"drawing": drawing, "label": label})
    if not drawings:
        return None
    return Section("cost", "Cost against quality", {"drawings": drawings})


def calibration(results: Sequence[Results], names: Sequence[str]) -> Section | None:
    """Draw a reliability diagram for each model."""
    if not results:
        return None
    drawings = []
    for result in results:
        series = names.index(result.name)
        error = shown("cal/ECE", result.get("cal/ECE"))
        with page_axes((3.8, 3.0)) as ax:
            charts.plot_reliability(result, series=series, ax=ax)
            label = f"Reliability of {result.name}: expected calibration error {error} percent"
            drawing = to_svg(ax, label, name=f"reliability-{series}")
        nll = shown("cls/NLL", result.get("cls/NLL"))
        drawings.append({"drawing": drawing, "name": result.name, "ece": error, "nll": nll})
    return Section("calibration", "Calibration", {"drawings": drawings})


def detection(results: Sequence[Results]) -> Section | None:
    """Draw the ROC of every out-of-distribution set."""
    lines = [(result.name, result, "") for result in results]
    lines += [(f"{r.name}, novelty", r, "novelty/") for r in charts.by_novelty(results)]
    panels = []
    for number, name in enumerate(_ood_sets(results)):
        with page_axes() as ax:
            charts.plot_roc(results, name, ax=ax)
            label = f"ROC of the out-of-distribution set {name}"
            drawing = to_svg(ax, label, name=f"roc-{number}")
        rates = [
            {
                "name": line,
                "auroc": shown("AUROC", result.get(f"ood/{name}/{score}AUROC")),
                "fpr": shown("FPR95", result.get(f"ood/{name}/{score}FPR95")),
            }
            for line, result, score in lines
            if name in ood_names(result)
        ]
        panels.append({"name": name, "drawing": drawing, "rates": rates})
    if not panels:
        return None
    names = [name for name, _, _ in lines]
    content = {
        "panels": panels,
        "legend": legend(names),
        "novelty": len(lines) > len(results),
        "disagreement": [
            f"{result.name}: {result.settings['disagreement']['sentence']}"
            for result in results
            if "disagreement" in result.settings
        ],
    }
    return Section("detection", "Out of distribution", content, long=True)


def abstention(results: Sequence[Results]) -> Section | None:
    """Draw the risk-coverage curves, with a slider over thresholds."""
    if not results:
        return None
    with page_axes((6.2, 3.6)) as ax:
        charts.plot_risk_coverage(results, ax=ax)
        ax.axvline(1.0, color="#000000", linestyle="--", linewidth=1).set_gid("cursor")
        label = "Error rate among the answered examples against the share that is answered"
        drawing = to_svg(ax, label, name="risk")
        left, right = (ax.transData.transform((share, 0))[0] for share in (0, 1))
    content = {
        "drawing": drawing,
        "width": f"{right - left:.2f}",  # the cursor's way from no coverage to all
        "names": [result.name for result in results],
        "sets": _ood_sets(results),
        "legend": legend([result.name for result in results]),
    }
    return Section("abstention", "Answer or abstain", content)


def novelty(results: Sequence[Results], examples: Sequence[Example] = ()) -> Section | None:
    """List the alarms per set and the newest examples of models that know their data.

    Where the newest are shown with their image or text, their numbers are left out.
    """
    able = [result for result in results if "alarm" in result.examples.get("id", {})]
    if not able:
        return None
    sets = [name for name in able[0].examples if not name.startswith("post/")]
    rows = [
        {
            "name": _set(name),
            "count": len(able[0].examples[name]["alarm"]),
            "cells": [_share(result.examples.get(name, {}).get("alarm")) for result in able],
        }
        for name in sets
    ]
    scores = able[0].examples["id"]["score:novelty"]
    shown_below = any(example.group == NEWEST_HEADING for example in examples)
    newest = scores.argsort(descending=True, stable=True)[: 0 if shown_below else NEWEST].tolist()
    content = {
        "names": [result.name for result in able],
        "rows": rows,
        "newest": [{"number": row, "score": three_digits(float(scores[row]))} for row in newest],
    }
    return Section("novelty", "Like anything known?", content, long=True)


def _set(name: str) -> str:
    """Return what a set of examples is called on the page."""
    return "test data" if name == "id" else name.removeprefix("ood/")


def _share(alarm: Any) -> str:
    return percent(None if alarm is None else float(alarm.double().mean()))


def legend(names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the names of lines with a sample of each, to be switched on and off."""
    entries = []
    for series, name in enumerate(names):
        with page_axes((0.5, 0.17)) as ax:
            ax.plot([0, 1], [0, 0], **charts.line_style(series))
            ax.set_axis_off()
            sample = to_svg(ax, "", name=f"line-{series}")
        entries.append({"name": name, "sample": sample})
    return entries


def shown_examples(examples: Sequence[Example], heading: str = "Single examples") -> Section | None:
    """Show single examples with their image or text, by group."""
    if not examples:
        return None
    groups = {
        group: [example for example in examples if example.group == group]
        for group in dict.fromkeys(example.group for example in examples)
    }
    return Section("examples", heading, {"groups": groups}, long=True)


def reproduce(results: Sequence[Results], settings: Mapping[str, Any], command: str) -> Section:
    """List what is needed to make the results again."""
    first = results[0].settings
    sizes = first.get("examples", {})
    facts = {
        "score": ", ".join(results[0].scores),
        "test examples": ", ".join(f"{_set(name)} {size}" for name, size in sizes.items()),
        "bootstrap draws": first.get("bootstrap", 0),
        **settings,
    }
    listed = {k: _plain(v) for k, v in facts.items() if v not in (None, "", [], {})}
    content = {"facts": listed, "command": command}
    return Section("reproduce", "Settings to reproduce it", content, long=True)


def _ood_sets(results: Sequence[Results]) -> list[str]:
    return list({name: None for result in results for name in ood_names(result)})


def _plain(value: Any) -> str:
    if isinstance(value, Mapping) and all(isinstance(inner, str) for inner in value.values()):
        known = {name: text for name, text in value.items() if text != "not installed"}
        return ", ".join(f"{name} {text}" for name, text in known.items())
    return value if isinstance(value, str) else json.dumps(value, default=str)
