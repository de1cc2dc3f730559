"""Coverage of sets and intervals over random splits of stored answers; EM and F1 of spans.

A split draws half of the test answers; sets are fitted to them (`choose_sets`, what `fit_sets`
calls) and judged on the other half. What was asked for is kept if the mean over splits is within
the binomial interval of one split's test half, narrowed by nothing: splits share their examples.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from hydra_ensembles import HeadMask, fuse
from hydra_ensembles.evaluation.task_metrics import answer_f1, exact_match
from hydra_ensembles.prediction import Prediction, as_numpy
from hydra_ensembles.prediction_sets import likely_spans
from hydra_ensembles.tasks import IGNORED, task_of
from hydra_ensembles.uncertainty.set_fit import choose_sets, threshold

from .other_tasks import HeldTask, SpanSet
from .task_figures import TASKS, Said
from .task_rows import Rows

SPLITS = 200
COVERAGE = 0.9
ROWS = {"single": ("single", False), "Deep Ensemble": ("Deep Ensemble", False)}
ROWS |= {"folded, members": ("folded", False)}
METHODS = {"goemotions": ("lac",), "stsb": ("plain", "normalised"), "wnut17": ("lac",)}


def answer_of(said: Said) -> tuple[Prediction, Tensor]:
    """Return stored answers as a prediction, and the labels; words are padded to texts."""
    outputs, labels = said.answering, said.labels
    inputs: dict[str, Any] = {}
    if "text" in said.tensors:
        sizes = torch.bincount(said.text).tolist()
        pad = torch.nn.utils.rnn.pad_sequence
        outputs = pad(outputs.split(sizes), batch_first=True).transpose(1, 2)
        labels = pad(labels.split(sizes), batch_first=True, padding_value=IGNORED)
        inputs = {"inputs": {"attention_mask": (labels != IGNORED).long()}}
    answer = said.task.answer(outputs.contiguous(), score=said.task.default_score, **inputs)
    new = {k: said.tensors[k] for k in ("novelty", "novelty_score") if k in said.tensors}
    return replace(answer, **new), labels


def covered(sets: Any, answer: Prediction, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the share of what is true that each text's set has, and the set's mean size.

    Texts in which nothing is true have all of it.
    """
    if "values" in answer:
        ends = torch.from_numpy(sets.intervals(answer))
        inside = (labels >= ends[..., 0]) & (labels <= ends[..., 1])
        return inside.double().mean(1), (ends[..., 1] - ends[..., 0]).mean(1)
    mask = torch.from_numpy(as_numpy(sets.mask(answer)))
    if labels.ndim == 2 and mask.ndim == 3:
        real = labels != IGNORED
        hit = mask.gather(-1, labels.clamp_min(0)[..., None])[..., 0] & real
        sizes = (mask.sum(-1) * real).sum(1) / real.sum(1)
        return hit.sum(1) / real.sum(1), sizes.double()
    true = labels.bool()
    share = (mask & true).sum(1) / true.sum(1).clamp_min(1)
    return share.masked_fill(~true.any(1), 1.0), mask.sum(1).double()


