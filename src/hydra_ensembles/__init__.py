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
    from .baselines import make_baseline as make_baseline
    from .builder import build as build
    from .builder import replay as replay
    from .circuits.head_map import head_map as head_map
    from .circuits.head_map import overlaps as overlaps
    from .circuits.headmap import find_circuit as find_circuit
    from .circuits.headmap import find_effects as find_effects
    from .circuits.select import EnsembleObjective as EnsembleObjective
    from .cost_frontier import frontier as frontier
    from .counting import Cost as Cost
    from .counting import cost as cost
    from .criteria import score_heads as score_heads
    from .ensemble import HydraEnsemble as HydraEnsemble
    from .errors import HydraError as HydraError
    from .evaluation import Results as Results
    from .evaluation import compare as compare
    from .evaluation import compare_table as compare_table
    from .evaluation import evaluate as evaluate
    from .evaluation.benchmark import benchmark as benchmark
    from .evaluation.prune_sweep import prune_sweep as prune_sweep
    from .evaluation.shift_gap import pruning_shift_gap as pruning_shift_gap
    from .fusing import fuse as fuse
    from .fusion import verify as verify
    from .heads import gate as gate
    from .heads import prune_heads_ as prune_heads_
    from .masks import HeadMask as HeadMask
    from .masks import HeadScores as HeadScores
    from .models import Family as Family
    from .models import ZeroShotClassifier as ZeroShotClassifier
    from .models import explain as explain
    from .models import register_family as register_family
    from .report.html import write_report as write_report
    from .selective import Abstention as Abstention
    from .selective import fit_abstention as fit_abstention
    from .training import average_weights as average_weights
    from .training import finetune as finetune
    from .training import finetune_branch as finetune_branch
    from .uncertainty import Prediction as Prediction

_NAMES = {
    "Abstention": "selective",
    "Cost": "counting",
    "EnsembleObjective": "circuits.select",
    "Family": "models",
    "HeadMask": "masks",
    "HeadScores": "masks",
    "HydraEnsemble": "ensemble",
    "HydraError": "errors",
    "Prediction": "uncertainty",
    "Results": "evaluation",
    "ZeroShotClassifier": "models",
    "benchmark": "evaluation.benchmark",
    "build": "builder",
    "compare": "evaluation",
    "compare_table": "evaluation",
    "cost": "counting",
    "evaluate": "evaluation",
    "explain": "models",
    "find_circuit": "circuits.headmap",
    "find_effects": "circuits.headmap",
    "average_weights": "training",
    "finetune": "training",
    "finetune_branch": "training",
    "fit_abstention": "selective",
    "frontier": "cost_frontier",
    "fuse": "fusing",
    "gate": "heads",
    "head_map": "circuits.head_map",
    "make_baseline": "baselines",
    "overlaps": "circuits.head_map",
    "prune_heads_": "heads",
    "prune_sweep": "evaluation.prune_sweep",
    "pruning_shift_gap": "evaluation.shift_gap",
    "register_family": "models",
    "replay": "builder",
    "score_heads": "criteria",
    "verify": "fusion",
    "write_report": "report.html",
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
