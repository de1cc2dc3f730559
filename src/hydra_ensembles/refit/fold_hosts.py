"""The hosts of a fold: whether they belong together, and which trunks they may have."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from ..data.class_names import class_count, first_spellings, model_names, shown_order
from ..errors import DataError, HydraError, UnsupportedModelError
from ..fusion.ensemble import HydraEnsemble
from ..hosts import HostModel
from ..tasks import refuse
from .fold_rows import Trunk

APART = 0.5
"""Distance of the hosts' weights from their mean, relative to it, from which we warn. Three
fine-tunings of one MiniLM are at 0.01, unrelated weights at 1 or more."""


def plain_host(model: nn.Module) -> nn.Module:
    """Return a plain host; adapters of peft are merged into a copy."""
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(
            f"Found a {type(model).__name__} among the hosts; expected models. Load them first."
        )
    if isinstance(model, HydraEnsemble):
        raise UnsupportedModelError(
            "One of the hosts is a HydraEnsemble already. Give the plain models."
        )
    merge = getattr(model, "merge_and_unload", None)
    if callable(merge):
        plain: nn.Module = copy.deepcopy(model).merge_and_unload()  # type: ignore[operator]
        return plain
    if any(hasattr(module, "base_layer") for module in model.modules()):
        raise UnsupportedModelError(
            f"{type(model).__name__} holds adapters that are not merged. Load it as a PeftModel "
            "and call merge_and_unload()."
        )
    return model


def check_alike(hosts: Sequence[nn.Module]) -> None:
    """Raise unless the hosts have one architecture and the same classes in the same order."""
    if len(hosts) < 2:
        raise UnsupportedModelError(
            f"{len(hosts)} hosts cannot be folded: give two or more fine-tunings of one model."
        )
    for place, host in enumerate(hosts):
        refuse(host)
        for name, weight in host.named_parameters():
            if not bool(weight.isfinite().all()):
                raise DataError(
                    f"Host {place} has NaN or infinity in {name}. Its training diverged: train it "
                    "again, or leave it out."
                )
    first, names = hosts[0], model_names(hosts[0])
    shapes = {name: tensor.shape for name, tensor in first.state_dict().items()}
    for place, host in enumerate(hosts[1:], 1):
        classes = class_count(first), class_count(host)
        if None not in classes and classes[0] != classes[1]:
            raise UnsupportedModelError(
                f"Host {place} has {classes[1]} classes, host 0 has {classes[0]}. Fold hosts of "
                "one task."
            )
        others = model_names(host)
        if names is not None and others is not None and names != others:
            raise UnsupportedModelError(
                f"Host {place} has the classes {shown_order(first_spellings(others))}; host 0 has "
                f"{shown_order(first_spellings(names))}. Fold hosts with one class order."
            )
        same = {name: tensor.shape for name, tensor in host.state_dict().items()} == shapes
        if type(host) is not type(first) or not same:
            raise UnsupportedModelError(
                f"Host {place} ({type(host).__name__}) has another architecture than host 0 "
                f"({type(first).__name__}): names or shapes of their weights differ. Fold "
                "fine-tunings of one model."
            )
    masks = [getattr(host, "hydra_head_mask", None) for host in hosts]
    if any(a != b for a, b in pairwise(masks)):
        raise UnsupportedModelError(
            "The hosts are pruned in different ways. Fold hosts with one head mask."
        )


def trunks_of(
    view: HostModel, hosts: Sequence[nn.Module], trunk: int | str, *, choosing: bool
) -> list[Trunk]:
    """Return the trunks to fit, the simplest first; warn when a mean makes little sense."""
    if isinstance(trunk, int) and not isinstance(trunk, bool):
        if not 0 <= trunk < len(hosts):
            raise HydraError(f"trunk={trunk} is not a host: there are {len(hosts)}, from 0.")
        return [trunk]
    if trunk not in ("mean", "auto"):
        raise HydraError(f'Unknown trunk {trunk!r}: expected "mean", "auto" or a host\'s number.')
    if trunk == "auto" and choosing:
        return ["mean", *range(len(hosts))]
    distance = _distance(hosts, view.blocks_path)
    if distance < APART:
        return ["mean"]
    if trunk == "auto":
        return [0]
    warnings.warn(
        f"The hosts do not seem to be fine-tuned from one pretrained model: their weights differ "
        f"from the mean by {distance:.0%} of its size. The mean of such weights is a poor trunk: "
        "pass trunk=0.",
        stacklevel=3,
    )
    return ["mean"]


@torch.no_grad()
def _distance(hosts: Sequence[nn.Module], blocks_path: str) -> float:
    """Return the largest distance of a host's block weights from their mean, relative to it."""
    states = [dict(host.named_parameters()) for host in hosts]
    apart, size = torch.zeros(len(hosts), dtype=torch.float64), 0.0
    for name, parameter in states[0].items():
        if parameter.dim() < 2 or not name.startswith(blocks_path + "."):
            continue
        values = torch.stack([state[name].double().cpu() for state in states])
        mean = values.mean(0)
        apart += (values - mean).square().flatten(1).sum(1)
        size += float(mean.square().sum())
    return float((apart / max(size, 1e-300)).max().sqrt())
