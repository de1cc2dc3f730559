"""`fold`: fine-tunings of one model in, one ensemble out, by least squares."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import options
from ..errors import Stop
from ..inputs import READING, Reading, reads_data
from ..output import finish, say, sizes, write_config

STUDENT = {"yes": True, "no": False, "auto": "auto"}


@reads_data()
def command(
    models: Annotated[
        list[str],
        typer.Argument(help="Two or more fine-tunings of one model.", show_default=False),
    ],
    data: options.Data,
    held_out: Annotated[
        str | None,
        typer.Option(help="Labelled data: decides what is auto, fits temperature and novelty."),
    ] = None,
    readout: Annotated[
        str, typer.Option(help="states (members are plain models) or logits (linear readouts).")
    ] = "states",
    student: Annotated[
        str, typer.Option(help="Whether a student answers for the members: yes, no or auto.")
    ] = "auto",
    novelty_from_data: Annotated[
        bool,
        typer.Option(
            help="Take novelty's means and covariances from DATA, which then needs labels, and "
            "only its ranks from --held-out."
        ),
    ] = False,
    trunk: Annotated[
        str, typer.Option(help="mean (of the weights), auto, or the number of a model, from 0.")
    ] = "mean",
    max_cost: Annotated[
        float, typer.Option(help="Multiply-adds at most, relative to one model.")
    ] = 1.0,
    names: options.Names = True,
    output: options.Output = Path("hydra-folded"),
    reading: Reading = READING,
    config: options.Config = None,
    json: options.Json = False,
) -> None:
    """Fold fine-tunings of one pretrained model into one ensemble, without training.

    Labels of DATA are not used. The models must have the same classes in the same order.
    """
    from ...refit import fold
    from ..models import check_sources

    if not (trunk in ("mean", "auto") or trunk.isdecimal()):
        raise Stop(f"Unknown --trunk {trunk!r}: expected mean, auto or a number.", 2)
    if readout not in ("states", "logits"):
        raise Stop(f"Unknown --readout {readout!r}: expected states or logits.", 2)
    if student not in STUDENT:
        raise Stop(f"Unknown --student {student!r}: expected {', '.join(STUDENT)}.", 2)
    if novelty_from_data and held_out is None:
        raise Stop("--novelty-from-data needs --held-out: novelty is ranked among its examples.", 2)
    check_sources(data)
    check_sources(held_out)
    loaded = [reading.load_model(model) for model in models]
    for one in loaded[1:]:
        if one.class_names != loaded[0].class_names:
            raise Stop(f"{one.name} has other classes, or in another order, than {models[0]}.", 4)
    train = reading.load_unlabelled(loaded[0], data)
    held = None if held_out is None else reading.load_known(loaded[0], held_out)
    write_config(output, begin=True)
    say(f"Folding {len(models)} models on {sizes(train, {})}", json=json)
    ensemble = fold(
        [one.host for one in loaded],
        train,
        readout=readout,  # type: ignore[arg-type]
        student=STUDENT[student],  # type: ignore[arg-type]
        trunk=int(trunk) if trunk.isdecimal() else trunk,  # type: ignore[arg-type]
        max_cost=max_cost,
        held_out=held,
        seed=reading.seed,
        progress=not json,
    )
    if held is not None:
        known = reading.load_known(loaded[0], data) if novelty_from_data else None
        ensemble.fit_novelty_(held, train=known, progress=not json)
    finish(ensemble, output, loaded[0], held, names=names, json=json)
