"""The methods of a table's rows: from a row's options and a draw to stored answers.

A row of a table file names its `method`; all other keys are the method's options:

    single           the host; `host` is its seed (by default the draw)
    deep-ensemble    the hosts of `seeds`, side by side
    soup             the mean of the weights of the hosts of `seeds`, one model
    masks            nothing trained: recorded members (`source`, in masks/<task>.json)
    build            `hydra.build` with `options`; `seen_outliers: false` hides the outliers
    parts            shares of the last block's neurons, refitted to 3,000 inputs without labels
    branch           recorded masks (`source`, or `host`), then `finetune_branch` with `options`
    distill          `hydra.distill` of the hosts of `seeds`, or of teachers by `make`; a student
                     has `members: 1`; with `mean: true` the hosts' mean is the only teacher;
                     with `start: mean` the student starts from the mean of their weights;
                     `trial` are changes of the loss that the library does not offer (trials.py)
    folds            another method (`of`) on five folds of the digits, answers pooled (folds.py)
    teachers         what `hydra.make_teachers` makes with the options in `make`, as an ensemble
    baseline         `make_baseline(name, ...)` with `options`

`host` is a seed, or `draw`; 0 unless said. `part` and `count` name the training data of all that
train. `novelty: true` fits novelty on the calibration data. `by_name: true` marks a long row that
is run only when it is named, `shown: false` one that the page leaves out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hydra_ensembles as hydra
from hydra_ensembles import HeadMask, HydraEnsemble, fuse
from hydra_ensembles.data.proxies import make_proxies
from hydra_ensembles.errors import DataError
from hydra_ensembles.hosts import host_model, main_output
from hydra_ensembles.hosts.tiny_vit import TinyViT
from hydra_ensembles.refit.part_members import part_host
from hydra_ensembles.registry import Registry
from hydra_ensembles.research import MemberStack
from hydra_ensembles.research.rivals import make_baseline, relative_cost
from hydra_ensembles.training import (
    BRANCH,
    DISTILL,
    Settings,
    average_weights,
    finetune_branch,
)
from hydra_ensembles.uncertainty import fit_temperature

from .answers import Answers, Store, ask
from .folds import FOLDS, pooled
from .tasks import Task, open_task
from .trials import trying

Row = Mapping[str, Any]
MASKS = Path(__file__).parents[1] / "masks"
HOST: Row = {"name": "host", "method": "single"}
AT_ONCE = 48  # masks that one fused model holds; more would need much memory

methods: Registry[Callable[[Store, Row, int], Answers]] = Registry("method")


def draws_of(row: Row) -> list[int]:
    """Return the draws of a row: `draws: 6` or a list; one by default."""
    draws = row.get("draws", 1)
    return list(range(draws)) if isinstance(draws, int) else list(draws)


def seed_of(row: Row, draw: int) -> int:
    """Return the seed of a row's host: `host: 2`, or `host: draw`; 0 by default."""
    seed = row.get("host", 0)
    return draw if seed == "draw" else int(seed)


LOOKS = ("name", "draws", "by_name", "shown", "against")


def options_of(row: Row) -> dict[str, Any]:
    """Return what decides a row's answers: everything but its name, draws and look."""
    return {k: v for k, v in row.items() if k not in LOOKS}


def answer(store: Store, row: Row, draw: int) -> Answers:
    """Read a row's answers on one draw, or make and keep them."""
    make = methods[row["method"]]
    return store.keep(row["name"], draw, options_of(row), lambda: make(store, row, draw))


def answers_of_model(task: Task, model: nn.Module, row: Row, seed: int = 0) -> Answers:
    """Ask a model about every set and count its cost against its host."""
    task, host = task.at(seed), task.host(seed)
    if row.get("novelty"):
        model.fit_novelty_(task.calibration, progress=False)
    found = {name: ask(model, data) for name, data in task.evaluated().items()}
    return Answers(found, cost_of(model, host, task.one))


