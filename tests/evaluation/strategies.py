"""Inputs that break metrics: random, tied, huge in scale, sorted to the worst."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

KINDS = ("random", "tied", "huge", "tiny", "sorted", "reversed", "saturated")


def _shape_scores(scores: Tensor, positive: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    if kind == "tied":
        scores = (scores * 2).round()
    elif kind == "huge":
        scores = scores * 1e6 - 1e8
    elif kind == "tiny":
        scores = scores * 1e-12
    elif kind == "saturated":  # what a sigmoid would flatten
        scores = 200 + scores
    if kind in ("sorted", "reversed"):  # all positives first, or last, and in order of score
        order = scores.argsort(descending=kind == "reversed")
        scores, positive = scores[order], positive[order]
        order = positive.int().argsort(stable=True, descending=kind == "reversed")
        scores, positive = scores[order], positive[order]
    return scores, positive


@st.composite
def two_kinds(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Scores `[example]` in float64 and which are positive, both kinds present."""
    seed = draw(st.integers(0, 2**31 - 1))
    size = draw(st.integers(2, 300))
    share = draw(st.floats(0.02, 0.98))
    kind = draw(st.sampled_from(KINDS))
    generator = torch.Generator().manual_seed(seed)
    positive = torch.rand(size, generator=generator) < share
    positive[0], positive[-1] = True, False
    scores = torch.randn(size, generator=generator, dtype=torch.float64) + positive.double()
    return _shape_scores(scores, positive, kind)


@st.composite
def logits_and_labels(draw: st.DrawFn, *, members: int | None = None) -> tuple[Tensor, Tensor]:
    """Member logits `[example, member, class]` in float64 and labels `[example]`."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31 - 1)))
    size, classes = draw(st.integers(2, 200)), draw(st.integers(2, 12))
    count = members or draw(st.integers(1, 5))
    scale = draw(st.sampled_from([1e-3, 1.0, 5.0, 300.0, 1e6]))
    kind = draw(st.sampled_from(("random", "tied", "sorted", "constant")))
    logits = torch.randn(size, count, classes, generator=generator, dtype=torch.float64)
    labels = torch.randint(classes, (size,), generator=generator)
    right = torch.rand(size, generator=generator) < 0.6
    logits[right] += 2 * torch.nn.functional.one_hot(labels[right], classes)[:, None]
    if kind == "tied":
        logits = logits.round()
    elif kind == "constant":
        logits = torch.zeros_like(logits)
    logits = logits * scale
    if kind == "sorted":
        order = logits.softmax(-1).mean(1).amax(-1).argsort()
        logits, labels = logits[order], labels[order]
    return logits, labels
