"""One model that is an ensemble: the host's inputs and outputs, M members in one forward pass."""

from __future__ import annotations

import inspect
import types
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.modes import in_eval, twin
from ..data.running import check_inputs, move, split_batch
from ..data.transforms import ImageTransform
from ..errors import HydraError, UnsupportedModelError
from ..evaluation.results import Results
from ..heads.masks import HeadMask
from ..heads.plan import Plan
from ..hosts import HostModel, host_model, main_output
from ..hosts.calling import Form
from ..hosts.examples import examples
from ..hosts.huggingface import introduce_to_pipelines
from ..hosts.probe import modules_after_blocks
from ..hosts.task import gives_classes
from ..registry import check_name, public_function
from ..uncertainty import (
    Evidence,
    Novelty,
    Policy,
    Prediction,
    checked_temperature,
    log_mean_probability,
    predict_from_logits,
    scale_logits,
)
from .answering import predict_proba
from .assemble import Assembly
from .card import remember_results
from .cast import cast_full, cast_member
from .citizen import Citizen
from .hosted import HostedBody, body_of
from .hub import push
from .inputs import Preparation, is_raw, prepare
from .known import fit_novelty, logits_and_summaries, per_text, why_novel
from .layers import FusedBlock, PerStream
from .loading import check_answers, load
from .outputs import with_embedding, with_logits, with_signature_of
from .policies import decided
from .row_answers import RowAnswers
from .saving import save
from .summary import summarize, summarize_html

Mode = Literal["fused", "loop"]
_REFUSED = ("output_attentions", "output_hidden_states")


