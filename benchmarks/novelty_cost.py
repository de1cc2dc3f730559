"""What novelty costs: `predict` with it against `predict` without it, interleaved in one process.

python benchmarks/novelty_cost.py --shape vit-s --batch-sizes 1,8,32

Both are the same ensemble (three members that part in the last two blocks), once with the
statistics of known data and once without. Rounds alternate which goes first; times are the
processor's, of one thread. Figures: the median of the paired ratios with its quartiles, and the
ratio of the shortest times, which other programs on the machine disturb least.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import shapes
import torch

from hydra_ensembles import HydraEnsemble, fuse
from hydra_ensembles._records import write_whole
from hydra_ensembles.fusion.call_options import tap_names
from hydra_ensembles.fusion.known_data import features_of
from hydra_ensembles.uncertainty import NoveltyFit

RESULTS = Path(__file__).parent / "results"


def fitted(ensemble: HydraEnsemble, batch: Any, known: int = 1000) -> Any:
    """Fit statistics of the right shapes to random summaries: speed does not depend on them."""
    logits, summaries = features_of(ensemble, batch)
    draw = torch.Generator().manual_seed(0)
    fit = NoveltyFit(tap_names(len(ensemble.body.trunk), readout=True))
    rows = torch.randn(known, *summaries.shape[1:], generator=draw)
    fit.add_(rows, torch.randn(known, *logits.shape[1:], generator=draw))
    return fit.finish()


def measure(ensemble: HydraEnsemble, batch: Any, novelty: Any, rounds: int) -> dict[str, float]:
    """Return the median ratio of processor times and its quartiles."""
    ratios = []
    shortest = {True: float("inf"), False: float("inf")}
    for number in range(rounds + 1):
        times = {}
        order = (True, False) if number % 2 else (False, True)
        for on in order:
            ensemble.novelty = novelty if on else None
            start = time.process_time()
            ensemble.predict(batch)
            times[on] = time.process_time() - start
        if number:  # the first round warms up
            ratios.append(times[True] / times[False])
            shortest = {on: min(shortest[on], times[on]) for on in times}
    low, middle, high = torch.tensor(ratios).quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
    return {
        "ratio": round(middle, 4),
        "low": round(low, 4),
        "high": round(high, 4),
        "of_shortest": round(shortest[True] / shortest[False], 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=shapes.SHAPES, default="vit-s")
    parser.add_argument("--batch-sizes", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    host = shapes.host(args.shape)
    ensemble = fuse(host, shapes.masks(host, blocks=2, keep=1 / 3)).eval()
    with torch.no_grad():
        novelty = fitted(ensemble, shapes.batch(args.shape))
    found = {}
    for size in map(int, args.batch_sizes.split(",")):
        rounds = max(8, args.rounds // max(1, size // 2))
        found[size] = measure(ensemble, shapes.batch(args.shape, size=size), novelty, rounds)
        found[size]["rounds"] = rounds
        print(f"batch {size}: {found[size]}", flush=True)
    numbers = sum(tensor.numel() for tensor in novelty.tensors().values())
    record = {
        "command": f"python benchmarks/novelty_cost.py --shape {args.shape}",
        "shape": args.shape,
        "taps": len(novelty.taps),
        "statistics_megabytes": round(4 * numbers / 2**20, 1),
        "by_batch_size": found,
    }
    write_whole(RESULTS / f"novelty-cost-{args.shape}.json", json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
