"""An ensemble as one function of tensors: prepared inputs in, the contract's outputs out.

This is what is exported. It runs the ensemble's own code, with packed weights instead of the head
banks and the statistics of novelty as buffers.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batches import split_batch
from ..data.eval_mode import twin
from ..errors import DataError, HydraError, UnsupportedModelError
from ..fusion import FusedBlock, HydraEnsemble
from ..fusion.known_data import novelty_rows, run_of
from ..prediction import Prediction
from ..runtime.contract import OUTPUTS, TASK_OUTPUTS
from ..uncertainty import Policy
from ..uncertainty.novelty import Novelty, from_tensors
from .export_example import Example


class AnsweringGraph(nn.Module):
    """The whole answer of an ensemble, for `torch.export`.

    Args:
        ensemble: What `frozen` returned.
        names: Names of the inputs, in order; empty when the host takes them by position.
        policy: When to abstain, with finite thresholds.
    """

    def __init__(self, ensemble: HydraEnsemble, names: Sequence[str], policy: Policy) -> None:
        super().__init__()
        self.ensemble = ensemble
        self._names = tuple(names)
        self._policy = policy
        self.novelty = None if ensemble.novelty is None else NoveltyGraph(ensemble.novelty.single())
        absent = set() if self.novelty else {"novelty", "novelty_score"}
        absent |= {"student_logits", "student_values"} if ensemble.student is None else set()
        given = TASK_OUTPUTS[task_name(ensemble)] - absent
        self.output_names = [name for name in OUTPUTS if name in given]

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs of the contract, in its order."""
        batch: Any = dict(zip(self._names, inputs, strict=True)) if self._names else inputs
        run = run_of(self.ensemble, batch, summaries=self.novelty is not None)
        logits = run.member_logits.float()
        answer = prediction_of(self.ensemble, logits, run.student_logits, batch)
        if self.novelty is not None:
            novelty, score = self.novelty(run.summaries, novelty_rows(self.ensemble, logits, batch))
            answer = replace(answer, novelty=novelty, novelty_score=score)
        outputs = outputs_of(answer, self._policy)
        # clone: ONNX names outputs by tensor, so one tensor cannot be two outputs
        return tuple(outputs[name].contiguous().clone() for name in self.output_names)


class FeaturesGraph(nn.Module):
    """What novelty is fitted on: raw member logits, token summaries, a student's raw logits.

    Args:
        ensemble: What `frozen` returned.
        names: Names of the inputs, in order; empty when the host takes them by position.
    """

    def __init__(self, ensemble: HydraEnsemble, names: Sequence[str]) -> None:
        super().__init__()
        self.ensemble, self.output_names = ensemble, ["member_logits", "summaries"]
        self.output_names += [] if ensemble.student is None else ["student_logits"]
        self._names = tuple(names)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the logits `[batch, member, class]`, summaries `[batch, tap, width]`, and more."""
        batch: Any = dict(zip(self._names, inputs, strict=True)) if self._names else inputs
        run = run_of(self.ensemble, batch, summaries=True)
        outputs = (run.member_logits, run.summaries, run.student_logits)
        return tuple(x.float().contiguous().clone() for x in outputs if x is not None)


def task_name(ensemble: HydraEnsemble) -> str:
    """Return what the contract calls an ensemble's task."""
    name = ensemble.task.name
    if name in TASK_OUTPUTS:
        return name
    if ensemble.task.classifies and not ensemble.task.by_token:
        return "classification"
    if ensemble.task.by_token:  # masked words and next words
        return "token-classification"
    raise UnsupportedModelError(
        f"There is no program for {ensemble.task.title}: an export answers for "
        f"{', '.join(TASK_OUTPUTS)}. Serve the saved ensemble itself."
    )


def prediction_of(
    ensemble: HydraEnsemble, logits: Tensor, student_logits: Tensor | None, batch: Any
) -> Prediction:
    """Turn raw logits into a prediction by the ensemble's score and calibration."""
    more: dict[str, Any] = {}
    if ensemble.task.reads_inputs:
        more = {"inputs": split_batch(batch)[1]}
    return ensemble.task.answer(
        logits,
        student_logits=student_logits,
        score=ensemble.score,
        temperature=ensemble.temperature,
        member_temperatures=ensemble.member_temperatures,
        logit_scale=getattr(ensemble.host, "logit_scale", None),
        **more,
        **ensemble.calibrated_by(),
    )


def outputs_of(answer: Prediction, policy: Policy) -> dict[str, Tensor]:
    """Return a prediction and its decision as the outputs of the contract."""
    found = {_OUTPUT_OF.get(name, name): column for name, column in answer._columns().items()}
    outputs = {
        name: column.float() if column.is_floating_point() else column
        for name, column in found.items()
        if name in OUTPUTS and name not in ("disagreement",) * ("class" in found)
    }
    outputs["decision"] = policy.decide(outputs["uncertainty"], outputs.get("novelty_score"))
    return outputs


_OUTPUT_OF = {"class_index": "class"}
"""Outputs of the contract whose column has another name."""


