"""A host whose blocks are fused: M members in one forward pass, and what they predict."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ..data import batches
from ..data.batches import (
    Unchecked,
    check_finite,
    is_host_batch,
    main_output,
    move,
    read_batch,
    split_batch,
)
from ..data.eval_mode import in_eval, twin
from ..errors import HydraError, UnsupportedModelError
from ..heads.head_mask import HeadMask
from ..heads.stream_plan import Plan
from ..hosts.block_calls import Form, HostView
from ..hosts.probes import Readout
from ..hosts.transformers_families import introduce_to_pipelines
from ..prediction import Prediction
from ..prediction_sets import Sets
from ..registry import check_name
from ..tasks import Task, task_of
from ..uncertainty import Novelty, Policy
from .assembly import Assembly
from .body import Body
from .calibrated_model import CalibratedModel
from .call_options import SummaryCollector
from .host_engine import HostedBlock, HostedBody
from .host_interface import host_output
from .inputs import READ_BY_ANSWERS, prepare
from .linear_readout import LinearReadout, refuse_readouts
from .member import member_model, unpruned_model

Mode = Literal["fused", "loop"]
Self = TypeVar("Self", bound="FusedModel")
_REFUSED = {
    "output_attentions": "members have no single answer for it",
    "output_hidden_states": "members have no single answer for it",
    "use_cache": "an ensemble runs whole sequences and returns no keys and values",
}


class Run(NamedTuple):
    """What one run of all members gives.

    Attributes:
        member_logits: Raw outputs that the task reads, `[batch, member, ...]`.
        output: The host's own output.
        summaries: Token summaries of novelty `[batch, tap, width]`, if they were asked for.
        student_logits: Raw, `[batch, class]`; None without a student.
    """

    member_logits: Tensor
    output: Any
    summaries: Tensor | None = None
    student_logits: Tensor | None = None


class FusedModel(CalibratedModel):
    """Runs the members of an assembly and predicts; `HydraEnsemble` adds fitting and saving.

    Attributes:
        host: The host model with the fused body instead of its blocks.
        task: What the outputs mean.
        mode: `"fused"`, or `"loop"` to run members one by one.
        merged: Names of the parts that were averaged over members.
        copies: Number of copies per part that differs between streams.
        switches: The options of `fuse` (plain data, saved along).
    """

    def __init__(
        self,
        assembly: Assembly,
        host: HostView,
        *,
        mode: Mode = "fused",
        task: str | Task | None = None,
    ) -> None:
        super().__init__()
        check_name("mode", mode, ("fused", "loop"))
        self.host = assembly.model
        self._task = task_of(self.host, task)
        self.mode = mode
        self.merged = assembly.merged
        self.copies = dict(assembly.copies)
        self.switches: dict[str, Any] = {}
        self.score = self.task.default_score
        self.policy: Policy | None = None
        self.sets: Sets | None = None
        self.novelty: Novelty | None = None
        self.temperature = None
        self.member_temperatures = None
        self.calibrator = None
        self._warned_precisions: set[str] = set()
        self._assembly = assembly
        self._view = host
        self._cast: tuple[tuple[Any, ...], list[nn.Module]] | None = None

    @classmethod
    def around(
        cls: type[Self],
        assembly: Assembly,
        host: HostView,
        *,
        mode: Mode,
        switches: Mapping[str, Any],
        task: str | Task | None = None,
    ) -> Self:
        """Make a model from an assembly."""
        forms = [getattr(assembly.body, "form", Form())]
        view = HostView(assembly.model, host.family, host.blocks_path, forms)
        ensemble = cls(assembly, view, mode=mode, task=task)
        ensemble.switches = dict(switches)
        ensemble.train(assembly.model.training)
        introduce_to_pipelines(assembly.model, cls)
        ensemble.remember_class_names()
        return ensemble

    @property
    def body(self) -> Body | HostedBody:
        """The fused blocks, run by our own arithmetic or by the host's code."""
        modules = list(self.host.get_submodule(self._view.blocks_path).children())
        if isinstance(modules[-1], Body):
            return modules[-1]
        return HostedBody([block for block in modules if isinstance(block, HostedBlock)])

    @property
    def engine(self) -> str:
        """What runs the blocks: `"fused"`, our own arithmetic, or `"host"`, the host's own code."""
        return "host" if isinstance(self.body, HostedBody) else "fused"

    @property
    def plan(self) -> Plan:
        """Which streams run where."""
        return self.body.plan

    @property
    def masks(self) -> tuple[HeadMask, ...]:
        """The members' masks, in terms of the host's original heads."""
        return self.plan.masks

    @property
    def members(self) -> int:
        """Number of members M."""
        return self.plan.members

    @property
    def readout(self) -> Readout:
        """Which tokens the classifier reads."""
        return self.body.readout

    @property
    def member_readout(self) -> LinearReadout | None:
        """Gives the members' logits, where members are linear readouts of one trunk."""
        readouts = self.body.readouts
        return None if readouts is None else readouts.members

    @property
    def student(self) -> LinearReadout | None:
        """The one output that answers for the ensemble; None where the members' mean does."""
        readouts = self.body.readouts
        return None if readouts is None else readouts.student

    @property
    def task(self) -> Task:
        """What the outputs mean; another one that reads the same outputs may be set."""
        return self._task

    @task.setter
    def task(self, task: str | Task) -> None:
        before, self._task = self._task, task_of(self.host, task)
        if type(before) is not type(self._task):
            self.sets = None
            self.score, self.policy = self._task.default_score, None
            self._temperature = self._member_temperatures = self._calibrator = None

    @property
    def is_classifier(self) -> bool:
        """Whether the outputs are logits of classes, one class per input or token."""
        return self.task.classifies

    def run(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        summaries: bool = False,
        mode: Mode | None = None,
    ) -> Run:
        """Run all members on inputs that are on the model's device.

        Args:
            args, kwargs: The host's inputs.
            summaries: Whether to take the token summaries that novelty reads.
            mode: `"fused"` or `"loop"`; by default the model's own.
        """
        for name, why in _REFUSED.items():
            if kwargs.get(name):
                raise UnsupportedModelError(
                    f"{name}=True is not supported: {why}. Use ensemble.member(m), a plain host "
                    "model, for that."
                )
        # no cache is made where False
        dropped = _REFUSED.keys() - {"use_cache"} | {"return_dict", *READ_BY_ANSWERS}
        kwargs = {name: value for name, value in kwargs.items() if name not in dropped}
        if (mode or self.mode) == "loop":
            outputs = [member(*args, **kwargs) for member in self._members()]
            logits = torch.stack([main_output(output, self.task.fields) for output in outputs], 1)
            run = Run(logits, outputs[0])
            if summaries or self.student is not None:
                run = self.run(args, kwargs, summaries=summaries, mode="fused")
            return run._replace(member_logits=logits, output=outputs[0])
        body = self.body
        plan, readout, readouts = body.plan, body.readout, body.readouts
        collector = features = positions = None
        # one positional input is the images or the ids: no mask to look for by its name
        named = kwargs if len(args) < 2 and readout.positions is None else self._named(args, kwargs)
        needed = summaries or readouts is not None or not body.folds
        if needed and readout.positions is not None:
            positions = readout.positions(named)
        if summaries:
            collector = SummaryCollector(
                named.get("attention_mask"),
                readout=readout.tokens is not None or readout.positions is not None,
                positions=positions,
                streams=len(plan.ends) if body.folds else 1,
            )
        if readouts is not None:
            features = readouts.collector(plan, readout, positions, named.get("attention_mask"))
        # a compiled graph cannot set options, and without collectors there are none to set
        alone = collector is None and features is None
        with nullcontext() if alone else body.options(summaries=collector, features=features):
            if body.folds:
                outputs = [self.host(*args, **kwargs)]
            else:
                outputs = body.each_stream(lambda: self.host(*args, **kwargs), positions)
        folded = [main_output(output, self.task.fields) for output in outputs]
        streams = torch.cat(folded) if len(folded) > 1 else folded[0]
        streams = streams.unflatten(0, (len(plan.ends), -1))
        if plan.streams != tuple(range(len(streams))):
            streams = torch.stack([streams[stream] for stream in plan.streams])
        logits, student_logits = streams.transpose(0, 1), None
        if features is not None and readouts is not None:
            by_readout, student_logits = readouts(features.features())
            logits = logits if by_readout is None else by_readout
        taken = None if collector is None else collector.summaries()
        return Run(logits, outputs[0], taken, student_logits)

    def fused_logits(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        """Return the members' raw logits, run fused whatever the mode is."""
        return self.run(args, kwargs, mode="fused").member_logits

    def member_logits(self, batch: Any) -> Tensor:
        """Return the members' raw outputs that the task reads, `[batch, member, ...]`."""
        args, kwargs, _ = split_batch(batch)
        device = self.device
        return self.run(move(args, device), move(kwargs, device)).member_logits

    def forward(self, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        """Run all members; take the host's inputs, return the host's kind of output.

        The output is the members' mean, in the form in which one model gives it: of classes log
        mean_m softmax(member logits), with a student its own. With `labels`, `loss` is that of the
        mean, as the host has it.
        """
        if labels is None:
            labels, kwargs = batches.labels_of(kwargs), batches.without_labels(kwargs)
        run = self.run(args, kwargs)
        if run.student_logits is None:
            outputs = self.calibrated(run.member_logits)
        else:
            outputs = self.calibrated(run.student_logits[:, None], members=False)
        mean = self.task.mean(outputs)
        loss = None if labels is None else self.task.loss(mean, labels)
        return host_output(run.output, mean, self.task.fields, loss, kwargs.get("return_dict"))

    @torch.no_grad()
    def predict(self, batch: Any) -> Prediction:
        """Predict a batch: the task's answers, uncertainty, and what the members gave.

        Novelty is in the answer once `fit_novelty_` has been called, decisions once `fit_policy`
        has, sets once `fit_sets` has. Always in eval mode; the modules' flags stay, so any number
        of threads may call it.

        Args:
            batch: What the host takes; or images (PIL), paths of images or texts, one or a list of
                them, which the ensemble's `transform` or `tokenizer` prepares. Two texts are
                `{"text": ..., "text_pair": ...}`, questions `{"question": ..., "context": ...}`.

        Example:
            >>> answer = ensemble.predict(["a joy to watch", "no plot at all"])
            >>> answer.labels, answer.novelty > 0.95
            (['positive', 'negative'], tensor([False, False]))
        """
        if not is_host_batch(batch, getattr(self.host, "main_input_name", "x")):
            batch = prepare(self, batch)
        unchecked: list[Unchecked] = []
        device = next(self.parameters()).device
        args, kwargs, _ = read_batch(batch, device, unchecked=unchecked)
        model = in_eval(self)
        try:
            logits, _, summaries, student_logits = model.run(
                args, kwargs, summaries=self.novelty is not None
            )
        except Exception as error:
            raise batches.refused_inputs(self.host, batch, error) from error
        logits = logits.float()
        student_logits = None if student_logits is None else student_logits.float()
        temperature, calibrator = self._temperature, self._calibrator
        more: dict[str, Any] = {"inputs": kwargs} if self.task.reads_inputs else {}
        more |= {} if calibrator is None else {"calibrator": calibrator}
        answer = self.task.answer(
            logits,
            student_logits=student_logits,
            score=self.score,
            temperature=temperature,
            member_temperatures=self._member_temperatures,
            logit_scale=getattr(self.host, "logit_scale", None),
            class_names=self._class_names,
            **more,
        )
        if summaries is not None:
            raw = not (temperature or self._member_temperatures or calibrator)
            raw = raw and logits.ndim == 3 and student_logits is None and self.is_classifier
            novelty, score = self._statistics()(
                summaries,
                self.task.novelty_rows(logits, kwargs.get("attention_mask")),
                answer.probabilities if raw else None,
            )
            answer = replace(answer, novelty=novelty, novelty_score=score)
        answer = answer if self.policy is None else self.policy.apply(answer)
        answer = answer if self.sets is None else replace(answer, sets=self.sets)
        check_finite(unchecked)  # last: what runs on a device is not waited for before
        return answer

    def precision(self) -> str:
        """Name the precision in which features are computed here and now."""
        first = next(self.parameters())
        dtype, kind = first.dtype, first.device.type
        wide = dtype == torch.float64  # statistics have no more digits than float32
        names = ["float32" if wide else str(dtype).removeprefix("torch.")]
        if torch.is_autocast_enabled(kind):
            names.append(str(torch.get_autocast_dtype(kind)).removeprefix("torch."))
        return " under autocast to ".join(names)

    def _statistics(self) -> Novelty:
        """Return the statistics of known data on the model's device.

        In another precision than that of the fit the features differ. That is warned of, once per
        precision, and not refused: the members' answers are still good.
        """
        assert self.novelty is not None
        self.novelty = self.novelty.to(
            next(self.parameters()).device
        )  # moved once, not at every call
        now = self.precision()
        if now != self.novelty.precision and now not in self._warned_precisions:
            self._warned_precisions.add(now)
            warnings.warn(
                f"Novelty was fitted in {self.novelty.precision} but is computed in {now}: the "
                "features differ, and so may the rate of false alarms. Call fit_novelty_(known) "
                "again in this precision (and fit_policy(), if there is a policy), or predict in "
                "the fitted one.",
                stacklevel=4,
            )
        return self.novelty

    def _named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        names = [n for n in inspect.signature(self.host.forward).parameters if n != "self"]
        found = {**dict(zip(names, args, strict=False)), **kwargs}
        return {name: value for name, value in found.items() if name not in READ_BY_ANSWERS}

    def _cast_member(self, index: int) -> nn.Module:
        return member_model(self.host, self.body, self._assembly.block_templates, self._view, index)

    def _members(self) -> list[nn.Module]:
        refuse_readouts(self.member_readout)
        if self.training and torch.is_grad_enabled():
            raise HydraError(
                'mode="loop" runs members for reference: it cannot be trained. '
                'Set ensemble.mode = "fused".'
            )
        key = tuple((p.data_ptr(), p._version, p.device, p.dtype) for p in self.parameters())
        if self._cast is None or self._cast[0] != key:
            self._cast = (key, [self._cast_member(m).eval() for m in range(self.members)])
        # all threads share the cast members: their flags stay, a twin has the other mode
        members = self._cast[1]
        return members if not self.training else [twin(member).train() for member in members]

    def unpruned_host(self) -> nn.Module:
        """Return the host with all its heads, without storage, for counting."""
        return unpruned_model(self.host, self.body, self._assembly.block_templates, self._view)

    def parameter_bytes(self) -> dict[str, int]:
        """Return the bytes of the parameters and of the packed copies kept for speed."""
        stored = sum(p.numel() * p.element_size() for p in self.parameters())
        packed = sum(b.packed_bytes() for b in self.body.branch)  # type: ignore[operator]
        return {"parameters": stored, "packed": packed, "memory": stored + packed}
