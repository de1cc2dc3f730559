"""What `try` keeps of a run over all data: outputs by row, labels, and what novelty reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..data.batches import split_batch, without_labels
from ..data.loaders import Batches
from ..data.model_runs import ModelRun
from ..data.padding import even
from ..errors import DataError
from ..evaluation.cross_fit import Calibration, cross_fit, cross_fit_numbers
from ..evaluation.evaluator import results_of
from ..evaluation.figures import columns_of
from ..evaluation.results import Results
from ..fusion.ensemble import HydraEnsemble
from ..fusion.known_data import finished, novelty_fit, proxies_of, summaries_of
from ..prediction import Prediction, join
from ..tasks import IGNORED, Regression, Task
from ..uncertainty.novelty import Novelty

SOME = 32
"""Questions that are answered at once: the spans of a text are many."""


def with_labels(data: Batches, labels: Tensor) -> Batches:
    """Return data with these labels instead of its own."""

    def load(rows: Sequence[int]) -> Any:
        batch = without_labels(next(iter(data.subset(rows, batch_size=len(rows)))))
        target = labels[list(rows)]
        if isinstance(batch, dict):
            return {**batch, "labels": target}
        return (batch[0] if isinstance(batch, tuple) else batch, target)

    return Batches(
        load, range(data.count), batch_size=data.batch_size, labels=labels, info=data.info
    )


def own_labels(source: Batches, task: Task) -> Tensor:
    """Return the labels of tokens `[example, token]`, padded, or of spans `[example, 2]`."""
    found = [split_batch(batch)[2] for batch in source]
    labels = [label for label in found if label is not None]
    if len(labels) < len(found):
        raise DataError(
            f"There are no labels in your data, which a try of {task.title} needs: without them "
            "members cannot be chosen. Novelty needs none: fuse the model and call fit_novelty_()."
        )
    return torch.cat(even(labels, IGNORED) if task.by_token else labels)


class Outputs(NamedTuple):
    """What members gave, calibrated or not, and what is true.

    Attributes:
        members: `[row, member, ...]`; a row is an example, or a labelled token.
        labels: As in `Trial`.
        task: What they mean.
        sigma: Standard deviations of numbers.
    """

    members: Tensor
    labels: Tensor | None
    task: Task
    sigma: Tensor | None = None

    @property
    def text(self) -> Tensor:
        """The example of each row."""
        if self.labels is None or not self.task.by_token:
            return torch.arange(len(self.members))
        return (self.labels != IGNORED).nonzero()[:, 0]

    @property
    def targets(self) -> Tensor | None:
        """What is true of each row."""
        if self.labels is None or not self.task.by_token:
            return self.labels
        return self.labels[self.labels != IGNORED]

    def parts(self, rows: Tensor) -> Iterator[Tensor]:
        """Split rows where answers grow with the square of a text's length."""
        return iter(rows.split(SOME if self.task.ragged else max(1, len(rows))))

    def answer(self, rows: Tensor | None = None, **calibration: Any) -> Prediction:
        """Return the answers of some rows; by default of all examples."""
        task, members = self.task, self.members
        options: dict[str, Any] = {"score": task.default_score, **calibration}
        if rows is None and task.by_token and self.labels is not None:
            real = self.labels != IGNORED
            whole = members.new_zeros(*real.shape, *members.shape[1:])
            whole[real] = members
            options["inputs"] = {"attention_mask": real.long()}
            return task.answer(whole.transpose(1, 2), **options)
        rows = torch.arange(len(members)) if rows is None else rows
        answer = join([task.answer(members[part], **options) for part in self.parts(rows)])
        more: dict[str, Any] = {} if self.sigma is None else {"sigma": self.sigma[rows].float()}
        return replace(answer, **more)


