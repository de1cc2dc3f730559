"""`prune`: a model in, the same model with fewer heads and neurons out, by least squares."""

from __future__ import annotations

import copy
import os
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._tensors import model_fingerprint
from ..costs import choose_units, cost
from ..criteria import score_units
from ..criteria.criterion import Criterion
from ..data.batches import without_labels
from ..data.eval_mode import evaluating
from ..data.model_runs import expect_batches, output_of
from ..data.processes import holds, in_order
from ..data.progress import announce, length_of
from ..errors import ArgumentError, DataError, MaskError, UnsupportedModelError, check_number
from ..evaluation import evaluate
from ..fusion.ensemble import HydraEnsemble
from ..heads import UnitMask, prune_units_
from ..hosts import HostModel, host_model
from ..hosts.host_data import data_for
from ..search.search_state import SearchState
from ..tasks.tokens import predicts_next_token
from .readout_fit import ReadoutFit, refit_readout_
from .refit_run import SublayerFit, refit_
from .uniform_width import WidthSettings, find_width_settings, stock_model

PASSES = 10
"""What scoring and refitting cost about, in passes over the data."""
SAME = 1e-3
"""Largest difference of the logits of a stock model from those of the cut one, relative."""


@holds("folder")
def prune(
    model: nn.Module,
    data: Any,
    *,
    max_cost: float = 0.5,
    uniform: bool = False,
    criterion: str | Criterion | None = None,
    held_out: Any = None,
    folder: str | os.PathLike[str] | None = None,
    seed: int = 0,
    progress: bool = True,
) -> nn.Module:
    """Remove heads and MLP neurons to a budget; refit what is left, without training or labels.

    Units are scored by how much they write to the states, E[u^2] |w|^2, and the best for their cost
    are kept. Then the output projections and the last MLP linears are fitted, block by block, so
    that the states follow those of the dense model (see `refit_run`), and last the classifier, so
    that the logits do. No fit is used that is worse on held-out examples than the given weights.

    Args:
        model: A host model. It is not changed.
        data: Inputs as the model takes them; a few thousand tokens per hundred neurons are enough.
            Labels are used only by criteria that need them.
        max_cost: Largest multiply-adds relative to the model, on batches like the first one.
        uniform: Keep equal numbers of neurons in all layers, and of heads if the model's config can
            say so. Stock transformers then loads the result: `pruned.save_pretrained(folder)`.
        criterion: How units are scored (see `score_units`); `"energy"` by default. `"fisher"`,
            `"his"` and `"taylor"` need labels.
        held_out: Data on which `hydra_record` compares both models: labelled, or texts for a
            language model.
        folder: Keeps finished layers; the same call continues from them with equal results.
        seed: Determines which examples are held out to choose ridges.
        progress: Report progress and what was done.

    Returns:
        A plain model of the same class. `hydra_record` says what was kept and how well it follows;
        `save` and `load` keep the model.

    Raises:
        MaskError: When the budget cannot be met; the message says what can be.
        UnsupportedModelError: When neither heads nor neurons can be removed, or `uniform=True` and
            stock code cannot build the result.
        DataError: When the data has too few tokens, NaN or infinity.

    Example:
        >>> half = prune(model, inputs, max_cost=0.5)
        >>> half.hydra_record["cost"]
        0.499
    """
    host, notes = _checked(model, max_cost)
    widths = find_width_settings(host) if uniform else None
    if widths is not None and widths.heads is None and host.why_not_prunable() is None:
        notes.append("All heads stay: the config cannot say that they are fewer.")
    data = data_for(model, data, labels=criterion not in (None, "energy"))
    first = next(iter(data), None)
    if first is None:
        raise DataError("The data has no batches. Check the loader or the filter.")
    first = without_labels(first)
    if folder is not None:
        name = criterion if isinstance(criterion, str | None) else repr(criterion)
        settings = {"max_cost": max_cost, "uniform": uniform, "criterion": name, "seed": seed}
        state = SearchState(
            folder, {**settings, "model": model_fingerprint(model)}, name="prune.json"
        )
        if not state.steps:
            state.add({"begun": True})
    batches = PASSES * (length_of(data) or 0)
    expect_batches(model, data, batches, "pruning", enabled=progress)
    scores = score_units(host, data, criterion=criterion or "energy", progress=progress)
    mask = choose_units(
        host,
        scores,
        max_cost=max_cost,
        batch=first,
        uniform=uniform,
        heads=widths is None or widths.heads is not None,
    )
    pruned = prune_units_(copy.deepcopy(model), mask)
    fits, readout = refitted_(pruned, model, data, notes, folder=folder, seed=seed, show=progress)
    if widths is not None:
        pruned = _stock(pruned, widths, first)
    result: Any = pruned
    result.hydra_record = {
        "made_by": "prune",
        "cost": cost(pruned, first).relative_to(cost(model, first)).multiply_adds,
        "max_cost": max_cost,
        "uniform": uniform,
        "criterion": scores.name,
        "seed": seed,
        "heads": _kept(mask, host)[0],
        "neurons": _kept(mask, host)[1],
        "layers": [asdict(one) for one in fits],
        "classifier": asdict(readout) if isinstance(readout, ReadoutFit) else None,
        "notes": notes,
    }
    if held_out is not None:
        held_out = data_for(model, held_out, name="held-out")
        result.hydra_record["held_out"] = {
            name: _figures(one, held_out, progress)
            for name, one in (("dense", model), ("pruned", pruned))
        }
    for note in notes:
        announce(note, enabled=progress)
    return pruned


