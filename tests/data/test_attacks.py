"""FGSM and PGD against a small model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from hydra_ensembles.data import adversarial, as_data
from hydra_ensembles.data.attacks import EPSILON, fgsm, pgd
from hydra_ensembles.errors import DataError, UnknownNameError

MEAN, STD = 0.4, 0.2


class Small(nn.Module):
    """A convolution with dropout, so that a forgotten eval mode shows."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Sequential(
                nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(8 * 36, 4)
            )

    def forward(self, pixel_values: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.net(pixel_values))


def batch(n: int = 6) -> tuple[Tensor, Tensor]:
    pixels = torch.rand((n, 3, 8, 8), generator=torch.Generator().manual_seed(1))
    return (pixels - MEAN) / STD, torch.arange(n) % 4


def loss(model: Small, images: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model.eval()(images).logits, labels))


@pytest.mark.parametrize("attack", ["fgsm", "pgd"])
@pytest.mark.parametrize("form", ["tuple", "mapping"])
def test_attacks_raise_the_loss_within_the_box(attack: str, form: str) -> None:
    model = Small().train()
    images, labels = batch()
    one = (images, labels) if form == "tuple" else {"pixel_values": images, "labels": labels}
    data = adversarial(model, as_data(one, batch_size=4), attack=attack, mean=MEAN, std=STD)
    assert len(data) == 2
    found = torch.cat([b[0] if form == "tuple" else b["pixel_values"] for b in data])
    again = torch.cat([b[0] if form == "tuple" else b["pixel_values"] for b in data])
    assert torch.equal(found, again)
    assert model.training  # given back as it was
    assert model.net[2].training
    assert all(parameter.grad is None for parameter in model.parameters())
    change = (found - images) * STD
    assert float(change.abs().max()) <= EPSILON + 1e-6
    assert float(change.abs().max()) > 0.9 * EPSILON
    pixels = found * STD + MEAN
    assert float(pixels.min()) > -1e-6
    assert float(pixels.max()) < 1 + 1e-6
    assert loss(model, found, labels) > loss(model, images, labels) + 0.05


def test_pgd_beats_fgsm_and_does_not_depend_on_batches() -> None:
    model = Small()
    images, labels = batch(8)

    def found(attack: str, batch_size: int) -> Tensor:
        data = as_data((images, labels), batch_size=batch_size)
        return torch.cat(
            [b[0] for b in adversarial(model, data, attack=attack, mean=MEAN, std=STD)]
        )

    assert loss(model, found("pgd", 8), labels) >= loss(model, found("fgsm", 8), labels) - 1e-3
    torch.testing.assert_close(found("pgd", 8), found("pgd", 3), rtol=0, atol=1e-4)


def test_a_library_of_attacks_fits_in() -> None:
    class Lighter:  # the shape of torchattacks' classes: built on a model, called on pixels
        def __init__(self, model: nn.Module) -> None:
            assert model(torch.zeros(1, 3, 8, 8)).shape == (1, 4)

        def __call__(self, images: Tensor, labels: Tensor) -> Tensor:
            assert 0 <= float(images.min()) <= float(images.max()) <= 1
            return (images + 0.1).clamp(0, 1)

    images, labels = batch()
    made = next(iter(adversarial(Small(), [(images, labels)], attack=Lighter, mean=MEAN, std=STD)))
    expected = ((images * STD + MEAN + 0.1).clamp(0, 1) - MEAN) / STD
    torch.testing.assert_close(made[0], expected)


def test_equal_to_torchattacks() -> None:
    torchattacks = pytest.importorskip("torchattacks")
    model = Small().eval()
    pixels = torch.rand((5, 3, 8, 8), generator=torch.Generator().manual_seed(2))
    labels = torch.arange(5) % 4

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).logits

    plain = Logits().eval()
    theirs = torchattacks.FGSM(plain, eps=EPSILON)(pixels, labels)
    torch.testing.assert_close(fgsm(plain, pixels, labels), theirs)
    theirs = torchattacks.PGD(plain, eps=EPSILON, alpha=2 / 255, steps=10, random_start=False)
    torch.testing.assert_close(pgd(plain, pixels, labels), theirs(pixels, labels))


def test_what_is_wrong_is_said() -> None:
    images, labels = batch()
    with pytest.raises(UnknownNameError, match="fgsm, pgd"):
        adversarial(Small(), [(images, labels)], attack="cw")
    with pytest.raises(DataError, match="images and labels"):
        list(adversarial(Small(), [images]))
    with pytest.raises(DataError, match="logits"):
        list(adversarial(lambda x: x, [(images, labels)]))
