"""The zero-shot table: a dual encoder of DeiT-tiny and MiniLM, pruned, against MCM and ViLU.

    python experiments/zeroshot_table.py --data DATA --cache CACHE

Projections are trained on 500 ImageNet classes and tested on the other 500 (even against odd class
numbers, then the other way round). Circuits and members are searched with images, names and labels
of the *training* classes alone, two of four texture classes and proxies made of training-class
images: a rehearsal, in which half of the training classes play the unseen ones. The tests see the
other classes and their names, the other two textures, and families that no search saw. Nothing but
the projections (and ViLU's head) is trained.

Features of all masks are computed once above a shared trunk and kept in CACHE (about 10 minutes of
one core), so a stopped run goes on. Writes results/table_zeroshot.json.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import real_data
import tables
import torch
import zeroshot_features as features_of
import zeroshot_model as model_of
from zeroshot_search import SCORES, Search, World, vilu

from hydra_ensembles import build, fuse, verify
from hydra_ensembles.circuits.select import EnsembleObjective
from hydra_ensembles.masks import HeadMask


def checks(world: World, members: Sequence[HeadMask]) -> dict[str, float]:
    """Fuse members in the library and compare with members one by one and with the table's way."""
    rows = world.half.others[:16]
    part = real_data.imagenet(world.root, "test")
    images = next(iter(real_data.ImageSet(part.pixels[rows]).batches(batch_size=16)))
    ensemble = fuse(world.unseen, members)
    found = verify(ensemble, images, tolerance=1e-4)
    with torch.no_grad():
        fused = ensemble.member_logits(images)
    table = world.outputs(0, members, 1.0).test[:16]
    return {
        "fused_against_one_by_one": found.largest,
        "fused_against_table": float((fused - table).abs().max()),
        "cost_of_fused": world.budget.ratio(list(members)),
    }


def built(world: World) -> dict[str, Any]:
    """Let `build` search members of the rehearsal, on a few images, and fuse them for the test."""
    part = real_data.imagenet(world.root, "validation").pixels[world.rehearsed[::5]]
    images = real_data.ImageSet(part, torch.arange(len(world.rehearsed))[::5])
    textures = real_data.textures(world.root, ["banded"]).subset(range(0, 120, 3))
    ensemble = build(
        world.trial, images.batches(), ood={"textures": textures.batches()}, progress=False
    )
    masks = [HeadMask(rows) for rows in ensemble.record["masks"]]
    return {"score": ensemble.score, **checks(world, masks)}


def mean_figures(found: Sequence[tables.Outputs]) -> dict[str, dict[str, float]]:
    """Return the means over draws of the figures that all draws have."""
    each = [tables.figures_of(one) for one in found]
    return {
        kind: {
            key: sum(one[kind][key] for one in each) / len(each)
            for key in each[0][kind]
            if all(key in one[kind] for one in each)
        }
        for kind in tables.KINDS
    }


def point(x: Any, searches: Sequence[Search], found: Sequence[list[HeadMask]]) -> dict[str, Any]:
    """Return a point of a sweep: mean cost and figures over draws."""
    costs = [s.world.budget.ratio(masks) for s, masks in zip(searches, found, strict=True)]
    each = [s.outputs(masks) for s, masks in zip(searches, found, strict=True)]
    return {"x": x, "cost": sum(costs) / len(costs), **mean_figures(each)}


def sweeps(searches: Sequence[Search]) -> dict[str, Any]:
    """Return M = 1 to 8 (on few draws: it is slow), where members branch, heads they keep."""
    few = [search for search in searches if search.number < SWEEP_DRAWS]
    members = [point(m, few, [s.select(m) for s in few]) for m in range(1, 9)]
    branch = [
        point("last block", searches, [s.select(3, last_only=True) for s in searches]),
        point("last two blocks", searches, [s.select(3) for s in searches]),
    ]
    keep = []
    for count in (1, 2):
        for kind in ("taylor", "circuits", "random"):
            found = [getattr(s, kind)(count) for s in searches]
            keep.append(point(f"{count} of 3, {kind}", searches, found))
    return {
        "members": {
            "x": "members M (select)",
            "about": "two draws, one of each half of the classes",
            "points": members,
        },
        "branch": {"x": "branch layer (select M=3)", "about": "six draws", "points": branch},
        "keep": {
            "x": "heads kept in the last two blocks (M=3)",
            "about": "six draws",
            "points": keep,
        },
    }


