"""A small Vision Transformer in plain torch, and the few lines that register it.

The demo and the tests of the command line run on it, so neither needs a host library. It is also an
example of how to bring your own model: `TINY_VIT` says where its parts are.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .families import Family, register_family


@dataclass(frozen=True)
class TinyViTConfig:
    """The shape of a `TinyViT`; the defaults fit the digits data."""

    image_size: int = 16
    patch_size: int = 4
    channels: int = 1
    width: int = 64
    layers: int = 4
    heads: int = 8
    mlp_width: int = 128
    classes: int = 10

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


class Attention(nn.Module):
    """Self-attention; a head is `head_dim` rows of each projection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend: [batch, tokens, width] to the same."""
        # any number of heads: they may be pruned
        q, k, v = (
            part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        return self.output(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, config: TinyViTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config.width, config.heads)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, config.mlp_width),
            nn.GELU(),
            nn.Linear(config.mlp_width, config.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Run the block: [batch, tokens, width] to the same."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TinyViT(nn.Module):
    """A small image classifier: images [batch, channels, size, size] to logits [batch, class].

    Args:
        config: Shape of the model.
        seed: Seed of the initial weights.
    """

    main_input_name = "pixel_values"

    def __init__(self, config: TinyViTConfig | None = None, *, seed: int = 0) -> None:
        super().__init__()
        self.shape = config or TinyViTConfig()
        self.image_size = self.shape.image_size
        tokens = (self.shape.image_size // self.shape.patch_size) ** 2 + 1
        size = self.shape.patch_size
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.projection = nn.Conv2d(self.shape.channels, self.shape.width, size, stride=size)
            self.token = nn.Parameter(torch.zeros(1, 1, self.shape.width))
            self.positions = nn.Parameter(0.02 * torch.randn(1, tokens, self.shape.width))
            self.blocks = nn.ModuleList(Block(self.shape) for _ in range(self.shape.layers))
            self.norm = nn.LayerNorm(self.shape.width)
            self.classifier = nn.Linear(self.shape.width, self.shape.classes)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Classify images by the class token."""
        x = self.projection(pixel_values).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.classifier(self.norm(x)[:, 0])


TINY_VIT = register_family(
    Family(
        name="tiny-vit",
        blocks="blocks",
        query="attention.query",
        key="attention.key",
        value="attention.value",
        output="attention.output",
        norm1="norm1",
        norm2="norm2",
    )
)
