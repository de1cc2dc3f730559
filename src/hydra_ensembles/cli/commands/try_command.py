"""`try`: your model and your files; a page that says what the ensemble of it is worth."""

from __future__ import annotations

import re
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import options
from ..inputs import READING, Reading, reads_data
from ..output import print_json, say, waiting, write_config

if TYPE_CHECKING:
    from ...builder.trial import Trial
    from ...report.examples import Example
    from ..models import Loaded

MOST = 2000
EACH = {"images": 12, "texts": 9}
"""Examples shown in a group."""


@reads_data(limit=MOST)
def command(
    model: options.Model,
    data: options.Data,
    members: options.MembersOrDefault = None,
    max_cost: options.MaxCost = 1.07,
    risk: options.Risk = 0.05,
    alarm: options.Alarm = 0.05,
    guarantee: options.Guarantee = "conformal",
    names: options.Names = True,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder to write to; hydra-try-MODEL-DATA by default."),
    ] = None,
    reading: Reading = READING,
    config: options.Config = None,
    json: options.Json = False,
) -> None:
    """Try your model on a few hundred of your own files, with or without labels.

    Fuses an ensemble within a budget, calibrates it, fits novelty, and writes a page: the cost, the
    calibration before and after, your strangest and least certain files, and what an alarm level
    means. Every file is judged by a fit that did not see it.

    Progress is saved in OUTPUT/state: run the same command to resume.
    """
    from ...builder.trial import try_model
    from ...hosts import explain
    from ...report.page import check_packages
    from ...report.trial_page import write_trial
    from ..errors import Stop
    from ..models import check_sources
    from ..output import save

    start = time.monotonic()
    check_packages()
    check_sources(data)
    check_architecture(model)
    loaded = reading.load_model(model)
    host = loaded.host
    found = explain(host)
    if not found.supported:
        raise Stop(f"{model} is not supported. {found.reason}", 4)
    say(str(found), json=json)
    files, note = _load(reading, loaded, data)
    asked = "with labels" if files.labels is not None else "without labels"
    say(f"{files.count} {_kind(files)} {asked}" + (f". {note}" if note else ""), json=json)
    if output is None:
        both = _title(model), Path(data).expanduser().resolve().name
        slugs = [re.sub(r"[^A-Za-z0-9._]+", "-", name)[-40:].strip("-.") for name in both]
        output = Path("-".join(["hydra-try", *slugs]))
    say(f"Writing to {output}", json=json)
    write_config(output, begin=True)
    trial = try_model(
        host,
        files,
        members=members,
        max_cost=max_cost or None,
        risk=risk,
        alarm=alarm,
        method=guarantee,
        seed=reading.seed,
        folder=output / "state",
        progress=not json,
    )
    class_names = loaded.class_names or getattr(files, "class_names", None)
    if class_names:
        trial.ensemble.id2label = list(class_names)
        loaded = replace(loaded, class_names=list(class_names))
    if not names:
        trial.ensemble.forget_names_()
    with waiting("Writing the page"):
        save(trial.ensemble, output / "ensemble", loaded)
        write_config(output)
        labels = _names(files)
        page = write_trial(
            output / "try.html",
            trial,
            names=labels,
            examples=_examples(loaded, files, trial, labels),
            title=f"{_title(model)} on {Path(data).name}",
            folder=str(output / "ensemble"),
            kind=_kind(files),
            notes=_lead(trial, files, note),
            command=shlex.join(["hydra-ensembles", *sys.argv[1:]]),
        )
    if json:
        print_json(_figures(trial, page, output / "ensemble"))
    else:
        typer.echo("\n".join(_summary(trial, labels, _kind(files))))
    took = time.monotonic() - start
    say(f"Page: {page}   Ensemble: {output / 'ensemble'}   ({took:.0f} s)", json=json)


def check_architecture(model: str) -> None:
    """Raise for a saved model of a task that cannot be tried, before its weights are read."""
    from types import SimpleNamespace

    from ...builder.trial import check_task
    from ...errors import UnsupportedModelError
    from ...tasks import Facts, refusal_of, task_of
    from ..models import config_of

    config = config_of(Path(model).expanduser())
    names = config.get("architectures") or []
    built = " ".join(names)
    # two towers make a zero-shot classifier; language models have a head that is not trained
    if not names or {"vision_config", "text_config"} <= config.keys() or "LM" in built:
        return
    if (refusal := refusal_of(built)) is not None:
        raise UnsupportedModelError(refusal.sentence(f"{model} ({built})"))
    labels = config.get("num_labels", len(config.get("id2label") or (0, 1)))
    facts = Facts(built, SimpleNamespace(**{**config, "num_labels": labels}))
    check_task(task_of(facts), f"{model} ({built})")


def _load(reading: Reading, loaded: Loaded, data: str) -> tuple[Any, str]:
    """Load the data; without labels, and with a note, if the model does not know them."""
    from ...data.class_names import ClassOrderError
    from ...data.loaders import indexable
    from ...data.text_files import read_table
    from ...errors import DataError

    try:
        return indexable(reading.load_known(loaded, data)), ""
    except ClassOrderError:
        raise
    except DataError as error:
        path, column = Path(data).expanduser(), reading.text_column
        if reading.labels is not None or reading.label_column is not None:
            raise
        if column is not None and path.is_file() and column not in read_table(path):
            raise
        (files,) = reading.load_outliers(loaded, [f"files={data}"]).values()
        return indexable(files), f"Labels are not used: {str(error).split('. ')[0]}."


