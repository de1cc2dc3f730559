"""Hydra ensembles in plain torch: one file, no library, the whole idea.

1. A small transformer is trained.
2. Three members are the same weights with different attention heads removed from the last block.
3. Until the last block they are one model, so the trunk runs once; in the last block only the
   token that the classifier reads is needed, so three members cost about as much as one.
4. The mean of their probabilities is the answer, and doubt where they disagree.

    python examples/minimal.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

WIDTH, HEADS, LAYERS, CLASSES = 32, 8, 3, 10
HEAD = WIDTH // HEADS


class Block(nn.Module):
    """Pre-norm attention and MLP; `keep` zeroes heads before the output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def heads(self, x: Tensor, queries: int | None = None) -> Tensor:
        """Attend: [batch, tokens, width] to what every head found [batch, queries, head, HEAD]."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, HEAD)).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in (q[:, :queries], k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    def finish(self, x: Tensor, found: Tensor) -> Tensor:
        """Add the heads' findings and the MLP to the stream."""
        x = x + self.out(found.flatten(-2))
        return x + self.mlp(self.norm2(x))

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        found = self.heads(x)
        return self.finish(x, found if keep is None else found * keep[:, None])


class Transformer(nn.Module):
    """Sixteen patches of 2 x 2 pixels and a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(4, WIDTH)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.place = nn.Parameter(0.02 * torch.randn(1, 17, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.classify = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def embed(self, images: Tensor) -> Tensor:
        patches = F.unfold(images, 2, stride=2).transpose(1, 2)
        return (
            torch.cat([self.token.expand(len(images), -1, -1), self.patch(patches)], 1) + self.place
        )

    def forward(self, images: Tensor, keep: Tensor | None = None) -> Tensor:
        """Classify; `keep` [HEADS] removes heads of the last block: one member alone."""
        x = self.embed(images)
        for block in self.blocks[:-1]:
            x = block(x)
        return self.classify(self.norm(self.blocks[-1](x, keep))[:, 0])

    def fused(self, images: Tensor, masks: Tensor) -> Tensor:
        """Run all members at once: masks [member, HEADS] to logits [batch, member, class]."""
        x = self.embed(images)
        for block in self.blocks[:-1]:  # members agree until here: one stream
            x = block(x)
        last = self.blocks[-1]
        # they still read the same input, so every head attends once, and only for the class token
        found = last.heads(x, queries=1) * masks[:, None, None, :, None]  # [member, batch, 1, ...]
        return self.classify(self.norm(last.finish(x[:, :1], found))[:, :, 0]).transpose(0, 1)


def train(images: Tensor, labels: Tensor, epochs: int) -> Transformer:
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    for _ in range(epochs):
        for rows in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()
    return model.eval()


def auroc(known: Tensor, unknown: Tensor) -> float:
    """Return the chance that an outlier is the less certain of a random pair."""
    return float((unknown[:, None] > known).float().mean())


def uncertainty(member_logits: Tensor) -> Tensor:
    """Return 1 - max of the members' mean probability; [batch, member, class] to [batch]."""
    return 1 - member_logits.softmax(-1).mean(1).amax(-1)


@torch.no_grad()
def choose(model: Transformer, images: Tensor, labels: Tensor, outliers: Tensor) -> Tensor:
    """Add, one by one, the member that helps the ensemble most on validation data."""
    draws = torch.rand(100, HEADS, generator=torch.Generator().manual_seed(0))
    pool = torch.zeros(100, HEADS).scatter(1, draws.topk(HEADS // 2).indices, 1.0)
    known, unknown = model.fused(images, pool), model.fused(outliers, pool)
    chosen: list[int] = []
    for _ in range(3):

        def worth(candidate: int) -> float:
            inside, outside = (x[:, [*chosen, candidate]] for x in (known, unknown))
            loss = F.nll_loss(inside.softmax(-1).mean(1).log(), labels)
            return auroc(uncertainty(inside), uncertainty(outside)) - float(loss)

        chosen.append(max(range(len(pool)), key=worth))
    return pool[chosen]


def main(epochs: int = 25) -> dict[str, float]:
    raw, order = load_digits(), torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    images = torch.tensor(raw.images, dtype=torch.float32)[order, None] / 8 - 1
    labels = torch.tensor(raw.target)[order]
    model = train(images[:1000], labels[:1000], epochs)
    with torch.no_grad():
        outliers = torch.cat([-images[1000:1400], torch.rand(400, 1, 8, 8) * 2 - 1])
        masks = choose(model, images[1000:1400], labels[1000:1400], outliers)

        test, truth, turned = images[1400:], labels[1400:], images[1400:].rot90(1, (2, 3))
        one_by_one = torch.stack([model(test, mask) for mask in masks], 1)
        torch.testing.assert_close(model.fused(test, masks), one_by_one, rtol=1e-4, atol=1e-4)

        figures = {}
        single, hydra = lambda x: model(x)[:, None], lambda x: model.fused(x, masks)
        for name, run in {"single": single, "hydra": hydra}.items():
            probability = run(test).softmax(-1).mean(1)
            figures[f"{name} accuracy"] = float((probability.argmax(-1) == truth).float().mean())
            figures[f"{name} NLL"] = float(F.nll_loss(probability.log(), truth))
            scores = uncertainty(run(test)), uncertainty(run(turned))
            figures[f"{name} AUROC, turned digits"] = auroc(*scores)
    return figures


if __name__ == "__main__":
    for name, value in main().items():
        print(f"{name:<30} {value:.3f}")
