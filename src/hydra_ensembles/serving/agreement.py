"""Compare exported programs with the ensemble, from their files, on the same inputs."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np

from ..errors import VerificationError
from ..fusion import HydraEnsemble
from ..runtime import load
from ..runtime.contract import read_contract
from ..uncertainty import Policy
from .export_example import Example
from .graph import outputs_of

BATCHES = (1, 3, 17)
RANKS = ("novelty", "novelty_score")
"""Numbers that need not agree to the tolerance: ranks among known examples."""

DIFFERENT = 0.25
"""Warn when a program with 8-bit weights decides differently on more than this share."""

Arrays = dict[str, np.ndarray]


def compare(
    ensemble: HydraEnsemble, inputs: Example, policy: Policy, folder: Path, tolerance: float
) -> dict[str, dict[str, float]]:
    """Return the largest difference by program and output; raise when a program is wrong.

    Programs with 8-bit weights are measured, not refused; a warning says when they decide
    differently.
    """
    expected = []
    for size in BATCHES:
        outputs = outputs_of(ensemble.predict(inputs.batch(inputs.rows(size))).cpu(), policy)
        expected.append({name: tensor.numpy() for name, tensor in outputs.items()})
    ranks = None if ensemble.novelty is None else ensemble.novelty.sums.values.shape[1]
    largest = {}
    for kind in read_contract(folder).programs:
        program = load(folder, program=kind)
        parts: list[dict[str, float]] = []
        for size, answer in zip(BATCHES, expected, strict=True):
            arrays = program.run({name: t.numpy() for name, t in inputs.rows(size).items()})
            if kind != "int8":
                check(arrays, answer, policy, tolerance=tolerance, ranks=ranks, what=kind)
            parts.append(differences(arrays, answer))
        largest[kind] = {name: max(part[name] for part in parts) for name in parts[0]}
        if kind == "int8" and parts[-1]["decision"] > DIFFERENT:
            warnings.warn(
                f"The 8-bit program decides differently from the ensemble on "
                f"{parts[-1]['decision']:.0%} of the example. Compare both on your own data before "
                "you use it, or use model.onnx.",
                stacklevel=4,
            )
    return largest


def differences(outputs: Arrays, expected: Arrays) -> dict[str, float]:
    """Return every output's largest difference; for integers, the share that differs."""
    result = {}
    for name, array in expected.items():
        if array.dtype.kind == "f":
            apart = np.abs(outputs[name].astype(np.float64) - array)
            result[name] = float(apart[np.isfinite(apart)].max(initial=0.0))
        else:
            result[name] = float((outputs[name] != array).mean())
    return result


def check(
    outputs: Arrays,
    expected: Arrays,
    policy: Policy,
    *,
    tolerance: float,
    ranks: int | None,
    what: str,
) -> None:
    """Raise `VerificationError` unless outputs are those of the ensemble.

    Novelty is a rank among known examples: where a term lies within rounding of a known example's,
    its rank may move by one, so two ranks are allowed. A class may differ where two classes tie
    within the tolerance, a decision where a value is that close to its threshold.
    """

    def hold(name: str, good: np.ndarray) -> None:
        if not good.all():
            place = tuple(int(i) for i in np.argwhere(~good)[0])
            raise VerificationError(
                f"The {what} program does not answer as the ensemble does: {name} at {list(place)} "
                f"is {outputs[name][place]}, expected {expected[name][place]}. Nothing was "
                "exported."
            )

    for name, array in expected.items():
        if outputs[name].shape != array.shape or outputs[name].dtype != array.dtype:
            raise VerificationError(
                f"The {what} program gives {name} as {outputs[name].dtype} "
                f"{list(outputs[name].shape)}; expected {array.dtype} {list(array.shape)}."
            )
    for name, array in expected.items():
        if array.dtype.kind == "f" and name not in RANKS:
            allowed = tolerance * np.maximum(1.0, np.abs(array))
            hold(name, np.abs(outputs[name] - array) <= allowed)
    if "class" in expected:
        chances = expected["probabilities"]
        top = np.take_along_axis(chances, outputs["class"][..., None], -1)[..., 0]
        hold("class", top >= chances.max(-1) - tolerance)
    if "active" in expected:
        moved = outputs["probabilities"] != expected["probabilities"]  # across the threshold
        hold("active", (outputs["active"] == expected["active"]) | moved)
    for name in ("start", "end", "able"):
        if name in expected:
            hold(name, outputs[name] == expected[name])
    if ranks is not None and "novelty" in expected:
        step = 2 / (ranks + 1) + tolerance
        hold("novelty", np.abs(outputs["novelty"] - expected["novelty"]) <= step)
    on_the_line = np.zeros(expected["decision"].shape, dtype=bool)
    thresholds = {
        "uncertainty": policy.threshold,
        "novelty_score": policy.novelty_threshold,
    }
    for name, limit in thresholds.items():
        if name in expected:
            rounding = tolerance * max(1.0, abs(limit)) + np.abs(outputs[name] - expected[name])
            near = np.abs(expected[name] - np.float32(limit)) <= rounding
            # a token classifier has one novelty score per text, but one uncertainty per token
            on_the_line |= near.reshape(*near.shape, *[1] * (on_the_line.ndim - near.ndim))
    hold("decision", (outputs["decision"] == expected["decision"]) | on_the_line)
