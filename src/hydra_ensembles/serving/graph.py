"""An ensemble as one function of tensors: prepared inputs in, the contract's outputs out.

This is what is exported. It runs the ensemble's own code, with the packed weights in the place of
the head banks and the statistics of novelty as buffers of their own.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..data.eval_mode import twin
from ..errors import DataError, HydraError, UnsupportedModelError
from ..fusion import FusedBlock, HydraEnsemble
from ..fusion.known_data import features_of
from ..prediction import Prediction
from ..runtime.contract import OUTPUTS
from ..uncertainty import predict_from_logits
from ..uncertainty.novelty import from_tensors
from .export_example import Example
from .rules import Rule


class AnsweringGraph(nn.Module):
    """The whole answer of an ensemble, for `torch.export`.

    Args:
        ensemble: What `frozen` returned.
        names: Names of the inputs, in their order; empty when the host takes them by place.
        rule: When to abstain.
    """

    def __init__(self, ensemble: HydraEnsemble, names: Sequence[str], rule: Rule) -> None:
        super().__init__()
        self.ensemble = ensemble
        self._names = tuple(names)
        self._rule = rule
        self.novelty: nn.Module | None = None
        if ensemble.novelty is not None:
            self.novelty = NoveltyGraph(ensemble.novelty.single())

    @property
    def output_names(self) -> list[str]:
        """Names of what `forward` returns."""
        new = self.novelty is not None
        return [n for n in OUTPUTS if new or not n.startswith("novelty")]

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs of the contract, in its order."""
        batch: Any = dict(zip(self._names, inputs, strict=True)) if self._names else inputs
        if self.novelty is None:
            logits, summaries = self.ensemble.member_logits(batch).float(), None
        else:
            logits, summaries = features_of(self.ensemble, batch)
        answer = predict_from_logits(
            logits,
            score=self.ensemble.score,
            temperature=self.ensemble.temperature,
            member_temperatures=self.ensemble.member_temperatures,
            logit_scale=getattr(self.ensemble.host, "logit_scale", None),
        )
        outputs = outputs_of(answer)
        if self.novelty is not None:
            outputs["novelty"], outputs["novelty_score"] = self.novelty(summaries, logits)
        outputs["decision"] = self._rule(outputs["uncertainty"], outputs.get("novelty_score"))
        outputs["abstain"] = outputs["decision"] != 0
        # an output of its own, even where it is the same tensor: graphs name outputs by tensor
        return tuple(outputs[name].contiguous().clone() for name in self.output_names)


class FeaturesGraph(nn.Module):
    """What novelty is fitted on: raw member logits and token summaries.

    Args:
        ensemble: What `frozen` returned.
        names: Names of the inputs, in their order; empty when the host takes them by place.
    """

    output_names = ("member_logits", "summaries")

    def __init__(self, ensemble: HydraEnsemble, names: Sequence[str]) -> None:
        super().__init__()
        self.ensemble = ensemble
        self._names = tuple(names)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits `[batch, member, class]` and summaries `[batch, tap, width]`."""
        batch: Any = dict(zip(self._names, inputs, strict=True)) if self._names else inputs
        logits, summaries = features_of(self.ensemble, batch)
        return logits.contiguous().clone(), summaries.contiguous().clone()


def outputs_of(answer: Prediction) -> dict[str, Tensor]:
    """Return the outputs of a prediction by name, in the contract's types; no rule applied."""
    found = {
        "label": answer.class_index,
        "probabilities": answer.probabilities.float(),
        "uncertainty": answer.uncertainty.float(),
        "mutual_information": answer.mutual_information.float(),
        "member_logits": answer.member_logits.float(),
    }
    if answer.novelty is not None and answer.novelty_score is not None:
        found["novelty"] = answer.novelty.float()
        found["novelty_score"] = answer.novelty_score.float()
    return found


