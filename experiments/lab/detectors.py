"""Rivals of novelty, set as their authors would set them, on the same model and known data.

pytorch-ood's where it has them; Mahalanobis++ (arXiv 2505.18032) and its relative form by the
library's own distances. `multi-layer` rows measure at every tap that novelty hears of the single
model, and add up -log p of the ranks among known data, each held out. `trained statistics` rows are
fitted to what the host was trained on, as published; known data then only choose k and give ranks.
Nothing is chosen on a set that a table reports. Scores are higher for outliers, as everywhere.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hydra_ensembles.research.feature_detectors import choose_neighbours
from hydra_ensembles.uncertainty import scores
from hydra_ensembles.uncertainty.distances import GlobalDistance, unit
from hydra_ensembles.uncertainty.moments import (
    Moments,
    class_distance,
    global_distance,
    oracle_approximating,
    stacked,
    whiten,
)
from hydra_ensembles.uncertainty.novelty import Ranks

Set = dict[str, Tensor]
Score = Callable[[Set], Tensor]
LOGIT_SCORES = ("msp", "energy", "gen")


def logit_score(name: str, key: str = "logits") -> Score:
    """Score the logits of the single model, or of several."""
    return lambda data: scores[name](data[key].double())


def single_taps(data: Set) -> Tensor:
    """Return the taps that the library hears of one full member, `[example, tap, width]`.

    Without readout tokens these are `taps`.
    """
    if "readout" not in data:
        return data["taps"]
    pairs = torch.stack([data["readout"][:, :-1], data["mean"][:, :-1]], 2)
    return torch.cat([pairs.flatten(1, 2), data["readout"][:, -1:]], 1)


# --- pytorch-ood


def of_pytorch_ood(known: Set) -> dict[str, Score]:
    """Fit pytorch-ood's detectors to known features and labels."""
    from pytorch_ood import detector

    features, labels = known["features"], known["labels"].unique(return_inverse=True)[1]
    weight, bias = known["weight"], known["bias"]
    head = nn.Linear(*weight.T.shape)
    head.load_state_dict({"weight": weight, "bias": bias})
    # SHE keeps a pattern per class with a rightly predicted example: other classes are left out
    right = known["logits"].argmax(-1) == known["labels"]
    patterns, pattern_labels = known["labels"][right].unique(return_inverse=True)
    few = nn.Linear(features.shape[1], len(patterns))
    few.load_state_dict({"weight": weight[patterns], "bias": bias[patterns]})
    plain = {
        "knn": detector.KNN(None, k=choose_neighbours(features, labels)),
        "knn, k = 50": detector.KNN(None, k=min(50, len(features) - 1)),
        "fdbd": detector.fDBD(None, head),
        "nci": detector.NCI(None, head),
    }
    ash = detector.ASH(lambda x: x[..., None, None], lambda x: head(x.flatten(1)))
    return {
        **fitted(plain, features, labels),
        **gaussian(known),
        **fitted({"she": detector.SHE(None, few)}, features[right], pattern_labels),
        "ash": lambda data: ash.predict(data["features"].clone()),
    }


