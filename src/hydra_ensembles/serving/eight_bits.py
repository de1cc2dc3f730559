"""A program with 8-bit weights that knows its own features.

8-bit weights barely change the members' logits. But in directions where the known data varies
little, they shift the features more than the data does: against full-precision statistics every
input would look novel. So the quantised program itself is run on known and held-out data, and
novelty and thresholds are refitted to its features.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data.batches import split_batch
from ..errors import DataError
from ..fusion import HydraEnsemble, fit_policy, fit_sets
from ..fusion.inputs import is_raw, prepare
from ..fusion.known_data import novelty_fit, proxies_of
from ..prediction import Prediction
from ..prediction_sets import Sets
from ..uncertainty import NoveltyFit, Policy
from ..uncertainty.policy import GIVEN
from ..uncertainty.scores import per_text
from .export_example import TEXT_INPUTS, Example, named
from .graph import AnsweringGraph, FeaturesGraph, prediction_of, write_onnx


class EightBits:
    """The features of an ensemble with 8-bit weights, as a model that `fit_policy` takes.

    Activations are rounded by a scale that a batch shares. So every second batch is run row by row:
    what is fitted knows both kinds of batches.

    Args:
        ready: What `frozen` returned; its novelty is replaced by that of the 8-bit program.
        inputs: What it is traced with.
        path: Where the program goes.
    """

    policy: Policy | None = None
    session: Any

    def __init__(self, ready: HydraEnsemble, inputs: Example, path: Path) -> None:
        self.ready, self.inputs, self.path = ready, inputs, path
        self.novelty, self.batches = ready.novelty, 0

    def write(self, graph: AnsweringGraph | FeaturesGraph) -> None:
        """Write a graph as a program with 8-bit weights."""
        full = self.path.with_name("full.onnx")
        try:
            write_onnx(graph, self.inputs, full)
            quantize(full, self.path)
        finally:
            full.unlink(missing_ok=True)

    def fit_(self, known: Any, policy: Policy | None, held_out: Any) -> Policy | None:
        """Refit novelty to known data and a policy to held-out data; return the policy.

        The uncertainty threshold of a policy that was set by hand stays as it is.
        """
        import onnxruntime

        self.write(FeaturesGraph(self.ready, self.inputs.names))
        self.session = onnxruntime.InferenceSession(
            self.path.read_bytes(), providers=["CPUExecutionProvider"]
        )
        fit: NoveltyFit | None = None
        for batch in () if known is None else known:
            labels = None if is_raw(batch) else split_batch(batch)[2]
            logits, summaries, _ = self.features(batch)
            # activations are scaled per batch, so that examples of one batch are near each other
            fit = fit or novelty_fit(self.ready, logits.shape[-1], without=("neighbour",))
            by_class = labels is not None and labels.ndim == 1 and self.ready.task.classifies
            fit.add_(summaries, self._rows_of(logits), labels if by_class else None)
        if self.novelty is not None:
            if fit is None:
                raise DataError("The known data is empty: it gave no batch.")
            add = partial(self._add_proxies_, fit, known)
            self.novelty = self.ready.novelty = fit.finish(add_proxies=add)
        if policy is None or (policy.method == GIVEN and policy.alarm is None):
            return policy
        if policy.method == GIVEN:
            assert self.novelty is not None and policy.alarm is not None
            return replace(policy, novelty_threshold=self.novelty.threshold(policy.alarm))
        return fit_policy(
            self,
            held_out,
            risk=policy.risk,
            alarm=policy.alarm,
            method=policy.method,
            delta=0.1 if policy.delta is None else policy.delta,
            progress=False,
        )

    def _add_proxies_(self, fit: NoveltyFit, known: Any) -> None:
        """Add far outliers made of known data, without which no terms may join."""
        for name, data in proxies_of(known).items():
            for batch in data:
                logits, summaries, _ = self.features(batch)
                fit.add_ood_(name, summaries, self._rows_of(logits))

    def fit_sets_(self, sets: Sets, held_out: Any) -> Sets:
        """Refit sets to held-out data; groups have no names here, so all share one threshold."""
        return fit_sets(
            self,
            held_out,
            coverage=sets.coverage,
            method=sets.method,
            groups="class" if sets.by == "class" else None,
            randomised=sets.randomised,
            seed=sets.seed,
            progress=False,
        )

    def features(self, batch: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the member logits, the token summaries and a student's logits of a batch."""
        batch = prepare(self.ready, batch) if is_raw(batch) else batch
        args, kwargs, _ = split_batch(batch)
        values = named(self.ready, args, kwargs)
        if set(values) != set(self.inputs.tensors):
            raise DataError(
                f"Batch {self.batches} has the inputs {', '.join(values)}; the example has "
                f"{', '.join(self.inputs.tensors)}. Prepare both alike."
            )
        batch = {n: v.detach().cpu().to(self.inputs.tensors[n].dtype) for n, v in values.items()}
        parts = list(_rows(batch)) if self.batches % 2 else [batch]
        self.batches += 1
        outputs = [self.session.run(None, {n: t.numpy() for n, t in p.items()}) for p in parts]
        logits = [
            per_text(torch.from_numpy(o[0]), p.get("attention_mask"))
            for o, p in zip(outputs, parts, strict=True)
        ]
        summaries, *student = (
            torch.cat([torch.from_numpy(part) for part in parts])
            for parts in list(zip(*outputs, strict=True))[1:]
        )
        return torch.cat(logits), summaries, student[0] if student else None

    def _rows_of(self, logits: Tensor) -> Tensor | None:
        """Return the logits whose probability speaks for novelty, if the task has any."""
        return logits if self.ready.task.classifies else None

    def predict(self, batch: Any) -> Prediction:
        """Predict a batch by the ensemble's score and temperatures, and the novelty fitted here."""
        logits, summaries, student_logits = self.features(batch)
        answer = prediction_of(self.ready, logits, student_logits, {})
        if self.novelty is None:
            return answer
        novelty, score = self.novelty(summaries, self._rows_of(logits))
        return replace(answer, novelty=novelty, novelty_score=score)


def _rows(batch: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield each row as a batch, without the padding that longer texts beside it need."""
    mask = batch.get("attention_mask")
    for row in range(len(next(iter(batch.values())))):
        single = {name: tensor[row : row + 1] for name, tensor in batch.items()}
        tokens = [] if mask is None else mask[row].nonzero().flatten().tolist()
        if tokens:
            span = slice(tokens[0], tokens[-1] + 1)
            single |= {name: t[:, span] for name, t in single.items() if name in TEXT_INPUTS}
        yield single


def quantize(source: Path, target: Path) -> None:
    """Write a program with 8-bit weights in its linear layers and embeddings, by ONNX Runtime.

    Only weights of two axes are quantised. The statistics of novelty have three, since their
    distances compare features in thousandths, and so have linear readouts (see `LinearReadout`).
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(str(source))
    del model.graph.value_info[:]  # transposed weights have other shapes; they are inferred again
    tables = {weight.name for weight in model.graph.initializer if len(weight.dims) == 2}
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)  # it advises to preprocess, which torch's exporter has done
    try:
        quantize_dynamic(
            model,
            str(target),
            op_types_to_quantize=["MatMul", "Gemm", "Gather"],
            nodes_to_exclude=[n.name for n in model.graph.node if not tables & set(n.input)],
            per_channel=True,
            weight_type=QuantType.QInt8,
        )
    finally:
        root.setLevel(level)
