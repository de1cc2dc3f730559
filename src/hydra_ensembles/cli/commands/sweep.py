"""`sweep`: quality of a model as heads are pruned, by criterion."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from .. import options
from ..inputs import READING, Reading, reads_data
from ..output import say, show, sizes, write_config

CRITERIA = ["random", "magnitude", "taylor", "his", "entropy", "hies", "fisher"]
RATIOS = [0.1, 0.2, 0.3, 0.5]


@reads_data()
def command(
    model: options.Model,
    data: options.Data,
    ood: options.Ood = None,
    criterion: options.Criteria = CRITERIA,
    ratio: Annotated[list[float], typer.Option(help="Share pruned; repeatable.")] = RATIOS,
    draws: Annotated[int, typer.Option(min=1, help="Calibration draws.")] = 5,
    calibration_examples: Annotated[int, typer.Option(min=1, help="Examples per draw.")] = 32,
    scope: options.Scope = "model",
    output: options.Output = Path("hydra-sweep"),
    reading: Reading = READING,
    config: options.Config = None,
    json: options.Json = False,
) -> None:
    """Prune a model by each criterion to each ratio and measure what is left; resumable."""
    from ...research.pruning_sweep import prune_sweep

    loaded, known, outliers = reading.load(model, data, ood)
    write_config(output, begin=True)
    runs = len(criterion) * len(ratio) * draws
    say(f"Pruning {runs} times, each measured on {sizes(known, outliers)}", json=json)
    found = prune_sweep(
        loaded.host,
        known,
        criteria=criterion,
        ratios=ratio,
        draws=draws,
        calibration_examples=calibration_examples,
        scope=scope,
        seed=reading.seed,
        ood=outliers or None,
        folder=output / "state",
        progress=not json,
    )
    text = found.to_json(output / "sweep.json")
    write_config(output)
    show(found, json_module.loads(text), json=json)
    say(f"Written to {output / 'sweep.json'}", json=json)
