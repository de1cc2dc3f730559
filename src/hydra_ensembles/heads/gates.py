"""Switch heads and neurons off: by gates that carry gradients, or by removal. The two agree.

Pruning head h means A_h := 0 before the output projection W_O; the bias of W_O stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from ..errors import MaskError, UnsupportedModelError
from ..hosts import HostModel, host_model
from ..hosts.attention_site import AttentionSite
from ..hosts.mlp_site import MlpSite, cut_neurons_
from ..hosts.multihead_attention import opened
from ..hosts.shared_layers import shared_layers
from .head_mask import HeadMask, check_fits
from .unit_mask import UnitMask, check_units_fit, gates_of

Gates = HeadMask | UnitMask | Sequence[Tensor | None]
Scaling = Callable[..., tuple[Any, ...]]


@contextmanager
def gate(
    model: nn.Module | HostModel, gates: Gates, neurons: Sequence[Tensor | None] | None = None
) -> Iterator[None]:
    """Scale every head's output, and every neuron, by its gate while the context is open.

    The scaling happens at the input of the output projection, so it is the same algebra under
    eager, sdpa and flash attention; neurons are scaled at the input of the linear that reads them.

    Args:
        model: A host model.
        gates: A `HeadMask` or `UnitMask` (kept = 1, pruned = 0), or one tensor per layer (None =
            all ones): `[heads]`, or `[batch, heads]` for gates of each sample; they may require
            gradients.
        neurons: Gates of neurons, like those of heads: `[neurons]` or `[batch, neurons]`.

    Raises:
        UnsupportedModelError: When the context closes, if an attention layer ran without calling
            its output projection as a module: its gates had no effect.

    Example:
        >>> with gate(model, mask):
        ...     logits = model(**batch).logits
    """
    host = host_model(model)
    if isinstance(gates, (HeadMask, UnitMask)):
        mask = UnitMask.of(gates)
        check_units_fit(mask, host)
        gates = gates_of(mask.heads)
        neurons = gates_of(mask.neurons) if neurons is None else neurons
    neurons = [None] * len(host) if neurons is None else neurons
    for given in (gates, neurons):
        if len(given) != len(host):
            raise MaskError(
                f"{len(given)} gates but {host.name} has {len(host)} layers: give one tensor (or "
                "None) per layer."
            )
    ran: set[int] = set()
    gated: set[int] = set()

    def note(site: AttentionSite, module: nn.Module, layers: set[int]) -> Any:
        return module.register_forward_pre_hook(lambda *_: layers.add(site.layer))

    scalings = [
        (_of_heads(host, layer, row), _of_neurons(host, layer, more))
        for layer, (row, more) in enumerate(zip(gates, neurons, strict=True))
    ]
    shared = shared_layers(model) if isinstance(model, nn.Module) else None
    if shared is not None:
        assert isinstance(model, nn.Module)
        with _gate_calls(model, shared, host, scalings):
            yield
        return
    with ExitStack() as stack:
        stack.enter_context(opened([site.module for site in host.sites]))
        for block, (heads, more) in zip(host.blocks, scalings, strict=True):
            site = block.attention
            if heads is not None:
                scaling = site.output.register_forward_pre_hook(heads)
                for hook in (scaling, note(site, site.module, ran), note(site, site.output, gated)):
                    stack.callback(hook.remove)
            if more is not None:
                second = _second(block.module, host, block.index)
                stack.callback(second.register_forward_pre_hook(more).remove)
        yield
    if ran - gated:
        raise UnsupportedModelError(
            f"{host.name} never calls the output projection of layer {min(ran - gated)} as a "
            "module, so its heads cannot be gated: it passes the weights to a function. Load it "
            'with another attn_implementation ("eager" or "sdpa"), if it has one.'
        )


@contextmanager
def _gate_calls(
    model: nn.Module,
    layers: Sequence[nn.Module],
    host: HostModel,
    scalings: Sequence[tuple[Scaling | None, Scaling | None]],
) -> Iterator[None]:
    """Gate a model whose layers share weights: each call of a layer by the gates of its number."""
    calls: dict[int, int] = {}

    def begin(*_: Any) -> None:
        calls.clear()

    def scale(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        number = calls[id(module)] = calls.get(id(module), -1) + 1
        scaled = scales[module][number]
        return inputs if scaled is None else scaled(module, inputs)

    scales: dict[nn.Module, list[Scaling | None]] = {}
    for number, (layer, (heads, neurons)) in enumerate(zip(layers, scalings, strict=True)):
        output = AttentionSite(number, layer, host.family).output
        scales.setdefault(output, []).append(heads)
        if any(more is not None for _, more in scalings):
            scales.setdefault(_second(layer, host, number), []).append(neurons)
    with ExitStack() as stack:
        stack.callback(model.register_forward_pre_hook(begin).remove)
        for module in scales:
            stack.callback(module.register_forward_pre_hook(scale).remove)
        yield


def _second(block: nn.Module, host: HostModel, layer: int) -> nn.Module:
    """Return the linear of a block that reads its neurons."""
    mlp = host.mlps[layer]
    if isinstance(mlp, str):
        raise UnsupportedModelError(
            f"Neurons in layer {layer} of {host.name} cannot be gated: {mlp}."
        )
    return block.get_submodule(mlp.second)


def _of_heads(host: HostModel, layer: int, row: Tensor | None) -> Scaling | None:
    site = host.sites[layer]
    return None if row is None else _scaling(layer, row, site.num_heads, site.head_dim, "heads")


def _of_neurons(host: HostModel, layer: int, row: Tensor | None) -> Scaling | None:
    if row is None:
        return None
    return _scaling(layer, row, host.neuron_counts[layer], 1, "neurons")


def _scaling(layer: int, row: Tensor, units: int, width: int, name: str) -> Scaling:
    """Return what scales units of some width at the input of the linear that reads them."""
    if row.shape[-1] != units or row.dim() > 2:
        raise MaskError(
            f"Gates of layer {layer} have shape {tuple(row.shape)} but the layer has "
            f"{units} {name}: expected [{name}] or [batch, {name}]."
        )

    def scale(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x = inputs[0]
        values = row.to(device=x.device, dtype=x.dtype)[..., None]  # [(batch,) units, 1]
        by_unit = x.unflatten(-1, (units, width))
        if values.dim() == 3:
            if len(values) != len(x) and len(x) % len(values) == 0:  # windows: [batch * windows]
                values = values.repeat_interleave(len(x) // len(values), 0)
            values = values.reshape(len(values), *[1] * (by_unit.dim() - 3), *values.shape[1:])
        return ((by_unit * values).flatten(-2), *inputs[1:])

    return scale


def prune_heads_(model: nn.Module, mask: HeadMask) -> nn.Module:
    """Remove heads from a model physically, in place, whole layers included.

    Rows of W_Q, W_K, W_V and columns of W_O go; a layer without heads adds only its output bias.
    The kept heads are recorded on the model (`hydra_head_mask`), so that `fuse` can take it.

    Args:
        model: A host model (the module itself).
        mask: Which of the heads *that are there now* to keep.

    Returns:
        The same model.

    Example:
        >>> prune_heads_(model, scores.top_k(0.5))
    """
    host = host_model(model)
    check_fits(mask, host)
    reason = host.why_not_prunable()
    if reason is not None:
        raise UnsupportedModelError(
            f"Heads of {host.name} cannot be removed: {reason}. Use gate() instead."
        )
    before = host.original_mask
    for site in host.sites:  # nothing is cut before every layer is known to be possible
        site.kept_groups(mask.indices(site.layer))
    for site in host.sites:
        if not bool(mask[site.layer].all()):
            site.cut_(mask.indices(site.layer))
    model.hydra_head_mask = mask if before is None else _compose(before, mask)  # type: ignore[assignment]
    return model


def prune_units_(model: nn.Module, mask: UnitMask | HeadMask) -> nn.Module:
    """Remove heads and neurons from a model physically, in place.

    Heads go as in `prune_heads_`. A neuron takes its rows of the first linears and its column of
    the second. Shapes tell how many are left, and the second linear remembers how many there were
    (`hydra_mlp`), so that `fuse`, `cost`, saving and loading know the model.

    Args:
        model: A host model (the module itself).
        mask: Which of the heads and neurons *that are there now* to keep; at least one neuron.

    Returns:
        The same model.

    Example:
        >>> prune_units_(model, UnitMask.random(model, keep=0.5))
    """
    mask, host = UnitMask.of(mask), host_model(model)
    check_units_fit(mask, host)
    cuts = [
        (block, mlp, mask.neurons.indices(block.index))
        for block, mlp, gates in zip(host.blocks, host.mlps, gates_of(mask.neurons), strict=True)
        if gates is not None and isinstance(mlp, MlpSite)
    ]
    empty = [block.index for block, _, kept in cuts if not kept]
    if empty:
        raise MaskError(f"No neuron of layer {empty[0]} is kept: keep at least one.")
    if cuts and host.shares_layers:
        raise UnsupportedModelError(
            f"Neurons of {host.name} cannot be removed: its layers share one set of weights, so "
            "a neuron that goes in one layer would go in all. Use gate() instead."
        )
    if not all(bool(row.all()) for row in mask.heads):
        prune_heads_(model, mask.heads)
    for block, mlp, kept in cuts:
        cut_neurons_(block, kept, mlp)
    return model


def _compose(before: HeadMask, mask: HeadMask) -> HeadMask:
    """Express a mask of the heads that were left in terms of the original heads."""
    rows = []
    for old, new in zip(before, mask, strict=True):
        row = old.clone()
        row[old.nonzero().flatten()[~new]] = False
        rows.append(row)
    return HeadMask(rows)
