"""`prune_sweep`: quality of a model as more and more heads are pruned, by criterion."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._records import check_same_run, read_record, to_record
from .._tensors import model_fingerprint
from ..criteria import Criterion, as_criterion, ranked, score_heads
from ..criteria.criterion import Loss
from ..data import processes
from ..data.class_names import check_class_order
from ..data.loaders import check_reiterable
from ..data.model_runs import collect_logits
from ..data.progress import progress_bar
from ..data.splits import fingerprint, sample, split
from ..errors import HydraError, UnsupportedModelError
from ..evaluation.metrics import expected_calibration_error, negative_log_likelihood, ood_figures
from ..heads.gates import gate, prune_heads_
from ..heads.head_mask import HeadMask, HeadScores
from ..hosts import HostModel, host_model
from ..uncertainty import mean_probability, msp
from .pruning_sweep_results import (
    QUALITY,
    STABILITY,
    Outcome,
    PruneSweep,
    SweepPoint,
    mask_key,
    pack,
)

STATE = "measured.json"
CRITERIA = ("random", "magnitude", "taylor", "his", "entropy", "hies", "fisher")
RATIOS = (0.1, 0.2, 0.3, 0.5)


@processes.holds("folder")
def prune_sweep(
    model: nn.Module | HostModel,
    data: Iterable[Any],
    *,
    criteria: Sequence[str | Criterion] = CRITERIA,
    ratios: Sequence[float] = RATIOS,
    calibration: Iterable[Any] | None = None,
    calibration_examples: int = 32,
    draws: int = 5,
    seed: int = 0,
    ood: Mapping[str, Iterable[Any]] | None = None,
    held_out: Iterable[Any] | None = None,
    scope: str = "model",
    loss: Loss | None = None,
    folder: str | Path | None = None,
    progress: bool = True,
) -> PruneSweep:
    """Prune a model by each criterion to each ratio and measure what is left.

    Every calibration draw gives its own scores (one pass for all criteria) and masks; criteria
    with a `seed` get another one in each draw. Equal masks are measured once. Heads are removed
    physically where that is possible, which is the faster way to the same figures, and gated
    elsewhere; nothing is fine-tuned, and the model itself is not changed.

    Args:
        model: The host model.
        data: Labelled test data.
        criteria: Names or `Criterion`s; low entropy is what `entropy` keeps.
        ratios: Shares of the heads that are pruned.
        calibration: Data to draw calibration examples from; by default a quarter of `data` is
            split off for that, stratified, and the figures are about the rest.
        calibration_examples: Examples of a draw, stratified by label.
        draws: Number of calibration draws.
        seed: Of the draws.
        ood: Outliers by name; adds `ood/<name>/AUROC` and their mean.
        held_out: Labelled data for `hies` with `alpha="auto"`.
        scope: `"model"` ranks all heads together (as HIES does), `"layer"` within each layer.
        loss: See `score_heads`.
        folder: Keeps scores and measured masks, so that a stopped sweep resumes.
        progress: Show bars on a terminal.
    """
    host = host_model(model)
    wanted = [as_criterion(criterion) for criterion in criteria]
    if not wanted or not ratios or draws < 1:
        raise HydraError("A sweep needs at least one criterion, one ratio and one draw.")
    bad = [ratio for ratio in ratios if not 0 <= ratio < 1]
    if bad:
        raise HydraError(f"Pruning ratio {bad[0]}: expected a share of the heads in [0, 1).")
    check_class_order(host.model, data, seed=seed)
    if calibration is None:
        parts = split(data, {"calibration": 0.25, "test": 0.75}, seed=seed)
        calibration, data = parts["calibration"], parts["test"]
    for name, source in {"data": data, "calibration": calibration, **(ood or {})}.items():
        check_reiterable(source, name=name)

    measure = _Measure(host, data, ood or {}, Path(folder) / STATE if folder else None)
    tables: dict[str, list[HeadScores]] = {criterion.label: [] for criterion in wanted}
    points, masks = [], {}
    for draw in progress_bar(
        range(draws), description="calibration", enabled=progress, total=draws, unit="draws"
    ):
        examples = sample(calibration, calibration_examples, seed=seed + draw)
        seeded = {criterion.label: _reseeded(criterion, draw) for criterion in wanted}
        found = measure.scores(examples, list(seeded.values()), loss, held_out)
        for label, criterion in seeded.items():
            scores = found[criterion.label]
            tables[label].append(scores)
            for ratio in ratios:
                mask = ranked(criterion, scores).top_k(1 - float(ratio), scope=scope)
                masks[mask_key(mask)] = mask
                points.append(SweepPoint(label, float(ratio), draw, mask_key(mask)))

    for key, mask in progress_bar(
        masks.items(), description="pruned models", enabled=progress, total=len(masks), unit="masks"
    ):
        measure(key, mask)
    means = {}
    for label, drawn in tables.items():
        rows = [torch.stack(row).mean(0) for row in zip(*drawn, strict=True)]
        means[label] = HeadScores(rows, name=label)
    return PruneSweep(
        model=host.name,
        examples=len(measure.labels),
        calibration_examples=calibration_examples,
        scope=scope,
        baseline=measure.baseline,
        points=points,
        outcomes={key: measure.outcomes[key] for key in masks},
        scores=means,
        score_names={label: [t.name for t in rows] for label, rows in tables.items()},
        lower_is_kept=[c.label for c in wanted if c.lower_is_kept],
    )


def _reseeded(criterion: Criterion, draw: int) -> Criterion:
    if any(f.name == "seed" for f in fields(criterion)):
        return replace(criterion, seed=criterion.seed + draw)  # type: ignore[attr-defined, call-arg]
    return criterion


@contextmanager
def pruned(host: HostModel, mask: HeadMask) -> Iterator[nn.Module]:
    """Yield a model without the pruned heads: a cut copy, or the gated host."""
    try:
        cut = prune_heads_(copy.deepcopy(host.model), mask)
    except UnsupportedModelError:  # a parameter across heads, or queries that share keys
        with gate(host, mask):
            yield host.model
    else:
        yield cut


class _Measure:
    """Score heads and measure masks on the same data, each once, and keep both in a file."""

    def __init__(
        self,
        host: HostModel,
        data: Iterable[Any],
        ood: Mapping[str, Iterable[Any]],
        path: Path | None,
    ) -> None:
        self.host, self.data, self.ood, self.path = host, data, ood, path
        logits, self.labels = self._logits(host.model, data, "data")
        self.predicted = mean_probability(logits).argmax(-1)
        self.baseline = self._figures(host.model, logits)[0]
        self.outcomes: dict[str, Outcome] = {}
        self.tables: dict[str, str] = {}
        self.settings: dict[str, Any] = {}
        if path is not None:
            self.settings = {
                "model": model_fingerprint(host.model),
                "data": fingerprint(data),
                "ood": {name: fingerprint(outliers) for name, outliers in ood.items()},
            }
        if path is not None and path.exists():
            kept = read_record("PruneSweepState", path)
            check_same_run(path, kept["settings"], self.settings)
            self.outcomes = {key: Outcome(**one) for key, one in kept["outcomes"].items()}
            self.tables = kept["scores"]

    def scores(
        self,
        examples: Iterable[Any],
        criteria: list[Criterion],
        loss: Loss | None,
        held_out: Iterable[Any] | None,
    ) -> dict[str, HeadScores]:
        """Return the scores of a calibration draw by label."""
        keys = {}
        if self.path is not None and loss is None:  # a user's loss has no fingerprint
            read = fingerprint(examples) + ("" if held_out is None else fingerprint(held_out))
            keys = {criterion.label: f"{criterion!r} {read}" for criterion in criteria}
            if all(key in self.tables for key in keys.values()):
                return {c: HeadScores.from_json(self.tables[key]) for c, key in keys.items()}
        found = score_heads(
            self.host, examples, criterion=criteria, loss=loss, held_out=held_out, progress=False
        )
        self.tables.update({key: found[label].to_json() for label, key in keys.items()})
        self._write()
        return found

    def __call__(self, key: str, mask: HeadMask) -> None:
        if key in self.outcomes:
            return
        with pruned(self.host, mask) as model:
            logits, _ = self._logits(model, self.data, "data")
            figures, right, same = self._figures(model, logits)
        self.outcomes[key] = Outcome(figures, pack(right), pack(same))
        self._write()

    def _logits(self, model: nn.Module, data: Iterable[Any], name: str) -> tuple[Tensor, Tensor]:
        logits, labels = collect_logits(model, data, name=name, need_labels=True)
        assert labels is not None
        return logits, labels

    def _figures(self, model: nn.Module, logits: Tensor) -> tuple[dict[str, float], Tensor, Tensor]:
        confidence, predicted = mean_probability(logits).max(-1)
        right, same = predicted == self.labels, predicted == self.predicted
        figures = {
            QUALITY: float(right.double().mean()),
            STABILITY: float(same.double().mean()),
            "cls/NLL": float(negative_log_likelihood(logits, self.labels).double().mean()),
            "cal/ECE": float(expected_calibration_error(confidence, right)),
        }
        aurocs = []
        for name, outliers in self.ood.items():
            theirs, _ = collect_logits(model, outliers, name=name)
            scores = [msp(answers) for answers in (logits, theirs)]
            aurocs.append(ood_figures(*scores, name=name)["AUROC"])
            figures[f"ood/{name}/AUROC"] = aurocs[-1]
        if aurocs:
            figures["ood/mean/AUROC"] = sum(aurocs) / len(aurocs)
        return figures, right, same

    def _write(self) -> None:
        if self.path is not None:
            outcomes = {name: asdict(outcome) for name, outcome in self.outcomes.items()}
            kept = {"settings": self.settings, "outcomes": outcomes, "scores": self.tables}
            to_record("PruneSweepState", kept, self.path, seal=True)
