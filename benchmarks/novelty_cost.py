"""What novelty and a policy cost: the plain host and `predict` with and without them, interleaved.

    python benchmarks/novelty_cost.py --name now
    PYTHONPATH=OLD/src python benchmarks/novelty_cost.py --name before

`predict` is that of three members that part in the last block (`--blocks` for more), once with
the statistics of known data and a policy and once without. Rounds alternate which goes first; times
are the processor's, of one thread. Figures: the median of the paired ratios with its quartiles, and
the ratio of the shortest times, which other programs on the machine disturb least. Adds to
`benchmarks/results/novelty-cost.json` under `--name`.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import shapes
import torch
from torch import nn

from hydra_ensembles import HydraEnsemble, Policy, fuse
from hydra_ensembles._records import write_whole
from hydra_ensembles.fusion.known_data import features_of, novelty_fit
from hydra_ensembles.uncertainty import Novelty

RESULTS = Path(__file__).parent / "results" / "novelty-cost.json"
KNOWN = 1000
"""Known examples."""


@dataclass(frozen=True)
class Case:
    """A host, its batch, and what its known data is.

    Attributes:
        shape, tokens, classes: Of the host; tokens of texts.
        labels: Whether known data has labels, so that there are distances to classes.
        size: Of the batch.
    """

    shape: str
    classes: int
    labels: bool = False
    tokens: int = 16
    size: int = 1


CASES = {
    "MiniLM, 16 tokens, 2 classes": Case("minilm", 2),
    "MiniLM, 16 tokens, 150 classes": Case("minilm", 150, labels=True),
    "MiniLM, 16 tokens, 21,000 classes": Case("minilm", 21_000),
    "MiniLM, 16 tokens, 21,000 classes with labels": Case("minilm", 21_000, labels=True),
    "ViT-S, batch 1": Case("vit-s", 1000, labels=True),
    "ViT-S, batch 8": Case("vit-s", 1000, labels=True, size=8),
    "ViT-S, batch 32": Case("vit-s", 1000, labels=True, size=32),
    "ViT-S, 21,000 classes with labels": Case("vit-s", 21_000, labels=True),
}


def fitted(ensemble: HydraEnsemble, case: Case, batch: Any) -> Novelty:
    """Fit statistics of the right shapes to random summaries: speed does not depend on them."""
    logits, summaries = features_of(ensemble, batch)
    draw = torch.Generator().manual_seed(0)
    few = min(case.classes, KNOWN // 5)
    fit = novelty_fit(ensemble, case.classes)  # many classes are measured at one tap
    rows = torch.randn(KNOWN, *summaries.shape[1:], generator=draw)
    labels = torch.arange(KNOWN) % few if case.labels else None
    fit.add_(rows, torch.randn(KNOWN, *logits.shape[1:], generator=draw), labels)
    novelty = fit.finish()
    if not case.labels or few == case.classes:
        return novelty
    # as many classes as there are, without as many known examples
    known = novelty.classes
    assert known is not None
    means = known.means[:, torch.arange(case.classes) % few]
    means = means + 0.1 * torch.randn(means.shape, generator=draw)
    counts = torch.full((case.classes,), 5)
    classes = replace(known, means=means, counts=counts)
    return replace(novelty, measures=replace(novelty.measures, classes=classes))


def measure(
    host: nn.Module, ensemble: HydraEnsemble, batch: Any, novelty: Novelty, rounds: int
) -> dict[str, Any]:
    """Return the ratios of processor times of `predict` with novelty and a policy."""
    policy = Policy(threshold=0.5, novelty_threshold=novelty.threshold(0.05), alarm=0.05)

    def run(name: str) -> float:
        on = name == "with"
        ensemble.novelty, ensemble.policy = (novelty, policy) if on else (None, None)
        start = time.process_time()
        if name == "host":
            with torch.no_grad():
                host(**batch)
        else:
            ensemble.predict(batch)
        return time.process_time() - start

    names = ("host", "without", "with")
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 3):
        for name in names if number % 2 else names[::-1]:
            spent = run(name)
            if number >= 3:  # the first rounds warm up
                times[name].append(spent)
    found: dict[str, Any] = {"host_ms": round(1000 * min(times["host"]), 2), "rounds": rounds}
    for name, over, under in (
        ("with / host", "with", "host"),
        ("without / host", "without", "host"),
        ("with / without", "with", "without"),
    ):
        ratios = torch.tensor(times[over]) / torch.tensor(times[under])
        low, middle, high = ratios.quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
        shortest = min(times[over]) / min(times[under])
        found[name] = {
            "ratio": round(middle, 3),
            "low": round(low, 3),
            "high": round(high, 3),
            "of_shortest": round(shortest, 3),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--name", default="now", help="of the library that is measured")
    parser.add_argument("--case", choices=tuple(CASES), help="measure one case only")
    parser.add_argument("--blocks", type=int, default=1, help="in which members part")
    parser.add_argument("--rounds", type=int, default=60)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in (args.case,) if args.case else tuple(CASES):
        case = CASES[name]
        host = shapes.host(case.shape, classes=case.classes)
        ensemble = fuse(host, shapes.masks(host, blocks=args.blocks, keep=1 / 3)).eval()
        batch = shapes.batch(case.shape, size=case.size, tokens=case.tokens)
        with torch.no_grad():
            novelty = fitted(ensemble, case, batch)
        rounds = args.rounds if case.shape == "minilm" else max(8, args.rounds // (2 + case.size))
        found = measure(host, ensemble, batch, novelty, rounds)
        numbers = sum(tensor.numel() for tensor in novelty.tensors().values())
        found |= {"taps": len(novelty.taps), "megabytes": round(4 * numbers / 2**20, 1)}
        print(f"{name}: {found}", flush=True)
        record = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        record.setdefault(args.name, {})[name] = found
        write_whole(RESULTS, json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
