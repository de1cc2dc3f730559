"""One settings object for everything that trains: `finetune`, `finetune_branch` and `distill`."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

PRECISIONS = ("no", "bf16", "fp16")


@dataclass(frozen=True)
class Settings:
    """What determines the result of training, apart from the model, the data and the seed.

    Every training function takes one. It also takes the common fields as arguments, which override
    it. Each checkpoint holds the settings: a run resumes only with equal ones.

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
        teacher_temperature: `distill`: divides the logits of teachers and members in the loss.
        joint: `distill`: share of the loss, in [0, 1), in which the mean of the members'
            probabilities learns the mean of their teachers; the rest is each member's own loss.
        parts: Number of parts per batch, whose gradients are summed in order: less memory, and the
            same bits for any number of processes that share the parts. 0 means one part per
            process, and results then differ by rounding.
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
    teacher_temperature: float = 1.0
    joint: float = 0.0
    parts: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "views"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; at least 1 is needed.")
        if self.parts < 0:
            raise ValueError(
                f"parts is {self.parts}; expected 1 or more, or 0 for one per process."
            )
        if not 0 <= self.distill <= 1:
            raise ValueError(f"distill is {self.distill}; expected a share in [0, 1].")
        if not 0 <= self.joint < 1:
            raise ValueError(f"joint is {self.joint}; expected a share of the loss in [0, 1).")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup is {self.warmup}; expected a share of the steps in [0, 1).")
        if self.trunk_rate < 0:
            raise ValueError(f"trunk_rate is {self.trunk_rate}; expected 0 (frozen) or more.")
        if self.teacher_temperature <= 0:
            raise ValueError(f"teacher_temperature is {self.teacher_temperature}; expected > 0.")
        if self.max_grad_norm <= 0:
            raise ValueError(f"max_grad_norm is {self.max_grad_norm}; expected > 0.")
        if self.keep not in ("last", "best"):
            raise ValueError(f'keep is {self.keep!r}; expected "last" or "best".')
        if self.mixed_precision not in PRECISIONS:
            raise ValueError(
                f"mixed_precision is {self.mixed_precision!r}, but must be one of {PRECISIONS}."
            )

    def updated(self, given: dict[str, Any]) -> Settings:
        """Return a copy with the given fields; None and unknown names are ignored."""
        names = {field.name for field in fields(self)}
        return replace(self, **{k: v for k, v in given.items() if k in names and v is not None})

    def check_validation(self, validation: Any) -> None:
        """Raise when the best epoch is wanted but there is no validation data to find it."""
        if self.keep == "best" and validation is None:
            raise ValueError(
                'keep="best" needs validation data: pass validation=..., or keep="last".'
            )
