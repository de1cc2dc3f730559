"""Entropy of attention rows without the rows x keys matrix: exact, in float32, memory O(rows).

With s = scale * q.k, Entropy(softmax s) = logsumexp(s) - E[s], and E[s] = scale * q . (sum_k
alpha_k k): an attention whose values are its keys. A kernel that also returns the logsumexp gives
both at once. It is private in torch, so it is tried on a small example first. Where it is missing,
disagrees or does not fit (a bias for pairs of tokens, other entropies), scores are computed a few
rows at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import HydraError
from ..registry import check_name
from .attention_watch import AttentionView, later_keys
from .criterion import AttentionScore, criteria

KINDS = ("shannon", "renyi", "tsallis", "min")


@dataclass(frozen=True)
class EntropyKind:
    """An entropy of rows of log-probabilities.

    | kind | entropy of p | greatest, for n keys |
    |---|---|---|
    | `shannon` | -sum p log p | log n |
    | `renyi`, order a | log(sum p^a) / (1 - a) | log n |
    | `tsallis`, order a | (1 - sum p^a) / (a - 1) | (1 - n^(1 - a)) / (a - 1) |
    | `min` | -log max p (Renyi of infinite order) | log n |

    Renyi and Tsallis of order 1 are Shannon's.

    Args:
        name: One of the table.
        order: The order a > 0 of Renyi's and Tsallis's entropy.
    """

    name: str = "shannon"
    order: float = 2.0

    def __post_init__(self) -> None:
        check_name("entropy", self.name, KINDS)
        if not (self.order > 0 and math.isfinite(self.order)):
            raise HydraError(
                f"The order of an entropy is {self.order}: expected a positive number; "
                'for an infinite order use kind="min".'
            )

    @property
    def is_shannon(self) -> bool:
        """Whether this is Shannon's entropy, which needs no matrix of scores."""
        return self.name == "shannon" or (self.name in ("renyi", "tsallis") and self.order == 1)

    def __call__(self, log_probabilities: Tensor) -> Tensor:
        """Return the entropy of every row, `[..., keys]` to `[...]`; hidden keys are -inf."""
        logs = log_probabilities
        if self.is_shannon:
            # 0 log 0 = 0: a hidden key's log is -inf, which times 0 would be NaN
            return -logs.exp().mul_(logs.clamp_min(-1e30)).sum(-1)
        if self.name == "min":
            return -logs.amax(-1)
        power = (logs * self.order).logsumexp(-1)  # log sum p^a
        if self.name == "renyi":
            return power / (1 - self.order)
        return -power.expm1() / (self.order - 1)

    def greatest(self, keys: Tensor) -> Tensor:
        """Return the entropy of a uniform distribution over that many keys."""
        logs = keys.log()
        if self.name == "tsallis" and not self.is_shannon:
            return -((1 - self.order) * logs).expm1() / (self.order - 1)
        return logs


BLOCK = 1 << 18
"""Scores that are held at once in a blocked pass (1 MiB in float32)."""


def row_entropies(
    view: AttentionView, kind: EntropyKind | None = None, *, use_kernel: bool = True
) -> Tensor:
    """Return the entropy of every row of attention, float32 `[batch, heads, rows]`, in nats.

    Rows that see no key give 0.

    Args:
        view: Queries, keys, mask and bias of one layer.
        kind: Which entropy; Shannon's by default.
        use_kernel: Allow the private kernel; False takes the public blocked path.
    """
    kind = kind or EntropyKind()
    pairwise = view.bias is not None and view.bias.shape[-2] > 1
    if (
        use_kernel
        and kind.is_shannon
        and view.key is not None
        and not pairwise
        and kernel_works(view.query.device.type)
    ):
        return _by_kernel(view)
    return _by_blocks(view, kind)


