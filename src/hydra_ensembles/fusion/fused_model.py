"""A host whose blocks are fused: M members in one forward pass, or one by one for reference."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from ..data.eval_mode import in_eval, twin
from ..errors import HydraError, UnsupportedModelError
from ..heads.head_mask import HeadMask
from ..heads.stream_plan import Plan
from ..hosts import main_output
from ..hosts.block_calls import Form, HostView
from ..hosts.example_inputs import examples
from ..hosts.model_output import gives_classes
from ..hosts.transformers_families import introduce_to_pipelines
from ..registry import check_name
from .assembly import Assembly
from .host_engine import HostedBody, body_of
from .host_interface import Citizen
from .member import member_model, unpruned_model

Mode = Literal["fused", "loop"]
Self = TypeVar("Self", bound="FusedModel")
_REFUSED = {
    "output_attentions": "members have no single answer for it",
    "output_hidden_states": "members have no single answer for it",
    "use_cache": "an ensemble runs whole sequences and returns no keys and values",
}


class FusedModel(Citizen):
    """Runs the members of an assembly; `HydraEnsemble` makes predictions of their logits.

    Attributes:
        host: The host model with the fused body in place of its blocks.
        mode: `"fused"`, or `"loop"` to run members one by one.
        merged: Names of the parts that were averaged over members.
        copies: Number of copies per part that differs between streams.
        switches: The options of `fuse` (plain data, saved along).
    """

    def __init__(self, assembly: Assembly, host: HostView, *, mode: Mode = "fused") -> None:
        super().__init__()
        check_name("mode", mode, ("fused", "loop"))
        self.host = assembly.model
        self.mode = mode
        self.merged = assembly.merged
        self.copies = dict(assembly.copies)
        self.switches: dict[str, Any] = {}
        self._assembly = assembly
        self._view = host
        self._cast: tuple[tuple[Any, ...], list[nn.Module]] | None = None
        self._gives_classes: bool | None = None

    @classmethod
    def around(
        cls: type[Self],
        assembly: Assembly,
        host: HostView,
        *,
        mode: Mode,
        switches: Mapping[str, Any],
    ) -> Self:
        """Make a model from an assembly."""
        forms = [getattr(assembly.body, "form", Form())]
        view = HostView(assembly.model, host.family, host.blocks_path, forms)
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
        """Whether the host returns class logits (not embeddings), judged by its output."""
        if self._gives_classes is None:
            for args, kwargs in examples(self.host)[-1:]:
                answering = in_eval(self)
                with torch.no_grad():
                    answering._run(args, kwargs)
                self._gives_classes = answering._gives_classes
        return self._gives_classes is not False

    def fused_logits(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        """Return the members' raw logits, run fused whatever the mode is."""
        fused = twin(self)  # keeps the caller's mode
        fused.mode = "fused"
        return fused._run(args, kwargs)[0]

    def _run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, Any]:
        """Return the members' logits [batch, member, class] and the host's own output."""
        for name, why in _REFUSED.items():
            if kwargs.get(name):
                raise UnsupportedModelError(
                    f"{name}=True is not supported: {why}. Use ensemble.member(m), a plain host "
                    "model, for that."
                )
        dropped = _REFUSED.keys() - {"use_cache"} | {"return_dict"}  # no cache is made where False
        kwargs = {name: value for name, value in kwargs.items() if name not in dropped}
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
        """Read out stream by stream, for a host that reads its inputs again after the blocks."""
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

    def _cast_member(self, index: int) -> nn.Module:
        return member_model(self.host, self.body, self._assembly.block_templates, self._view, index)

    def _members(self) -> list[nn.Module]:
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
        packed = sum(block.packed_bytes() for block in self.body.branch)
        return {"parameters": stored, "packed": packed, "memory": stored + packed}
