"""Pruning sweeps: criteria, ratios and calibration draws, measured by `research.prune_sweep`."""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra_ensembles._records import write_whole
from hydra_ensembles.criteria import HeadImportanceEntropy
from hydra_ensembles.data.splits import sample
from hydra_ensembles.research import prune_sweep
from hydra_ensembles.research.pruning_sweep_results import PruneSweep

from .page import grid
from .records import this_commit
from .tasks import Task, open_task

FIGURES = ("cls/Acc", "stability", "cls/NLL", "cal/ECE", "ood/mean/AUROC")
AUTO = "hies(alpha='auto')"


def run_sweep(table: Mapping[str, Any], args: argparse.Namespace) -> None:
    """Sweep every task of the table and write all points to one CSV file."""
    sweeps = {}
    for name, options in table["tasks"].items():
        task = open_task(name, args.data, args.hosts)
        work = Path(args.cache) / "pruning" / name
        sweeps[options["title"]] = sweep_task(table, task, options, work)
    write_points(table["name"], sweeps, args.out)


def sweep_task(
    table: Mapping[str, Any], task: Task, options: Mapping[str, Any], work: Path
) -> PruneSweep:
    """Sweep one task; resumes mask by mask."""
    auto = HeadImportanceEntropy("auto", **{k: tuple(v) for k, v in table["alpha"].items()})
    families = {name: data for group in task.ood.values() for name, data in group.items()}
    return prune_sweep(
        task.host(0),
        list(sample(task.test, options["examples"], seed=0)),
        criteria=[auto if name == AUTO else name for name in table["criteria"]],
        ratios=table["ratios"],
        calibration=task.calibration,
        calibration_examples=table["calibration_examples"],
        draws=table["draws"],
        ood={
            name: list(sample(families[name], options["ood_examples"])) for name in options["ood"]
        },
        held_out=list(sample(task.held_out, options["held_out"], seed=0)),
        folder=work,
    )


def write_points(name: str, sweeps: Mapping[str, PruneSweep], folder: Path) -> None:
    """Write one line per model, criterion, ratio and draw; the unpruned model first."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["model", "criterion", "ratio", "draw", "commit", *FIGURES])
    commit = this_commit()

    def line(head: list[Any], figures: Mapping[str, float]) -> None:
        writer.writerow([*head, commit, *(f"{figures[key]:.4f}" for key in FIGURES)])

    for title, sweep in sweeps.items():
        line([title, "unpruned", 0, 0], sweep.baseline)
        for point in sweep.points:
            head = [title, point.criterion, point.ratio, point.draw]
            line(head, sweep.outcomes[point.mask].figures)
    write_whole(folder / f"{name}.csv", text.getvalue())


def read_points(name: str, folder: Path) -> dict[tuple[str, str, float], list[dict[str, float]]]:
    """Read the points by model, criterion and ratio, one entry per draw."""
    found: dict[tuple[str, str, float], list[dict[str, float]]] = {}
    text = (folder / f"{name}.csv").read_text(encoding="utf-8")
    for line in csv.DictReader(io.StringIO(text)):
        key = (line["model"], line["criterion"], float(line["ratio"]))
        found.setdefault(key, []).append({figure: float(line[figure]) for figure in FIGURES})
    return found


def commits_of(name: str, folder: Path) -> list[str]:
    """Return the commits whose code made the points."""
    lines = csv.DictReader(io.StringIO((folder / f"{name}.csv").read_text(encoding="utf-8")))
    return list(dict.fromkeys(line["commit"] for line in lines))


def _mean(points: list[dict[str, float]], figure: str) -> float:
    return sum(point[figure] for point in points) / len(points)


def sweep_table(table: Mapping[str, Any], folder: Path) -> list[str]:
    """Return accuracy / stability by criterion at some ratios of each model."""
    points = read_points(table["name"], folder)
    models = [options["title"] for options in table["tasks"].values()]
    columns = [(model, ratio) for model in models for ratio in table["shown_ratios"]]
    rows = []
    for criterion in table["criteria"]:
        cells = [criterion]
        for model, ratio in columns:
            found = points[model, criterion, ratio]
            cells.append(" / ".join(f"{100 * _mean(found, f):.1f}" for f in FIGURES[:2]))
        rows.append(cells)
    whole = [
        f"{100 * _mean(points[model, 'unpruned', 0.0], 'cls/Acc'):.1f}" for model, _ in columns
    ]
    heads = [f"{model}, {ratio:.0%}" for model, ratio in columns]
    return grid(["accuracy / stability", *heads], [*rows, ["unpruned", *whole]])


def sweep_picture(table: Mapping[str, Any], folder: Path) -> Path:
    """Draw accuracy over the share of pruned heads, one panel per model."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    points = read_points(table["name"], folder)
    models = [options["title"] for options in table["tasks"].values()]
    figure, axes = plt.subplots(1, len(models), figsize=(10, 3.6), squeeze=False)
    for axis, model in zip(axes[0], models, strict=True):
        start = 100 * _mean(points[model, "unpruned", 0.0], "cls/Acc")
        for place, criterion in enumerate(table["criteria"]):
            means, lows, highs = [start], [0.0], [0.0]
            for ratio in table["ratios"]:
                values = [100 * point["cls/Acc"] for point in points[model, criterion, ratio]]
                means.append(sum(values) / len(values))
                lows.append(max(0.0, means[-1] - min(values)))
                highs.append(max(0.0, max(values) - means[-1]))
            axis.errorbar(
                [0, *(100 * ratio for ratio in table["ratios"])],
                means,
                yerr=[lows, highs],
                marker="o",
                markersize=4,
                capsize=2,
                color=f"C{place}",
                label=criterion,
                linestyle="--" if criterion == "random" else "-",
            )
        axis.set_title(model, fontsize=10)
        axis.set_xlabel("heads pruned, %")
        axis.set_ylabel("accuracy, %")
        axis.grid(alpha=0.25)
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    path = folder / f"{table['name']}.png"
    figure.savefig(path, dpi=80, metadata={"Software": ""})
    plt.close(figure)
    return path
