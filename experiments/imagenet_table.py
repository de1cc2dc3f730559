"""The ImageNet table: DeiT-tiny, rivals that need no training from scratch, and Hydra.

    python experiments/select_members.py image --data DATA --cache CACHE
    python experiments/imagenet_table.py --data DATA --cache CACHE

Members of searched rows are those that `select_members.py` chose on each draw of validation data,
and their logits are read from its cache. Trained rows learn above a cached trunk of eleven blocks
from the 1,000 calibration images (one a class) and outliers. Writes results/table_imagenet.json;
what is done is kept in CACHE, so that a stopped run goes on.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import real_data
import select_data
import table_runs as runs
import tables
import torch
from safetensors import safe_open
from table_runs import THIRDS
from torch import Tensor, nn

from hydra_ensembles import HeadMask, HydraEnsemble, fuse, prune_heads_
from hydra_ensembles.baselines import make_baseline
from hydra_ensembles.baselines.classifier_features import Featured
from hydra_ensembles.baselines.laplace import LaplaceHead
from hydra_ensembles.data.corruptions import corrupted
from hydra_ensembles.data.proxies import make_proxies
from hydra_ensembles.training import finetune, finetune_branch
from hydra_ensembles.training.branch import CachedTrunk
from hydra_ensembles.training.numbered import numbered
from hydra_ensembles.uncertainty import fit_temperature, mean_probability

SEEN = tuple(f"textures-{kind}" for kind in select_data.TEXTURES[2:])
UNSEEN = ("mnist", "cifar10", "noise")
SHIFTS = ("gaussian_noise", "defocus_blur", "jpeg_compression")
KINDS = ["corrupt", "shuffle", "mix", "blur", "tile", "sketch"]  # noise is a family of the test
SHIFTED = 150  # test images that are corrupted
OUTLIERS = 200  # proxies of each kind
WEIGHTS = (0.2, 0.5, 1.0)
TRAINING: dict[str, Any] = {"epochs": 3, "learning_rate": 1e-4, "distill": 0.5}
ONES = ((1, 0, 0), (0, 1, 0), (0, 0, 1))
SIX = (*THIRDS, *ONES)
BY_COUNT = {1: ONES, 2: THIRDS}
TRAINED_SINGLE = "single, trained with outliers"
OUTLIER_KINDS = ("proxies", "textures")
GROUPS = (
    *("untrained", "branches", "others"),
    *("sweep_heads", "unmerged", "sweep_branches", "train_again"),
)
APART = 1  # draws of members that are trained one by one


class Tail(nn.Module):
    """The last block, final norm and classifier of a host, on states of the trunk."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, states: Tensor) -> Tensor:
        """Return logits `[batch, class]` of states `[batch, tokens, width]`."""
        return self.model.forward_head(self.model.norm(self.model.blocks[-1](states)))


