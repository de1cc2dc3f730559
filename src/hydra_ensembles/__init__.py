"""A pretrained transformer in, one fused ensemble out: at about the cost of one, it knows when it
does not know.

The names below are the library. They are loaded when first used, so that importing is quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .cost import Cost as Cost
    from .cost import cost as cost
    from .ensemble import HydraEnsemble as HydraEnsemble
    from .ensemble import fuse as fuse
    from .errors import HydraError as HydraError
    from .evaluation import Results as Results
    from .evaluation import compare as compare
    from .evaluation import evaluate as evaluate
    from .fusion import verify as verify
    from .heads import gate as gate
    from .heads import prune_heads_ as prune_heads_
    from .masks import HeadMask as HeadMask
    from .masks import HeadScores as HeadScores
    from .models import Family as Family
    from .models import ZeroShotClassifier as ZeroShotClassifier
    from .models import explain as explain
    from .models import register_family as register_family
    from .uncertainty import Prediction as Prediction

_NAMES = {
    "Cost": "cost",
    "Family": "models",
    "HeadMask": "masks",
    "HeadScores": "masks",
    "HydraEnsemble": "ensemble",
    "HydraError": "errors",
    "Prediction": "uncertainty",
    "Results": "evaluation",
    "ZeroShotClassifier": "models",
    "compare": "evaluation",
    "cost": "cost",
    "evaluate": "evaluation",
    "explain": "models",
    "fuse": "ensemble",
    "gate": "heads",
    "prune_heads_": "heads",
    "register_family": "models",
    "verify": "fusion",
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
