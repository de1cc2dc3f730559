"""The sections of the page of `try`: what a model and some files say about each other.

Other sections of that page (figures, calibration, examples, what was built) are those of the
report.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..evaluation.intervals import BETTER, WORSE, Comparison, compare
from ..evaluation.tables import shown
from ..task_predictions import SpanPrediction
from ..uncertainty import Policy
from . import sections, task_figures
from .examples import Example
from .page import write_page
from .rounding import percent
from .sections import Section
from .svg import colour, page_axes, to_svg

if TYPE_CHECKING:
    from ..builder.trial import Trial

ALARMS = (0.01, 0.02, 0.05, 0.10)
WORDS = {
    "answer": "The answer can be used.",
    "unsure": "It knows this kind of input, but not the answer: ask someone.",
    "new": "Unlike anything it knows: its answer means nothing, however sure it looks.",
}


MARKS = {BETTER: "better", WORSE: "worse"}
"""Verdicts that have a colour."""


def told(trial: Trial) -> Comparison:
    """Compare the ensemble with the host, both calibrated if the task is, by paired intervals."""
    *_, warm, ensemble = trial.results
    return compare(ensemble, warm, count=ensemble.settings["bootstrap"])


def spoken(found: Comparison) -> list[str]:
    """Return the figures that a verdict speaks of."""
    if set(task_figures.headlines(found)) == set(task_figures.CLASSES):
        return ["cls/NLL", "cls/Acc", "cal/ECE"]
    return list(task_figures.headlines(found))


def verdict(trial: Trial, kind: str = "files") -> str:
    """Say in one sentence what the ensemble is worth; `kind` says what the examples are."""
    if not trial.results:
        return (
            "Without labels nothing can be said about accuracy and calibration, only about novelty."
        )
    found = told(trial)
    names = {key: sections.SPOKEN[key] for key in spoken(found)} | {"cal/ECE": "calibration"}
    words = found.in_words(names, f"{int(trial.held_out.sum())} {kind}")
    fair = f", each with a {fitted(trial)}" if trial.calibration else ""
    return f"The ensemble against your model{fair}: {words}."


def fitted(trial: Trial) -> str:
    """Return what calibrates both models; empty for a task without calibrators."""
    if not trial.ensemble.task.calibrators:
        return ""
    return "temperature" if trial.ensemble.task.has_temperatures else "variance"


def at_a_glance(trial: Trial, kind: str = "files") -> Section:
    """Show the figures that matter most as tiles; `kind` says what the examples are."""
    rates = trial.policy.measured
    tiles = [
        {"value": f"{trial.ratio.multiply_adds:.2f} ×", "label": "multiply-adds of your model"},
        {"value": f"{trial.ratio.bytes_on_disk:.2f} ×", "label": "of its size on disk"},
    ]
    if trial.results:
        found = told(trial)
        for key, (unit, label) in task_figures.headlines(found).items():
            row = found[key]
            low, high = (signed(key, end) for end in (row.low, row.high))
            tiles.append(
                {
                    "value": f"{shown(key, row.b)} → {shown(key, row.a)}{unit}",
                    "label": label,
                    "verdict": row.verdict,
                    "mark": MARKS.get(row.verdict, "open"),
                    "span": f"difference {signed(key, row.difference)} [{low}, {high}]",
                }
            )
    if rates is not None:
        tokens = "of the tokens " if trial.ensemble.task.by_token else ""
        tiles.append({"value": percent(rates.answer), "label": f"{tokens}answered"})
        if trial.policy.risk is not None:
            tiles.append({"value": percent(rates.unsure), "label": f"{tokens}left as unsure"})
        new = f"of the {kind} called new" if trial.ensemble.task.by_token else "called new"
        tiles.append({"value": percent(rates.new), "label": new})
    held_out = int(trial.held_out.sum()) if trial.results else 0
    decide = int(trial.decide.sum())
    content = {"tiles": tiles, "held_out": held_out, "decide": decide, "kind": kind}
    content["fitted"] = fitted(trial)
    content["paired"] = "tokens" if trial.ensemble.task.by_token else kind
    return Section("glance", "At a glance", content)


def signed(key: str, value: float) -> str:
    """Return a difference of a figure with its sign, rounded as the figure is."""
    text = shown(key, abs(value))
    return f"{'−' if value < 0 else '+'}{text}" if float(text) else text


def alarms(trial: Trial, names: Sequence[str], kind: str = "files") -> Section:
    """Say what an alarm level means for these examples."""
    novelty, score = trial.answer.novelty, trial.answer.novelty_score
    assert novelty is not None and score is not None
    rows: list[dict[str, Any]] = []
    seen: set[int] = set()
    order = score.argsort(descending=True, stable=True)
    for level in ALARMS:
        flagged = order[novelty[order] > 1 - level].tolist()
        newest = [row for row in flagged if row not in seen][:3]
        seen |= set(flagged)
        rows.append(
            {
                "level": f"{100 * level:.0f} %",
                "count": len(flagged),
                "share": percent(len(flagged) / len(novelty)),
                "daily": f"{1000 * level:.0f}",
                "names": [names[row] for row in newest],
            }
        )
    with page_axes((7.2, 2.7)) as ax:
        top = float(score.max()) * 1.03
        ax.hist(score.tolist(), bins=40, range=(0, top), color=colour(0), alpha=0.85)
        for level in ALARMS[::2]:
            place = float(torch.quantile(score.double(), 1 - level))
            ax.axvline(place, color=colour(1), linestyle="--", linewidth=1.2)
            ax.annotate(
                f"{100 * level:.0f} %",
                (place, 0.93),
                xycoords=("data", "axes fraction"),
                xytext=(4, 0),
                textcoords="offset points",
                color=colour(1),
            )
        ax.set(xlim=(0, top), xlabel="novelty score (fitted without the scored example)")
        ax.set_ylabel(kind)
        drawing = to_svg(ax, f"Histogram of the novelty scores of your {kind}", name="alarms")
    content = {"rows": rows, "drawing": drawing, "files": len(novelty), "kind": kind}
    return Section("alarms", "What an alarm level means in your data", content)


def policy(found: Policy, note: str, kind: str = "files") -> Section:
    """Set guaranteed and measured rates side by side."""
    guaranteed, rates = found.guarantees(), found.measured
    rows = [
        {
            "name": name,
            "words": WORDS[name],
            "guaranteed": guaranteed[name],
            "measured": percent(None if rates is None else getattr(rates, name)),
        }
        for name in guaranteed
    ]
    wrong = None if rates is None else rates.wrong_if_answered
    among = None if rates is None else rates.answered_and_wrong
    content = {
        "rows": rows,
        "note": note,
        "examples": found.examples,
        "kind": kind,
        "wrong": None if wrong is None else percent(wrong),
        "among": percent(among),
    }
    return Section("policy", "Answer, unsure, or new", content)


def write_trial(
    path: str | os.PathLike[str],
    trial: Trial,
    *,
    names: Sequence[str],
    examples: Sequence[Example],
    title: str,
    folder: str,
    kind: str = "files",
    notes: Sequence[str] = (),
    command: str = "",
    made: str | None = None,
) -> Path:
    """Write the page of a try.

    Args:
        path: The HTML file.
        trial: What came out.
        names: Of the examples, in the order of the data.
        examples: Those to show, by group.
        title: Heading.
        folder: Where the ensemble is saved.
        kind: What the examples are: images, texts.
        notes: Lines below the verdict.
        command: The command line that made it.
        made: When, as text; now by default.
    """
    models = [result.name for result in trial.results]
    ensemble = trial.ensemble
    next_steps = {
        "folder": folder,
        "labelled": trial.labels is not None,
        "command": command,
        "question": isinstance(trial.answer, SpanPrediction),
        "fitted": fitted(trial),
    }
    prices = [*[1.0] * (len(models) - 1), trial.ratio.multiply_adds]
    parts = [
        at_a_glance(trial, kind),
        sections.shown_examples(examples, f"Your own {kind}"),
        alarms(trial, names, kind),
        task_figures.numbers(trial.results, models),
        sections.calibration(task_figures.labelled_by_class(trial.results), models),
        sections.figures(trial.results[::-1], dict(zip(models, prices, strict=True)))
        if trial.results
        else None,
        policy(trial.policy, trial.policy_note, "tokens" if ensemble.task.by_token else kind),
        sections.built(str(ensemble), ensemble.masks, ensemble.plan.trunk),
        Section("next", "Next", next_steps, long=True),
    ]
    lead = "\n".join([verdict(trial, kind), *notes])
    return write_page(path, parts, title=title, lead=lead, made=made)
