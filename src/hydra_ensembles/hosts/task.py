"""What a model was set up to answer, as far as its config says."""

from __future__ import annotations

from typing import Any


def other_task(model: Any) -> str | None:
    """Say what a model does if its answers are no class probabilities, which members average."""
    config = getattr(model, "config", None)
    problem = getattr(config, "problem_type", None)
    if problem in ("multi_label_classification", "regression"):
        return str(problem)
    if getattr(config, "num_labels", 2) == 1 and hasattr(model, "classifier"):
        return "regression (one label)"
    return None