def cost_of(model: nn.Module, host: nn.Module, batch: Any) -> dict[str, float]:
    """Count a model against its host: fused ones from shapes, as budgets do, rivals by running.

    So the distances of novelty are not counted; they are below 1 % of the hosts here.
    """
    fused = isinstance(model, HydraEnsemble)
    ratio = hydra.cost(model, batch).relative_to(hydra.cost(host, batch)) if fused else None
    counted = ratio or relative_cost(model, host, batch)
    return {"cost": counted.multiply_adds, "parameters": counted.parameters}


@methods.register("single")
def single(store: Store, row: Row, draw: int) -> Answers:
    """Ask the host itself."""
    task, seed = store.task, row.get("host", draw)
    if not row.get("novelty") and row["name"] != HOST["name"]:
        return answer(store, HOST, seed)  # rows share the hosts' answers
    model = task.host(seed)
    if not row.get("novelty"):
        return answers_of_model(task, model, row, seed)
    # novelty is a matter of fused models, one member included; its answers are the host's
    found = answers_of_model(task, fuse(model, [HeadMask.full(model)]), row, seed)
    found.about |= {"cost": 1.0, "parameters": 1.0}
    return found


@methods.register("deep-ensemble")
def deep_ensemble(store: Store, row: Row, draw: int) -> Answers:
    """Put the answers of several hosts side by side."""
    seeds = row["seeds"]
    hosts = [answer(store, HOST, seed) for seed in seeds]
    joined = {
        name: {**one, "logits": torch.cat([host.sets[name]["logits"] for host in hosts], 1)}
        for name, one in hosts[0].sets.items()
    }
    count = float(len(seeds))
    return Answers(joined, {"cost": count, "parameters": count})


@methods.register("soup")
def soup(store: Store, row: Row, draw: int) -> Answers:
    """Ask the mean of several hosts' weights: what a student with `start: mean` starts from."""
    model = average_weights([store.task.host(seed) for seed in row["seeds"]]).eval()
    return answers_of_model(store.task, model, row, row["seeds"][0])


def recorded_masks(task: Task, source: str, draw: int, host: nn.Module) -> list[HeadMask]:
    """Read the members' masks that a search found: `101.110` are the heads kept by block."""
    record = json.loads((MASKS / f"{task.name}.json").read_text())
    if source not in record["rows"]:
        raise DataError(
            f"masks/{task.name}.json has no {source!r}; it has {', '.join(record['rows'])}."
        )
    masks = []
    for bits in record["rows"][source][draw]:
        mask = HeadMask.full(host)
        for block, kept in zip(record["blocks"], bits.split("."), strict=True):
            mask = mask.with_layer(block, torch.tensor([bit == "1" for bit in kept]))
        masks.append(mask)
    return masks


@methods.register("masks")
def masks(store: Store, row: Row, draw: int) -> Answers:
    """Fuse recorded masks; nothing is trained."""
    task, seed = store.task, seed_of(row, draw)
    host = task.host(seed)
    found = recorded_masks(task, row["source"], draw, host)
    members = [found[place] for place in row.get("only", range(len(found)))]
    return answers_of_model(task, fuse(host, members), row, seed)


def prepare_masks(store: Store, rows: Sequence[Row], draws: Sequence[int] | None) -> None:
    """Make the answers of all rows of recorded masks together: above one trunk they cost little."""
    wanted: list[tuple[Row, int, list[HeadMask]]] = []
    plain = [r for r in rows if r["method"] == "masks" and not r.get("novelty") and "host" not in r]
    host: nn.Module | None = None
    for row in plain:
        for draw in draws_of(row) if draws is None else draws:
            if store.read(row["name"], draw, options_of(row)) is None:
                host = host or store.task.host(0)
                found = recorded_masks(store.task, row["source"], draw, host)
                wanted.append((row, draw, [found[i] for i in row.get("only", range(len(found)))]))
    if host is None:
        return
    distinct = list(dict.fromkeys(mask for *_, members in wanted for mask in members))
    answers = []
    for start in range(0, len(distinct), AT_ONCE):
        model = fuse(host, distinct[start : start + AT_ONCE])
        answers.append({n: ask(model, data) for n, data in store.task.evaluated().items()})
    bank = Answers(
        {
            name: {**one, "logits": torch.cat([part[name]["logits"] for part in answers], 1)}
            for name, one in answers[0].items()
        }
    )
    for row, draw, members in wanted:
        chosen = bank.member([distinct.index(mask) for mask in members])
        about = cost_of(fuse(host, members), host, store.task.one)
        store.write(row["name"], draw, options_of(row), Answers(chosen, about))
    print(f"{store.task.name}: {len(distinct)} masks, {len(wanted)} rows and draws", flush=True)


