"""Switch heads off: by gates that carry gradients, or by physical removal. The two agree.

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
from ..hosts.multihead_attention import opened
from ..hosts.shared_layers import shared_layers
from .head_mask import HeadMask, check_fits

Gates = HeadMask | Sequence[Tensor | None]


@contextmanager
def gate(model: nn.Module | HostModel, gates: Gates) -> Iterator[None]:
    """Scale every head's output by its gate while the context is open.

    The scaling happens at the input of the output projection, so it is the same algebra under
    eager, sdpa and flash attention.

    Args:
        model: A host model.
        gates: A `HeadMask` (kept = 1, pruned = 0), or one tensor per layer (None = all ones):
            `[heads]`, or `[batch, heads]` for gates of each sample; they may require gradients.

    Raises:
        UnsupportedModelError: When the context closes, if an attention layer ran without calling
            its output projection as a module: its gates had no effect.

    Example:
        >>> with gate(model, mask):
        ...     logits = model(**batch).logits
    """
    host = host_model(model)
    if isinstance(gates, HeadMask):
        check_fits(gates, host)
        gates = [None if bool(row.all()) else row for row in gates]
    if len(gates) != len(host):
        raise MaskError(
            f"{len(gates)} gates but {host.name} has {len(host)} layers: give one tensor (or None) "
            "per layer."
        )
    ran: set[int] = set()
    gated: set[int] = set()

    def note(site: AttentionSite, module: nn.Module, layers: set[int]) -> Any:
        return module.register_forward_pre_hook(lambda *_: layers.add(site.layer))

    shared = shared_layers(model) if isinstance(model, nn.Module) else None
    if shared is not None:
        assert isinstance(model, nn.Module)
        with _gate_calls(model, shared, host, gates):
            yield
        return
    with ExitStack() as stack:
        stack.enter_context(opened([site.module for site in host.sites]))
        for site, row in zip(host.sites, gates, strict=True):
            if row is not None:
                scaling = site.output.register_forward_pre_hook(_scaling(site, row))
                for hook in (scaling, note(site, site.module, ran), note(site, site.output, gated)):
                    stack.callback(hook.remove)
        yield
    if ran - gated:
        raise UnsupportedModelError(
            f"{host.name} never calls the output projection of layer {min(ran - gated)} as a "
            "module, so its heads cannot be gated: it passes the weights to a function. Load it "
            'with another attn_implementation ("eager" or "sdpa"), if it has one.'
        )


@contextmanager
def _gate_calls(
    model: nn.Module, layers: Sequence[nn.Module], host: HostModel, gates: Sequence[Tensor | None]
) -> Iterator[None]:
    """Gate a model whose layers share weights: each call of a layer by the gates of its number."""
    calls: dict[int, int] = {}

    def begin(*_: Any) -> None:
        calls.clear()

    def scale(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        number = calls[id(module)] = calls.get(id(module), -1) + 1
        scaled = scales[id(module)][number]
        return inputs if scaled is None else scaled(module, inputs)

    scales: dict[int, list[Any]] = {}
    outputs: dict[int, nn.Module] = {}
    for layer, site, row in zip(layers, host.sites, gates, strict=True):
        output = AttentionSite(site.layer, layer, host.family).output
        outputs[id(output)] = output
        scales.setdefault(id(output), []).append(None if row is None else _scaling(site, row))
    with ExitStack() as stack:
        stack.callback(model.register_forward_pre_hook(begin).remove)
        for output in outputs.values():
            stack.callback(output.register_forward_pre_hook(scale).remove)
        yield


def _scaling(site: AttentionSite, row: Tensor) -> Callable[..., tuple[Any, ...]]:
    """Return what scales the heads at the input of a site's output projection."""
    if row.shape[-1] != site.num_heads or row.dim() > 2:
        raise MaskError(
            f"Gates of layer {site.layer} have shape {tuple(row.shape)} but the layer has "
            f"{site.num_heads} heads: expected [heads] or [batch, heads]."
        )

    def scale(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x = inputs[0]
        values = row.to(device=x.device, dtype=x.dtype)[..., None]  # [(batch,) heads, 1]
        by_head = x.unflatten(-1, (site.num_heads, site.head_dim))
        if values.dim() == 3:
            if len(values) != len(x) and len(x) % len(values) == 0:  # windows: [batch * windows]
                values = values.repeat_interleave(len(x) // len(values), 0)
            values = values.reshape(len(values), *[1] * (by_head.dim() - 3), *values.shape[1:])
        return ((by_head * values).flatten(-2), *inputs[1:])

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


def _compose(before: HeadMask, mask: HeadMask) -> HeadMask:
    """Express a mask of the heads that were left in terms of the original heads."""
    rows = []
    for old, new in zip(before, mask, strict=True):
        row = old.clone()
        row[old.nonzero().flatten()[~new]] = False
        rows.append(row)
    return HeadMask(rows)
