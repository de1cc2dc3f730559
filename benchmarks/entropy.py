"""Attention entropy without the matrix against eager: time and peak extra memory, in one run.

    python benchmarks/entropy.py

*Eager* is what people write: softmax of all scores (T x T for each head), then the sum of
`torch.special.entr` (faster than -p log p in three steps). Ratios come from interleaved
repetitions (median of the ratios), memory from the allocator's own log. Writes
`benchmarks/results/entropy.json`.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from hydra_ensembles._records import write_whole
from hydra_ensembles.criteria import AttentionView, EntropyKind, row_entropies

RESULTS = Path(__file__).parent / "results" / "entropy.json"
WIDTH = 64


def eager(view: AttentionView) -> Tensor:
    """Compute entropies from the whole softmax matrix, float32 `[batch, heads, rows]`."""
    assert view.key is not None
    scores = view.query @ view.key.transpose(-1, -2) * view.scale
    if view.causal:
        later = torch.ones(view.rows, view.keys, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    weights = scores.softmax(-1)
    return torch.special.entr(weights).sum(-1)


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def peak_bytes(call: Callable[[], Any]) -> int:
    """Return how far allocations of a call rise above where they were (result included)."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as log:
        call()
    changes = [
        (event.start_ns(), event.nbytes())
        for event in log.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    held = peak = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        held += change
        peak = max(peak, held)
    return peak


def measure(length: int, heads: int, *, causal: bool, repeats: int) -> dict[str, Any]:
    """Compare all ways at one length, interleaved."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, heads, length, WIDTH, generator=generator) for _ in range(2))
    view = AttentionView(0, query, key, scale=WIDTH**-0.5, causal=causal)
    ways: dict[str, Callable[[], Tensor]] = {
        "eager": lambda: eager(view),
        "kernel": lambda: row_entropies(view),
        "blocked": lambda: row_entropies(view, use_kernel=False),
        "renyi, blocked": lambda: row_entropies(view, EntropyKind("renyi", 2.0)),
    }
    expected = ways["eager"]()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, call in ways.items():
            times[name].append(seconds(call))
    matrix = heads * length * length * 4
    report = {}
    for name, call in ways.items():
        ratios = [e / t for e, t in zip(times["eager"], times[name], strict=True)]
        report[name] = {
            "times_faster_than_eager": round(statistics.median(ratios), 2),
            "slowest_to_fastest_repeat": [round(min(ratios), 2), round(max(ratios), 2)],
            "peak_extra_memory_of_matrix": round(peak_bytes(call) / matrix, 4),
        }
        if "renyi" not in name:
            report[name]["largest_difference_to_eager"] = float((call() - expected).abs().max())
    return {"length": length, "heads": heads, "causal": causal, "ways": report}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[197, 512, 1024, 2048])
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    cases = [
        measure(length, args.heads, causal=causal, repeats=args.repeats)
        for length in args.lengths
        for causal in (False, True)
    ]
    record = {
        "command": "python benchmarks/entropy.py",
        "what": "entropy of attention rows, float32, batch 1, head width 64",
        "machine": f"{platform.machine()} CPU, {args.threads} thread(s), torch {torch.__version__}",
        "cases": cases,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(args.out, json.dumps(record, indent=1) + "\n")
    for case in cases:
        kind = "causal" if case["causal"] else "full"
        print(f"T = {case['length']}, {case['heads']} heads, {kind}")
        for name, found in case["ways"].items():
            print(
                f"  {name:15} {found['times_faster_than_eager']:5.2f} x as fast as eager, peak "
                f"{found['peak_extra_memory_of_matrix']:.3f} of the T x T matrices"
            )


if __name__ == "__main__":
    main()
