"""A try judges every example by what was learnt without it, with labels and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hydra_ensembles.builder.trial import Trial, try_model
from hydra_ensembles.builder.trial_answers import with_labels
from hydra_ensembles.data import digits
from hydra_ensembles.data.batches import labels_of, take
from hydra_ensembles.data.loaders import Batches
from hydra_ensembles.errors import DataError
from hydra_ensembles.fusion.known_data import summaries_of
from hydra_ensembles.hosts.tiny_vit import TinyViT, TinyViTConfig
from hydra_ensembles.report.trial_page import at_a_glance, verdict

from .. import zoo

CONFIG = TinyViTConfig(width=24, heads=4, layers=3, mlp_width=24)
STRANGE = (3, 50, 77)


def data(count: int = 120, *, labels: bool = True) -> Batches:
    """Test digits, three of them replaced by noise."""
    found = digits(16, seed=0)
    batch = next(iter(found.test.subset(range(count), batch_size=count)))
    noise = next(iter(found.ood["noise"].subset(range(3), batch_size=3)))
    pixels = batch["pixel_values"].clone()
    strange = [row for row in STRANGE if row < count]
    pixels[strange] = noise["pixel_values"][: len(strange)]
    whole = {"pixel_values": pixels, "labels": batch["labels"]}
    if not labels:
        del whole["labels"]
    known = batch["labels"] if labels else None
    return Batches(lambda rows: take(whole, rows), range(count), labels=known)


def host() -> TinyViT:
    return TinyViT(CONFIG, seed=1).eval()


@pytest.fixture(scope="module")
def trial() -> Trial:
    return try_model(host(), data(), max_cost=1.5, risk=0.9, progress=False)


def test_terms_that_join_are_checked_on_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    zoo.any_longer_sum(monkeypatch)
    graphs: list[bool] = []

    def read(*arguments: Any, **options: Any) -> Any:
        for found in summaries_of(*arguments, **options):
            graphs.append(found["summaries"].requires_grad)
            yield found

    monkeypatch.setattr("hydra_ensembles.builder.trial.summaries_of", read)
    trial = try_model(host(), data(), members=1, risk=0.9, progress=False)
    assert graphs and not any(graphs)  # a graph would keep the activations of all proxies
    assert "checked on far outliers" in trial.ensemble.record["novelty"]


def test_the_strange_are_found_out_of_sample(trial: Trial) -> None:
    score = trial.answer.novelty_score
    assert score is not None and trial.answer.novelty is not None
    assert set(score.topk(8).indices.tolist()) >= set(STRANGE)  # the host was never trained
    assert bool((trial.answer.novelty[list(STRANGE)] > 0.9).all())
    assert bool((trial.neighbours != torch.arange(120)).all())
    # what novelty was fitted on looks less new to it: the scores shown are not those
    novelty, learnt = trial.ensemble.novelty, ~trial.decide
    inside = torch.cat(
        [trial.ensemble.predict(batch).novelty_score for batch in data()]  # type: ignore[misc]
    )
    assert novelty is not None and novelty.examples == int(learnt.sum())
    assert float(inside[learnt].mean()) < float(score[learnt].mean())


def test_the_policy_is_fitted_on_what_nothing_has_seen(trial: Trial) -> None:
    assert int(trial.decide.sum()) == 40 == trial.policy.examples
    assert bool(trial.held_out[trial.decide].all())  # chose no members
    assert int(trial.held_out.sum()) == 120 - 48  # 60 % of the 80 that learnt
    assert trial.ensemble.policy == trial.policy and trial.policy.risk == 0.9
    fresh = torch.cat([trial.ensemble.predict(b).novelty_score for b in data()])  # type: ignore[misc]
    rank = fresh[trial.decide].sort().values
    assert trial.policy.novelty_threshold == pytest.approx(float(rank[38]), rel=1e-4)
    assert trial.answer.decision is not None and set(trial.answer.decision) <= {
        "answer",
        "unsure",
        "new",
    }


def test_figures_are_those_of_held_out_examples(trial: Trial) -> None:
    plain, warm, figures = trial.results
    assert plain.name == "your model" and len(plain.examples["id"]["correct"]) == 72
    batches = data()
    with torch.no_grad():
        right = torch.cat([host()(b["pixel_values"]).argmax(-1) == labels_of(b) for b in batches])
    assert plain["cls/Acc"] == pytest.approx(float(right[trial.held_out].double().mean()))
    assert trial.calibration["examples"] == 72 and trial.calibration["fitted_on"] == 80
    assert figures["cls/NLL"] == pytest.approx(trial.calibration["ensemble"]["NLL"][1])
    assert trial.ratio.multiply_adds <= 1.5
    # the host has a temperature of its own, out of fold
    before, after = trial.calibration["host"]["NLL"]
    assert warm.name == "your model + temperature"
    assert plain["cls/NLL"] == pytest.approx(before) and warm["cls/NLL"] == pytest.approx(after)
    assert warm["cls/Acc"] == plain["cls/Acc"]


def test_the_ensemble_is_compared_with_the_host_and_its_temperature() -> None:
    """A host that is far too sure: its temperature's work is not the ensemble's."""
    sure = host()
    with torch.no_grad():
        for parameter in sure.classifier.parameters():
            parameter.mul_(20)
    trial = try_model(sure, data(), members=2, max_cost=1.5, risk=0.9, progress=False)
    plain, warm, figures = trial.results
    assert warm["cls/NLL"] < plain["cls/NLL"] - 0.1 and warm["cal/ECE"] < plain["cal/ECE"]
    tiles = {tile["label"]: tile for tile in at_a_glance(trial).content["tiles"]}
    (tile,) = (tile for label, tile in tiles.items() if label.startswith("negative"))
    assert tile["value"] == f"{warm['cls/NLL']:.4f} → {figures['cls/NLL']:.4f}"
    assert tile["verdict"] in ("inconclusive", "better", "worse")
    words = verdict(trial, "pictures")
    assert "each with a temperature" in words and "NLL" in words
    assert words.count("inconclusive on 72 pictures") == ("inconclusive" in words)


def test_without_labels_there_is_still_novelty() -> None:
    trial = try_model(host(), data(labels=False), members=2, max_cost=1.5, progress=False)
    assert trial.results == () and trial.labels is None and trial.calibration == {}
    assert trial.policy.risk is None and trial.policy.alarm == 0.05
    score = trial.answer.novelty_score
    assert score is not None and set(score.topk(8).indices.tolist()) >= set(STRANGE)
    assert trial.ensemble.temperature is None and "host's own" in trial.ensemble.record["labels"]


def test_a_risk_that_cannot_be_promised_is_said() -> None:
    trial = try_model(host(), data(), members=2, max_cost=1.5, risk=0.01, progress=False)
    assert trial.policy.risk is None and "risk of 0.01" in trial.policy_note


def test_a_stopped_try_goes_on(tmp_path: Path) -> None:
    settings = {"members": 2, "max_cost": 1.5, "progress": False, "folder": tmp_path}
    one, two = (try_model(host(), data(), **settings) for _ in range(2))  # type: ignore[arg-type]
    assert one.ensemble.masks == two.ensemble.masks and (tmp_path / "build.json").is_file()
    assert one.policy == two.policy


def test_too_few_examples_are_refused() -> None:
    with pytest.raises(DataError, match="too few"):
        try_model(host(), data(30), progress=False)


def test_labels_are_replaced() -> None:
    for source in (data(50), data(50, labels=False)):
        changed = with_labels(source, torch.arange(50))
        part = next(iter(changed.subset([7, 3], batch_size=2)))
        assert part["labels"].tolist() == [7, 3]
        assert torch.equal(
            part["pixel_values"][1], next(iter(source.subset([3])))["pixel_values"][0]
        )
