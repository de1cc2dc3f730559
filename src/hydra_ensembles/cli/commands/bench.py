"""`bench`: how much slower or faster, as ratios from one interleaved run."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from .. import options
from ..errors import Stop
from ..inputs import named
from ..output import say, show, write_config

BATCHES = [1, 8, 32]


def command(
    models: Annotated[
        list[str],
        typer.Argument(
            help="As MODEL or NAME=MODEL; ratios are to the first. A single saved "
            "ensemble is compared with its members one by one."
        ),
    ],
    batch_sizes: Annotated[list[int], typer.Option("--batch", help="Repeatable.")] = BATCHES,
    rounds: Annotated[int, typer.Option(min=3, help="Interleaved rounds.")] = 20,
    max_seconds: Annotated[
        float | None, typer.Option(help="Stop a batch size after this long.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Length of the example text.")] = 128,
    output: options.Output = Path("hydra-bench"),
    class_names: options.ClassNames = None,
    device: options.Device = None,
    dtype: options.Dtype = "float32",
    seed: options.Seed = 0,
    config: options.Config = None,
    json: options.Json = False,
) -> None:
    """Time models against each other on an example batch; ratios, never absolute times."""
    import copy

    from ...evaluation.latency import benchmark
    from ...fusion.ensemble import HydraEnsemble
    from ...hosts.example_inputs import example_batch
    from ..models import load_model

    found = {}
    for given in models:
        name, place = named(given)
        loaded = load_model(
            place, device=device, dtype=dtype, class_names=class_names, trained=False
        )
        found[name] = loaded.model
    first = next(iter(found.values()))
    if len(found) == 1:
        if not isinstance(first, HydraEnsemble):
            raise Stop("One model has nothing to be compared with: give two or more.", 2)
        one_by_one = copy.deepcopy(first)
        one_by_one.mode = "loop"
        found = {"members one by one": one_by_one, **found}
    plain = first.host if isinstance(first, HydraEnsemble) else first
    batch, what = example_batch(plain, tokens=tokens)
    result = benchmark(
        found,
        batch if isinstance(batch, dict) else batch[0],
        batch_sizes=batch_sizes,
        rounds=rounds,
        max_seconds=max_seconds,
        seed=seed,
        progress=not json,
    )
    write_config(output)
    text = result.to_json(output / "benchmark.json")
    show(f"{what}\n{result}", json_module.loads(text), json=json)
    say(f"Written to {output / 'benchmark.json'}", json=json)
