"""HeadMap: layer-conditioned search for the heads that carry an objective (Wang et al., 2025).

From the bottom layer to the top, each head of a layer is zeroed (with what the search has fixed
below). Its harm is how much the objective rises, and the layer's top-k heads by harm join the
circuit. What is below a layer is fixed, so its hidden states are cached (`trunk_cache.py`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, overload

import torch
from torch import nn

from .._records import read_record, to_record
from .._tensors import model_fingerprint
from ..costs.budget import Budget
from ..data import processes
from ..data.batches import without_labels
from ..data.class_names import check_class_order
from ..data.memory import in_plain_words
from ..data.splits import fingerprint
from ..errors import MaskError
from ..heads.head_mask import HeadMask, HeadScores, Keep, keep_counts
from ..hosts import HostModel, host_model
from ..hosts.host_data import data_for
from ..registry import check_name
from ..uncertainty import Score
from .layer_search import LayerSearch
from .objectives import as_objective, average_of
from .search_data import search_sets
from .search_state import SearchState
from .trunk_cache import CACHE_BYTES

Condition = Literal["knockout", "none", "keep"]
CONDITIONS = ("knockout", "none", "keep")


@dataclass(frozen=True)
class Circuit:
    """The result of a search.

    Attributes:
        mask: The circuit: heads to keep.
        effects: Each head's harm, with its standard error over examples.
        baseline: The objective before any head of the layer is zeroed, by layer.
        objective, condition: What was searched.
        settings: Everything that the result depends on.
    """

    mask: HeadMask
    effects: HeadScores
    baseline: tuple[float, ...]
    objective: str
    condition: str
    settings: dict[str, Any] = field(default_factory=dict)

    def margins(self) -> list[float | None]:
        """Return, by layer, the standard errors between the last kept and first pruned head."""
        gaps: list[float | None] = []
        assert self.effects.standard_error is not None
        for mask, row, error in zip(
            self.mask, self.effects, self.effects.standard_error, strict=True
        ):
            if bool(mask.all()) or not bool(mask.any()):
                gaps.append(None)
                continue
            last_in = torch.where(mask, row, torch.inf).argmin()
            first_out = torch.where(mask, -torch.inf, row).argmax()
            spread = float((error[last_in] ** 2 + error[first_out] ** 2).sqrt())
            gap = float(row[last_in] - row[first_out])
            gaps.append(gap / spread if spread else (float("inf") if gap else 0.0))
        return gaps

    def __str__(self) -> str:
        lines = [f"Circuit for {self.objective} ({self.condition}): {self.mask.total_kept} heads"]
        assert self.effects.standard_error is not None
        for layer, (mask, row, error, margin) in enumerate(
            zip(self.mask, self.effects, self.effects.standard_error, self.margins(), strict=True)
        ):
            heads = "  ".join(
                f"{'■' if kept else '·'} {value:+.4f} ± {spread:.4f}"
                for kept, value, spread in zip(
                    mask.tolist(), row.tolist(), error.tolist(), strict=True
                )
            )
            noise = "  (within noise)" if margin is not None and margin < 2 else ""
            if layer not in self.settings.get("layers", range(len(self.mask))):
                heads, noise = "  ".join("■" for _ in mask), "  (not searched)"
            lines.append(f"  {layer:>2}  {heads}{noise}")
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return plain JSON."""
        return to_record(
            "Circuit",
            {
                "mask": json.loads(self.mask.to_json()),
                "effects": json.loads(self.effects.to_json()),
                "baseline": list(self.baseline),
                "objective": self.objective,
                "condition": self.condition,
                "settings": self.settings,
            },
        )

    @classmethod
    def from_json(cls, text: str) -> Circuit:
        """Read what `to_json` wrote."""
        data = read_record("Circuit", text)
        return cls(
            HeadMask.from_json(json.dumps(data["mask"])),
            HeadScores.from_json(json.dumps(data["effects"])),
            tuple(data["baseline"]),
            data["objective"],
            data["condition"],
            data["settings"],
        )


