"""Metrics compute after a synchronisation of processes, which turns list states into tensors."""

from __future__ import annotations

import pytest
import torch
from torch import distributed

from hydra_ensembles import evaluation as ev

WITH_LABELS = (ev.Accuracy, ev.NLL, ev.Brier, ev.ECE, ev.AdaptiveECE)
OF_SCORES = (
    *(ev.AUROC, ev.AUPR, ev.FPR95, ev.FPR95IDPositive),
    *(ev.AURC, ev.ExcessAURC, ev.AUGRC, ev.CoverageAtRisk),
)
OF_MEMBERS = (ev.MutualInformation, ev.Disagreement, ev.PairwiseKL)


@pytest.fixture
def process_group(tmp_path):
    if not distributed.is_available():
        pytest.skip("torch has no distributed package here")
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    distributed.destroy_process_group()


def test_figures_survive_a_sync(process_group):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, 3, 4, generator=generator)
    labels = torch.randint(4, (50,), generator=generator)
    scores, positive = torch.randn(50, generator=generator).round(), labels > 1
    cases = [(m, (logits, labels)) for m in WITH_LABELS]
    cases += [(m, (scores, positive)) for m in OF_SCORES] + [(m, (logits,)) for m in OF_MEMBERS]
    for metric, arguments in cases:
        alone, synced = metric(), metric()
        alone._to_sync = False  # what a single process computes
        for part in (slice(0, 20), slice(20, None)):
            alone.update(*(a[part] for a in arguments))
            synced.update(*(a[part] for a in arguments))
        assert float(synced.compute()) == pytest.approx(float(alone.compute()), abs=1e-12), metric
