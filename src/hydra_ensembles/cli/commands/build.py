"""`build`: from a pretrained model and data to a fused ensemble."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ...errors import HydraError
from .. import options
from ..errors import Stop
from ..inputs import READING, Reading, reads_data
from ..output import is_first, print_json, say, sizes, write_config


@reads_data()
def command(
    model: options.Model,
    data: options.Data,
    ood: options.Ood = None,
    method: Annotated[
        str, typer.Option(help="select, circuit, taylor, hies or random.")
    ] = "select",
    members: Annotated[int, typer.Option(min=1, help="Number of members.")] = 3,
    max_cost: Annotated[
        float, typer.Option(help="Bound on multiply-adds relative to the model; 0 for none.")
    ] = 1.07,
    keep: Annotated[
        float | None,
        typer.Option(help="Share of heads kept in branched layers; not for select."),
    ] = None,
    score: Annotated[
        str, typer.Option(help="Uncertainty to report: msp, entropy, energy ... or auto.")
    ] = "auto",
    held_out: Annotated[
        str | None,
        typer.Option(help="More labelled data, that a policy is fitted on and saved with it."),
    ] = None,
    risk: Annotated[float, typer.Option(help="Of that policy: how much may be wrong.")] = 0.02,
    alarm: Annotated[
        float, typer.Option(help="Of that policy: how much of known data may be called new.")
    ] = 0.05,
    promise: options.Promise = "conformal",
    output: options.Output = Path("hydra-ensemble"),
    reading: Reading = READING,
    config: options.Config = None,
    json: options.Json = False,
) -> None:
    """Build a fused ensemble on calibration data that the model was not trained on.

    Finished steps are kept in OUTPUT/state: the same command goes on after a stop.
    """
    from ...builder import build
    from ...builder.methods import method_with
    from ...fusion import fit_policy
    from ..models import check_sources

    check_sources(data, ood)
    check_sources(held_out)
    way = method_with(method, keep=keep)
    loaded = reading.load_model(model)
    host = loaded.host
    calibration = reading.load_known(loaded, data)
    labelled = None if held_out is None else reading.load_known(loaded, held_out)
    outliers = reading.load_outliers(loaded, ood)
    output.mkdir(parents=True, exist_ok=True)
    write_config(output, begin=True)
    say(f"Building {members} members ({method}) from {sizes(calibration, outliers)}", json=json)
    ensemble = build(
        host,
        calibration,
        ood=outliers or "auto",
        method=way,
        members=members,
        max_cost=max_cost or None,
        score=score,
        seed=reading.seed,
        folder=output / "state",
        progress=not json,
    )
    names = loaded.class_names or getattr(calibration, "class_names", None)
    if names:
        ensemble.id2label = list(names)
    refused = None
    if labelled is not None:
        try:
            fit_policy(
                ensemble, labelled, risk=risk, alarm=alarm, method=promise, progress=not json
            )
        except HydraError as error:  # what was built is kept
            refused = f"{error} Written to {output} without a policy: fit one with "
            refused += "hydra-ensembles policy."
    save(ensemble, output, loaded)
    write_config(output)
    if refused is not None:
        raise Stop(refused, 3)
    if json:
        print_json({"folder": str(output), "summary": str(ensemble), **ensemble.record})
    else:
        typer.echo(str(ensemble))
    say(f"Written to {output}. Next: hydra-ensembles eval {output} --data TEST", json=json)


def save(ensemble: Any, folder: Path, loaded: Any) -> None:
    """Save an ensemble with what prepares its inputs, so that the folder is all one needs."""
    from ...data import processes

    if not is_first():
        processes.wait()  # the folder is whole when any process goes on
        return
    if loaded.transform is not None:
        ensemble.transform = loaded.transform
    ensemble.tokenizer = loaded.tokenizer
    ensemble.save_pretrained(folder)
    processes.wait()
