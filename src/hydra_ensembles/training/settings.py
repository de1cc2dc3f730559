"""One settings object for everything that trains: `finetune`, `finetune_branch` and `distill`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ..errors import ArgumentError


@dataclass(frozen=True)
class Settings:
    """What determines the result of training, apart from the model, the data and the seed.

    `finetune`, `finetune_branch`, `distill` and `make_teachers` take one as `settings=`, and the
    arguments `epochs` and `learning_rate`, which override its fields. Each checkpoint holds the
    settings: a run resumes only with equal ones.

    Attributes:
        epochs: Passes over the data.
        learning_rate: Peak of the schedule (linear warm-up, linear decay to 0).
        warmup: Share of the steps in which the learning rate rises, in [0, 1).
        weight_decay: Decoupled decay of matrices (not of biases and norms).
        max_grad_norm: Gradients are clipped to this norm; `math.inf` for no limit.
        mixed_precision: "no", "bf16" or "fp16" (autocast; weights stay in float32).
        shuffle: Whether to shuffle the data.
        bootstrap: Whether each member sees its own resampling of the data.
        label_smoothing: Share of the label spread over all classes.
        towards_host: Strength of the pull towards the starting weights (L2-SP).
        keep: "last" weights, or the "best" epoch's by validation NLL.
        distill: Share of the label that is a teacher's answer, in [0, 1]: in `finetune_branch` the
            given ensemble's own prediction, in `distill` the member's teacher.
        outlier_weight: Weight of the loss on outliers.
        trunk_rate: `distill`: learning rate of the trunk as a share of the branch's; 0 freezes it.
        views: `distill`: different variants of each example; epoch e sees variant e mod views.
        augment: `distill`: whether views after the first are lightly augmented.
        teacher_temperature: `distill`: divides the logits of teachers and members in the loss.
        joint: `distill`: share of the loss, in [0, 1), in which the mean of the members'
            probabilities learns the mean of their teachers; the rest is each member's own loss.
        parts: Number of parts per batch, whose gradients are summed in order: less memory, and the
            same bits for any number of processes that share the parts. 0 means one part per
            process, and results then differ by rounding.

    Example:
        >>> settings = Settings(weight_decay=0.05, mixed_precision="bf16")
        >>> finetune(model, train, settings=settings, epochs=3)
        >>> distill(model, teachers, train, settings=replace(DISTILL, trunk_rate=1.0))
    """

    epochs: int = 1
    learning_rate: float = 5e-5
    warmup: float = 0.1
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    mixed_precision: str = "no"
    shuffle: bool = True
    bootstrap: bool = False
    label_smoothing: float = 0.0
    towards_host: float = 0.0
    keep: str = "last"
    distill: float = 0.0
    outlier_weight: float = 0.0
    trunk_rate: float = 0.0
    views: int = 1
    augment: bool = True
    teacher_temperature: float = 1.0
    joint: float = 0.0
    parts: int = 0

    def __post_init__(self) -> None:
        for name, (holds, expected) in _EXPECTED.items():
            value = getattr(self, name)
            try:
                good = holds(value)
            except TypeError:  # of another type
                good = False
            if not good:
                raise ArgumentError(f"{name} is {value!r}; expected {expected}.")

    def updated(self, epochs: int | None, learning_rate: float | None) -> Settings:
        """Return a copy with a function's everyday arguments; None keeps the field."""
        return replace(
            self,
            epochs=self.epochs if epochs is None else epochs,
            learning_rate=self.learning_rate if learning_rate is None else learning_rate,
        )

    def check_validation(self, validation: object) -> None:
        """Raise when the best epoch is wanted but there is no validation data to find it."""
        if self.keep == "best" and validation is None:
            raise ValueError(
                'keep="best" needs validation data: pass validation=..., or keep="last".'
            )


_EXPECTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "epochs": (lambda epochs: epochs >= 1, "1 or more"),
    "views": (lambda views: views >= 1, "1 or more"),
    "parts": (lambda parts: parts >= 0, "1 or more, or 0 for one per process"),
    "distill": (lambda share: 0 <= share <= 1, "a share in [0, 1]"),
    "joint": (lambda share: 0 <= share < 1, "a share of the loss in [0, 1)"),
    "warmup": (lambda share: 0 <= share < 1, "a share of the steps in [0, 1)"),
    "trunk_rate": (lambda rate: rate >= 0, "0 (frozen) or more"),
    "teacher_temperature": (lambda temperature: temperature > 0, "a number above 0"),
    "max_grad_norm": (lambda norm: norm > 0, "a number above 0"),
    "keep": (lambda keep: keep in ("last", "best"), '"last" or "best"'),
    "mixed_precision": (
        lambda precision: precision in ("no", "bf16", "fp16"),
        '"no", "bf16" or "fp16"',
    ),
}

FINETUNE = Settings()
"""The defaults of `finetune`."""
BRANCH = Settings(bootstrap=True, outlier_weight=0.2)
"""The defaults of `finetune_branch`."""
DISTILL = Settings(epochs=10, learning_rate=5e-4, distill=1.0, outlier_weight=1.0, views=4)
"""The defaults of `distill`."""
