"""`explain`: what can be pruned in a model, and why not."""

from __future__ import annotations

from dataclasses import asdict

import typer

from .. import options
from ..errors import Stop
from ..output import print_json


def command(
    model: options.Model,
    class_names: options.ClassNames = None,
    config: options.Config = None,
    json: options.Json = False,
) -> None:
    """Say what can be pruned and fused in a model, which tokens are read, and why not."""
    from ...fusion.ensemble import HydraEnsemble
    from ...hosts import explain
    from ..models import load_model

    loaded = load_model(model, class_names=class_names, trained=False)
    if isinstance(loaded.model, HydraEnsemble):
        if json:
            record = {"members": loaded.model.members, "summary": str(loaded.model)}
            print_json({"name": model, "supported": True, **record, **loaded.model.record})
        else:
            typer.echo(str(loaded.model))
        return
    found = explain(loaded.model)
    if json:
        print_json(asdict(found))
    if not found.supported:
        raise Stop(f"{model} is not supported. {found.reason}", 4)
    if not json:
        typer.echo(str(found))
        if loaded.untrained:
            typer.echo(f"  untrained {', '.join(loaded.untrained)}: fine-tune it before building")