def gaussian(data: Set) -> dict[str, Score]:
    """Fit pytorch-ood's detectors that invert covariances, in float64.

    After a LayerNorm one direction has no variance, which float32 cannot invert.
    """
    from pytorch_ood import detector

    features, labels = data["features"].double(), data["labels"].unique(return_inverse=True)[1]
    weight, bias = data["weight"].double(), data["bias"].double()
    made = {
        "vim": detector.ViM(None, d=features.shape[1] // 2, w=weight, b=bias),
        "mahalanobis": detector.Mahalanobis(None),
        "rmds": detector.RMD(None),
    }
    return fitted(made, features, labels)


def fitted(made: Mapping[str, Any], features: Tensor, labels: Tensor) -> dict[str, Score]:
    """Fit detectors of pytorch-ood; those that cannot be fitted are said and left out."""
    found: dict[str, Score] = {}
    usual, dtype = torch.get_default_dtype(), features.dtype
    for name, one in made.items():
        torch.set_default_dtype(dtype)  # some make their tensors in it
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                one.fit_features(features, labels)
        except Exception as error:  # too few examples per class, singular covariance
            print(f"{name} cannot be fitted to {len(features)} examples: {error}", flush=True)
            continue
        finally:
            torch.set_default_dtype(usual)
        found[name] = lambda data, one=one: one.predict_features(data["features"].to(dtype))
    return found


# --- distances of unit features


def moments_of(features: Tensor, labels: Tensor | None = None) -> Moments:
    """Return the moments of features `[example, tap, width]`, with classes 0 ... C - 1 or none."""
    classes = 0 if labels is None else int(labels.max()) + 1
    found = Moments.empty(features.shape[1], features.shape[2], classes)
    found.add_(features, labels)
    return found


def mahalanobis_plus(known: Set) -> dict[str, Score]:
    """Fit distances of unit penultimate features: to the nearest class, and relative to all."""
    labels = known["labels"].unique(return_inverse=True)[1]
    moments = moments_of(known["features"][:, None], labels)
    nearest = class_distance(moments)
    # one ridge for both covariances: else their difference is that of the ridges
    count, classes = moments.count, len(moments.class_counts)
    ridge = oracle_approximating(max(1, count - classes), moments.within_scatter(0))
    whitening = stacked([whiten(count, moments.scatter(0), ridge)])
    every = GlobalDistance(moments.mean(), whitening, count)

    def near(data: Set) -> Tensor:
        return nearest(unit(data["features"][:, None].double()))[:, 0]

    def relative(data: Set) -> Tensor:
        return near(data) - every(unit(data["features"][:, None].double()))[:, 0]

    return {"mahalanobis++": near, "relative mahalanobis++": relative}


def summed(held_out: Tensor, terms: Callable[[Tensor], Tensor]) -> Score:
    """Sum -log p over taps: ranks of `terms(unit taps)` among held-out values `[example, tap]`."""
    ranks = Ranks.of(held_out)
    return lambda data: ranks.surprise(terms(unit(single_taps(data).double()))).sum(1)


def multi_layer(known: Set) -> dict[str, Score]:
    """Fit distances at every tap."""
    labels = known["labels"].unique(return_inverse=True)[1]
    features = unit(single_taps(known).double())
    moments = moments_of(features, labels)
    nearest, every = class_distance(moments), global_distance(moments)
    counts = [choose_neighbours(tap, labels) for tap in features.unbind(1)]

    def kth(rows: Tensor, among_themselves: bool = False) -> Tensor:
        found = []
        for tap, count in enumerate(counts):
            apart = torch.cdist(rows[:, tap].float(), features[:, tap].float())
            if among_themselves:
                apart.fill_diagonal_(torch.inf)
            found.append(apart.kthvalue(count, dim=1).values)
        return torch.stack(found, 1).double()

    return {
        "multi-layer knn": summed(kth(features, True), kth),
        "multi-layer mahalanobis++": summed(nearest.held_out(features, labels), nearest),
        "multi-layer mahalanobis++, no labels": summed(every.held_out(features), every),
    }


def of_training(train: Set) -> Callable[[Set], dict[str, Score]]:
    """Fit what is published with the statistics of the training set to it, once for all draws."""
    from pytorch_ood import detector

    features, labels = train["features"], train["labels"].unique(return_inverse=True)[1]
    fixed = gaussian(train)
    fixed["mahalanobis++"] = mahalanobis_plus(train)["mahalanobis++"]
    nearest = class_distance(moments_of(single_taps(train), labels))

    def with_known(known: Set) -> dict[str, Score]:
        held_out = (known["features"], known["labels"])
        count = choose_neighbours(features, train["labels"], held_out=held_out)
        ranked = nearest(unit(single_taps(known).double()))
        found = {
            **fitted({"knn": detector.KNN(None, k=count)}, features, labels),
            **fixed,
            "multi-layer mahalanobis++": summed(ranked, nearest),
        }
        return {f"{name}, trained statistics": score for name, score in found.items()}

    return with_known


SLOW = ("mahalanobis", "rmds")
"""Rivals of pytorch-ood that take seconds per set with 150 classes, as `multi_layer` does."""


def rivals(known: Set, *, slow: bool = True) -> dict[str, Score]:
    """Fit all rivals to known data, or those that are quick with many classes."""
    found = {name: logit_score(name) for name in LOGIT_SCORES}
    found |= {**of_pytorch_ood(known), **mahalanobis_plus(known)}
    if slow:
        return found | multi_layer(known)
    return {name: score for name, score in found.items() if name not in SLOW}
