"""Refit a classifier: the last linear layer of a changed model follows the logits of another."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batches import check_inputs, split_batch
from ..data.eval_mode import twin
from ..data.model_runs import call_model, output_of
from ..data.processes import in_order, on_first
from ..data.progress import length_of, progress_bar
from ..hosts import HostModel, host_model
from ..hosts.block_calls import parameter_names
from ..hosts.head_weights import is_linear
from .ridge import Linear
from .token_sums import TokenSums, best_fit, judges_among


@dataclass(frozen=True)
class ReadoutFit:
    """How the classifier was fitted (see `ridge.Fit`)."""

    ridge: float | None
    error: float
    given_error: float


@torch.no_grad()
def refit_readout_(
    pruned: nn.Module, dense: nn.Module, data: Any, *, seed: int = 0, progress: bool = True
) -> ReadoutFit | str:
    """Fit the linear layer that gives a model's logits to the logits of another, in place.

    Every fifth example is held out: it chooses the ridge, and decides whether the fit is better
    than the given weights.

    Args:
        pruned: The model to fit; changed in place.
        dense: The model to follow, of the same architecture.
        data: Inputs. Labels are ignored.
        seed: Determines which examples are held out.
        progress: Report progress.

    Returns:
        How it was fitted, or why it was not.

    Example:
        >>> refit_readout_(pruned, model, inputs)
        ReadoutFit(ridge=0.01, error=0.02, given_error=0.05)
    """
    view = host_model(twin(dense).eval())
    first = next(iter(data))
    path = _logits_layer(view, first)
    if path is None:
        return "no linear layer gives its logits, one row per example"
    layer = pruned.get_submodule(path)
    reader = _Reader(pruned, path, view)
    sums, examples = TokenSums(), 0

    def work(number: int, batch: Any) -> dict[str, Tensor]:
        check_inputs(batch, f"batch {number} of the data")
        targets = output_of(view.model, batch)
        return {"features": reader(batch), "targets": targets}

    results = in_order(data, work, name="data to refit on")
    for result in progress_bar(
        results, description="classifier", enabled=progress, total=length_of(data)
    ):
        features, targets = result["features"], result["targets"]
        judges = judges_among(examples, len(features), seed)
        examples += len(features)
        weights = torch.ones(len(features), 1, dtype=torch.float64)
        sums.add_(features[:, None], targets[:, None], weights, judges)
    fitted, judging = sums.together()
    if fitted is None or judging is None:
        return f"{examples} examples are too few"
    result = on_first(partial(best_fit, fitted, judging, Linear.of(layer)))
    if result.ridge is not None:
        result.linear.put_(layer)
    return ReadoutFit(result.ridge, result.error, result.given_error)


class _Reader:
    """Runs a model and returns what enters its last linear layer, one row per example."""

    def __init__(self, model: nn.Module, path: str, view: HostModel) -> None:
        self.model, self.view = twin(model).eval(), view
        self._seen: list[Tensor] = []
        self.model.get_submodule(path).register_forward_pre_hook(self._note)

    def _note(self, module: nn.Module, inputs: Any) -> None:
        self._seen[:] = [inputs[0]]

    def __call__(self, batch: Any) -> Tensor:
        call_model(self.model, batch)
        return _rows(self._seen[0], self.view, batch)


def _rows(states: Tensor, view: HostModel, batch: Any) -> Tensor:
    """Return the row of each example; a decoder's classifier runs for all tokens."""
    if states.dim() == 2 or view.readout.positions is None:
        return states
    args, kwargs, _ = split_batch(batch)
    named = dict(zip(parameter_names(view.model), args, strict=False)) | kwargs
    positions = view.readout.positions(named).to(states.device)
    return states[torch.arange(len(states), device=states.device), positions]


def _logits_layer(view: HostModel, batch: Any) -> str | None:
    """Return the path of the linear layer whose output is the logits; None if there is none.

    One whose weights another layer uses too (a language model's embeddings) is none.
    """
    outputs: dict[str, Tensor] = {}

    def note(path: str, module: nn.Module, inputs: Any, output: Tensor) -> None:
        outputs[path] = output

    model = twin(view.model)
    for path, module in model.named_modules():
        if is_linear(module) and not path.startswith(f"{view.blocks_path}."):
            module.register_forward_hook(partial(note, path))
    logits = output_of(model, batch)
    if logits.dim() != 2:
        return None
    for path, output in reversed(outputs.items()):
        rows = _rows(output, view, batch)
        weight = model.get_submodule(path).weight
        users = sum(any(p is weight for p in m._parameters.values()) for m in model.modules())
        if users == 1 and rows.equal(logits):
            return path
    return None
