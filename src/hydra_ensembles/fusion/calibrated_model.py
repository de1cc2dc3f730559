"""What calibrates a fused model: temperatures, and a calibrator after them."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..errors import HydraError
from ..tasks import Task
from ..uncertainty import Calibrator, Policy, checked_temperature, scale_logits
from .host_interface import HostInterface
from .linear_readout import LinearReadout


class CalibratedModel(HostInterface):
    """A model of several members whose outputs are calibrated; base of `FusedModel`."""

    policy: Policy | None

    @property
    @abstractmethod
    def members(self) -> int:
        """Number of members M."""

    @property
    @abstractmethod
    def student(self) -> LinearReadout | None:
        """The one output that answers for the ensemble; None where the members' mean does."""

    @property
    @abstractmethod
    def task(self) -> Task:
        """What the outputs mean."""

    @property
    def temperature(self) -> float | None:
        """Divides the logits behind `probabilities`: the student's, without one all members'.

        None when not calibrated.
        """
        return self._temperature

    @temperature.setter
    def temperature(self, value: float | None) -> None:
        checked = None if value is None else self._checked(value)
        if checked != getattr(self, "_temperature", None):
            self._drop_policy("the temperatures")
        self._temperature = checked

    @property
    def member_temperatures(self) -> list[float] | None:
        """Divide each member's logits; None when not calibrated."""
        return self._member_temperatures

    @member_temperatures.setter
    def member_temperatures(self, values: Sequence[float] | None) -> None:
        checked = None if values is None else [self._checked(value) for value in values]
        if checked is not None and len(checked) != self.members:
            raise ValueError(
                f"{len(checked)} member temperatures for {self.members} members: give one each."
            )
        if checked != getattr(self, "_member_temperatures", None):
            self._drop_policy("the temperatures")
        self._member_temperatures = checked

    @property
    def calibrator(self) -> Calibrator | None:
        """What follows the temperatures (`fit_calibrator`); None for nothing."""
        return self._calibrator

    @calibrator.setter
    def calibrator(self, value: Calibrator | None) -> None:
        if value is not None and value.name not in self.task.calibrators:
            raise HydraError(
                f"{self.task.title.capitalize()} takes no calibrator {value.name!r}; it takes "
                f"{', '.join(self.task.calibrators) or 'none'}."
            )
        if value != getattr(self, "_calibrator", None):
            self._drop_policy("the calibrator")
        self._calibrator = value

    def calibrated(self, outputs: Tensor, *, members: bool = True) -> Tensor:
        """Return the outputs that answer, calibrated.

        Args:
            outputs: Raw outputs `[batch, member, ...]` of the members, or of the student.
            members: Whether they are the members'.
        """
        answers = not members or self.student is None
        temperature = self.temperature if answers else None
        each = self.member_temperatures if members else None
        if temperature is not None or each is not None:
            outputs = scale_logits(outputs, temperature=temperature, member_temperatures=each)
        if self.calibrator is None or not self.task.has_temperatures:  # numbers stay as they are
            return outputs
        return self.calibrator(outputs)

    def calibrated_by(self) -> dict[str, Any]:
        """Return what `task.answer` takes besides temperatures."""
        return {} if self.calibrator is None else {"calibrator": self.calibrator}

    def _checked(self, temperature: float) -> float:
        """Return a temperature that the task's outputs can be divided by."""
        if not self.task.has_temperatures:
            raise HydraError(f"{self.task.title.capitalize()} has no temperatures: leave it None.")
        return checked_temperature(temperature)

    def _drop_policy(self, what: str) -> None:
        """Drop the policy: its thresholds belong to the old uncertainty or novelty."""
        if getattr(self, "policy", None) is not None:
            self.policy = None
            warnings.warn(
                f"A policy was fitted before {what} changed: it is dropped. Fit it again with "
                "fit_policy().",
                stacklevel=3,
            )
