"""A bill of materials: the packages that made an artefact, as CycloneDX JSON."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from .._records import sha256_of_file, write_whole

SBOM = "sbom.json"
ROOTS = ("hydra-ensembles", "torch", "onnx", "onnxscript", "onnxruntime", "transformers", "timm")
"""Packages that take part in an export, where they are installed; what they need comes too."""


def write_sbom(folder: str | Path, files: Sequence[str] = (), *, name: str = "ensemble") -> Path:
    """Write `sbom.json`: the artefact with its files' SHA-256, and the packages that made it.

    The same packages and files give the same bytes: there is no time in it.

    Args:
        folder: The artefact.
        files: Names of the files that are the model.
        name: What the artefact is called.
    """
    home = Path(folder)
    packages = [_component(found) for found in installed(ROOTS)]
    models = [
        {
            "type": "machine-learning-model",
            "bom-ref": f"file:{file}",
            "name": file,
            "hashes": [{"alg": "SHA-256", "content": sha256_of_file(home / file)}],
        }
        for file in sorted(files)
    ]
    content: dict[str, Any] = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {"type": "application", "bom-ref": "artefact", "name": name}},
        "components": [*models, *packages],
    }
    number = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(content, sort_keys=True))
    content["serialNumber"] = f"urn:uuid:{number}"
    write_whole(home / SBOM, json.dumps(content, indent=1) + "\n")
    return home / SBOM


def installed(roots: Sequence[str]) -> list[Distribution]:
    """Return installed packages and all that they need here, by name."""
    found: dict[str, Distribution] = {}
    waiting = list(roots)
    while waiting:
        name = _plain(waiting.pop())
        if name in found:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:  # an extra, or for another system
            continue
        for requirement in found[name].requires or ():
            if "extra ==" not in requirement:
                waiting.append(re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0])
    return [found[name] for name in sorted(found)]


def _component(package: Distribution) -> dict[str, Any]:
    name, version = _plain(package.metadata["Name"]), package.version
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": f"pkg:pypi/{name}@{version}",
        "name": name,
        "version": version,
        "purl": f"pkg:pypi/{name}@{version}",
    }
    if "License-Expression" in package.metadata:
        component["licenses"] = [{"expression": package.metadata["License-Expression"]}]
    return component


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
