"""A program with 8-bit weights that knows its own features.

8-bit weights barely change the members' logits. But in directions where the known data varies
little, they shift the features more than the data does: against full-precision statistics every
input would look novel. So the quantised program itself is run on known and held-out data, and
novelty and thresholds are refitted to its features.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..data.model_runs import split_batch
from ..errors import DataError
from ..fusion import HydraEnsemble, fit_policy
from ..fusion.inputs import is_raw, prepare
from ..fusion.known_data import novelty_fit, per_text
from ..uncertainty import Policy, Prediction
from ..uncertainty.policy import GIVEN
from .export_example import TEXT_INPUTS, Example, named
from .graph import AnsweringGraph, FeaturesGraph, prediction_of, trace, write_onnx


class EightBits:
    """The features of an ensemble with 8-bit weights, as a model that `fit_policy` takes.

    Activations are rounded by a scale that a batch shares. So every second batch is run row by row:
    what is fitted knows both kinds of batches.

    Args:
        ready: What `frozen` returned; its novelty is replaced by that of the 8-bit program.
        inputs: What it is traced with.
        limits: The largest sizes, by name.
        path: Where the program goes.
    """

    policy: Policy | None = None

    def __init__(
        self, ready: HydraEnsemble, inputs: Example, limits: dict[str, int], path: Path
    ) -> None:
        self.ready, self.inputs, self.limits, self.path = ready, inputs, limits, path
        self.session: Any = None
        self._batches = 0

    @property
    def novelty(self) -> Any:
        """The novelty that `predict` uses."""
        return self.ready.novelty

    def fit_novelty_(self, known: Iterable[Any]) -> None:
        """Fit novelty to the features of the 8-bit program."""
        fit = None
        for batch in known:
            labels = None if is_raw(batch) else split_batch(batch)[2]
            logits, summaries = self.features(batch)
            fit = fit or novelty_fit(self.ready, logits.shape[-1])
            fit.add_(summaries, logits, labels if labels is None or labels.ndim == 1 else None)
        if fit is None:
            raise DataError("The known data is empty: it gave no batch.")
        self.ready.novelty = fit.finish()

    def fitted_policy(self, policy: Policy, held_out: Iterable[Any] | None) -> Policy:
        """Return the ensemble's policy with thresholds for the 8-bit program.

        The uncertainty threshold of a policy that was set by hand stays as it is.
        """
        if policy.method != GIVEN:
            assert held_out is not None
            chosen = {"risk": policy.risk, "alarm": policy.alarm, "method": policy.method}
            delta = 0.1 if policy.delta is None else policy.delta
            return fit_policy(self, held_out, **chosen, delta=delta, progress=False)  # type: ignore[arg-type]
        if policy.alarm is None:
            return policy
        return replace(policy, novelty_threshold=self.novelty.threshold(policy.alarm))

    def write(self, policy: Policy | None) -> None:
        """Write the 8-bit program that answers by a policy; without one, that of the features."""
        import onnxruntime

        full = self.path.with_name("full.onnx")
        graph: nn.Module
        if policy is None:
            graph, outputs = FeaturesGraph(self.ready, self.inputs.names), ["logits", "summaries"]
        else:
            graph = AnsweringGraph(self.ready, self.inputs.names, policy)
            outputs = graph.output_names
        try:
            write_onnx(trace(graph.eval(), self.inputs, self.limits), self.inputs, outputs, full)
            quantize(full, self.path)
        finally:
            full.unlink(missing_ok=True)
        self.session = onnxruntime.InferenceSession(
            self.path.read_bytes(), providers=["CPUExecutionProvider"]
        )

    def features(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the member logits and token summaries of a batch."""
        batch = prepare(self.ready, batch) if is_raw(batch) else batch
        args, kwargs, _ = split_batch(batch)
        values = named(self.ready, args, kwargs)
        if set(values) != set(self.inputs.tensors):
            raise DataError(
                f"Batch {self._batches} has the inputs {', '.join(values)}; the example has "
                f"{', '.join(self.inputs.tensors)}. Prepare both alike."
            )
        batch = {n: v.detach().cpu().to(self.inputs.tensors[n].dtype) for n, v in values.items()}
        rows = len(next(iter(batch.values())))
        parts = [_row(batch, row) for row in range(rows)] if self._batches % 2 else [batch]
        self._batches += 1
        logits, summaries = [], []
        for part in parts:
            found = self.session.run(None, {name: t.numpy() for name, t in part.items()})
            logits.append(per_text(torch.from_numpy(found[0]), part))
            summaries.append(torch.from_numpy(found[1]))
        return torch.cat(logits), torch.cat(summaries)

    def predict(self, batch: Any) -> Prediction:
        """Predict a batch by the ensemble's score and temperatures, and the novelty fitted here."""
        logits, summaries = self.features(batch)
        answer = prediction_of(self.ready, logits)
        if self.novelty is None:
            return answer
        novelty, score = self.novelty(summaries, logits)
        return replace(answer, novelty=novelty, novelty_score=score)


def _row(batch: dict[str, Tensor], row: int) -> dict[str, Tensor]:
    """Return a row as a batch, without the padding that longer texts beside it need."""
    single = {name: tensor[row : row + 1] for name, tensor in batch.items()}
    mask = batch.get("attention_mask")
    tokens = [] if mask is None else mask[row].nonzero().flatten().tolist()
    if tokens:
        span = slice(tokens[0], tokens[-1] + 1)
        single |= {name: t[:, span] for name, t in single.items() if name in TEXT_INPUTS}
    return single


def quantize(source: Path, target: Path) -> None:
    """Write a program with 8-bit weights in its linear layers and embeddings, by ONNX Runtime.

    Weights become signed 8-bit integers with one scale per column; activations are quantised while
    the program runs. Only weights of two axes are quantised: the statistics of novelty have three,
    and their distances compare features in thousandths.
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