MEMBERS = (1, 3, 6)
SETUP = [
    "Image tower: DeiT-tiny (class token; it learned all 1,000 classes from labels, so what is "
    "zero-shot here is the way from image to name). Text tower: MiniLM-L6, masked mean of "
    '"a photo of a {name}." Both locked; linear projections and the scale are trained on 500 '
    "classes: ridge regression, then cross-entropy on 2 images a class and their mirror images.",
    "Size, regularisation and steps of the projections: cross-validation over training classes. "
    "The regression starts from image means; see the conclusions for a start that was given up.",
    "Test: one image (the third) of each of the other 500 classes, among the 500 names. Even "
    "classes trained and odd ones tested, and the other way round, three draws each: together they "
    "search on every pair of the four texture classes once; the other pair is the *seen* family. "
    "MNIST, CIFAR-10 upscaled and noise are *unseen*; CIFAR-10 shows things that ImageNet has "
    "names for.",
    "The search sees no image, name or label of the tested classes. It rehearses: projections "
    "trained on 250 training classes meet the 750 images of the other 250 (80 % of them a draw), "
    "two texture classes and five kinds of proxies. Masks and temperatures are carried over.",
    "Searches choose among all 49 masks of the last two blocks; Taylor, circuits and random masks "
    "keep 2 of 3 heads in both. Every row is within 1.07 x; single is counted with the "
    "readout-only last block. MCM and max-logit are in the tables of the conclusions.",
    "ViLU's score stands under energy, raw; its predictions are those of the single model. It is "
    "trained on 400 images of training classes, or on 1,000 labelled images of the tested classes "
    "(not zero-shot; nearer to its publication).",
]
SWEEP_DRAWS = 1  # of each half of the classes
ONE_HEAD = ("Hydra Taylor M=3, 1 of 3 heads", "Hydra Circ M=3, 1 of 3 heads")
MORE = [
    (f"Hydra select M=3|{score}", f"{other}|{score}")
    for other in ("Hydra select M=1", *ONE_HEAD)
    for score in SCORES
] + [(f"{ONE_HEAD[1]}|{score}", f"{ONE_HEAD[0]}|{score}") for score in SCORES]
PAPER = {
    "Hydra Circ M=3": {"AUROC": 76.82, "FPR95": 68.05, "AUPR": 47.85},
    "ViLU": {"AUROC": 75.38, "FPR95": 71.59, "AUPR": 43.81},
}


