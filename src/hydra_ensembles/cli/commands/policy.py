"""`policy`: fit when a saved ensemble answers, and save that with it."""

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
    data: options.Data,
    risk: options.Risk = 0.02,
    alarm: options.Alarm = 0.05,
    guarantee: options.Guarantee = "conformal",
    delta: options.Delta = 0.1,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Another folder; FOLDER by default.")
    ] = None,
    reading: Reading = READING,
    config: options.Config = None,
    json: options.Json = False,
) -> None:
    """Fit when a saved ensemble answers, when it abstains as unsure and when as new.

    DATA is labelled, like the data to come, and not what the ensemble was built on. The policy is
    saved with the ensemble: `predict` and what is exported from it decide by it. A risk that DATA
    does not allow is refused, with the smallest one that it does, and nothing is saved.
    """
    from ...fusion import fit_policy

    def fit(ensemble: Any, labelled: Any) -> Any:
        return fit_policy(
            ensemble,
            labelled,
            risk=risk or None,
            alarm=alarm or None,
            method=guarantee,
            delta=delta,
            progress=not json,
        )

    plain = "For a plain model, `hydra-ensembles predict` takes --risk and --held-out."
    fit_saved(
        folder,
        data,
        fit,
        title="a policy",
        otherwise=plain,
        output=output,
        reading=reading,
        json=json,
    )
