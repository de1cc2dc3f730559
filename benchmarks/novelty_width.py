"""What the statistics of novelty cost on wide hosts and with many classes.

    python benchmarks/novelty_width.py --name after
    python benchmarks/novelty_width.py --name chosen --choose --small   # and terms may join
    PYTHONPATH=OLD/src python benchmarks/novelty_width.py --name before

The features are random, with the shapes of real hosts and variances that fall as theirs do: time,
memory and size depend on shapes only, and no host runs. Every case has a process of its own, with
one thread. Figures: seconds to fit (all features there already), growth of the peak resident memory
while fitting, size on disk, and milliseconds that the novelty of 32 inputs takes. Adds to
`benchmarks/results/novelty-width.json` under `--name`; a case that is there is skipped.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "novelty-width.json"
CASES = {
    "Llama of 1 B, 500 known": (2048, 14, 20, 500),
    "Llama of 1 B, 3,000 known": (2048, 14, 20, 3000),
    "ViT-L, 500 known": (1024, 22, 20, 500),
    "ViT-L, 3,000 known": (1024, 22, 20, 3000),
    "last blocks of ViT-L, 5,000 classes": (1024, 4, 5000, 25_000),
    "last blocks of ViT-L, 21,000 classes": (1024, 4, 21_000, 105_000),
}
"""Width, blocks of the trunk, classes and known examples."""
HUGE = 10**9
"""Known examples times classes above which `--small` leaves a case out."""


def batches(case: dict[str, int], taps: int) -> Iterator[tuple[Any, Any, Any]]:
    """Yield summaries, logits and labels; classes come in turn."""
    import torch

    draw = torch.Generator().manual_seed(0)
    scale = torch.logspace(0, -2, case["width"])
    for first in range(0, case["known"], 250):
        rows = torch.arange(first, min(first + 250, case["known"]))
        noise = torch.randn(len(rows), taps, case["width"], generator=draw)
        logits = torch.randn(len(rows), 1, min(case["classes"], 1000), generator=draw)
        yield 1 + noise * scale, logits, rows % case["classes"]


def measure(name: str, choose: bool) -> None:
    """Fit one case and print its figures as JSON."""
    import torch
    from safetensors.torch import save_file

    from hydra_ensembles.fusion.call_options import tap_names
    from hydra_ensembles.uncertainty import NoveltyFit

    torch.set_num_threads(1)
    case = dict(zip(("width", "blocks", "classes", "known"), CASES[name], strict=True))
    taps = tap_names(case["blocks"], readout=True)
    end = "uses_last_block" if "choose" in signature(NoveltyFit).parameters else "hears_end"
    options: dict[str, Any] = {end: True} if end == "hears_end" else {end: True, "choose": choose}
    fit = NoveltyFit(taps, classes=case["classes"], class_taps=7, **options)
    small = case["known"] <= 3000
    data: Any = list(batches(case, len(taps))) if small else batches(case, len(taps))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = 0.0
    for summaries, logits, labels in data:
        start = time.process_time()
        fit.add_(summaries, logits, labels)
        seconds += time.process_time() - start
    start = time.process_time()
    novelty = fit.finish()
    seconds += time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "novelty.safetensors"
        save_file({key: value.contiguous() for key, value in novelty.tensors().items()}, path)
        size = path.stat().st_size
    times = []
    for _ in range(8):
        start = time.process_time()
        novelty(summaries[:32], logits[:32])
        times.append(time.process_time() - start)
    print(
        json.dumps(
            {
                **case,
                "taps": len(taps),
                "seconds": round(seconds, 2),
                "peak_megabytes": round((peak - before) / 1024),
                "disk_megabytes": round(size / 2**20, 1),
                "milliseconds_of_32": round(1000 * statistics.median(times[1:]), 1),
            }
        )
    )


def main() -> None:
    """Run the cases that are missing, each in a process of its own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--name", default="after", help="of the library that is measured")
    parser.add_argument("--case", choices=tuple(CASES), help="measure one case, in this process")
    parser.add_argument("--small", action="store_true", help="leave the largest cases out")
    parser.add_argument("--choose", action="store_true", help="let terms join, as is the default")
    args = parser.parse_args()
    if args.case:
        return measure(args.case, args.choose)
    record = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name, (_, _, classes, known) in CASES.items():
        if name in record.get(args.name, {}) or (args.small and known * classes > HUGE):
            continue
        command = [sys.executable, __file__, "--case", name, *["--choose"][: args.choose]]
        found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        record.setdefault(args.name, {})[name] = json.loads(found)
        print(f"{args.name}, {name}: {found.strip()}", flush=True)
        RESULTS.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
