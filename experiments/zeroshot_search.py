"""Zero-shot worlds and searches: which half of the classes is seen, what a draw chooses.

A world trains projections on one half of the classes. A search draws validation data of that half
(and two textures, and proxies), finds members, and reads the test data of the other half.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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

from hydra_ensembles._records import write_whole
from hydra_ensembles.costs.budget import Budget
from hydra_ensembles.criteria import gate_gradients
from hydra_ensembles.heads.masks import HeadMask
from hydra_ensembles.hosts import host_model
from hydra_ensembles.search.candidate_table import Table
from hydra_ensembles.search.ensemble_search import _bags, search_members
from hydra_ensembles.search.select import EnsembleObjective, Selector, split_rows
from hydra_ensembles.uncertainty import fit_temperature

MAX_COST = 1.07
SCORES = ("msp", "mcm", "max-logit", "energy")
PAIRS = list(itertools.combinations(features_of.TEXTURES, 2))
PARTS = ("calibration", "validation", "test")
SHARES = {"select": 0.6, "stop": 0.25, "temperature": 0.15}
KEEP = 2  # of three heads


@dataclass(frozen=True)
class Recipe:
    """How members are selected; which way is taken is decided in `zeroshot_recipes`.

    Attributes:
        proxies: Kinds of outliers made of training-class images that the search sees.
        scores: That it ranks by.
        mean, worst: Weights of the mean and of the worst family, see `EnsembleObjective`.
        heads: Kept in every block by all candidates but the host; None: 1 to 3, all 49 masks.
        last_only: Whether members branch in the last block alone.
    """

    proxies: tuple[str, ...] = features_of.PROXIES
    scores: tuple[str, ...] = ("msp", "energy")
    mean: float = 1.0
    worst: float = 1.0
    heads: int | None = None
    last_only: bool = False

    @property
    def objective(self) -> EnsembleObjective:
        """What the library's search is given."""
        return EnsembleObjective(scores=self.scores, mean=self.mean, worst=self.worst)

    def allows(self, mask: HeadMask) -> bool:
        """Tell whether a mask is a candidate."""
        kept = [int(mask[layer].sum()) for layer in features_of.LAYERS]
        all_heads = [len(mask[layer]) for layer in features_of.LAYERS]
        if kept == all_heads:
            return True  # the host
        if self.last_only and kept[0] < all_heads[0]:
            return False
        wanted = kept[1:] if self.last_only else kept
        return self.heads is None or set(wanted) == {self.heads}


