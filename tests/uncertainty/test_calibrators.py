"""Calibrators: their fits, what they leave alone, and that only a clear gain is taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hydra_ensembles as hydra
from hydra_ensembles.errors import FormatError, HydraError
from hydra_ensembles.evaluation.cross_fit import cross_fit, fit_answer
from hydra_ensembles.tasks import as_task
from hydra_ensembles.uncertainty import as_calibrator, mean_probability, nll_of
from hydra_ensembles.uncertainty.calibrator_fit import (
    SCALE,
    SHIFT,
    fit_isotonic,
    fit_scale_shift,
    fit_variance,
    gaussian_nll,
)
from hydra_ensembles.uncertainty.calibrators import (
    RAW,
    PlattScaling,
    TopLabel,
    Variance,
    VectorScaling,
)
from tests import zoo
from tests.fusion.test_fusion import EARLY

CLASSES, LABELS, NUMBERS = (as_task(n) for n in ("multi-class", "multi-label", "regression"))


def classes(size: int, *, seed: int = 0, shift: float = 0.0, members: int = 3):
    """Members around one truth; the first class's logit is raised by `shift` in all of them."""
    generator = torch.Generator().manual_seed(seed)
    z = 1.5 * torch.randn(size, 1, 4, generator=generator)
    labels = torch.multinomial(z[:, 0].softmax(-1), 1, generator=generator)[:, 0]
    z = z + 0.3 * torch.randn(size, members, 4, generator=generator)
    return z + shift * torch.tensor([1.0, 0, 0, 0]), labels


def several(size: int, *, seed: int = 0, shift: float = 0.0):
    generator = torch.Generator().manual_seed(seed)
    z = 1.5 * torch.randn(size, 1, 3, generator=generator)
    labels = (torch.rand(size, 3, generator=generator) < z[:, 0].sigmoid()).float()
    z = z + 0.3 * torch.randn(size, 2, 3, generator=generator)
    return z + shift * torch.tensor([1.0, 0, -1.0]), labels


def numbers(size: int, *, seed: int = 0, follows: float = 1.0):
    """Members' numbers whose error has the variance `follows` * spread^2 + 0.04."""
    generator = torch.Generator().manual_seed(seed)
    wide = 0.1 + 2 * torch.rand(size, 1, 1, generator=generator)
    members = torch.randn(size, 1, 2, generator=generator) + wide * torch.randn(
        size, 4, 2, generator=generator
    )
    sigma = (follows * members.var(1, correction=0) + 0.04).sqrt()
    return members, members.mean(1) + sigma * torch.randn(size, 2, generator=generator)


@pytest.mark.parametrize("made", [classes, several])
def test_scaling_is_at_the_minimum_that_scipy_finds(made: Any) -> None:
    from scipy.optimize import minimize

    logits, labels = made(150, shift=1.0)
    found = fit_scale_shift(logits, labels)
    assert type(found) is (VectorScaling if labels.ndim == 1 else PlattScaling)
    each, width = (1, 4) if labels.ndim == 1 else (3, 3)

    def loss(values: Any) -> float:
        a, b = torch.tensor(values).reshape(2, width)
        held = float((a**2).sum() / SCALE**2 + (b**2).sum() / SHIFT**2) / 2
        return each * float(nll_of(logits.double() * a.exp() + b, labels).sum()) + held

    ours = torch.tensor([found.scale, found.shift]).double()
    ours[0] = ours[0].log()
    best = minimize(loss, [0.0] * 2 * width, tol=1e-10)
    assert loss(ours.flatten().numpy()) == pytest.approx(best.fun, abs=1e-4)
    torch.testing.assert_close(ours.flatten(), torch.tensor(best.x), atol=5e-3, rtol=0)