def differences(known: Mapping[str, Any], pairs: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Compare rows and scores in pairs, `row|score` each: mean and 95 % interval, by group."""
    result = []
    for pair in pairs:
        sides = [side.split("|") for side in pair]
        for group in ("seen", "unseen", "all"):
            for figure in ("AUROC", "FPR95"):
                mine, theirs = (
                    known[row]["raw"][f"{group}/{score}/{figure}"] for row, score in sides
                )
                gap = mine - theirs
                low, high = gap.quantile(gap.new_tensor([0.025, 0.975])).tolist()
                found = [float(gap.mean()), low, high]
                named = {"a": pair[0], "b": pair[1], "figure": f"{group}/{figure}"}
                result.append({**named, "difference": found})
    return result


def scores_table(record: Mapping[str, Any], group: str) -> str:
    """Return AUROC / FPR95 of every row by all four scores, raw, as Markdown."""
    lines = ["| row | cost | " + " | ".join(SCORES) + " |", "|---|---:|" + "---:|" * len(SCORES)]
    for row in record["rows"]:
        cells = [row["name"], f"{row['cost']:.3f}"]
        for score in SCORES:
            each = [
                [draw["raw"].get(f"{group}/{score}/{figure}") for draw in row["draws"]]
                for figure in ("AUROC", "FPR95")
            ]
            means = [sum(v) / len(v) for v in each if None not in v]
            cells.append(" / ".join(f"{mean:.1f}" for mean in means) or "-")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def run(args: argparse.Namespace) -> None:
    """Make the table."""
    torch.set_num_threads(args.threads)
    start = time.process_time()
    features = features_of.Features(args.data, args.cache / "features")
    towers = model_of.text_tower()
    texts = model_of.text_states(args.data, towers, args.cache)
    own = model_of.classifier_rows(args.data)
    worlds = [
        World(
            model_of.Half(parity, features, texts, own), args.data, towers, args.cache, args.start
        )
        for parity in (0, 1)
    ]
    _say(start, "worlds: " + ", ".join(str(world.settings) for world in worlds))
    searches = [Search(world, draw) for world in worlds for draw in range(args.draws)]
    chosen = {m: [search.select(m) for search in searches] for m in MEMBERS}
    _say(start, "selected")
    found: dict[str, list[list[HeadMask]]] = {}
    for search in searches:
        for name, masks in search.rows().items():
            found.setdefault(name, []).append(masks)
    found |= {f"Hydra select M={m}": each for m, each in chosen.items()}
    rows: dict[str, tuple[float, list[tables.Outputs]]] = {}
    for name, each in found.items():
        pairs = list(zip(searches, each, strict=True))
        cost = sum(s.world.budget.ratio(masks) for s, masks in pairs) / len(pairs)
        rows[name] = (cost, [s.outputs(masks) for s, masks in pairs])
    alone = rows["single"][0]
    for name, zero_shot in (("ViLU", True), ("ViLU, labelled test classes", False)):
        rows[name] = (alone, [vilu(search, zero_shot=zero_shot) for search in searches])
    _say(start, "rows")
    known: dict[str, Any] = {}
    lines = tables.table_rows(rows, known=known)
    for line in lines:
        if line["name"] in found:
            line["masks"] = [
                [[mask[layer].int().tolist() for layer in features_of.LAYERS] for mask in masks]
                for masks in found[line["name"]]
            ]
            worst = max(
                s.world.budget.ratio(m) for s, m in zip(searches, found[line["name"]], strict=True)
            )
            line["largest_cost"] = worst
    _say(start, "intervals")
    hydras = [name for name in rows if name.startswith("Hydra")]
    record: dict[str, Any] = {
        "name": "zeroshot" if args.start == "images" else f"zeroshot_{args.start}",
        "title": "Zero-shot: DeiT-tiny and MiniLM, 500 ImageNet classes unseen by the projections",
        "command": "python experiments/zeroshot_table.py --data DATA --cache CACHE"
        + ("" if args.start == "images" else f" --start {args.start}"),
        "setup": SETUP,
        "families": {"seen": ["textures"], "unseen": list(features_of.UNSEEN)},
        "rows": lines,
        "differences": differences(
            known,
            [
                *[(f"{name}|{s}", f"single|{s}") for name in hydras for s in SCORES],
                *[(f"{name}|msp", "single|mcm") for name in hydras],
                *[(f"{name}|{s}", "ViLU|energy") for name in hydras for s in SCORES],
                *[("CircAvg single|" + s, "Taylor single|" + s) for s in SCORES],
                *[("Hydra Circ M=3|" + s, "CircAvg single|" + s) for s in SCORES],
                *[("Hydra Circ M=3|" + s, "Hydra Taylor M=3|" + s) for s in SCORES],
                *MORE,
            ],
        ),
        "paper": PAPER,
        "objective": asdict(EnsembleObjective()),
        "worlds": [
            {
                "training_classes": "even" if world.half.parity == 0 else "odd",
                "settings": asdict(world.settings),
                "tried": world.tried,
                "logit_scale": world.scale,
                "checks": checks(world, chosen[3][place * args.draws]),
            }
            for place, world in enumerate(worlds)
        ],
    }
    tables.write(record)  # what follows is slow
    _say(start, "table")
    record["sweeps"] = sweeps(searches)
    tables.write(record)
    record["build"] = built(worlds[0])
    tables.write(record)
    _say(start, "done")


def _say(start: float, what: str) -> None:
    print(f"{time.process_time() - start:6.0f} s of CPU: {what}", flush=True)


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=real_data.data_root, default=os.environ.get("HYDRA_DATA"))
    parser.add_argument("--cache", type=Path, default=Path("cache/zeroshot"))
    parser.add_argument("--draws", type=int, default=3, help="of each half of the classes")
    parser.add_argument("--start", choices=["images", "classifier"], default="images")
    parser.add_argument("--scores", action="store_true", help="print the table by all four scores")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if args.scores:
        record = tables.read("zeroshot")
        assert record is not None, "make the table first"
        for group in ("seen", "unseen", "all"):
            print(f"{group}:\n\n{scores_table(record, group)}\n")
        return
    if args.data is None:
        raise SystemExit("Where is the data? Pass --data or set HYDRA_DATA.")
    run(args)


if __name__ == "__main__":
    main()
