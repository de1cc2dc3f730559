"""The loss of each sample, whose gradients the gate criteria read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ..data.answers import IGNORED
from ..errors import DataError
from ..hosts import HostModel

Loss = Callable[[Tensor, Any], Tensor]
"""Logits (the model's main output) and labels to one loss for each sample, `[batch]`."""


def sample_losses(
    logits: Tensor, labels: Tensor | None, host: HostModel, *, loss: Loss | None, padding: Any
) -> Tensor:
    """Return one loss for each sample, `[batch]`.

    Args:
        logits: `[batch, class]`, or `[batch, token, class]` of a language model or tagger.
        labels: `[batch]` or `[batch, token]` (-100 is left out); None only with a user's own loss.
        host: Tells whether tokens predict the next one.
        loss: A user's own; cross-entropy by default.
        padding: The batch's `attention_mask` `[batch, token]`, or None.
    """
    if loss is not None:
        losses = loss(logits, labels)
    elif labels is None:
        raise DataError(
            "The calibration data has no labels, but the loss is cross-entropy. Give batches as "
            "(inputs, labels) or mappings with 'labels', or pass loss=<callable(logits, labels)>."
        )
    else:
        labels = labels.to(logits.device)
        if logits.dim() == 3 and labels.shape == logits.shape[:2]:
            losses = _token_losses(logits, labels, host, padding)
        elif logits.dim() == 2 and labels.dim() == 1 and not labels.is_floating_point():
            losses = F.cross_entropy(logits.float(), labels.long(), reduction="none")
        else:
            raise DataError(
                f"Cross-entropy needs logits [batch, class] and whole labels [batch] (or both with "
                f"a token axis), but found {list(logits.shape)} and {labels.dtype} "
                f"{list(labels.shape)}. Pass loss=<callable(logits, labels)> for another task."
            )
    if not isinstance(losses, Tensor) or losses.shape != logits.shape[:1]:
        found = list(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise DataError(
            f"The loss returned {found} for {len(logits)} samples; expected one number for each, "
            'since absolute values are taken per sample. Use reduction="none".'
        )
    return losses


def _token_losses(logits: Tensor, labels: Tensor, host: HostModel, padding: Any) -> Tensor:
    """Average cross-entropy over the labelled, unpadded tokens of each sample."""
    if isinstance(padding, Tensor) and padding.shape == labels.shape:
        labels = labels.masked_fill(~padding.to(labels.device).bool(), IGNORED)
    vocabulary = getattr(getattr(host.model, "config", None), "vocab_size", None)
    if host.sites[0].causal and logits.shape[-1] == vocabulary:  # each token predicts the next
        logits, labels = logits[:, :-1], labels[:, 1:]
    losses = F.cross_entropy(
        logits.float().transpose(1, 2), labels.long(), reduction="none", ignore_index=IGNORED
    )
    return losses.sum(1) / (labels != IGNORED).sum(1).clamp_min(1)
