"""Adversarial shifts: FGSM and PGD on images (Goodfellow et al., 2015; Madry et al., 2018).

They are implemented here because torchattacks pins `requests` of 2021 and draws from the global
random state. Its classes can still be used: `adversarial(model, data, attack=torchattacks.CW)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import DataError
from ..registry import check_name
from .batches import Batch, describe, images_of, labels_of, move, split_batch, with_images
from .corruptions.base import Channels, Draws, Normalisation, draw_seeds
from .eval_mode import evaluating
from .loaders import Data, Mapped
from .model_runs import device_of

Attack = Callable[[Tensor, Tensor], Tensor]
EPSILON = 8 / 255


class PixelModel(nn.Module):
    """Wrap a host as a function of pixels in [0, 1] to logits `[batch, class]`."""

    def __init__(self, model: Callable[..., Any], normalisation: Normalisation) -> None:
        super().__init__()
        self.model, self.normalisation = model, normalisation
        self.batch: Batch = None  # the attacked batch: its keys other than the image are passed on

    def forward(self, pixels: Tensor) -> Tensor:
        """Return logits of pixels `[B, C, H, W]` in [0, 1]."""
        images = self.normalisation.from_pixels(pixels)
        args, kwargs, _ = split_batch(with_images(self.batch, images))
        output = self.model(*args, **kwargs)
        logits = getattr(output, "logits", output)
        if not isinstance(logits, Tensor) or logits.ndim != 2:
            raise DataError(
                f"Cannot attack this model: expected logits [batch, class]; {describe(logits)}."
            )
        return logits


def fgsm(model: nn.Module, images: Tensor, labels: Tensor, *, epsilon: float = EPSILON) -> Tensor:
    """Take one step of `epsilon` along the sign of the loss gradient; pixels in [0, 1]."""
    return (images + epsilon * _gradient(model, images, labels).sign()).clamp(0, 1)


def pgd(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    *,
    epsilon: float = EPSILON,
    step: float = 2 / 255,
    steps: int = 10,
    seeds: Tensor | None = None,
) -> Tensor:
    """Take steps along the sign of the loss gradient, within `epsilon` of the images.

    Pixels are in [0, 1]. Starts at the images or, with `seeds` (one per example), at a random point
    of the box.
    """
    attacked = images
    if seeds is not None:
        noise = Draws(seeds, images.device).uniform(*images.shape[1:], low=-epsilon, high=epsilon)
        attacked = (images + noise).clamp(0, 1)
    for _ in range(steps):
        attacked = attacked + step * _gradient(model, attacked, labels).sign()
        attacked = torch.minimum(torch.maximum(attacked, images - epsilon), images + epsilon).clamp(
            0, 1
        )
    return attacked


def adversarial(
    model: Callable[..., Any],
    data: Data,
    *,
    attack: str | Callable[[nn.Module], Attack] = "pgd",
    epsilon: float = EPSILON,
    steps: int = 10,
    seed: int = 0,
    mean: Channels | None = None,
    std: Channels | None = None,
) -> Data:
    """Return data whose images are attacked against `model`; labels stay.

    Every pass repeats the attack, with the same result: keep `list(adversarial(...))` to use it
    with several models.

        attacked = adversarial(model, test, attack="pgd", epsilon=4 / 255)

    Args:
        model: maps images to logits or an object with `.logits`; in eval mode while attacked.
        data: labelled batches of images.
        attack: `fgsm`, `pgd`, or a function from a model on pixels in [0, 1] to an attack
            `(images, labels) -> images`, as torchattacks' classes are.
        epsilon: largest change of a pixel in [0, 1]; for `fgsm` and `pgd` only.
        steps: steps of PGD, each of a quarter of epsilon.
        seed: seed of PGD's random start; the same for any batch size.
        mean, std: what the images were normalised with; by default those of the data's own
            transform.
    """
    if not callable(attack):
        check_name("attack", attack, ("fgsm", "pgd"))
    normalisation = Normalisation.of(data, mean, std)
    wrapped = PixelModel(model, normalisation)

    def run(pixels: Tensor, labels: Tensor, seeds: Tensor) -> Tensor:
        if callable(attack):
            return attack(wrapped)(pixels, labels)
        if attack == "fgsm":
            return fgsm(wrapped, pixels, labels, epsilon=epsilon)
        step = epsilon / 4
        return pgd(wrapped, pixels, labels, epsilon=epsilon, step=step, steps=steps, seeds=seeds)

    def start() -> Callable[[Batch], Batch]:
        generator = torch.Generator().manual_seed(seed)

        def apply(batch: Batch) -> Batch:
            originals, labels = images_of(batch), labels_of(batch)
            if originals is None or labels is None:
                raise DataError(f"An attack needs images and labels; {describe(batch)}.")
            images = originals.to(device_of(model) or originals.device)
            pixels = normalisation.to_pixels(images).clamp(0, 1)
            seeds = draw_seeds(len(images), generator)
            wrapped.batch = move(batch, images.device)
            try:
                with evaluating(wrapped), torch.enable_grad():
                    changed = run(pixels, labels.to(images.device), seeds)
            finally:
                wrapped.batch = None
            attacked = normalisation.from_pixels(changed.detach())
            return with_images(batch, attacked.to(originals.device))

        return apply

    return Mapped(data, start)


def _gradient(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    with torch.enable_grad():
        pixels = images.detach().requires_grad_(True)
        loss = F.cross_entropy(model(pixels), labels, reduction="sum")
        return torch.autograd.grad(loss, pixels)[0].detach()
