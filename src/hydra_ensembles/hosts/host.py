"""A host model seen through its blocks: what is prunable here, found by looking, not by names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UnsupportedModelError
from .family import Family, families, first, first_path
from .sites import AttentionSite

_IMAGE_TOWERS = ("image_tower", "vision_model", "visual", "vision_tower")


@dataclass
class Block:
    """One transformer block: its attention and, where the family names them, its other parts."""

    index: int
    module: nn.Module
    attention: AttentionSite
    family: Family

    @cached_property
    def norm1(self) -> nn.Module | None:
        """Norm before (or after) attention."""
        return first(self.module, self.family.norm1)

    @cached_property
    def norm2(self) -> nn.Module | None:
        """Norm before (or after) the MLP."""
        return first(self.module, self.family.norm2)

    @cached_property
    def mlp_names(self) -> list[str]:
        """Paths of the MLP's modules that this block has, in the order of their use."""
        found = [first_path(self.module, path) for path in self.family.mlp_paths()]
        return [path for path in found if path is not None]

    def names(self, paths: Sequence[str]) -> list[str]:
        """Keep the paths that name a module of this block."""
        return [path for path in paths if first_path(self.module, path) is not None]

    def unknown_parameters(self) -> list[str]:
        """Name parameters of the block that no known part holds."""
        parts: list[nn.Module | None] = [self.attention.module, self.attention.output]
        parts += [self.norm1, self.norm2]
        parts += [self.module.get_submodule(path) for path in self.mlp_names]
        after = self.names(self.family.after_attention + self.family.after_mlp)
        parts += [self.module.get_submodule(path) for path in after]
        known = {id(p) for part in parts if part is not None for p in part.parameters()}
        return [name for name, p in self.module.named_parameters() if id(p) not in known]


class HostModel:
    """A pretrained transformer and where its heads are.

    Args:
        model: A Hugging Face, timm or open_clip module, a `ZeroShotClassifier`, or any module whose
            blocks a registered or given `Family` describes.
        family: Describe the blocks yourself; by default every registered family is tried.
    """

    def __init__(self, model: nn.Module, *, family: Family | None = None) -> None:
        self.model = model
        self.name = type(model).__name__
        self.family, self.blocks_path, modules = _find_blocks(model, family)
        self.blocks = [
            Block(i, block, AttentionSite(i, block, self.family), self.family)
            for i, block in enumerate(modules)
        ]

    @property
    def blocks_list(self) -> nn.Module:
        """The `nn.ModuleList` or `nn.Sequential` that holds the blocks."""
        return self.model.get_submodule(self.blocks_path)

    def replace_blocks_(self, blocks: Sequence[nn.Module]) -> None:
        """Put other modules in the place of the blocks, in place."""
        sequential = isinstance(self.blocks_list, nn.Sequential)
        parent, _, name = self.blocks_path.rpartition(".")
        new = nn.Sequential(*blocks) if sequential else nn.ModuleList(blocks)
        setattr(self.model.get_submodule(parent), name, new)

    @property
    def sites(self) -> list[AttentionSite]:
        """The attention layers, bottom to top."""
        return [block.attention for block in self.blocks]

    @property
    def original_mask(self) -> Any:
        """Which of its original heads an already pruned model keeps."""
        return getattr(self.model, "hydra_head_mask", None)

    @property
    def head_counts(self) -> tuple[int, ...]:
        """Heads of each layer that are there now."""
        return tuple(site.num_heads for site in self.sites)

    @property
    def width(self) -> int:
        """Model width d."""
        return self.sites[0].weights().query.shape[-1]

    def __len__(self) -> int:
        return len(self.blocks)

    def why_not_removable(self) -> str | None:
        """Say why heads cannot be removed physically, or None."""
        for block in self.blocks:
            site = block.attention
            reason = site.why_not_removable()
            if reason is not None:
                return f"layer {site.layer}: {reason}"
            parameters = dict(block.module.named_parameters())
            by_head = [
                name
                for name in block.unknown_parameters()
                if site.num_heads in parameters[name].shape
            ]
            if by_head:
                return (
                    f"layer {site.layer} has values by head that are not cut along "
                    f"({', '.join(by_head)}: a relative-position bias, say)"
                )
        return None

    def why_not_fusable(self) -> str | None:
        """Say why members cannot be fused, or None when every block computes what we think."""
        from .probe import check_block

        reason = self.why_not_removable()
        if reason is not None:
            return reason
        if not self.family.fusable:
            return (
                f"{self.family.name} models can be gated and scored, but not fused "
                "(rotary or causal decoding is not computed by the fused blocks)"
            )
        for block in self.blocks:
            if block.attention.kv_heads != block.attention.num_heads:
                return f"layer {block.index} has grouped queries"
            if block.norm1 is None or block.norm2 is None or not block.mlp_names:
                return f"layer {block.index}: no norm or MLP where {self.family.name} has them"
            unknown = block.unknown_parameters()
            if unknown:
                return f"layer {block.index} has parts that we do not know: {', '.join(unknown)}"
            reason = check_block(block)
            if reason is not None:
                return f"layer {block.index}: {reason}"
        return None

    @cached_property
    def readout(self) -> Any:
        """Which tokens the classifier reads (see `probe.Readout`)."""
        from .probe import find_readout

        return find_readout(self)


