"""The sections of the report, from plain results to HTML; None when there is nothing to say."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from ..evaluation.result_tables import direction, select_keys, shown
from ..heads.masks import HeadMask
from . import svg
from .curves import ood_names, reliability, risk_curve, roc
from .examples import Example

if TYPE_CHECKING:
    from ..evaluation.results import Results

LABELS = {
    "cls/Acc": "accuracy",
    "cls/NLL": "NLL",
    "cls/Brier": "Brier",
    "cal/ECE": "ECE",
    "cal/aECE": "adaptive ECE",
    "ood/mean/AUROC": "OOD AUROC",
    "ood/mean/AUPR": "OOD AUPR",
    "ood/mean/FPR95": "OOD FPR95",
    "sc/AURC": "AURC",
    "fail/AUROC": "error AUROC",
    "shift/mean/cls/Acc": "accuracy, shifted",
    "shift/mean/cls/NLL": "NLL, shifted",
    "shift/mean/cal/ECE": "ECE, shifted",
    "div/Disagreement": "disagreement",
}


@dataclass(frozen=True)
class Section:
    """A part of the page; `long` ones may be broken over printed pages."""

    identity: str
    heading: str
    body: str
    long: bool = False


def built(summary: str, masks: Sequence[HeadMask], branch: int | None) -> Section | None:
    """Say what was built and draw the members' heads."""
    if not summary and not masks:
        return None
    body = f"<pre>{escape(summary)}</pre>" if summary else ""
    if masks:
        maps = []
        for member, mask in enumerate(masks):
            rows = [[bool(value) for value in row] for row in mask.tolist()]
            kept, total = mask.total_kept, sum(mask.shape)
            title = f"Heads of member {member + 1}: {kept} of {total} kept"
            drawing = svg.head_map(rows, title=title, series=member, branch=branch)
            maps.append(
                f"<figure>{drawing}<figcaption>member {member + 1}: {kept} of {total} heads"
                "</figcaption></figure>"
            )
        layers = (
            "Layer 0 (paler) is" if branch == 1 else f"Layers 0 to {(branch or 0) - 1} (paler) are"
        )
        trunk = f" {layers} the shared trunk, computed once." if branch else ""
        body += (
            "<h3>Which heads each member keeps</h3><p class='soft'>Filled: kept. Outline: pruned. "
            f"The first layer is at the bottom.{trunk}</p><div class='maps'>{''.join(maps)}</div>"
        )
    return Section("built", "What was built", body)


def figures(results: Sequence[Results], costs: Mapping[str, float]) -> Section:
    """Set the headline figures of all models side by side."""
    keys = select_keys(results, None)
    arrows = {1: " ↑", -1: " ↓", 0: ""}
    head = "".join(f'<th scope="col">{escape(result.name)}</th>' for result in results)
    rows = []
    if costs:
        ratios = [costs.get(result.name) for result in results]
        cells = "".join(
            f"<td>{'–' if ratio is None else f'{ratio:.2f} ×'}</td>" for ratio in ratios
        )
        rows.append(f'<tr><th scope="row">cost ↓</th>{cells}</tr>')
    for key in keys:
        name = escape(LABELS.get(key, key)) + arrows[direction(key)]
        cells = "".join(_cell(key, result, results) for result in results)
        rows.append(f'<tr><th scope="row" title="{escape(key)}">{name}</th>{cells}</tr>')
    note = "★ best of its row. Arrows say which way is better."
    if any(result.intervals for result in results):
        note += " Brackets: 95 % bootstrap intervals over test examples."
    if costs:
        note += " Cost: counted multiply-adds relative to the single model."
    body = (
        f"<div class='scroll' tabindex='0' role='region' aria-label='Table of figures'>"
        f"<table{' class=few' if len(results) <= 3 else ''}>"
        f"<thead><tr><th scope='col'><span class='sr'>figure</span></th>{head}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div><p class='tiny'>{note}</p>"
    )
    notes = {f"{r.name}: no {key}, {why}" for r in results for key, why in r.notes.items()}
    body += "".join(f"<p class='tiny'>{escape(note)}</p>" for note in sorted(notes))
    return Section("figures", "Figures", body)


