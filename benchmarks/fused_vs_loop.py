"""Fused against its own members one by one, all of them branched at the first layer.

python benchmarks/fused_vs_loop.py --shape deit-tiny
"""

from __future__ import annotations

import argparse
import dataclasses

import shapes
import torch
from entries import entries
from latency import add_places, placed, write

from hydra_ensembles.evaluation.latency import benchmark


def main() -> None:
    """Parse, run, print, write JSON and a picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=shapes.SHAPES, default="deit-tiny")
    parser.add_argument("--batch-sizes", default="1,8")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    add_places(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    host, batch = shapes.host(args.shape), shapes.batch(args.shape)
    names = ("loop", "hydra first", "hydra first all tokens")
    made, _ = entries(names, args.shape, host, batch)
    models, batch = placed(made, batch, args)
    result = benchmark(
        models,
        batch,
        batch_sizes=[int(size) for size in args.batch_sizes.split(",")],
        rounds=args.rounds,
        threads=args.threads,
    )
    result = dataclasses.replace(result, settings={**result.settings, "shape": args.shape})
    print(result)
    write(result, args.name or f"fused-vs-loop-{args.shape}")


if __name__ == "__main__":
    main()
