"""A pretrained transformer in, one fused ensemble out: at about the cost of one, it knows when it
does not know.

The names below are the library. They are loaded when first used, so that importing is quick. No
submodule has the name of a public function: importing it would hide the function.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .builder import build as build
    from .costs import Cost as Cost
    from .costs import cost as cost
    from .criteria import score_heads as score_heads
    from .errors import HydraError as HydraError
    from .evaluation import Results as Results
    from .evaluation import compare as compare
    from .evaluation import compare_table as compare_table
    from .evaluation import evaluate as evaluate
    from .evaluation.latency import benchmark as benchmark
    from .fusion import HydraEnsemble as HydraEnsemble
    from .fusion import fit_policy as fit_policy
    from .fusion import fuse as fuse
    from .fusion import verify as verify
    from .heads import HeadMask as HeadMask
    from .heads import HeadScores as HeadScores
    from .heads import gate as gate
    from .heads import prune_heads_ as prune_heads_
    from .hosts import Family as Family
    from .hosts import PromptClassifier as PromptClassifier
    from .hosts import ZeroShotClassifier as ZeroShotClassifier
    from .hosts import explain as explain
    from .hosts import register_family as register_family
    from .integrations.pipelines import pipeline as pipeline
    from .prediction import Prediction as Prediction
    from .refit import fold as fold
    from .report.page import write_report as write_report
    from .research.cost_frontier import frontier as frontier
    from .research.head_roles import head_map as head_map
    from .research.head_roles import overlaps as overlaps
    from .research.pruning_sweep import prune_sweep as prune_sweep
    from .research.rivals import make_baseline as make_baseline
    from .research.shift_gap import pruning_shift_gap as pruning_shift_gap
    from .search.headmap import find_circuit as find_circuit
    from .serving.exporter import export as export
    from .training import distill as distill
    from .training import finetune as finetune
    from .training import make_teachers as make_teachers
    from .uncertainty import Drift as Drift
    from .uncertainty import Policy as Policy

_NAMES = {
    "Cost": "costs",
    "Drift": "uncertainty",
    "Family": "hosts",
    "HeadMask": "heads",
    "HeadScores": "heads",
    "HydraEnsemble": "fusion",
    "HydraError": "errors",
    "Policy": "uncertainty",
    "Prediction": "prediction",
    "PromptClassifier": "hosts",
    "Results": "evaluation",
    "ZeroShotClassifier": "hosts",
    "benchmark": "evaluation.latency",
    "build": "builder",
    "compare": "evaluation",
    "compare_table": "evaluation",
    "cost": "costs",
    "distill": "training",
    "evaluate": "evaluation",
    "explain": "hosts",
    "export": "serving.exporter",
    "find_circuit": "search.headmap",
    "finetune": "training",
    "fit_policy": "fusion",
    "fold": "refit",
    "frontier": "research.cost_frontier",
    "fuse": "fusion",
    "gate": "heads",
    "head_map": "research.head_roles",
    "make_baseline": "research.rivals",
    "make_teachers": "training",
    "overlaps": "research.head_roles",
    "pipeline": "integrations.pipelines",
    "prune_heads_": "heads",
    "prune_sweep": "research.pruning_sweep",
    "pruning_shift_gap": "research.shift_gap",
    "register_family": "hosts",
    "score_heads": "criteria",
    "verify": "fusion",
    "write_report": "report.page",
}

__all__ = sorted(_NAMES)


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f".{_NAMES[name]}", __name__), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("torch", __name__):
            raise
        from .errors import MissingDependencyError

        raise MissingDependencyError(
            f"{name} needs the whole library with torch, and this install has the runtime only "
            f"({error}). Install hydra-ensembles instead of hydra-ensembles-runtime."
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
