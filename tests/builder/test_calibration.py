"""What `build` fits: cross-fitted, reported on held-out examples, refused when it would harm."""

from __future__ import annotations

import re

import pytest
import torch

from hydra_ensembles import build
from hydra_ensembles.evaluation.cross_fit import cross_fit, folds_of
from hydra_ensembles.uncertainty import log_mean_probability, mean_probability, scale_logits

from .. import zoo
from .test_building import pictures


def sharp(size: int, members: int = 3, factor: float = 3.0, seed: int = 0):
    """Members around one truth, all too sure by `factor`."""
    generator = torch.Generator().manual_seed(seed)
    z = 1.5 * torch.randn(size, 1, 4, generator=generator)
    labels = torch.multinomial(z[:, 0].softmax(-1), 1, generator=generator)[:, 0]
    each = z + 0.3 * torch.randn(size, members, 4, generator=generator)
    return factor * each, labels, factor * z


def fit_temperatures(*columns: torch.Tensor, **options: torch.Tensor):
    return cross_fit(*columns, **options)[0]


def nll(logits: torch.Tensor, labels: torch.Tensor) -> float:
    return float(-log_mean_probability(logits).gather(-1, labels[:, None]).mean())


def test_too_sure_members_are_calibrated_and_it_shows():
    logits, labels, host = sharp(200)
    found = fit_temperatures(logits, labels, host)
    report = found["figures"]
    assert report["way"] != "none" and report["examples"] == 200 and "note" not in report
    for who in ("ensemble", "host"):
        for figure in ("NLL", "ECE"):
            before, after = report[who][figure]
            assert after < before
    assert report["ensemble"]["NLL"][0] == pytest.approx(nll(logits, labels), rel=1e-5)
    scaled = scale_logits(
        logits,
        temperature=found["temperature"],
        member_temperatures=found["member_temperatures"],
    )
    # the figure is out of fold, so it is a little worse than the fit on its own examples
    assert nll(scaled, labels) < report["ensemble"]["NLL"][1] < nll(logits, labels)


def test_examples_that_nothing_is_fitted_on_are_judged_by_all_that_is():
    logits, labels, host = sharp(200)
    fitted = torch.arange(200) < 150
    found, judged = cross_fit(logits, labels, host, held_out=~fitted, fitted=fitted)
    alone = fit_temperatures(logits[fitted], labels[fitted], host[fitted])
    assert found["figures"]["fitted_on"] == 150 and found["figures"]["examples"] == 50
    scaled = scale_logits(
        logits,
        temperature=found["temperature"],
        member_temperatures=found["member_temperatures"],
    )
    assert torch.equal(judged[~fitted], scaled[~fitted])
    assert not torch.equal(judged[fitted], scaled[fitted])  # out of fold
    if alone["figures"]["way"] == found["figures"]["way"]:
        assert alone["temperature"] == pytest.approx(found["temperature"], rel=1e-3)


def test_what_would_harm_is_refused_and_said():
    logits, labels, host = sharp(60, factor=1.0, seed=3)
    found = fit_temperatures(logits, labels, host)
    report = found["figures"]
    assert found["temperature"] == 1.0 and found["member_temperatures"] == [1.0] * 3
    assert report["way"] == "none" and "stay" in report["note"]
    assert report["ensemble"]["NLL"][0] == report["ensemble"]["NLL"][1]


def test_what_is_refused_would_not_improve_the_figures_that_the_note_quotes():
    refused = 0
    for seed in range(8):
        logits, labels, host = sharp(60, factor=1.2, seed=seed)
        held_out = torch.arange(60) >= 36
        report = fit_temperatures(logits, labels, host, held_out=held_out)["figures"]
        quoted = re.findall(r"NLL ([\d.]+), ECE ([\d.]+) %", report.get("note", ""))
        if report["way"] == "none" and quoted:
            refused += 1
            (nll_as_it_is, ece_as_it_is), *tried = [(float(a), float(b)) for a, b in quoted]
            for nll_then, ece_then in tried:
                assert nll_then >= nll_as_it_is or ece_then >= ece_as_it_is
    assert refused > 1


def test_all_right_and_tiny_sets_are_safe():
    logits, labels, host = sharp(40)
    for rows, right in ((slice(0, 40), True), (slice(0, 4), False), (slice(0, 1), False)):
        target = mean_probability(logits[rows]).argmax(-1) if right else labels[rows]
        found = fit_temperatures(logits[rows], target, host[rows])
        assert found["temperature"] == 1.0 and found["figures"]["note"]


def test_figures_are_of_the_examples_that_did_not_select():
    logits, labels, host = sharp(100)
    held_out = torch.arange(100) >= 60
    report = fit_temperatures(logits, labels, host, held_out=held_out)["figures"]
    assert (report["examples"], report["fitted_on"]) == (40, 100)
    assert report["ensemble"]["NLL"][0] == pytest.approx(nll(logits[60:], labels[60:]), rel=1e-5)


def test_folds_hold_every_example_once():
    labels = torch.arange(23) % 3
    folds = folds_of(labels, torch.ones_like(labels, dtype=torch.bool), seed=0)
    assert sorted(torch.cat(folds).tolist()) == list(range(23))
    assert max(map(len, folds)) - min(map(len, folds)) <= 1


def test_build_reports_host_and_ensemble_before_and_after():
    model = zoo.sharp("timm")
    with torch.no_grad():  # a host that is far too sure
        model.head.weight.mul_(30.0)
    ensemble = build(model, pictures(), method="random", max_cost=None, score="msp", progress=False)
    report = ensemble.record["calibration"]["figures"]
    assert report["examples"] == 24 and report["fitted_on"] == 60
    assert report["ensemble"]["NLL"][1] < report["ensemble"]["NLL"][0]
    assert ensemble.temperature * max(ensemble.member_temperatures) > 1.5
    text = str(ensemble)
    assert f"ensemble NLL {report['ensemble']['NLL'][0]:.3f} ->" in text
    assert "host NLL" in text and "24 held-out examples" in text
    assert not ensemble.training and type(ensemble).__name__ == "HydraEnsemble"
