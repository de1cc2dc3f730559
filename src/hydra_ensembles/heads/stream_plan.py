"""The plan of a fused ensemble: which streams run where, so that nothing equal is computed twice.

Pure data: from the members' masks (and what differs between fine-tuned members) to a tree of
streams. Members that agree so far run as one stream; where they split, siblings read one input.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import MaskError
from .head_mask import HeadMask, describe_shape


@dataclass(frozen=True)
class LayerSignature:
    """What one member computes in one block; equal signatures on equal inputs give equal outputs.

    Attributes:
        heads: Identities of the kept heads, in order: indices into the layer's distinct heads.
        norm: Identity of the norm that the queries, keys and values read through.
        rest: Identity of everything else that is not averaged.
    """

    heads: tuple[int, ...]
    norm: Hashable = 0
    rest: Hashable = 0


@dataclass(frozen=True)
class LayerPlan:
    """One branched block.

    Attributes:
        layer: Index of the block.
        parents: For every stream that leaves the block, the stream that enters it.
        members: For every stream, the first member that runs in it.
        heads: For every stream, its distinct heads (see `LayerSignature`).
        shared: Whether siblings project and attend the union of their heads once.
        readout_only: Whether queries, output projection and MLP run for the readout tokens only.
    """

    layer: int
    parents: tuple[int, ...]
    members: tuple[int, ...]
    heads: tuple[tuple[int, ...], ...]
    shared: bool
    readout_only: bool = False

    @property
    def streams(self) -> int:
        """Number of streams that leave the block."""
        return len(self.parents)

    @property
    def inputs(self) -> int:
        """Number of streams that enter the block."""
        return max(self.parents) + 1

    def groups(self) -> list[tuple[int, tuple[int, ...]]]:
        """Return `(input, its distinct heads)` for every projection that is computed.

        The input counts entering streams when siblings share; otherwise every stream has a copy
        of its own and the input is the stream.
        """
        if not self.shared:
            return list(enumerate(self.heads))
        result = []
        for parent in range(self.inputs):
            siblings = [h for p, h in zip(self.parents, self.heads, strict=True) if p == parent]
            result.append((parent, _union_in_runs(siblings)))
        return result


def _union_in_runs(siblings: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Order a union so that heads kept by the same siblings stand together."""
    union = sorted({head for heads in siblings for head in heads})
    return tuple(sorted(union, key=lambda head: ([head not in heads for heads in siblings], head)))


