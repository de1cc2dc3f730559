"""Zero-shot worlds and searches: which half of the classes is seen, what a draw chooses.

A world trains projections on one half of the classes. A search draws validation data of that half
(and two textures, and proxies), finds members, and reads the test data of the other half.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import real_data
import select_members
import tables
import torch
import zeroshot_features as features_of
import zeroshot_model as model_of
from safetensors.torch import load_file, save_file
from torch import Tensor

from hydra_ensembles.baselines.members import carry_uncertainty
from hydra_ensembles.baselines.small_head import fit_binary
from hydra_ensembles.baselines.vilu import FailureHead
from hydra_ensembles.budget import Budget
from hydra_ensembles.circuits.members import search_members
from hydra_ensembles.circuits.select import split_rows
from hydra_ensembles.criteria import gate_gradients
from hydra_ensembles.masks import HeadMask
from hydra_ensembles.models import host_model
from hydra_ensembles.uncertainty import fit_temperature

MAX_COST = 1.07
SCORES = ("msp", "mcm", "max-logit", "energy")
PAIRS = list(itertools.combinations(features_of.TEXTURES, 2))
PARTS = ("calibration", "validation", "test")
SHARES = {"select": 0.6, "stop": 0.25, "temperature": 0.15}
KEEP = 2  # of three heads


class Kept:
    """Finished steps in a JSON file, so that a stopped run goes on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def get(self, step: str, make: Callable[[], Any]) -> Any:
        """Return what a step gave, or do it."""
        if step not in self.steps:
            self.steps[step] = make()
            beside = self.path.with_suffix(".partial")
            beside.write_text(json.dumps(self.steps))
            os.replace(beside, self.path)
        return self.steps[step]