@overload
def find_circuit(
    model: nn.Module | HostModel,
    *,
    id: Any,
    ood: Any = None,
    shift: Any = None,
    objective: Any = "id-loss",
    keep: Keep | None = None,
    max_cost: float | None = None,
    condition: Condition = "knockout",
    layers: Sequence[int] | None = None,
    score: str | Score = "msp",
    effects: Literal[False] = False,
    folder: str | os.PathLike[str] | None = None,
    cache_bytes: int = CACHE_BYTES,
    progress: bool = True,
) -> HeadMask: ...
@overload
def find_circuit(
    model: nn.Module | HostModel,
    *,
    id: Any,
    ood: Any = None,
    shift: Any = None,
    objective: Any = "id-loss",
    keep: Keep | None = None,
    max_cost: float | None = None,
    condition: Condition = "knockout",
    layers: Sequence[int] | None = None,
    score: str | Score = "msp",
    effects: Literal[True],
    folder: str | os.PathLike[str] | None = None,
    cache_bytes: int = CACHE_BYTES,
    progress: bool = True,
) -> Circuit: ...
@in_plain_words()
@processes.holds("folder")
def find_circuit(
    model: nn.Module | HostModel,
    *,
    id: Any,
    ood: Any = None,
    shift: Any = None,
    objective: Any = "id-loss",
    keep: Keep | None = None,
    max_cost: float | None = None,
    condition: Condition = "knockout",
    layers: Sequence[int] | None = None,
    score: str | Score = "msp",
    effects: bool = False,
    folder: str | os.PathLike[str] | None = None,
    cache_bytes: int = CACHE_BYTES,
    progress: bool = True,
) -> HeadMask | Circuit:
    """Find the heads that carry an objective, by HeadMap (Wang et al., ICLR 2025).

    Args:
        model: A host model; it is not changed.
        id: Labelled in-distribution data, any re-iterable of batches.
        ood: Outliers: data, a dict of data by family, or `"auto"` (proxies made from `id`); None
            means `"auto"` if the objective needs outliers.
        shift: Labelled in-distribution data under corruption; by default made from `id` if the
            objective needs it.
        objective: `id-loss`, `ood-auroc`, `ece`, `nll-shift`, `average`, an `Objective`, or a
            function of `Outputs` that is lower when better.
        keep: Heads of the circuit: a fraction of each layer, a number, or a list by layer; half by
            default.
        max_cost: Instead of `keep`: bound on the pruned model's counted multiply-adds relative to
            the plain model (`Budget.heads`).
        condition: What is fixed below a layer: `"knockout"` (the published search: heads already
            selected stay zeroed), `"keep"` (heads not selected are zeroed: the circuit as it will
            be used), `"none"` (nothing: each head on its own).
        layers: Layers to search; the others keep all heads. All by default.
        score: The uncertainty by which `ood-auroc` ranks.
        effects: Also measure the objective with all heads on, and return a `Circuit`: the mask, and
            the harm of removing each head with its standard error. The ranking of heads does not
            need it, so these passes are skipped by default.
        folder: Where to store the state, so that a stopped search can resume; None stores nothing.
        cache_bytes: Memory for hidden states; beyond it they are recomputed.
        progress: Show a bar with the remaining time on a terminal.

    Example:
        >>> mask = find_circuit(model, id=validation, ood=outliers, objective="ood-auroc", keep=0.5)
        >>> print(find_circuit(model, id=validation, effects=True))
    """
    check_name("condition", condition, CONDITIONS)
    host = host_model(model)
    id = data_for(host, id, name="id")
    check_class_order(host.model, id)
    goal = as_objective(objective, score)
    sets = search_sets(
        host, id, ood=ood, shift=shift, needs=goal.needs, average=goal.name == "average"
    )
    kinds = sorted({name.split("/")[0] for name in sets})
    goals = [goal]
    if goal.name == "average":
        goals = average_of(score, kinds, classes=host.task.classifies)
    chosen = list(range(len(host))) if layers is None else sorted(layers)
    if not set(chosen) <= set(range(len(host))):
        raise MaskError(f"layers={chosen}: {host.name} has the layers 0 to {len(host) - 1}.")
    if max_cost is None:
        counts = keep_counts(0.5 if keep is None else keep, host.head_counts)
    elif keep is None:
        counts = Budget.of(host, next(iter(sets["id"])), max_cost).heads(chosen)
    else:
        raise MaskError(
            f"keep={keep} and max_cost={max_cost} both set how many heads to keep: give one."
        )
    counts = tuple(
        kept if layer in chosen else heads
        for layer, (kept, heads) in enumerate(zip(counts, host.head_counts, strict=True))
    )
    settings = {
        "objective": goal.name,
        "condition": condition,
        "keep": list(counts),
        "layers": chosen,
        "score": score if isinstance(score, str) else getattr(score, "__name__", "score"),
        "effects": effects,
        "model": model_fingerprint(host.model) if folder is not None else "",
        "data": {  # outliers without their labels, which mean nothing
            name: fingerprint(
                data if name in ("id", "shift") else [without_labels(batch) for batch in data]
            )
            for name, data in (sets if folder is not None else {}).items()
        },
    }
    state = SearchState(folder, settings)
    search = LayerSearch(host, sets, goals, condition, counts, chosen, cache_bytes, effects)
    steps = search.run(state, progress)
    mask = HeadMask([step["selected"] for step in steps])
    if not effects:
        return mask
    errors = [step["standard_error"] for step in steps]
    harms = HeadScores([step["effect"] for step in steps], name=goal.name, standard_error=errors)
    baseline = tuple(step["baseline"] for step in steps)
    return Circuit(mask, harms, baseline, goal.name, condition, settings)
