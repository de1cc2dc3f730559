"""Every name of the library that golden values need and that may change, in one place.

The golden values outlive changes of names. A field that moved is looked up here under both names,
so that values stored before a change can be compared with those computed after it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import hydra_ensembles as hydra

COLUMNS = (
    "probabilities",
    "confidence",
    "uncertainty",
    "mutual_information",
    "disagreement",
    "member_logits",
    "novelty",
    "novelty_score",
)
DECISIONS = {"answer": 0, "unsure": 1, "new": 2}
SCORES = ("msp", "entropy", "gen", "max-logit", "energy", "mutual-information", "mcm")


def array(value: Any) -> np.ndarray:
    """Return a tensor, array or list as a contiguous numpy array."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    return np.ascontiguousarray(value)


def decisions(value: Any) -> np.ndarray:
    """Return decisions as numbers, whether they are given as numbers or as words."""
    found = array(value)
    if found.dtype.kind in "iu":
        return found.astype(np.int64)
    return np.vectorize(DECISIONS.__getitem__, otypes=[np.int64])(found)


def class_index(answer: Any) -> Any:
    """Return the most probable class of each example as a number."""
    return answer.class_index if hasattr(answer, "class_index") else answer.label


def columns(answer: Any) -> dict[str, np.ndarray]:
    """Return what an ensemble or an exported program said about a batch; skip what is not fitted.

    Where the answer has rows, they must hold the same values.
    """
    found = {
        name: array(value) for name in COLUMNS if (value := getattr(answer, name, None)) is not None
    }
    found["class_index"] = array(class_index(answer)).astype(np.int64)
    if answer.decision is not None:
        found["decision"] = decisions(answer.decision)
    if hasattr(answer, "rows") and found["class_index"].ndim == 1:
        _check_rows(answer.rows(), found)
    return found


def _check_rows(rows: list[dict[str, Any]], found: dict[str, np.ndarray]) -> None:
    assert len(rows) == len(found["class_index"]), "as many rows as examples"
    for number, row in enumerate(rows):
        said = {name: value for name, value in row.items() if name in found and value is not None}
        said["class_index"] = row.get("class", row["label"])
        for name, value in said.items():
            told = decisions(value) if name == "decision" else array(value)
            np.testing.assert_allclose(
                told, found[name][number], rtol=1e-6, atol=1e-6, err_msg=f"row {number}, {name}"
            )


def calibrate_(ensemble: Any, temperature: float, member_temperatures: list[float]) -> None:
    """Set the temperature of all members and those of each."""
    ensemble.temperature = temperature
    ensemble.member_temperatures = member_temperatures


def temperatures(ensemble: Any) -> np.ndarray:
    """Return the temperature of all members, then those of each."""
    return np.array([ensemble.temperature, *ensemble.member_temperatures])


def uncertainty_by_score(ensemble: Any, batch: Any) -> np.ndarray:
    """Return the uncertainty by every score, `[score, example]`; the ensemble keeps its own."""
    before, found = ensemble.score, []
    for name in SCORES:
        ensemble.score = name
        found.append(array(ensemble.predict(batch).uncertainty))
    ensemble.score = before
    return np.stack(found)


def thresholds(policy: Any) -> np.ndarray:
    """Return the thresholds of a policy: of uncertainty, then of novelty."""
    return np.array([policy.threshold, policy.novelty_threshold])


def forward_logits(ensemble: Any, batch: Any) -> np.ndarray:
    """Call an ensemble as its host is called and return the logits of the answer."""
    with torch.no_grad():
        output = ensemble(**batch) if isinstance(batch, dict) else ensemble(batch)
    return array(getattr(output, "logits", output))


def counted(ensemble: Any, batch: Any) -> np.ndarray:
    """Return the counted cost: of the whole model, then the multiply-adds of each layer."""
    cost = hydra.cost(ensemble, batch)
    whole = [cost.multiply_adds, cost.parameters, cost.bytes_on_disk, cost.activation_bytes]
    return np.array([*whole, *(layer.multiply_adds for layer in cost.layers)], dtype=np.int64)


def table(rows: Any) -> np.ndarray:
    """Return a mask or a table of scores as one row of numbers, layer by layer."""
    found = np.concatenate([array(row) for row in rows])
    return found.astype(np.int64) if found.dtype.kind == "b" else found


def effects(model: nn.Module, **options: Any) -> Any:
    """Search a circuit and return it with the harm of removing each head (`mask`, `effects`)."""
    return hydra.find_circuit(model, effects=True, **options)


def tiny_vit() -> nn.Module:
    """Return the small Vision Transformer of the demo, seeded."""
    from hydra_ensembles.hosts.tiny_vit import TinyViT

    return TinyViT(seed=0)


def load_exported(folder: Any) -> Any:
    """Load an exported folder by the runtime, which needs no torch."""
    from hydra_ensembles import runtime

    return runtime.load(folder, threads=1)
