"""A family says where the parts of a transformer block are, and nothing about how they are used."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from ..registry import Registry

Path = str | tuple[str, ...]
"""A dotted path inside a block, or several; the first that exists is used."""

families: Registry[Family] = Registry("model family")


@dataclass(frozen=True)
class Family:
    """Where things are in one block of a transformer.

    Args:
        name: Name of the family.
        query, key, value: Separate projections; or `packed`, one linear with rows [q | k | v] or an
            `nn.MultiheadAttention`. Without any of them heads can be gated and scored but not
            removed.
        output: The output projection W_O.
        norm: `"pre"`: x + f(norm(x)); `"post"`: norm(x + f(x)).
        norm1, norm2: The norms of attention and MLP.
        mlp: The modules of the MLP, applied one after another.
        after_attention, after_mlp: What comes between the projection and the residual sum (dropout,
            a norm, layer scale, drop path): modules, or bare scale parameters. Paths that a model
            lacks are skipped.
        scales_queries: Whether queries are divided by the root of the head width before the
            attention scales its scores (ESM).
        blocks: Path to the list of blocks from the model; found by search when empty.
        returns_tuple: Whether the attention module returns `(output, weights)`.
        fusable: False for families that can be gated and scored but not fused.
    """

    name: str
    output: Path
    query: Path = ()
    key: Path = ()
    value: Path = ()
    packed: Path = ()
    norm: Literal["pre", "post"] = "pre"
    norm1: Path = ()
    norm2: Path = ()
    mlp: tuple[Path, ...] | str = ("mlp",)
    after_attention: tuple[str, ...] = ()
    after_mlp: tuple[str, ...] = ()
    scales_queries: bool = False
    blocks: Path = ()
    returns_tuple: bool = False
    fusable: bool = True

    def resolve(self, block: nn.Module) -> dict[str, nn.Module] | None:
        """Find the attention's linears in a block, or None when one is missing."""
        names = [n for n in ("packed", "query", "key", "value", "output") if getattr(self, n)]
        parts = {name: first(block, getattr(self, name)) for name in names}
        return parts if all(map(_is_projection, parts.values())) else None  # type: ignore[return-value]

    def mlp_paths(self) -> tuple[Path, ...]:
        """Return the paths of the MLP's modules in order."""
        return (self.mlp,) if isinstance(self.mlp, str) else self.mlp


def _is_projection(part: nn.Module | None) -> bool:
    weight = getattr(part, "weight", None)
    return isinstance(part, nn.MultiheadAttention) or getattr(weight, "ndim", 0) == 2


def first_path(root: nn.Module, path: Path) -> str | None:
    """Return the first alternative that names a submodule."""
    for candidate in (path,) if isinstance(path, str) else path:
        module: object = root
        for part in candidate.split("."):
            module = getattr(module, part, None)
        if isinstance(module, nn.Module):
            return candidate
    return None


def first(root: nn.Module, path: Path) -> nn.Module | None:
    """Return the first submodule that exists among the alternatives."""
    name = first_path(root, path)
    return None if name is None else root.get_submodule(name)


def register_family(family: Family, *, replace: bool = False) -> Family:
    """Register a family, so that every function recognises its models.

    Example:
        >>> register_family(Family(name="mine", packed="attn.qkv", output="attn.proj"))
    """
    return families.register(family.name, replace=replace)(family)


# --- families of timm, open_clip and torchvision --------------------------------------------------

TIMM = register_family(
    Family(
        name="timm",  # Vision Transformers, DeiT, BEiT, EVA and DINOv3
        packed="attn.qkv",
        output="attn.proj",
        norm1="norm1",
        norm2="norm2",
        after_attention=("attn.proj_drop", "ls1", "gamma_1", "drop_path1"),
        after_mlp=("ls2", "gamma_2", "drop_path2"),
    )
)
EVA = register_family(
    replace(
        TIMM,
        name="eva",  # EVA-02 with a linear each for queries, keys and values
        packed=(),
        query="attn.q_proj",
        key="attn.k_proj",
        value="attn.v_proj",
    )
)
OPEN_CLIP = register_family(
    Family(
        name="open_clip",  # its attention is torch's own `nn.MultiheadAttention`
        packed="attn",
        output="attn.out_proj",
        norm1="ln_1",
        norm2="ln_2",
        after_attention=("ls_1",),
        after_mlp=("ls_2",),
        returns_tuple=True,
    )
)
TORCHVISION = register_family(
    Family(
        name="torchvision",  # its attention is torch's own `nn.MultiheadAttention`
        packed="self_attention",
        output="self_attention.out_proj",
        norm1="ln_1",
        norm2="ln_2",
        after_attention=("dropout",),
        returns_tuple=True,
    )
)
