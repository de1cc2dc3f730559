"""Teach an ensemble what it knows, and let it say why an input is new (`uncertainty.novelty`)."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..data.batches import move, split_batch
from ..data.eval_mode import in_eval
from ..data.input_hashes import input_hashes
from ..data.memory import Halving
from ..data.processes import in_order
from ..data.progress import length_of, progress_bar
from ..errors import DataError, HydraError
from ..uncertainty.novelty import Evidence, Novelty
from ..uncertainty.novelty_fit import NoveltyFit
from .inputs import is_raw, prepare
from .token_summaries import Collector, collecting, tap_names

CLASS_BLOCKS = 3
"""The trunk's last blocks measure distances to classes, as the end of the last block does: early
blocks know no classes."""


def logits_and_summaries(ensemble: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Run an ensemble once; return raw member logits and token summaries.

    Members that run one by one, for reference, are run fused once more, to be listened to.
    """
    args, kwargs, _ = split_batch(batch)
    readout = ensemble.readout
    # one positional input is the images or the ids: no mask to look for by its name
    named = len(args) > 1 or readout.positions is not None
    inputs = move(ensemble._named(args, kwargs) if named else kwargs, ensemble.device)
    collector = Collector(
        inputs.get("attention_mask"),
        readout=has_readout_token(readout),
        positions=None if readout.positions is None else readout.positions(inputs),
        streams=len(ensemble.plan.ends) if ensemble.body.folds else 1,
    )
    loop = ensemble.mode == "loop"
    with collecting(ensemble.body, collector):
        if loop:
            logits = ensemble.fused_logits(
                *(move(part, ensemble.device) for part in (args, kwargs))
            )
        else:
            logits = ensemble.member_logits(batch)
    if loop:
        logits = ensemble.member_logits(batch)
    return logits.float(), collector.summaries()


def per_text(logits: Tensor, batch: Any) -> Tensor:
    """Return one row of logits per text: the mean over a token classifier's real tokens."""
    if logits.ndim == 3:
        return logits
    mask = split_batch(batch)[1].get("attention_mask")
    weight = torch.ones_like(logits[:, :1, :, :1])
    if mask is not None:
        weight = mask.to(logits)[:, None, :, None]
    return (logits * weight).sum(2) / weight.sum(2).clamp_min(1)


def has_readout_token(readout: Any) -> bool:
    """Tell whether the classifier reads a token of its own, not the mean of all."""
    return readout.tokens is not None or readout.positions is not None


def novelty_fit(ensemble: Any, classes: int) -> NoveltyFit:
    """Return statistics of nothing yet, for the taps of an ensemble."""
    blocks = len(ensemble.body.trunk)
    taps = tap_names(blocks, readout=has_readout_token(ensemble.readout))
    late = min(CLASS_BLOCKS, blocks) * (len(taps) - 1) // blocks if blocks else 0
    return NoveltyFit(
        taps,
        classes=classes,
        class_taps=late + 1,
        hears_end=blocks > 0,
        precision=precision_of(ensemble),
    )


def precision_of(ensemble: Any) -> str:
    """Name the precision in which an ensemble computes its features here and now."""
    wide = ensemble.dtype == torch.float64  # statistics have no more digits than float32
    names = ["float32" if wide else str(ensemble.dtype).removeprefix("torch.")]
    kind = ensemble.device.type
    if torch.is_autocast_enabled(kind):
        names.append(str(torch.get_autocast_dtype(kind)).removeprefix("torch."))
    return " under autocast to ".join(names)


def statistics_of(ensemble: Any) -> Novelty:
    """Return the statistics of known data on the ensemble's device.

    Another precision than that of the fit moves the features. That is warned of, once for each
    precision, and not refused: the members' answers are still good.
    """
    novelty: Novelty = ensemble.novelty.to(ensemble.device)
    ensemble.novelty = novelty  # moved once, not at every call
    now = precision_of(ensemble)
    if now != novelty.precision and now not in ensemble.warned_precisions:
        ensemble.warned_precisions.add(now)
        warnings.warn(
            f"Novelty was fitted in {novelty.precision} but is computed in {now}: the features "
            "differ, and so may the rate of false alarms. Call fit_novelty_(known) again in this "
            "precision (and fit_policy(), if there is a policy), or predict in the fitted one.",
            stacklevel=4,
        )
    return novelty


