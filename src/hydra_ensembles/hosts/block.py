"""One transformer block of a host, seen through its family, and what it computes for one stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.eval_mode import twin
from .attention import AttentionArguments, add_bias, attend, bias_of
from .attention_site import AttentionSite
from .families import Family, first, first_path
from .head_weights import is_linear, linear_weight


@torch.no_grad()
def last_linear(block: Block) -> str | None:
    """Return the path of the linear layer whose output is the MLP's output, or None.

    The MLP is run on random states: a norm or a gate after the last linear layer shows up as a
    difference.
    """
    parts = {path: twin(block.module.get_submodule(path)).eval() for path in block.mlp_names}
    outputs: dict[str, Tensor] = {}
    for path, part in parts.items():
        for name, module in part.named_modules():
            if is_linear(module):
                module.register_forward_hook(partial(_note, outputs, f"{path}.{name}".rstrip(".")))
    weight = linear_weight(block.attention.output)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, weight.shape[0], generator=generator).to(weight)
    try:
        for part in parts.values():
            x = part(x)
    except Exception:  # it needs more than states
        return None
    return next((path for path, output in outputs.items() if output.equal(x)), None)


def _note(
    outputs: dict[str, Tensor], path: str, module: nn.Module, inputs: Any, output: Tensor
) -> None:
    outputs[path] = output


class Scale(nn.Module):
    """A layer scale that a host keeps as a bare parameter of its block."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        """Scale the states."""
        return x * self.weight


@dataclass
class Block:
    """One transformer block: its attention and, where the family names them, its other parts."""

    index: int
    module: nn.Module
    attention: AttentionSite
    family: Family

    @classmethod
    def of(cls, index: int, module: nn.Module, family: Family) -> Block:
        """View a module as a block of a family."""
        return cls(index, module, AttentionSite(index, module, family), family)

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
        paths = [first_path(self.module, path) for path in self.family.mlp_paths()]
        return [path for path in paths if path is not None]

    @cached_property
    def has_experts(self) -> bool:
        """Whether the MLP is a mixture of experts, of which each token passes only a few."""
        names = (n for path in self.mlp_names for n, _ in self._inside(path))
        return any("expert" in name.lower() for name in names)

    def _inside(self, path: str) -> list[tuple[str, nn.Module]]:
        return list(self.module.get_submodule(path).named_modules())

    def names(self, paths: Sequence[str]) -> list[str]:
        """Keep the paths that name a module or a bare parameter of this block."""
        return [path for path in paths if self._at(path) is not None]

    def part(self, path: str) -> nn.Module:
        """Return the module at a path; a bare parameter is wrapped in a `Scale`."""
        value = self._at(path)
        assert value is not None
        return Scale(value) if isinstance(value, nn.Parameter) else value

    def _at(self, path: str) -> nn.Module | nn.Parameter | None:
        value: object = self.module
        for name in path.split("."):
            value = getattr(value, name, None)
        return value if isinstance(value, (nn.Module, nn.Parameter)) else None

    def unknown_parameters(self) -> list[str]:
        """Return the names of parameters that belong to no known part."""
        parts: list[nn.Module | None] = [self.attention.module, self.attention.output]
        parts += [self.norm1, self.norm2]
        parts += [self.module.get_submodule(path) for path in self.mlp_names]
        after = self.names(self.family.after_attention + self.family.after_mlp)
        parts += [self.part(path) for path in after]
        known = {id(p) for part in parts if part is not None for p in part.parameters()}
        known |= {id(table.weight) for table in (self.attention.table,) if table is not None}
        return [name for name, p in self.module.named_parameters() if id(p) not in known]

    # --- what it computes: the reference of the probes ---

    def forward(self, x: Tensor, read: AttentionArguments, *, causal: bool) -> Tensor:
        """Compute the block by our own arithmetic; x [batch, tokens, width]."""
        site = self.attention
        weights = site.weights()
        y = self.norm1(x) if self.norm1 is not None and self.family.norm == "pre" else x
        mask = read.mask
        if site.table is not None and weights.positions is not None:
            index = site.table.index
            assert index is not None
            mask = add_bias(mask, bias_of(weights.positions, index[None]), causal=causal)
        heads = attend(
            weights.queries(y),
            weights.keys(y),
            weights.values(y),
            mask=mask,
            causal=causal,
            bias=read.bias,
            rotary=read.rotary,
            norms=site.head_norms,
            scale=site.scale,
            softcap=site.softcap,
        )
        output = weights.output.transpose(0, 1).flatten(1)
        return self.finish(x, F.linear(heads.flatten(2), output, site.output_bias))

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Compute what follows the attention: residual sums, norms and the MLP."""
        assert self.norm1 is not None and self.norm2 is not None
        pre = self.family.norm == "pre"
        x = residual + self._run(self.names(self.family.after_attention), attended)
        x = x if pre else self.norm1(x)
        y = self.norm2(x) if pre else x
        x = x + self._run([*self.mlp_names, *self.names(self.family.after_mlp)], y)
        return x if pre else self.norm2(x)

    def _run(self, paths: Sequence[str], x: Tensor) -> Tensor:
        for path in paths:
            x = self.part(path)(x)
        return x