class HydraEnsemble(Citizen):
    """M pruned members of one host, fused. Made by `fuse`, `build` or `from_pretrained`.

    Called like its host: the same inputs, the same kind of output; `logits` are the log of the mean
    of the members' probabilities, so their softmax is the ensemble's probability.

    `predict` runs in eval mode whatever the flags say, and moves none of them: any number of
    threads may call it.

    Attributes:
        host: The host model with the fused body in the place of its blocks.
        plan: Which streams run where.
        mode: `"fused"`, or `"loop"` to run members one by one.
        temperature, member_temperatures: Divide the members' logits (None: not calibrated).
        score: The uncertainty that `predict` reports.
        policy: When to answer, with what is promised (see `fit_policy`); None before it is fitted.
        transform, tokenizer: How `predict` turns pictures, paths and texts into inputs.
        novelty: Statistics of known data; None before `fit_novelty_`.
        record: What was done to make it (plain data, saved along).
    """

    keeps_modes = True
    """`predict` needs nobody to put the ensemble in eval mode (see `data.running`)."""

    def __init__(self, assembly: Assembly, host: HostModel, *, mode: Mode = "fused") -> None:
        super().__init__()
        check_name("mode", mode, ("fused", "loop"))
        self.host = assembly.model
        self.mode = mode
        self.merged = assembly.merged
        self.copies = dict(assembly.copies)
        self.temperature = None
        self.member_temperatures = None
        self.score = "msp"
        self.policy: Policy | None = None
        self.novelty: Novelty | None = None
        self.record: dict[str, Any] = {}
        self.switches: dict[str, Any] = {}
        self._assembly = assembly
        self._view = host
        self._cast: tuple[tuple[Any, ...], list[nn.Module]] | None = None
        self._gives_classes: bool | None = None
        shown = with_signature_of(HydraEnsemble.forward, type(self.host))
        self.forward = types.MethodType(shown, self)  # type: ignore[method-assign]

    @classmethod
    def around(
        cls, assembly: Assembly, host: HostModel, *, mode: Mode, switches: Mapping[str, Any]
    ) -> HydraEnsemble:
        """Make the ensemble around an assembled model."""
        view = HostModel.__new__(HostModel)
        view.__dict__.update(host.__dict__)
        view.model = assembly.model
        view.blocks = []  # they are in the body now
        view.__dict__["readout"] = assembly.body.readout
        view.__dict__["forms"] = [getattr(assembly.body, "form", Form())]
        ensemble = cls(assembly, view, mode=mode)
        ensemble.switches = dict(switches)
        ensemble.train(assembly.model.training)
        introduce_to_pipelines(assembly.model, cls)
        return ensemble

    @property
    def body(self) -> Any:
        """The fused blocks."""
        return body_of(self.host.get_submodule(self._view.blocks_path))

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
    def readout(self) -> Any:
        """Which tokens the classifier reads."""
        return self.body.readout

    @property
    def is_classifier(self) -> bool:
        """Whether the host gives class logits (and not embeddings): seen from what it answers."""
        if self._gives_classes is None:
            for args, kwargs in examples(self.host)[-1:]:
                answering = in_eval(self)
                with torch.no_grad():
                    answering._run(args, kwargs)
                self._gives_classes = answering._gives_classes
        return self._gives_classes is not False

    # --- calibration -----------------------------------------------------------------------------

    @property
    def temperature(self) -> float | None:
        """Divides all members' logits; None when not calibrated."""
        return self._temperature

    @temperature.setter
    def temperature(self, value: float | None) -> None:
        checked = None if value is None else checked_temperature(value)
        if checked != getattr(self, "_temperature", None):
            self._drop_policy("the temperatures")
        self._temperature = checked

    @property
    def member_temperatures(self) -> list[float] | None:
        """Divide each member's logits; None when not calibrated."""
        return self._member_temperatures

    @member_temperatures.setter
    def member_temperatures(self, values: Sequence[float] | None) -> None:
        checked = None if values is None else [checked_temperature(value) for value in values]
        if checked is not None and len(checked) != self.members:
            raise ValueError(
                f"{len(checked)} member temperatures for {self.members} members: give one for each."
            )
        if checked != getattr(self, "_member_temperatures", None):
            self._drop_policy("the temperatures")
        self._member_temperatures = checked

    def _drop_policy(self, what: str) -> None:
        """Forget the policy: its thresholds were about another uncertainty or novelty."""
        if getattr(self, "policy", None) is not None:
            self.policy = None
            warnings.warn(
                f"A policy was fitted before {what} changed: it is dropped. Fit it again with "
                "fit_policy().",
                stacklevel=3,
            )

    # --- forward ---------------------------------------------------------------------------------

    def forward(self, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        """Run all members; take the host's inputs, return the host's kind of output.

        `logits` = log mean_m softmax(member logits); with `labels`, `loss` is their negative
        log-likelihood under the mean probability.
        """
        member_logits, output = self._run(args, kwargs)
        if not self.is_classifier:
            if labels is not None:
                raise UnsupportedModelError(f"{type(self.host).__name__} has no classes to label.")
            return with_embedding(output, member_logits.mean(1))
        logits = log_mean_probability(self._scaled(member_logits))
        loss = None
        if labels is not None:  # a token classifier's [batch, token, class]; -100 does not count
            loss = F.nll_loss(logits.flatten(0, -2), labels.to(logits.device).flatten())
        return with_logits(output, logits, loss, kwargs.get("return_dict"))

    def member_logits(self, batch: Any) -> Tensor:
        """Return the members' raw logits [batch, member, class] (or embeddings, of a tower)."""
        args, kwargs, _ = split_batch(batch)
        device = self.device
        return self._run(move(args, device), move(kwargs, device))[0]

    @torch.no_grad()
    def predict(self, batch: Any) -> Prediction:
        """Predict a batch: probabilities, label, uncertainty and what the members say.

        Args:
            batch: What the host takes; or pictures (PIL), paths of pictures or texts, one or a
                list of them, by the ensemble's `transform` or `tokenizer`.
        """
        batch = prepare(self, batch) if is_raw(batch) else batch
        check_inputs(batch)
        model, summaries = in_eval(self), None
        if self.novelty is None:
            member_logits = model.member_logits(batch).float()
        else:
            member_logits, summaries = logits_and_summaries(model, batch)
        if not model.is_classifier:
            raise UnsupportedModelError(
                f"{type(self.host).__name__} gives embeddings, not classes. Load it with a "
                "classifier, wrap a dual encoder in ZeroShotClassifier, or call member_logits() "
                "for the members' embeddings."
            )
        answer = predict_from_logits(
            member_logits,
            score=self.score,
            temperature=self.temperature,
            member_temperatures=self.member_temperatures,
            logit_scale=getattr(self.host, "logit_scale", None),
        )
        if self.novelty is not None and summaries is not None:
            self.novelty = self.novelty.to(member_logits.device)  # moved once, not at every call
            novelty, score = self.novelty(summaries, per_text(member_logits, batch))
            answer = replace(answer, novelty=novelty, novelty_score=score)
        return answer if self.policy is None else decided(answer, self.policy)

    def predict_proba(self, data: Any, *, batch_size: int = 32) -> np.ndarray[Any, Any]:
        """Return the probabilities of all examples, `[example, class]`, as scikit-learn does.

        Args:
            data: A list of texts, pictures or paths; a large batch (an array or tensor of inputs, a
                mapping, `(inputs, labels)`); a data set; or data, batch by batch.
            batch_size: Examples per batch, where the data is not in batches yet.
        """
        return predict_proba(self, data, batch_size=batch_size)

    def as_map_function(
        self,
        column: str | None = None,
        *,
        prefix: str = "predicted_",
        probabilities: bool = False,
        batch_size: int = 32,
    ) -> RowAnswers:
        """Return a function from columns to columns of answers, for `datasets.map` and its kin.

        Args:
            column: The column of texts or pictures; by default the usual names.
            prefix: Of the columns of answers: `predicted_label`, `predicted_uncertainty`, ...
            probabilities: Add all classes' probabilities.
            batch_size: Rows that run through the model together.

        Example:
            >>> answered = dataset.map(ensemble.as_map_function("text"), batched=True)
        """
        return RowAnswers(
            self,
            column=column,
            prefix=prefix,
            probabilities=probabilities,
            batch_size=batch_size,
        )

    # --- novelty ---------------------------------------------------------------------------------

    def fit_novelty_(
        self, known: Any, *, names: Sequence[str] | None = None, progress: bool = True
    ) -> HydraEnsemble:
        """Learn what is known, in place: `predict` then says how new an input is.

        One pass over `known`; nothing is trained and no outlier is needed. The page on novelty has
        the formulas and what is promised. Fit again after training. A policy with an alarm is about
        the old statistics: it is dropped, with a warning.

        Args:
            known: In-distribution data that the model was not trained on; some hundred examples.
                Labels are optional: with five per class or more, distances to classes are used.
            names: Names of the known examples (files, texts) for `why_novel`.
            progress: Show a bar on a terminal.
        """
        self.novelty = fit_novelty(self, known, names=names, progress=progress)
        if self.policy is not None and self.policy.reads_novelty:
            self._drop_policy("what is known")
        return self

    @torch.no_grad()
    def why_novel(self, batch: Any, *, neighbours: int = 3) -> Evidence:
        """Say which blocks and which known neighbours speak for the novelty of each example."""
        return why_novel(self, batch, neighbours)

    def fused_logits(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        """Return the members' raw logits of the fused form, whatever the mode is."""
        fused = twin(self)  # its mode is its own
        fused.mode = "fused"
        return fused._run(args, kwargs)[0]

    def _scaled(self, member_logits: Tensor) -> Tensor:
        if self.temperature is None and self.member_temperatures is None:
            return member_logits
        return scale_logits(
            member_logits,
            temperature=self.temperature,
            member_temperatures=self.member_temperatures,
        )

    def _run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, Any]:
        """Return the members' logits [batch, member, class] and the host's own output."""
        for name in _REFUSED:
            if kwargs.get(name):
                raise UnsupportedModelError(
                    f"{name}=True is not supported: members' streams have no single answer. Use "
                    "ensemble.member(m), a plain host model, for that."
                )
        kwargs = {k: v for k, v in kwargs.items() if k != "return_dict" and k not in _REFUSED}
        if self.mode == "loop":
            outputs = [member(*args, **kwargs) for member in self._members()]
            self._gives_classes = gives_classes(self.host, outputs[0])
            return torch.stack([main_output(o) for o in outputs], 1), outputs[0]
        if self.body.folds:
            output = self.host(*args, **kwargs)
            folded = main_output(output)
        else:
            folded, output = self._replay(args, kwargs)
        self._gives_classes = gives_classes(self.host, output)
        streams = folded.unflatten(0, (len(self.plan.ends), -1))
        if self.plan.streams != tuple(range(len(streams))):
            index = torch.tensor(self.plan.streams, device=streams.device)
            streams = streams.index_select(0, index)
        return streams.transpose(0, 1), output

    def _replay(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, Any]:
        """Let a host that looks at its inputs again read out every stream by itself."""
        body, positions = self.body, None
        if isinstance(body, HostedBody):
            outputs = body.each(lambda: self.host(*args, **kwargs))
            return torch.cat([main_output(o) for o in outputs]), outputs[0]
        if self.readout.positions is not None:
            positions = self.readout.positions(self._named(args, kwargs))
        streams: list[Tensor] = []
        with body.told(positions=positions, streams=streams):
            outputs = [self.host(*args, **kwargs)]
        for stream in streams[1:]:
            with body.told(answer=stream):
                outputs.append(self.host(*args, **kwargs))
        return torch.cat([main_output(o) for o in outputs]), outputs[0]

    def _named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        names = [n for n in inspect.signature(self.host.forward).parameters if n != "self"]
        return {**dict(zip(names, args, strict=False)), **kwargs}

    # --- members ---------------------------------------------------------------------------------

    def member(self, index: int) -> nn.Module:
        """Return one member as a plain, physically pruned host model.

        It shares the parameters of the trunk, the MLPs and the norms; its heads are copies.
        """
        if not 0 <= index < self.members:
            raise IndexError(f"Member {index} of {self.members}: count from 0.")
        return cast_member(self.host, self.body, self._assembly.moulds, self._view, index)

    def unpruned_host(self) -> nn.Module:
        """Return the host's architecture with all its heads, without storage: for counting."""
        return cast_full(self.host, self.body, self._assembly.moulds, self._view)

    def _members(self) -> list[nn.Module]:
        if self.training and torch.is_grad_enabled():
            raise HydraError(
                'mode="loop" runs members for reference: it cannot be trained. '
                'Set ensemble.mode = "fused".'
            )
        key = tuple((p.data_ptr(), p._version, p.device, p.dtype) for p in self.parameters())
        if self._cast is None or self._cast[0] != key:
            self._cast = (key, [self.member(m).eval() for m in range(self.members)])
        # The cast members serve every thread: their flags stay, a twin has the other mode.
        members = self._cast[1]
        return members if not self.training else [twin(member).train() for member in members]

    def untie_(self, *, mlps: bool = False) -> HydraEnsemble:
        """Give each member its own heads, norms and output biases, for training, in place.

        The merged MLPs stay shared unless `mlps` asks for copies: members run them one by one
        anyway, so that copies cost memory and no arithmetic. The embeddings stay shared. Returns
        the ensemble.
        """
        body = self.body
        for block in body.branch:
            block.untie_(mlps=mlps)
        layers = tuple(block.plan for block in body.branch)
        body.plan = Plan(**{**body.plan.__dict__, "layers": layers})
        self.copies.update(_copies_of(body))
        return self

    def freeze_trunk_(self) -> HydraEnsemble:
        """Stop gradients in everything before the branch, in place; returns the ensemble."""
        for parameter in self.host.parameters():
            parameter.requires_grad_(False)
        trainable = [p for block in self.body.branch for p in block.parameters()]
        # A member is probed: its host's code runs on a batch that is not folded.
        for path in modules_after_blocks(host_model(self.member(0), family=self.body.family)):
            trainable += list(self.host.get_submodule(path).parameters())
        for parameter in trainable:
            parameter.requires_grad_(True)
        return self

    # --- saving ------------------------------------------------------------------------------

    def save_pretrained(
        self,
        folder: Any,
        *,
        tokenizer: Any = None,
        image_processor: Any = None,
        results: Results | list[Results] | None = None,
        state_dict: Any = None,
        safe_serialization: bool = True,
    ) -> None:
        """Write `config.json`, `model.safetensors` and a model card into a folder.

        The ensemble's own transform and tokenizer are saved along; those given here replace them.
        The card shows the cost and `results`, what `evaluate` measured of it and of its rivals.
        """
        if results is not None:
            remember_results(self, results)
        if tokenizer is not None:
            self.tokenizer = tokenizer
        if image_processor is not None:
            self.transform = image_processor
        save(self, folder)

    def export(
        self,
        folder: Any,
        *,
        formats: Sequence[str] = ("onnx", "torch"),
        example: Any = None,
        int8: bool = False,
        known: Any = None,
        held_out: Any = None,
        alarm: float | None = 0.05,
        tolerance: float = 1e-4,
        key: Any = None,
    ) -> Any:
        """Write programs that run without this library: ONNX, and a `torch.export` archive.

        Preprocessing, thresholds and statistics are inside; see `hydra_ensembles.export` for the
        arguments and `hydra_ensembles.runtime` for running it without torch.
        """
        return public_function("export")(
            self,
            folder,
            formats=formats,
            example=example,
            int8=int8,
            known=known,
            held_out=held_out,
            alarm=alarm,
            tolerance=tolerance,
            key=key,
        )

    def push_to_hub(
        self,
        repo: str,
        *,
        results: Results | list[Results] | None = None,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        commit_message: str = "Upload a Hydra ensemble",
    ) -> str:
        """Give the ensemble to the hub as `owner/name`; returns the address of the commit.

        What is uploaded is the folder of `save_pretrained`, in one commit, with its model card.

        Args:
            repo: Name on the hub; it is made if there is none.
            results: What `evaluate` measured, for the card: of the ensemble, and of its rivals.
            private: Whether a new repository is private.
            token: Of the hub, when you are not logged in.
            revision: A branch; made if there is none.
            commit_message: What the commit says.
        """
        if results is not None:
            remember_results(self, results)
        return push(
            self, repo, private=private, token=token, revision=revision, message=commit_message
        )

    @classmethod
    def from_pretrained(
        cls,
        name_or_folder: Any,
        *,
        host: nn.Module | None = None,
        mode: Mode | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
    ) -> HydraEnsemble:
        """Load what `save_pretrained` or `push_to_hub` wrote.

        Args:
            name_or_folder: A folder, or a name on the hub: `owner/name`.
            host: The plain host, for models that cannot be built again by name.
            mode: `"fused"` or `"loop"`; by default as it was saved.
            revision: Branch, tag or commit on the hub.
            token: Of the hub, for a private repository when you are not logged in.
        """
        assembly, view, config = load(name_or_folder, host=host, revision=revision, token=token)
        mode = mode or config["mode"]
        ensemble = cls.around(assembly, view, mode=mode, switches=config["switches"])
        ensemble.temperature = config["temperature"]
        ensemble.member_temperatures = config["member_temperatures"]
        ensemble.score = config["score"]
        ensemble.record = config["record"]
        ensemble.novelty = config["novelty"]
        ensemble.id2label = config["labels"]
        if config["policy"] is not None:
            ensemble.policy = Policy.from_dict(config["policy"])
        ensemble._preparation = Preparation(config["folder"], config["files"])
        if config["image_transform"] is not None:
            ensemble.transform = ImageTransform.from_dict(config["image_transform"])
        check_answers(ensemble, name_or_folder)
        return ensemble

    # --- telling -----------------------------------------------------------------------------

    def parameter_bytes(self) -> dict[str, int]:
        """Return the bytes of the parameters and of the packed copies kept for speed."""
        stored = sum(p.numel() * p.element_size() for p in self.parameters())
        packed = sum(block.packed_bytes() for block in self.body.branch)
        return {"parameters": stored, "packed": packed, "memory": stored + packed}

    def __str__(self) -> str:
        return summarize(self)

    def _repr_html_(self) -> str:
        return summarize_html(self)

    def __repr__(self) -> str:
        host = type(self.host).__name__
        return f"HydraEnsemble({host}, members={self.members}, mode={self.mode!r})"


def _copies_of(body: Any) -> dict[str, int]:
    """Count the copies of every part of the branched blocks."""
    copies: dict[str, int] = {}
    for block in body.branch:
        if not isinstance(block, FusedBlock):
            continue
        layer = block.plan.layer
        parts: dict[str, PerStream | None] = {"norm1": block.norm1, "norm2": block.norm2}
        parts.update({"query_norm": block.query_norm, "key_norm": block.key_norm})
        for name, part in parts.items():
            if part is not None:
                copies[f"{layer}.{name}"] = len(part.each)
        for name in ("after_attention", "after_mlp"):
            for i, part in enumerate(getattr(block, name)):
                copies[f"{layer}.{name}.{i}"] = len(part.each)
        for i, mlp in enumerate(block.mlp):
            if isinstance(mlp, PerStream):
                copies[f"{layer}.mlp.{i}"] = len(mlp.each)
        if block.output_bias.value is not None:
            copies[f"{layer}.output_bias"] = len(block.output_bias.value)
    return copies
