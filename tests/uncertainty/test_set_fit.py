"""Sets have the thresholds of the formulas, are those of MAPIE, and cover what they guarantee."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import betabinom

from hydra_ensembles.prediction import Prediction
from hydra_ensembles.prediction_sets import least_examples
from hydra_ensembles.tasks import as_task
from hydra_ensembles.uncertainty import choose_sets
from hydra_ensembles.uncertainty.set_fit import threshold

CLASSES = 6


def classes(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return member logits `[example, member, class]` and labels that they speak about."""
    generator = torch.Generator().manual_seed(seed)
    truth = 2.0 * torch.randn(count, CLASSES, generator=generator)
    labels = torch.multinomial(truth.softmax(-1), 1, generator=generator)[:, 0]
    noise = torch.randn(count, 3, CLASSES, generator=generator)
    return truth[:, None] + 0.7 * noise, labels


def answer(outputs: torch.Tensor, task: str = "multi-class") -> Prediction:
    kind = as_task(task)
    return kind.answer(outputs, score=kind.default_score)


# --- the formulas


@pytest.mark.parametrize("coverage", [0.5, 0.8, 0.9, 0.95, 0.99])
@pytest.mark.parametrize("count", [99, 100, 109, 250])
def test_the_threshold_is_the_conformal_quantile(coverage: float, count: int) -> None:
    scores = np.random.default_rng(count).normal(size=count)
    rank = math.ceil((count + 1) * coverage - 1e-9)
    found, examples = threshold(scores, np.arange(count), coverage)
    assert found == np.sort(scores)[rank - 1] and examples == count


@pytest.mark.parametrize("coverage", [0.5, 0.8, 0.9, 0.95, 0.99])
def test_one_example_less_is_too_few(coverage: float) -> None:
    least = least_examples(coverage)
    assert least >= 1 / (1 - coverage) - 1 - 1e-6
    scores = np.arange(float(least))
    assert threshold(scores, np.arange(least), coverage)[0] == scores.max()
    assert threshold(scores[1:], np.arange(least - 1), coverage)[0] == math.inf


def test_the_risk_of_several_labels_is_controlled() -> None:
    generator = np.random.default_rng(0)
    labels = generator.random((200, 5)) < 0.4
    scores = generator.random((200, 5))
    example, column = np.nonzero(labels)
    found, count = threshold(scores[example, column], example, 0.9)
    texts = np.unique(example)

    def bound(limit: float) -> float:
        missed = labels & (scores > limit)
        return (missed[texts].sum(1) / labels[texts].sum(1)).sum() / (count + 1) + 1 / (count + 1)

    assert count == len(texts) and bound(found) <= 0.1 < bound(found - 1e-9)


# --- the guarantee: 200 splits of exchangeable data

SPLITS, HELD_OUT, TEST = 200, 99, 200


def within(found: list[float], coverage: float, *, held_out: int = HELD_OUT) -> bool:
    """Tell whether the mean of splits is what split conformal prediction gives.

    The covered of a split's test examples are beta-binomial (Vovk, 2012) with mean
    ceil((n + 1) coverage) / (n + 1); three standard errors of the mean of all splits.
    """
    rank = math.ceil((held_out + 1) * coverage - 1e-9)
    law = betabinom(TEST, rank, held_out + 1 - rank)
    error = 3 * law.std() / TEST / math.sqrt(len(found))
    return bool(abs(np.mean(found) - law.mean() / TEST) <= error)


@pytest.mark.parametrize("method", ["lac", "aps", "raps", "aps randomised"])
def test_classes_are_covered(method: str) -> None:
    name, _, randomised = method.partition(" ")
    used = round(HELD_OUT / 0.8) if name == "raps" else HELD_OUT
    logits, labels = classes(SPLITS * (used + TEST))
    given, found = answer(logits).to_numpy(), []
    for split in range(SPLITS):
        rows = np.arange(split * (used + TEST), (split + 1) * (used + TEST))
        held_out, test = rows[:used], rows[used:]
        options = {"method": name, "randomised": bool(randomised), "seed": split}
        sets = choose_sets(given[held_out], labels[held_out], coverage=0.9, **options)
        assert sets.examples == HELD_OUT
        mask = sets.mask(given[test])
        found.append(mask[np.arange(TEST), labels[test].numpy()].mean())
    assert within(found, 0.9)


