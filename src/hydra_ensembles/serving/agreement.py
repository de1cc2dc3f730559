"""Compare exported programs with the ensemble, from their files, on the same inputs."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import VerificationError
from ..fusion import HydraEnsemble
from ..runtime import load
from ..runtime.contract import read_contract
from .export_example import Example
from .graph import outputs_of
from .program import load_program
from .rules import Rule

BATCHES = (1, 3, 17)
EXACT = ("probabilities", "uncertainty", "mutual_information", "member_logits")
"""Outputs that must agree to the tolerance; the others follow from them by comparisons."""

OTHERWISE = 0.25
"""Share of decisions from which on a program with 8-bit weights is warned of."""

Arrays = dict[str, np.ndarray]


def compare(
    ensemble: HydraEnsemble, inputs: Example, rule: Rule, folder: Path, tolerance: float
) -> dict[str, dict[str, float]]:
    """Return the largest difference by program and output; raise when a program is wrong.

    Programs with 8-bit weights are measured, not refused; a warning says when they decide
    otherwise.
    """
    contract = read_contract(folder)
    expected = [_expected(ensemble, inputs, rule, size) for size in BATCHES]
    ranks = None if ensemble.novelty is None else ensemble.novelty.sums.values.shape[1]
    found = {}
    for kind in contract.programs:
        run: Any = load_program(folder) if kind == "torch" else load(folder, program=kind).run
        parts: list[dict[str, float]] = []
        for size, answer in zip(BATCHES, expected, strict=True):
            outputs = run({name: t.numpy() for name, t in inputs.rows(size).items()})
            if kind != "int8":
                check(outputs, answer, rule, tolerance=tolerance, ranks=ranks, what=kind)
            parts.append(differences(outputs, answer))
        found[kind] = {name: max(part[name] for part in parts) for name in parts[0]}
        if kind == "int8" and parts[-1]["decision"] > OTHERWISE:
            warnings.warn(
                f"The 8-bit program decides otherwise than the ensemble on "
                f"{parts[-1]['decision']:.0%} of the example. Compare both on data of your own "
                "before you use it, or use model.onnx.",
                stacklevel=5,
            )
    return found


def _expected(ensemble: HydraEnsemble, inputs: Example, rule: Rule, size: int) -> Arrays:
    answer = ensemble.predict(inputs.batch(inputs.rows(size))).cpu()
    outputs = outputs_of(answer)
    decision = rule(outputs["uncertainty"], outputs.get("novelty_score"))
    outputs["decision"] = decision if answer.code is None else answer.code
    outputs["abstain"] = outputs["decision"] != 0
    return {name: tensor.numpy() for name, tensor in outputs.items()}


def differences(outputs: Arrays, expected: Arrays) -> dict[str, float]:
    """Return every output's largest difference; of labels and flags, the share that differs."""
    result = {}
    for name, array in expected.items():
        got = outputs[name]
        if array.dtype.kind == "f":
            apart = np.abs(got.astype(np.float64) - array)
            result[name] = float(apart[np.isfinite(apart)].max(initial=0.0))
        else:
            result[name] = float((got != array).mean())
    return result


def check(
    outputs: Arrays,
    expected: Arrays,
    rule: Rule,
    *,
    tolerance: float,
    ranks: int | None,
    what: str,
) -> None:
    """Raise `VerificationError` unless outputs are those of the ensemble.

    Novelty is a rank among known examples: where a term lies within rounding of a known example's,
    its rank may move by one, so two ranks are allowed. A label may differ where two classes tie
    within the tolerance, a decision where a value is that close to its threshold.
    """
    for name, array in expected.items():
        if outputs[name].shape != array.shape or outputs[name].dtype != array.dtype:
            raise VerificationError(
                f"The {what} program gives {name} as {outputs[name].dtype} "
                f"{list(outputs[name].shape)}; expected {array.dtype} {list(array.shape)}."
            )
    for name in EXACT:
        limit = tolerance * np.maximum(1.0, np.abs(expected[name]))
        _hold(np.abs(outputs[name] - expected[name]) <= limit, outputs, expected, name, what)
    top = np.take_along_axis(expected["probabilities"], outputs["label"][..., None], -1)[..., 0]
    _hold(top >= expected["probabilities"].max(-1) - tolerance, outputs, expected, "label", what)
    if ranks is not None and "novelty" in expected:
        step = 2 / (ranks + 1) + tolerance
        near = np.abs(outputs["novelty"] - expected["novelty"]) <= step
        _hold(near, outputs, expected, "novelty", what)
    for name in ("decision", "abstain"):
        same = (outputs[name] == expected[name]) | _on_the_line(expected, outputs, rule, tolerance)
        _hold(same, outputs, expected, name, what)


def _on_the_line(expected: Arrays, outputs: Arrays, rule: Rule, tolerance: float) -> np.ndarray:
    """Tell where a value is so close to its threshold that rounding decides."""
    limits = {
        "uncertainty": rule.policy.threshold,
        "novelty_score": rule.policy.novelty_threshold,
    }
    near = np.zeros(expected["label"].shape, dtype=bool)
    for name, limit in limits.items():
        if name in expected:
            apart = np.abs(expected[name] - np.float32(limit))
            rounding = tolerance * max(1.0, abs(limit)) + np.abs(outputs[name] - expected[name])
            near |= apart <= rounding
    return near


def _hold(good: np.ndarray, outputs: Arrays, expected: Arrays, name: str, what: str) -> None:
    if not good.all():
        place = tuple(int(i) for i in np.argwhere(~good)[0])
        raise VerificationError(
            f"The {what} program does not answer as the ensemble does: {name} at {list(place)} is "
            f"{outputs[name][place]}, expected {expected[name][place]}. Nothing was exported."
        )
