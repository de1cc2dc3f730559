"""Latency of entries side by side, one interleaved run.

python benchmarks/latency.py --shape vit-s --set core --batch-sizes 1,8

This file also has what the other scripts share: the place, precision and compilation of models.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import shapes
import torch
from entries import CORE, LEAST_SQUARES, NOVELTY, RIVALS, entries
from torch import nn

from hydra_ensembles.data.batches import map_tensors
from hydra_ensembles.evaluation.latency import benchmark

RESULTS = Path(__file__).parent / "results"
SETS = {"core": CORE, "rivals": RIVALS, "least-squares": LEAST_SQUARES, "novelty": NOVELTY}


def add_places(parser: argparse.ArgumentParser) -> None:
    """Add the options that `placed` reads, and the name of the files."""
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", nargs="?", const="inductor", help="by torch.compile's backend")
    parser.add_argument("--name", help="of the files written, below benchmarks/results")


def placed(
    models: dict[str, nn.Module], batch: Any, args: argparse.Namespace
) -> tuple[dict[str, nn.Module], Any]:
    """Move models to their device and precision and compile them; cast the batch with them."""
    dtype = getattr(torch, args.dtype)
    for model in models.values():
        model.to(device=args.device, dtype=dtype)
    if args.compile:
        for model in models.values():
            model.compile(backend=args.compile)
    return models, map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, batch)


def main() -> None:
    """Parse, run, print, write JSON and a picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=shapes.SHAPES, default="vit-s")
    parser.add_argument("--set", choices=SETS, default="core", dest="which")
    parser.add_argument("--only", help="names of entries, with commas, instead of a set")
    parser.add_argument("--batch-sizes", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--max-seconds", type=float, help="stop a batch size after this long")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64, help="length of a text (minilm)")
    add_places(parser)
    args = parser.parse_args()

    names = tuple(args.only.split(",")) if args.only else SETS[args.which]
    torch.set_num_threads(args.threads)
    host = shapes.host(args.shape, tokens=args.tokens)
    batch = shapes.batch(args.shape, tokens=args.tokens)
    made, failed = entries(names, args.shape, host, batch)
    models, batch = placed(made, batch, args)
    result = benchmark(
        models,
        batch,
        batch_sizes=[int(size) for size in args.batch_sizes.split(",")],
        rounds=args.rounds,
        warmup=args.warmup,
        threads=args.threads,
        max_seconds=args.max_seconds,
    )
    facts = {"shape": args.shape, "tokens": args.tokens, "members": 3, "not run": failed}
    facts |= {"compile": args.compile} if args.compile else {}
    result = dataclasses.replace(result, settings={**result.settings, **facts})
    print(result)
    for name, reason in failed.items():
        print(f"not run: {name}: {reason}")
    sizes = args.batch_sizes.replace(",", "-")
    write(result, args.name or f"latency-{args.shape}-{args.which}-b{sizes}")


def write(result: object, name: str) -> None:
    """Write the JSON and the picture."""
    from hydra_ensembles.report.svg import save
    from hydra_ensembles.research.figures import plot_benchmark

    result.to_json(RESULTS / f"{name}.json")  # type: ignore[attr-defined]
    save(plot_benchmark(result), RESULTS / f"{name}.png")
    print(f"wrote {name}.json and {name}.png")


if __name__ == "__main__":
    main()
