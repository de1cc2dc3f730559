"""`build`: from a pretrained model and data to a fused ensemble."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...errors import HydraError
from .. import options
from ..inputs import READING, Reading, reads_data
from ..output import finish, say, sizes, write_config


@reads_data()
def command(
    model: options.Model,
    data: options.Data,
    ood: options.Ood = None,
    method: Annotated[
        str,
        typer.Option(
            help="auto (heads, parts or one member, by the NLL), select, parts, circuit, taylor, "
            "hies, random or fold (trains teachers)."
        ),
    ] = "auto",
    members: options.MembersOrDefault = None,
    max_cost: options.MaxCost = 1.07,
    keep: Annotated[
        float | None,
        typer.Option(help="Share of heads kept; for circuit, taylor, hies and random."),
    ] = None,
    score: Annotated[
        str, typer.Option(help="Uncertainty to report: msp, entropy, energy ... or auto.")
    ] = "auto",
    held_out: Annotated[
        str | None,
        typer.Option(help="Labelled data, not in --data, to fit a policy to; saved with it."),
    ] = None,
    risk: options.Risk = 0.02,
    alarm: options.Alarm = 0.05,
    guarantee: options.Guarantee = "conformal",
    names: options.Names = True,
    output: options.Output = Path("hydra-ensemble"),
    reading: Reading = READING,
    config: options.Config = None,
    json: options.Json = False,
) -> None:
    """Build a fused ensemble on calibration data that the model was not trained on.

    Progress is saved in OUTPUT/state: run the same command to resume.
    """
    from ...builder import build
    from ...builder.methods import method_with
    from ...fusion import fit_policy
    from ..models import check_sources

    check_sources(held_out)
    chosen = method_with(method, keep=keep)
    loaded, calibration, outliers = reading.load(model, data, ood)
    labelled = None if held_out is None else reading.load_known(loaded, held_out)
    write_config(output, begin=True)
    what = f"{members} members" if members else "members"
    say(f"Building {what} ({method}) from {sizes(calibration, outliers)}", json=json)
    ensemble = build(
        loaded.host,
        calibration,
        ood=outliers or "auto",
        method=chosen,
        members=members,
        max_cost=max_cost or None,
        score=score,
        seed=reading.seed,
        folder=output / "state",
        progress=not json,
    )
    refused = ""
    if labelled is not None:
        try:
            fit_policy(
                ensemble,
                labelled,
                risk=risk or None,
                alarm=alarm or None,
                method=guarantee,
                progress=not json,
            )
        except HydraError as error:  # what was built is kept
            refused = str(error)
    finish(ensemble, output, loaded, calibration, refused=refused, names=names, json=json)