class NoveltyGraph(nn.Module):
    """The statistics of novelty as buffers, so that they have names in the exported program."""

    def __init__(self, novelty: Novelty) -> None:
        super().__init__()
        self._facts: dict[str, Any] = novelty.without_names().facts()
        self._buffers_by_name: dict[str, str] = {"bank": "bank", "bank_positions": "bank"}
        self.register_buffer("bank", torch.zeros(0))
        for name, tensor in novelty.tensors().items():
            if not name.startswith(("bank", "hashes")):  # known examples, which no score needs
                self._buffers_by_name[name] = name.replace(".", "_")
                self.register_buffer(name.replace(".", "_"), tensor.detach().cpu().contiguous())

    def forward(self, summaries: Tensor, member_logits: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return novelty and its score."""
        tensors = {name: getattr(self, buffer) for name, buffer in self._buffers_by_name.items()}
        novelty, score = from_tensors(tensors, self._facts)(summaries, member_logits)
        return novelty.float(), score.float()


def exported_policy(
    policy: Policy | None, ensemble: HydraEnsemble, alarm: float | None
) -> tuple[Policy, str]:
    """Return a policy with finite thresholds, and what it says in words.

    Without a policy, that is an alarm for inputs more novel than all but `alarm` of the known data;
    without novelty, everything is answered.
    """
    if policy is not None:
        return policy.finite(), str(policy)
    if alarm is None or ensemble.novelty is None:
        return Policy().finite(), "always answer: there is no policy"
    if not 0 < alarm < 1:
        raise ValueError(f"alarm={alarm}: expected a number between 0 and 1, such as 0.05.")
    newest = ensemble.novelty.single().threshold(alarm)
    words = f"new when novelty is above {1 - alarm:.4g}, as is {alarm:.3g} of the known data"
    return Policy(novelty_threshold=newest, alarm=alarm, score=ensemble.score).finite(), words


def in_float32(ensemble: HydraEnsemble) -> HydraEnsemble:
    """Return the ensemble on the CPU and in float32, as programs compute; a copy if needed.

    Programs are compared with this ensemble: against answers in half precision, the tolerance would
    have to be as large as their rounding.
    """
    novelty = ensemble.novelty
    if novelty is not None and novelty.precision != "float32":
        raise DataError(
            f"Novelty was fitted in {novelty.precision}, but exported programs compute in float32, "
            "where the features differ. Call ensemble.float().fit_novelty_(known), and "
            "fit_policy() if there is a policy; or set ensemble.novelty = None and "
            "ensemble.policy = None to export without it."
        )
    same = ensemble.device.type == "cpu" and ensemble.dtype == torch.float32
    return ensemble if same else copy.deepcopy(ensemble).cpu().float()


def frozen(ensemble: HydraEnsemble, inputs: Mapping[str, Any]) -> HydraEnsemble:
    """Return the ensemble as it is exported: fused, weights packed.

    The ensemble itself is not changed; tensors that stay the same are shared with it.

    Args:
        ensemble: As `in_float32` returned it.
        inputs: A batch to run it on once.
    """
    ready = twin(ensemble).eval()
    ready.mode, ready.policy = "fused", None  # the graph decides
    if ready.novelty is not None:
        ready.novelty = ready.novelty.to("cpu")
    with torch.no_grad():
        ready.predict(inputs)  # hooks and caches are made here, not while it is traced
        for block in ready.body.branch:
            if isinstance(block, FusedBlock):
                block.bank.freeze_()
    return ready


def write_onnx(graph: AnsweringGraph | FeaturesGraph, inputs: Example, path: Path) -> None:
    """Trace a graph for any size of batch and any number of tokens; write it as ONNX."""
    import onnx_ir as ir

    sizes = {"batch": torch.export.Dim("batch", min=1, max=2**20)}
    if inputs.most_tokens:
        sizes["tokens"] = torch.export.Dim("tokens", min=1, max=inputs.most_tokens)
    shapes = tuple(
        {axis: sizes[dim] for axis, dim in enumerate(inputs.dims(name)) if isinstance(dim, str)}
        for name in inputs.tensors
    )
    rows = inputs.rows(3)
    # torch takes a size of 1 as fixed, and one of 3 as the size of the batch
    if inputs.most_tokens and rows["input_ids"].shape[1] in (1, 3):
        rows = {n: torch.cat([t, t[:, -1:]], 1) if t.ndim == 2 else t for n, t in rows.items()}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.onnx.*")
        try:
            traced = torch.export.export(
                graph.eval(), tuple(rows.values()), dynamic_shapes=(shapes,), strict=False
            )
        except HydraError:
            raise
        except Exception as error:  # torch.export and the host raise many kinds of errors
            reason = " ".join(str(error).split())[:300]
            fixed = "specialized it to be a constant" in reason
            hint = " Its forward may call len(tensor): write tensor.shape[0]." if fixed else ""
            raise UnsupportedModelError(
                f"{inputs.host} cannot be exported for any size of batch: "
                f"{type(error).__name__}: {reason}.{hint}"
            ) from error
        made: Any = torch.onnx.export(
            traced,
            dynamo=True,
            input_names=list(inputs.tensors),
            output_names=graph.output_names,
            verbose=False,
        )
    names: dict[str, str] = {}  # torch's symbols for free sizes, by our names
    for value in made.model.graph.inputs:
        for symbol, size in zip(value.shape, inputs.dims(value.name), strict=True):
            if isinstance(size, str):
                names[str(symbol)] = size
    for value in (*made.model.graph.inputs, *made.model.graph.outputs):
        value.shape = ir.Shape([names.get(str(size), size) for size in value.shape])
    # torch names values after operations and weights: `embedding`, for one, which an answer is too
    answers = {value.name: value for value in made.model.graph.outputs}
    initializers = made.model.graph.initializers
    for name in answers.keys() & initializers.keys():
        weight = initializers.pop(name)
        weight.name = f"{name}_inside"
        initializers.add(weight)
    for node in made.model.graph:
        for value in node.outputs:
            if value is not answers.get(value.name, value):
                value.name = f"{value.name}_inside"
    made.save(str(path))
