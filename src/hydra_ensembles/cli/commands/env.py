"""`env`: versions, for reports of problems."""

from __future__ import annotations

import typer

from .. import options
from ..output import print_json

PACKAGES = (
    *(
        "hydra-ensembles",
        "torch",
        "numpy",
        "safetensors",
        "huggingface_hub",
    ),
    *("transformers", "timm", "open_clip_torch", "datasets", "accelerate", "peft"),
    *("torch-uncertainty", "laplace-torch", "scikit-learn", "matplotlib", "typer", "rich"),
)


def command(json: options.Json = False) -> None:
    """Print the versions of everything that matters, for reports of problems."""
    found = versions()
    if json:
        print_json(found)
        return
    for name, value in found.items():
        typer.echo(f"{name:<18} {value}")


def versions() -> dict[str, str]:
    """Return versions by name; a package that is missing is marked as not installed."""
    import os
    import platform
    import sys
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": sys.version.split()[0], "system": platform.platform()}
    found["processors"] = str(os.cpu_count())
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    try:
        import torch

        found["cuda"] = str(torch.version.cuda) if torch.cuda.is_available() else "none"
        found["threads"] = str(torch.get_num_threads())
    except ImportError:
        found["cuda"] = "torch is missing"
    return found
