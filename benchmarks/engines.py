"""The two engines on the same host and the same masks, one interleaved run.

python benchmarks/engines.py --shape vit-s --batch-sizes 1,8

Three members of a third of the heads each, in the last block and in the last two: by our own
arithmetic, by it without the readout-only last block, and by the host's own blocks. Ratios are to
the single model. Writes `benchmarks/results/engines-<shape>.json`.
"""

from __future__ import annotations

import argparse
import dataclasses

import shapes
import torch
from entries import KEEP
from latency import RESULTS

from hydra_ensembles import fuse, verify
from hydra_ensembles.evaluation.latency import benchmark


def main() -> None:
    """Parse, run, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=shapes.SHAPES, default="vit-s")
    parser.add_argument("--batch-sizes", default="1,8")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--max-seconds", type=float, help="stop a batch size after this long")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    host, batch = shapes.host(args.shape), shapes.batch(args.shape)
    models = {"single": host}
    for blocks in (1, 2):
        masks = shapes.masks(host, blocks=blocks, keep=KEEP[args.shape])
        where = f"last {blocks}"
        models[f"fused, {where}"] = fuse(host, masks, engine="fused", batch=batch)
        models[f"fused, {where}, all tokens"] = fuse(
            host, masks, engine="fused", readout_only=False, batch=batch
        )
        models[f"host, {where}"] = fuse(host, masks, engine="host", batch=batch)
        verify(models[f"host, {where}"], batch)
    result = benchmark(
        models,
        batch,
        batch_sizes=[int(size) for size in args.batch_sizes.split(",")],
        rounds=args.rounds,
        warmup=1,
        threads=args.threads,
        max_seconds=args.max_seconds,
    )
    facts = {"shape": args.shape, "members": 3, "keep": KEEP[args.shape]}
    result = dataclasses.replace(result, settings={**result.settings, **facts})
    print(result)
    result.to_json(RESULTS / f"engines-{args.shape}.json")


if __name__ == "__main__":
    main()
