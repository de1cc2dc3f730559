"""Sweeps of the zero-shot table, members' diversity, and what any choice of masks could reach."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import tables
import torch
import zeroshot_features as features_of
from torch import Tensor
from zeroshot_recipes import RECIPES
from zeroshot_search import Recipe, Search, World

from hydra_ensembles.heads.masks import HeadMask

TRIPLES = 400  # random ones, a half of the classes


def point(x: Any, searches: Sequence[Search], found: Sequence[list[HeadMask]]) -> dict[str, Any]:
    """Return a point of a sweep: mean cost and figures over draws, and how members differ."""
    pairs = list(zip(searches, found, strict=True))
    cost = sum(s.world.budget.ratio(masks) for s, masks in pairs) / len(pairs)
    figures = tables.mean_figures([s.figures(masks) for s, masks in pairs])
    return {"x": x, "cost": cost, "diversity": diversity(found), **figures}


def diversity(found: Sequence[Sequence[HeadMask]]) -> dict[str, float]:
    """Return, as means over draws, different masks and the share of heads in which two differ.

    Of the heads of the last two blocks, over all pairs of members. Disagreement and mutual
    information of their predictions are among the figures.
    """
    distinct, apart = 0.0, 0.0
    for masks in found:
        rows = [torch.cat([mask[layer] for layer in features_of.LAYERS]) for mask in masks]
        gaps = [float((a != b).float().mean()) for a, b in itertools.combinations(rows, 2)]
        distinct += len(set(masks)) / len(found)
        apart += 100 * sum(gaps) / max(1, len(gaps)) / len(found)
    return {"distinct_masks": distinct, "heads_apart": apart}


def sweeps(searches: Sequence[Search], recipe: Recipe) -> dict[str, Any]:
    """Return M = 1 to 8, where members branch, heads they keep, and ways to select them."""
    about = f"{len(searches)} draws"
    grown = [s.select_up_to(8, recipe) for s in searches]
    assert [found[2] for found in grown] == [s.select(3, recipe) for s in searches]
    members = [point(m, searches, [found[m - 1] for found in grown]) for m in range(1, 9)]
    last = replace(recipe, last_only=True)
    branch = [
        point("last block", searches, [s.select(3, last) for s in searches]),
        {**members[2], "x": "last two blocks"},
    ]
    keep = []
    for count in (1, 2):
        for kind in ("taylor", "circuits", "random"):
            found = [getattr(s, kind)(count) for s in searches]
            keep.append(point(f"{count} of 3, {kind}", searches, found))
    ways = [
        point(name, searches, [s.select(3, way) for s in searches]) for name, way in RECIPES.items()
    ]
    return {
        "members": {"x": "members M (select)", "about": about, "points": members},
        "branch": {"x": "branch layer (select M=3)", "about": about, "points": branch},
        "keep": {"x": "heads kept in the last two blocks (M=3)", "about": about, "points": keep},
        "recipes": {
            "x": "way of selecting (M=3)",
            "about": f"{about}; which is taken was decided on validation data (`recipes`)",
            "points": ways,
        },
    }


def ceiling(world: World) -> dict[str, Any]:
    """Look at the test data: AUROC gains by MSP of all single masks and of random triples.

    No search reads this; it tells what is there to be found.
    """
    sets = world.half.features.sets
    names = [*(f"textures-{kind}" for kind in features_of.TEXTURES), *features_of.UNSEEN]
    inside = world.read(sets["test"][world.half.others]).softmax(-1)
    outside = {name: world.read(sets[name]).softmax(-1) for name in names}

    def aurocs(places: list[int]) -> Tensor:
        own = _unsure(inside, places).sort().values
        found = {}
        for name, probabilities in outside.items():
            other = _unsure(probabilities, places)
            below = torch.searchsorted(own, other) + torch.searchsorted(own, other, right=True)
            found[name] = 50 * float(below.double().mean()) / len(own)
        textures = sum(found[name] for name in names[:4]) / 4
        return torch.tensor([textures, *(found[name] for name in features_of.UNSEEN)])

    masks = world.half.features.masks
    generator = torch.Generator().manual_seed(0)
    tried = [[i] for i in range(1, len(masks))]
    while len(tried) < len(masks) - 1 + TRIPLES:
        three = torch.randint(len(masks), (3,), generator=generator).tolist()
        if world.budget.allows([masks[i] for i in sorted(set(three))]):
            tried.append(three)
    host = aurocs([0])
    gains = torch.stack([aurocs(places) for places in tried]) - host
    textures, mnist, unseen = gains[:, 0], gains[:, 1], gains[:, 1:].mean(1)
    safe = mnist >= -0.5
    both = safe & (textures >= 1) & (unseen >= 1)
    best = int(torch.where(safe, textures + unseen, -torch.inf).argmax())
    return {
        "single": dict(zip(("textures", *features_of.UNSEEN), host.tolist(), strict=True)),
        "tried": len(tried),
        "lose_on_mnist": int((mnist < 0).sum()),
        "mnist_not_worse": int(safe.sum()),
        "mnist_not_worse_and_others_gain_a_point": int(both.sum()),
        "best_of_those_not_worse_on_mnist": dict(
            zip(("textures", *features_of.UNSEEN), gains[best].tolist(), strict=True)
        ),
    }


def _unsure(probabilities: Tensor, places: list[int]) -> Tensor:
    return 1 - probabilities[:, places].mean(1).amax(-1)
