"""`sets`: fit sets with a guarantee for a saved ensemble, and save them with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ...errors import DataError, FormatError
from .. import options
from ..errors import Stop
from ..inputs import READING, Reading, reads_data
from ..output import say, show, sizes


@reads_data(leave_out=["dtype"])
def command(
    folder: Annotated[Path, typer.Argument(help="A saved ensemble.", show_default=False)],
    held_out: Annotated[
        str, typer.Option("--held-out", "--data", help=options.DATA_HELP, show_default=False)
    ],
    coverage: Annotated[
        float, typer.Option(help="Share of inputs whose set holds what is right.")
    ] = 0.9,
    method: Annotated[
        str | None,
        typer.Option(help="Classes: lac, aps or raps; numbers: normalised or plain."),
    ] = None,
    by_class: Annotated[
        bool, typer.Option("--by-class", help="Cover each class as often, not only all together.")
    ] = False,
    randomised: Annotated[
        bool, typer.Option("--randomised", help="With aps and raps: exact coverage, smaller sets.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Another folder; FOLDER by default.")
    ] = None,
    seed: options.Seed = 0,
    reading: Reading = READING,
    config: options.Config = None,
    json: options.Json = False,
) -> None:
    """Fit sets of what may be right, with a guaranteed coverage, for a saved ensemble.

    The held-out data is labelled, like the data to come, and not what the ensemble was built on.
    The sets are saved with the ensemble: `predict`, `serve` and what is exported give them.
    """
    from ...fusion import HydraEnsemble, fit_sets
    from ...fusion.folder_schema import read_config
    from ..models import check_sources

    check_sources(held_out)
    try:
        dtype = read_config(folder).dtype  # it is saved again
    except FormatError:  # loading says what is wrong with it
        dtype = "float32"
    loaded = replace(reading, dtype=dtype).load_model(str(folder))
    if not isinstance(loaded.model, HydraEnsemble):
        raise Stop(
            f"{folder} is not a saved ensemble. Create one with `hydra-ensembles build`, `distill` "
            "or `try`.",
            4,
        )
    labelled = reading.load_known(loaded, held_out)
    say(f"Fitting sets on {sizes(labelled, {})}", json=json)
    target = folder if output is None else output
    try:
        found = fit_sets(
            loaded.model,
            labelled,
            coverage=coverage,
            method=method,
            groups="class" if by_class else None,
            randomised=randomised,
            seed=seed,
            progress=not json,
        )
    except DataError as error:
        raise Stop(f"{error} Nothing was saved: {target} is as it was.", 3) from error
    loaded.model.save_pretrained(target)
    show(found, {"folder": str(target), **found.to_dict()}, json=json)
    say(f"Saved in {target}. Next: hydra-ensembles predict {target} FILES", json=json)
