"""Class tokens of DeiT-tiny on all zero-shot data, under all masks of its last two blocks."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import real_data
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hydra_ensembles.data.proxies import make_proxies
from hydra_ensembles.data.transforms import IMAGENET_MEAN, IMAGENET_STD
from hydra_ensembles.heads.masks import HeadMask
from hydra_ensembles.hosts import HostModel, host_model
from hydra_ensembles.search.pool import make_pool
from hydra_ensembles.search.prefix import Prefix

LAYERS = (10, 11)
TEXTURES = ("banded", "braided", "bumpy", "crosshatched")  # `cobwebbed` is close to a class
UNSEEN = ("mnist", "cifar10", "noise")
# without the proxy "noise": noise is a family of the test, and must stay unseen
PROXIES = ("corrupt", "shuffle", "mix", "blur", "tile", "sketch")


def image_tower(root: Path) -> nn.Module:
    """Return DeiT-tiny without its classifier."""
    import timm

    model = timm.create_model("deit_tiny_patch16_224", pretrained=False)
    model.load_state_dict(load_file(root / "deit-tiny" / "model.safetensors"))
    model.reset_classifier(0)
    return model.eval()


def image_sets(root: Path) -> dict[str, Any]:
    """Return all images by name; those under `flip-` are for training alone."""
    parts = {part: real_data.imagenet(root, part) for part in real_data.IMAGENET_PARTS}
    sets: dict[str, Any] = {name: part.batches() for name, part in parts.items()}
    for name in ("calibration", "test"):
        turned = real_data.ImageSet(parts[name].pixels.flip(-1), parts[name].labels)
        sets[f"flip-{name}"] = turned.batches()
    for kind in TEXTURES:
        sets[f"textures-{kind}"] = real_data.textures(root, [kind]).batches()
    few = {
        "mnist": real_data.mnist(root).subset(range(500)),
        "cifar10": real_data.cifar10(root).subset(range(500)),
        "noise": real_data.noise(250),
    }
    sets.update({name: some.unlabelled().batches(size=224) for name, some in few.items()})
    for parity in (0, 1):  # proxies are made of each half of the classes by itself
        some = parts["validation"].subset(range(parity, 1000, 8)).batches()
        made = make_proxies(some, PROXIES, mean=IMAGENET_MEAN, std=IMAGENET_STD)
        sets.update({f"proxy-{kind}-{parity}": data for kind, data in made.items()})
    return sets


class Features:
    """Class tokens `[example, mask, 192]` of all data under all masks of the last two blocks.

    Computed once above a shared trunk and kept in a folder, one file a data set.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        tower = host_model(image_tower(root))
        self.masks = list(make_pool(tower, LAYERS))
        self.places = {mask: place for place, mask in enumerate(self.masks)}
        self.sets: dict[str, Tensor] = {}
        folder.mkdir(parents=True, exist_ok=True)
        sets: dict[str, Any] | None = None
        for name in _all_names():
            path = folder / f"{name}.safetensors"
            if not path.exists():
                sets = sets or image_sets(root)
                start = time.process_time()
                masks = self.masks[:1] if name.startswith("flip-") else self.masks
                found = features_of(tower, sets[name], masks)
                beside = path.with_suffix(".partial")
                save_file({"features": found.contiguous()}, beside)
                os.replace(beside, path)
                seconds = time.process_time() - start
                print(f"{name}: {tuple(found.shape)}, {seconds:.0f} s of CPU", flush=True)
            self.sets[name] = load_file(path)["features"]

    def of(self, name: str, masks: Sequence[HeadMask]) -> Tensor:
        """Return `[example, member, 192]`."""
        return self.sets[name][:, [self.places[mask] for mask in masks]]


def _all_names() -> list[str]:
    """Return the names of `image_sets`, without loading any."""
    return [
        *real_data.IMAGENET_PARTS,
        "flip-calibration",
        "flip-test",
        *(f"textures-{kind}" for kind in TEXTURES),
        *UNSEEN,
        *(f"proxy-{kind}-{parity}" for parity in (0, 1) for kind in PROXIES),
    ]


def features_of(tower: HostModel, data: Any, masks: Sequence[HeadMask]) -> Tensor:
    """Return the class tokens of one data set under masks of the last two blocks."""
    prefix = Prefix(tower, {"data": data}, labelled=())
    for layer in range(LAYERS[0]):
        prefix.advance(torch.ones(tower.head_counts[layer], dtype=torch.bool))
    return prefix.logits(list(masks)).logits["data"]
