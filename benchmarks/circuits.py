"""Time of the circuit search relative to the plain algorithm of L * H passes, one interleaved run.

    python benchmarks/circuits.py [--data DATA] [--images 32] [--batch 16] [--count]

Both search the same circuit of DeiT-tiny (real weights with --data, random ones without) and must
find the same heads. The plain algorithm runs the whole model once for every head, and once a layer
for the objective that effects are compared with; the ratio to heads alone is printed too. `--count`
counts multiply-adds in place of time, which a busy machine does not disturb.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import timm
import torch
from torch.utils.flop_counter import FlopCounterMode

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


class Clock:
    """Seconds, or multiply-adds, since the start."""

    def __init__(self, count: bool) -> None:
        self.counter = FlopCounterMode(display=False) if count else None
        if self.counter is not None:
            self.counter.__enter__()

    def now(self) -> float:
        """Read the clock."""
        if self.counter is None:
            return time.perf_counter()
        return self.counter.get_total_flops() / 2


def plain_search(
    host: HostModel, data: list, keep: int, clock: Clock
) -> tuple[HeadMask, dict[str, float]]:
    """Search as published, and measure passes for heads and for baselines apart."""
    goal = as_objective("id-loss")
    rows = list(HeadMask.full(host))
    selected, spent = [], {"heads": 0.0, "baselines": 0.0}
    for layer, heads in enumerate(host.head_counts):
        start = clock.now()
        base = goal.value(plain_pass(host, HeadMask(rows), data))
        spent["baselines"] += clock.now() - start
        start = clock.now()
        harms = []
        for head in range(heads):
            mask = HeadMask(rows).with_layer(layer, torch.arange(heads) != head)
            harms.append(goal.value(plain_pass(host, mask, data)) - base)
        spent["heads"] += clock.now() - start
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
    parser.add_argument("--count", action="store_true", help="count multiply-adds, not time")
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
    clock = Clock(args.count)
    for _ in range(1 if args.count else 2):  # interleaved: a busy machine is busy for both
        start = clock.now()
        mine = find_effects(host, id=data, keep=1, progress=False).mask
        times["fast"] += clock.now() - start
        theirs, spent = plain_search(host, data, 1, clock)
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
                "measure": "multiply-adds" if args.count else "time",
                "images": args.images,
                "weights": "random" if args.data is None else "real",
            }
        )
    )


if __name__ == "__main__":
    main()
