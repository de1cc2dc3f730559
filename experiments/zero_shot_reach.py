"""Can a dual encoder of DeiT-tiny and MiniLM name unseen classes at all? How far three ways reach.

    python experiments/zero_shot_reach.py --data DATA --cache CACHE     # 5 minutes of one core

Names of 500 ImageNet classes are mapped to DeiT-tiny's image space on the other 500 classes: by
ridge regression, by a softmax average over similar names, and by a Gaussian process; towards the
classes' mean images, or towards the rows of DeiT's own classifier. Settings are the best on the
tested classes themselves, so every figure is an upper bound. Writes
docs/results/zero-shot-reach.json.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from lab import plainly, sets
from lab.records import this_commit
from lab.tasks import deit_tiny
from lab.zeroshot import class_names, name_states
from safetensors.torch import load_file, save_file
from torch import Tensor

from hydra_ensembles._records import write_whole

OUT = Path(__file__).parents[1] / "docs" / "results" / "zero-shot-reach.json"
PARTS = ("calibration", "validation", "test")


@torch.no_grad()
def features(data: Path, cache: Path) -> dict[str, Tensor]:
    """Return DeiT's class tokens of all images, its classifier's rows and the names' states."""
    path = cache / "zero-shot-reach.safetensors"
    if not path.exists():
        model = deit_tiny(data)
        found = {"classifier": model.head.weight.detach(), "names": name_states(data)}
        for part in PARTS:
            batches = sets.imagenet(data, part).batches(batch_size=50)
            tokens = [
                model.forward_head(model.forward_features(images), pre_logits=True)
                for images, _ in batches
            ]
            found[part] = torch.cat(tokens)
        cache.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in found.items()}, path)
    return {name: tensor.double() for name, tensor in load_file(path).items()}


def ways(names: Tensor, target: Tensor, seen: Tensor, unseen: Tensor) -> dict[str, list[Tensor]]:
    """Return the predicted directions `[500, 192]` of unseen classes by way and setting."""
    read = names - names[seen].mean(0)
    units = F.normalize(read, dim=-1)
    gram = read[seen].T @ read[seen]
    eye = torch.eye(len(gram), dtype=gram.dtype)
    ridges = [0.1, 0.3, 1.0, 3.0, 10.0]
    scale = gram.diagonal().mean()
    likeness = units @ units[seen].T
    known = torch.eye(len(seen), dtype=gram.dtype)
    return {
        "ridge regression": [
            read[unseen] @ torch.linalg.solve(gram + ridge * scale * eye, read[seen].T @ target)
            for ridge in ridges
        ],
        "average over similar names": [
            (sharpness * likeness[unseen]).softmax(-1) @ target for sharpness in (10, 20, 40, 80)
        ],
        "Gaussian process": [
            (width * (likeness[unseen] - 1)).exp()
            @ torch.linalg.solve((width * (likeness[seen] - 1)).exp() + noise * known, target)
            for width in (1, 2, 4)
            for noise in (0.03, 0.1, 0.3)
        ],
    }


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("HYDRA_DATA"))
    parser.add_argument("--cache", type=Path, default=os.environ.get("HYDRA_CACHE", "work/answers"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    root = sets.data_root(args.data)
    assert len(set(class_names(root))) == 1000
    found = features(root, Path(args.cache))
    best: dict[str, list[float]] = {}
    for first in (0, 1):  # even classes train and odd ones are tested, then the other way round
        seen, unseen = torch.arange(first, 1000, 2), torch.arange(1 - first, 1000, 2)
        centre = torch.cat([found[part][seen] for part in PARTS]).mean(0)
        images = F.normalize(torch.cat([found[part][unseen] for part in PARTS]) - centre, dim=-1)
        labels = torch.arange(len(unseen)).repeat(len(PARTS))

        def accuracy(directions: Tensor, images: Tensor = images, labels: Tensor = labels) -> float:
            guesses = (images @ F.normalize(directions, dim=-1).T).argmax(1)
            return float((guesses == labels).double().mean())

        rows = found["classifier"] - found["classifier"][seen].mean(0)
        means = torch.stack([found[part] for part in PARTS]).mean(0) - centre
        best.setdefault("DeiT's own classifier, which knows the classes", []).append(
            accuracy(rows[unseen])
        )
        for kind, target in {"classifier rows": rows, "mean images": means}.items():
            directions = F.normalize(target[seen], dim=-1)
            for way, tried in ways(found["names"], directions, seen, unseen).items():
                best.setdefault(f"{way} to {kind}", []).append(max(map(accuracy, tried)))
    record = {name: sum(values) / len(values) for name, values in best.items()}
    write_whole(OUT, json.dumps({"commit": this_commit(), "accuracy": record}, indent=1) + "\n")
    for name, value in record.items():
        print(f"{value:6.1%}  {name}")


if __name__ == "__main__":
    plainly(main)