def _by_blocks(view: AttentionView, kind: EntropyKind) -> Tensor:
    batch, heads = view.query.shape[:2]
    step = max(1, BLOCK // max(1, batch * heads * view.keys))
    parts = []
    for start in range(0, view.rows, step):
        scores = view.scores(slice(start, start + step))
        parts.append(kind(scores.sub_(scores.logsumexp(-1, keepdim=True))))
    return torch.cat(parts, -1).nan_to_num_(0.0).clamp_min_(0.0)  # a row without keys is NaN


def _by_kernel(view: AttentionView) -> Tensor:
    assert view.key is not None
    batch, heads, rows, width = view.query.shape
    entropy = view.query.new_empty(batch, heads, rows, dtype=torch.float32)
    per_head = max(1, rows * width)
    # a mask takes one byte per pair for all heads; as floats it is made for a few samples only
    pairs = rows * view.keys if view.hidden is not None and view.hidden.shape[-2] > 1 else 0
    head_step = min(heads, max(1, BLOCK // per_head))
    sample_step = max(1, BLOCK // max(per_head * head_step, pairs))
    for start in range(0, batch, sample_step):
        samples = slice(start, start + sample_step)
        for first in range(0, heads, head_step):
            span = slice(first, min(first + head_step, heads))
            entropy[samples, span] = _part_by_kernel(view, samples, span)
    return torch.where(entropy.isfinite(), entropy, 0.0).clamp_min_(0.0)


def _part_by_kernel(view: AttentionView, samples: slice, heads: slice) -> Tensor:
    """Return the entropies of some samples and heads."""
    assert view.key is not None
    query = view.query[samples, heads].float()
    group = view.query.shape[1] // view.key.shape[1]
    places = torch.arange(heads.start, heads.stop) // group
    key = (view.key[samples, heads] if group == 1 else view.key[samples, places]).float()
    # a shift that all keys share cancels in the softmax; without it the two terms cancel less
    key = key - key.mean(-2, keepdim=True)
    bias = _cut(view.bias, samples, heads)
    if bias is not None:  # a bias of keys joins the product: scale * [q, 1] . [k, b / scale]
        column = bias.transpose(-1, -2).expand(*key.shape[:-1], 1) / view.scale
        query = torch.cat([query, query.new_ones(*query.shape[:-1], 1)], -1)
        key = torch.cat([key, column], -1)
    hidden, causal = _cut(view.hidden, samples, heads), view.causal
    if hidden is not None and causal:
        hidden, causal = hidden | later_keys(slice(0, view.rows), view.keys, query.device), False
    mean_key, logsumexp = _lse_attention(query, key, hidden, causal, view.scale)
    return logsumexp - torch.einsum("bhtd,bhtd->bht", query, mean_key) * view.scale


def _cut(mask: Tensor | None, samples: slice, heads: slice) -> Tensor | None:
    if mask is None:
        return None
    mask = mask if mask.shape[0] == 1 else mask[samples]
    return mask if mask.shape[1] == 1 else mask[:, heads]


def _lse_attention(
    query: Tensor, key: Tensor, hidden: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return softmax(scale q.k) k `[batch, heads, rows, width]` and the logsumexp."""
    mask = None
    if hidden is not None:
        mask = torch.zeros_like(hidden, dtype=query.dtype).masked_fill_(hidden, float("-inf"))
    if query.device.type == "cpu":
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        mixed, total, *_ = flash(query, key, key, 0.0, causal, attn_mask=mask, scale=scale)
        return mixed, total
    if mask is not None:  # this kernel wants a mask for every head, in padded memory
        raise NotImplementedError
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    out, logsumexp = efficient(query, key, key, None, True, 0.0, causal, scale=scale)[:2]
    return out, logsumexp[..., : query.shape[2]]


@lru_cache(maxsize=8)
def kernel_works(device: str) -> bool:
    """Return whether the private kernel exists and agrees with the public path."""
    if device not in ("cpu", "cuda"):
        return False
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, 3, 7, 8, generator=generator).to(device) for _ in range(2))
    views = [AttentionView(0, query, key, scale=0.5, causal=causal) for causal in (False, True)]
    if device == "cpu":
        hidden = torch.zeros(2, 1, 1, 7, dtype=torch.bool)
        hidden[1, ..., 4:] = True
        views.append(AttentionView(0, query, key, scale=0.5, hidden=hidden))
    try:
        return all(
            torch.allclose(_by_kernel(view), _by_blocks(view, EntropyKind()), atol=1e-4)
            for view in views
        )
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False


# How widely a head looks (Zhai et al., 2023; HIES, https://arxiv.org/abs/2510.13832).
@criteria.register("entropy")
@dataclass(frozen=True)
class AttentionEntropy(AttentionScore):
    """Mean normalised entropy of a head's rows of attention, in [0, 1]; **lower = keep**.

    AE_h = E_x [ mean_t Entropy(alpha_t) / log n_t ], n_t the number of keys that row t sees: the
    unpadded length n, or the length of the context in a causal model. Rows of padding and rows
    with one key do not count; attention is never pooled before the entropy. A focused head (low
    entropy) is kept; `ranked("entropy", scores)` or `hies` with alpha = 0 ranks by it.

    Args:
        kind: `"shannon"`, `"renyi"`, `"tsallis"` or `"min"`; all are divided by their greatest
            value.
        order: The order of Renyi's and Tsallis's entropy.
    """

    lower_is_kept: ClassVar[bool] = True

    kind: str = "shannon"
    order: float = 2.0

    def __post_init__(self) -> None:
        EntropyKind(self.kind, self.order)  # raises early

    def values(self, view: AttentionView) -> Tensor:
        """Return each sample's entropy `[batch, heads]`; NaN where no row counts."""
        kind = EntropyKind(self.kind, self.order)
        greatest = kind.greatest(view.visible_keys().clamp_min(2.0))
        shares = (row_entropies(view, kind) / greatest).clamp_max(1.0)
        counted = view.counted_rows().expand_as(shares)
        return torch.where(counted, shares, 0.0).double().sum(-1) / counted.sum(-1)
