"""`score`: how much each attention head matters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import options
from ..head_grid import scores_grid
from ..show import print_json, say, write_config

CRITERIA = ["hies"]


def command(
    model: options.Model,
    data: options.Data,
    criterion: Annotated[
        list[str],
        typer.Option(
            help="random, magnitude, taylor, his, entropy, hies, fisher; may be repeated."
        ),
    ] = CRITERIA,
    keep: Annotated[
        float | None, typer.Option(help="Also write the mask that keeps this share of the heads.")
    ] = None,
    scope: Annotated[str, typer.Option(help="Rank within each 'layer' or over the 'model'.")] = (
        "model"
    ),
    output: options.Output = Path("hydra-scores"),
    limit: options.Limit = 32,
    split: options.Split = None,
    text_column: options.TextColumn = None,
    label_column: options.LabelColumn = None,
    labels: options.Labels = None,
    class_names: options.ClassNames = None,
    batch_size: options.BatchSize = 8,
    skip_broken: options.SkipBroken = False,
    device: options.Device = None,
    dtype: options.Dtype = "float32",
    seed: options.Seed = 0,
    config: options.Config = None,
    json: options.Json = False,
) -> None:
    """Score the attention heads of a model on calibration data; higher = keep."""
    from ...criteria import ranked, score_heads
    from ..loading import check_sources, load_model, load_set

    check_sources(data)
    loaded = load_model(model, device=device, dtype=dtype, class_names=class_names)
    host = loaded.host
    calibration = load_set(
        loaded,
        data,
        limit=limit,
        seed=seed,
        split=split,
        text_column=text_column,
        label_column=label_column,
        labels=labels,
        batch_size=batch_size,
        skip_broken=skip_broken,
    )
    tables = score_heads(host, calibration, criterion=list(criterion), progress=not json)
    output.mkdir(parents=True, exist_ok=True)
    write_config(output)
    written = []
    for name, table in tables.items():
        table.to_json(output / f"scores-{name}.json")
        written.append(f"scores-{name}.json")
        if keep is not None:
            mask = ranked(name, table).top_k(keep, scope=scope)
            mask.to_json(output / f"mask-{name}.json")
            written.append(f"mask-{name}.json")
    if json:
        print_json({name: table.tolist() for name, table in tables.items()})
    else:
        for name, table in tables.items():
            typer.echo(scores_grid(name, table))
    say(f"Written to {output}: {', '.join(written)}", json=json)