def _names(files: Any) -> list[str]:
    """Name every example: its file, or the beginning of its text."""
    paths = getattr(files, "files", None)
    if paths is not None:
        return [f"{paths[i].parent.name}/{paths[i].name}" for i in files.indices]
    texts = getattr(files, "texts", None)
    if texts is not None:
        return [text if len(text) <= 60 else text[:57] + "..." for text in texts]
    return [f"example {number}" for number in range(files.count)]


def _examples(loaded: Loaded, files: Any, trial: Trial, names: list[str]) -> list[Example]:
    """Return the strangest, the confidently wrong and the least certain, each example once."""
    import torch

    from ...report.rounding import percent
    from ..report_data import describe, first_untaken, furthest

    answer, each = trial.answer, EACH.get(_kind(files), 9)
    rank = answer.novelty
    assert rank is not None and answer.novelty_score is not None
    task = trial.ensemble.task
    taken: set[int] = set()
    strange = answer.novelty_score.argsort(descending=True, stable=True)
    ranked = {"The strangest: least like the others": strange.tolist()}
    unsure = trial.uncertainty
    if trial.labels is not None:
        errors = trial.wrong
        if errors is None:
            far = furthest({"values": answer.values, "targets": trial.labels})
            ranked["Furthest off (or labelled wrongly)"] = far
        else:
            wrong = errors.nonzero().flatten()
            sure = wrong[unsure[wrong].argsort(stable=True)].tolist()
            ranked["Wrong, and surest of it (or labelled wrongly)"] = sure
    ranked["The least sure"] = unsure.argsort(descending=True, stable=True).tolist()

    def note(group: str, row: int) -> str:
        if group.startswith("The strangest"):
            newer = f"newer than {percent(float(rank[row]))} of the others"
            nearest = f"nearest: {names[int(trial.neighbours[row])]}"
            return "\n".join([newer, nearest, *trial.facts[row]])
        if group.startswith("The least") and task.classifies and not task.by_token:
            values, classes = answer.probabilities[row].topk(2)
            return f"or {loaded.class_name(int(classes[1]))} ({percent(float(values[1]))})"
        return ""

    found = []
    for group, order in ranked.items():
        rows = first_untaken(order, each, taken)
        notes = [note(group, row) for row in rows]
        part = answer[torch.tensor(rows, dtype=torch.long)]
        found += describe(loaded, files, rows, group, "example", answer=part, notes=notes)
    return found


def _title(model: str) -> str:
    """Return a model's name without the location of its weights."""
    plain = model.removeprefix("timm:").partition("@")[0]
    folder = Path(plain).expanduser()
    return folder.resolve().name if folder.is_dir() else plain


def _kind(files: Any) -> str:
    """Return what the examples are: images, texts or examples."""
    if getattr(files, "files", None) is not None:
        return "images"
    return "texts" if getattr(files, "texts", None) is not None else "examples"


def _lead(trial: Trial, files: Any, note: str) -> list[str]:
    """Return a few lines about what was done."""
    asked = "with labels" if trial.labels is not None else "without labels"
    record, count = trial.ensemble.record, trial.ensemble.members
    members = "1 member" if count == 1 else f"{count} members"
    lines = [
        f"{files.count} {_kind(files)} {asked}. {members} in one model, at "
        f"{trial.ratio.multiply_adds:.2f} × the multiply-adds of yours. Nothing was trained.",
        "Every statement about an example comes from a fit that did not see it. Novelty needs no "
        "members: your model alone, fused with all its heads, can have it.",
    ]
    lines += [record["auto"]["why"]] if "auto" in record else []
    lines.append(record["disagreement"]["sentence"])
    return [*lines, note] if note else lines


def _summary(trial: Trial, names: list[str], kind: str) -> list[str]:
    """Return the outcome for the terminal."""
    from ...evaluation.tables import shown
    from ...report.sections import LABELS
    from ...report.task_figures import headlines
    from ...report.trial_page import verdict

    answer = trial.answer
    assert answer.novelty is not None and answer.novelty_score is not None
    lines = [str(trial.ensemble)]
    if trial.policy_note:
        lines.append(trial.policy_note)
    if trial.results:
        words = ", ".join(
            f"{LABELS[key]} {' / '.join(shown(key, r.get(key)) for r in trial.results)}{unit}"
            for key, (unit, _) in headlines(trial.results[-1]).items()
        )
        models = " / ".join(result.name for result in trial.results)
        lines.append(f"{int(trial.held_out.sum())} held-out {kind}, {models}:")
        lines.append(f"  {words}")
    lines.append(verdict(trial, kind))
    for title, column in {
        "Strangest": answer.novelty_score,
        "Least sure": trial.uncertainty,
    }.items():
        first = column.argsort(descending=True, stable=True)[:3].tolist()
        lines.append(f"{title}:")
        for row in first:
            lines += [f"  {names[row]}", *(f"    {fact}" for fact in trial.facts[row])]
    return lines


def _figures(trial: Trial, page: Path, folder: Path) -> dict[str, Any]:
    """Return the outcome as plain data."""
    from ...report.trial_page import told

    answer = trial.answer
    assert answer.novelty is not None
    return {
        "page": str(page),
        "folder": str(folder),
        "cost": trial.ratio.multiply_adds,
        "examples": len(answer),
        "verdicts": {key: row.verdict for key, row in told(trial).items() if row.verdict}
        if trial.results
        else {},
        "held_out": {result.name: result.figures for result in trial.results},
        "calibration": trial.calibration,
        "policy": trial.policy.to_dict(),
        "novelty": answer.novelty.tolist(),
        "facts": trial.facts,
        "uncertainty": trial.uncertainty.tolist(),
        "decisions": answer.decision,
    }
