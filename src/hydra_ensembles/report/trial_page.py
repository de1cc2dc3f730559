"""The page of `try`: what it cost, how calibrated it is, which files are strange."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from . import sections, trial_sections
from .examples import Example
from .page import write_page

if TYPE_CHECKING:
    from ..builder.trying import Trial


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
        kind: What the examples are: pictures, texts.
        notes: Lines below the verdict.
        command: The command line that made it.
        made: When, as text; now by default.
    """
    models = [result.name for result in trial.results]
    ensemble = trial.ensemble
    prices = [*[1.0] * (len(models) - 1), trial.ratio.multiply_adds]
    parts = [
        trial_sections.at_a_glance(trial, kind),
        sections.shown_examples(examples, f"Your own {kind}"),
        trial_sections.alarms(trial, names, kind),
        sections.calibration(trial.results, models),
        sections.figures(trial.results[::-1], dict(zip(models, prices, strict=True)))
        if trial.results
        else None,
        trial_sections.policy(trial.policy, trial.policy_note, kind),
        sections.built(str(ensemble), ensemble.masks, ensemble.plan.trunk),
        trial_sections.next_steps(folder, trial.labels is not None, command),
    ]
    lead = "\n".join([trial_sections.verdict(trial, kind), *notes])
    return write_page(path, parts, title=title, lead=lead, made=made)