def coverage_of(task: HeldTask, rows: Rows) -> dict[str, Any]:
    """Return coverage and size by row and method: mean, 5 % and 95 % of the splits."""
    found: dict[str, Any] = {}
    for name, (row, student) in ROWS.items():
        if not rows.kept(row):
            continue
        said = Said(TASKS[task.name], rows.read(row, 0).sets["test"], student)
        answer, labels = answer_of(said)
        for method in METHODS[task.name]:
            shares, sizes, theirs = [], [], []
            for seed in range(SPLITS):
                order = torch.randperm(
                    len(labels), generator=torch.Generator().manual_seed(1000 + seed)
                )
                fit, test = order[: len(order) // 2], order[len(order) // 2 :]
                sets = choose_sets(
                    answer[fit], labels[fit], method=method, coverage=COVERAGE, seed=seed
                )
                inside, size = covered(sets, answer[test], labels[test])
                shares.append(float(inside.mean()))
                sizes.append(float(size.mean()))
                if (task.name, method) in MAPIE and seed < OTHERS:
                    theirs.append(MAPIE[task.name, method](answer, labels, fit, test))
            found[f"{name}, {method}"] = {
                "coverage": _spread(shares),
                "size": _spread(sizes),
                "texts": len(labels),
            }
            if theirs:  # on the same splits
                means = np.mean(sizes[:OTHERS]), np.mean(theirs)
                found[f"{name}, {method}"]["ours and MAPIE's"] = [round(float(x), 5) for x in means]
    return found


def mapie_labels(answer: Prediction, labels: Tensor, fit: Tensor, test: Tensor) -> float:
    """Return the mean number of labels that MAPIE keeps when it controls recall."""
    from mapie.risk_control import MultiLabelClassificationController

    chances = as_numpy(answer.probabilities).astype(float)
    controller = MultiLabelClassificationController(
        lambda given: given, risk="recall", target_level=COVERAGE
    )
    controller.calibrate(chances[fit], labels[fit].numpy().astype(int))
    return float(controller.predict(chances[test])[..., 0].sum(1).mean())


class GivenNumbers:
    """A regressor of scikit-learn whose inputs are its answers."""

    is_fitted_, n_features_in_ = True, 1

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def fit(self, x: Any, y: Any) -> GivenNumbers:
        """Learn nothing."""
        return self

    def predict(self, x: Any) -> Any:
        """Return the inputs."""
        return x[:, 0]


def mapie_width(answer: Prediction, labels: Tensor, fit: Tensor, test: Tensor) -> float:
    """Return the mean width of MAPIE's intervals by split conformal prediction."""
    from mapie.regression import SplitConformalRegressor

    values = as_numpy(answer.values).astype(float)
    made = SplitConformalRegressor(GivenNumbers(), confidence_level=COVERAGE, prefit=True)
    made.conformalize(values[fit], labels[fit, 0].numpy().astype(float))
    _, ends = made.predict_interval(values[test])
    return float((ends[:, 1] - ends[:, 0]).mean())


MAPIE = {("goemotions", "lac"): mapie_labels, ("stsb", "plain"): mapie_width}
OTHERS = 20
"""Splits on which MAPIE runs too."""


def _spread(values: list[float]) -> list[float]:
    """Return mean, 5 % and 95 %."""
    low, high = np.quantile(values, [0.05, 0.95])
    return [round(float(x), 5) for x in (np.mean(values), low, high)]


def keep_for_sets(folder: Path, task: HeldTask, rows: Rows) -> None:
    """Keep what a folded ensemble says about the test file: `outputs`, `labels`, `novelty`."""
    row = "folded" if rows.kept("folded") else "single"
    if not rows.kept(row):
        return
    test = rows.read(row, 0).sets["test"]
    found = {"outputs": test["logits"].float(), "labels": test["labels"]}
    if "text" in test:  # padded words, and which of them are real
        sizes = torch.bincount(test["text"]).tolist()
        pad = torch.nn.utils.rnn.pad_sequence
        found["outputs"] = pad(found["outputs"].split(sizes), batch_first=True).transpose(1, 2)
        found["labels"] = pad(found["labels"].split(sizes), batch_first=True, padding_value=IGNORED)
        found["mask"] = (found["labels"] != IGNORED).long()
    found |= {k: test[k] for k in ("novelty", "novelty_score") if k in test}
    folder.mkdir(parents=True, exist_ok=True)
    beside = folder / f".{task.name}.partial"
    save_file({k: v.contiguous() for k, v in found.items()}, beside)
    beside.replace(folder / f"{task.name}.safetensors")


# --- spans


@torch.no_grad()
def span_figures(task: HeldTask) -> dict[str, Any]:
    """Return exact match and F1 of the host of question answering on the other half of XQuAD."""
    host = task.host(0)
    model = fuse(host, [HeadMask.full(host)])
    questions = task.part("test").by_length()
    assert isinstance(questions, SpanSet) and questions.pairs and questions.labels
    said: list[str] = []
    likely: list[np.ndarray] = []
    right: list[float] = []
    labelled = iter(questions.batches(task.tokenizer, batch_size=25))
    for start in range(0, len(questions), 25):
        rows = range(start, min(start + 25, len(questions)))
        encoded = questions.encoded(task.tokenizer, rows)
        places = encoded.pop("offset_mapping")
        answer = model.predict({**encoded})
        batch = next(labelled)
        ends = zip(batch["start_positions"].tolist(), batch["end_positions"].tolist(), strict=True)
        numpy = answer.to_numpy()
        for place, true in enumerate(ends):
            spans = likely_spans(numpy, place, longest=task_of(model).most)
            scores = {(first, last): 1 - probability for first, last, probability in spans}
            likely.append(np.asarray(list(scores.values())))
            right.append(scores.get(true, np.inf))
        for row, offsets, first, last in zip(rows, places, answer.start, answer.end, strict=True):
            none = (int(first), int(last)) == (0, 0)
            text = questions.pairs[row][int(offsets[first][0]) : int(offsets[last][1])]
            said.append("" if none else text)
    true = [[text for text, _ in answers] for answers in questions.labels]

    def mean(judge: Callable[[str, list[str]], float]) -> float:
        return 100 * sum(judge(a, b) for a, b in zip(said, true, strict=True)) / len(said)

    return {
        "questions": len(said),
        "EM": round(mean(exact_match), 2),
        "F1": round(mean(answer_f1), 2),
        "coverage": span_coverage(likely, np.asarray(right)),
    }


def span_coverage(likely: list[np.ndarray], right: np.ndarray) -> dict[str, Any]:
    """Return coverage and size of sets of spans over the splits, by the thresholds of `fit_sets`.

    What is asked for is 90 %, or the next tenth that is 5 points below the share of questions whose
    right span is among the likeliest: more is refused.

    Args:
        likely: Scores of each question's likeliest spans.
        right: The right span's score; infinite where it is not among them.
    """
    reach = float(np.isfinite(right).mean())
    asked = min(COVERAGE, math.floor(10 * (reach - 0.05)) / 10)
    shares, sizes = [], []
    for seed in range(SPLITS):
        order = np.random.default_rng(1000 + seed).permutation(len(right))
        fit, test = order[: len(order) // 2], order[len(order) // 2 :]
        limit, _ = threshold(right[fit], fit, asked)
        shares.append(float((right[test] <= limit).mean()))
        sizes.append(float(np.mean([(likely[row] <= limit).sum() for row in test])))
    return {
        "asked": asked,
        "reach": round(reach, 5),
        "coverage": _spread(shares),
        "size": _spread(sizes),
    }