def test_each_class_and_each_group_is_covered() -> None:
    size = 400
    logits, labels = classes(SPLITS * size)
    logits = logits.clone()
    logits[:, :, 0] -= 1.5  # the model misses one class
    groups = np.where(np.random.default_rng(0).random(len(labels)) < 0.3, "hard", "easy")
    noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    logits[torch.from_numpy(groups == "hard")] += 3 * noise[torch.from_numpy(groups == "hard")]
    given, marks = answer(logits).to_numpy(), labels.numpy()
    covered: dict[str, list[np.ndarray]] = {"class": [], "group": [], "all": []}
    for split in range(SPLITS):
        rows = np.arange(split * size, (split + 1) * size)
        held_out, test = rows[: size // 2], rows[size // 2 :]
        for by, names in {"class": "class", "group": groups[held_out], "all": None}.items():
            sets = choose_sets(given[held_out], marks[held_out], method="lac", groups=names)
            data = given[test]
            if by == "group":
                data = replace(data, sets=sets).in_groups(groups[test])
            covered[by].append(sets.mask(data)[np.arange(len(test)), marks[test]])
    tested = np.concatenate(
        [np.arange(s * size + size // 2, (s + 1) * size) for s in range(SPLITS)]
    )
    found = {by: np.concatenate(parts) for by, parts in covered.items()}
    for number in range(CLASSES):
        assert found["class"][marks[tested] == number].mean() >= 0.895
    for name in ("hard", "easy"):
        assert 0.895 <= found["group"][groups[tested] == name].mean() <= 0.925
    assert found["all"][marks[tested] == 0].mean() < 0.8  # what one threshold for all gives
    assert found["all"][groups[tested] == "hard"].mean() < 0.86


def test_numbers_are_covered() -> None:
    generator = torch.Generator().manual_seed(0)
    used = round(HELD_OUT / (2 / 3))
    count = SPLITS * (used + TEST)
    hard = torch.rand(count, 1, generator=generator) * 3
    members = torch.randn(count, 3, 1, generator=generator) * hard[:, None]
    numbers = torch.randn(count, 1, generator=generator) * (0.2 + hard)
    given = answer(members, "regression").to_numpy()
    found: dict[str, list[float]] = {"normalised": [], "plain": []}
    width: dict[str, list[float]] = {"normalised": [], "plain": []}
    for split in range(SPLITS):
        rows = np.arange(split * (used + TEST), (split + 1) * (used + TEST))
        for name in found:
            held_out = rows[: used if name == "normalised" else HELD_OUT]
            test = rows[used:]
            sets = choose_sets(given[held_out], numbers[held_out], method=name, seed=split)
            ends = sets.intervals(given[test])[:, 0]
            true = numbers[test, 0].numpy()
            found[name].append(((ends[:, 0] <= true) & (true <= ends[:, 1])).mean())
            width[name].append(sets.sizes(given[test])[hard[test, 0] < 0.5].mean())
    assert within(found["plain"], 0.9) and within(found["normalised"], 0.9)
    assert np.mean(width["normalised"]) < 0.8 * np.mean(width["plain"])  # where members agree


def test_labels_and_tokens_are_covered() -> None:
    generator = torch.Generator().manual_seed(0)
    size, splits = 300, SPLITS
    truth = 1.5 * torch.randn(splits * size, 5, generator=generator) - 0.5
    labels = torch.bernoulli(truth.sigmoid(), generator=generator)
    logits = truth[:, None] + 0.5 * torch.randn(splits * size, 3, 5, generator=generator)
    given, found = answer(logits, "multi-label").to_numpy(), []
    for split in range(splits):
        rows = np.arange(split * size, (split + 1) * size)
        held_out, test = rows[: size // 2], rows[size // 2 :]
        sets = choose_sets(given[held_out], labels[held_out], method="lac")
        true = labels[test].numpy() > 0.5
        some = true.any(1)
        found.append(((sets.mask(given[test]) & true).sum(1)[some] / true.sum(1)[some]).mean())
    assert 0.9 - 0.003 <= np.mean(found) <= 0.9 + 2 / (size // 2)
    # texts whose tokens are alike: a text is one example, its tokens are not
    texts = 120 * splits
    easy = torch.randn(texts, 1, 1, generator=generator)
    truth = torch.randn(texts, 12, 4, generator=generator) * (2 + easy).clamp_min(0.2)
    tags = torch.multinomial(truth.flatten(0, 1).softmax(-1), 1, generator=generator)
    tags = tags.reshape(texts, 12)
    length = torch.randint(1, 13, (texts, 1), generator=generator)
    tags = tags.masked_fill(torch.arange(12) >= length, -100)
    noise = torch.randn(texts, 2, 12, 4, generator=generator)
    given, found = answer(truth[:, None] + 0.3 * noise, "token-classification").to_numpy(), []
    for split in range(splits):
        rows = np.arange(split * 120, (split + 1) * 120)
        held_out, test = rows[:60], rows[60:]
        sets = choose_sets(given[held_out], tags[held_out], method="lac")
        real = tags[test].numpy() != -100
        right = np.take_along_axis(
            sets.mask(given[test]), tags[test].clamp_min(0).numpy()[..., None], -1
        )[..., 0]
        found.append(((right & real).sum(1) / real.sum(1)).mean())
    assert 0.9 - 0.005 <= np.mean(found) <= 0.9 + 2 / 60
