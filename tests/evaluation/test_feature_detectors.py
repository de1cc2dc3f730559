"""KNN and Mahalanobis on features, through pytorch-ood."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hydra_ensembles.errors import DataError, UnknownNameError
from hydra_ensembles.evaluation.metrics import ood_figures
from hydra_ensembles.research.feature_detectors import choose_neighbours, evaluate_features

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

    inside, outside = (distance(torch.cat([a for a, _ in d])) for d in (TEST, FAR["same"]))
    expected = ood_figures(inside, outside)["AUROC"]
    assert results["ood/same/AUROC"] == pytest.approx(expected, abs=1e-3)


def after_a_layer_norm(size: int, *, seed: int, aside: float = 0.0):
    """Draw features that add up to 0: one direction has no variance."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(size) % 3
    x = torch.randn(size, 24, generator=generator) + 2 * nn.functional.one_hot(labels, 24)
    x[:, -1] = 0.5 * x[:, -1] + aside
    return nn.functional.layer_norm(x, (24,)), labels


def test_a_direction_without_variance_does_no_harm():
    train, test = after_a_layer_norm(600, seed=0), after_a_layer_norm(300, seed=1)
    new = after_a_layer_norm(300, seed=2, aside=2.0)
    results = evaluate_features(
        nn.Identity(), [test], train=[train], ood={"new": [new]}, methods=["mahalanobis"]
    )
    x, y = train[0].double(), train[1]
    means = torch.stack([x[y == c].mean(0) for c in range(3)])
    apart = x - means[y]
    precision = torch.linalg.pinv(apart.T @ apart, rtol=1e-9)

    def distance(z):
        gap = z.double()[:, None] - means
        return torch.einsum("ncd,de,nce->nc", gap, precision, gap).amin(1)

    expected = ood_figures(distance(test[0]), distance(new[0]))["AUROC"]
    assert expected > 0.8
    assert results["ood/new/AUROC"] == pytest.approx(expected, abs=1e-3)
    assert torch.get_default_dtype() is torch.float32


def test_labels_need_not_be_contiguous():
    train = [(x, y * 7 + 2) for x, y in TRAIN]
    sparse = evaluate_features(nn.Identity(), TEST, train=train, ood=FAR)
    assert sparse == evaluate_features(nn.Identity(), TEST, train=TRAIN, ood=FAR)


def test_bad_input_is_named():
    with pytest.raises(DataError, match=r"batch 0 .*'ood/tokens'.*\[4, 5, 6\]"):
        evaluate_features(nn.Identity(), TEST, train=TRAIN, ood={"tokens": [torch.randn(4, 5, 6)]})
    with pytest.raises(DataError, match="'ood/none' is empty"):
        evaluate_features(nn.Identity(), TEST, train=TRAIN, ood={"none": []})
    with pytest.raises(DataError, match=r"'train'.*no labels"):
        evaluate_features(nn.Identity(), TEST, train=[x for x, _ in TRAIN], ood=FAR)
    with pytest.raises(UnknownNameError, match="feature detector"):
        evaluate_features(nn.Identity(), TEST, train=TRAIN, ood=FAR, methods=["vim"])


def many_classes(examples: int, *, seed: int, first: int, last: int):
    """Draw examples about the centres of some of 120 classes."""
    centres = torch.randn(120, 24, generator=torch.Generator().manual_seed(9))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(first, last).repeat_interleave(examples)
    noise = torch.randn(len(labels), 24, generator=generator)
    return centres[labels] + 0.4 * noise, labels


def test_knn_takes_no_more_neighbours_than_a_class_has():
    train = [many_classes(6, seed=0, first=0, last=100)]
    test = [many_classes(2, seed=1, first=0, last=100)]
    new = {"new": [many_classes(5, seed=2, first=100, last=120)]}
    results = evaluate_features(nn.Identity(), test, train=train, ood=new, methods=["knn"])
    assert results["ood/new/AUROC"] > 0.95  # the 50th neighbour is of another class


def test_neighbours_are_chosen_by_left_out_groups():
    few, labels = many_classes(6, seed=0, first=0, last=100)
    assert choose_neighbours(few, labels) <= 5
    assert choose_neighbours(few) <= 5  # by clusters, without labels
    many, labels = many_classes(200, seed=0, first=0, last=4)
    some = many_classes(50, seed=1, first=0, last=4)
    noisy = many + 8 * torch.randn(many.shape, generator=torch.Generator().manual_seed(1))
    assert choose_neighbours(noisy, labels, held_out=some) > 5
    with pytest.raises(DataError, match="one group"):
        choose_neighbours(many, torch.zeros(len(many)).long())
