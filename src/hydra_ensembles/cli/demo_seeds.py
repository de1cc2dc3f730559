"""The demo's table on several seeds: one folder per seed, finished ones are not run again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from .._records import check_same_run
from . import demo_steps as steps
from .show import print_json, say, step, write_text


def numbers(text: str) -> list[int]:
    """Read seeds: `0,1,2`, or `0-4`."""
    found: list[int] = []
    try:
        for part in text.split(","):
            first, dash, last = part.strip().partition("-")
            found += range(int(first), int(last) + 1) if dash else [int(first)]
    except ValueError:
        found = []
    if not found:
        raise typer.BadParameter(f"--seeds {text}: expected numbers such as 0,1,2 or 0-4.")
    return list(dict.fromkeys(found))


def run_seeds(
    seeds: Sequence[int],
    output: Path,
    *,
    epochs: int,
    members: int,
    max_cost: float,
    as_json: bool,
) -> None:
    """Run every seed, write `seeds.json`, print the mean table and how often verdicts fall."""
    runs = {}
    for seed in seeds:
        step(f"Seed {seed}", json=as_json)
        settings = {"seed": seed, "epochs": epochs, "members": members, "max_cost": max_cost}
        runs[seed] = _one(settings, output / f"seed-{seed}", quiet=as_json)
        write_text(output / "seeds.json", json.dumps(summary(runs), indent=1) + "\n")
    if as_json:
        print_json(summary(runs))
        return
    _show(runs)
    say(f"All figures of all seeds: {output / 'seeds.json'}")


def _one(settings: dict[str, Any], output: Path, *, quiet: bool) -> tuple[list[Any], Any]:
    """Return results and costs of one seed, from its folder where it was finished before."""
    from ..data import digits
    from ..evaluation import Results

    files = [output / steps.results_file(name) for name in steps.ROWS]
    done = output / "finished.json"
    if done.is_file() and all(file.is_file() for file in files):
        record = json.loads(done.read_text())
        check_same_run(done, record["settings"], settings)
        return [Results.load(file) for file in files], record["costs"]
    data = digits(16, parts=steps.PARTS, seed=settings["seed"])
    seeds = range(settings["seed"], settings["seed"] + settings["members"])
    teachers = steps.train(data, output, epochs=settings["epochs"], seeds=seeds, quiet=quiet)
    ensemble = steps.taught(
        teachers[0],
        teachers,
        data,
        output,
        epochs=settings["epochs"],
        max_cost=settings["max_cost"],
        seed=settings["seed"],
        quiet=quiet,
    )
    results, costs = steps.evaluated(
        ensemble,
        steps.with_novelty(teachers[0], data.validation),
        teachers,
        data,
        output,
        bootstrap=None,
        seed=settings["seed"],
        quiet=quiet,
    )
    write_text(done, json.dumps({"settings": settings, "costs": costs}, indent=1) + "\n")
    return results, costs


def summary(runs: dict[int, tuple[list[Any], Any]]) -> dict[str, Any]:
    """Return every figure by model and seed, and the verdicts by rival, column and seed."""
    figures: dict[str, dict[str, Any]] = {}
    told: dict[str, dict[str, dict[str, str]]] = {}
    for seed, (results, costs) in runs.items():
        for result in results:
            row = {**result.figures, "cost": costs[result.name]}
            figures.setdefault(result.name, {})[str(seed)] = row
        for rival, columns in steps.verdicts(results).items():
            for column, verdict in columns.items():
                told.setdefault(rival, {}).setdefault(column, {})[str(seed)] = verdict
    return {"seeds": list(runs), "verdicts": told, "figures": figures}


def _show(runs: dict[int, tuple[list[Any], Any]]) -> None:
    from ..evaluation import Results
    from .show import results_table

    several = [results for results, _ in runs.values()]
    means = []
    for same in zip(*several, strict=True):
        keys = set.intersection(*(set(result.figures) for result in same))
        figures = {key: sum(result[key] for result in same) / len(same) for key in keys}
        means.append(Results(name=same[0].name, figures=figures, settings=same[0].settings))
    costs = {
        name: sum(found[name] for _, found in runs.values()) / len(runs)
        for name in next(iter(runs.values()))[1]
    }
    typer.echo(f"Mean of {len(runs)} seed{'s' * (len(runs) > 1)}:")
    results_table(means, costs, figures=steps.DIGITS)
    typer.echo("Outliers, AUROC:")
    results_table(means, figures=steps.OUTLIERS)
    typer.echo(steps.LEGEND)
    counts: dict[str, dict[str, str]] = {}
    for rival, columns in summary(runs)["verdicts"].items():
        for column, by_seed in columns.items():
            better, worse = (list(by_seed.values()).count(word) for word in ("better", "worse"))
            counts.setdefault(rival, {})[column] = f"{better} / {worse}"
    for line in steps.verdict_table("Hydra better / worse vs", counts):
        typer.echo(line)
    typer.echo(
        f"Seeds (of {len(runs)}) on which the paired 95 % interval tells that Hydra is better / "
        "worse;\non the others it cannot be told."
    )
