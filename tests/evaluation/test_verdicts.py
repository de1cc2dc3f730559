"""Intervals hold their figure, draws are counted, and only what can be told apart is called so."""

from __future__ import annotations

import pytest
import torch

from hydra_ensembles.evaluation import Results, compare, compare_table, evaluate
from hydra_ensembles.evaluation.figures import AllFigures
from hydra_ensembles.evaluation.intervals import (
    AT_ONCE,
    FEWEST,
    WORK,
    default_draws,
    resamples,
    span,
    verdict_of,
    winners,
)


def drawn(seed: int, examples: int = 300, classes: int = 5, members: int = 1):
    """Draw logits and labels that follow their probabilities: a calibrated model."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(examples, 1, classes, generator=generator)
    labels = torch.multinomial(logits[:, 0].softmax(-1), 1, generator=generator)[:, 0]
    return logits + 0.3 * torch.randn(examples, members, classes, generator=generator), labels


def measured(logits, labels, name="model", **options):
    return evaluate(lambda x: x, [(logits, labels)], progress=False, name=name, **options)


def test_the_interval_of_a_calibration_error_holds_it():
    missed = 0
    for seed in range(12):
        logits, labels = drawn(seed)
        found = measured(logits, labels, bootstrap=200)
        for key, value in found.items():
            low, high = found.interval(key)
            assert low <= value <= high, (seed, key)
        # the percentiles of the draws, which were the interval, lie above the figure
        draws = next(iter(found.draws.values()))["cal/ECE"]
        missed += float(draws.quantile(0.025)) > found["cal/ECE"]
        assert found.interval("cal/ECE")[0] >= 0
    assert missed >= 2


def test_the_bias_of_a_calibration_error_is_taken_off():
    draws = torch.linspace(0.010, 0.029, 201, dtype=torch.float64)  # of a figure of 0.0096
    low, high = span("cal/ECE", 0.0096, draws)
    assert low < 0.0096 < high < 0.02
    assert span("cls/NLL", 0.02, draws) == pytest.approx((0.010475, 0.028525))
    assert span("cls/NLL", 0.0096, draws)[0] == 0.0096


def test_a_loss_without_bound_tells_nothing():
    draws = torch.linspace(0, 1, 101, dtype=torch.float64)
    draws[90:] = torch.inf
    low, high = span("cls/NLL", 0.5, draws)
    assert low == pytest.approx(0.025) and high == torch.inf
    assert verdict_of("cls/NLL", -torch.inf, torch.inf) == "inconclusive"


@pytest.mark.parametrize("decimals", [1, 6])
def test_counts_are_repeated_examples(decimals):
    """Every figure of counts is the figure of data in which examples are repeated, ties too."""
    logits, labels = drawn(3, examples=80, members=3)
    logits = logits.round(decimals=decimals)
    odd = torch.randn(50, 3, 5, generator=torch.Generator().manual_seed(4)).round(decimals=decimals)
    options = {"ood": {"odd": [(odd,)]}, "score": ["msp", "energy"], "bootstrap": 0}
    figures = measured(logits, labels, temperature=2.0, **options)
    counted = AllFigures(figures.examples, scores=["msp", "energy"])
    counts = next(resamples(counted.sizes, count=6, seed=0))
    found = counted.of(counts)
    assert found.keys() == figures.figures.keys()
    for number in range(6):
        rows = {name: c[number].long() for name, c in counts.items()}
        again = rows["id"].nonzero().flatten().repeat_interleave(rows["id"][rows["id"] > 0])
        outside = torch.arange(50).repeat_interleave(rows["ood/odd"])
        options["ood"] = {"odd": [(odd[outside],)]}
        plain = measured(logits[again], labels[again], temperature=2.0, **options)
        assert {key: float(found[key][number]) for key in plain} == pytest.approx(
            plain.figures, abs=1e-9
        )


def test_draws_are_bounded_by_the_size_of_the_data():
    assert default_draws({"id": 50_000}, ["msp"]) == 1000
    large = {"id": 50_000, "ood/a": 50_000, "ood/b": 10_000}
    scores = ["msp", "energy", "novelty"]
    draws = default_draws(large, scores)
    assert FEWEST <= draws < 1000 and draws * sum(large.values()) * len(scores) <= WORK
    assert default_draws({"id": 10**7}, ["msp"]) == FEWEST
    parts = [part["id"] for part in resamples({"id": 50_000}, count=7, seed=0)]
    assert sum(map(len, parts)) == 7 and all(part.numel() <= AT_ONCE for part in parts)
    assert all(bool((part.sum(1) == 50_000).all()) for part in parts)


def test_intervals_are_there_by_default_and_can_be_turned_off():
    pytest.importorskip("pandas")
    logits, labels = drawn(0)
    found = measured(logits, labels)
    assert found.settings["bootstrap"] == 1000
    frame = found.to_pandas().set_index("figure")
    assert (frame["low"] <= frame["value"]).all() and (frame["value"] <= frame["high"]).all()
    without = measured(logits, labels, bootstrap=0)
    assert without.intervals == {} and without.figures == found.figures
    assert without.to_pandas()["low"].isna().all()


def test_a_tie_cannot_be_told():
    logits, labels = drawn(0)
    sharper = measured(1.02 * logits, labels, name="sharper")
    plain = measured(logits, labels, name="plain")
    other = measured(logits + 0.2 * drawn(1)[0], labels, name="other")
    wrong = measured(logits.flip(-1), labels, name="wrong")
    found = compare(other, plain)
    assert found["cls/Acc"].low < 0 < found["cls/Acc"].high
    assert found["cls/Acc"].verdict == "inconclusive"
    assert compare(sharper, plain)["cls/Acc"].verdict == "the same"  # no answer differs
    assert compare(plain, wrong)["cls/NLL"].verdict == "better"
    assert compare(wrong, plain)["cls/NLL"].verdict == "worse"
    assert compare(wrong, plain)["div/MI"].verdict == ""
    assert verdict_of("cls/NLL", -0.2, 0.0) == "inconclusive"
    words = {"cls/NLL": "NLL", "cls/Acc": "accuracy", "cls/Brier": "Brier", "x": "nothing"}
    assert found.in_words(words, "300 texts").endswith("accuracy inconclusive on 300 texts")
    assert compare(plain, wrong).in_words(words, "300") == "NLL, accuracy and Brier better"


def test_bold_is_what_the_paired_intervals_tell():
    logits, labels = drawn(0)
    plain = measured(logits, labels, name="plain")
    near = measured(logits + 0.2 * drawn(1)[0], labels, name="near")
    wrong = measured(logits.flip(-1), labels, name="wrong")
    assert winners([plain, wrong])["cls/NLL"] == 0
    assert compare_table([plain, wrong], keys=["cls/NLL"]).count("**") == 2
    # of two that cannot be told apart neither is bold, whichever figure is lower
    assert "cls/Acc" not in winners([plain, near, wrong])
    assert "**" not in compare_table([plain, near, wrong], keys=["cls/Acc"])
    # without examples or draws nothing can be told
    assert winners([plain, Results.from_json(wrong.to_json())]) == {}
    assert winners([plain, measured(logits.flip(-1), labels, bootstrap=0)]) == {}


def test_means_over_other_sets_are_not_compared():
    logits, labels = drawn(0)
    odd = [(logits.flip(0) / 2,)]
    both = measured(logits, labels, ood={"a": odd, "b": [(2 * logits,)]})
    one = measured(logits / 2, labels, ood={"a": odd})
    found = compare(both, one)
    assert "ood/a/AUROC" in found and "ood/mean/AUROC" not in found