class NoveltyGraph(nn.Module):
    """The statistics of novelty as buffers, so that they bear names in what is exported."""

    def __init__(self, novelty: Any) -> None:
        super().__init__()
        self._facts: dict[str, Any] = {**novelty.facts(), "names": []}
        self._keys: list[str] = []
        for name, tensor in novelty.tensors().items():
            if not name.startswith(("bank", "hashes")):  # known examples, which no score needs
                self._keys.append(name)
                self.register_buffer(name.replace(".", "_"), tensor.detach().cpu().contiguous())
        self.register_buffer("bank", torch.zeros(0))
        self._empty = {"bank": "bank", "bank_positions": "bank"}

    def forward(self, summaries: Tensor, member_logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return novelty and its score."""
        names = {**{name: name.replace(".", "_") for name in self._keys}, **self._empty}
        tensors: dict[str, Tensor] = {name: getattr(self, key) for name, key in names.items()}
        novelty, score = from_tensors(tensors, self._facts)(summaries, member_logits)
        return novelty.float(), score.float()


def in_float32(ensemble: HydraEnsemble) -> HydraEnsemble:
    """Return the ensemble as programs compute, on the CPU and in float32; a copy if need be.

    Programs are compared with this one: a comparison with answers in half precision would have to
    let errors of the size of their rounding pass.
    """
    novelty = ensemble.novelty
    if novelty is not None and novelty.precision != "float32":
        raise DataError(
            f"Novelty was fitted in {novelty.precision}, but exported programs compute in float32, "
            "where the features differ. Call ensemble.float().fit_novelty_(known), and "
            "fit_policy() if there is a policy; or set ensemble.novelty = None and "
            "ensemble.policy = None to export it without."
        )
    same = ensemble.device.type == "cpu" and ensemble.dtype == torch.float32
    return ensemble if same else copy.deepcopy(ensemble).cpu().float()


def frozen(ensemble: HydraEnsemble, inputs: Mapping[str, Any]) -> HydraEnsemble:
    """Return the ensemble as it is exported: fused, weights packed.

    The ensemble itself stays as it is; tensors are shared with it where they need no change.

    Args:
        ensemble: Any classifier, as `in_float32` returned it.
        inputs: A batch to run it on once.
    """
    ready = twin(ensemble).eval()
    ready.mode, ready.policy = "fused", None  # the rule decides
    if ready.novelty is not None:
        ready.novelty = ready.novelty.to("cpu")
    with torch.no_grad():
        ready.predict(inputs)  # hooks and caches are made here, not while it is traced
        if not ready.is_classifier:
            raise UnsupportedModelError(
                f"{type(ensemble.host).__name__} gives embeddings, not classes: there is no answer "
                "to export. Load it with a classifier, or wrap a dual encoder in "
                "ZeroShotClassifier."
            )
        for block in ready.body.branch:
            if isinstance(block, FusedBlock):
                block.bank.freeze_()
    return ready


# Trace a graph once, for any size of batch and any number of tokens; write it as ONNX.
def trace(graph: nn.Module, inputs: Example, limits: dict[str, int]) -> Any:
    """Trace a graph for any size of batch and any number of tokens."""
    sizes = {"batch": torch.export.Dim("batch", min=1, max=2**20)}
    if limits:
        sizes["tokens"] = torch.export.Dim("tokens", min=1, max=limits["tokens"])
    shapes = tuple(
        {axis: sizes[dim] for axis, dim in enumerate(inputs.dims(name)) if isinstance(dim, str)}
        for name in inputs.tensors
    )
    rows = inputs.rows(3)
    if inputs.has_tokens and rows["input_ids"].shape[1] in (1, 3):  # sizes that mean one thing
        rows = {n: torch.cat([t, t[:, -1:]], 1) if t.ndim == 2 else t for n, t in rows.items()}
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            warnings.filterwarnings("ignore", category=FutureWarning)
            return torch.export.export(
                graph, tuple(rows.values()), dynamic_shapes=(shapes,), strict=False
            )
    except HydraError:
        raise
    except Exception as error:  # torch.export has many kinds of errors, of its own and of the host
        reason = " ".join(str(error).split())[:300]
        fixed = "specialized it to be a constant" in reason
        hint = " Its forward may call len(tensor): write tensor.shape[0]." if fixed else ""
        raise UnsupportedModelError(
            f"{inputs.host} cannot be exported for any size of batch: "
            f"{type(error).__name__}: {reason}.{hint}"
        ) from error


def write_onnx(program: Any, inputs: Example, outputs: list[str], path: Path) -> None:
    """Write a traced graph as an ONNX program, by torch's exporter."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.onnx.*")
        made = torch.onnx.export(
            program,
            dynamo=True,
            input_names=list(inputs.tensors),
            output_names=outputs,
            verbose=False,
        )
    assert made is not None
    _name_sizes(made, inputs)
    made.save(str(path))


def _name_sizes(made: Any, inputs: Example) -> None:
    """Call the free sizes of inputs and outputs by their names in place of torch's symbols."""
    import onnx_ir as ir

    names: dict[str, str] = {}
    for value in made.model.graph.inputs:
        for found, wanted in zip(value.shape, inputs.dims(value.name), strict=True):
            if isinstance(wanted, str):
                names[str(found)] = wanted
    for value in (*made.model.graph.inputs, *made.model.graph.outputs):
        value.shape = ir.Shape([names.get(str(size), size) for size in value.shape])