def host_model(model: nn.Module | HostModel, *, family: Family | None = None) -> HostModel:
    """Look at a model: find its blocks, heads and readout.

    Raises:
        UnsupportedModelError: When no known family describes its blocks; the message says what was
            looked for and how to describe it.
    """
    return model if isinstance(model, HostModel) else HostModel(model, family=family)


def _containers(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList | nn.Sequential]]:
    for path, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module):
            yield path, module


def _find_blocks(model: nn.Module, family: Family | None) -> tuple[Family, str, list[nn.Module]]:
    from . import huggingface, openclip, timm  # noqa: F401  (they register their families)

    tried = [family] if family is not None else [families[name] for name in families]
    found: list[tuple[Family, str, list[nn.Module]]] = []
    for candidate in tried:
        wanted = first_path(model, candidate.blocks) if candidate.blocks else None
        for path, container in _containers(model):
            if wanted is not None and path != wanted:
                continue
            blocks = list(container.children())
            if all(candidate.resolve(block) is not None for block in blocks):
                found.append((candidate, path, blocks))
    if not found:
        raise UnsupportedModelError(_why_unknown(model, family))
    return _choose_tower(model, found)


def _choose_tower(
    model: nn.Module, found: list[tuple[Family, str, list[nn.Module]]]
) -> tuple[Family, str, list[nn.Module]]:
    """Take the only stack of blocks, or the image tower of a dual encoder."""
    if len({path for _, path, _ in found}) == 1:
        return found[0]
    for tower in _IMAGE_TOWERS:
        inside = [entry for entry in found if tower in entry[1].split(".")]
        if len({path for _, path, _ in inside}) == 1:
            return inside[0]
    stacks = ", ".join(sorted({path for _, path, _ in found}))
    raise UnsupportedModelError(
        f"{type(model).__name__} has several stacks of attention blocks ({stacks}) and none is an "
        "image tower. Pass the tower that is meant, or a Family with blocks=<its path>."
    )


def _why_unknown(model: nn.Module, family: Family | None) -> str:
    stacks = [
        f"{path or '(the model)'} ({len(module)} x {type(next(module.children())).__name__})"
        for path, module in _containers(model)
    ]
    seen = "; ".join(stacks[:4]) if stacks else "no ModuleList or Sequential at all"
    looked = f"the family {family.name!r}" if family else f"families {', '.join(families)}"
    return (
        f"{type(model).__name__}: no block list in which every block has the attention parts of "
        f"{looked}. Found: {seen}. If it is a transformer, describe one block: "
        'hydra.Family(name="mine", query="attn.q", key="attn.k", value="attn.v", '
        'output="attn.o", norm1="norm1", norm2="norm2", mlp="mlp"), and pass it as family= or to '
        "register_family()."
    )


def describe_shape(shape: Sequence[int]) -> str:
    """Say `12 x 6` for equal layers, the list otherwise."""
    return f"{len(shape)} x {shape[0]}" if len(set(shape)) == 1 else str(list(shape))


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def main_output(output: Any) -> Tensor:
    """Return what a host is called for: its logits, else its embedding, else its last states."""
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "image_embeds", "text_embeds", "pooler_output", "last_hidden_state"):
        value = output.get(name) if isinstance(output, dict) else getattr(output, name, None)
        if isinstance(value, Tensor):
            return value
    if isinstance(output, (tuple, list)) and output and isinstance(output[0], Tensor):
        return output[0]
    raise UnsupportedModelError(
        f"The model returned {type(output).__name__}: expected a tensor or an object with .logits."
    )