def _cell(key: str, result: Results, results: Sequence[Results]) -> str:
    value = result.get(key)
    text = shown(key, value)
    sign = direction(key)
    rivals = [other[key] for other in results if key in other]
    best = (
        value is not None
        and bool(sign)
        and len(rivals) > 1
        # compared as shown: what a reader sees as a tie is one
        and text == shown(key, max(rivals, key=lambda v: sign * v))
    )
    span = result.interval(key)
    between = f"<small>[{shown(key, span[0])}, {shown(key, span[1])}]</small>" if span else ""
    if best:
        text += ' <span class="star" title="best">★</span>'
    return f"<td{' class=best' if best else ''}>{text}{between}</td>"


def cost(
    results: Sequence[Results],
    costs: Mapping[str, float],
    frontier: Sequence[Mapping[str, Any]],
) -> Section | None:
    """Draw quality against counted cost."""
    points = [{"name": r.name, "cost": costs[r.name], **r} for r in results if r.name in costs]
    points += [dict(point) for point in frontier if "cost" in point]
    if len(points) < 2:
        return None
    drawings: list[str] = []
    for key in ("ood/mean/AUROC", "cls/NLL", "cls/Acc", "cal/ECE"):
        here = [point for point in points if key in point]
        if len(here) >= 2 and len(drawings) < 2:
            drawings.append(_frontier(here, key))
    if not drawings:
        return None
    body = (
        "<p>Up and to the left is better when the axis is marked ↑, down and to the left when it "
        "is marked ↓. The dotted line joins the models that no other beats in both.</p>"
        f"<div class='columns'>{''.join(drawings)}</div>"
    )
    return Section("cost", "Cost against quality", body)


def _frontier(points: Sequence[Mapping[str, Any]], key: str) -> str:
    sign = direction(key)
    label = LABELS.get(key, key)
    values, ratios = [float(p[key]) for p in points], [float(p["cost"]) for p in points]
    percent = shown(key, 0.5) == "50.00"
    pad = 0.18 * (max(values) - min(values)) or 0.05 * abs(values[0]) or 0.05
    chart = svg.Chart(
        f"{label} against counted cost of {len(points)} models",
        "multiply-adds, single model = 1",
        label + (" ↑" if sign > 0 else " ↓"),
        x_range=(0.0, 1.15 * max(ratios)),
        y_range=(min(values) - pad, max(values) + pad),
        percent=(False, percent),
    )
    best = sorted(zip(ratios, values, strict=True), key=lambda p: (p[0], -sign * p[1]))
    front: list[tuple[float, float]] = []
    for ratio, value in best:
        if not front or sign * value > sign * front[-1][1]:
            front.append((ratio, value))
    if len(front) > 1:
        chart.add_guide(front, "not beaten in both cost and quality")
    for series, point in enumerate(points):
        text = f"{point['name']}: {shown(key, float(point[key]))} at {float(point['cost']):.2f} x"
        at = (float(point["cost"]), float(point[key]))
        chart.add_marker(at, series, text, label=str(point["name"]))
    return f"<figure>{chart.render()}<figcaption>{escape(label)} against cost</figcaption></figure>"


def _legend(names: Sequence[str]) -> str:
    """Draw a legend whose entries switch their lines on and off on the whole page."""
    items = "".join(
        f'<li><label><input type="checkbox" checked data-toggle="{i}">'
        f'<svg viewBox="0 0 34 12" aria-hidden="true"><polyline class="line s{i % svg.SERIES}" '
        f'points="1,6 33,6"/></svg>{escape(name)}</label></li>'
        for i, name in enumerate(names)
    )
    return f'<ul class="legend" aria-label="Show or hide models">{items}</ul>'