def calibrated_outputs(
    outputs: Outputs, host: Outputs, *, held_out: Tensor, fitted: Tensor, seed: int
) -> tuple[dict[str, Any], Outputs]:
    """Calibrate outputs by the task; return it as a record has it, and the outputs out of fold."""
    task, text, targets = outputs.task, outputs.text, outputs.targets
    rows: dict[str, Any] = {"held_out": held_out[text], "fitted": fitted[text], "seed": seed}
    assert targets is not None
    if not task.calibrators:
        return {**Calibration().to_dict(), "figures": {}}, outputs
    if isinstance(task, Regression):
        found, record, sigma = cross_fit_numbers(outputs.members, targets, **rows)
        return {**found.to_dict(), "figures": record}, outputs._replace(sigma=sigma)
    record, judged = cross_fit(
        outputs.members, targets, host.members, calibrators=task.calibrators, **rows
    )
    return record, outputs._replace(members=judged)


@dataclass(frozen=True)
class Measured:
    """What the ensemble computed on all examples, from which novelty is fitted.

    Attributes:
        source: The data.
        rows: Logits by example if novelty reads any (`Task.novelty_rows`), or None.
        summaries: Token summaries, `[example, tap, width]`.
        labels: Classes `[example]`, or None.
        columns: What else is known of the examples (`NoveltyFit.add_columns_`).
        far: What novelty reads of proxies by kind, once a choice of terms has asked for them.
    """

    source: Batches
    rows: Tensor | None
    summaries: Tensor
    labels: Tensor | None
    columns: dict[str, Any]
    far: dict[str, list[dict[str, Tensor]]] = field(default_factory=dict)

    def columns_at(self, rows: Tensor) -> dict[str, Any]:
        """Return the columns at some rows, which are numbers."""
        return {
            name: column[rows] if isinstance(column, Tensor) else [column[i] for i in rows.tolist()]
            for name, column in self.columns.items()
        }

    def rows_at(self, rows: Tensor) -> Tensor | None:
        """Return the logits at some rows if novelty reads any."""
        return None if self.rows is None else self.rows[rows]

    def fit(self, ensemble: HydraEnsemble, mask: Tensor) -> Novelty:
        """Fit novelty on some examples, bool `[example]`."""
        rows = self.rows_at(mask)
        fit = novelty_fit(ensemble, 0 if rows is None else rows.shape[-1])
        labels = None if self.labels is None else self.labels[mask]
        fit.add_(self.summaries[mask], rows, labels)
        fit.add_columns_(self.columns_at(mask.nonzero().flatten()))

        def add_proxies() -> None:
            if not self.far:  # all fits share them: they only forbid terms
                made = proxies_of(self.source).items()
                self.far.update({n: list(summaries_of(ensemble, d, n, False)) for n, d in made})
            for name, batches in self.far.items():
                for found in batches:
                    fit.add_ood_(name, found["summaries"], found.get("logits"))

        return finished(ensemble, fit, self.source, add_proxies=add_proxies)


def figures_of(name: str, outputs: Outputs, held_out: Tensor, tags: Sequence[str]) -> Results:
    """Return the figures of some outputs on held-out examples, with intervals."""
    task, text, targets, sigma = outputs.task, outputs.text, outputs.targets, outputs.sigma
    assert targets is not None
    kept = held_out[text].nonzero().flatten()
    parts = [
        columns_of(
            ModelRun(
                outputs.members[rows],
                targets[rows],
                sigma=None if sigma is None else sigma[rows],
                text=text[rows],
            ),
            scores=[task.default_score],
            task=task,
            names=tags,
        )
        for rows in outputs.parts(kept)
    ]
    examples = {"id": {key: torch.cat([part[key] for part in parts]) for key in parts[0]}}
    settings = {
        "scores": [task.default_score],
        "members": outputs.members.shape[1],
        "classes": outputs.members.shape[2],
        "examples": {"id": len(kept)},
        "temperature": None,
        "bootstrap": None,
        "seed": 0,
    }
    return results_of(examples, name=name, settings=settings)
