"""`score`: how much each attention head matters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import options
from ..head_grid import scores_grid
from ..inputs import READING, Reading, reads_data
from ..output import print_json, say, write_config, write_text

CRITERIA = ["hies"]


@reads_data(limit=32, batch_size=8)
def command(
    model: options.Model,
    data: options.Data,
    criterion: options.Criteria = CRITERIA,
    keep: Annotated[
        float | None, typer.Option(help="Also write the mask that keeps this share of the heads.")
    ] = None,
    scope: options.Scope = "model",
    output: options.Output = Path("hydra-scores"),
    reading: Reading = READING,
    config: options.Config = None,
    json: options.Json = False,
) -> None:
    """Score the attention heads of a model on calibration data; higher = keep."""
    from ...criteria import ranked, score_heads
    from ..models import check_sources

    check_sources(data)
    loaded = reading.load_model(model)
    host = loaded.host
    calibration = reading.load_known(loaded, data)
    tables = score_heads(host, calibration, criterion=list(criterion), progress=not json)
    output.mkdir(parents=True, exist_ok=True)
    write_config(output)
    written = {}
    for name, table in tables.items():
        written[f"scores-{name}.json"] = table.to_json()
        if keep is not None:
            mask = ranked(name, table).top_k(keep, scope=scope)
            written[f"mask-{name}.json"] = mask.to_json()
    for file, text in written.items():
        write_text(output / file, text + "\n")
    if json:
        print_json({name: table.tolist() for name, table in tables.items()})
    else:
        for name, table in tables.items():
            typer.echo(scores_grid(name, table))
    say(f"Written to {output}: {', '.join(written)}", json=json)
