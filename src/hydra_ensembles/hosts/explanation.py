"""Say what can be pruned in a model, and why not."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from ..errors import HydraError
from ..tasks import refusal_of
from ..tasks.tokens import NEXT_TOKENS, predicts_next_token
from .families import Family
from .host import HostModel, describe_shape, host_model
from .mlp_site import removed_neurons
from .operation_count import cost_of_three_members


@dataclass(frozen=True)
class Explanation:
    """What `explain` found; prints as a short table."""

    name: str
    supported: bool
    reason: str = ""
    task: str = ""
    family: str = ""
    blocks: str = ""
    head_counts: tuple[int, ...] = ()
    head_dim: int = 0
    width: int = 0
    neuron_counts: tuple[int, ...] = ()
    neurons_why: str = ""
    norm: str = ""
    readout: str = ""
    readout_why: str = ""
    causal: bool = False
    removable: bool = False
    fusable: bool = False
    engine: str = ""
    engine_why: str = ""
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        if not self.supported:
            return f"{self.name}: not supported\n  why       {self.reason}"
        prune = "heads can be removed physically" if self.removable else "gates only"
        lines = [
            f"{self.name}: {'can be fused' if self.fusable else 'cannot be fused'}, {prune}",
            f"  task      {self.task}",
            f"  family    {self.family}, blocks at {self.blocks}",
            f"  heads     {describe_shape(self.head_counts)} (layers x heads) of width "
            f"{self.head_dim}, model width {self.width}",
            f"  neurons   {self._neurons()}",
            f"  norms     {self.norm}-norm{', causal attention' if self.causal else ''}",
            f"  readout   {self.readout} ({self.readout_why})",
            *([f"  engine    {self.engine}: {self.engine_why}"] if self.engine else []),
            "  shared    embeddings, MLPs (averaged), and every part in which members agree",
        ]
        if self.reason:
            lines.append(f"  why not   {self.reason}")
        return "\n".join([*lines, *(f"  note      {note}" for note in self.notes)])

    def _neurons(self) -> str:
        if not any(self.neuron_counts):
            return f"stay: {self.neurons_why}"
        shape = f"{describe_shape(self.neuron_counts)} (layers x neurons)"
        return f"{shape}; some stay: {self.neurons_why}" if self.neurons_why else shape


def explain(model: nn.Module | HostModel, *, family: Family | None = None) -> Explanation:
    """Say what can be pruned in a model, which engine fuses it, and what cannot be done and why.

    Example:
        >>> print(explain(model))
    """
    name = model.name if isinstance(model, HostModel) else type(model).__name__
    refusal = refusal_of(name)
    if refusal is not None:  # before anything is run
        return Explanation(name=name, supported=False, reason=refusal.sentence("it"))
    try:
        return _explain(host_model(model, family=family))
    except HydraError as error:
        return Explanation(name=name, supported=False, reason=str(error))
    except Exception as error:  # a host that we cannot even look at is one that we do not support
        reason = f"its parts could not be read ({type(error).__name__}: {error})"
        return Explanation(name=name, supported=False, reason=reason)


def _explain(host: HostModel) -> Explanation:
    closed = host.why_closed()
    if closed is not None:
        return Explanation(name=host.name, supported=False, reason=closed)
    site = host.sites[0]
    removable, fusable = host.why_not_prunable(), host.why_not_fusable()
    notes = []
    if host.original_mask is not None:
        notes.append(f"already pruned: {host.original_mask.total_kept} heads are left")
    removed = removed_neurons(host.model)
    if removed:
        kept, of = (sum(record[name] for record in removed) for name in ("kept", "neurons"))
        notes.append(f"already pruned: {kept} of {of} neurons are left in {len(removed)} MLPs")
    if host.other_stacks:
        others = ", ".join(host.other_stacks)
        kind = "two towers" if len(host.other_stacks) == 1 else "several stacks"
        notes.append(f"{kind}: this is about {host.blocks_path}; {others} is left alone")
    if host.shares_layers:
        notes.append("its layers share weights: every call of the shared layer counts as a layer")
    if fusable is None and predicts_next_token(host.model):
        notes.append(NEXT_TOKENS)
    if site.kv_heads != site.num_heads:
        notes.append(
            f"grouped queries: {site.num_heads} heads on {site.kv_heads} key heads; only whole "
            "groups can be removed, heads within one are gated off"
        )
    engine, engine_why = ("", "") if fusable is not None else engine_of(host)
    return Explanation(
        name=host.name,
        supported=True,
        reason=fusable or removable or "",
        task=host.task.title,
        family=host.family.name,
        blocks=host.blocks_path,
        head_counts=host.head_counts,
        head_dim=site.head_dim,
        width=host.width,
        neuron_counts=host.neuron_counts,
        neurons_why=host.why_no_neurons() or "",
        norm=host.family.norm,
        readout=str(host.readout) if fusable is None else "not probed",
        readout_why=host.readout.why if fusable is None else "only needed for fusing",
        causal=site.causal,
        removable=removable is None,
        fusable=fusable is None,
        engine=engine,
        engine_why=engine_why,
        notes=notes,
    )


def engine_of(host: HostModel) -> tuple[str, str]:
    """Name the engine that a host's members get, and say why in words."""
    reason = host.why_not_fused()
    if reason is None:
        own = host.arithmetic
        more = "" if own.rotary is None else ", rotary positions included"
        tables = any(site.table is not None for site in host.sites)
        more += ", the bias of each head included" if own.biased or tables else ""
        more += ", windows and masks of each layer included" if own.by_layer else ""
        return "fused", (
            f"our own arithmetic equals the host's blocks, as the host calls them{more}"
        )
    seen = host.seen
    price = None if seen is None else cost_of_three_members(host.model, host.blocks, *seen)
    cost = "" if price is None else f"; three members in the last block cost {price:.2f} x"
    return "host", f"{reason}: runs the host's own blocks{cost}"
