"""Rivals of novelty: detectors on one model's logits and penultimate features, fitted alike.

pytorch-ood's where it has them; Mahalanobis++ (arXiv 2505.18032) and its relative form by the
library's own distances on the same features. Scores are higher for outliers, as everywhere.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from hydra_ensembles.uncertainty import scores
from hydra_ensembles.uncertainty.novelty.distances import (
    ClassDistance,
    GlobalDistance,
    oracle_approximating,
    whiten,
)
from hydra_ensembles.uncertainty.novelty.moments import Moments, unit

Set = dict[str, Tensor]
Score = Callable[[Set], Tensor]
LOGIT_SCORES = ("msp", "energy", "gen")


def logit_score(name: str) -> Score:
    """Score the single model's logits."""
    return lambda data: scores[name](data["logits"].double())


def of_pytorch_ood(known: Set) -> dict[str, Score]:
    """Fit pytorch-ood's detectors to known features and labels."""
    from pytorch_ood import detector

    features, labels = known["features"], known["labels"].unique(return_inverse=True)[1]
    weight, bias = known["weight"], known["bias"]
    width, count = features.shape[1], len(features)
    head = nn.Linear(*weight.T.shape)
    head.load_state_dict({"weight": weight, "bias": bias})
    # SHE keeps a pattern per class with a rightly predicted example: other classes are left out
    right = known["logits"].argmax(-1) == known["labels"]
    patterns, pattern_labels = known["labels"][right].unique(return_inverse=True)
    few = nn.Linear(width, len(patterns))
    few.load_state_dict({"weight": weight[patterns], "bias": bias[patterns]})
    made = {
        "knn": lambda: detector.KNN(None, k=min(50, max(1, count // 20))),
        "vim": lambda: detector.ViM(None, d=width // 2, w=weight, b=bias),
        "mahalanobis": lambda: detector.Mahalanobis(None),
        "rmds": lambda: detector.RMD(None),
        "she": lambda: detector.SHE(None, few),
        "fdbd": lambda: detector.fDBD(None, head),
        "nci": lambda: detector.NCI(None, head),
    }
    found: dict[str, Score] = {}
    for name, make in made.items():
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                fitted = (
                    make().fit_features(features[right], pattern_labels)
                    if name == "she"
                    else make().fit_features(features, labels)
                )
        except Exception as error:  # too few examples per class, singular covariance
            print(f"{name} cannot be fitted to {count} examples: {error}", flush=True)
            continue
        found[name] = lambda data, fitted=fitted: fitted.predict_features(data["features"])
    ash = detector.ASH(lambda x: x[..., None, None], lambda x: head(x.flatten(1)))
    found["ash"] = lambda data: ash.predict(data["features"].clone())
    return found


def mahalanobis_plus(known: Set) -> dict[str, Score]:
    """Fit distances of unit penultimate features: to the nearest class, and relative to all."""
    present, labels = known["labels"].unique(return_inverse=True)
    features = known["features"][:, None]
    moments = Moments.empty(1, features.shape[2], len(present))
    moments.add_(features, labels)
    nearest = ClassDistance.of(moments, slice(None))
    # one ridge for both covariances: else their difference is that of the ridges
    count, classes = moments.count, len(present)
    ridge = oracle_approximating(max(1, count - classes), moments.within_scatter())
    every = GlobalDistance(moments.mean(), whiten(count, moments.scatter(), ridge), count)

    def near(data: Set) -> Tensor:
        return nearest(unit(data["features"][:, None].double()))[:, 0]

    def relative(data: Set) -> Tensor:
        return near(data) - every(unit(data["features"][:, None].double()))[:, 0]

    return {"mahalanobis++": near, "relative mahalanobis++": relative}


def rivals(known: Set) -> dict[str, Score]:
    """Fit all rivals."""
    found = {name: logit_score(name) for name in LOGIT_SCORES}
    return {**found, **of_pytorch_ood(known), **mahalanobis_plus(known)}
