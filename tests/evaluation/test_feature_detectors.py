"""KNN and Mahalanobis on features, through pytorch-ood."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hydra_ensembles.errors import DataError, UnknownNameError
from hydra_ensembles.evaluation import evaluate_features

pytest.importorskip("pytorch_ood")


def clusters(size: int, *, seed: int, centre: float = 3.0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (size,), generator=generator)
    x = torch.randn(size, 6, generator=generator) + centre * nn.functional.one_hot(labels, 6)
    return [(a, b) for a, b in zip(x.split(40), labels.split(40), strict=True)]


TRAIN, TEST = clusters(300, seed=0), clusters(120, seed=1)
FAR = {"far": [torch.randn(80, 6) - 8], "same": [(x, y) for x, y in clusters(150, seed=2)]}


def test_far_is_found_and_the_same_is_not():
    results = evaluate_features(nn.Identity(), TEST, train=TRAIN, ood=FAR)
    for prefix in ("", "mahalanobis/"):
        assert results[f"ood/far/{prefix}AUROC"] > 0.99
        assert results[f"ood/same/{prefix}AUROC"] == pytest.approx(0.5, abs=0.12)
    assert results["ood/far/knn/FPR95"] == results["ood/far/FPR95"] < 0.05
    assert results["ood/mean/AUROC"] == pytest.approx(
        (results["ood/far/AUROC"] + results["ood/same/AUROC"]) / 2
    )


def test_mahalanobis_by_its_formula():
    results = evaluate_features(
        nn.Identity(), TEST, train=TRAIN, ood=FAR, methods=["mahalanobis"], name="m"
    )
    x, y = (torch.cat(parts).double() for parts in zip(*TRAIN, strict=True))
    means = torch.stack([x[y == c].mean(0) for c in range(3)])
    precision = torch.linalg.inv(
        sum((x[y == c] - means[c]).T @ (x[y == c] - means[c]) for c in range(3))
    )

    def distance(z):
        gap = z.double()[:, None] - means
        return torch.einsum("ncd,de,nce->nc", gap, precision, gap).amin(1)

    from hydra_ensembles.evaluation.metrics_ood import ood_figures

    inside, outside = (distance(torch.cat([a for a, _ in d])) for d in (TEST, FAR["same"]))
    expected = ood_figures(inside, outside)["AUROC"]
    assert results["ood/same/AUROC"] == pytest.approx(expected, abs=1e-3)


def test_labels_need_not_be_contiguous():
    train = [(x, y * 7 + 2) for x, y in TRAIN]
    sparse = evaluate_features(nn.Identity(), TEST, train=train, ood=FAR)
    assert sparse == evaluate_features(nn.Identity(), TEST, train=TRAIN, ood=FAR)


def test_bad_input_is_named():
    with pytest.raises(DataError, match=r"batch 0 of the data set 'ood/tokens' are \[4, 5, 6\]"):
        evaluate_features(nn.Identity(), TEST, train=TRAIN, ood={"tokens": [torch.randn(4, 5, 6)]})
    with pytest.raises(DataError, match="'ood/none' is empty"):
        evaluate_features(nn.Identity(), TEST, train=TRAIN, ood={"none": []})
    with pytest.raises(DataError, match="'train' has no labels"):
        evaluate_features(nn.Identity(), TEST, train=[x for x, _ in TRAIN], ood=FAR)
    with pytest.raises(UnknownNameError, match="feature detector"):
        evaluate_features(nn.Identity(), TEST, train=TRAIN, ood=FAR, methods=["vim"])
