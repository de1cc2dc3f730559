"""Time of the circuit search relative to the plain algorithm of L * H passes, one interleaved run.

    python benchmarks/circuits.py [--data DATA] [--images 32] [--batch 16]

Both search the same circuit of DeiT-tiny (real weights with --data, random ones without) and must
find the same heads. The plain algorithm runs the whole model once for every head, and once a layer
for the objective that effects are compared with; the ratio to heads alone is printed too.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import timm
import torch

from hydra_ensembles.circuits.headmap import find_effects
from hydra_ensembles.circuits.objectives import as_objective
from hydra_ensembles.circuits.prefix import Outputs
from hydra_ensembles.heads import gate
from hydra_ensembles.masks import HeadMask
from hydra_ensembles.models import HostModel, host_model


def plain_pass(host: HostModel, mask: HeadMask, data: list) -> Outputs:
    """Run the whole model with some heads off."""
    with torch.no_grad(), gate(host, mask):
        logits = torch.cat([host.model(x) for x, _ in data])
    return Outputs({"id": logits[:, None]}, {"id": torch.cat([y for _, y in data])})


def plain_search(host: HostModel, data: list, keep: int) -> tuple[HeadMask, dict[str, float]]:
    """Search as published, and time passes for heads and for baselines apart."""
    goal = as_objective("id-loss")
    rows = list(HeadMask.full(host))
    selected, spent = [], {"heads": 0.0, "baselines": 0.0}
    for layer, heads in enumerate(host.head_counts):
        start = time.perf_counter()
        base = goal.value(plain_pass(host, HeadMask(rows), data))
        spent["baselines"] += time.perf_counter() - start
        start = time.perf_counter()
        harms = []
        for head in range(heads):
            mask = HeadMask(rows).with_layer(layer, torch.arange(heads) != head)
            harms.append(goal.value(plain_pass(host, mask, data)) - base)
        spent["heads"] += time.perf_counter() - start
        order = torch.sort(torch.tensor(harms), descending=True, stable=True).indices[:keep]
        kept = torch.zeros(heads, dtype=torch.bool)
        kept[order] = True
        selected.append(kept)
        rows[layer] = ~kept
    return HeadMask(selected), spent


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("HYDRA_DATA"))
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--batch", type=int, default=16)
    args = parser.parse_args()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = timm.create_model("deit_tiny_patch16_224", pretrained=False).eval()
    if args.data is not None:
        from safetensors.torch import load_file

        model.load_state_dict(load_file(Path(args.data) / "deit-tiny" / "model.safetensors"))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(args.images, 3, 224, 224, generator=generator)
    with torch.no_grad():
        y = torch.cat([model(part).argmax(-1) for part in x.split(args.batch)])
    data = list(zip(x.split(args.batch), y.split(args.batch), strict=True))
    host = host_model(model)
    _ = host.readout  # probed once, not part of a search
    times: dict[str, float] = {"fast": 0.0, "heads": 0.0, "baselines": 0.0}
    for _ in range(2):  # interleaved, so that a busy machine is busy for both
        start = time.perf_counter()
        mine = find_effects(host, id=data, keep=1, progress=False).mask
        times["fast"] += time.perf_counter() - start
        theirs, spent = plain_search(host, data, 1)
        for name, value in spent.items():
            times[name] += value
        assert mine == theirs, "the two searches disagree"
    both = times["heads"] + times["baselines"]
    print(
        json.dumps(
            {
                "same circuit": True,
                "ratio to the plain search": round(times["fast"] / both, 3),
                "ratio to its passes for heads alone": round(times["fast"] / times["heads"], 3),
                "images": args.images,
                "weights": "random" if args.data is None else "real",
            }
        )
    )


if __name__ == "__main__":
    main()
