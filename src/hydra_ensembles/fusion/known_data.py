"""Teach an ensemble what it knows, and let it say why an input is new (`uncertainty.novelty`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..data.batches import batch_length, move, refused_inputs, split_batch, take
from ..data.corruptions.base import Normalisation
from ..data.eval_mode import in_eval
from ..data.input_facts import (
    decoded,
    described,
    excerpt,
    image_facts,
    image_scale,
    tensor_facts,
    text_facts,
    token_heads,
)
from ..data.loaders import check_reiterable
from ..data.memory import Halving
from ..data.model_runs import expect_batches
from ..data.processes import in_order
from ..data.progress import length_of, progress_bar
from ..data.proxies import make_proxies
from ..data.proxies.base import spread
from ..data.splits import input_hashes
from ..errors import DataError, HydraError, check_number
from ..hosts.host_data import data_for
from ..uncertainty.evidence import Evidence
from ..uncertainty.known_ranges import Scale
from ..uncertainty.novelty import Novelty
from ..uncertainty.novelty_fit import NoveltyFit
from .call_options import tap_names
from .inputs import is_raw, prepare

if TYPE_CHECKING:
    from .fused_model import FusedModel, Run

CLASS_BLOCKS = 3
"""The trunk's last blocks measure distances to classes, as the end of the last block does: early
blocks know no classes."""
MANY_CLASSES = 4096
"""With more classes only the end of the last block measures distances to them: the means of 21,000
classes at one tap are 32 MB at width 384, and every `predict` reads them all."""

PROXIES, PROXY_BATCH = 200, 50
"""Known examples that proxies are made of, and how many at once."""


def run_of(ensemble: FusedModel, batch: Any, *, summaries: bool) -> Run:
    """Run an ensemble once on a batch that is not checked: an exported graph runs this code."""
    args, kwargs, _ = split_batch(batch)
    return ensemble.run(*move((args, kwargs), ensemble.device), summaries=summaries)


@torch.no_grad()  # here, for whoever calls it: a graph would keep every activation of the data
def features_of(ensemble: FusedModel, batch: Any) -> tuple[Tensor, Tensor]:
    """Run an ensemble once; return raw member logits and token summaries."""
    run = run_of(ensemble, batch, summaries=True)
    assert run.summaries is not None
    return run.member_logits.float(), run.summaries


def novelty_rows(ensemble: FusedModel, outputs: Tensor, batch: Any) -> Tensor | None:
    """Return one row of logits per input of a batch, if its task has any (`Task.novelty_rows`)."""
    mask = split_batch(batch)[1].get("attention_mask")
    return ensemble.task.novelty_rows(outputs, mask)


def novelty_fit(
    ensemble: FusedModel, classes: int, *, choose: bool = True, without: Collection[str] = ()
) -> NoveltyFit:
    """Return statistics of nothing yet, for the taps of an ensemble; see `NoveltyFit`."""
    blocks = len(ensemble.body.trunk)
    taps = tap_names(blocks, readout=ensemble.readout.has_token)
    last = 0 if classes > MANY_CLASSES else min(CLASS_BLOCKS, blocks)
    late = last * (len(taps) - 1) // blocks if blocks else 0
    return NoveltyFit(
        taps,
        classes=classes,
        class_taps=late + 1,
        uses_last_block=blocks > 0,
        choose=choose,
        without=without,
        precision=ensemble.precision(),
    )


@torch.no_grad()
def fit_novelty(
    ensemble: FusedModel,
    known: Iterable[Any],
    *,
    train: Iterable[Any] | None = None,
    ood: Mapping[str, Iterable[Any]] | None = None,
    choose: bool = True,
    names: Sequence[str] | bool,
    progress: bool,
) -> Novelty:
    """Fit novelty to known data in one pass (see `HydraEnsemble.fit_novelty_`)."""
    read = partial(data_for, ensemble, once=True)
    known = read(known, name="known")
    train = None if train is None else read(train, name="training")
    ood = {name: read(data, name=name, labels=False) for name, data in (ood or {}).items()}
    counts = [length_of(data) for data in (known, train or (), *ood.values())]
    batches = sum(n or 0 for n in counts)
    expect_batches(ensemble, known, batches, "fitting novelty", enabled=progress)
    fit: NoveltyFit | None = None
    for found in () if train is None else summaries_of(ensemble, train, "training", progress):
        fit = fit or novelty_fit(ensemble, _classes(found), choose=choose)
        fit.add_train_(found["summaries"], found.get("logits"), found.get("labels"))
    if train is not None and fit is None:
        raise DataError("The training data is empty: it gave no batch.")
    seen = False
    for found in summaries_of(ensemble, known, "known", progress, columns=True):
        fit, seen = fit or novelty_fit(ensemble, _classes(found), choose=choose), True
        fit.add_(found["summaries"], found.get("logits"), found.get("labels"))
        fit.add_columns_(found)
    if fit is None or not seen:
        raise DataError("The known data is empty: it gave no batch.")
    add_outliers_(ensemble, fit, ood or {}, progress=progress)
    fit.add_columns_(described(known))
    given = [] if isinstance(names, bool) else [excerpt(name) for name in names]

    def add_proxies() -> None:
        add_outliers_(ensemble, fit, proxies_of(known), progress=progress)

    novelty = finished(ensemble, fit, known, names=given, add_proxies=add_proxies)
    return novelty if given or names is True else novelty.without_names()


def proxies_of(known: Iterable[Any]) -> dict[str, Iterable[Any]]:
    """Make far outliers of some known examples; raise `DataError` where none can be made."""
    some = spread(check_reiterable(known), PROXIES, seed=0)
    rows = torch.arange(batch_length(some)).split(PROXY_BATCH)
    of_known = Normalisation.of(known, None, None)
    proxies = make_proxies(
        [take(some, part.tolist()) for part in rows],
        mean=of_known.mean,
        std=of_known.std,
        tokenizer=getattr(known, "tokenizer", None),
    )
    return {f"{name} proxies": data for name, data in proxies.items()}


def add_outliers_(
    ensemble: FusedModel,
    fit: NoveltyFit,
    families: Mapping[str, Iterable[Any]],
    *,
    progress: bool = False,
) -> None:
    """Run an ensemble over families of far outliers and add them to a fit, in place."""
    for name, data in families.items():
        for found in summaries_of(ensemble, data, name, progress):
            fit.add_ood_(name, found["summaries"], found.get("logits"))


def finished(
    ensemble: FusedModel,
    fit: NoveltyFit,
    data: Any,
    *,
    names: Sequence[str] = (),
    add_proxies: Callable[[], None] | None = None,
) -> Novelty:
    """Return what was fitted on data, with names and ranges of facts (see `data.input_facts`)."""
    tokenizer = getattr(data, "tokenizer", None) or ensemble.tokenizer
    decode = partial(decoded, tokenizer=tokenizer) if hasattr(tokenizer, "decode") else None
    scale = scale_of(ensemble, data)
    return fit.finish(names, decode=decode, image_scale=scale, add_proxies=add_proxies)


def scale_of(ensemble: FusedModel, data: Any = None) -> Scale | None:
    """Return what the images of data were normalised by; None where it is not known."""
    return image_scale(getattr(data, "transform", None) or ensemble.transform)


def columns_of(ensemble: FusedModel, batch: Any, scale: Scale | None) -> dict[str, Tensor]:
    """Return what is kept of known inputs beside their features (`NoveltyFit.add_columns_`)."""
    args, kwargs, _ = split_batch(batch)
    inputs = ensemble._named(args, kwargs)
    found = {"hashes": input_hashes(inputs), "heads": token_heads(inputs)}
    return {
        **{name: column for name, column in found.items() if column is not None},
        **tensor_facts(inputs, scale),
    }


def summaries_of(
    ensemble: FusedModel,
    data: Iterable[Any],
    kind: str,
    progress: bool,
    *,
    columns: bool = False,
) -> Iterator[dict[str, Tensor]]:
    """Run an ensemble over data; yield what novelty reads, by batch.

    That is `summaries` by input, `logits` and `labels` where there are any, and with `columns` what
    is kept of the inputs.
    """
    model = in_eval(ensemble)
    name = f"{kind} data"
    halving = Halving(name)
    scale = scale_of(ensemble, data) if columns else None

    def work(number: int, batch: Any) -> dict[str, Tensor]:
        try:
            parts = list(halving(partial(features_of, model), batch))
        except Exception as error:
            where = f"batch {number} of the {name}"
            raise refused_inputs(ensemble.host, batch, error, where) from error
        rows = [novelty_rows(ensemble, members, part) for part, (members, _) in parts]
        found = {"summaries": torch.cat([taps for _, (_, taps) in parts])}
        logits = [row for row in rows if row is not None]
        if logits:
            found["logits"] = torch.cat(logits)
        found |= columns_of(ensemble, batch, scale) if columns else {}
        # labels of tokens say nothing about a text
        by_class = ensemble.is_classifier and parts[0][1][0].ndim == 3
        given = split_batch(batch)[2] if by_class else None
        labels = _checked(given, _classes(found), f"Batch {number} of the {name}")
        return found if labels is None else {**found, "labels": labels}

    results = in_order(data, work, name=name)
    yield from progress_bar(results, description=name, enabled=progress, total=length_of(data))


def known_inputs(ensemble: FusedModel, batch: Any) -> Tensor | None:
    """Tell which inputs of a batch are known examples, to the bit: booleans `[example]`.

    None where that is unknown: statistics of older versions keep no hashes.
    """
    kept = None if ensemble.novelty is None else ensemble.novelty.hashes
    if kept is None:
        return None
    args, kwargs, _ = split_batch(prepare(ensemble, batch))
    hashes = input_hashes(ensemble._named(args, kwargs))
    return None if hashes is None else torch.isin(hashes, kept.cpu())


def why_novel(
    ensemble: FusedModel, batch: Any, neighbours: int, raw: Sequence[Any] | None
) -> Evidence:
    """Return what speaks for the novelty of a batch (see `HydraEnsemble.why_novel`)."""
    check_number("neighbours", neighbours, least=0, whole=True)
    if ensemble.novelty is None:
        raise HydraError("Novelty is not fitted: call ensemble.fit_novelty_(known) first.")
    if raw is None and is_raw(batch):
        raw = list(batch) if isinstance(batch, (list, tuple)) else [batch]
    batch = prepare(ensemble, batch)
    try:
        logits, summaries = features_of(in_eval(ensemble), batch)
    except Exception as error:
        raise refused_inputs(ensemble.host, batch, error) from error
    novelty = ensemble._statistics()
    evidence = novelty.explain(summaries, novelty_rows(ensemble, logits, batch), neighbours)
    facts: dict[str, Any] = dict(columns_of(ensemble, batch, novelty.ranges.scale))
    if raw is not None:
        texts = "tokens" in facts  # a string is a text here, and the path of an image elsewhere
        facts |= text_facts(raw) if texts else image_facts(raw)
    return replace(
        evidence,
        facts=novelty.ranges.outside(facts, len(evidence)),
        known=known_inputs(ensemble, batch),
    )


def _classes(found: Mapping[str, Tensor]) -> int:
    """Return the number of classes of a batch's logits; 0 without logits."""
    return found["logits"].shape[-1] if "logits" in found else 0


def _checked(labels: Tensor | None, classes: int, where: str) -> Tensor | None:
    if labels is None:
        return None
    wrong = labels.is_floating_point() or labels.ndim != 1
    if wrong or (len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes):
        raise DataError(
            f"{where} has labels outside 0 to {classes - 1}. Remove the labels; novelty does not "
            "need them."
        )
    return labels.long()
