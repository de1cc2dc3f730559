"""Wrong arguments: each is refused at the door, by its name, without an error of torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import hydra_ensembles as hydra
from hydra_ensembles.errors import HydraError
from tests import zoo


class Things(NamedTuple):
    """What the calls are made of."""

    model: Any
    other: Any
    data: list[dict[str, torch.Tensor]]
    ensemble: hydra.HydraEnsemble
    folder: Path


@pytest.fixture(scope="module")
def things(tmp_path_factory: pytest.TempPathFactory) -> Things:
    model, other = zoo._bert(num_labels=3).eval(), zoo._vit().eval()
    ids = torch.randint(2, 90, (48, 6), generator=torch.Generator().manual_seed(0))
    labels = torch.arange(48) % 3
    data = [
        {"input_ids": ids[i : i + 8], "attention_mask": torch.ones(8, 6).long(),
         "labels": labels[i : i + 8]}
        for i in range(0, 48, 8)
    ]  # fmt: skip
    ensemble = hydra.fuse(model, [hydra.HeadMask.full(model)] * 2)
    ensemble.fit_novelty_(data, choose=False, progress=False)
    hydra.cost(model, data[0])  # what is imported or probed once is not timed
    return Things(model, other, data, ensemble, tmp_path_factory.mktemp("arguments"))


def build(t: Things, **options: Any) -> Any:
    return hydra.build(t.model, t.data, **{"novelty": False, "progress": False, **options})


def relabelled(t: Things, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return [{**batch, "labels": change(batch["labels"])} for batch in t.data]


def quiet(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    return function(*arguments, progress=False, **options)


CASES: dict[str, tuple[Callable[[Things], Any], str]] = {
    # what cannot work
    "members=0": (lambda t: build(t, members=0), "members=0.*1 or more"),
    "members in words": (lambda t: build(t, members="three"), "members='three'.*whole number"),
    "members=2.5": (lambda t: build(t, members=2.5), "whole number"),
    "max_cost in words": (lambda t: build(t, max_cost="cheap"), "max_cost='cheap'"),
    "a negative max_cost": (lambda t: build(t, max_cost=-1), "above 0"),
    "select cannot meet": (lambda t: build(t, method="select", max_cost=0.1), "they cost .* x"),
    "circuit cannot meet": (lambda t: build(t, method="circuit", max_cost=0.1), "they cost .* x"),
    "parts cannot meet": (lambda t: build(t, method="parts", max_cost=0.1), "cost .* x, more"),
    "prune cannot meet": (lambda t: quiet(hydra.prune, t.model, t.data, max_cost=0.01), "costs"),
    "labels outside": (
        lambda t: quiet(hydra.build, t.model, relabelled(t, lambda y: y + 2)), "Label [34].*3 cla",
    ),
    "labels between": (
        lambda t: quiet(hydra.build, t.model, relabelled(t, lambda y: y + 0.5)), "whole class",
    ),
    "no labels": (
        lambda t: quiet(hydra.build, t.model, [{"input_ids": b["input_ids"]} for b in t.data]),
        "no labels",
    ),
    "an ensemble as a host": (lambda t: quiet(hydra.build, t.ensemble, t.data), "already"),
    # names, with near ones
    "method": (lambda t: build(t, method="cirquit"), "Did you mean 'circuit'"),
    "score": (lambda t: build(t, score="mps"), "Did you mean 'msp'"),
    "score of evaluate": (
        lambda t: quiet(hydra.evaluate, t.model, t.data, score="mps"), "mean 'msp'",
    ),
    "criterion": (
        lambda t: quiet(hydra.score_heads, t.model, t.data, criterion="tailor"), "mean 'taylor'",
    ),
    "criterion of prune": (
        lambda t: quiet(hydra.prune, t.model, t.data, criterion="enrgy"), "mean 'energy'",
    ),
    "objective": (
        lambda t: quiet(hydra.find_circuit, t.model, id=t.data, objective="id-los"), "'id-loss'",
    ),
    "task": (lambda t: build(t, task="regresion"), "regression"),
    "engine": (lambda t: hydra.fuse(t.model, None, engine="fast"), "Unknown engine 'fast'"),
    "how": (lambda t: quiet(hydra.make_teachers, t.model, t.data, how="lara"), "'lora'"),
    # swapped, or of another kind
    "build, swapped": (lambda t: quiet(hydra.build, t.data, t.model), "first the model"),
    "score_heads, swapped": (lambda t: quiet(hydra.score_heads, t.data, t.model), "first the mod"),
    "evaluate, swapped": (lambda t: quiet(hydra.evaluate, t.data, t.model), "first the model"),
    "finetune, swapped": (lambda t: quiet(hydra.finetune, t.data, t.model), "first the model"),
    "distill, swapped": (lambda t: quiet(hydra.distill, t.model, t.data, [t.model]), "."),
    "cost, swapped": (lambda t: hydra.cost(t.data[0], t.model), "."),
    "a name for a model": (lambda t: quiet(hydra.build, "bert", t.data), "from_pretrained"),
    "a list of models": (lambda t: quiet(hydra.build, [t.model], t.data), "found a list"),
    "a model as outliers": (lambda t: build(t, ood=t.model), "another argument"),
    "a number as validation": (lambda t: build(t, validation=0.2), "validation data"),
    "a name as seed": (lambda t: build(t, seed="x"), "seed='x'"),
    "a name as bootstrap": (
        lambda t: quiet(hydra.evaluate, t.model, t.data, bootstrap="many"), "bootstrap='many'",
    ),
    "a name as epochs": (
        lambda t: quiet(hydra.finetune, t.model, t.data, epochs="x"), "epochs is 'x'",
    ),
    "masks of another model": (
        lambda t: hydra.fuse(t.model, [hydra.HeadMask([[1, 1], [1, 1]])]), "layers",
    ),
    "gates of another model": (
        lambda t: hydra.gate(t.model, hydra.HeadMask([[1, 1], [1, 1]])).__enter__(), "layers",
    ),
    "masks in words": (lambda t: hydra.fuse(t.model, "masks"), "one HeadMask per member"),
    "one mask": (lambda t: hydra.fuse(t.model, hydra.HeadMask.full(t.model)), "list with one"),
    "a mask in words": (lambda t: hydra.HeadMask("x"), "list of numbers"),
    "a mask of a number": (lambda t: hydra.HeadMask.full(3), "found 3"),
    "members of two kinds": (lambda t: hydra.fuse([t.model, t.other]), "."),
    "a layer that is not there": (
        lambda t: quiet(hydra.find_circuit, t.model, id=t.data, layers=[9]), "layers 0 to 2",
    ),
    "fold of data": (lambda t: quiet(hydra.fold, t.data, [t.model]), "."),
    "verify of a host": (lambda t: hydra.verify(t.model, t.data[0]), "HydraEnsemble"),
    "verify on data": (lambda t: hydra.verify(t.ensemble, t.data), "."),
    "benchmark of a model": (lambda t: quiet(hydra.benchmark, t.model, t.data[0]), "by name"),
    "a risk in words": (lambda t: quiet(hydra.fit_policy, t.ensemble, t.data, risk="low"), "risk"),
    "a method of policies": (
        lambda t: quiet(hydra.fit_policy, t.ensemble, t.data, method="conform"), "'conformal'",
    ),
    "a record of nothing": (lambda t: hydra.replay(t.model, 3), "ensemble.record"),
    "results of nothing": (lambda t: hydra.compare(1, 2), "Expected results"),
    "a member by name": (lambda t: t.ensemble.member("a"), "whole number"),
    # inputs
    "no input": (lambda t: t.ensemble.predict(None), "Expected one batch.*NoneType"),
    "tokens beyond the vocabulary": (
        lambda t: t.ensemble.predict({"input_ids": torch.full((1, 3), 9999)}), "failed on its inp",
    ),
    "one text without an axis": (
        lambda t: t.ensemble.predict({"input_ids": torch.tensor([3, 4])}), "failed on its inputs",
    ),
    "images for texts": (
        lambda t: t.ensemble.predict({"pixel_values": torch.zeros(1, 3, 16, 16)}), "BertFor",
    ),
    "texts for images": (
        lambda t: hydra.evaluate(t.other, t.data, progress=False), "failed on",
    ),
    # places
    "a folder of None": (lambda t: t.ensemble.save_pretrained(None), "path of a folder"),
    "a folder in a file": (
        lambda t: t.ensemble.save_pretrained(Path(__file__) / "x"), "."
    ),
    "nothing there": (lambda t: hydra.load(t.folder / "nowhere"), "No folder"),
    "load of None": (lambda t: hydra.load(None), "path of a folder"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_refused_within_a_second(case: str, things: Things) -> None:
    call, words = CASES[case]
    start = time.process_time()
    with pytest.raises(HydraError, match=f"(?s){words}"):
        call(things)
    assert time.process_time() - start < 1