@torch.no_grad()
def fit_novelty(
    ensemble: Any, known: Iterable[Any], *, names: Sequence[str] | None, progress: bool
) -> Novelty:
    """Fit novelty to known data in one pass (see `HydraEnsemble.fit_novelty_`)."""
    names = _names_of(known) if names is None else names
    fit: NoveltyFit | None = None
    model = in_eval(ensemble)
    halving = Halving("known data")

    def work(number: int, batch: Any) -> dict[str, Tensor]:
        try:
            parts = list(halving(partial(logits_and_summaries, model), batch))
        except HydraError:
            raise
        except Exception as error:
            raise DataError(
                f"The model failed on batch {number} of the known data: {error}. Known data must "
                "be prepared as the model expects it."
            ) from error
        # labels of tokens say nothing about a text
        by_text = parts[0][1][0].ndim == 3
        logits = torch.cat([per_text(said, part) for part, (said, _) in parts])
        found = {"logits": logits, "summaries": torch.cat([some for _, (_, some) in parts])}
        hashes = hashes_of(ensemble, batch)
        if hashes is not None:
            found["hashes"] = hashes
        given = split_batch(batch)[2] if by_text else None
        labels = _checked(given, logits.shape[-1], number)
        return found if labels is None else {**found, "labels": labels}

    total = length_of(known)
    results = in_order(known, work, name="known data")
    hashes: list[Tensor | None] = []
    for found in progress_bar(results, description="known data", enabled=progress, total=total):
        logits = found["logits"]
        hashes.append(found.get("hashes"))
        if fit is None:
            fit = novelty_fit(ensemble, logits.shape[-1])
        fit.add_(found["summaries"], logits, found.get("labels"))
    if fit is None:
        raise DataError("The known data is empty: it gave no batch.")
    novelty, kept = fit.finish(names or ()), [part.cpu() for part in hashes if part is not None]
    return replace(novelty, hashes=torch.cat(kept)) if len(kept) == len(hashes) else novelty


def known_inputs(ensemble: Any, batch: Any) -> Tensor | None:
    """Tell which inputs of a batch are known examples, to the bit: booleans `[example]`.

    None where that cannot be told: statistics of older versions keep no hashes.
    """
    kept = None if ensemble.novelty is None else ensemble.novelty.hashes
    if kept is None:
        return None
    hashes = hashes_of(ensemble, prepare(ensemble, batch) if is_raw(batch) else batch)
    return None if hashes is None else torch.isin(hashes, kept.cpu())


def hashes_of(ensemble: Any, batch: Any) -> Tensor | None:
    """Return the hash of every input of a batch; None when no input is a tensor."""
    args, kwargs, _ = split_batch(batch)
    return input_hashes(ensemble._named(args, kwargs))


def why_novel(ensemble: Any, batch: Any, neighbours: int) -> Evidence:
    """Return what speaks for the novelty of a batch (see `HydraEnsemble.why_novel`)."""
    if ensemble.novelty is None:
        raise HydraError("Novelty is not fitted: call ensemble.fit_novelty_(known) first.")
    logits, summaries = logits_and_summaries(in_eval(ensemble), batch)
    return statistics_of(ensemble).explain(summaries, per_text(logits, batch), neighbours)


def _checked(labels: Tensor | None, classes: int, batch: int) -> Tensor | None:
    if labels is None:
        return None
    wrong = labels.is_floating_point() or labels.ndim != 1
    if wrong or (len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes):
        raise DataError(
            f"Labels of batch {batch} of the known data are no classes 0 to {classes - 1}. Leave "
            "them out: novelty does not need labels."
        )
    return labels.long()


def _names_of(known: Any) -> Sequence[str] | None:
    """Take the names of examples from our own loaders."""
    texts = getattr(known, "texts", None)
    return texts if isinstance(texts, list) else None
