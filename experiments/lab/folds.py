"""Five folds of the digits: a test of 1,438 digits where one split has 359.

The validation digits of the demo's split choose recipes, so they are tested nowhere: the other
1,438 are cut into five folds, stratified, and each fold is tested by models that were trained on
the other four. Temperatures are fitted on the validation digits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hydra_ensembles.data.batches import join
from hydra_ensembles.data.digits_data import Demo, digits
from hydra_ensembles.data.loaders import Batches
from hydra_ensembles.data.splits import split

from .tasks import Digits

COUNT = 5
FOLDS = [f"digits-fold{number}" for number in range(COUNT)]
SIDEWAYS = (2, 3, 4, 5, 7)  # no digit when turned, as in the demo


def batches_of(images: Tensor, labels: Tensor | None = None) -> Batches:
    """Return images in memory as batches of 64."""

    def load(rows: Sequence[int]) -> dict[str, Tensor]:
        chosen = list(rows)
        found = {"pixel_values": images[chosen]}
        return found if labels is None else {**found, "labels": labels[chosen]}

    return Batches(load, range(len(images)), batch_size=64, labels=labels)


class DigitsFold(Digits):
    """The digits, tested on one fold of those that choose nothing."""

    def __init__(self, number: int, hosts: Path | None = None) -> None:
        super().__init__(None, hosts)
        self.number, self.name = number, FOLDS[number]

    @cached_property
    def _demo(self) -> Any:
        demo = digits(self.shape.image_size, seed=0)
        both = join([*demo.train, *demo.test])
        images, labels = both["pixel_values"], both["labels"]
        shares = {str(fold): 1 / COUNT for fold in range(COUNT)}
        folds = split(batches_of(images, labels), shares, seed=1)
        test = folds[str(self.number)].indices
        train = sorted(set(range(len(labels))) - set(test))
        tested = images[test]
        turned = tested[torch.isin(labels[test], torch.tensor(SIDEWAYS))].rot90(1, (2, 3))
        own = {"rotated": batches_of(turned), "inverted": batches_of(-tested)}
        return Demo(
            batches_of(images[train], labels[train]),
            demo.validation,
            batches_of(tested, labels[test]),
            demo.outliers,
            {name: own.get(name, data) for name, data in demo.ood.items()},
            class_names=demo.class_names,
        )


def pooled(sets: Sequence[Mapping[str, Mapping[str, Tensor]]]) -> dict[str, dict[str, Tensor]]:
    """Join the answers of all folds, set by set."""
    return {
        name: {key: torch.cat([fold[name][key] for fold in sets]) for key in one}
        for name, one in sets[0].items()
    }
