"""The host itself, as it is and with one temperature (Guo et al., 2017)."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from ...data.model_runs import collect_logits, member_logits_of
from ...uncertainty import fit_temperature
from .task import Task, baselines


@baselines.register("single")
def single(host: nn.Module, task: Task) -> nn.Module:
    """Return a copy of the host: what everything else is measured against."""
    return copy.deepcopy(host)


class Tempered(nn.Module):
    """A host whose logits are divided by a temperature."""

    def __init__(self, host: nn.Module, temperature: float) -> None:
        super().__init__()
        self.host = host
        self.temperature = temperature

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Answer with z / T, `[batch, member, class]`."""
        return member_logits_of(self.host(*args, **kwargs)) / self.temperature


@baselines.register("temperature")
def temperature(host: nn.Module, task: Task) -> nn.Module:
    """Divide logits by the temperature that is best for the validation data's NLL.

    argmin_T mean_x -log softmax(z(x) / T)_y: accuracy stays, calibration changes (Guo et al., 2017,
    "On Calibration of Modern Neural Networks", arXiv 1706.04599).
    """
    logits, labels = collect_logits(
        host,
        task.need("validation"),
        name="validation",
        need_labels=True,
        progress=task.progress,
    )
    assert labels is not None  # need_labels
    return Tempered(copy.deepcopy(host), fit_temperature(logits, labels))
