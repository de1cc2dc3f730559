"""`sweep`: quality of a model as heads are pruned, by criterion."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from .. import options
from ..inputs import READING, Reading, reads_data
from ..output import print_json, say, sizes, write_config

CRITERIA = ["random", "magnitude", "taylor", "his", "entropy", "hies", "fisher"]
RATIOS = [0.1, 0.2, 0.3, 0.5]


@reads_data()
def command(
    model: options.Model,
    data: options.Data,
    ood: options.Ood = None,
    criterion: options.Criteria = CRITERIA,
    ratio: Annotated[list[float], typer.Option(help="Share pruned; may be repeated.")] = RATIOS,
    draws: Annotated[int, typer.Option(min=1, help="Calibration draws.")] = 5,
    calibration_examples: Annotated[int, typer.Option(min=1, help="Examples of a draw.")] = 32,
    scope: options.Scope = "model",
    output: options.Output = Path("hydra-sweep"),
    reading: Reading = READING,
    config: options.Config = None,
    json: options.Json = False,
) -> None:
    """Prune a model by each criterion to each ratio and measure what is left; resumable."""
    from ...research.pruning_sweep import prune_sweep
    from ..models import check_sources

    check_sources(data, ood)
    loaded = reading.load_model(model)
    host = loaded.host
    known = reading.load_known(loaded, data)
    outliers = reading.load_outliers(loaded, ood)
    output.mkdir(parents=True, exist_ok=True)
    write_config(output, begin=True)
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
        seed=reading.seed,
        ood=outliers or None,
        resume=output / "state.json",
        progress=not json,
    )
    text = found.to_json(output / "sweep.json")
    write_config(output)
    if json:
        print_json(json_module.loads(text))
    else:
        typer.echo(str(found))
    say(f"Written to {output / 'sweep.json'}", json=json)
