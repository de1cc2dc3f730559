"""`circuit`: which heads carry an objective."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from .. import options
from ..errors import Stop
from ..head_grid import circuit_grid
from ..inputs import READING, Reading, reads_data
from ..output import say, show, sizes, write_config, write_text


@reads_data()
def command(
    model: options.Model,
    data: options.Data,
    ood: options.Ood = None,
    objective: Annotated[
        str, typer.Option(help="id-loss, ood-auroc, ece, nll-shift or average.")
    ] = "ood-auroc",
    keep: Annotated[
        float | None,
        typer.Option(help="Share of each layer's heads that is kept; 0.5 by default."),
    ] = None,
    max_cost: Annotated[
        float | None,
        typer.Option(help="Instead of --keep: cost of the pruned model relative to the plain one."),
    ] = None,
    condition: Annotated[
        str, typer.Option(help="State of the layers below: knockout, keep or none.")
    ] = "knockout",
    output: options.Output = Path("hydra-circuit"),
    reading: Reading = READING,
    config: options.Config = None,
    json: options.Json = False,
) -> None:
    """Search the heads that carry an objective (HeadMap); an interrupted search resumes."""
    from ...search.headmap import find_circuit

    if keep is not None and max_cost is not None:
        raise Stop("--keep and --max-cost both say how many heads are kept: give one.", 2)
    loaded, known, outliers = reading.load(model, data, ood)
    write_config(output, begin=True)
    say(f"Searching heads for {objective} with {sizes(known, outliers)}", json=json)
    found = find_circuit(
        loaded.host,
        id=known,
        ood=outliers or None,
        objective=objective,
        keep=keep,
        max_cost=max_cost,
        condition=condition,  # type: ignore[call-overload]
        effects=True,
        folder=output / "state",
        progress=not json,
    )
    write_text(output / "circuit.json", found.to_json())
    write_config(output)
    write_text(output / "mask.json", found.mask.to_json() + "\n")
    show(circuit_grid(found), json_module.loads(found.to_json()), json=json)
    say(f"Written to {output}: circuit.json, mask.json", json=json)
