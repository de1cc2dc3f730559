"""Which way members are selected in the zero-shot table, decided on validation data alone.

A recipe must find members that help on outliers it has not seen. So every family of the validation
data (two textures, and each kind of proxy) is left out of the search in turn, and the gain over the
host is read on it, against in-distribution examples that the search has not seen either. Nothing of
the test is read. The best recipe has the largest sum of the mean gain over families and of the
least one; gains are AUROC points, mean of MSP and MCM, over the draws.

`zeroshot_table.py` calls `compare`; the test figures of the recipes not taken are a sweep there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import tables
import torch
import zeroshot_features as features_of
from zeroshot_search import SCORES, Recipe, Search

from hydra_ensembles.heads.masks import HeadMask

RECIPES = {
    "five proxies": Recipe(proxies=features_of.PROXIES[:-1]),
    "six proxies (with sketch)": Recipe(),
    "worst family x 4": Recipe(worst=4.0),
    "1 of 3 heads": Recipe(heads=1),
    "1 of 3 heads, worst family x 4": Recipe(heads=1, worst=4.0),
    "2 of 3 heads": Recipe(heads=2),
}
FAMILIES = ("textures", *(f"proxy-{kind}" for kind in features_of.PROXIES))
JUDGED = ("msp", "mcm")
DRAWS = 1  # of each half of the classes: every family is left out of a search in turn


def held_out(search: Search, masks: Sequence[HeadMask], family: str) -> tables.Figures:
    """Return raw figures of one validation family against examples that no search has seen."""
    world = search.world
    places = [world.places[mask] for mask in masks]
    drawn = search.drawn.rows  # type: ignore[attr-defined]
    [(_, mine)] = drawn["id"]
    unused = torch.ones(len(world.logits["id"]), dtype=torch.bool)
    unused[mine] = False
    unused[mine[search.parts["temperature"]["id"]]] = True
    outside = [world.logits[name][rows][:, places] for name, rows in drawn[f"ood/{family}"]]
    outputs = tables.Outputs(
        world.logits["id"][unused][:, places],
        world.labels["id"][unused],
        {family: torch.cat(outside)},
        scores=SCORES,
        logit_scale=float(world.trial.logit_scale),
    )
    return tables.figures_of(outputs)["raw"]


def gains(search: Search, recipe: Recipe, family: str) -> dict[str, float]:
    """Return the gains over the host on a family that is left out of the search."""
    masks = search.select(3, recipe, without=family)
    mine = held_out(search, masks, family)
    host = held_out(search, [HeadMask.full(search.world.host)], family)
    return {
        f"{score}/{figure}": mine[f"{family}/{score}/{figure}"] - host[f"{family}/{score}/{figure}"]
        for score in SCORES
        for figure in ("AUROC", "FPR95")
    }


def judge(searches: Sequence[Search], recipe: Recipe) -> dict[str, Any]:
    """Return a recipe's mean gains by family, and what recipes are compared by."""
    by_family: dict[str, dict[str, float]] = {}
    for family in FAMILIES:
        each = [gains(search, recipe, family) for search in searches]
        by_family[family] = {key: sum(one[key] for one in each) / len(each) for key in each[0]}
    points = {
        family: sum(found[f"{score}/AUROC"] for score in JUDGED) / len(JUDGED)
        for family, found in by_family.items()
    }
    mean, least = sum(points.values()) / len(points), min(points.values())
    return {
        "recipe": asdict(recipe),
        "value": mean + least,
        "mean": mean,
        "least": least,
        "least_family": min(points, key=lambda family: points[family]),
        "by_family": by_family,
    }


def compare(searches: Sequence[Search]) -> tuple[str, dict[str, Any]]:
    """Judge all recipes; return the name of the best, and the record."""
    few = [search for search in searches if search.number < DRAWS]
    found = {}
    for name, recipe in RECIPES.items():
        found[name] = judge(few, recipe)
        print(f"{name}: {found[name]['mean']:+.2f}, {found[name]['least']:+.2f}", flush=True)
    return max(found, key=lambda name: found[name]["value"]), found
