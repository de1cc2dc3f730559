"""Equal widths in all layers, written in the host's own config: stock transformers loads the model.

Which settings of a config hold the widths is found by trying: a setting is changed, the class is
built without storage, and the shapes of its weights are compared with those of a model that was
cut.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import nn

from ..errors import UnsupportedModelError
from ..fusion.host_description import fill_
from ..hosts import HostModel, host_model
from ..hosts.mlp_site import MlpSite, cut_neurons_

Settings = dict[str, Any]
"""Values of a config by dotted path."""
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class WidthSettings:
    """Where the config of a host keeps its widths.

    Attributes:
        neurons: Returns the settings for a number of neurons per layer.
        heads: Returns the settings for a number of heads per layer; None if the config cannot say
            that heads are fewer while their width stays.
    """

    neurons: Callable[[int], Settings]
    heads: Callable[[int], Settings] | None


def find_width_settings(host: HostModel) -> WidthSettings:
    """Find the settings of a config that say how many neurons and heads each layer has.

    Raises:
        UnsupportedModelError: When stock code cannot build the model with fewer neurons.

    Example:
        >>> find_width_settings(host_model(bert)).neurons(768)
        {'intermediate_size': 768}
    """
    model: Any = host.model
    config = getattr(model, "config", None)
    if not type(model).__module__.startswith("transformers.") or not hasattr(config, "to_dict"):
        raise _refused(host, "only models of transformers have a config that says their widths")
    widths, counts = set(host.neuron_counts), set(host.head_counts)
    if len(widths) != 1 or widths == {0}:
        reason = host.why_no_neurons() or f"its layers have {sorted(widths)} neurons"
        raise _refused(host, f"its layers must have equal numbers of neurons, and {reason}")
    if _built_shapes(model, {}) != _shapes(model):
        raise _refused(host, "its config does not describe it")
    neurons, width = widths.pop(), host.width
    fewer = max(1, neurons // 2)
    expected = _cut_shapes(host, neurons=fewer)

    for path, value in _leaves(config):
        ratio = _is_number(value) and value != neurons  # a multiple of the model's width

        def settings(number: int, path: str = path, ratio: bool = ratio) -> Settings:
            return {path: number / width if ratio else number}

        plausible = value is None or (_is_number(value) and value in (neurons, neurons / width))
        if plausible and _built_shapes(model, settings(fewer)) == expected:
            return WidthSettings(settings, _find_heads(host) if len(counts) == 1 else None)
    raise _refused(host, "no setting of its config changes the number of its neurons only")


def _find_heads(host: HostModel) -> Callable[[int], Settings] | None:
    """Find the settings of the number of heads, key heads and the width of a head."""
    model: Any = host.model
    site = host.sites[0]
    heads, group = site.num_heads, max(1, site.num_heads // max(1, site.kv_heads))
    if heads <= group or host.why_not_prunable() is not None:
        return None
    leaves = list(_leaves(model.config))
    numbers = [p for p, v in leaves if v in (heads, heads // group) and _is_number(v)]
    values = dict(leaves)
    widths = {p: site.head_dim for p in values if p.rpartition(".")[2] == "head_dim"}

    def settings(names: Sequence[str], number: int) -> Settings:
        changed = {p: number if values[p] == heads else number // group for p in names}
        return {**widths, **changed}

    fewer = heads - group
    expected = _cut_shapes(host, heads=fewer)
    for size in range(1, min(3, len(numbers)) + 1):
        for names in combinations(numbers, size):
            if _built_shapes(model, settings(names, fewer)) == expected:
                return lambda number, names=names: settings(names, number)  # type: ignore[misc]
    return None


@torch.no_grad()
def stock_model(pruned: nn.Module, settings: Mapping[str, Any]) -> nn.Module:
    """Return a model of the stock class, built from the changed config, with the pruned weights.

    Args:
        pruned: A model that was cut to equal widths.
        settings: The changed settings of its config.
    """
    old: Any = pruned
    config = _changed(old.config, settings)
    with torch.random.fork_rng():
        model: nn.Module = type(old)(config)
    state = pruned.state_dict()
    if _shapes(model) != _shapes(pruned):
        raise UnsupportedModelError(
            f"{type(pruned).__name__} has other weights when it is built with {dict(settings)}. "
            "Use uniform=False."
        )
    fill_(model, state)
    if getattr(old, "generation_config", None) is not None:
        vars(model)["generation_config"] = copy.deepcopy(old.generation_config)
    return model.to(next(pruned.parameters()).device).train(pruned.training)


def _refused(host: HostModel, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{host.name} cannot get equal widths that stock code loads: {reason}. Use uniform=False, "
        "and save() and load() keep the model."
    )


def _leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings of a config and of the configs inside it, by dotted path."""
    for name, value in vars(config).items():
        if name.startswith("_"):
            continue
        if hasattr(value, "to_dict"):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _changed(config: Any, settings: Mapping[str, Any]) -> Any:
    config = copy.deepcopy(config)
    for path, value in settings.items():
        place, (*parents, name) = config, path.split(".")
        for parent in parents:
            place = getattr(place, parent)
        setattr(place, name, value)
    return config


def _shapes(model: nn.Module) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _built_shapes(model: Any, settings: Mapping[str, Any]) -> Shapes | None:
    """Return the shapes of a model that is built with changed settings; None if it cannot be."""
    try:
        with torch.device("meta"):
            return _shapes(type(model)(_changed(model.config, settings)))
    except Exception:  # the setting is something else
        return None


def _cut_shapes(host: HostModel, *, heads: int | None = None, neurons: int | None = None) -> Shapes:
    """Return the shapes of a host whose layers keep so many heads or neurons."""
    cut = host_model(copy.deepcopy(host.model).to("meta"), family=host.family)
    for block, mlp in zip(cut.blocks, host.mlps, strict=True):
        if heads is not None:
            block.attention.cut_(list(range(heads)))
        if neurons is not None:
            assert isinstance(mlp, MlpSite)
            cut_neurons_(block, range(neurons), mlp)
    return _shapes(cut.model)