def calibration(results: Sequence[Results], names: Sequence[str]) -> Section | None:
    """Draw a reliability diagram for each model."""
    if not results:
        return None
    drawings = []
    for result in results:
        bins = reliability(result)
        most = max((each.count for each in bins), default=1)
        error = shown("cal/ECE", result.get("cal/ECE"))
        chart = svg.Chart(
            f"Reliability of {result.name}: expected calibration error {error} percent",
            "confidence",
            "accuracy",
            size=(360, 300),
        )
        for each in bins:
            note = (
                f"confidence {each.confidence:.1%}, accuracy {each.accuracy:.1%}, "
                f"{each.count} examples"
            )
            series, share = names.index(result.name), each.count / most
            chart.add_bar(each.low, each.high, each.accuracy, series, note, weight=share)
        chart.add_guide([(0, 0), (1, 1)], "perfectly calibrated")
        drawings.append(
            f"<figure>{chart.render()}<figcaption>{escape(result.name)}: ECE {error} %, "
            f"NLL {shown('cls/NLL', result.get('cls/NLL'))}</figcaption></figure>"
        )
    body = (
        "<p>Of the answers given with a confidence, how many are right? Bars on the dotted line "
        "are honest; below it the model is too sure. The paler a bar, the fewer the examples.</p>"
        f"<div class='columns'>{''.join(drawings)}</div>"
    )
    return Section("calibration", "Calibration", body)


def detection(results: Sequence[Results], names: Sequence[str]) -> Section | None:
    """Draw the ROC of every out-of-distribution set."""
    sets = list({name: None for result in results for name in ood_names(result)})
    if not sets:
        return None
    panels = []
    for name in sets:
        chart = svg.Chart(
            f"ROC of the out-of-distribution set {name}",
            "known examples taken for outliers",
            f"outliers found ({name})",
        )
        chart.add_guide([(0, 0), (1, 1)], "chance")
        found = []
        for result in results:
            if name in ood_names(result):
                auroc = shown("AUROC", result.get(f"ood/{name}/AUROC"))
                chart.add_line(
                    roc(result, name), names.index(result.name), f"{result.name}: AUROC {auroc} %"
                )
                fpr = shown("FPR95", result.get(f"ood/{name}/FPR95"))
                found.append(f"{escape(result.name)} AUROC {auroc}, FPR95 {fpr}")
        panels.append(
            f'<figure class="ood-panel" data-set="{escape(name)}">{chart.render()}'
            f"<figcaption><b>{escape(name)}</b>: {'; '.join(found)}</figcaption></figure>"
        )
    options = "".join(f'<option value="{escape(n)}">{escape(n)}</option>' for n in sets)
    body = (
        "<p>How well does the uncertainty tell examples of the task from others? A line along the "
        "upper left corner is best, the diagonal is chance.</p>"
        f"{_legend([result.name for result in results])}"
        '<div class="controls"><label>Set <select id="ood-set"><option value="*">all sets</option>'
        f"{options}</select></label></div><div class='columns'>{''.join(panels)}</div>"
    )
    return Section("detection", "Out of distribution", body, long=True)


