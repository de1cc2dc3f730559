"""`score_heads`: one pass over the calibration data for all the criteria that can share it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor, nn

from ..data.batches import check_inputs, split_batch
from ..data.class_names import check_class_order
from ..data.eval_mode import evaluating
from ..data.memory import Halving
from ..data.model_runs import call_model, check_data, expect_batches
from ..data.processes import in_order
from ..data.progress import length_of, progress_bar
from ..errors import ArgumentError, DataError, UnsupportedModelError
from ..heads.gates import gate
from ..heads.head_mask import HeadScores
from ..hosts import HostModel, host_model
from ..hosts.host_data import data_for
from .attention_watch import AttentionView, Watch, watch_attention
from .criterion import (
    AttentionScore,
    CombinedScore,
    Criterion,
    GateGradient,
    Loss,
    OutputScore,
    Setting,
    WeightScore,
    as_criterion,
    sample_losses,
)
from .output_watch import watch_outputs

GRADIENT_PASSES = 3
"""What a pass with gradients costs, in passes without."""


@overload
def score_heads(
    model: nn.Module | HostModel,
    data: Iterable[Any] | None,
    *,
    criterion: str | Criterion = "his",
    loss: Loss | None = None,
    held_out: Iterable[Any] | None = None,
    progress: bool = True,
) -> HeadScores: ...
@overload
def score_heads(
    model: nn.Module | HostModel,
    data: Iterable[Any] | None,
    *,
    criterion: list[Any] | tuple[Any, ...],
    loss: Loss | None = None,
    held_out: Iterable[Any] | None = None,
    progress: bool = True,
) -> dict[str, HeadScores]: ...
def score_heads(
    model: nn.Module | HostModel,
    data: Iterable[Any] | None,
    *,
    criterion: str | Criterion | list[Any] | tuple[Any, ...] = "his",
    loss: Loss | None = None,
    held_out: Iterable[Any] | None = None,
    progress: bool = True,
) -> HeadScores | dict[str, HeadScores]:
    """Score how much each attention head of a model matters.

    The model runs in eval mode on its own backend and is left as it was. Scores are means over
    samples, in float64, the same for every batch size; padding does not count. Gradients of each
    sample in the gates come from one backward pass of a batch, and attention entropy from its
    forward pass, so all criteria of a list cost one pass over the data. Under `torchrun` or
    `accelerate launch` the processes share the batches, and the scores are the same to the bit.

    Args:
        model: A host model.
        data: Calibration batches (dict, `BatchEncoding` or `(inputs, labels)`), read once; 32
            examples are often enough. None is enough for criteria that look at the weights only.
        criterion: A registered name (`random`, `magnitude`, `taylor`, `his`, `entropy`, `hies`,
            `fisher`, `energy`), a `Criterion` with options, or a list of them.
        loss: A function of logits and labels to one loss per sample `[batch]`; by default
            cross-entropy (for language models, its mean over the next tokens).
        held_out: Labelled data for criteria that tune themselves, such as `hies(alpha="auto")`.
        progress: Show a bar on a terminal.

    Returns:
        `HeadScores`; for a list of criteria, a dict of them by label.

    Example:
        >>> scores = score_heads(model, calibration, criterion="hies")
        >>> mask = scores.top_k(0.7, scope="model")
    """
    several, asked = asked_criteria(criterion)
    host = host_model(model)
    held_out = None if held_out is None else data_for(host, held_out, name="held-out")
    tables = {
        part: rows[0] for part, rows in score_tables(host, data, asked, loss, progress).items()
    }
    setting = Setting(host, held_out=held_out, progress=progress)
    scores = {one.label: _score(one, tables, setting) for one in asked}
    return scores if several else scores[asked[0].label]


def asked_criteria(criterion: Any) -> tuple[bool, list[Criterion]]:
    """Return whether a list was given, and the criteria."""
    several = isinstance(criterion, (list, tuple))
    return several, [as_criterion(one) for one in (criterion if several else [criterion])]


def score_tables(
    host: HostModel,
    data: Iterable[Any] | None,
    asked: Sequence[Criterion],
    loss: Loss | None,
    progress: bool,
    *,
    neurons: bool = False,
) -> dict[Criterion, list[HeadScores]]:
    """Compute the tables of all criteria, and of their parts, in one pass.

    Returns:
        By criterion, the table of heads; with `neurons`, that of neurons after it.
    """
    if data is not None:
        data = data_for(host, data, name="calibration", once=True)
    check_data(host.model, data)
    check_class_order(host.model, data)
    tables: dict[Criterion, list[HeadScores]] = {}
    sums: dict[Criterion, _Mean] = {}
    for part in dict.fromkeys(part for one in asked for part in _simple(one)):
        if isinstance(part, WeightScore):
            rows = [part.score(host), *([part.score_neurons(host)] if neurons else [])]
            tables[part] = [HeadScores(table, name=part.label) for table in rows]
        elif isinstance(part, (GateGradient, OutputScore, AttentionScore)):
            sums[part] = _Mean(host, neurons)
        else:
            raise ArgumentError(
                f"{type(part).__name__} is not a criterion: derive it from WeightScore, "
                "GateGradient, OutputScore, AttentionScore or CombinedScore."
            )
    if sums:
        if data is None:
            names = ", ".join(part.label for part in sums)
            raise DataError(f"{names}: calibration data is needed, but data is None.")
        _read(host, data, sums, loss, progress, neurons)
    for part, mean in sums.items():
        tables[part] = [
            HeadScores(part.finish(table).rows, name=part.label)
            for table in mean.tables(part.label)
        ]
    return tables


def _score(
    criterion: Criterion, tables: dict[Criterion, HeadScores], setting: Setting
) -> HeadScores:
    if not isinstance(criterion, CombinedScore):
        return tables[criterion]
    parts = [_score(part, tables, setting) for part in criterion.parts]
    result = criterion.combine(parts, setting)
    return result if result.name else HeadScores(result.rows, name=criterion.label)


def _simple(criterion: Criterion) -> list[Criterion]:
    if isinstance(criterion, CombinedScore):
        return [inner for part in criterion.parts for inner in _simple(part)]
    return [criterion]


class _Mean:
    """Sums and counts of all units, float64 `[2, units]`: heads by layer, then neurons by layer."""

    def __init__(self, host: HostModel, neurons: bool) -> None:
        self.layers = len(host)
        self.units = [*host.head_counts, *(host.neuron_counts if neurons else ())]
        self.sums = torch.zeros(2, sum(self.units), dtype=torch.float64)

    def add(self, row: int, values: Tensor, count: Tensor | float) -> None:
        """Add to a row: the number of a layer for its heads, after all layers for its neurons."""
        total, counts = (part.split(self.units)[row] for part in self.sums)
        total += values.detach().double().cpu()
        counts += count

    def tables(self, name: str) -> list[HeadScores]:
        """Return the means of heads, and of neurons; raise for a unit without any sample."""
        total, counts = (part.split(self.units) for part in self.sums)
        for row, count in enumerate(counts):
            if not bool((count > 0).all()):
                raise DataError(
                    f"{name}: nothing could be counted in layer {row % self.layers}. Is the data "
                    "empty, or has every sample a single token?"
                )
        means = [t / c for t, c in zip(total, counts, strict=True)]
        starts = range(0, len(means), self.layers)
        return [HeadScores(means[start : start + self.layers]) for start in starts]


def _read(
    host: HostModel,
    data: Iterable[Any],
    sums: dict[Criterion, _Mean],
    loss: Loss | None,
    progress: bool,
    neurons: bool,
) -> None:
    """Add up what the criteria need, in one pass."""
    cost = GRADIENT_PASSES if any(isinstance(c, GateGradient) for c in sums) else 1
    batches = cost * (length_of(data) or 0)
    expect_batches(host.model, data, batches, "scoring units", enabled=progress)
    names = {str(place): criterion for place, criterion in enumerate(sums)}
    by_gate = [c for c in sums if isinstance(c, GateGradient)]
    by_output = [c for c in sums if isinstance(c, OutputScore)]
    by_attention = [c for c in sums if isinstance(c, AttentionScore)]
    of_batch: dict[Criterion, _Mean] = {}

    def observe(view: AttentionView) -> None:
        for criterion in by_attention:
            values = criterion.values(view)
            left_in = ~values.isnan()
            count = left_in.double().sum(0).cpu()
            of_batch[criterion].add(view.layer, values.nan_to_num(0.0).sum(0), count)

    def weigh(row: int, values: Tensor, weight: Tensor) -> None:
        for criterion in by_output:
            of_batch[criterion].add(row, criterion.total(values, weight), len(values))

    def work(index: int, batch: Any) -> dict[str, Tensor]:
        check_inputs(batch)
        of_batch.update({criterion: _Mean(host, neurons) for criterion in sums})
        if outputs is not None:
            outputs.attention_mask(split_batch(batch)[1].get("attention_mask"))
        if by_gate:
            run = partial(gate_gradients, host, loss=loss, watch=watch, neurons=neurons)
            # what was watched before memory ran out would count twice
            watched = watch is not None or outputs is not None
            parts = [(batch, run(batch))] if watched else halving(run, batch)
            for _, gradients in parts:
                for row, values in enumerate(gradients):
                    for criterion in by_gate:
                        total = criterion.accumulate(values.double())
                        of_batch[criterion].add(row, total, len(values))
        else:
            _run(host, batch, watch)
        return {name: of_batch[criterion].sums for name, criterion in names.items()}

    halving = Halving("calibration data")
    with ExitStack() as stack:
        stack.enter_context(evaluating(host.model))
        watch = outputs = None
        if by_attention:
            watch = stack.enter_context(watch_attention(host, observe))
        if by_output:
            outputs = stack.enter_context(watch_outputs(host, weigh, neurons=neurons))
        # sums of batches are added in their order: the same bits for any number of processes
        results = in_order(data, work, name="calibration")
        for result in progress_bar(
            results,
            description="units" if neurons else "heads",
            enabled=progress,
            total=length_of(data),
        ):
            for name, criterion in names.items():
                sums[criterion].sums += result[name]


def _run(host: HostModel, batch: Any, watch: Watch | None) -> Any:
    if watch is not None:
        watch.attention_mask(split_batch(batch)[1].get("attention_mask"))
    output = call_model(host.model, batch)
    if watch is not None:
        watch.check()
    return output


def gate_gradients(
    model: nn.Module | HostModel,
    batch: Any,
    *,
    loss: Loss | None = None,
    watch: Watch | None = None,
    neurons: bool = False,
) -> list[Tensor]:
    """Return dL(x)/dg_h at g = 1 for each sample and head: one tensor `[batch, heads]` per layer.

    Every sample has its own gates, so one backward pass of the summed loss gives them all. With
    `neurons` as many tensors `[batch, neurons]` follow.
    """
    host = host_model(model)
    args, kwargs, labels = split_batch(batch)
    size = next((len(x) for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
    if not size:
        raise DataError("A batch of the calibration data has no tensor or no sample.")
    counts = [*host.head_counts, *(host.neuron_counts if neurons else ())]
    places = [site.output.weight.device for site in host.sites] * 2
    gates = [
        torch.ones(size, count, device=device, requires_grad=True)  # type: ignore[arg-type]
        for count, device in zip(counts, places, strict=False)
    ]
    of_neurons = [g if g.shape[1] else None for g in gates[len(host) :]] if neurons else None
    with torch.enable_grad(), gate(host, gates[: len(host)], of_neurons):
        logits = host.read(_run(host, batch, watch))
        losses = sample_losses(
            logits, labels, host, loss=loss, padding=kwargs.get("attention_mask")
        )
        if not losses.requires_grad:
            raise UnsupportedModelError(
                f"The loss of {host.name} has no gradient: its forward, or the loss, detaches it "
                "(torch.no_grad, .item(), argmax?). Use entropy, magnitude or a differentiable "
                "loss."
            )
        found = torch.autograd.grad(losses.sum(), gates, allow_unused=True)
    _forget_graphs(host.model)
    return [torch.zeros_like(g) if d is None else d for g, d in zip(gates, found, strict=True)]


def _forget_graphs(model: nn.Module) -> None:
    """Empty caches that hold tensors of the last graph (LeViT's biases): they cannot be copied."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, dict) and not name.startswith("_"):
                tensors = [v for v in value.values() if isinstance(v, Tensor)]
                if any(tensor.grad_fn is not None for tensor in tensors):
                    value.clear()