def test_isotonic_regression_is_that_of_scikit_learn() -> None:
    isotonic = pytest.importorskip("sklearn.isotonic")
    logits, labels = classes(120, shift=1.5, seed=1)
    confidence, predicted = mean_probability(logits).double().max(-1)
    order = confidence.argsort(stable=True)
    x, y = confidence[order].numpy(), (predicted == labels)[order].double().numpy()
    steps = torch.from_numpy(isotonic.IsotonicRegression().fit_transform(x, y))
    values, count = steps.unique_consecutive(return_counts=True)
    assert len(values) <= 16
    points = torch.stack([part.mean() for part in confidence[order].split(count.tolist())])
    found = fit_isotonic(logits, labels)
    assert isinstance(found, TopLabel)
    torch.testing.assert_close(torch.tensor(found.confidence).double(), points, atol=1e-6, rtol=0)
    kept = ((values * count + points) / (count + 1)).cummax(0).values
    torch.testing.assert_close(torch.tensor(found.accuracy).double(), kept, atol=1e-6, rtol=0)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    members=st.integers(1, 4),
    count=st.integers(2, 6),
    levels=st.lists(st.floats(0.02, 0.98), min_size=4, max_size=4),
)
def test_isotonic_changes_the_top_class_and_rescales_the_others(
    seed: int, members: int, count: int, levels: list[float]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(9, members, count, generator=generator, dtype=torch.float64)
    found = TopLabel((0.3, 0.5, 0.8, 0.99), tuple(sorted(levels)))
    before, changed = mean_probability(logits), found(logits)
    after = mean_probability(changed)
    assert torch.equal(after.argmax(-1), before.argmax(-1))
    torch.testing.assert_close(changed.logsumexp(-1), logits.logsumexp(-1))
    top = before.argmax(-1, keepdim=True)
    asked = found.accuracy_at(before.gather(-1, top))
    rest = before.scatter(-1, top, 0.0)
    share = rest / rest.sum(-1, keepdim=True)
    least = share.amax(-1, keepdim=True)
    expected = torch.maximum(asked, 1.0001 * least / (1 + least))
    torch.testing.assert_close(after.gather(-1, top), expected)
    torch.testing.assert_close(after.scatter(-1, top, 0.0), share * (1 - expected))
    assert RAW > 0  # more confident stays more confident: examples never tie
    order = before.amax(-1).argsort()
    assert bool((found.accuracy_at(before.amax(-1)[order]).diff() > 0).all())


def test_variances_are_those_of_the_errors() -> None:
    from scipy.stats import norm

    members, targets = numbers(4000, follows=2.0)
    found = fit_variance(members, targets)
    assert found.spread == pytest.approx((2.0, 2.0), rel=0.15)
    assert found.residual == pytest.approx((0.04, 0.04), rel=0.3)
    flat = fit_variance(members, targets, spread=False)
    error = (targets - members.mean(1)).double()
    assert flat.spread == (0.0, 0.0)
    assert flat.residual == pytest.approx(error.square().mean(0).tolist(), rel=1e-6)
    sigma = found(members.double())
    ours = gaussian_nll(members.double().mean(1), sigma, targets)
    expected = -norm.logpdf(targets.double(), members.double().mean(1), sigma).mean(1)
    torch.testing.assert_close(ours, torch.from_numpy(expected), atol=1e-6, rtol=1e-6)
    assert float(ours.mean()) < float(
        gaussian_nll(members.double().mean(1), flat(members.double()), targets).mean()
    )
    one = fit_variance(members[:, :1], targets)
    assert one.spread == (0.0, 0.0) and min(one.residual) > 0


def test_only_a_clear_gain_is_taken() -> None:
    logits, labels = classes(400, shift=2.0)
    chosen, record = fit_answer(CLASSES, logits, labels)
    assert isinstance(chosen.calibrator, VectorScaling) and record["way"] == "vector"
    assert chosen.calibrator.shift[0] < min(chosen.calibrator.shift[1:])
    assert record["why"].startswith("Vector scaling: on 400 examples out of fold")
    logits, labels = classes(400, seed=3)
    chosen, record = fit_answer(CLASSES, logits, labels)
    assert chosen.calibrator is None and record["why"].startswith("Temperatures only")
    chosen, record = fit_answer(CLASSES, *classes(60, shift=2.0))
    assert chosen.calibrator is None and "why" not in record
    outputs, given = several(400, shift=2.0)
    chosen, record = fit_answer(LABELS, outputs, given)
    assert isinstance(chosen.calibrator, PlattScaling) and chosen.temperature is not None
    members, targets = numbers(400, follows=2.0)
    chosen, record = fit_answer(NUMBERS, members, targets)
    assert isinstance(chosen.calibrator, Variance) and min(chosen.calibrator.spread) > 0
    members, targets = numbers(400, follows=0.0)
    chosen, record = fit_answer(NUMBERS, members, targets)
    assert chosen.calibrator is not None and chosen.calibrator.spread == (0.0, 0.0)
    assert record["why"].startswith("One variance")
    chosen, record = fit_answer(NUMBERS, members[:10], targets[:10])
    assert chosen.calibrator is None and "too few" in record["why"]
    with pytest.raises(HydraError, match="one of auto, none, variance"):
        fit_answer(NUMBERS, members, targets, kind="isotonic")


@pytest.mark.parametrize("shift", [0.0, 0.7, 2.0])
@pytest.mark.parametrize("made", [classes, several])
def test_it_is_never_worse_than_none(made: Any, shift: float) -> None:
    for seed in range(3):
        logits, labels = made(160, shift=shift, seed=seed)
        held_out = torch.arange(160) >= 60
        task = CLASSES if labels.ndim == 1 else LABELS
        found, judged = cross_fit(
            logits,
            labels,
            logits[:, :1],
            held_out=held_out,
            calibrators=task.calibrators,
            seed=seed,
        )
        for before, after in found["figures"]["ensemble"].values():
            assert after <= before
        gain = nll_of(judged[held_out], labels[held_out]).mean()
        assert float(gain) == pytest.approx(found["figures"]["ensemble"]["NLL"][1], abs=1e-6)
        assert "why" in found["figures"]


def test_damaged_records_are_refused() -> None:
    found = TopLabel((0.2, 0.9), (0.3, 0.8))
    assert as_calibrator(found.to_dict()) == found
    for change in ({"accuracy": [0.8, 0.3]}, {"accuracy": [0.1]}, {"confidence": [0.2, 1.9]}):
        with pytest.raises(FormatError):
            as_calibrator({**found.to_dict(), **change})
    with pytest.raises(FormatError):
        as_calibrator({"name": "vector", "scale": [1.0, -1.0], "shift": [0.0, 0.0]})
    with pytest.raises(HydraError):
        as_calibrator({"name": "other"})


def test_an_ensemble_keeps_its_calibrator(tmp_path: Path) -> None:
    ensemble = hydra.fuse(zoo.host("bert"), EARLY)
    batch = zoo.batch("bert", size=6)
    plain = ensemble.predict(batch)
    for calibrator in (
        VectorScaling((0.5, 1.0, 1.5, 1.2, 0.8), (1.0, 0.0, -1.0, 0.5, 0.0)),
        TopLabel((0.2, 0.3), (0.5, 0.7)),
    ):
        ensemble.temperature, ensemble.calibrator = 0.5, calibrator
        answer = ensemble.predict(batch)
        assert not torch.allclose(answer.probabilities, plain.probabilities, atol=1e-2)
        torch.testing.assert_close(
            answer.probabilities, mean_probability(calibrator(ensemble.member_logits(batch) / 0.5))
        )
        with torch.no_grad():
            forward = ensemble(**batch).logits.softmax(-1)
        torch.testing.assert_close(forward, answer.probabilities)
        ensemble.save_pretrained(tmp_path / calibrator.name)
        loaded = hydra.HydraEnsemble.from_pretrained(tmp_path / calibrator.name)
        assert loaded.calibrator == calibrator
        assert torch.equal(loaded.predict(batch).probabilities, answer.probabilities)
        labels = torch.arange(6) % 5
        figures = hydra.evaluate(ensemble, [{**batch, "labels": labels}], bootstrap=0)
        expected = -answer.probabilities[torch.arange(6), labels].log().mean()
        assert figures["cls/NLL"] == pytest.approx(float(expected), abs=1e-5)
        assert hydra.evaluate(loaded, [{**batch, "labels": labels}], bootstrap=0) == figures
    with pytest.raises(HydraError, match="takes no calibrator"):
        ensemble.calibrator = Variance((1.0,), (1.0,))


def test_exported_programs_have_it_too(tmp_path: Path) -> None:
    from hydra_ensembles import runtime

    pytest.importorskip("onnxruntime")
    ensemble = hydra.fuse(zoo.host("vit"), EARLY)
    images = zoo.batch("vit", size=5)
    ensemble.calibrator = TopLabel((0.2, 0.22, 0.3), (0.1, 0.5, 0.7))
    ensemble.export(tmp_path, example=images)
    said = runtime.load(tmp_path, threads=1).predict(images.numpy())
    expected = ensemble.predict(images)
    assert abs(said.probabilities - expected.probabilities.numpy()).max() < 1e-5
    assert abs(said.uncertainty - expected.uncertainty.numpy()).max() < 1e-5


def test_labels_and_numbers_are_calibrated_by_build_and_on_their_own() -> None:
    from tests.tasks.test_task_methods import data
    from tests.tasks.test_tasks import host, inputs

    ensemble = hydra.build(
        host("numbers"), data("numbers"), method="random", members=2, max_cost=2.0, progress=False
    )
    answer = ensemble.predict(inputs("numbers"))
    assert answer.sigma.shape == (4, 3) and bool((answer.sigma > 0).all())
    assert len(answer.rows()[0]["sigma"]) == 3 and "variance" in str(ensemble)
    figures = hydra.evaluate(ensemble, data("numbers"), bootstrap=0, progress=False)
    found = [ensemble.predict(batch) for batch in data("numbers")]
    given = torch.cat([batch["labels"] for batch in data("numbers")])
    values, sigma = (torch.cat([getattr(a, name) for a in found]) for name in ("values", "sigma"))
    expected = float(gaussian_nll(values, sigma, given).mean())
    assert figures["reg/NLL"] == pytest.approx(expected, abs=1e-5)
    assert 0 <= figures["reg/Coverage"] <= 1 and figures["reg/CRPS"] > 0
    labels = hydra.fuse(host("labels"), EARLY)
    held_out = data("labels", count=10)
    before = hydra.evaluate(labels, held_out, bootstrap=0, progress=False)["cls/NLL"]
    chosen = hydra.fit_calibrator(labels, held_out, kind="platt", progress=False)
    assert labels.calibrator == chosen.calibrator and labels.record["calibration"]["calibrator"]
    assert hydra.evaluate(labels, held_out, bootstrap=0, progress=False)["cls/NLL"] < before
    hydra.fit_calibrator(labels, held_out, kind="none", progress=False)
    assert labels.temperature is None and labels.calibrator is None
