"""Options of a training function in one dict, as tests like to write them."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from hydra_ensembles.training import Settings


def arguments(defaults: Settings, options: dict[str, Any]) -> dict[str, Any]:
    """Gather the options that are only fields of `Settings` into `settings`."""
    names = asdict(defaults).keys() - {"epochs", "learning_rate"}
    fields = {name: value for name, value in options.items() if name in names}
    others = {name: value for name, value in options.items() if name not in fields}
    return {**others, "settings": replace(options.get("settings", defaults), **fields)}
