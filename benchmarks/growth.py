"""Growth of the cost: with the members, M = 1..8, and with the sequence length, 64..1024.

python benchmarks/growth.py members --shape vit-s
python benchmarks/growth.py tokens
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import shapes
import torch
from entries import KEEP, entries
from latency import RESULTS, add_places, placed, write

import hydra_ensembles as hydra
from hydra_ensembles._records import write_whole
from hydra_ensembles.costs.formula import CostModel
from hydra_ensembles.evaluation.latency import benchmark

LENGTHS = (64, 128, 256, 512, 1024)


def members(args: argparse.Namespace) -> None:
    """Time M = 1..8 members that branch at the last block."""
    host, batch = shapes.host(args.shape), shapes.batch(args.shape)
    models: dict[str, Any] = {"single": host}
    for number in range(1, args.most + 1):
        chosen = shapes.masks(host, members=number, blocks=1, keep=KEEP[args.shape])
        models[f"{number}"] = hydra.fuse(host, chosen)
    counter = CostModel(host, batch)  # before the host moves
    counted = {
        str(number): counter.ratio(
            shapes.masks(host, members=number, blocks=1, keep=KEEP[args.shape])
        )
        for number in range(1, args.most + 1)
    }
    models, batch = placed(models, batch, args)
    result = benchmark(models, batch, batch_sizes=[1], rounds=args.rounds, threads=args.threads)
    streams = {name: len(m.plan.ends) for name, m in models.items() if name != "single"}
    facts = {"shape": args.shape, "axis": "members", "branch": "last block"}
    result.settings.update(**facts, streams=streams, counted=counted)
    print(result)
    write(result, args.name or f"growth-members-{args.shape}")


def tokens(args: argparse.Namespace) -> None:
    """Time texts of 64..1024 tokens: single, Hydra at the last block, Hydra as in the paper."""
    names = ("single", "hydra last 1", "hydra last 2", "hydra first", "deep ensemble")
    points = []
    for length in LENGTHS:
        host, batch = shapes.host("minilm", tokens=length), shapes.batch("minilm", tokens=length)
        made, _ = entries(names, "minilm", host, batch)
        models, batch = placed(made, batch, args)
        result = benchmark(
            models,
            batch,
            batch_sizes=[1],
            rounds=args.rounds,
            threads=args.threads,
            max_seconds=args.max_seconds,
        )
        print(f"{length} tokens: {result}")
        points.append({"tokens": length, "rows": result.rows(), "settings": result.settings})
    from hydra_ensembles.report.svg import save
    from hydra_ensembles.research.figures import plot_growth

    path = RESULTS / f"{args.name or 'growth-tokens-minilm'}.json"
    payload = {"kind": "growth", "axis": "tokens", "shape": "minilm", "points": points}
    write_whole(path, json.dumps(payload, indent=1) + "\n")
    save(plot_growth(payload), path.with_suffix(".png"))


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("axis", choices=("members", "tokens"))
    parser.add_argument("--shape", choices=shapes.SHAPES, default="vit-s")
    parser.add_argument("--most", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--max-seconds", type=float)
    parser.add_argument("--threads", type=int, default=2)
    add_places(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    (members if args.axis == "members" else tokens)(args)


if __name__ == "__main__":
    main()
