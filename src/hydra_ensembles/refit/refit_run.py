"""Refit: the linear layers of a changed model follow the states of the model that it came from.

Two models of one architecture, a dense one D and one with other or fewer weights P, run block by
block on the same unlabelled tokens. Per block the output projection of the attention is fitted
first, then the last linear layer of the MLP, whose input depends on it. With u the units that P
still has, r its residual stream and s a layer scale, W and b are fitted by ridge regression so that

    r^P_t + s * (u^P_t W + b)  follows  the sum of D's residual stream at token t.

The target contains what earlier blocks got wrong, so that errors are corrected as well. Where a
norm stands between the layer and the sum (Gemma), the layer follows D's own layer instead.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._records import sha256_of
from .._tensors import model_fingerprint, read_tensors, write_tensors
from ..data import processes
from ..data.processes import holds
from ..data.progress import Progress, length_of
from ..data.splits import fingerprint
from ..errors import DataError
from ..hosts.host_data import data_for
from ..search.search_state import SearchState
from .paired_states import PairedBatch, PairedStates
from .sublayer import Sublayer, WatchedBlock
from .token_sums import FROM_GIVEN, FROM_ZERO, TokenSums, best_fit

LEAST = 20
"""Fewest tokens to fit to."""


@dataclass(frozen=True)
class SublayerFit:
    """How one linear layer was fitted.

    Attributes:
        layer, part: The block, and "attention" or "mlp".
        units: Number of features: kept neurons, or kept heads times their width.
        rows: Tokens that were fitted, held-out ones included.
        ridge: The chosen ridge; None if the given weights were kept.
        error: Of the sum at held-out tokens, relative to the variance of what the layer adds.
        given_error: The same of the given weights.
        few: Whether tokens were fewer than unknowns, so that the fit shrank to the given weights.
    """

    layer: int
    part: str
    units: int
    rows: int
    ridge: float | None
    error: float
    given_error: float
    few: bool


@holds("folder")
@torch.no_grad()
def refit_(
    pruned: nn.Module,
    dense: nn.Module,
    data: Any,
    *,
    seed: int = 0,
    folder: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> list[SublayerFit]:
    """Fit the linear layers of a pruned model so that its states follow those of the dense one.

    Only the output projections of the attention and the last linear layers of the MLPs change.
    Padding has weight 0. In the last block of a model that reads one token per sequence (a class
    token, the last token of a decoder that classifies) only those tokens are fitted if there are
    two per unknown; otherwise they weigh as much as the rest of their sequence. Every fifth example
    is held out: it chooses the ridge, and decides whether a fit is better than the given weights.

    Args:
        pruned: The model to fit, of the same architecture with equal or fewer heads and neurons.
            Changed in place.
        dense: The model to follow. It is not changed.
        data: Inputs as the models take them. Labels are ignored.
        seed: Determines which examples are held out.
        folder: Keeps finished layers; the same call continues from them with equal results.
        progress: Report progress.

    Returns:
        How each layer was fitted, bottom to top. Layers that have nothing to correct are left out.

    Raises:
        UnsupportedModelError: When the models' blocks cannot be run one by one.
        DataError: When the data has too few tokens, NaN or infinity.

    Example:
        >>> pruned = copy.deepcopy(model)
        >>> prune_units_(pruned, mask)
        >>> refit_(pruned, model, inputs)
    """
    data = data_for(dense, data, labels=False)
    states = PairedStates(dense, pruned, data, seed)
    steps = 3 * len(states.dense) * (length_of(data) or 0)
    with Progress("refit", steps or None, enabled=progress) as bar:
        states.read(bar, progress=progress)
        store = None if folder is None else _Store(Path(folder), states)
        return _fit_all(states, store, bar)


def _fit_all(states: PairedStates, store: _Store | None, bar: Progress) -> list[SublayerFit]:
    fits: list[SublayerFit] = []
    for layer in range(len(states.dense)):
        steps = {s.part: s for s in states.sublayers(layer)}
        for part in ("attention", "mlp"):
            sublayer = steps.get(part)
            if sublayer is None or states.alike(layer, part):
                bar.update(len(states.sizes))
                continue
            block = states.pruned.blocks[layer]
            known = None if store is None else store.read(sublayer, sublayer.linear(block))
            if known is None:
                known = _fit(states, sublayer, bar)
                if store is not None:
                    store.write(known, sublayer.linear(block))
            else:
                bar.update(len(states.sizes))
            fits.append(known)
        if layer + 1 < len(states.dense):
            states.advance_(layer, bar)
    return fits


def _fit(states: PairedStates, sublayer: Sublayer, bar: Progress) -> SublayerFit:
    """Fit one linear layer of the pruned model, in place."""
    layer, scale = sublayer.layer, sublayer.scale
    block = states.pruned.blocks[layer]
    given = sublayer.given(block)
    watched = [WatchedBlock(host.blocks[layer], sublayer) for host in (states.dense, states.pruned)]
    unknowns = len(given.weight) + (given.bias is not None)
    sums = TokenSums()

    def work(batch: PairedBatch) -> None:
        call = batch.calls[layer]
        ours, theirs = watched[1](call, batch.pruned), watched[0](call, batch.dense)
        target = theirs.output.double()
        if scale is not None:
            added = scale.to(ours.output.device) * ours.output.double()
            target = theirs.total.double() - ours.total.double() + added
        weights = states.weights(batch, layer, unknowns)
        sums.add_(ours.features, target, weights, batch.judges)
        if theirs.states is not None:
            batch.ahead = theirs.states

    states.over(layer, work, bar)
    fitted, judging = sums.of_all_processes()
    if fitted is None or judging is None or fitted.rows + judging.rows < LEAST:
        rows = sum(part.rows for part in (fitted, judging) if part is not None)
        raise DataError(
            f"The data has {rows} tokens, too few to fit {unknowns} unknowns. Give at least "
            f"{LEAST}; twice as many as unknowns are best, and they need no labels."
        )
    # the same sums may be solved to other last digits elsewhere: one process does it for all
    result = processes.on_first(partial(best_fit, fitted, judging, given))
    if result.ridge is not None:
        sublayer.put_(block, result.linear)
    return SublayerFit(
        layer,
        sublayer.part,
        len(given.weight),
        fitted.rows + judging.rows,
        result.ridge,
        result.error,
        result.given_error,
        result.few,
    )


class _Store:
    """Fitted layers in a folder, one file each; a folder of another run is refused."""

    def __init__(self, folder: Path, states: PairedStates) -> None:
        self.folder = folder
        settings = {
            "start": model_fingerprint(states.pruned.model),
            "model": model_fingerprint(states.dense.model),
            "data": fingerprint(states.data),
            "batches": sha256_of(json.dumps(states.sizes).encode()),
            "seed": states.seed,
            "ridges": [list(FROM_ZERO), list(FROM_GIVEN)],
            "processes": processes.size(),
        }
        state = SearchState(folder, settings, name="refit.json")
        if not state.steps:
            state.add({"begun": True})

    def _path(self, layer: int, part: str) -> Path:
        return self.folder / f"block-{layer:03d}-{part}.safetensors"

    def write(self, fitted: SublayerFit, linear: nn.Module) -> None:
        """Store a fitted layer; of several processes the first one does."""
        tensors = {name: p.detach().cpu().contiguous() for name, p in linear.named_parameters()}
        path, record = self._path(fitted.layer, fitted.part), json.dumps(asdict(fitted))
        processes.on_first(partial(write_tensors, path, tensors, record))

    @torch.no_grad()
    def read(self, sublayer: Sublayer, linear: nn.Module) -> SublayerFit | None:
        """Fill a layer with what is stored and say how it was fitted; None if nothing is."""
        path = self._path(sublayer.layer, sublayer.part)

        def load() -> Any:
            advice = "Delete it: it will be computed again."
            return read_tensors(path, "a fitted layer", advice) if path.exists() else None

        stored = processes.on_first(load)
        if stored is None:
            return None
        for name, parameter in linear.named_parameters():
            parameter.copy_(stored[0][name])
        return SublayerFit(**json.loads(stored[1]))
