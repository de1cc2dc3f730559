"""A pretrained transformer in, one fused ensemble out: at about the cost of one, it knows when it
does not know.

The names below are the library; `hydra_ensembles.research` has what papers need besides. They are
loaded when first used, so that importing is quick. No submodule has the name of a public function:
importing it would hide the function.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from .builder import build as build
    from .builder import replay as replay
    from .costs import Cost as Cost
    from .costs import cost as cost
    from .criteria import score_heads as score_heads
    from .errors import HydraError as HydraError
    from .evaluation import Results as Results
    from .evaluation import compare as compare
    from .evaluation import evaluate as evaluate
    from .evaluation.latency import benchmark as benchmark
    from .fusion import HydraEnsemble as HydraEnsemble
    from .fusion import fit_calibrator as fit_calibrator
    from .fusion import fit_policy as fit_policy
    from .fusion import fit_sets as fit_sets
    from .fusion import fuse as fuse
    from .fusion import load as load
    from .fusion import save as save
    from .fusion import verify as verify
    from .heads import HeadMask as HeadMask
    from .heads import HeadScores as HeadScores
    from .heads import UnitMask as UnitMask
    from .heads import gate as gate
    from .heads import prune_heads_ as prune_heads_
    from .hosts import Family as Family
    from .hosts import PromptClassifier as PromptClassifier
    from .hosts import ZeroShotClassifier as ZeroShotClassifier
    from .hosts import explain as explain
    from .hosts import register_family as register_family
    from .integrations.pipelines import pipeline as pipeline
    from .prediction import Prediction as Prediction
    from .prediction_sets import Sets as Sets
    from .refit import fold as fold
    from .refit import prune as prune
    from .report.page import write_report as write_report
    from .search.headmap import find_circuit as find_circuit
    from .serving.exporter import export as export
    from .training import distill as distill
    from .training import finetune as finetune
    from .training import make_teachers as make_teachers
    from .uncertainty import Drift as Drift
    from .uncertainty import Policy as Policy

# the same lines for Python, in the same order (tests/test_rooms.py compares them)
_NAMES = {
    "build": "builder",
    "replay": "builder",
    "Cost": "costs",
    "cost": "costs",
    "score_heads": "criteria",
    "HydraError": "errors",
    "Results": "evaluation",
    "compare": "evaluation",
    "evaluate": "evaluation",
    "benchmark": "evaluation.latency",
    "HydraEnsemble": "fusion",
    "fit_calibrator": "fusion",
    "fit_policy": "fusion",
    "fit_sets": "fusion",
    "fuse": "fusion",
    "load": "fusion",
    "save": "fusion",
    "verify": "fusion",
    "HeadMask": "heads",
    "HeadScores": "heads",
    "UnitMask": "heads",
    "gate": "heads",
    "prune_heads_": "heads",
    "Family": "hosts",
    "PromptClassifier": "hosts",
    "ZeroShotClassifier": "hosts",
    "explain": "hosts",
    "register_family": "hosts",
    "pipeline": "integrations.pipelines",
    "Prediction": "prediction",
    "Sets": "prediction_sets",
    "fold": "refit",
    "prune": "refit",
    "write_report": "report.page",
    "find_circuit": "search.headmap",
    "export": "serving.exporter",
    "distill": "training",
    "finetune": "training",
    "make_teachers": "training",
    "Drift": "uncertainty",
    "Policy": "uncertainty",
}

__all__ = sorted(_NAMES)


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_NAMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
