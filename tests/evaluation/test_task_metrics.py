"""Metrics of labels, numbers, entities, spans and sets equal their references."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_ensembles import evaluate
from hydra_ensembles.evaluation.metrics import once
from hydra_ensembles.evaluation.task_metrics import (
    EntityFigures,
    LabelFigures,
    NumberFigures,
    SetFigures,
    answer_f1,
    entities_of,
    entity_counts,
    exact_match,
    interval_score,
)
from hydra_ensembles.tasks import as_task

sklearn_metrics = pytest.importorskip("sklearn.metrics")


def plain(figures, count: int) -> dict[str, float]:
    return {key: float(value) for key, value in figures.figures(once(count)).items()}


def labels(count: int, seed: int, *, tied: bool = False):
    generator = torch.Generator().manual_seed(seed)
    chances = torch.rand(count, 5, generator=generator, dtype=torch.float64) ** 2
    if tied:
        chances = (chances * 4).round().clamp(0.4, 3.6) / 4
    true = torch.rand(count, 5, generator=generator) < chances
    return chances, true


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_labels_equal_scikit_learn_and_torchmetrics(seed: int, tied: bool) -> None:
    from torchmetrics.functional.classification import (
        binary_calibration_error,
        multilabel_average_precision,
        multilabel_f1_score,
    )

    chances, true = labels(80, seed, tied=tied)
    active = chances >= 0.5
    found = plain(LabelFigures(chances, true, active), 80)
    y, p, said = true.int().numpy(), chances.numpy(), active.int().numpy()
    assert found["cls/mAP"] == pytest.approx(
        sklearn_metrics.average_precision_score(y, p, average="macro"), abs=1e-9
    )
    reference = multilabel_average_precision(chances, true.int(), 5, average="macro")
    assert found["cls/mAP"] == pytest.approx(float(reference), abs=1e-6)
    for kind in ("micro", "macro"):
        reference = sklearn_metrics.f1_score(y, said, average=kind)
        assert found[f"cls/F1_{kind}"] == pytest.approx(reference, abs=1e-9)
        reference = multilabel_f1_score(active.int(), true.int(), 5, average=kind)
        assert found[f"cls/F1_{kind}"] == pytest.approx(float(reference), abs=1e-6)
    assert found["cls/Acc"] == pytest.approx(sklearn_metrics.accuracy_score(y, said))
    assert found["cls/LabelAcc"] == pytest.approx(1 - sklearn_metrics.hamming_loss(y, said))
    each = [sklearn_metrics.log_loss(y[:, i], p[:, i], labels=[0, 1]) for i in range(5)]
    assert found["cls/NLL"] == pytest.approx(np.mean(each), abs=1e-9)
    each = [sklearn_metrics.brier_score_loss(y[:, i], p[:, i]) for i in range(5)]
    assert found["cls/Brier"] == pytest.approx(np.mean(each), abs=1e-9)
    each = [
        float(binary_calibration_error(p.contiguous(), y.int(), n_bins=15, norm="l1"))
        for p, y in zip(chances.T, true.T, strict=True)
    ]
    assert found["cal/ECE"] == pytest.approx(np.mean(each), abs=1e-6)


def test_labels_that_are_never_true_have_no_precision_and_no_f1() -> None:
    chances, true = labels(60, 0)
    true[:, 3], active = False, chances >= 0.5
    active[:, 3] = False
    found = plain(LabelFigures(chances, true, active), 60)
    kept = [0, 1, 2, 4]
    y, p = true[:, kept].int().numpy(), chances[:, kept].numpy()
    expected = sklearn_metrics.average_precision_score(y, p, average="macro")
    assert found["cls/mAP"] == pytest.approx(expected)
    expected = sklearn_metrics.f1_score(y, active[:, kept].int().numpy(), average="macro")
    assert found["cls/F1_macro"] == pytest.approx(expected)
    true[:, 3] = True  # always true: every precision is 1
    found = plain(LabelFigures(chances, true, active), 60)
    y, p = true.int().numpy(), chances.numpy()
    assert found["cls/mAP"] == pytest.approx(sklearn_metrics.average_precision_score(y, p))


def numbers(count: int, seed: int, width: int = 2):
    generator = torch.Generator().manual_seed(seed)
    members = torch.randn(count, 4, width, generator=generator, dtype=torch.float64)
    values = members.mean(1)
    sigma = torch.rand(count, width, generator=generator, dtype=torch.float64) + 0.3
    targets = values + sigma * torch.randn(count, width, generator=generator, dtype=torch.float64)
    return values, targets, sigma, members


@pytest.mark.parametrize("width", [1, 3])
def test_numbers_equal_their_references(width: int) -> None:
    from scipy.integrate import quad
    from scipy.stats import norm, pearsonr, spearmanr
    from torchmetrics.functional.regression import continuous_ranked_probability_score

    values, targets, sigma, members = numbers(70, 0, width)
    uncertainty = sigma.mean(1).mul(3).round()  # with ties
    given = {"sigma": sigma, "members": members, "uncertainty": uncertainty}
    found = plain(NumberFigures(values, targets, **given), 70)
    v, t, s = (x.numpy() for x in (values, targets, sigma))
    expected = sklearn_metrics.mean_squared_error(t, v) ** 0.5
    assert found["reg/RMSE"] == pytest.approx(expected, abs=1e-9)
    assert found["reg/MAE"] == pytest.approx(sklearn_metrics.mean_absolute_error(t, v))
    assert found["reg/NLL"] == pytest.approx(-norm.logpdf(t, v, s).mean(), abs=1e-9)
    half = norm.ppf(0.95) * s
    assert found["reg/Coverage"] == pytest.approx((abs(t - v) <= half).mean())
    assert found["reg/Width"] == pytest.approx(2 * half.mean())
    pairs = [(v[:, k], t[:, k]) for k in range(width)]
    assert found["reg/Pearson"] == pytest.approx(np.mean([pearsonr(*p)[0] for p in pairs]))
    assert found["reg/Spearman"] == pytest.approx(np.mean([spearmanr(*p)[0] for p in pairs]))
    expected = spearmanr(uncertainty.numpy(), abs(v - t).mean(1))[0]
    assert found["reg/ErrorRank"] == pytest.approx(expected, abs=1e-9)
    low, high = v - half, v + half
    outside = np.maximum(low - t, 0) + np.maximum(t - high, 0)
    expected = (high - low + 2 / 0.1 * outside).mean()
    assert found["reg/IntervalScore"] == pytest.approx(expected, abs=1e-9)
    # CRPS by its definition, the integral of (F(x) - 1[x >= y])^2
    normal, y = norm(v[0, 0], s[0, 0]), t[0, 0]
    below = quad(lambda x: normal.cdf(x) ** 2, -20, y, epsabs=1e-10, limit=200)[0]
    above = quad(lambda x: normal.sf(x) ** 2, y, 20, epsabs=1e-10, limit=200)[0]
    single = NumberFigures(values[:1, :1], targets[:1, :1], sigma=sigma[:1, :1])
    assert plain(single, 1)["reg/CRPS"] == pytest.approx(below + above, abs=1e-6)
    flat = members.transpose(1, 2).flatten(0, 1)
    expected = float(continuous_ranked_probability_score(flat, targets.flatten()))
    assert found["reg/CRPS_members"] == pytest.approx(expected, abs=1e-6)


def test_the_interval_score_is_that_of_mapie() -> None:
    pytest.importorskip("mapie")
    from mapie.metrics.regression import regression_mwi_score

    values, targets, sigma, _ = numbers(50, 1, 1)
    low, high = values - sigma, values + sigma
    ends = torch.stack([low[:, 0], high[:, 0]], 1).numpy()
    expected = regression_mwi_score(targets[:, 0].numpy(), ends[:, :, None], 0.9)
    found = float(interval_score(low, high, targets).mean())
    assert found == pytest.approx(float(np.ravel(expected)[0]), abs=1e-9)


TAGS = st.sampled_from(["O", "B-a", "I-a", "B-b", "I-b", "E-a", "S-b"])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(TAGS, TAGS), min_size=1, max_size=12))
def test_entities_are_those_of_seqeval(pairs: list[tuple[str, str]]) -> None:
    seqeval = pytest.importorskip("seqeval.metrics.sequence_labeling")
    for tags in zip(*pairs, strict=True):
        assert entities_of(tags) == set(seqeval.get_entities(list(tags)))


def test_f1_is_that_of_seqeval() -> None:
    seqeval = pytest.importorskip("seqeval.metrics")
    random = np.random.default_rng(0)
    names = ["O", "O", "B-a", "I-a", "B-b", "I-b"]
    true = [[names[i] for i in random.integers(0, 6, 9)] for _ in range(40)]
    said = [[t if random.random() < 0.8 else "O" for t in row] for row in true]
    counts = torch.tensor([entity_counts(s, t) for s, t in zip(said, true, strict=True)])
    found = plain(EntityFigures(counts), 40)
    assert found["ent/F1"] == pytest.approx(seqeval.f1_score(true, said), abs=1e-9)
    assert found["ent/Precision"] == pytest.approx(seqeval.precision_score(true, said))
    assert found["ent/Recall"] == pytest.approx(seqeval.recall_score(true, said))
    nothing = plain(EntityFigures(torch.tensor([[0, 0, 3]])), 1)
    assert nothing["ent/F1"] == 0


def test_entities_of_evaluate_are_those_of_seqeval_and_their_errors_are_ranked() -> None:
    seqeval = pytest.importorskip("seqeval.metrics")
    names = ["O", "B-a", "I-a", "B-b", "I-b"]
    generator = torch.Generator().manual_seed(4)
    labels = torch.randint(0, 5, (40, 9), generator=generator)
    logits = torch.randn(40, 9, 5, generator=generator) + 2.5 * torch.nn.functional.one_hot(labels)
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = -100
    labels[7] = -100  # a text without any label

    class Tagger(torch.nn.Module):
        config = SimpleNamespace(id2label=dict(enumerate(names)))
        task = as_task("token-classification")

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return logits[rows]

    batches = [{"rows": rows, "labels": labels[rows]} for rows in torch.arange(40).split(8)]
    found = evaluate(Tagger(), batches, bootstrap=20, progress=False)
    true, said, unsure = [], [], []
    for row in range(40):
        kept = labels[row] != -100
        true.append([names[i] for i in labels[row][kept]])
        said.append([names[i] for i in logits[row].argmax(-1)[kept]])
        unsure.append(1 - logits[row].double().softmax(-1).amax(-1)[kept])
    assert found["ent/F1"] == pytest.approx(seqeval.f1_score(true, said), abs=1e-9)
    assert found["ent/Recall"] == pytest.approx(seqeval.recall_score(true, said), abs=1e-9)
    wrong, scores = [], []
    for t, s, u in zip(true, said, unsure, strict=True):
        for entity in entities_of(s):
            wrong.append(entity not in entities_of(t))
            scores.append(float(u[entity[1] : entity[2] + 1].max()))
    expected = sklearn_metrics.roc_auc_score(wrong, scores)
    assert found["ent/AUROC"] == pytest.approx(expected, abs=1e-9)
    token = [p != q for t, s in zip(true, said, strict=True) for p, q in zip(t, s, strict=True)]
    expected = sklearn_metrics.roc_auc_score(token, torch.cat(unsure).numpy())
    assert found["fail/AUROC"] == pytest.approx(expected, abs=1e-9)
    low, high = found.interval("ent/F1")
    assert low < found["ent/F1"] < high


def test_spans_of_evaluate_are_judged_by_their_tokens() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(50, 2, 12, generator=generator)
    starts = torch.randint(0, 6, (50,), generator=generator)
    ends = torch.where(starts == 0, 0, starts + torch.randint(0, 5, (50,), generator=generator))
    logits[range(50), 0, starts] += 5
    logits[range(50), 1, ends] += 5
    task = as_task("question-answering")
    answer = task.answer(logits[:, None])

    class Reader(torch.nn.Module):
        task = as_task("question-answering")

        def forward(self, rows: torch.Tensor) -> SimpleNamespace:
            return SimpleNamespace(start_logits=logits[rows, 0], end_logits=logits[rows, 1])

    batch = {"rows": torch.arange(50), "start_positions": starts, "end_positions": ends}
    found = evaluate(Reader(), [batch], bootstrap=0, progress=False)
    exact, shared = [], []
    for row in range(50):
        said = set(range(int(answer.start[row]), int(answer.end[row]) + 1))
        true = set(range(int(starts[row]), int(ends[row]) + 1))
        exact.append(said == true)
        shared.append(2 * len(said & true) / (len(said) + len(true)))
    assert 0.1 < np.mean(exact) < 0.9 and found["qa/EM"] == pytest.approx(np.mean(exact))
    assert found["qa/F1"] == pytest.approx(np.mean(shared), abs=1e-9)


ANSWERS = ["The cat", "cat!", "a cat sat", "", "an  apple, the", "New-York's 1,000 a.", "the"]


def test_answers_are_judged_as_by_the_script_of_squad() -> None:
    from torchmetrics.functional.text import squad

    for answer in ANSWERS:
        for reference in ANSWERS:
            said = {"prediction_text": answer, "id": "0"}
            meant = {"answers": {"answer_start": [0], "text": [reference]}, "id": "0"}
            expected = squad([said], [meant])
            assert 100 * exact_match(answer, [reference]) == expected["exact_match"]
            assert 100 * answer_f1(answer, [reference]) == pytest.approx(float(expected["f1"]))
    assert exact_match("dog", ["cat", "the Dog"]) == 1 and answer_f1("dog", ["cat", "a dog"]) == 1


def test_sets_equal_mapie() -> None:
    pytest.importorskip("mapie")
    from mapie.metrics.classification import (
        classification_coverage_score,
        classification_mean_width_score,
        classification_ssc_score,
    )
    from mapie.metrics.regression import regression_ssc_score

    generator = torch.Generator().manual_seed(0)
    inside = torch.rand(90, 4, generator=generator) < 0.6
    true = torch.randint(4, (90,), generator=generator)
    novelty = torch.rand(90, generator=generator)
    covered = inside.gather(1, true[:, None])[:, 0]
    figures = SetFigures(covered, inside.sum(1), labels=true, novelty=novelty)
    found = plain(figures, 90)
    sets = inside.numpy()[..., None]
    assert found["set/Coverage"] == classification_coverage_score(true.numpy(), sets)[0]
    assert found["set/Size"] == pytest.approx(classification_mean_width_score(sets)[0])
    by_class = [float(covered[true == c].double().mean()) for c in range(4)]
    assert found["set/WorstClass"] == pytest.approx(min(by_class))
    assert found["set/WorstSize"] == pytest.approx(classification_ssc_score(true.numpy(), sets)[0])
    values, targets, sigma, _ = numbers(100, 1)
    ends = torch.stack([values - sigma, values + sigma], 1)
    hit = (targets - values).abs() <= sigma
    thirds = plain(SetFigures(hit[:, 0], 2 * sigma[:, 0]), 100)["set/WorstSize"]
    theirs = regression_ssc_score(targets[:, 0].numpy(), ends.numpy(), num_bins=3)[0]
    assert 0 < thirds < 1 and thirds == pytest.approx(theirs)
    new = novelty >= 0.95
    expected = float(covered[new].double().mean())
    assert found["set/Coverage_novelty_0.95-1"] == pytest.approx(expected)
    empty = SetFigures(covered, inside.sum(1), novelty=novelty * 0.5)
    assert np.isnan(plain(empty, 90)["set/Coverage_novelty_0.95-1"])


def test_figures_of_draws_are_those_of_the_drawn_examples() -> None:
    """Counts of a draw with replacement give what the repeated examples give."""
    generator = torch.Generator().manual_seed(0)
    picked = torch.randint(60, (3, 60), generator=generator)
    counts = torch.stack([torch.bincount(row, minlength=60) for row in picked]).double()
    chances, true = labels(60, 5, tied=True)
    values, targets, sigma, members = numbers(60, 5)
    by_text = torch.randint(0, 4, (60, 3), generator=generator)
    novelty = torch.rand(60, generator=generator)

    def made(rows: torch.Tensor) -> list:
        return [
            LabelFigures(chances[rows], true[rows], chances[rows] >= 0.5),
            NumberFigures(
                values[rows],
                targets[rows],
                sigma=sigma[rows],
                members=members[rows],
                uncertainty=sigma[rows].sum(1),
            ),
            EntityFigures(by_text[rows]),
            SetFigures(
                true[rows, 0], by_text[rows, 1], labels=true[rows, 1], novelty=novelty[rows]
            ),
        ]

    whole = [figures.figures(counts) for figures in made(torch.arange(60))]
    for draw, rows in enumerate(picked):
        for all_draws, figures in zip(whole, made(rows), strict=True):
            for key, value in plain(figures, 60).items():
                assert float(all_draws[key][draw]) == pytest.approx(value, nan_ok=True), key
