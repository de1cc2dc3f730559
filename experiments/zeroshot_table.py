"""The zero-shot table: a dual encoder of DeiT-tiny and MiniLM, pruned, against MCM and ViLU.

    python experiments/zeroshot_table.py --data DATA --cache CACHE
    python experiments/zeroshot_table.py --scores

Projections are trained on 500 ImageNet classes and tested on the other 500 (even against odd class
numbers, then the other way round). Circuits and members are searched with images, names and labels
of the *training* classes alone, two of four texture classes and proxies made of training-class
images: a rehearsal, in which half of the training classes play the unseen ones. The tests see the
other classes and their names, the other two textures, and families that no search saw. Nothing but
the projections (and ViLU's head) is trained.

The first command makes everything and writes results/table_zeroshot.json. Features of all masks are
computed once above a shared trunk (about 10 minutes of one core) and kept in CACHE with the members
that searches found (about 15 minutes), so a stopped run goes on, and a run again with the same
CACHE takes a few minutes. `--scores` prints the rows by MSP, MCM, max-logit and energy.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import real_data
import tables
import torch
import zeroshot_features as features_of
import zeroshot_model as model_of
from zeroshot_recipes import RECIPES, compare
from zeroshot_search import SCORES, Search, World
from zeroshot_sweeps import ceiling, diversity, sweeps
from zeroshot_vilu import vilu

from hydra_ensembles import fuse, verify
from hydra_ensembles.heads.masks import HeadMask


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
    "two texture classes and six kinds of proxies. Masks and temperatures are carried over. How "
    "members are selected was decided on validation data, by families left out in turn.",
    "`Hydra select` chooses among masks of the last two blocks; Taylor, Circ and random masks "
    "keep 2 of 3 heads in both, with three members each where no M is said. Every row is within "
    "1.07 x; single is counted with the readout-only last block.",
    "Scores are columns: MCM and max-logit of every row are in the tables of the conclusions, so "
    "the rival MCM is the row `single` in the column mcm.",
    "ViLU is a score of its own, of the single model's predictions: it stands where energy stands, "
    "the same raw and scaled. It is trained on 400 images of training classes, or on 1,000 "
    "labelled images of the tested classes (not zero-shot; nearer to its publication).",
    "Nothing is trained in the tower, so members share every MLP and there is nothing to merge.",
]
VILU = {"ViLU (energy columns)": True, "ViLU, labelled test classes (energy columns)": False}
TAYLOR, CIRC = "Hydra Taylor", "Hydra Circ"
PAPER = {
    "Hydra Circ M=3": {"AUROC": 76.82, "FPR95": 68.05, "AUPR": 47.85},
    "ViLU": {"AUROC": 75.38, "FPR95": 71.59, "AUPR": 43.81},
}


def compared(hydras: Iterable[str]) -> list[tuple[str, str]]:
    """Return the pairs of row and score that are compared."""
    one_head = [f"{name}, 1 of 3 heads" for name in (TAYLOR, CIRC)]
    chosen = "Hydra select M=3"
    alike = [
        *((name, "single") for name in hydras),
        ("CircAvg single", "Taylor single"),
        (CIRC, "CircAvg single"),
        (CIRC, TAYLOR),
        (one_head[1], one_head[0]),
        *(
            (chosen, other)
            for other in ("Hydra select M=1", "Hydra random, 1 of 3 heads", *one_head)
        ),
    ]
    zero_shot = next(iter(VILU))
    pairs = [(f"{a}|{score}", f"{b}|{score}") for a, b in alike for score in SCORES]
    pairs += [(f"{name}|msp", "single|mcm") for name in hydras]
    return pairs + [(f"{name}|{s}", f"{zero_shot}|energy") for name in hydras for s in SCORES]


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
    """Return AUROC / FPR95 of every row by all scores, raw, as Markdown."""
    head = ["row", "cost", *SCORES, "ViLU's own"]
    lines = ["| " + " | ".join(head) + " |", "|---|---:|" + "---:|" * (len(SCORES) + 1)]
    for row in record["rows"]:
        cells = []
        for score in SCORES:
            each = [
                [draw["raw"].get(f"{group}/{score}/{figure}") for draw in row["draws"]]
                for figure in ("AUROC", "FPR95")
            ]
            means = [sum(v) / len(v) for v in each if None not in v]
            cells.append(" / ".join(f"{mean:.1f}" for mean in means) or "-")
        own = "-"
        if row["name"] in VILU:
            cells[-1], own = "-", cells[-1]
        name = row["name"].removesuffix(" (energy columns)")
        lines.append("| " + " | ".join([name, f"{row['cost']:.3f}", *cells, own]) + " |")
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
        World(model_of.Half(parity, features, texts, own), args.data, towers, args.cache)
        for parity in (0, 1)
    ]
    _say(start, "worlds: " + ", ".join(str(world.settings) for world in worlds))
    searches = [Search(world, draw) for world in worlds for draw in range(args.draws)]
    way, recipes = compare(searches)
    recipe = RECIPES[way]
    _say(start, f"recipes: {way}")
    found: dict[str, list[list[HeadMask]]] = {}
    for search in searches:
        for name, masks in search.rows().items():
            found.setdefault(name, []).append(masks)
    for m in MEMBERS:
        found[f"Hydra select M={m}"] = [s.select_up_to(8, recipe)[m - 1] for s in searches]
    _say(start, "selected")
    rows: dict[str, tuple[float, list[tables.Outputs]]] = {}
    for name, each in found.items():
        pairs = list(zip(searches, each, strict=True))
        cost = sum(s.world.budget.ratio(masks) for s, masks in pairs) / len(pairs)
        rows[name] = (cost, [s.outputs(masks) for s, masks in pairs])
    alone = rows["single"][0]
    for name, zero_shot in VILU.items():
        rows[name] = (alone, [vilu(search, zero_shot=zero_shot) for search in searches])
    _say(start, "rows")
    known: dict[str, Any] = {}
    lines = tables.table_rows(rows, known=known)
    for line in lines:
        if line["name"] in found:
            each = found[line["name"]]
            for search, masks, draw in zip(searches, each, line["draws"], strict=True):
                search.known[tuple(masks)] = {kind: draw[kind] for kind in tables.KINDS}
            line["masks"] = [
                [[mask[layer].int().tolist() for layer in features_of.LAYERS] for mask in masks]
                for masks in each
            ]
            line["largest_cost"] = max(
                s.world.budget.ratio(masks) for s, masks in zip(searches, each, strict=True)
            )
            line["diversity"] = diversity(each)
    _say(start, "intervals")
    record: dict[str, Any] = {
        "name": "zeroshot",
        "title": "Zero-shot: DeiT-tiny and MiniLM, 500 ImageNet classes unseen by the projections",
        "command": "python experiments/zeroshot_table.py --data DATA --cache CACHE",
        "setup": [*SETUP, f"The way of selecting that validation data chose: *{way}*."],
        "families": {"seen": ["textures"], "unseen": list(features_of.UNSEEN)},
        "rows": lines,
        "differences": differences(
            known, compared([name for name in rows if name.startswith("Hydra")])
        ),
        "paper": PAPER,
        "chosen_recipe": way,
        "recipes": recipes,
        "objective": asdict(recipe.objective),
        "worlds": [
            {
                "training_classes": "even" if world.half.parity == 0 else "odd",
                "settings": asdict(world.settings),
                "tried": world.tried,
                "starts": world.starts(),
                "logit_scale": world.scale,
                "checks": checks(world, found["Hydra select M=3"][place * args.draws]),
                "ceiling": ceiling(world),
            }
            for place, world in enumerate(worlds)
        ],
    }
    _say(start, "checks")
    record["sweeps"] = sweeps(searches, recipe)
    print(tables.write(record), flush=True)
    _say(start, "done")


def _say(start: float, what: str) -> None:
    print(f"{time.process_time() - start:6.0f} s of CPU: {what}", flush=True)


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=real_data.data_root, default=os.environ.get("HYDRA_DATA"))
    parser.add_argument("--cache", type=Path, default=Path("cache/zeroshot"))
    parser.add_argument("--draws", type=int, default=3, help="of each half of the classes")
    parser.add_argument(
        "--scores", action="store_true", help="print the rows of the table by all four scores"
    )
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
