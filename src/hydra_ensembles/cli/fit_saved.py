"""What `policy` and `sets` share: fit something on labelled data for a saved ensemble, save it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DataError, FormatError
from .errors import Stop
from .inputs import Reading
from .output import say, show, sizes

if TYPE_CHECKING:
    from ..fusion import HydraEnsemble


def fit_saved(
    folder: Path,
    data: str,
    fit: Callable[[HydraEnsemble, Any], Any],
    *,
    title: str,
    otherwise: str = "",
    output: Path | None,
    reading: Reading,
    json: bool,
) -> None:
    """Fit on labelled data, print what was found, and save the ensemble with it.

    Args:
        folder: The saved ensemble.
        data: Labelled data.
        fit: Returns what it fitted to an ensemble and data.
        title: What is fitted, in words.
        otherwise: What to do with a plain model, a sentence.
        output: Another folder to save to, or None.
        reading: How data is read.
        json: Whether to print JSON.
    """
    from ..fusion import HydraEnsemble
    from ..fusion.folder_schema import read_config
    from .models import check_sources

    check_sources(data)
    try:
        dtype = read_config(folder).dtype  # it is saved again
    except FormatError:  # loading says what is wrong with it
        dtype = "float32"
    loaded = replace(reading, dtype=dtype).load_model(str(folder))
    if not isinstance(loaded.model, HydraEnsemble):
        raise Stop(
            f"{folder} is not a saved ensemble. Create one with `hydra-ensembles build`, `distill` "
            f"or `try`. {otherwise}".rstrip(),
            4,
        )
    labelled = reading.load_known(loaded, data)
    say(f"Fitting {title} on {sizes(labelled, {})}", json=json)
    target = folder if output is None else output
    try:
        found = fit(loaded.model, labelled)
    except DataError as error:
        raise Stop(f"{error} Nothing was saved: {target} is as it was.", 3) from error
    loaded.model.save_pretrained(target)
    show(found, {"folder": str(target), **found.to_dict()}, json=json)
    say(f"Saved in {target}. Next: hydra-ensembles predict {target} FILES", json=json)