@methods.register("build")
def build(store: Store, row: Row, draw: int) -> Answers:
    """Build an ensemble in one line; what it chose stands in `about.json`."""
    seed = seed_of(row, draw)
    task = store.task.at(seed)
    options = {"seed": draw, "progress": False, "method": "select", **row.get("options", {})}
    searched, host = task.search_host(seed), task.host(seed)
    ood = task.outliers if row.get("seen_outliers", True) else {}
    model = hydra.build(searched, task.calibration, ood=ood or "auto", **options)
    chosen = model.record["masks"]
    if type(task).search_host is not Task.search_host:  # carry the masks over to the tested classes
        model = fuse(host, [HeadMask(mask) for mask in chosen])
    found = answers_of_model(task, model, row, seed)
    found.about["masks"] = chosen
    return found


@methods.register("parts")
def parts(store: Store, row: Row, draw: int) -> Answers:
    """Make members of the neurons of a host's last block, as `build(method="parts")` does."""
    seed = seed_of(row, draw)
    found = part_host(
        host_model(store.task.host(seed)),
        store.task.training("train", 3000),
        members=row["members"],
        seed=draw,
        progress=False,
    )
    return answers_of_model(store.task, found.ensemble, row, seed)


def training_options(row: Row, draw: int, defaults: Settings) -> dict[str, Any]:
    """Return a row's options as arguments; those that are fields of `Settings` become settings."""
    options = dict(row.get("options", {}))
    fields = {name: options.pop(name) for name in asdict(defaults) if name in options}
    settings = replace(defaults, **fields, **options.pop("settings", {}))
    return {"seed": draw, "progress": False, "settings": settings, **options}


@methods.register("branch")
def branch(store: Store, row: Row, draw: int) -> Answers:
    """Train the branch above a frozen trunk, with or without outliers."""
    task, seed = store.task, seed_of(row, draw)
    host = task.host(seed)
    alone = row["source"] == "host"
    members = (
        _host_pair(host) if alone else _distinct(recorded_masks(task, row["source"], draw, host))
    )
    options = training_options(row, draw, BRANCH)
    if row.get("options", {}).get("outlier_weight"):
        proxies = make_proxies(task.calibration, row.get("proxies", "auto"))
        real = task.outliers.values() if row.get("seen_outliers", True) else ()
        options["ood"] = [batch for data in (*real, *proxies.values()) for batch in data]
    ensemble = fuse(host, members)
    if options[
        "settings"
    ].distill:  # what is learned from the untrained members is calibrated first
        known = ask(ensemble, task.held_out)
        ensemble.temperature = fit_temperature(known["logits"], known["labels"])
    trained = finetune_branch(
        ensemble, task.training(row.get("part", "train"), row.get("count")), **options
    ).model.eval()
    return answers_of_model(task, trained.member(0) if alone else trained, row, seed)


@methods.register("distill")
def distill(store: Store, row: Row, draw: int) -> Answers:
    """Distil teachers into one fused model, one per member; one member is a student.

    Teachers are the hosts of `seeds`, their `mean`, or made of the host by `make`.
    """
    return answers_of_model(store.task, distilled(store, row, draw), row, seed_of(row, draw))


def distilled(store: Store, row: Row, draw: int) -> HydraEnsemble:
    """Return the model of a row that distils; a finished one is read from its folder."""
    task, seed = store.task, seed_of(row, draw)
    with trying(row.get("trial", {})):
        return hydra.distill(
            start_of(task, row, seed),
            teachers_of(store, row, seed),
            task.training(row.get("part", "train"), row.get("count")),
            validation=task.calibration,
            folder=work_folder(store, row, draw),
            save_every=20,
            **training_options(row, draw, DISTILL),
        )


