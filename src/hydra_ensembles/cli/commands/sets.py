"""`sets`: fit sets with a guarantee for a saved ensemble, and save them with it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .. import options
from ..fit_saved import fit_saved
from ..inputs import READING, Reading, reads_data


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
    reading: Reading = READING,
    config: options.Config = None,
    json: options.Json = False,
) -> None:
    """Fit sets of what may be right, with a guaranteed coverage, for a saved ensemble.

    The held-out data is labelled, like the data to come, and not what the ensemble was built on.
    The sets are saved with the ensemble: `predict`, `serve` and what is exported give them.
    """
    from ...fusion import fit_sets

    def fit(ensemble: Any, labelled: Any) -> Any:
        return fit_sets(
            ensemble,
            labelled,
            coverage=coverage,
            method=method,
            groups="class" if by_class else None,
            randomised=randomised,
            seed=reading.seed,
            progress=not json,
        )

    fit_saved(folder, held_out, fit, title="sets", output=output, reading=reading, json=json)
