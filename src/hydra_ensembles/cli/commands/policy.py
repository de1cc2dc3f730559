"""`policy`: fit when a saved ensemble answers, and save that with it."""

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
    from ...fusion import HydraEnsemble, fit_policy
    from ...fusion.folder_schema import read_config
    from ..models import check_sources

    check_sources(data)
    try:
        dtype = read_config(folder).dtype  # it is saved again
    except FormatError:  # loading says what is wrong with it
        dtype = "float32"
    kept = replace(reading, dtype=dtype)
    loaded = kept.load_model(str(folder))
    if not isinstance(loaded.model, HydraEnsemble):
        raise Stop(
            f"{folder} is not a saved ensemble. Create one with `hydra-ensembles build`, `distill` "
            "or `try`. For a plain model, `hydra-ensembles predict` takes --risk and --held-out.",
            4,
        )
    labelled = reading.load_known(loaded, data)
    say(f"Fitting a policy on {sizes(labelled, {})}", json=json)
    target = folder if output is None else output
    try:
        policy = fit_policy(
            loaded.model,
            labelled,
            risk=risk or None,
            alarm=alarm or None,
            method=guarantee,
            delta=delta,
            progress=not json,
        )
    except DataError as error:
        raise Stop(f"{error} Nothing was saved: {target} is as it was.", 3) from error
    loaded.model.save_pretrained(target)
    show(policy, {"folder": str(target), **policy.to_dict()}, json=json)
    say(f"Saved in {target}. Next: hydra-ensembles predict {target} FILES", json=json)