def _checked(model: nn.Module, max_cost: float) -> tuple[HostModel, list[str]]:
    """Return the host and what a user should know of it; raise for what cannot be pruned."""
    try:
        check_number("max_cost", max_cost, above=0, most=1)
    except ArgumentError as error:
        raise MaskError(f"{error} It is a share of the model's cost, such as 0.5.") from None
    if isinstance(model, HydraEnsemble) or not isinstance(model, nn.Module):
        raise UnsupportedModelError(
            f"Cannot prune a {type(model).__name__}: give a plain host model. Of an ensemble, "
            "prune ensemble.member(0), or the hosts before they are folded."
        )
    host = host_model(model)
    heads, neurons = host.why_not_prunable(), host.why_no_neurons()
    if heads is not None and not any(host.neuron_counts):
        raise UnsupportedModelError(
            f"{host.name} cannot be pruned. Heads stay: {heads}. Neurons stay: {neurons}."
        )
    reasons = (
        ("Heads", heads),
        ("Some neurons" if any(host.neuron_counts) else "Neurons", neurons),
    )
    return host, [f"{what} stay: {reason}." for what, reason in reasons if reason is not None]


def refitted_(
    pruned: nn.Module,
    dense: nn.Module,
    data: Any,
    notes: list[str],
    *,
    folder: str | os.PathLike[str] | None,
    seed: int,
    show: bool,
) -> tuple[list[SublayerFit], ReadoutFit | str]:
    """Refit a pruned model in place; add to the notes what a user should know."""
    try:
        fits = refit_(pruned, dense, data, folder=folder, seed=seed, progress=show)
    except UnsupportedModelError as error:
        notes.append(f"Nothing was refitted: {error}")
        return [], str(error)
    readout = refit_readout_(pruned, dense, data, seed=seed, progress=show)
    few = [fit for fit in fits if fit.few]
    if few:
        most = max(few, key=lambda fit: fit.units)
        notes.append(
            f"{len(few)} layers have fewer tokens than unknowns (block {most.layer}: {most.rows:,} "
            f"for {most.units:,}): they shrink to their own weights. Give more data."
        )
    kept = [f"{fit.layer} ({fit.part})" for fit in fits if fit.ridge is None]
    if kept:
        notes.append(
            f"Blocks {', '.join(kept)} keep their weights: no fit was better on held-out examples."
        )
    if isinstance(readout, str):
        notes.append(f"The classifier stays: {readout}.")
    elif readout.ridge is None:
        notes.append("The classifier stays: no fit was better on held-out examples.")
    return fits, readout


def _stock(pruned: nn.Module, widths: WidthSettings, batch: Any) -> nn.Module:
    """Return the pruned model as stock code builds it, with equal logits."""
    host = host_model(pruned)
    settings = widths.neurons(host.neuron_counts[0])
    if widths.heads is not None:
        settings |= widths.heads(host.head_counts[0])
    model = stock_model(pruned, settings)
    with evaluating(pruned), evaluating(model):
        ours, theirs = (output_of(one, batch).float() for one in (model, pruned))
    largest = float((ours - theirs).abs().max() / theirs.abs().max())
    if not largest <= SAME:
        raise UnsupportedModelError(
            f"{host.name} built with {settings} gives other logits (off by {largest:.2g}). Use "
            "uniform=False."
        )
    return model


def _kept(mask: UnitMask, host: HostModel) -> tuple[list[list[int]], list[list[int]]]:
    """Return kept and present heads and neurons by layer, such as [6, 12]."""
    heads = [[int(row.sum()), len(row)] for row in mask.heads]
    counts = zip(mask.neurons, host.neuron_counts, strict=True)
    return heads, [[int(row.sum()) if len(row) else n, n] for row, n in counts]


def _figures(model: nn.Module, data: Any, progress: bool) -> dict[str, float]:
    """Return accuracy and NLL, or the task's own error; the perplexity of a language model."""
    if predicts_next_token(model):
        return {"perplexity": perplexity(model, data)}
    results = evaluate(model, data, progress=progress)
    names = ("cls/Acc", "cls/NLL", "cls/Loss", "reg/RMSE", "reg/Pearson")
    return {name: float(results[name]) for name in names if name in results}


def perplexity(model: nn.Module, data: Any) -> float:
    """Return exp of the mean NLL of the next token, padding left out."""

    def work(number: int, batch: Any) -> dict[str, Tensor]:
        ids = batch["input_ids"]
        mask = batch.get("attention_mask", torch.ones_like(ids))[:, 1:].bool()
        logits = output_of(model, batch)[:, :-1].float().cpu()
        losses = F.cross_entropy(logits[mask], ids[:, 1:][mask], reduction="sum")
        return {"loss": losses.double(), "tokens": mask.sum()}

    with evaluating(model):
        results = list(in_order(data, work, name="held-out"))
    total = sum(result["loss"] for result in results) / sum(r["tokens"] for r in results)
    return float(torch.as_tensor(total).exp())