class World:
    """One half of the classes to train and search on, the other to test on.

    The search rehearses the test: projections trained on 250 of the training classes meet images
    and names of the other 250, so that its in-distribution examples are as unsure as zero-shot ones
    are. Masks and temperatures found there are those of the final projections (all 500).

    It is what `select_members` asks of a bank: `host`, `places`, `logits` and `labels` of
    validation data, `need`.
    """

    def __init__(
        self, half: model_of.Half, root: Path, towers: Any, cache: Path, start: str
    ) -> None:
        self.half, self.root, self.cache = half, root, cache
        self.kept = Kept(cache / f"steps-{half.parity}.json")
        self.tried = self.kept.get(f"tried {model_of.GRID}", lambda: model_of.cross_validate(half))
        able = [i for i, settings in enumerate(model_of.GRID) if settings.start == start]
        self.settings = model_of.GRID[min(able, key=lambda i: self.tried[i]["nll"])]
        self.projections = half.train(half.classes, self.settings)
        self.rehearsed = half.classes[1::2]
        self.rehearsal = half.train(half.classes[::2], self.settings)
        final, early = (
            model_of.dual_encoder(root, towers, p) for p in (self.projections, self.rehearsal)
        )
        names = model_of.class_names(root)
        self.unseen = model_of.classifier(final, [names[i] for i in half.others])
        self.trial = model_of.classifier(early, [names[i] for i in self.rehearsed])
        self.scale = float(self.unseen.logit_scale)
        self.host = host_model(self.unseen)
        self.places = half.features.places
        self.origins = {m: "host" if i == 0 else "all" for m, i in self.places.items()}
        self.budget = Budget.of(self.host, (torch.zeros(1, 3, 224, 224),), MAX_COST)
        sets = half.features.sets
        found = {"id": torch.cat([sets[part][self.rehearsed] for part in PARTS])}
        found |= {f"textures-{kind}": sets[f"textures-{kind}"] for kind in features_of.TEXTURES}
        for kind in features_of.PROXIES:
            found[f"proxy-{kind}"] = sets[f"proxy-{kind}-{half.parity}"]
        texts = self.trial.text_embeddings
        self.logits = {name: self.rehearsal.logits(f, texts) for name, f in found.items()}
        self.labels = {"id": torch.arange(len(self.rehearsed)).repeat(len(PARTS))}
        self.gradients = self._gradients()

    def read(self, features: Tensor) -> Tensor:
        """Return logits of the zero-shot classes, `[..., class]`."""
        return self.projections.logits(features, self.unseen.text_embeddings)

    def need(self, masks: Sequence[HeadMask]) -> None:
        """Nothing to compute: all masks are known."""
        assert all(mask in self.places for mask in masks)

    def _gradients(self) -> list[Tensor]:
        """Return dL/dg of the heads on second images of 125 rehearsed classes."""
        path = self.cache / f"gradients-{self.settings.start}-{self.half.parity}.safetensors"
        if not path.exists():
            rows = torch.arange(0, len(self.rehearsed), 2)
            part = real_data.imagenet(self.root, "validation").pixels[self.rehearsed[rows]]
            images = real_data.ImageSet(part, rows)
            found = [gate_gradients(self.trial, batch) for batch in images.batches(batch_size=25)]
            layers = [torch.cat(layer) for layer in zip(*found, strict=True)]
            save_file({f"{i:02}": layer for i, layer in enumerate(layers)}, path)
        return [found for _, found in sorted(load_file(path).items())]

    def pair(self, draw: int) -> tuple[str, ...]:
        """Return the textures that a search sees: the halves of the classes go opposite ways."""
        return PAIRS[::-1][draw] if self.half.parity else PAIRS[draw]

    def draw(self, draw: int) -> dict[str, list[tuple[str, Tensor]]]:
        """Return the validation data of a draw: two textures, 80 % of all else."""
        generator = torch.Generator().manual_seed(draw)

        def some(name: str, share: float = 0.8) -> tuple[str, Tensor]:
            size = len(self.logits[name])
            return name, torch.randperm(size, generator=generator)[: int(share * size)]

        rows = {
            "id": [some("id")],
            "ood/textures": [some(f"textures-{kind}", 1.0) for kind in self.pair(draw)],
        }
        return rows | {f"ood/proxy-{k}": [some(f"proxy-{k}")] for k in features_of.PROXIES}

    def tests(self, draw: int) -> dict[str, Tensor]:
        """Return features of the test data of a draw: zero-shot classes, then outliers."""
        sets = self.half.features.sets
        names = [f"textures-{kind}" for kind in features_of.TEXTURES if kind not in self.pair(draw)]
        return {"test": sets["test"][self.half.others]} | {
            name: sets[name] for name in (*names, *features_of.UNSEEN)
        }

    def outputs(self, draw: int, masks: Sequence[HeadMask], temperature: float) -> tables.Outputs:
        """Return members' logits on the test data of a draw."""
        places = [self.places[mask] for mask in masks]
        found = {name: self.read(f[:, places]) for name, f in self.tests(draw).items()}
        return self.packed(draw, found, temperature, SCORES)

    def packed(
        self, draw: int, found: dict[str, Tensor], temperature: float, scores: Sequence[str]
    ) -> tables.Outputs:
        """Return logits by data set as a table takes them."""
        test = found.pop("test")
        return tables.Outputs(
            test,
            torch.arange(500),
            found,
            temperature,
            [name for name in found if name.startswith("textures")],
            draw=draw + len(PAIRS) * self.half.parity,
            scores=scores,
            logit_scale=self.scale,
        )