@dataclass(frozen=True)
class Plan:
    """How M members run as one model.

    Attributes:
        masks: The members' masks, in terms of the host's original heads.
        trunk: Number of blocks that run once for all members.
        trunk_heads: For every trunk block, the original heads that it keeps.
        layers: The branched blocks above it.
        ends: For every stream of the classifier, the stream of the last block that it reads;
            streams part here when members differ in their classifiers only.
        streams: For every member, the classifier's stream in which it ends.
    """

    masks: tuple[HeadMask, ...]
    trunk: int
    trunk_heads: tuple[tuple[int, ...], ...]
    layers: tuple[LayerPlan, ...]
    ends: tuple[int, ...]
    streams: tuple[int, ...]

    @property
    def members(self) -> int:
        """Number of members M."""
        return len(self.masks)

    @property
    def depth(self) -> int:
        """Number of blocks."""
        return self.trunk + len(self.layers)

    def stream_at(self, layer: int, last: int) -> int:
        """Return the stream that runs a block and ends as stream `last` of the last block."""
        stream = last
        for plan in reversed(self.layers):
            if plan.layer == layer:
                return stream
            stream = plan.parents[stream]
        return 0

    def stream_of(self, layer: int, member: int) -> int:
        """Return the stream in which a member runs a block."""
        return self.stream_at(layer, self.ends[self.streams[member]])

    def branch_text(self) -> list[str]:
        """Describe the branched blocks, one phrase each."""
        phrases = []
        for plan in self.layers:
            kept = " + ".join(str(mask.kept[plan.layer]) for mask in self.masks)
            tail = ", readout only" if plan.readout_only else ""
            of = self.masks[0].shape[plan.layer]
            phrases.append(f"block {plan.layer}: {kept} of {of} heads{tail}")
        return phrases

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for a config file."""
        return {
            "trunk": self.trunk,
            "ends": list(self.ends),
            "streams": list(self.streams),
            "layers": [
                {
                    **asdict(layer),
                    "parents": list(layer.parents),
                    "members": list(layer.members),
                    "heads": [list(heads) for heads in layer.heads],
                }
                for layer in self.layers
            ],
            "trunk_heads": [list(h) for h in self.trunk_heads],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any], masks: Sequence[HeadMask]) -> Plan:
        """Read what `to_dict` wrote."""
        layers = tuple(
            LayerPlan(
                layer=p["layer"],
                parents=tuple(p["parents"]),
                members=tuple(p["members"]),
                heads=tuple(tuple(h) for h in p["heads"]),
                shared=p["shared"],
                readout_only=p["readout_only"],
            )
            for p in data["layers"]
        )
        heads = tuple(tuple(h) for h in data["trunk_heads"])
        ends, streams = tuple(data["ends"]), tuple(data["streams"])
        return cls(tuple(masks), data["trunk"], heads, layers, ends, streams)


def make_plan(
    masks: Sequence[HeadMask],
    signatures: Sequence[Sequence[LayerSignature]] | None = None,
    classifiers: Sequence[Hashable] | None = None,
    *,
    share_trunk: bool = True,
    share_branch: bool = True,
    readout_only: bool = True,
    branch_layer: int | None = None,
) -> Plan:
    """Plan the streams of M members.

    Args:
        masks: One mask per member.
        signatures: `[member][layer]`, for members whose weights differ; by default members are one
            unchanged model and differ by their masks only.
        classifiers: One identity per member of what comes after the blocks; equal by default.
        share_trunk: Run members as one stream as long as they agree.
        share_branch: Let siblings that read one input project and attend their heads once.
        readout_only: Run the last block for the readout tokens only.
        branch_layer: Let the trunk end before this block even where members agree in it.
    """
    masks = tuple(masks)
    if not masks:
        raise MaskError("No masks: an ensemble needs at least one member.")
    for mask in masks[1:]:
        if mask.shape != masks[0].shape:
            raise MaskError(
                f"Members' masks differ in shape: {describe_shape(masks[0].shape)} and "
                f"{describe_shape(mask.shape)}. All must be made for the same model."
            )
    depth = len(masks[0])
    if signatures is None:
        signatures = [
            [LayerSignature(tuple(mask.indices(layer))) for layer in range(depth)] for mask in masks
        ]
    trunk = 0
    if share_trunk:
        while trunk < depth and len({row[trunk] for row in signatures}) == 1:
            trunk += 1
        if readout_only:
            trunk = min(trunk, depth - 1)
        if branch_layer is not None:
            trunk = min(trunk, branch_layer)
    streams = [0] * len(masks)
    layers = []
    for layer in range(trunk, depth):
        keys: dict[Hashable, int] = {}
        new, parents, members = [], [], []
        for member, row in enumerate(signatures):
            key = (streams[member], row[layer]) if share_trunk else member
            if key not in keys:
                keys[key] = len(keys)
                parents.append(streams[member])
                members.append(member)
            new.append(keys[key])
        layers.append(
            LayerPlan(
                layer=layer,
                parents=tuple(parents),
                members=tuple(members),
                heads=tuple(signatures[m][layer].heads for m in members),
                shared=share_branch and _same_norms(parents, members, signatures, layer),
                readout_only=readout_only and layer == depth - 1,
            )
        )
        streams = new
    heads = tuple(tuple(masks[0].indices(layer)) for layer in range(trunk))
    ends: dict[tuple[int, Hashable], int] = {}
    last = tuple(
        ends.setdefault((stream, classifiers[member] if classifiers else 0), len(ends))
        for member, stream in enumerate(streams)
    )
    return Plan(masks, trunk, heads, tuple(layers), tuple(stream for stream, _ in ends), last)


def _same_norms(
    parents: Sequence[int],
    members: Sequence[int],
    signatures: Sequence[Sequence[LayerSignature]],
    layer: int,
) -> bool:
    """Return whether all siblings read their parent through the same norm."""
    norms: dict[int, set[Hashable]] = {}
    for parent, member in zip(parents, members, strict=True):
        norms.setdefault(parent, set()).add(signatures[member][layer].norm)
    return all(len(kinds) == 1 for kinds in norms.values())
