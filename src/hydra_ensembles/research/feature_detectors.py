"""OOD scores on features: KNN and Mahalanobis, through pytorch-ood.

They need features and training data at test time, which logits do not; both see what a linear
classifier throws away. Scores are higher when further from the training data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..data.batches import split_batch
from ..data.eval_mode import evaluating
from ..data.model_runs import call_model
from ..data.progress import progress_bar
from ..errors import DataError
from ..evaluation.figures import OOD
from ..evaluation.metrics import ood_figures
from ..evaluation.results import Results
from ..registry import Registry, imported
from ..uncertainty.term_choice import clusters

Detector = Any
"""A detector of pytorch-ood: `fit_features(features, labels)`, `predict_features(features)`."""

NEIGHBOURS = (1, 2, 5, 10, 20, 50)
"""Numbers of neighbours that `choose_neighbours` tries."""
GROUPS = 10
"""Groups of classes, or clusters, that are left out in turn."""
PER_CLASS = 5
"""Examples per class, on average, from which on classes are left out; below it clusters are."""

_detectors = partial(imported, "pytorch_ood.detector", "Detection by features", "rivals")

detectors: Registry[Callable[[Tensor, Tensor], Detector]] = Registry("feature detector")
"""Detectors by name, made for training features `[example, width]` and classes `[example]`."""


def choose_neighbours(
    features: Tensor,
    labels: Tensor | None = None,
    *,
    held_out: tuple[Tensor, Tensor] | None = None,
) -> int:
    """Choose the k of a detector by the distance to the k-th neighbour, without any outlier.

    Groups of classes are left out in turn, and k is the number that tells them best from the others
    (mean AUROC, the smaller of equals). Without labels, or with fewer than five examples per class,
    clusters are left out. More neighbours than a class has examples are of other classes: the
    published k = 50 needs thousands of examples per class.

    Args:
        features: What the detector is fitted to, `[example, width]`.
        labels: Their classes, `[example]`.
        held_out: Other features and classes to choose by; else each example among the others.
    """
    bank = torch.nn.functional.normalize(features.float(), dim=-1)
    if labels is not None and len(labels) >= PER_CLASS * len(labels.unique()):
        groups = labels % GROUPS if len(labels.unique()) > GROUPS else labels
        asked, asked_groups = bank, groups
        if held_out is not None:
            asked = torch.nn.functional.normalize(held_out[0].float(), dim=-1)
            asked_groups = held_out[1] % GROUPS if groups is not labels else held_out[1]
    else:
        groups = clusters(bank, GROUPS)
        asked, asked_groups = bank, groups
    present = groups.unique()
    if len(present) < 2:
        raise DataError("All examples are of one group; leaving it out leaves nothing to fit to.")
    apart = torch.cdist(asked, bank)
    if asked is bank:
        apart.fill_diagonal_(torch.inf)
    rating = dict.fromkeys(NEIGHBOURS, 0.0)
    for group in present:
        others = apart[:, groups != group]
        new = asked_groups == group
        near = others.topk(min(NEIGHBOURS[-1], others.shape[1]), largest=False).values
        for count in NEIGHBOURS:
            distance = near[:, min(count, near.shape[1]) - 1]
            rating[count] += ood_figures(distance[~new], distance[new])["AUROC"]
    return max(NEIGHBOURS, key=lambda count: rating[count])


@detectors.register("knn")
def knn(features: Tensor, labels: Tensor) -> Detector:
    """Return a detector by the distance to the k-th nearest feature (Sun et al., 2022)."""
    return _detectors().KNN(None, k=choose_neighbours(features, labels))


@detectors.register("mahalanobis")
def mahalanobis(features: Tensor, labels: Tensor) -> Detector:
    """Return a detector by the distance to the nearest class mean (Lee et al., 2018)."""
    return _detectors().Mahalanobis(None)


def collect_features(
    features: Callable[..., Any],
    data: Iterable[Any],
    *,
    name: str = "data",
    device: Any = None,
    progress: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return all features `[example, width]` in float64 and labels (None without), on the CPU.

    After a LayerNorm one direction has no variance, which float32 cannot invert.
    """
    found, labels = [], []
    with evaluating(features):
        for index, batch in enumerate(progress_bar(data, description=name, enabled=progress)):
            part = call_model(features, batch, device=device)
            if not isinstance(part, Tensor) or part.ndim != 2 or not bool(part.isfinite().all()):
                shape = list(part.shape) if isinstance(part, Tensor) else type(part).__name__
                raise DataError(
                    f"Features of batch {index} of the data set {name!r} are {shape}; expected a "
                    "finite tensor [batch, width]. Pool tokens inside the feature function."
                )
            found.append(part.detach().double().cpu())
            labels.append(split_batch(batch)[2])
    if not found:
        raise DataError(f"The data set {name!r} is empty: it gave no examples.")
    known = [label for label in labels if label is not None]
    return torch.cat(found), torch.cat(known).cpu().long() if len(known) == len(found) else None


def evaluate_features(
    features: Callable[..., Any],
    data: Iterable[Any],
    *,
    train: Iterable[Any],
    ood: Mapping[str, Iterable[Any]],
    methods: Sequence[str] = ("knn", "mahalanobis"),
    device: Any = None,
    progress: bool = True,
    name: str = "features",
) -> Results:
    """Evaluate OOD detection by distances in feature space.

    Example:
        >>> evaluate_features(encoder, test, train=train, ood={"textures": textures})

    Args:
        features: called on a batch's inputs, answers with `[batch, width]`.
        data: in-distribution test batches.
        train: labelled batches to fit on.
        ood: out-of-distribution data by name.
        methods: names in `detectors`; the first has the short names, as in `evaluate`.
        device: where inputs go; by default the model's own.
        progress: show bars on a terminal.
        name: in tables.

    Returns:
        `ood/<set>/AUROC ...` of the first method, `ood/<set>/<method>/AUROC ...` of the others.
    """
    sets = {"id": data, **{OOD + key: batches for key, batches in ood.items()}}

    def collect(batches: Iterable[Any], key: str) -> tuple[Tensor, Tensor | None]:
        return collect_features(features, batches, name=key, device=device, progress=progress)

    fitted, labels = collect(train, "train")
    if labels is None:
        raise DataError("The data set 'train' has no labels, but Mahalanobis needs classes.")
    classes = labels.unique(return_inverse=True)[1]  # pytorch-ood wants 0 ... C - 1, all present
    columns = {key: collect(batches, key)[0] for key, batches in sets.items()}
    figures: dict[str, float] = {}
    for method in methods:
        detector = detectors[method](fitted, classes)
        usual = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)  # pytorch-ood makes its means and covariances in it
        try:
            detector.fit_features(fitted, classes)
        finally:
            torch.set_default_dtype(usual)
        far = {key: detector.predict_features(part).double() for key, part in columns.items()}
        parts = {key: ood_figures(far["id"], far[key], name=key) for key in far if key != "id"}
        parts["ood/mean"] = {
            figure: sum(part[figure] for part in parts.values()) / len(parts)
            for figure in next(iter(parts.values()))
        }
        middle = "" if method == methods[0] else f"{method}/"
        for key, part in parts.items():
            figures |= {f"{key}/{middle}{figure}": value for figure, value in part.items()}
    sizes = {key: len(part) for key, part in columns.items()}
    return Results(name, figures, settings={"scores": list(methods), "examples": sizes})