class Search:
    """One draw of validation data in one world: members of every row, and their temperatures."""

    def __init__(self, world: World, draw: int) -> None:
        self.world, self.number = world, draw
        rows = world.draw(draw)
        self.drawn = select_members.Drawn(world, rows, world.origins)  # type: ignore[arg-type]
        self.drawn.rows = rows  # type: ignore[attr-defined]
        sizes = {name: len(logits) for name, logits in self.drawn.outputs.logits.items()}
        self.parts = split_rows(sizes, SHARES, seed=draw)
        self.layers = list(features_of.LAYERS)

    def select(self, members: int, *, last_only: bool = False) -> list[HeadMask]:
        """Choose members out of all masks, or out of those of the last block alone."""
        drawn, layer = self.drawn, features_of.LAYERS[0]
        if last_only:
            some = {m: o for m, o in self.world.origins.items() if bool(m[layer].all())}
            drawn = select_members.Drawn(self.world, drawn.rows, some)  # type: ignore

        def search() -> list[Any]:
            found = search_members(
                drawn,
                self.world.budget,
                members=members,
                layers=self.layers,
                select=self.parts["select"],
                hold=self.parts["stop"],
                rounds=0,
                seed=self.number,
            )
            return [mask.tolist() for mask in found.masks]

        step = f"{self.world.settings}, draw {self.number}, M = {members}, {last_only=}"
        return [HeadMask(rows) for rows in self.world.kept.get(step, search)]

    def circuits(self, keep: int = KEEP) -> list[HeadMask]:
        """Find the circuits of id-loss, ood-auroc and average."""
        return select_members.circuits(
            self.world,  # type: ignore[arg-type]
            self.drawn,
            self.parts["select"],
            self.layers,
            keep,
        )

    def taylor(self, keep: int = KEEP) -> list[HeadMask]:
        """Prune by Taylor, on other halves of the calibration examples."""
        w, seeds = self.world, [100 * self.number + m for m in range(3)]
        return [select_members.taylor(w.gradients, self.layers, keep, w.host, s) for s in seeds]

    def random(self, keep: int = KEEP) -> list[HeadMask]:
        """Keep heads at random."""
        host, seeds = self.world.host, [100 * self.number + m for m in range(3)]
        return [select_members.random_mask(host, self.layers, keep, s) for s in seeds]

    def outputs(self, masks: Sequence[HeadMask]) -> tables.Outputs:
        """Fit the temperature on validation data, and read the test data."""
        places = [self.world.places[mask] for mask in masks]
        own = self.drawn.outputs.examples(self.parts["temperature"])
        temperature = fit_temperature(own.logits["id"][:, places], own.labels["id"])
        return self.world.outputs(self.number, masks, temperature)

    def rows(self) -> dict[str, list[HeadMask]]:
        """Return the members of every row that needs no M."""
        circuits, taylor, random = self.circuits(), self.taylor(), self.random()
        return {
            "single": [HeadMask.full(self.world.host)],
            "random single": random[:1],
            "Taylor single": taylor[:1],
            "CircAvg single": circuits[2:],
            "random M=3": random,
            "Hydra Taylor M=3": taylor,
            "Hydra Circ M=3": circuits,
            "Hydra Taylor M=3, 1 of 3 heads": self.taylor(1),
            "Hydra Circ M=3, 1 of 3 heads": self.circuits(1),
        }


def vilu(search: Search, *, zero_shot: bool) -> tables.Outputs:
    """Train ViLU's head and read its uncertainty on the test data.

    Args:
        search: Draw and world.
        zero_shot: Train on 400 images of the training classes that projections have not seen (as
            many by draw); else, nearer to the publication, on labelled images of the classes that
            are tested (first and second image of each).
    """
    world = search.world
    half, sets, embed = world.half, world.half.features.sets, world.projections.embed_images
    if zero_shot:
        generator = torch.Generator().manual_seed(search.number)
        rows = torch.randperm(500, generator=generator)[:400]
        images, labels = sets["validation"][half.classes[rows], 0], rows
        texts = world.projections.embed_texts(half.texts[half.classes])
    else:
        some = [sets[part][half.others, 0] for part in ("calibration", "validation")]
        images, labels = torch.cat(some), torch.arange(500).repeat(2)
        texts = world.unseen.text_embeddings
    seen = embed(images)
    predicted = (seen @ texts.t()).argmax(-1)
    wrong = predicted != labels
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(search.number)
        head = FailureHead(texts, hidden=256)
    fit_binary(
        head,
        [seen, predicted],
        wrong,
        positive_weight=float(torch.log1p((~wrong).sum() / wrong.sum())),
        steps=200,
        seed=search.number,
        progress=False,
    )
    head.texts = world.unseen.text_embeddings  # it attends to texts, whichever they are
    found = {}
    for name, features in world.tests(search.number).items():
        logits = world.read(features[:, 0])
        with torch.no_grad():
            unsure = head(embed(features[:, 0]), logits.argmax(-1))
        found[name] = carry_uncertainty(logits, unsure)[:, None]
    return world.packed(search.number, found, 1.0, ("msp", "energy"))