class Kept:
    """Finished steps in a JSON file, so that a stopped run goes on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def get(self, step: str, make: Callable[[], Any]) -> Any:
        """Return what a step gave, or do it."""
        if step not in self.steps:
            self.steps[step] = make()
            write_whole(self.path, json.dumps(self.steps))
        return self.steps[step]


class World:
    """One half of the classes to train and search on, the other to test on.

    The search rehearses the test: projections trained on 250 of the training classes meet images
    and names of the other 250, so that its in-distribution examples are as unsure as zero-shot ones
    are. Masks and temperatures found there are those of the final projections (all 500).

    It is what `select_members` asks of a bank: `host`, `places`, `logits` and `labels` of
    validation data, `need`.
    """

    def __init__(self, half: model_of.Half, root: Path, towers: Any, cache: Path) -> None:
        self.half, self.root, self.cache = half, root, cache
        self.kept = Kept(cache / f"steps-{half.parity}.json")
        self.tried = self.kept.get(f"tried {model_of.GRID}", lambda: model_of.cross_validate(half))
        self.settings = self._best("images")
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

    def _best(self, start: str) -> model_of.Settings:
        """Return the settings of least cross-validated NLL among those of one start."""
        able = [i for i, settings in enumerate(model_of.GRID) if settings.start == start]
        return model_of.GRID[min(able, key=lambda i: self.tried[i]["nll"])]

    def starts(self) -> dict[str, dict[str, float]]:
        """Return AUROC by MSP of the host on proxies in the rehearsal, by start of the text side.

        Training from the classifier's rows reads more names, but finds outliers more familiar than
        classes it has not seen.
        """
        sets, half = self.half.features.sets, self.half
        result = {}
        for start in ("images", "classifier"):
            found = half.train(half.classes[::2], self._best(start))
            texts = found.embed_texts(half.texts[self.rehearsed])
            own = torch.cat([sets[part][self.rehearsed, :1] for part in PARTS])
            outputs = tables.Outputs(
                found.logits(own, texts),
                self.labels["id"],
                {
                    kind: found.logits(sets[f"proxy-{kind}-{half.parity}"][:, :1], texts)
                    for kind in features_of.PROXIES
                },
                scores=("msp",),
            )
            raw = tables.figures_of(outputs)["raw"]
            result[start] = {"accuracy": raw["accuracy"]} | {
                kind: raw[f"{kind}/msp/AUROC"] for kind in features_of.PROXIES
            }
        return result

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
        self.known: dict[tuple[HeadMask, ...], dict[str, tables.Figures]] = {}

    def select(
        self, members: int = 3, recipe: Recipe | None = None, *, without: str = ""
    ) -> list[HeadMask]:
        """Choose members by a recipe, on all families of outliers or without one of them."""
        recipe = recipe or Recipe()

        def search() -> list[Any]:
            drawn, parts = self._data(recipe, without)
            found = search_members(
                drawn,
                self.world.budget,
                members=members,
                layers=self.layers,
                select=parts["select"],
                hold=parts["stop"],
                objective=recipe.objective,
                rounds=0,
                seed=self.number,
            )
            return [mask.tolist() for mask in found.masks]

        step = f"{self.world.settings}, draw {self.number}, M = {members}, {recipe}, {without=}"
        return [HeadMask(rows) for rows in self.world.kept.get(step, search)]

    def select_up_to(self, most: int, recipe: Recipe) -> list[list[HeadMask]]:
        """Choose 1, 2, .. members as `select` does, in one pass: small ones grow to large ones."""

        def search() -> list[Any]:
            drawn, parts = self._data(recipe)
            table, masks = Table(drawn.outputs), drawn.masks

            def fits(members: Sequence[int]) -> bool:
                return self.world.budget.allows([masks[i] for i in sorted(set(members))])

            def selector(rows: Any) -> Selector:
                hold, objective = parts["stop"], recipe.objective
                return Selector(table, objective=objective, select=rows, hold=hold, fits=fits)

            finalists = [{(0,) * size} for size in range(1, most + 1)]
            for bag in _bags(table, parts["select"], 4, True, self.number):
                one = selector(bag)
                for size, found in enumerate(finalists, 1):
                    found.update(one.forward(size))
            judge = selector(parts["select"])
            chosen = [judge.choose(sorted(found)).members for found in finalists]
            return [[masks[i].tolist() for i in members] for members in chosen]

        step = f"{self.world.settings}, draw {self.number}, M = 1 to {most}, {recipe}"
        found = self.world.kept.get(step, search)
        return [[HeadMask(rows) for rows in members] for members in found]

    def _data(self, recipe: Recipe, without: str = "") -> tuple[select_members.Drawn, Any]:
        """Return candidates of a recipe on its families, and the rows that select and decide."""
        families = ["textures", *(f"proxy-{kind}" for kind in recipe.proxies)]
        names = ["id", *(f"ood/{name}" for name in families if name != without)]
        rows = {name: self.drawn.rows[name] for name in names}  # type: ignore[attr-defined]
        origins = {m: o for m, o in self.world.origins.items() if recipe.allows(m)}
        drawn = select_members.Drawn(self.world, rows, origins)  # type: ignore[arg-type]
        return drawn, {
            part: {name: found[name] for name in names} for part, found in self.parts.items()
        }

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

    def figures(self, masks: Sequence[HeadMask]) -> dict[str, tables.Figures]:
        """Return the test figures of members, remembered."""
        key = tuple(masks)
        if key not in self.known:
            self.known[key] = tables.figures_of(self.outputs(masks))
        return self.known[key]

    def rows(self) -> dict[str, list[HeadMask]]:
        """Return the members of every row that needs no M."""
        circuits, taylor, random = self.circuits(), self.taylor(), self.random()
        return {
            "single": [HeadMask.full(self.world.host)],
            "random single": random[:1],
            "Taylor single": taylor[:1],
            "CircAvg single": circuits[2:],
            "Hydra random": random,
            "Hydra Taylor": taylor,
            "Hydra Circ": circuits,
            "Hydra random, 1 of 3 heads": self.random(1),
            "Hydra Taylor, 1 of 3 heads": self.taylor(1),
            "Hydra Circ, 1 of 3 heads": self.circuits(1),
        }
