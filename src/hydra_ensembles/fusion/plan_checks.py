"""Whether a saved plan, its masks, its cuts and its copies fit each other.

Every function returns what is wrong, or None.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..heads.head_mask import HeadMask
from ..heads.stream_plan import Plan


def plan_problem(config: Mapping[str, Any]) -> str | None:
    """Say where the plan contradicts itself or the masks; follow every member through it."""
    masks = [HeadMask(rows) for rows in config["masks"]]
    plan = Plan.from_dict(config["plan"], masks)
    depth, members = len(masks[0]), len(masks)
    hosted = config["switches"].get("engine") == "host"
    if plan.depth != depth or len(plan.trunk_heads) != plan.trunk:
        return f"the plan has {plan.depth} layers, the masks have {depth}"
    for layer, trunk in enumerate(plan.trunk_heads):
        if any(list(trunk) != mask.indices(layer) for mask in masks):
            return f"the plan's trunk keeps other heads in layer {layer} than the masks"
    streams = 1
    for place, layer_plan in enumerate(plan.layers, start=plan.trunk):
        name = f"layer {place} of the plan"
        parents, heads, firsts = layer_plan.parents, layer_plan.heads, layer_plan.members
        if layer_plan.layer != place:
            return f"{name} says that it is layer {layer_plan.layer}"
        if not len(parents) == len(heads) == len(firsts) or set(parents) != set(range(streams)):
            return f"{name} does not take the {streams} streams of the layer before"
        if any(len(set(row)) != len(row) for row in heads):
            return f"{name} has a stream with the same head twice"
        distinct = {head for row in heads for head in row}
        if not hosted and distinct != set(range(len(distinct))):
            return f"{name} numbers its distinct heads with gaps"
        if any(first >= members for first in firsts):
            return f"{name} names a member beyond the {members}"
        if layer_plan.readout_only and place != depth - 1:
            return f"{name} is not the last, but runs for the readout only"
        streams = len(parents)
    reads = config["readout"]["tokens"] is not None or config["readout"]["end_of_text"]
    if plan.layers and plan.layers[-1].readout_only and not reads:
        return "the plan's last layer runs for the readout only, but all tokens are read"
    if any(end >= streams for end in plan.ends) or set(plan.streams) != set(range(len(plan.ends))):
        return "the plan's ends and streams name streams that are not there"
    if len(plan.streams) != members:
        return f"the plan has {len(plan.streams)} members, but there are {members} masks"
    for member, mask in enumerate(masks):
        stream = plan.ends[plan.streams[member]]
        for layer_plan in reversed(plan.layers):
            if len(layer_plan.heads[stream]) != mask.kept[layer_plan.layer]:
                return (
                    f"member {member} has {mask.kept[layer_plan.layer]} heads in layer "
                    f"{layer_plan.layer} by its mask, {len(layer_plan.heads[stream])} by the plan"
                )
            stream = layer_plan.parents[stream]
    return _cuts_problem(config["switches"].get("cuts"), plan) if hosted else None


def _cuts_problem(cuts: Any, plan: Plan) -> str | None:
    """Say where the cuts of the host's own blocks do not fit the plan."""
    kept = [[heads] for heads in plan.trunk_heads] + [list(layer.heads) for layer in plan.layers]
    if not isinstance(cuts, list) or len(cuts) != len(kept):
        return "the cuts of the host's blocks are not one for each layer"
    for layer, (row, streams) in enumerate(zip(cuts, kept, strict=True)):
        if not isinstance(row, list) or len(row) != len(streams):
            return f"the cuts of layer {layer} are not one for each stream"
        for cut, heads in zip(row, streams, strict=True):
            physical, on = (cut.get(k) if isinstance(cut, dict) else None for k in ("there", "on"))
            lists = isinstance(physical, list) and isinstance(on, list)
            if not lists or any(type(head) is not int for head in (*physical, *on)):  # type: ignore[misc]
                return f"a cut of layer {layer} is {cut!r:.60}"
            assert isinstance(physical, list) and isinstance(on, list)
            if (
                physical != sorted(set(physical))
                or not set(on) <= set(physical)
                or len(on) != len(heads)
            ):
                return f"a cut of layer {layer} keeps {on!r:.60} of {physical!r:.60}"
    return None


def copies_problem(config: Mapping[str, Any]) -> str | None:
    """Say where the numbers of copies do not fit the plan."""
    plan = Plan.from_dict(config["plan"], [HeadMask(rows) for rows in config["masks"]])
    layers = {layer.layer: layer for layer in plan.layers}
    for name, count in config["copies"].items():
        place = name.partition(".")[0]
        if place == "classifier":
            allowed = {1, len(plan.ends)}
        elif int(place) in layers:
            allowed = {1, layers[int(place)].streams, layers[int(place)].inputs}
        else:
            return f"copies name layer {place}, which is not branched"
        if count not in allowed:
            return f"copies of {name} are {count}, expected one of {sorted(allowed)}"
    return None
