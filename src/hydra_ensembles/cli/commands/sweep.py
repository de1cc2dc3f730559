"""`sweep`: what is left of a model as heads go, for each criterion."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import options
from ..show import print_json, say, sizes, write_config

CRITERIA = ["random", "magnitude", "taylor", "his", "entropy", "hies", "fisher"]
RATIOS = [0.1, 0.2, 0.3, 0.5]


def command(
    model: options.Model,
    data: options.Data,
    ood: options.Ood = None,
    criterion: Annotated[list[str], typer.Option(help="May be repeated.")] = CRITERIA,
    ratio: Annotated[list[float], typer.Option(help="Share pruned; may be repeated.")] = RATIOS,
    draws: Annotated[int, typer.Option(min=1, help="Calibration draws.")] = 5,
    calibration_examples: Annotated[int, typer.Option(min=1, help="Examples of a draw.")] = 32,
    scope: Annotated[str, typer.Option(help="Rank within each 'layer' or over the 'model'.")] = (
        "model"
    ),
    output: options.Output = Path("hydra-sweep"),
    limit: options.Limit = None,
    split: options.Split = None,
    text_column: options.TextColumn = None,
    label_column: options.LabelColumn = None,
    labels: options.Labels = None,
    class_names: options.ClassNames = None,
    batch_size: options.BatchSize = 32,
    skip_broken: options.SkipBroken = False,
    device: options.Device = None,
    dtype: options.Dtype = "float32",
    seed: options.Seed = 0,
    config: options.Config = None,
    json: options.Json = False,
) -> None:
    """Prune a model by each criterion to each ratio and measure what is left; resumable."""
    from ...evaluation.pruning_sweep import prune_sweep
    from ..loading import check_sources, load_model, load_set, load_sets

    check_sources(data, ood)
    loaded = load_model(model, device=device, dtype=dtype, class_names=class_names)
    host = loaded.host
    shared: dict[str, Any] = {
        "limit": limit,
        "seed": seed,
        "split": split,
        "text_column": text_column,
        "batch_size": batch_size,
        "skip_broken": skip_broken,
    }
    known = load_set(loaded, data, label_column=label_column, labels=labels, **shared)
    outliers = load_sets(loaded, ood, **shared)
    output.mkdir(parents=True, exist_ok=True)
    write_config(output)
    runs = len(criterion) * len(ratio) * draws
    say(f"Pruning {runs} times, each measured on {sizes(known, outliers)}", json=json)
    found = prune_sweep(
        host,
        known,
        criteria=criterion,
        ratios=ratio,
        draws=draws,
        calibration_examples=calibration_examples,
        scope=scope,
        seed=seed,
        ood=outliers or None,
        resume=output / "state.json",
        progress=not json,
    )
    text = found.to_json(output / "sweep.json")
    if json:
        print_json(json_module.loads(text))
    else:
        typer.echo(str(found))
    say(f"Written to {output / 'sweep.json'}", json=json)
