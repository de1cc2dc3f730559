"""Find and replace the linear layers of a host."""

from __future__ import annotations

from torch import nn

from ...errors import UnsupportedModelError
from ...hosts import host_model


def replace_(model: nn.Module, path: str, module: nn.Module) -> None:
    """Put a module at a path of the model, in place."""
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def block_linears(model: nn.Module) -> list[str]:
    """Return the paths of the linear layers inside the blocks, in order.

    Raises:
        UnsupportedModelError: for `nn.MultiheadAttention`, which reads the weights of its linears
            without calling them: a replacement would do nothing.
    """
    host = host_model(model)
    _refuse_multihead(model)
    return [
        f"{host.blocks_path}.{name}"
        for name, module in host.blocks_list.named_modules()
        if isinstance(module, nn.Linear)
    ]


def attention_linears(model: nn.Module) -> list[str]:
    """Return the paths of the query, key, value and output projections."""
    host = host_model(model)
    _refuse_multihead(model)
    parts = {
        id(part)
        for site in host.sites
        for part in (site.packed, site.query, site.key, site.value, site.output)
    }
    return [
        name
        for name, module in model.named_modules()
        if id(module) in parts and isinstance(module, nn.Linear)
    ]


def _refuse_multihead(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            raise UnsupportedModelError(
                f"{type(model).__name__}: {name} is an nn.MultiheadAttention, which never calls "
                "its projections, so they cannot be replaced. Use a host with linear projections."
            )
