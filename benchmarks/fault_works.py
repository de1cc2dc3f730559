"""Small pieces of real work that `faults.py` disturbs, each with a folder to go on from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import hydra_ensembles as hydra
from hydra_ensembles import HydraEnsemble, build, find_circuit
from hydra_ensembles._tensors import model_fingerprint
from hydra_ensembles.errors import HydraError
from hydra_ensembles.evaluation import Results
from hydra_ensembles.hosts.tiny_vit import TinyViT, TinyViTConfig
from hydra_ensembles.methods import Select
from hydra_ensembles.training import DISTILL, distill, finetune

SHAPE = TinyViTConfig(layers=2, heads=4, width=24, mlp_width=24, classes=3)


def host(seed: int = 0) -> TinyViT:
    """Return a random vision transformer whose heads matter."""
    model = TinyViT(SHAPE, seed=seed).eval()
    for parameter in model.parameters():
        parameter.data.mul_(4)
    return model


def data(count: int = 45, batch: int = 15) -> list[Any]:
    """Return labelled noise."""
    images = torch.randn(count, 1, 16, 16, generator=torch.Generator().manual_seed(1))
    return list(zip(images.split(batch), (torch.arange(count) % 3).split(batch), strict=True))


def digest(folder: Path) -> str:
    """Hash all files of a result, by name."""
    whole = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            whole.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return whole.hexdigest()


def run_build(folder: Path) -> str:
    """Build two members and save them; the result is all files of the saved ensemble."""
    ensemble = build(
        host(),
        data(),
        method=Select(masks=12),
        members=2,
        max_cost=1.9,
        folder=folder / "state",
        progress=False,
    )
    ensemble.save_pretrained(folder / "result")
    return digest(folder / "result")


def run_circuit(folder: Path) -> str:
    """Search a circuit; the result is its record."""
    found = find_circuit(
        host(),
        id=data(),
        objective="average",
        keep=2,
        folder=folder / "state",
        effects=True,
        progress=False,
    )
    return hashlib.sha256(found.to_json().encode()).hexdigest()


def run_distill(folder: Path) -> str:
    """Distil two teachers; the result is the weights, the temperature and the history."""
    student = distill(
        host(),
        [host(1), host(2)],
        data(60, 20),
        validation=data(),
        members=2,
        max_cost=1.9,
        settings=replace(DISTILL, views=2),
        epochs=3,
        folder=folder / "state",
        save_every=1,
        progress=False,
    )
    history = student.record["training"]["history"]
    return f"{model_fingerprint(student)} {student.temperature} {json.dumps(history)}"


def run_finetune(folder: Path) -> str:
    """Fine-tune one model; the result is its weights and its history."""
    (member,) = finetune(
        host(), data(), epochs=3, folder=folder / "state", save_every=1, progress=False
    )
    return f"{model_fingerprint(member.model)} {json.dumps(member.history)}"


def run_eval(folder: Path) -> str:
    """Evaluate with outliers; the result is the figures, as saved and read back."""
    outliers = [images * 3 for images, _ in data()]
    found = hydra.evaluate(host(), data(), ood={"far": outliers}, progress=False)
    folder.mkdir(parents=True, exist_ok=True)
    found.save(folder / "results-host.json")
    return Results.load(folder / "results-host.json").to_json()


class Watched(Dataset[Any]):
    """Examples whose loading process may be killed: `victim` is the example at which it dies."""

    victim: int | None = None

    def __len__(self) -> int:
        return 45

    def __getitem__(self, index: int) -> Any:
        import os
        import signal

        if index == self.victim:
            os.kill(os.getpid(), signal.SIGKILL)
        image = torch.randn(1, 16, 16, generator=torch.Generator().manual_seed(index))
        return image, index % 3


def run_loader(folder: Path) -> str:
    """Build from a `DataLoader` whose examples another process loads."""
    loader = DataLoader(Watched(), batch_size=15, num_workers=1)
    found = find_circuit(
        host(),
        id=loader,
        objective="id-loss",
        keep=2,
        folder=folder / "state",
        effects=True,
        progress=False,
    )
    return hashlib.sha256(found.to_json().encode()).hexdigest()


WORKS: dict[str, Callable[[Path], str]] = {
    "build": run_build,
    "distill": run_distill,
    "circuit": run_circuit,
    "finetune": run_finetune,
    "eval": run_eval,
    "loader": run_loader,
}


def two_ensembles() -> tuple[HydraEnsemble, HydraEnsemble]:
    """Return two ensembles that are saved in one folder by turns."""
    found = []
    for seed in (0, 1):
        masks = [hydra.HeadMask([[1] * 4, row]) for row in ([1, 1, 0, 0], [0, 0, 1, 1])]
        ensemble = hydra.fuse(host(seed), masks)
        ensemble.fit_novelty_(data(), progress=False)
        ensemble.temperature = 1.5 + seed
        found.append(ensemble)
    return found[0], found[1]


def loaded(folder: Path) -> str:
    """Return what a saved ensemble is, or the words with which it is refused."""
    try:
        ensemble = HydraEnsemble.from_pretrained(folder)
    except HydraError as error:
        return f"refused: {error}"
    return f"{model_fingerprint(ensemble)} {ensemble.temperature}"
