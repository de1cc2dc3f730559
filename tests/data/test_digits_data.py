"""The embedded digits and their drawn outliers."""

from __future__ import annotations

import pytest
import torch

from hydra_ensembles.data import Demo, digits, fingerprint


@pytest.fixture(scope="module")
def demo() -> Demo:
    return digits(16, outlier_count=40)


def test_parts_are_stratified_and_apart(demo: Demo) -> None:
    parts = (demo.train, demo.validation, demo.test)
    assert [part.count for part in parts] == [1078, 360, 359]
    assert sum(len(set(part.indices)) for part in parts) == 1797
    assert len(set().union(*(part.indices for part in parts))) == 1797
    for part in parts:
        shares = part.labels.bincount(minlength=10) / part.count
        assert float(shares.min()) > 0.09
    batch = next(iter(demo.train))
    assert batch["pixel_values"].shape == (64, 1, 16, 16)
    assert float(batch["pixel_values"].min()) == -1
    assert float(batch["pixel_values"].max()) == 1
    assert demo.class_names[7] == "7"


def test_outliers_are_unlabelled_and_differ(demo: Demo) -> None:
    assert set(demo.ood) == {"letters", "rotated", "inverted", "textures", "noise"}
    sets = {**demo.ood, "outliers": demo.outliers}
    for name, data in sets.items():
        assert data.count == 40, name
        for batch in data:
            assert set(batch) == {"pixel_values"}
            assert batch["pixel_values"].shape[1:] == (1, 16, 16)
            assert float(batch["pixel_values"].abs().max()) <= 1
            assert float(batch["pixel_values"].std((1, 2, 3)).min()) > 0.02  # none is blank
    assert len({fingerprint(data) for data in sets.values()}) == 6


def test_seeds_and_forms() -> None:
    one = digits(8, outlier_count=10, key=None, channels=3)
    images, labels = next(iter(one.test))
    assert images.shape[1:] == (3, 8, 8)
    assert len(images) == len(labels)
    assert torch.equal(images[:, 0], images[:, 2])
    same, other = (
        digits(8, outlier_count=10, key=None, channels=3),
        digits(8, outlier_count=10, seed=1),
    )
    assert same.train.indices == one.train.indices
    assert fingerprint(same.ood["letters"]) == fingerprint(one.ood["letters"])
    assert other.train.indices != one.train.indices


def test_neighbours_tell_digits_and_letters_have_as_much_ink(demo: Demo) -> None:
    def flat(data: object) -> torch.Tensor:
        return torch.cat([batch["pixel_values"].flatten(1) for batch in data])

    nearest = torch.cdist(flat(demo.test), flat(demo.train)).argmin(1)
    right = demo.train.labels[nearest] == demo.test.labels
    assert float(right.float().mean()) > 0.95
    ink = {name: float((flat(data) > 0).float().mean()) for name, data in demo.ood.items()}
    assert abs(ink["letters"] - float((flat(demo.test) > 0).float().mean())) < 0.08
