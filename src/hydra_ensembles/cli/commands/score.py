"""`score`: how much each attention head matters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import options
from ..head_grid import scores_grid
from ..inputs import READING, Reading, reads_data
from ..output import say, show, write_config, write_text

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

    loaded, calibration, _ = reading.load(model, data)
    tables = score_heads(loaded.host, calibration, criterion=list(criterion), progress=not json)
    write_config(output)
    written = {}
    for name, table in tables.items():
        written[f"scores-{name}.json"] = table.to_json()
        if keep is not None:
            mask = ranked(name, table).top_k(keep, scope=scope)
            written[f"mask-{name}.json"] = mask.to_json()
    for file, text in written.items():
        write_text(output / file, text + "\n")
    grids = "\n".join(scores_grid(name, table) for name, table in tables.items())
    show(grids, {name: table.tolist() for name, table in tables.items()}, json=json)
    say(f"Written to {output}: {', '.join(written)}", json=json)
