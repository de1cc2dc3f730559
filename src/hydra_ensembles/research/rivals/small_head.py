"""Train a small binary head on cached features, with seeded mini-batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...data.progress import progress_bar


class Standardize(nn.Module):
    """Shift and scale features to zero mean and unit spread, as seen on given ones."""

    def __init__(self, features: Tensor) -> None:
        super().__init__()
        self.mean: Tensor
        self.spread: Tensor
        self.register_buffer("mean", features.mean(0))
        self.register_buffer("spread", features.std(0, correction=0).clamp_min(1e-6))

    def forward(self, features: Tensor) -> Tensor:
        """Standardise `[batch, width]`."""
        return (features - self.mean) / self.spread


def fit_binary(
    head: nn.Module,
    inputs: Sequence[Tensor],
    targets: Tensor,
    *,
    positive_weight: float = 1.0,
    steps: int = 400,
    batch_size: int = 128,
    learning_rate: float = 1e-3,
    weight_decay: float = 1e-2,
    seed: int = 0,
    progress: bool = True,
) -> None:
    """Train a head by weighted binary cross-entropy, in place.

    Args:
        head: Called on the rows of `inputs`, answers with logits `[batch]`.
        inputs: Tensors with one row per example.
        targets: 1 for positive, 0 for negative examples, `[example]`.
        positive_weight: What multiplies the loss of positive examples.
        steps: Of AdamW, its rate falling along a cosine.
        batch_size: Examples per step, drawn with replacement.
        learning_rate: At the start.
        weight_decay: Decoupled.
        seed: Of the draws and of dropout; the caller's generators are untouched.
        progress: Show a bar on a terminal.
    """
    optimizer = torch.optim.AdamW(head.parameters(), lr=learning_rate, weight_decay=weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    draws = torch.Generator().manual_seed(seed)
    weight = torch.tensor(positive_weight, device=targets.device)
    head.train()
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(seed)
        for _ in progress_bar(range(steps), description="head", enabled=progress, total=steps):
            rows = torch.randint(len(targets), (batch_size,), generator=draws).to(targets.device)
            answer = head(*[part[rows] for part in inputs])
            loss = F.binary_cross_entropy_with_logits(
                answer, targets[rows].float(), pos_weight=weight
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    head.eval().requires_grad_(False)
