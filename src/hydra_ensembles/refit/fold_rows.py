"""One pass over unlabelled data: trunks and hosts run together; moments and readouts are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batches import check_inputs
from ..data.processes import in_order, on_first
from ..data.progress import length_of, progress_bar
from ..errors import DataError, HydraError, UnsupportedModelError
from ..hosts.probes import largest_difference
from ..tasks import task_of
from .logistic import SoftRows
from .readout_states import Parting, Reader, States
from .ridge import Fit, Linear, Moments, fit
from .token_sums import judges_among

LEAST = 20
"""Fewest examples to fit to."""
ROWS = 1024
"""Rows that are kept before their moments are added."""

Trunk = int | str
"""The number of a host, or "mean"."""


@dataclass
class Rows:
    """Moments of the rows that are fitted and of those that judge the ridge."""

    fitted: Moments | None = None
    judging: Moments | None = None
    _kept: list[tuple[Tensor, Tensor, Tensor, Tensor]] = field(default_factory=list)

    def add_(
        self, features: Tensor, targets: Tensor, judges: Tensor, weights: Tensor | None = None
    ) -> None:
        """Add the rows of a batch.

        Args:
            features, targets: The rows, `[row, n]` and `[row, k]`; as many per example.
            judges: Which examples judge, `[example]`.
            weights: How much each row counts; by default all count the same.
        """
        weights = features.new_ones(len(features)) if weights is None else weights
        judges = judges.repeat_interleave(len(features) // len(judges))
        self._kept.append((features, targets, judges, weights))
        if sum(len(part[0]) for part in self._kept) >= ROWS:
            self.flush_()

    def flush_(self) -> None:
        """Turn the kept rows into moments."""
        if not self._kept:
            return
        features, targets, judges, weights = map(torch.cat, zip(*self._kept, strict=True))
        self._kept = []
        for name, rows in (("fitted", ~judges), ("judging", judges)):
            new, old = Moments.of(features[rows], targets[rows], weights[rows]), getattr(self, name)
            setattr(self, name, new if old is None else old + new)

    def fit(self, given: Sequence[Linear]) -> list[Fit]:
        """Fit linear maps, each never worse than the given one (see `ridge.fit`)."""
        self.flush_()
        assert self.fitted is not None and self.judging is not None
        # the same sums may be solved to other last digits elsewhere: one process does it for all
        result: list[Fit] = on_first(partial(fit, self.fitted, self.judging, given))
        return result

    def fit_outputs(self, count: int) -> list[Fit]:
        """Fit so many maps of equal size, for which nothing is given."""
        self.flush_()
        assert self.fitted is not None
        features, targets = self.fitted.uy.shape
        zero = torch.zeros(features, targets // count, dtype=torch.float64)
        return self.fit([Linear(zero, zero[0])] * count)


@dataclass(frozen=True)
class ReadoutFit:
    """A fitted readout, and how its two parts follow the hosts.

    Attributes:
        linear: The mean of both.
        ridge, error: Of the fit to logits (see `ridge.Fit`).
        divergence: Of the fit to probabilities (see `logistic.SoftFit`); None without classes.
    """

    linear: Linear
    ridge: float | None
    error: float
    divergence: float | None = None


@dataclass
class FoldRows:
    """What one pass over the data gives.

    Attributes:
        examples: Number of examples.
        states: By trunk, rows of neurons, with what each host's sum adds to the trunk's state.
        logits, probabilities: By trunk, rows of readout features, with the hosts' logits (of a
            student: their mean) and probabilities.
    """

    examples: int
    states: dict[Trunk, Rows]
    logits: dict[Trunk, Rows]
    probabilities: dict[Trunk, SoftRows]

    def fit_readouts(self, name: Trunk, outputs: int) -> list[ReadoutFit]:
        """Fit linear readouts of a trunk: the mean of two fits, to logits and to probabilities.

        Labels of 0 and 1 and numbers have no softmax: there the fit to the outputs is all.
        Each alone is the better one on some tasks (logits on CIFAR-10, probabilities on CLINC150);
        their mean is again a linear map, and best on calibration data of three tasks together.
        """
        squares = self.logits[name].fit_outputs(outputs)
        if not self.probabilities[name].rows:
            return [ReadoutFit(square.linear, square.ridge, square.error) for square in squares]
        fits = []
        for square, soft in zip(squares, on_first(self.probabilities[name].fit), strict=True):
            assert square.linear.bias is not None and soft.linear.bias is not None
            linear = Linear(
                (square.linear.weight + soft.linear.weight) / 2,
                (square.linear.bias + soft.linear.bias) / 2,
            )
            fits.append(ReadoutFit(linear, square.ridge, square.error, soft.divergence))
        return fits


def read_rows(
    trunks: Mapping[Trunk, nn.Module],
    hosts: Sequence[nn.Module],
    parting: Parting,
    data: Any,
    *,
    states: bool,
    members: bool,
    student: bool,
    seed: int,
    progress: bool,
) -> FoldRows:
    """Run trunks and hosts over data, each model once per batch.

    Args:
        trunks: The trunks to fit on; some may be hosts.
        hosts: The hosts to follow.
        parting: Where members branch.
        data: Batches; labels are ignored.
        states: Whether to keep rows for members by states.
        members: Whether to keep rows for members by logits.
        student: Whether to keep rows for a student, which follows the hosts' mean.
        seed: Determines which examples judge.
        progress: Show a bar on a terminal.
    """
    models = {id(model): model for model in (*hosts, *trunks.values())}
    readers = {key: Reader(model, parting) for key, model in models.items()}
    unchecked, classes = states, task_of(hosts[0]).classifies

    def work(number: int, batch: Any) -> dict[str, Tensor]:
        nonlocal unchecked
        where = f"batch {number} of the data"
        check_inputs(batch, where)
        try:
            found = {key: reader(batch) for key, reader in readers.items()}
        except HydraError:
            raise
        except Exception as error:
            raise DataError(
                f"The hosts failed on {where} ({type(error).__name__}: {error}). Give inputs as "
                "the hosts take them."
            ) from error
        for one in found.values():
            if not bool(one.total.isfinite().all() and one.logits.isfinite().all()):
                raise DataError(
                    f"The hosts' states hold NaN or infinity on {where}. Fix or remove these "
                    "examples, and check the hosts' weights."
                )
        theirs = [found[id(host)] for host in hosts]
        if unchecked:
            _check_sum(theirs[0], parting.linear(hosts[0]), type(hosts[0]).__name__)
            unchecked = False
        result = {}
        for name, trunk in trunks.items():
            own = found[id(trunk)]
            result[f"{name}.readout"] = own.readout
            if states:
                result[f"{name}.features"] = own.features
                targets = [one.total - own.entering for one in theirs]
                result[f"{name}.states"] = torch.cat(targets, 1)
        logits = torch.stack([one.logits for one in theirs], 1)  # [row, host, class]
        each_aim = {"logits": logits}
        if classes:
            each_aim["probabilities"] = logits.softmax(-1)
        for aim, each in each_aim.items():
            aims = [each] * members + [each.mean(1, keepdim=True)] * student
            if aims:
                result[aim] = torch.cat(aims, 1)
        if states and theirs[0].weights is not None:
            result["weights"] = theirs[0].weights
        return result

    rows = FoldRows(
        0,
        {name: Rows() for name in trunks},
        {name: Rows() for name in trunks},
        {name: SoftRows() for name in trunks},
    )
    results = in_order(data, work, name="data to fold on")
    bar = progress_bar(results, description="fold", enabled=progress, total=length_of(data))
    for result in bar:
        count = len(result[f"{next(iter(trunks))}.readout"])
        judges = judges_among(rows.examples, count, seed)
        rows.examples += count
        for name in trunks:
            if states:
                given = (result[f"{name}.features"], result[f"{name}.states"])
                rows.states[name].add_(*given, judges, result.get("weights"))
            if "logits" in result:
                own = result[f"{name}.readout"]
                rows.logits[name].add_(own, result["logits"].flatten(1), judges)
            if "probabilities" in result:
                rows.probabilities[name].add_(own, result["probabilities"])
    if rows.examples < LEAST:
        raise DataError(
            f"The data has {rows.examples} examples, too few to fit to. Give at least {LEAST}; "
            "a few thousand are best, and they need no labels."
        )
    return rows


def _check_sum(states: States, linear: Linear, name: str) -> None:
    """Raise unless a host's last block gives a + u W + b."""
    expected = states.features @ linear.weight + states.entering
    expected = expected if linear.bias is None else expected + linear.bias
    if not largest_difference(states.total, expected) < 1e-2:
        raise UnsupportedModelError(
            f"{name} cannot be folded by states: its last block adds more to its state than the "
            'output of its MLP. Fold it with readout="logits".'
        )