def abstention(results: Sequence[Results], names: Sequence[str]) -> Section | None:
    """Draw the risk-coverage curves, with a slider over thresholds."""
    if not results:
        return None
    curves = {result.name: risk_curve(result) for result in results}
    top = max(max(risk for _, risk in curve) for curve in curves.values())
    chart = svg.Chart(
        "Error rate among the answered examples against the share that is answered",
        "coverage: share answered",
        "risk: error rate among them",
        y_range=(0.0, 1.1 * top or 0.01),
        size=(560, 340),
    )
    for result in results:
        area = shown("sc/AURC", result.get("sc/AURC"))
        chart.add_line(curves[result.name], names.index(result.name), f"{result.name}: AURC {area}")
    left, right, bottom = chart.x(0), chart.x(1), chart.y(0)
    chart.add_raw(f'<line id="cursor" x1="{right}" x2="{right}" y1="14" y2="{bottom}"/>')
    options = "".join(f"<option>{escape(result.name)}</option>" for result in results)
    sets = list({name: None for result in results for name in ood_names(result)})
    boxes = "".join(
        f'<div><b data-ood="{escape(name)}">–</b><span>of {escape(name)} answered</span></div>'
        for name in sets
    )
    body = (
        "<p>What is gained by leaving the least certain examples to someone else? Move the slider: "
        "the threshold answers that share of the test examples.</p>"
        '<div class="controls"><label>Model <select id="coverage-model">'
        f"{options}</select></label><label>Answer <input id='coverage' type='range' min='1' "
        "max='100' value='90'></label></div>"
        '<div class="readout" role="status" aria-live="polite">'
        '<div><b id="out-coverage">–</b><span>coverage</span></div>'
        '<div><b id="out-risk">–</b><span>error rate of answers</span></div>'
        '<div><b id="out-threshold">–</b><span>threshold of uncertainty</span></div>'
        f"{boxes}</div>{_legend([result.name for result in results])}"
        f'<figure id="risk-chart" data-left="{left}" data-width="{right - left}">{chart.render()}'
        "<figcaption>Chosen on test data, the threshold here is for exploring. For use, fit it on "
        "held-out data: <code>hydra-ensembles predict --risk</code>.</figcaption></figure>"
    )
    return Section("abstention", "Answer or abstain", body)


def shown_examples(examples: Sequence[Example]) -> Section | None:
    """Show single examples with their picture or text."""
    if not examples:
        return None
    body = ""
    for group in {example.group: None for example in examples}:
        cards = "".join(_card(e) for e in examples if e.group == group)
        kind = " text" if any(e.text for e in examples if e.group == group) else ""
        body += f'<h3>{escape(group)}</h3><ul class="cards{kind}">{cards}</ul>'
    return Section("examples", "Most and least certain examples", body, long=True)


def _card(example: Example) -> str:
    wrong = bool(example.label) and example.label != example.predicted
    says = f"{example.predicted} ({example.confidence:.1%})"
    alt = f"Example {example.source}, predicted {says}".strip()
    picture = (
        f'<img src="{escape(example.picture)}" alt="{escape(alt)}">' if example.picture else ""
    )
    text = f"<p>{escape(example.text[:400])}</p>" if example.text else ""
    truth = f"<br>label {escape(example.label)}" if example.label else ""
    verdict = ' <span class="wrong">✗ wrong</span>' if wrong else ""
    return (
        f"<li>{picture}{text}says {escape(says)}{verdict}{truth}"
        f'<br><span class="tiny">uncertainty {example.uncertainty:.3g}'
        f"{'<br>' + escape(example.source) if example.source else ''}</span></li>"
    )


def reproduce(results: Sequence[Results], settings: Mapping[str, Any], command: str) -> Section:
    """List what is needed to make the results again."""
    first = results[0].settings
    sizes = first.get("examples", {})
    facts = {
        "score": ", ".join(results[0].scores),
        "test examples": ", ".join(f"{name} {size}" for name, size in sizes.items()),
        "bootstrap draws": first.get("bootstrap", 0),
        **settings,
    }
    items = "".join(
        f"<dt>{escape(str(key))}</dt><dd>{escape(_plain(value))}</dd>"
        for key, value in facts.items()
        if value not in (None, "", [], {})
    )
    line = f"<pre>{escape(command)}</pre>" if command else ""
    return Section("reproduce", "Settings to reproduce it", f"{line}<dl>{items}</dl>", long=True)


def _plain(value: Any) -> str:
    if isinstance(value, Mapping) and all(isinstance(each, str) for each in value.values()):
        known = {name: each for name, each in value.items() if each != "not installed"}
        return ", ".join(f"{name} {each}" for name, each in known.items())
    return value if isinstance(value, str) else json.dumps(value, default=str)
