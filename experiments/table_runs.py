"""What the tables of fine-tuned hosts share: trunks computed once, rows kept, branches trained.

Everything slow is kept in a cache folder by name, so that a stopped command goes on.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import tables
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hydra_ensembles import HeadMask, HydraEnsemble, fuse, prune_heads_
from hydra_ensembles.baselines import make_baseline, relative_cost
from hydra_ensembles.costs.counting import CostModel
from hydra_ensembles.data.running import collect_logits, evaluating, split_batch
from hydra_ensembles.evaluation.metrics_classification import negative_log_likelihood
from hydra_ensembles.hosts import HostModel, host_model
from hydra_ensembles.training import finetune, finetune_branch
from hydra_ensembles.training.branch import CachedTrunk
from hydra_ensembles.training.numbered import keys_of, numbered
from hydra_ensembles.uncertainty import fit_member_temperatures, fit_temperature

Logits = dict[str, Tensor]
"""Member logits `[example, member, class]` by data set."""

STATES_BYTES = 6 * 2**30
GROUPS = ("untrained", "deep", "trained", "unmerged", "others", "sweep_branches")
THIRDS = ((1, 1, 0), (1, 0, 1), (0, 1, 1))
"""Two of three heads, in every way."""
WEIGHTS = (0.05, 0.1, 0.2, 0.5)
"""Of outliers, to choose from."""
ROWS_OF_MEMBERS = (1, 3, 6)
"""Selected ensembles that are rows; the others are points of a sweep."""


@dataclass(frozen=True)
class Branch:
    """A row whose branch is trained: whose masks (a row of the search), and with outliers or not.

    `host` stands for the unpruned model: what it gains is gained by training alone.
    """

    masks: str
    outliers: bool = False


def kept(path: Path, make: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Read tensors, or make and keep them."""
    if not path.exists():
        begun = time.process_time()
        found = {name: tensor.contiguous() for name, tensor in make().items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        save_file(found, beside)
        os.replace(beside, path)
        print(f"{path.stem}: {time.process_time() - begun:.0f} s of CPU", flush=True)
    return load_file(path)


def logits_of(model: nn.Module, sets: Mapping[str, Iterable[Any]]) -> Logits:
    """Run a model on data sets."""
    return {name: collect_logits(model, data, name=name)[0] for name, data in sets.items()}


def labelled(batches: Iterable[Any]) -> list[Any]:
    """Return batches in which everything has a label: outliers get 0, which nobody reads."""
    result = []
    for batch in batches:
        if split_batch(batch)[2] is not None:
            result.append(batch)
        elif isinstance(batch, Mapping):
            rows = len(next(iter(batch.values())))
            result.append({**batch, "labels": torch.zeros(rows, dtype=torch.long)})
        else:
            inputs = batch[0] if isinstance(batch, (tuple, list)) else batch
            result.append((inputs, torch.zeros(len(inputs), dtype=torch.long)))
    return result


class Trunks:
    """States below a branch, by trunk and data set: computed once, whatever is trained above."""

    def __init__(self, host: HostModel, folder: Path) -> None:
        self.host, self.folder = host, folder
        self.states: dict[tuple[str, str], dict[Any, Tensor]] = {}

    def of(self, ensemble: HydraEnsemble, name: str, batches: Sequence[Any]) -> dict[Any, Tensor]:
        """Return the states of a data set's samples below an ensemble's branch."""
        plan = ensemble.plan
        pruned = [
            f"{layer}.{'-'.join(map(str, heads))}"
            for layer, heads in enumerate(plan.trunk_heads)
            if len(heads) < self.host.head_counts[layer]
        ]
        trunk = "_".join([str(plan.trunk), *pruned])
        if (trunk, name) not in self.states:
            data = numbered(list(batches))

            def compute() -> dict[str, Tensor]:
                model = CachedTrunk(ensemble, 0)
                with evaluating(ensemble), torch.no_grad():
                    return {str(i): model.trunk_states(batch) for i, batch in enumerate(data)}

            found = kept(self.folder / trunk / f"{name}.safetensors", compute)
            self.states[trunk, name] = {
                key: row
                for i, batch in enumerate(data)
                for key, row in zip(keys_of(batch), found[str(i)], strict=True)
            }
        return self.states[trunk, name]

    def logits(self, ensemble: HydraEnsemble, sets: Mapping[str, Sequence[Any]]) -> Logits:
        """Run an ensemble above known states."""
        result = {}
        for name, batches in sets.items():
            model = CachedTrunk(ensemble, 0, self.of(ensemble, name, batches))
            with evaluating(ensemble), torch.no_grad():
                parts = [model.member_logits(batch) for batch in numbered(list(batches))]
            result[name] = torch.cat(parts)
        return result

    def train(
        self,
        masks: Sequence[HeadMask],
        name: str,
        batches: Sequence[Any],
        outliers: Sequence[Any] | None = None,
        tuning: tuple[Sequence[Any], Tensor] | None = None,
        **options: Any,
    ) -> HydraEnsemble:
        """Train the branch of members above known states of a training set.

        What is distilled has a temperature, fitted on `tuning` (batches and their labels).
        """
        ensemble = fuse(self.host.model, list(masks))
        if tuning is not None:
            logits = self.logits(ensemble, {"calibration": tuning[0]})["calibration"]
            ensemble.temperature = fit_temperature(logits, tuning[1])
        found = finetune_branch(
            ensemble,
            list(batches),
            outliers=outliers,
            trunk_states=self.of(ensemble, name, batches),
            cache_bytes=STATES_BYTES,
            progress=False,
            **options,
        )
        return found.model.eval()  # type: ignore[return-value]


def keeping(
    host: HostModel, rows: Sequence[Sequence[int]], layers: Sequence[int]
) -> list[HeadMask]:
    """Return a mask for each row of bits: those heads of some blocks, and all heads elsewhere."""
    result = []
    for bits in rows:
        mask = HeadMask.full(host)
        for layer in layers:
            mask = mask.with_layer(layer, torch.tensor(bits).bool())
        result.append(mask)
    return result


def chosen_masks(task: str, host: HostModel) -> dict[int, dict[str, list[HeadMask]]]:
    """Read the members that `select_members.py` found: by draw and row."""
    record = json.loads((tables.RESULTS / f"select_{task}.json").read_text(encoding="utf-8"))
    found: dict[int, dict[str, list[HeadMask]]] = {}
    for draw in record["draws"]:
        found[draw["draw"]] = {}
        for name, row in draw["rows"].items():
            masks = []
            for rows in row["masks"]:
                mask = HeadMask.full(host)
                for layer, bits in zip(record["layers"], rows, strict=True):
                    mask = mask.with_layer(layer, torch.tensor(bits).bool())
                masks.append(mask)
            found[draw["draw"]][name] = masks
    return found


class Judge:
    """Makes `tables.Outputs` of logits: the same test data, and one temperature fitted alike.

    Args:
        labels: of `test` and of `tuning`, and of shifts.
        families: names of the OOD test sets.
        seen: those of which a search saw other examples.
        shifts: names of shifted test sets.
        tuning: the set on which temperatures are fitted.
    """

    def __init__(
        self,
        labels: Mapping[str, Tensor],
        *,
        families: Sequence[str],
        seen: Sequence[str],
        shifts: Sequence[str] = (),
        tuning: str = "calibration",
    ) -> None:
        self.labels, self.families, self.seen = dict(labels), list(families), list(seen)
        self.shifts, self.tuning = list(shifts), tuning

    @property
    def sets(self) -> list[str]:
        """Names of the data sets that a row needs."""
        return [self.tuning, "test", *self.families, *self.shifts]

    def __call__(self, logits: Mapping[str, Tensor], draw: int = 0) -> tables.Outputs:
        """Return a row's outputs on one draw."""
        temperature = fit_temperature(logits[self.tuning], self.labels[self.tuning])
        # log-probabilities have no energy: their logsumexp is 0 by definition
        normed = bool((logits["test"].logsumexp(-1).abs() < 1e-3).all())
        return tables.Outputs(
            logits["test"],
            self.labels["test"],
            {name: logits[name] for name in self.families},
            temperature,
            self.seen,
            {name: (logits[name], self.labels[name]) for name in self.shifts},
            draw,
            ("msp",) if normed else tables.SCORES,
        )


def point(x: Any, cost: float, draws: Sequence[tables.Outputs]) -> dict[str, Any]:
    """Return one point of a sweep: the mean over draws."""
    figures = tables.mean_figures([tables.figures_of(outputs) for outputs in draws])
    return {"x": x, "cost": cost, "draws": len(draws), **figures}


class Table:
    """A table of a fine-tuned host, its rivals, and Hydra with and without trained branches.

    A subclass gives the data, the hosts and the plan; every row is kept in a cache folder.
    """

    name: str
    title: str
    command: str
    paper: ClassVar[dict[str, dict[str, float]]]
    seen: tuple[str, ...]
    unseen: tuple[str, ...]
    shifts: tuple[str, ...] = ()
    trained_parameters: str
    """What is trained when members are trained one by one: a pattern of names."""
    groups: tuple[str, ...] = GROUPS
    plan: ClassVar[dict[str, Branch]]
    """Trained rows."""
    weighed_on = "calibration"
    """The labelled set on which the weight of outliers is chosen."""
    rivals: ClassVar[dict[str, tuple[str, int]]] = {
        "Laplace, last layer": ("laplace", 1500),
        "MC dropout": ("mc-dropout", 0),
        "LoRA-Ensemble": ("lora-ensemble", 500),
        "BatchEnsemble": ("batch-ensemble", 500),
    }
    """Name of the baseline, and rows of training data."""
    rival_training: ClassVar[dict[str, Any]] = {"epochs": 1, "learning_rate": 1e-4}
    training: ClassVar[dict[str, Any]]
    branched: tuple[int, ...] = (-1,)
    """Blocks of random masks."""
    branch_layers: tuple[int, ...] = ()
    """First blocks of the sweep over branches."""
    one: Any
    """A batch of one example, to count costs on."""

    def __init__(self, cache: Path, *, trained: int) -> None:
        self.cache, self.draws = cache / f"{self.name}-table", trained
        self.host = host_model(self.load(0))
        self.labels = self.read_data()
        self.judge = Judge(
            self.labels,
            families=[*self.seen, *self.unseen],
            seen=self.seen,
            shifts=self.shifts,
            tuning=self.tuning,
        )
        self.trunks = Trunks(self.host, cache / f"{self.name}-trunks")
        self.costs = CostModel(self.host, self.one)
        self.rows: dict[str, tuple[float, list[tables.Outputs]]] = {}
        self.sweeps: dict[str, Any] = {}
        self.resampled: dict[str, Any] = {}
        self.weights: dict[str, str] = {}
        """What was tried to find the weight of outliers, by host."""

    tuning = "calibration"
    search = ""
    """Name of the search's record, where it is not the table's."""
    against: tuple[str, ...] = ("single", "Deep Ensembles")
    sets: dict[str, list[Any]]
    """Batches of every set that a row needs."""

    def load(self, seed: int) -> nn.Module:
        """Load a fine-tuned host."""
        raise NotImplementedError

    def read_data(self) -> dict[str, Tensor]:
        """Set `sets` and `one`; return labels by set."""
        raise NotImplementedError

    def training_set(self) -> list[Any]:
        """Return batches that branches are trained on."""
        raise NotImplementedError

    def taught_set(self) -> list[Any]:
        """Return batches whose labels are a teacher's answers."""
        raise NotImplementedError

    def outliers(self) -> list[Any]:
        """Return batches about which branches learn to be unsure."""
        raise NotImplementedError

    def rival_data(self, count: int) -> list[Any]:
        """Return batches that rivals are trained on."""
        raise NotImplementedError

    def setup(self) -> list[str]:
        """Say how the table was made."""
        raise NotImplementedError

    def kept(self, name: str, make: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Read or compute the logits of a row; a cost travels along."""
        plain = "".join(c if c.isalnum() or c in "-=" else "_" for c in name)
        return kept(self.cache / f"{plain}.safetensors", make)

    def cost(self, model: nn.Module) -> Tensor:
        """Count a model against the plain host by running both."""
        return torch.tensor(relative_cost(model, self.host.model, self.one).multiply_adds)

    def add(self, name: str, found: Sequence[Mapping[str, Tensor]]) -> None:
        """Add a row: one set of logits a draw."""
        cost = max(float(one["cost"]) for one in found)
        self.rows[name] = (cost, [self.judge(one, draw) for draw, one in enumerate(found)])

    def run(self, groups: Sequence[str]) -> None:
        """Make the rows of some groups, and write the table after each of them."""
        for group in self.groups:
            if group in groups:
                getattr(self, group)()
                self.write()

    def untrained(self) -> None:
        """Add the rows of masks that searches chose, and the sweep over kept heads."""
        chosen, random = chosen_masks(self.search or self.name, self.host), self.random_masks()
        lists = [masks for rows in chosen.values() for masks in rows.values()]
        every = list(dict.fromkeys(m for masks in (*lists, *random.values()) for m in masks))
        logits = self.mask_logits(every)
        index = {mask: i for i, mask in enumerate(every)}

        def of(masks: Sequence[HeadMask]) -> dict[str, Tensor]:
            places = [index[mask] for mask in masks]
            picked = {name: logits[name][:, places] for name in self.sets}
            return {**picked, "cost": torch.tensor(self.costs.ratio(list(masks)))}

        draws = sorted(chosen)
        full = {**of([HeadMask.full(self.host)]), "cost": torch.tensor(1.0)}
        self.add("single", [full])
        self.tuning_logits = full[self.tuning]
        self.add("temperature", [_divided(full, torch.tensor(self.judge(full).temperature))])
        self.add("taylor-single", [of(chosen[d]["taylor"][:1]) for d in draws])
        self.add("circavg-single", [of(chosen[d]["circuit"][2:3]) for d in draws])
        titles = {"random": "Hydra random", "taylor": "Hydra Taylor", "circuit": "Hydra Circ"}
        for key in chosen[0]:
            if key.startswith("select"):
                titles[key] = f"Hydra {key}"
        for key, title in titles.items():
            self.add(title, [of(chosen[d][key]) for d in draws])
        by_member = []
        for draw in draws:
            mine = of(chosen[draw]["select M=3"])
            own = fit_member_temperatures(mine[self.tuning], self.labels[self.tuning])
            by_member.append(_divided(mine, torch.tensor(own)[:, None]))
        self.add("Hydra select M=3, member temperatures", by_member)
        points = []
        for count, masks in random.items():
            triples = [of(masks[i : i + 3]) for i in range(0, len(masks), 3)]
            cost = max(float(one["cost"]) for one in triples)
            points.append(point(count, cost, [self.judge(one, i) for i, one in enumerate(triples)]))
        self.sweep_members()
        about = (
            "three random masks of the branched blocks each, mean of 6 ensembles, nothing trained"
        )
        self.sweeps["Kept heads"] = {
            "x": f"heads of {self.host.head_counts[-1]}",
            "about": about,
            "points": points,
        }

    def mask_logits(self, every: Sequence[HeadMask]) -> Logits:
        """Return the logits of masks, each a member, on all sets."""
        found: dict[str, list[Tensor]] = {name: [] for name in self.sets}
        for start in range(0, len(every), 48):  # an ensemble of all would need much memory
            some = every[start : start + 48]
            part = self.kept(
                f"masks-{len(every)}-{start}",
                lambda some=some: self.trunks.logits(fuse(self.host.model, some), self.sets),  # type: ignore[misc]
            )
            for name in self.sets:
                found[name].append(part[name])
        return {name: torch.cat(parts, 1) for name, parts in found.items()}

    def random_masks(self, each: int = 18) -> dict[int, list[HeadMask]]:
        """Draw masks of the branched blocks by the heads kept in each, unequal within a triple."""
        heads = self.host.head_counts[-1]
        result: dict[int, list[HeadMask]] = {}
        for count in sorted({max(1, round(heads * k / 6)) for k in range(1, 6)} - {heads}):
            generator = torch.Generator().manual_seed(count)
            masks: list[HeadMask] = []
            while len(masks) < each:
                mask = HeadMask.full(self.host)
                for layer in [block % len(self.host) for block in self.branched]:
                    row = torch.zeros(heads, dtype=torch.bool)
                    row[torch.randperm(heads, generator=generator)[:count]] = True
                    mask = mask.with_layer(layer, row)
                if mask not in masks[len(masks) // 3 * 3 :]:
                    masks.append(mask)
            result[count] = masks
        return result

    def sweep_branches(self) -> None:
        """Sweep the layer from which members part: random masks of all layers above."""
        points = []
        for layer in self.branch_layers:
            generator = torch.Generator().manual_seed(layer)
            masks = []
            for _ in range(3):
                mask = HeadMask.full(self.host)
                for above in range(layer, len(self.host)):
                    heads = self.host.head_counts[above]
                    row = torch.zeros(heads, dtype=torch.bool)
                    row[torch.randperm(heads, generator=generator)[: round(heads * 2 / 3)]] = True
                    mask = mask.with_layer(above, row)
                masks.append(mask)
            found = self.kept(
                f"branch-{layer}",
                lambda masks=masks: logits_of(fuse(self.host.model, masks), self.sets),  # type: ignore[misc]
            )
            points.append(point(layer, self.costs.ratio(masks), [self.judge(found)]))
        self.sweeps["Branch layer"] = {
            "x": f"first branched of {len(self.host)} blocks (from 0)",
            "about": "three random masks that keep two thirds of the heads from there on, one draw",
            "points": points,
        }

    def sweep_members(self) -> None:
        """Make a sweep of the selected ensembles of one to eight members; a few stay as rows."""
        names = {m: f"Hydra select M={m}" for m in range(1, 9)}
        self.sweeps["Members"] = {
            "x": "members",
            "about": "selected on each draw at a cost of at most 1.07, nothing trained",
            "points": [point(m, *self.rows[name]) for m, name in names.items()],
        }
        for m in set(names) - set(ROWS_OF_MEMBERS):
            del self.rows[names[m]]

    def deep(self) -> None:
        """Add the three hosts, apart and together."""
        single = self.rows["single"][1][0]
        first = {self.tuning: self.tuning_logits, "test": single.test, **single.families}
        first |= {name: logits for name, (logits, _) in single.shifts.items()}
        hosts = [first] + [
            self.kept(f"host-{seed}", lambda s=seed: logits_of(self.load(s), self.sets))  # type: ignore[misc]
            for seed in (1, 2)
        ]
        deep = {name: torch.cat([one[name] for one in hosts], 1) for name in self.sets}
        self.add("Deep Ensembles", [{**deep, "cost": torch.tensor(3.0)}])
        self.add("single, all three hosts", [{**one, "cost": torch.tensor(1.0)} for one in hosts])

    def trained(self) -> None:
        """Add the rows whose branch was trained."""
        chosen = chosen_masks(self.search or self.name, self.host)
        for title, branch in self.plan.items():
            weight = 0.0
            if branch.outliers:
                masks = self.distinct(chosen[0]["select M=3"], 0)
                weight = self.outlier_weight(self.trunks, masks, "seed 0")
            found = []
            for draw in range(self.draws):
                if branch.masks == "host":
                    found.append(
                        self.train(title, self.trunks, self.host_pair(), weight, draw, only=0)
                    )
                else:
                    masks = self.distinct(chosen[draw][branch.masks], draw)
                    found.append(self.train(title, self.trunks, masks, weight, draw))
            self.add(title, found)

    def host_pair(self, first: int | None = None) -> list[HeadMask]:
        """Return the unpruned mask and another, so that the host has a branch, from `first` on."""
        full = HeadMask.full(self.host)
        if first is None:
            first = min(block % len(self.host) for block in self.branched)
        fewer = torch.arange(self.host.head_counts[first]) > 0
        return [full, full.with_layer(first, fewer)]

    def train(
        self,
        title: str,
        trunks: Trunks,
        masks: Sequence[HeadMask],
        weight: float,
        draw: int,
        *,
        only: int | None = None,
        taught: bool = False,
    ) -> dict[str, Tensor]:
        """Train a branch and keep its logits, or those of one of its members.

        Labels are a teacher's alone where it is `taught`.
        """

        def make() -> dict[str, Tensor]:
            outliers = self.outliers() if weight else None
            tuning = (self.sets[self.tuning], self.labels[self.tuning])
            settings = {**self.training, "seed": draw, "outlier_weight": weight, "tuning": tuning}
            name, data = "train", self.training_set
            if taught:
                name, data = "taught", self.taught_set
                settings["distill"] = 0.0
            ensemble = trunks.train(masks, name, data(), outliers, **settings)
            logits = trunks.logits(ensemble, {**self.sets, **self.choosing})
            if only is None:
                return {**logits, "cost": self.cost(ensemble)}
            alone = {name: values[:, only : only + 1] for name, values in logits.items()}
            return {**alone, "cost": self.cost(ensemble.member(only))}

        said = f" weight {weight}" if weight else ""
        return self.kept(f"{title}{said}-{draw}", make)

    @property
    def choosing(self) -> dict[str, list[Any]]:
        """Return the set on which the weight of outliers is chosen, where no row needs it."""
        return {}

    def outlier_weight(
        self, trunks: Trunks, masks: Sequence[HeadMask], name: str, *, taught: bool = False
    ) -> float:
        """Return the largest weight of outliers that is not shown to cost likelihood, or the least.

        That is: NLL on `weighed_on`, raw and scaled, is above the host's by two standard errors of
        the paired difference at most. No outlier takes part in the choice.
        """
        labels = self.labels[self.weighed_on]
        batches = {**self.sets, **self.choosing}[self.weighed_on]

        def losses(logits: Tensor) -> Tensor:
            scaled = logits / fit_temperature(logits, labels)
            both = [negative_log_likelihood(each, labels).double() for each in (logits, scaled)]
            return torch.stack(both)

        pair = fuse(trunks.host.model, self.host_pair())
        alone = trunks.logits(pair, {self.weighed_on: batches})[self.weighed_on]
        host = losses(alone[:, :1])
        best, tried = WEIGHTS[0], []
        for weight in WEIGHTS:
            found = self.train(f"weighing {name}", trunks, masks, weight, 0, taught=taught)
            above = losses(found[self.weighed_on]) - host
            mean, error = above.mean(1), above.std(1) / len(labels) ** 0.5
            tried.append(f"{weight}: {mean[0]:+.4f} ({error[0]:.4f}), {mean[1]:+.4f}")
            if bool((mean <= 2 * error).all()):
                best = weight
        said = "NLL above the host's, its standard error, and scaled"
        self.weights[name] = f"{best} ({said}: {'; '.join(tried)})"
        return best

    def distinct(self, masks: Sequence[HeadMask], draw: int) -> list[HeadMask]:
        """Return unequal masks: a repeated one loses another head, since equals stay equal."""
        result = list(dict.fromkeys(masks))
        if len(masks) - len(result) > sum(self.host.head_counts[-1:]) - 1:
            raise ValueError(f"{len(masks)} masks, of which {len(result)} differ: too few heads.")
        generator = torch.Generator().manual_seed(draw)
        last, heads = len(self.host) - 1, self.host.head_counts[-1]
        while len(result) < len(masks):
            row = result[0][last].clone()
            row[int(torch.randint(heads, (), generator=generator))] ^= True
            mask = result[0].with_layer(last, row)
            if bool(row.any()) and mask not in result:
                result.append(mask)
        return result

    def others(self) -> None:
        """Add the rivals."""
        for title, (name, count) in self.rivals.items():

            def make(name: str = name, count: int = count) -> dict[str, Tensor]:
                model = make_baseline(
                    name,
                    self.load(0),
                    train=self.rival_data(count) if count else None,
                    members=3,
                    progress=False,
                    **self.rival_training,
                )
                return {**logits_of(model, self.sets), "cost": self.cost(model)}

            self.add(title, [self.kept(name, make)])
            self.write()

    def unmerged(self) -> None:
        """Train members by themselves, and compare their ensemble with the fused, merged one."""
        masks = chosen_masks(self.search or self.name, self.host)[0]["taylor"]

        def make() -> dict[str, Tensor]:
            trained = finetune(
                [prune_heads_(self.load(0), mask) for mask in masks],
                self.training_set(),
                parameters=self.trained_parameters,
                bootstrap=True,
                progress=False,
                epochs=self.training["epochs"],
                learning_rate=self.training["learning_rate"],
            )
            models = [member.model.eval() for member in trained]
            merged = fuse(models)
            result = {f"merged/{k}": v for k, v in logits_of(merged, self.sets).items()}
            each = [logits_of(model, self.sets) for model in models]
            for name in self.sets:
                result[f"apart/{name}"] = torch.cat([one[name] for one in each], 1)
            result["merged/cost"] = self.cost(merged)
            result["apart/cost"] = sum((self.cost(model) for model in models), torch.tensor(0.0))
            return result

        found = self.kept("unmerged", make)
        self.sweeps["Merged and unmerged MLPs"] = {
            "x": "MLPs of the branch",
            "about": "members of `Hydra Taylor` trained one by one, then fused with the mean of "
            "their MLPs, or kept apart and run one by one",
            "points": [
                point(
                    kind,
                    float(found[f"{kind}/cost"]),
                    [self.judge({name: found[f"{kind}/{name}"] for name in self.sets})],
                )
                for kind in ("apart", "merged")
            ],
        }

    def notes(self) -> list[str]:
        """Name the rows and sweeps that were not run."""
        planned = [*getattr(self, "plan", ()), *getattr(self, "rivals", ())]
        missing = [title for title in planned if title not in self.rows]
        sweeps = ("Merged and unmerged MLPs", "Branch layer") if self.branch_layers else ()
        missing += [name for name in sweeps if name not in self.sweeps]
        said = f"Written, but not run here for want of processor time: {', '.join(missing)}."
        return [said] if missing else []

    def write(self) -> None:
        """Write the record with all rows that are there, Hydra last."""
        order = sorted(self.rows, key=lambda name: ("Hydra" in name, "-single" in name))
        first = [name for name in ("single", "single, all three hosts") if name in self.rows]
        rows = {name: self.rows[name] for name in dict.fromkeys((*first, *order))}
        tables.write(
            {
                "name": self.name,
                "title": self.title,
                "command": self.command,
                "setup": self.setup(),
                "families": {"seen": self.seen, "unseen": self.unseen},
                "rows": tables.table_rows(rows, against=self.against, known=self.resampled),
                "sweeps": self.sweeps,
                "paper": self.paper,
                "notes": self.notes(),
            }
        )


def _divided(logits: Mapping[str, Tensor], temperature: Tensor) -> dict[str, Tensor]:
    return {k: v if k == "cost" else v / temperature for k, v in logits.items()}
