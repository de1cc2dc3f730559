"""`build`: from a pretrained model and data to a fused ensemble."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .. import options
from ..reading import READING, Reading, reads_data
from ..show import print_json, say, sizes, write_config


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
    from ..loading import check_sources

    check_sources(data, ood)
    way = method_with(method, keep=keep)
    loaded = reading.load_model(model)
    host = loaded.host
    calibration = reading.load_known(loaded, data)
    outliers = reading.load_outliers(loaded, ood)
    output.mkdir(parents=True, exist_ok=True)
    write_config(output)
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
    if names and ensemble.id2label is None:
        ensemble.record["class_names"] = dict(enumerate(names))
    save(ensemble, output, loaded)
    if json:
        print_json({"folder": str(output), "summary": str(ensemble), **ensemble.record})
    else:
        typer.echo(str(ensemble))
    say(f"Written to {output}. Next: hydra-ensembles eval {output} --data TEST", json=json)


def save(ensemble: Any, folder: Path, loaded: Any) -> None:
    """Save an ensemble with what prepares its inputs, so that the folder is all one needs."""
    from dataclasses import asdict

    from ...data import ImageTransform

    processor = getattr(loaded.transform, "processor", None)
    if isinstance(loaded.transform, ImageTransform):
        ensemble.record["image_transform"] = asdict(loaded.transform)
    ensemble.save_pretrained(folder, tokenizer=loaded.tokenizer, image_processor=processor)
