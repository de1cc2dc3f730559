"""How often does the interval of an ECE hold the true one? Simulated, with the library's rule.

    python experiments/ece_intervals.py

Confidences are drawn, and answers are right as often as a known function of the confidence says: a
calibrated model, and two that are too sure. The true error is that function's, over the same bins.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hydra_ensembles.evaluation.intervals import percentiles, resamples, span
from hydra_ensembles.evaluation.metrics import BINS, bin_of

RUNS, DRAWS = 300, 300


def errors(confidence: Tensor, gap: Tensor, counts: Tensor) -> Tensor:
    """Return the ECE of every row of counts `[draw, example]`."""
    bins = torch.nn.functional.one_hot(bin_of(confidence), BINS + 1) * gap[:, None]
    return (counts @ bins).abs().sum(1) / len(gap)


def drawn(examples: int, generator: torch.Generator) -> Tensor:
    """Draw confidences as those of a classifier with an accuracy of about three quarters."""
    return (
        (1.5 * torch.randn(examples, generator=generator) + 1.5).sigmoid().clamp_min(0.1).double()
    )


def main() -> None:
    """Print one line per number of examples and true error."""
    print("examples  true ECE  held by the interval  by percentiles  mean width")
    for examples in (200, 719, 5000):
        for lean in (0.0, 0.05, 0.3):
            generator = torch.Generator().manual_seed(0)
            many = drawn(400_000, generator)
            ones = torch.ones(1, len(many), dtype=torch.float64)
            truth = float(errors(many, -4 * lean * many * (1 - many), ones))
            held = percentile = width = 0.0
            for run in range(RUNS):
                sure = drawn(examples, generator)
                accuracy = sure - 4 * lean * sure * (1 - sure)
                right = torch.rand(examples, generator=generator) < accuracy
                gap = right.double() - sure
                value = float(errors(sure, gap, torch.ones(1, examples).double()))
                parts = resamples({"id": examples}, count=DRAWS, seed=run)
                draws = torch.cat([errors(sure, gap, part["id"]) for part in parts])
                low, high = span("cal/ECE", value, draws)
                plain = percentiles(draws)
                held += max(low, 0.0) <= truth <= high
                percentile += plain[0] <= truth <= plain[1]
                width += high - max(low, 0.0)
            shares = f"{held / RUNS:21.0%}{percentile / RUNS:16.0%}{100 * width / RUNS:12.2f}"
            print(f"{examples:8}{100 * truth:10.2f}{shares}", flush=True)


if __name__ == "__main__":
    main()
