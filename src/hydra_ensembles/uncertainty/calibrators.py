"""Calibrators beyond temperatures: plain numbers, and what they do to the members' outputs.

They come after the temperatures and are part of the logits that `predict` returns: probabilities,
scores, exported programs and figures all follow. `calibrator_fit` finds the numbers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import DataError, FormatError
from ..registry import Registry

RAW = 0.01
"""Share of the raw confidence that isotonic regression keeps: examples never tie."""


@dataclass(frozen=True)
class Calibrator(ABC):
    """Base of all calibrators: a frozen dataclass of tuples of numbers, saved with an ensemble."""

    name: ClassVar[str]

    def __post_init__(self) -> None:
        columns = [getattr(self, field.name) for field in fields(self)]
        if not columns[0] or len({len(column) for column in columns}) > 1:
            raise FormatError(f"{type(self).__name__} needs columns of one length above 0.")
        if not all(math.isfinite(number) for column in columns for number in column):
            raise FormatError(f"{type(self).__name__} holds NaN or infinity.")

    @abstractmethod
    def __call__(self, outputs: Tensor) -> Tensor:
        """Return calibrated logits `[batch, member, ..., class]`; of numbers, standard deviations.

        Args:
            outputs: The members' outputs, temperatures applied.
        """

    def to_dict(self) -> dict[str, Any]:
        """Return the name and the numbers as JSON holds them."""
        return {"name": self.name, **{k: list(v) for k, v in asdict(self).items()}}


calibrators: Registry[type[Calibrator]] = Registry("calibrator")
"""Calibrators by name."""


def as_calibrator(described: Calibrator | Mapping[str, Any] | None) -> Calibrator | None:
    """Return a calibrator from what `to_dict` returned, or the one that was given."""
    if described is None or isinstance(described, Calibrator):
        return described
    if "name" not in described:
        raise FormatError(f"expected a calibrator with its name: {', '.join(calibrators)}")
    kind = calibrators[described["name"]]
    given = {key: values for key, values in described.items() if key != "name"}
    if given.keys() != {field.name for field in fields(kind)}:
        raise FormatError(f"A calibrator {kind.name!r} has other fields than {', '.join(given)}.")
    return kind(**{key: tuple(map(float, values)) for key, values in given.items()})


@calibrators.register("vector")
@dataclass(frozen=True)
class VectorScaling(Calibrator):
    """Multiply each class's logits and add to them, the same for all members (Guo et al., 2017).

    Attributes:
        scale: One factor above 0 for each class.
        shift: One number for each.
    """

    name: ClassVar[str] = "vector"

    scale: tuple[float, ...]
    shift: tuple[float, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.scale) <= 0:
            raise FormatError(f"A scale of {min(self.scale):g} turns a class round: above 0 only.")

    def __call__(self, outputs: Tensor) -> Tensor:
        """Return the scaled and shifted logits."""
        if outputs.shape[-1] != len(self.scale):
            raise DataError(
                f"The calibrator has {len(self.scale)} classes, the model {outputs.shape[-1]}. "
                "Fit it again with fit_calibrator()."
            )
        return outputs * outputs.new_tensor(self.scale) + outputs.new_tensor(self.shift)


@calibrators.register("platt")
@dataclass(frozen=True)
class PlattScaling(VectorScaling):
    """The same for each of several labels, whose logits go through sigmoids (Platt, 1999)."""

    name: ClassVar[str] = "platt"


@calibrators.register("isotonic")
@dataclass(frozen=True)
class TopLabel(Calibrator):
    """Replace the top class's probability by isotonic regression; rescale all other classes.

    The mean probability p of the predicted class becomes q, straight lines through the points below
    (Zadrozny & Elkan, 2002; top label: Gupta & Ramdas, 2022), and the mean of every other class is
    multiplied by (1 - q) / (1 - p). The order of classes stays: q is never so low that another
    class would be predicted. Every member changes by the same linear map of its probabilities, and
    its logits keep their log-sum-exp, so that members still disagree and energies stay.

    Attributes:
        confidence: Raw confidences, rising.
        accuracy: What each becomes, rising.
    """

    name: ClassVar[str] = "isotonic"

    confidence: tuple[float, ...]
    accuracy: tuple[float, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        for column in (self.confidence, self.accuracy):
            if not 0 <= column[0] <= column[-1] <= 1 or sorted(column) != list(column):
                raise FormatError("Points of isotonic regression rise from 0 to 1.")

    def accuracy_at(self, confidence: Tensor) -> Tensor:
        """Return the calibrated confidences, in the same shape."""
        points, values = (list(column) for column in (self.confidence, self.accuracy))
        found = torch.full_like(confidence, values[0])
        for k in range(len(points) - 1):  # a sum of ramps, which exported programs can compute
            low, high = points[k], points[k + 1]
            if high > low:
                slope = (values[k + 1] - values[k]) / (high - low)
                found = found + (confidence.clamp(low, high) - low) * slope
        return (1 - RAW) * found + RAW * confidence

    def __call__(self, outputs: Tensor) -> Tensor:
        """Return logits whose mean probability is calibrated."""
        members = outputs.softmax(-1)
        mean = members.mean(1, keepdim=True)
        top = torch.zeros_like(mean).scatter(-1, mean.argmax(-1, keepdim=True), 1.0)
        tiny = torch.finfo(mean.dtype).tiny
        before, rest = (mean * top).sum(-1, keepdim=True), (mean * (1 - top)).sum(-1, keepdim=True)
        share = mean * (1 - top) / rest.clamp_min(tiny)  # of each other class among the others
        second = share.amax(-1, keepdim=True)
        after = torch.maximum(self.accuracy_at(before), 1.0001 * second / (1 + second))
        own, others = (members * top).sum(-1, keepdim=True), members * (1 - top)
        # lower: the top class hands on what it loses; higher: it takes equal shares of the others
        kept, left = after / before, (1 - after) / rest.clamp_min(tiny)
        lower = top * own * kept + others + (1 - top) * own * (1 - kept) * share
        higher = top * (1 - left * others.sum(-1, keepdim=True)) + others * left
        changed = torch.where(after < before, lower, higher).clamp_min(tiny)
        return changed.log() + outputs.logsumexp(-1, keepdim=True)


@calibrators.register("variance")
@dataclass(frozen=True)
class Variance(Calibrator):
    """Give numbers a standard deviation: the members' spread and what they do not know.

    sigma^2 = spread * (variance of the members) + residual, for each number.

    Attributes:
        spread: Factors of the members' variance, 0 or more.
        residual: Variances above 0.
    """

    name: ClassVar[str] = "variance"

    spread: tuple[float, ...]
    residual: tuple[float, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.spread) < 0 or min(self.residual) <= 0:
            raise FormatError("Variances have factors of 0 or more and residuals above 0.")

    def __call__(self, outputs: Tensor) -> Tensor:
        """Return the standard deviation of each number, `[batch, number]`."""
        if outputs.shape[-1] != len(self.spread):
            raise DataError(
                f"The calibrator has {len(self.spread)} numbers, the model {outputs.shape[-1]}. "
                "Fit it again with fit_calibrator()."
            )
        # not `var`, which warns of an empty batch
        between = (outputs - outputs.mean(1, keepdim=True)).square().mean(1)
        variance = between * outputs.new_tensor(self.spread)
        return (variance + outputs.new_tensor(self.residual)).sqrt()