class ImagenetTable(runs.Table):
    """DeiT-tiny on ImageNet-1k."""

    name, search = "imagenet", "image"
    title = "Images: DeiT-tiny on ImageNet-1k"
    command = "python experiments/imagenet_table.py --data DATA --cache CACHE"
    paper: ClassVar[dict[str, dict[str, float]]] = {
        "Taylor single, ViT": {"AUROC": 84.38},
        "CircAvg single, ViT": {"AUROC": 85.71},
        "Hydra (Taylor), ViT": {"AUROC": 85.36},
        "Hydra (Circ), ViT": {"accuracy": 80.88, "AUROC": 86.29, "FPR95": 47.62},
        "Deep Ensembles, ViT": {"accuracy": 82.19, "AUROC": 85.48, "FPR95": 46.93},
    }
    seen, unseen, shifts = SEEN, UNSEEN, SHIFTS
    tuning = "tuning"
    trained_parameters = r"blocks\.11\.|model\.norm\.|head"
    branch_layers = (11, 10, 9, 8)
    rivals: ClassVar[dict[str, tuple[str, int]]] = {
        "MC dropout": ("mc-dropout", 0),
        "LoRA-Ensemble": ("lora-ensemble", 250),
        "outlier head (energy column)": ("outlier-exposure", 250),
        "Laplace, last layer": ("laplace", 1000),
        "Laplace, last layer, prior by validation": ("laplace", 1000),
    }
    against = ("single", "single, trained with outliers")

    def __init__(self, args: argparse.Namespace) -> None:
        self.data, self.bank = args.data, args.cache / "image"
        self.tried: list[str] = []
        self.chosen = "not chosen yet"
        self.repeated: list[str] = []
        self.known: dict[str, Any] | None = None
        self.states: dict[int, dict[Any, Tensor]] = {}
        super().__init__(args.cache, trained=args.trained)

    def load(self, seed: int) -> nn.Module:
        """Load the pretrained host."""
        return select_data.deit(self.data)

    def read_data(self) -> dict[str, Tensor]:
        """Read the test sets and corrupt some test images."""
        parts = select_data.imagenet(self.data)
        self.calibration = parts["calibration"]
        images: dict[str, Any] = {
            "tuning": parts["validation"].subset(range(0, 1000, 2)),
            "test": parts["test"],
        }
        textures = select_data.textures(self.data)
        self.validation_textures = [textures[kind] for kind in select_data.TEXTURES[:2]]
        images |= {f"textures-{kind}": textures[kind] for kind in select_data.TEXTURES[2:]}
        images |= select_data.other_images(self.data, 200)
        labels = {name: images[name].labels for name in ("tuning", "test")}
        some = parts["test"].subset(range(0, 1000, 1000 // SHIFTED)[:SHIFTED])
        for kind in SHIFTS:
            mean, std = select_data.MEAN, select_data.STD
            images[kind] = corrupted(some, kind, severity=3, mean=mean, std=std)
            labels[kind] = some.labels
        self.sets = {name: runs.labelled(data) for name, data in images.items()}
        self.one = next(iter(some.subset([0])))
        return labels

    def run(self, groups: Sequence[str] = GROUPS) -> None:
        """Make the rows and sweeps of some groups, and write the table after each of them."""
        self.known = tables.read(self.name) if set(groups) < set(GROUPS) else None
        # figures of shifts are no part of a sweep
        self.sweep_judge = runs.Judge(
            self.labels, families=[*SEEN, *UNSEEN], seen=SEEN, tuning=self.tuning
        )
        self.sweep_sets = {name: self.sets[name] for name in self.sweep_judge.sets}
        if {"branches", "others", "train_again"} & set(groups):
            self.best_weight = self.weight(OUTLIER_KINDS)
        if self.known is not None and "others" in groups:
            self.reference()
        for group in GROUPS:
            if group in groups:
                getattr(self, group)()
                self.write()

    def reference(self) -> None:
        """Make the rows that others are compared with, when not all rows are made."""
        full = HeadMask.full(self.host)
        shifts = {name: self.sets[name] for name in SHIFTS}
        own = self.trunks.logits(fuse(self.host.model, self.pair), shifts)
        single = {**self.searched([full]), **{name: own[name][:, :1] for name in SHIFTS}}
        self.add("single", [{**single, "cost": torch.tensor(1.0)}])
        self.train_row(TRAINED_SINGLE, self.pair, OUTLIER_KINDS, self.best_weight, only=0)

    def write(self) -> None:
        """Write the record; rows and sweeps of groups that were not run stay as they were."""
        super().write()
        if self.known is None:
            return
        record = tables.read(self.name)
        assert record is not None
        old = {row["name"]: row for row in self.known["rows"]}
        new = {row["name"]: row for row in record["rows"] if row["name"] not in old}
        order = sorted({**old, **new}, key=lambda name: ("Hydra" in name, "-single" in name))
        record["rows"] = [{**old, **new}[name] for name in order]
        record["sweeps"] = {**self.known["sweeps"], **record["sweeps"]}
        tables.write(record)

    def mask_logits(self, every: Sequence[HeadMask]) -> runs.Logits:
        """Read what the search has computed; only corrupted images are new."""
        masks = list(every)
        shifted = {name: self.sets[name] for name in SHIFTS}
        found = self.kept(
            f"shifts-{len(masks)}",
            lambda: self.trunks.logits(fuse(self.host.model, masks), shifted),
        )
        return {**self.searched(masks), **found}

    def searched(self, every: Sequence[HeadMask]) -> runs.Logits:
        """Read the logits of masks on all sets but the corrupted ones."""
        rows = json.loads((self.bank / "masks.json").read_text())
        place = {json.dumps(row): i for i, row in enumerate(rows)}
        places = [place[json.dumps(mask.tolist())] for mask in every]
        found = {}
        for name in self.sets:
            if name not in SHIFTS:
                file = "validation" if name == "tuning" else name
                with safe_open(self.bank / f"{file}.safetensors", "pt") as tensors:
                    logits = tensors.get_tensor("logits")[:, places].float()
                found[name] = logits[::2] if name == "tuning" else logits
        return found

    def random_masks(self, each: int = 6) -> dict[int, list[HeadMask]]:
        """Take all masks of the last block by the number of kept heads: they are few."""
        return {count: self.last(rows) for count, rows in sorted(BY_COUNT.items())}

    def last(self, rows: Sequence[Sequence[int]]) -> list[HeadMask]:
        """Return masks that keep these heads of the last block, and all heads below."""
        return runs.keeping(self.host, rows, [len(self.host) - 1])

    def last_two(self, count: int) -> list[list[HeadMask]]:
        """Return three ensembles of masks that keep so many heads of both last blocks.

        Together they are all nine pairs of rows, and no ensemble repeats a row of a block.
        """
        rows, block = BY_COUNT[count], len(self.host) - 2
        return [
            [
                self.last([rows[(i + turn) % 3]])[0].with_layer(block, torch.tensor(rows[i]).bool())
                for i in range(3)
            ]
            for turn in range(3)
        ]

    def sweep_heads(self) -> None:
        """Sweep the heads that members keep, in the last block and in both last ones."""
        points = []
        for count, rows in BY_COUNT.items():
            masks = self.last(rows)
            found = [self.sweep_judge(self.searched(masks))]
            points.append(runs.point(f"{count}, last block", self.costs.ratio(masks), found))
        unpruned = self.sweep_judge(self.searched([HeadMask.full(self.host)]))
        points.append(runs.point("3 (unpruned)", 1.0, [unpruned]))
        points += [self.pairs_point(count, f"{count}, both last blocks") for count in BY_COUNT]
        self.sweeps["Kept heads"] = {
            "x": "heads of 3",
            "about": "three members that keep so many heads of the last block (all masks that "
            "there are), or of each of the two last blocks (mean of 3 ensembles), nothing trained",
            "points": points,
        }

    def pairs_point(self, count: int, x: Any) -> dict[str, Any]:
        """Return the point of members that keep so many heads of both last blocks."""
        ensembles = self.last_two(count)
        found = [self.sweep_judge(self.searched(m), draw) for draw, m in enumerate(ensembles)]
        return runs.point(x, max(self.costs.ratio(masks) for masks in ensembles), found)

    def sweep_branches(self) -> None:
        """Sweep the first branched block on every second example of every set."""
        judge = runs.Judge(
            {name: labels[::2] for name, labels in self.labels.items()},
            families=[*SEEN, *UNSEEN],
            seen=SEEN,
            tuning=self.tuning,
        )

        def point(x: Any, ensembles: Sequence[Sequence[HeadMask]], logits: Any) -> dict[str, Any]:
            found = [judge({k: v[::2] for k, v in logits(masks).items()}) for masks in ensembles]
            return runs.point(x, max(self.costs.ratio(masks) for masks in ensembles), found)

        # what the search has computed: all masks of the two last blocks
        points = [
            {**point("none", [[HeadMask.full(self.host)]], self.searched), "cost": 1.0},
            point(11, [self.last(THIRDS)], self.searched),
            point(10, self.last_two(2), self.searched),
        ]
        generator = torch.Generator().manual_seed(0)
        by_layer = {layer: self.drawn(layer, generator) for layer in self.branch_layers[2:]}
        together = [mask for masks in by_layer.values() for mask in masks]
        half = {
            name: [(inputs[::2], labels[::2]) for inputs, labels in batches]
            for name, batches in self.sweep_sets.items()
        }

        def make() -> runs.Logits:  # in one pass, above what they share
            return runs.logits_of(fuse(self.host.model, together), half)

        logits = self.kept("branches", make)
        for place, (layer, masks) in enumerate(by_layer.items()):
            own = {name: one[:, 3 * place : 3 * place + 3] for name, one in logits.items()}
            points.append(runs.point(layer, self.costs.ratio(masks), [judge(own)]))
        self.sweeps["Branch layer"] = {
            "x": f"first branched of {len(self.host)} blocks (from 0)",
            "about": "three members that keep 2 of 3 heads from there on, untrained, on every "
            "second example of every set; none: the unpruned model, 11: the three masks that there "
            "are, 10: mean of 3 ensembles, 9 and 8: one ensemble drawn at random each",
            "points": points,
        }

    def drawn(self, layer: int, generator: torch.Generator) -> list[HeadMask]:
        """Draw three unequal masks that keep two of three heads from a layer on."""
        masks: list[HeadMask] = []
        while len(masks) < 3:
            mask = HeadMask.full(self.host)
            for above in range(layer, len(self.host)):
                row = THIRDS[int(torch.randint(3, (), generator=generator))]
                mask = mask.with_layer(above, torch.tensor(row).bool())
            if mask not in masks:
                masks.append(mask)
        return masks

    @functools.cached_property
    def proxies(self) -> list[Any]:
        """Batches of outliers that are made of calibration images."""
        made = make_proxies(
            self.calibration.subset(range(0, 1000, 1000 // OUTLIERS)),
            KINDS,
            mean=select_data.MEAN,
            std=select_data.STD,
        )
        return [batch for data in made.values() for batch in data]

    @functools.cached_property
    def textures(self) -> list[Any]:
        """Batches of the texture classes that are validation data."""
        return [batch for data in self.validation_textures for batch in data]

    def branches(self) -> None:
        """Train members of the last block to be unsure about proxies, and about textures too."""
        both, weight = OUTLIER_KINDS, self.best_weight
        members = self.last(THIRDS)
        self.train_row("Hydra M=3, trained on labels alone", members, (), 0.0)
        self.train_row("Hydra M=3, trained with proxies", members, ("proxies",), weight)
        self.train_row("Hydra M=3, trained with outliers", members, both, weight)
        six = self.last(SIX)
        self.train_row("Hydra M=6, trained with outliers", six, both, weight)
        self.train_row(TRAINED_SINGLE, self.pair, both, weight, only=0)

    def weight(self, outliers: Sequence[str]) -> float:
        """Return the largest weight of outliers at which validation NLL is the host's at most."""
        labels = self.labels["tuning"]

        def scaled_nll(logits: Tensor) -> float:
            logits = logits / fit_temperature(logits, labels)
            chosen = mean_probability(logits)[torch.arange(len(labels)), labels]
            return -float(chosen.log().mean())

        pair = fuse(self.host.model, self.pair)
        single = self.trunks.logits(pair, {"tuning": self.sets["tuning"]})["tuning"][:, :1]
        host = scaled_nll(single)
        best = 0.0
        for weight in WEIGHTS:
            title = f"weight {weight}"
            found = self.trained_logits(title, self.last(THIRDS), outliers, weight, 0)
            nll = scaled_nll(found["tuning"])
            print(f"outlier weight {weight}: validation NLL {nll:.4f}, host {host:.4f}", flush=True)
            self.tried.append(f"{weight}: {nll:.3f}")
            if nll <= host:
                best = weight
        self.chosen = f"{best} (validation NLL by weight: {', '.join(self.tried)}; host {host:.3f})"
        return best

    @property
    def pair(self) -> list[HeadMask]:
        """Return the unpruned mask and another, so that the host has a branch: its last block."""
        return [HeadMask.full(self.host), *self.last(THIRDS[:1])]

    def train_row(
        self,
        title: str,
        masks: Sequence[HeadMask],
        outliers: Sequence[str],
        weight: float,
        *,
        only: int | None = None,
    ) -> None:
        """Add a trained row: another bootstrap and order a draw."""
        found = [
            self.trained_logits(title, masks, outliers, weight, draw, only)
            for draw in range(self.draws)
        ]
        self.add(title, found)

    def trained_logits(
        self,
        title: str,
        masks: Sequence[HeadMask],
        outliers: Sequence[str],
        weight: float,
        draw: int,
        only: int | None = None,
    ) -> dict[str, Tensor]:
        """Train a branch and keep its logits."""

        def make() -> dict[str, Tensor]:
            ensemble = fuse(self.host.model, list(masks))
            tuning = self.trunks.logits(ensemble, {"tuning": self.sets["tuning"]})["tuning"]
            ensemble.temperature = fit_temperature(tuning, self.labels["tuning"])
            data = list(self.calibration)
            odd = [batch for kind in outliers for batch in getattr(self, kind)] or None
            # outliers are told apart by their place, so each list needs states of its own
            of = self.trunks.of(ensemble, "calibration", data)
            states = self.states.setdefault(len(odd or ()), dict(of))
            trained = finetune_branch(
                ensemble,
                data,
                outliers=odd,
                outlier_weight=weight,
                trunk_states=states,
                cache_bytes=runs.STATES_BYTES,
                seed=draw,
                progress=False,
                **TRAINING,
            ).model.eval()
            assert isinstance(trained, HydraEnsemble)
            logits = self.trunks.logits(trained, self.sets)
            if only is None:
                return {**logits, "cost": self.cost(trained)}
            alone = {name: values[:, only : only + 1] for name, values in logits.items()}
            return {**alone, "cost": self.cost(trained.member(only))}

        return self.kept(f"{title}-{draw}", make)

    def train_again(self) -> None:
        """Train rows a second time, to see that a seed gives the same figures."""
        for title, kinds, weight in (
            ("Hydra M=3, trained on labels alone", (), 0.0),
            ("Hydra M=3, trained with proxies", ("proxies",), self.best_weight),
        ):
            first, second = (
                self.trained_logits(name, self.last(THIRDS), kinds, weight, 0)
                for name in (title, f"{title}, again")
            )
            figures = [tables.figures_of(self.judge(found)) for found in (first, second)]
            same = all(torch.equal(first[name], second[name]) for name in self.sets)
            said = "the same figures" if figures[0] == figures[1] else "other figures"
            said += ", and the same logits to the bit" if same else ""
            self.repeated.append(f"`{title}`, draw 0, trained a second time: {said}.")
            self.write()

    def notes(self) -> list[str]:
        """Say what a second training gave."""
        notes = super().notes() if self.known is None else self.known["notes"]
        return list(dict.fromkeys([*notes, *self.repeated]))

    def others(self) -> None:
        """Add the rivals."""
        known = [row["name"] for row in self.known["rows"]] if self.known else []
        for title, (name, count) in self.rivals.items():
            if title in known:
                continue

            def make(title: str = title, name: str = name, count: int = count) -> dict[str, Tensor]:
                if name == "laplace":
                    return self.laplace("validation" if "valid" in title else "marginal-likelihood")
                data = self.calibration.subset(range(0, 1000, 1000 // count)) if count else None
                model = make_baseline(
                    name,
                    self.load(0),
                    train=data,
                    validation=data,
                    ood=self.textures,
                    members=3,
                    progress=False,
                    **self.rival_training,
                )
                return {**runs.logits_of(model, self.sets), "cost": self.cost(model)}

            self.add(title, [self.kept(title, make)] * len(self.rows["single"][1]))

    def laplace(self, prior: str) -> dict[str, Tensor]:
        """Return last-layer Laplace on the calibration images, above known states."""
        data = self.tail_batches("calibration", list(self.calibration))
        sets = {name: self.tail_batches(name, batches) for name, batches in self.sets.items()}
        rival = make_baseline(
            "laplace",
            Tail(self.load(0)),
            train=data,
            validation=sets["tuning"],
            options={"prior": prior},
            progress=False,
        )
        whole = LaplaceHead(Featured(self.load(0), "head"), rival.get_submodule("variance"))
        return {**runs.logits_of(rival, sets), "cost": self.cost(whole.eval())}

    def tail_batches(self, name: str, batches: Sequence[Any]) -> list[Any]:
        """Return states below the last block with labels, by batch."""
        pair = fuse(self.host.model, self.pair)
        model = CachedTrunk(pair, 0, self.trunks.of(pair, name, batches))
        return [
            (model.trunk_states(known), labels)
            for known, (_, labels) in zip(numbered(list(batches)), batches, strict=True)
        ]

    def unmerged(self) -> None:
        """Train members by themselves, and compare their ensemble with the fused, merged one."""
        found = [
            self.kept(f"unmerged-{draw}", lambda draw=draw: self.trained_apart(draw))  # type: ignore[misc]
            for draw in range(APART)
        ]
        points = [
            runs.point(
                kind,
                float(found[0][f"{kind}/cost"]),
                [
                    self.sweep_judge(
                        {name: one[f"{kind}/{name}"] for name in self.sweep_sets}, draw
                    )
                    for draw, one in enumerate(found)
                ],
            )
            for kind in ("apart", "merged")
        ]
        title = "Hydra M=3, trained on labels alone"
        together = [
            self.trained_logits(title, self.last(THIRDS), (), 0.0, draw)
            for draw in range(self.draws)
        ]
        points.append(
            runs.point(
                "trained as one shared MLP",
                float(together[0]["cost"]),
                [self.sweep_judge(one, draw) for draw, one in enumerate(together)],
            )
        )
        self.sweeps["Merged and unmerged MLPs"] = {
            "x": "MLPs of the branch",
            "about": "the last block, final norm and classifier of three members (2 of 3 heads) "
            "trained one by one on bootstraps of the 1,000 calibration images, labels alone, 3 "
            "epochs; then kept apart and run one by one, or fused with the "
            "mean of their MLPs. Last: the row `Hydra M=3, trained on labels alone`, whose labels "
            "are softened by its own predictions",
            "points": points,
        }

    def trained_apart(self, draw: int) -> dict[str, Tensor]:
        """Train three members one by one above the trunk; return logits apart and merged."""
        data = self.tail_batches("calibration", list(self.calibration))
        # batches of one size are shuffled by sample
        states, labels = (torch.cat(parts).split(40) for parts in zip(*data, strict=True))
        trained = finetune(
            [Tail(prune_heads_(self.load(0), mask)) for mask in self.last(THIRDS)],
            list(zip(states, labels, strict=True)),
            parameters=self.trained_parameters,
            seed=10 * draw,
            bootstrap=True,
            progress=False,
            epochs=TRAINING["epochs"],
            learning_rate=TRAINING["learning_rate"],
        )
        tails = [member.model.eval() for member in trained]
        models = [tail.get_submodule("model") for tail in tails]
        merged = fuse(models)
        result = {f"merged/{k}": v for k, v in self.trunks.logits(merged, self.sweep_sets).items()}
        with torch.no_grad():
            for name, batches in self.sweep_sets.items():
                parts = [
                    torch.stack([tail(states) for tail in tails], 1)
                    for states, _ in self.tail_batches(name, batches)
                ]
                result[f"apart/{name}"] = torch.cat(parts)
        result["merged/cost"] = self.cost(merged)
        result["apart/cost"] = sum((self.cost(model) for model in models), torch.tensor(0.0))
        return result

    def setup(self) -> list[str]:
        """Say how the table was made."""
        if self.known is not None and not self.tried:  # nothing was trained in this run
            return list(self.known["setup"])
        return [
            "DeiT-tiny as published (its LayerNorms rounded at the source), 224 x 224. "
            "Calibration, validation and test: one image a class each (1,000), by sorted file "
            "name.",
            "OOD validation: the texture classes banded and braided, and proxies made of "
            "validation images. OOD test: bumpy and crosshatched (120 each; the seen family), "
            "MNIST and CIFAR-10 upscaled (200 each) and noise (100), of kinds that no search "
            "and no training saw.",
            f"Corruptions of severity 3 on {SHIFTED} test images. Temperatures are fitted on "
            "every second validation image, for every row alike.",
            "Trained rows: the last block, final norm and classifier of each member, 3 epochs "
            "on the 1,000 calibration images above a frozen trunk; half of each label is the "
            f"untrained ensemble's own prediction; outliers: {OUTLIERS} proxies of each of "
            f"{len(KINDS)} kinds, and 240 textures where it says outliers. Weight of outliers: "
            f"{self.chosen}. The row `single, trained with outliers` is the unpruned model "
            "with the same training: what it gains is gained by training, not by pruning or "
            "ensembling.",
            "MC dropout: 3 passes of rate 0.1 that training has not seen. LoRA-Ensemble: 3 "
            "members, one epoch on 250 calibration images. Last-layer Laplace: Kronecker factors "
            "of the 1,000 calibration images, which are not what the host was trained on (1.28 "
            "million images), so the marginal likelihood gives too wide a posterior; the other "
            "row takes its prior by the NLL of the images that temperatures are fitted on. "
            "Deep Ensembles of an ImageNet model cannot be trained "
            "here.",
        ]


def main() -> None:
    """Run what is missing and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("HYDRA_DATA"))
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--trained", type=int, default=5, help="draws of trained rows")
    parser.add_argument("--groups", nargs="+", default=GROUPS, choices=GROUPS)
    args = parser.parse_args()
    args.data = real_data.data_root(args.data)
    torch.set_num_threads(1)
    ImagenetTable(args).run(args.groups)


if __name__ == "__main__":
    main()
