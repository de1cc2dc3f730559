"""Describe how to rebuild a host, check the rebuilt host, and give it an ensemble's structure."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..data.eval_mode import evaluating
from ..data.model_runs import device_of
from ..errors import FormatError
from ..hosts import HostFacts, HostModel, families
from ..hosts.architecture import describe_host, rebuild_host
from ..hosts.arithmetic import Arithmetic
from ..hosts.block_calls import Form
from ..hosts.empty_weights import WithoutStorage, has_lost_buffers, replace_tensors_
from ..hosts.example_inputs import examples
from ..hosts.probes import Readout, positions_rule
from .assembly import Assembly
from .body import Body
from .folder_schema import Structure
from .host_engine import HostedBody
from .host_engine_blocks import host_blocks_, tie_
from .structure import attach_readouts_, build_body_, split_classifier_

if TYPE_CHECKING:
    from .ensemble import HydraEnsemble


def checked_description(ensemble: HydraEnsemble, structure: Structure) -> dict[str, Any]:
    """Describe the host; call it custom, with a warning, if it cannot be rebuilt from that."""
    buffers = _unsaved_buffers(ensemble.host)
    kinds = {name: plain_data(tensor.dtype) for name, tensor in buffers.items()}
    description = {**ensemble._assembly.description, "buffers": kinds}
    if description["library"] == "custom":
        return description
    plain = json.loads(json.dumps(description, default=plain_data))
    try:
        problem = _difference(ensemble, *structured(unfilled_host(plain), structure), kinds)
    except Exception as error:  # an unusual host: the user must pass it when loading
        problem = f"{type(error).__name__}: {str(error)[:200].rstrip('.')}"
    if problem is None:
        return description
    warnings.warn(
        f"{description['class']} cannot be rebuilt by name ({problem}). The folder is complete, "
        "but loading it needs a model of the same architecture: "
        "from_pretrained(folder, host=model).",
        stacklevel=6,
    )
    kept: dict[str, Any] = {
        name: description[name] for name in ("class", "neurons") if name in description
    }
    return {"library": "custom", **kept, "buffers": kinds}


@torch.no_grad()
def _difference(
    ensemble: HydraEnsemble, twin: Assembly, view: HostModel, kinds: Mapping[str, str]
) -> str | None:
    """Say how a rebuilt host with the same weights differs; None if its logits are equal.

    Settings without weights (how tokens are pooled, for example) only show in the logits.
    """
    state, rebuilt = ensemble.host.state_dict(), twin.model.state_dict()
    unlike = [
        name for name in state if name not in rebuilt or state[name].shape != rebuilt[name].shape
    ]
    if unlike or len(state) != len(rebuilt):
        return f"other tensors: {', '.join(sorted({*unlike, *(rebuilt.keys() - state)})[:3])}"
    inputs = examples(ensemble.host)[-1:]
    if not inputs:
        return None
    share_(twin.model, state, kinds)
    twin.model.to(ensemble.device)
    other = type(ensemble).around(twin, view, mode="fused", switches={})
    with evaluating(ensemble), evaluating(other):
        a, b = (e.fused_logits(*inputs[0]) for e in (ensemble, other))
    alike = a.shape == b.shape and bool(torch.allclose(a, b, atol=1e-4, rtol=1e-4))
    return None if alike else "with the same weights its logits differ"


def unfilled_host(description: dict[str, Any]) -> nn.Module:
    """Rebuild a host for `share_`: without storage for its weights where that is possible."""
    with WithoutStorage():
        host = rebuild_host(description)
    return rebuild_host(description) if has_lost_buffers(host) else host


def share_(model: nn.Module, tensors: Mapping[str, Tensor], kinds: Mapping[str, str]) -> None:
    """Let a model have tensors, not copies of them, each in its own precision.

    Args:
        model: A host with the ensemble's structure, with or without storage.
        tensors: Its state dict.
        kinds: Types of the buffers that a state dict lacks, such as rotary frequencies, by name.
    """
    own = model.state_dict(keep_vars=True)
    replaced = {
        id(tensor): tensors[name] if tensor.is_meta else tensors[name].to(tensor.device)
        for name, tensor in own.items()
    }
    replace_tensors_(model, replaced)
    for name, buffer in _unsaved_buffers(model).items():
        buffer.data = buffer.data.to(getattr(torch, kinds.get(name, plain_data(buffer.dtype))))


def fill_(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy a state dict into a model, each tensor in its own precision: parts may differ."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.dtype != tensors[name].dtype:
            tensor.data = tensor.data.to(tensors[name].dtype)
    model.load_state_dict(tensors)


def _unsaved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the floating-point buffers that a state dict lacks, by name."""
    saved = model.state_dict().keys()
    return {n: b for n, b in model.named_buffers() if b.is_floating_point() and n not in saved}


def structured(skeleton: nn.Module, structure: Structure) -> tuple[Assembly, HostModel]:
    """Give a plain host the structure of a saved ensemble; its weights are filled in later."""
    readout, switches, plan = structure.readout, structure.switches, structure.stream_plan()
    positions = positions_rule(skeleton) if readout.end_of_text else None
    facts = HostFacts(
        Readout(readout.tokens, readout.folds, readout.why, positions),
        (Form.parse(switches.get("form", "")),) * len(plan.masks[0]),
        Arithmetic.read(switches),
    )
    known = structure.family in families
    family = families[structure.family] if known else None
    view = HostModel(skeleton, family=family, facts=facts)
    if plan.masks[0].shape != view.head_counts:
        raise FormatError(
            f"The folder was saved for {len(plan.masks[0])} layers of {plan.masks[0].shape} heads "
            f"but {view.name} has {view.head_counts}. Pass the host that it was made from."
        )
    description = describe_host(skeleton)
    body: Body | HostedBody
    if switches.get("engine") == "host":
        body, templates = host_blocks_(view, plan, switches["cuts"], folds=switches["folds"])
        tie_(view.model, view.blocks_path, structure.aliases)
    else:
        body, templates = build_body_(view, plan, structure.copies)
    split_classifier_(view.model, structure.copies, folds=body.folds)
    if structure.readouts is not None:
        with torch.device(device_of(skeleton) or "cpu"):  # without storage while sizes are checked
            attach_readouts_(body, structure.readouts.empty(), templates[-1])
    merged, copies = tuple(structure.merged), dict(structure.copies)
    return Assembly(view.model, body, plan, templates, copies, merged, description), view


def plain_data(value: Any) -> Any:
    """Turn types that JSON lacks into plain data."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return str(value)