def start_of(task: Task, row: Row, seed: int) -> nn.Module:
    """Return what a student starts from: the host, or the mean of its teachers' weights."""
    if row.get("start") != "mean":
        return task.host(seed)
    return average_weights([task.host(teacher) for teacher in row["seeds"]])


def work_folder(store: Store, row: Row, draw: int) -> Path:
    """Return the folder of a row's training, in which rows alike share their teachers' answers.

    Views depend on the draw and on the data, not on who learns: an ensemble and the single student
    that is trained alike need the same answers.
    """
    folder = store.place(row["name"], draw) / "work"
    options = row.get("options", {})
    same = [row.get(key) for key in ("seeds", "make", "host", "mean", "part", "count")]
    same += [options.get(key, "auto") for key in ("views", "ood", "augment")]
    key = hashlib.sha256(json.dumps([draw, same]).encode()).hexdigest()[:16]
    answers = store.folder / "answers" / key
    answers.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "answers"
    if not link.exists():
        link.symlink_to(answers.resolve(), target_is_directory=True)
    return folder


def teachers_of(store: Store, row: Row, seed: int) -> list[Any]:
    """Return the teachers of a row."""
    task = store.task
    if "make" in row:
        data = task.training(row.get("part", "train"), row.get("count"))
        folder = store.place(f"teachers {row['make']['how']}", seed)
        return hydra.make_teachers(
            task.host(seed), data, folder=folder, progress=False, **row["make"]
        )
    hosts = [task.host(teacher) for teacher in row["seeds"]]
    return [Mean(hosts)] if row.get("mean") else hosts


class Mean(nn.Module):
    """The mean probability of several models, as one teacher."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Answer with the log of the mean."""
        answers = [main_output(model(*args, **kwargs)).softmax(-1) for model in self.models]
        return torch.stack(answers).mean(0).log()


@methods.register("folds")
def folds(store: Store, row: Row, draw: int) -> Answers:
    """Run another method on every fold of the digits, and pool what it answers."""
    of_fold = {**row["of"], "name": row["name"]}
    found = []
    for name in FOLDS:
        task = open_task(name, store.task._data, store.task._hosts)
        found.append(answer(Store(store.folder.parent, task), of_fold, draw))
    cost = {key: max(one.about[key] for one in found) for key in ("cost", "parameters")}
    return Answers(pooled([one.sets for one in found]), cost)


@methods.register("teachers")
def teachers(store: Store, row: Row, draw: int) -> Answers:
    """Ask the teachers that a row makes, as an ensemble."""
    task, seed = store.task, seed_of(row, draw)
    found = MemberStack(teachers_of(store, row, seed)).eval()
    return answers_of_model(task, found, row, seed)


@methods.register("baseline")
def baseline(store: Store, row: Row, draw: int) -> Answers:
    """Make a registered rival."""
    task, seed = store.task, seed_of(row, draw)
    host = task.host(seed)
    if row["baseline"] == "packed-ensemble":
        host = TinyViT(task.packed, seed=seed)  # it cannot start from trained weights
    model = make_baseline(
        row["baseline"],
        host,
        train=task.training(row.get("part", "train"), row.get("count")),
        validation=task.calibration,
        ood=task.outliers or None,
        seed=draw,
        progress=False,
        **row.get("options", {}),
    )
    return answers_of_model(task, model, row, seed)


def _host_pair(host: nn.Module) -> list[HeadMask]:
    """Return the unpruned mask and another one, so that the host has a branch to train."""
    full = HeadMask.full(host)
    last = len(full) - 1
    return [full, full.with_layer(last, torch.arange(len(full[last])) > 0)]


def _distinct(members: Sequence[HeadMask]) -> list[HeadMask]:
    """Return unequal masks: a repeated one gets another head, since equal members stay equal."""
    result = list(dict.fromkeys(members))
    last = len(members[0]) - 1
    for head in range(len(members[0][last])):
        if len(result) == len(members):
            break
        row = members[0][last].clone()
        row[head] ^= True
        mask = members[0].with_layer(last, row)
        if bool(row.any()) and mask not in result:
            result.append(mask)
    return result
