"""`prune`: a model in, the same model with fewer heads and neurons out, by least squares."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import options
from ..inputs import READING, Reading, reads_data
from ..output import finish, is_first, say, show, sizes, write_config

LABELLED = ("fisher", "his", "taylor")
"""Criteria that need labels."""
STEPS = "steps"
"""Sub-folder of the output with the layers that are finished."""


@reads_data()
def command(
    model: options.Model,
    data: options.Data,
    max_cost: Annotated[
        float, typer.Option(help="Largest multiply-adds relative to the model.")
    ] = 0.5,
    uniform: Annotated[
        bool,
        typer.Option(
            "--uniform",
            help="Equal widths in all layers: stock transformers loads the result.",
        ),
    ] = False,
    criterion: Annotated[
        str,
        typer.Option(
            help="energy, magnitude or random; or fisher, his or taylor, which need labels."
        ),
    ] = "energy",
    held_out: Annotated[
        str | None, typer.Option(help="Labelled data to compare both models on.")
    ] = None,
    output: options.Output = Path("hydra-pruned"),
    reading: Reading = READING,
    config: options.Config = None,
    json: options.Json = False,
) -> None:
    """Remove attention heads and MLP neurons to a budget, and refit what is left.

    Nothing is trained. Labels of DATA are used only by criteria that need them.
    """
    from ...data import processes
    from ...fusion.host_folder import as_ensemble
    from ...refit import prune
    from ..models import check_sources

    check_sources(data)
    check_sources(held_out)
    loaded = reading.load_model(model)
    load = reading.load_known if criterion in LABELLED else reading.load_unlabelled
    inputs = load(loaded, data)
    held = None if held_out is None else reading.load_known(loaded, held_out)
    write_config(output, begin=True)
    say(f"Pruning {loaded.name} to {max_cost:g} x on {sizes(inputs, {})}", json=json)
    pruned = prune(
        loaded.host,
        inputs,
        max_cost=max_cost,
        uniform=uniform,
        criterion=criterion,
        held_out=held,
        folder=output / STEPS,
        seed=reading.seed,
        progress=not json,
    )
    record: dict[str, Any] = pruned.hydra_record  # type: ignore[assignment]
    if is_first():  # the model is complete: its steps are not needed again
        shutil.rmtree(output / STEPS)
    if not uniform:
        finish(as_ensemble(pruned), output, loaded, held, json=json)
        return
    if is_first():
        parts: list[Any] = [pruned, loaded.tokenizer, getattr(loaded.transform, "processor", None)]
        for part in parts:
            if part is not None:
                part.save_pretrained(output)
    processes.wait()
    write_config(output)
    lines = [
        f"{name}: {record[name]}"
        for name in ("cost", "heads", "neurons", "held_out")
        if name in record
    ]
    show("\n".join(lines), {"folder": str(output), **record}, json=json)
    say(f"Written to {output}. Load it with transformers: from_pretrained.", json=json)
