"""Fair tables: metrics, `evaluate`, its `Results`, intervals and paired comparisons.

Names are loaded when first used: torchmetrics alone takes longer to import than this library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .bootstrap import Comparison, compare
    from .diversity import Disagreement, MutualInformation, PairwiseKL
    from .evaluator import evaluate
    from .feature_detectors import evaluate_features
    from .metrics_classification import ECE, NLL, Accuracy, AdaptiveECE, Brier
    from .metrics_ood import AUPR, AUROC, FPR95, FPR95IDPositive
    from .metrics_selective import AUGRC, AURC, CoverageAtRisk, ExcessAURC
    from .result_tables import compare_table
    from .results import Results

_HOMES = {
    "bootstrap": ("Comparison", "compare"),
    "diversity": ("Disagreement", "MutualInformation", "PairwiseKL"),
    "evaluator": ("evaluate",),
    "feature_detectors": ("evaluate_features",),
    "metrics_classification": ("ECE", "NLL", "Accuracy", "AdaptiveECE", "Brier"),
    "metrics_ood": ("AUPR", "AUROC", "FPR95", "FPR95IDPositive"),
    "metrics_selective": ("AUGRC", "AURC", "CoverageAtRisk", "ExcessAURC"),
    "results": ("Results",),
    "result_tables": ("compare_table",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AUGRC",
    "AUPR",
    "AURC",
    "AUROC",
    "ECE",
    "FPR95",
    "NLL",
    "Accuracy",
    "AdaptiveECE",
    "Brier",
    "Comparison",
    "CoverageAtRisk",
    "Disagreement",
    "ExcessAURC",
    "FPR95IDPositive",
    "MutualInformation",
    "PairwiseKL",
    "Results",
    "compare",
    "compare_table",
    "evaluate",
    "evaluate_features",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME_OF[name]}", __name__), name)
