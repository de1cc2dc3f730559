"""`distill`: teachers in, one fused model out, one teacher per member."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import options
from ..errors import Stop
from ..inputs import READING, Reading, reads_data
from ..output import finish, say, sizes, write_config

TEACHERS_HELP = (
    "A teacher: a model as MODEL is given, a saved ensemble (all its members), a training "
    "checkpoint of MODEL, or a .npy or .safetensors table of probabilities in the data's order. "
    "Repeatable."
)


@reads_data(leave_out=["dtype"])
def command(
    model: options.Model,
    data: options.Data,
    teachers: Annotated[
        list[str] | None, typer.Option("--teachers", "-t", help=TEACHERS_HELP)
    ] = None,
    make: Annotated[
        str | None,
        typer.Option(help="Make teachers of MODEL: branch, lora, snapshots or full."),
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Teachers to make.")] = 3,
    members: options.Members = 3,
    max_cost: Annotated[
        float, typer.Option(help="Bound on multiply-adds relative to the model.")
    ] = 1.07,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the data.")] = 10,
    learning_rate: Annotated[float, typer.Option(help="Peak of the schedule.")] = 5e-4,
    trunk_rate: Annotated[
        float, typer.Option(min=0, help="The trunk's share of the learning rate; 0 freezes it.")
    ] = 0.0,
    views: Annotated[int, typer.Option(min=1, help="Variants of each example.")] = 4,
    precision: Annotated[str, typer.Option(help="no, bf16 or fp16.")] = "no",
    validation: Annotated[
        str | None, typer.Option(help="Labelled data for the temperature; else a tenth of --data.")
    ] = None,
    ood: options.Ood = None,
    names: options.Names = True,
    output: options.Output = Path("hydra-student"),
    reading: Reading = READING,
    config: options.Config = None,
    json: options.Json = False,
) -> None:
    """Distil one teacher into each member of a fused model.

    The teachers' answers and checkpoints are kept in OUTPUT/state: run the same command to resume.
    """
    from ...training import DISTILL, distill, make_teachers
    from ..models import load_model

    if bool(teachers) == bool(make):
        raise Stop("Give teachers (--teachers, repeated), or have them made (--make branch).", 2)
    loaded, train, outliers = reading.load(model, data, ood)
    held = None if validation is None else reading.load_known(loaded, validation)
    write_config(output, begin=True)
    if make:
        say(f"Making {count} teachers ({make}) from {sizes(train, {})}", json=json)
        given: list[Any] = list(
            make_teachers(
                loaded.host,
                train,
                count=count,
                how=make,  # type: ignore[arg-type]
                seed=reading.seed,
                folder=output / "state" / "teachers",
                progress=not json,
            )
        )
    else:
        given = []
        for source in teachers or ():  # a path is opened when its turn comes
            path = Path(source).expanduser()
            exists = path.exists()
            given.append(path if exists else load_model(source, device=reading.device).model)
    say(f"Distilling {len(given)} teachers into {members} members", json=json)
    ensemble = distill(
        loaded.host,
        given,
        train,
        members=members,
        max_cost=max_cost,
        validation=held,
        ood=outliers or "auto",
        settings=replace(DISTILL, trunk_rate=trunk_rate, views=views, mixed_precision=precision),
        epochs=epochs,
        learning_rate=learning_rate,
        seed=reading.seed,
        folder=output / "state",
        progress=not json,
    )
    finish(ensemble, output, loaded, train, names=names, json=json)
