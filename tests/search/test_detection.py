"""Detection on left-out outliers: gains, intervals, and that the left-out rows take no part."""

from __future__ import annotations

import pytest
import torch
from sklearn.metrics import roc_auc_score

from hydra_ensembles.search.detection import compare_detection, left_out_detection
from hydra_ensembles.uncertainty import score_logits


def drawn(count, sharpness, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, 1, 5, generator=generator)
    logits[:, 0, 0] += sharpness
    return logits


def test_gains_are_differences_of_auroc_and_a_lost_family_is_not_kept():
    known, outliers = drawn(80, 4.0, 0), drawn(60, 1.0, 1)
    blind = drawn(60, 4.0, 2)
    worse = compare_detection({"a": (known, blind, known, outliers)})
    labels = [0] * 80 + [1] * 60

    def auroc(logits):
        return 100 * roc_auc_score(labels, score_logits(torch.cat([known, logits]), "msp"))

    assert worse.gains["a"] == pytest.approx(auroc(blind) - auroc(outliers))
    assert worse.mean.high < 0 and not worse.kept
    better = compare_detection({"a": (known, outliers, known, blind)})
    assert better.kept and better.mean.low > 0 and "a +" in better.sentence
    same = compare_detection({"a": (known, blind, known, blind)})
    assert tuple(same.mean) == (0, 0, 0) and same.kept


@pytest.mark.parametrize("families", [1, 3])
def test_every_outlier_is_left_out_of_one_choice_and_proxies_are_judged(families):
    names = [f"ood/{i}" for i in range(families)]
    logits = {name: drawn(20, 1.0, seed) for seed, name in enumerate(["id", *names, "proxy/p"])}
    logits = {name: torch.cat([part, part], 1) for name, part in logits.items()}
    rows = {name: torch.arange(20) for name in ("id", *names)}
    half = {name: index[:12] for name, index in rows.items()}
    hold = {name: index[12:] for name, index in rows.items()}
    left_out = []

    def choose(select, decide):
        for name in names:
            seen = {*select.get(name, torch.tensor([])).tolist()}
            seen |= {*decide.get(name, torch.tensor([])).tolist()}
            left_out.extend((name, row) for row in range(20) if row not in seen)
        return [1]

    found = left_out_detection(logits, [1], choose, select=half, hold=hold)
    assert sorted(left_out) == [(name, row) for name in names for row in range(20)]
    expected = ["0 1/2", "0 2/2"] if families == 1 else ["0", "1", "2"]
    assert list(found.gains) == [*expected, "proxy/p"] and found.kept
