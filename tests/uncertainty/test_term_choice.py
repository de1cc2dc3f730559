"""Novelty that fits itself to the host: terms chosen by classes that are left out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hydra_ensembles.errors import DataError
from hydra_ensembles.uncertainty import novelty_fit, term_choice
from hydra_ensembles.uncertainty.distances import Measures, unit
from hydra_ensembles.uncertainty.moments import Moments, class_distance, global_distance
from hydra_ensembles.uncertainty.novelty import Novelty, from_tensors
from hydra_ensembles.uncertainty.novelty_fit import KeptExamples, NoveltyFit
from hydra_ensembles.uncertainty.term_choice import Fold, clusters, select, shares_below

TAPS, WIDTH, CLASSES = 4, 12, 10


def examples(
    count: int, seed: int, *, classes: int = CLASSES, tap: int = 2, spread: float = 0.8
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw features of a host of which one tap knows the classes, and noise as logits.

    Examples of two more classes than it knows are the outliers.
    """
    draw = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES + 2, WIDTH, generator=torch.Generator().manual_seed(9))
    labels = torch.randint(0, classes, (count,), generator=draw)
    features = torch.randn(count, TAPS, WIDTH, generator=draw)
    features[:, tap] = centres[labels] + spread * features[:, tap]
    features = 2 + features * torch.logspace(0, -1, WIDTH)  # some directions vary more than others
    return features, torch.randn(count, 1, CLASSES, generator=draw), labels


def empty(*, choose: bool = True) -> NoveltyFit:
    names = [f"block {tap}" for tap in range(TAPS)]
    return NoveltyFit(names, classes=CLASSES, class_taps=2, uses_last_block=True, choose=choose)


def fitted(
    count: int = 300,
    seed: int = 0,
    *,
    labels: bool = True,
    choose: bool = True,
    tap: int = 2,
    spread: float = 0.8,
) -> Novelty:
    fit = empty(choose=choose)
    features, logits, classes = examples(count, seed, tap=tap, spread=spread)
    fit.add_(features, logits, classes if labels else None)
    return fit.finish()


def auroc(novelty: Novelty, tap: int = 2) -> float:
    """Return how well two classes are found that the known data has no example of."""
    features, logits, labels = examples(2000, 77, classes=CLASSES + 2, tap=tap)
    score = novelty(features, logits)[1]
    new = labels >= CLASSES
    return 100 * float(shares_below(score[~new, None], score[new, None]).mean())


def joined(novelty: Novelty) -> bool:
    """Return whether terms joined the usual ones."""
    return novelty.choice.startswith("the usual terms and others")


@pytest.mark.parametrize("labels", [False, True])
def test_a_better_sum_is_taken_and_finds_new_classes(labels: bool) -> None:
    tap = 2 if labels else 3  # clusters are those of the last tap
    chosen, usual = (fitted(labels=labels, tap=tap, choose=choose) for choose in (True, False))
    assert joined(chosen) and usual.choice == "the usual terms"
    assert auroc(chosen, tap) > auroc(usual, tap) + 2
    kind = "classes" if labels else "clusters"
    assert f"left-out {kind}" in str(chosen) and f"block {tap}" in str(chosen)
    assert len(str(chosen).splitlines()) == 1


def test_terms_join_the_usual_sum() -> None:
    novelty, alone = fitted(), fitted(choose=False)
    weights = dict(zip(novelty.chosen, novelty.weights.tolist(), strict=True))
    usual = dict(zip(alone.chosen, alone.weights.tolist(), strict=True))
    more = {term: weight - usual.get(term, 0.0) for term, weight in weights.items()}
    assert min(more.values()) > -1e-5
    # each step adds an eighth of the sum before it
    steps = math.log(1 + sum(more.values()) / sum(usual.values())) / math.log(9 / 8)
    assert abs(steps - round(steps)) < 1e-4 and 1 <= round(steps) <= term_choice.MOST_TERMS
    features, logits, _ = examples(50, 5)
    expected = novelty.surprise(features, logits) @ novelty.weights
    torch.testing.assert_close(novelty(features, logits)[1], expected)


def test_the_last_block_weighs_more_where_left_out_classes_are_found_anyway(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(term_choice, "FOUND", 60.0)
    novelty, alone = fitted(), fitted(choose=False)
    assert novelty.chosen == alone.chosen and "found anyway" in novelty.choice
    more = (novelty.weights - alone.weights).tolist()
    found = float(novelty.choice.split("AUROC ")[1].split(")")[0])
    assert 60 < found < 100
    part = float(alone.weights.sum()) * (100 - found) / 20
    expected = [part if term == ("class", 3) else 0.0 for term in alone.chosen]
    assert more == pytest.approx(expected, abs=0.05)


def test_the_usual_terms_stay_where_nothing_is_gained() -> None:
    novelty = fitted(spread=30.0)  # no tap knows the classes
    assert novelty.choice.startswith("the usual terms (AUROC")
    same = fitted(spread=30.0, choose=False)
    assert novelty.chosen == same.chosen
    assert torch.equal(novelty.sums.values, same.sums.values)


def test_few_examples_keep_the_usual_terms() -> None:
    assert fitted(150).choice == "the usual terms"


def answered(
    count: int, seed: int, *, known: int, trained: int = CLASSES
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw features that tell no classes apart, and logits of a host that learned `trained`."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, known, (count,), generator=draw)
    logits = 2 * torch.randn(count, 1, CLASSES, generator=draw)
    logits[torch.arange(count), 0, labels] += 6
    logits[..., trained:] -= 30  # outputs that were never trained
    return torch.randn(count, TAPS, WIDTH, generator=draw), logits, labels


@pytest.mark.parametrize("choose", [False, True])
def test_classes_that_the_host_learned_and_the_known_data_lacks_are_found(choose: bool) -> None:
    rates = []
    for seed in range(20):
        fit = empty(choose=choose)
        fit.add_(*answered(300, seed, known=CLASSES - 2))
        novelty = fit.finish()
        assert ("absent", -1) in novelty.chosen
        features, logits, labels = answered(1000, 100 + seed, known=CLASSES)
        rank, score = novelty(features, logits)
        new = labels >= CLASSES - 2
        assert float(shares_below(score[~new, None], score[new, None]).mean()) > (
            0.7 if choose else 0.85
        )
        rates.append(float((rank[~new] > 0.95).float().mean()))
    assert 0.04 < sum(rates) / len(rates) < 0.06
    twin = from_tensors(novelty.tensors(), novelty.facts())
    assert torch.equal(twin(features, logits)[1], score)


def test_outputs_that_were_never_trained_are_no_absent_classes() -> None:
    fit, other = empty(choose=False), empty(choose=False)
    fit.add_(*answered(300, 0, known=CLASSES - 2, trained=CLASSES - 2))
    other.add_(*answered(300, 0, known=CLASSES))
    for novelty in (fit.finish(), other.finish()):
        assert ("absent", -1) not in novelty.chosen and novelty.measures.absent is None


def test_with_two_classes_the_probability_weighs_less() -> None:
    weights = {}
    for classes in (2, 3):
        fit = NoveltyFit([f"block {tap}" for tap in range(TAPS)], classes=classes, class_taps=2)
        features, logits, _ = examples(50, 0)
        fit.add_(features, logits[..., :classes])
        novelty = fit.finish()
        weights[classes] = float(novelty.weights[novelty.chosen.index(("gen", -1))])
    assert weights == {2: 0.5, 3: 1.0}


def test_a_class_of_one_example_is_absent_without_it() -> None:
    features, logits, labels = answered(60, 3, known=4)
    labels[7] = 5  # its only example
    probability = logits[:, 0].softmax(-1)
    present, number = labels.unique(return_inverse=True)
    moments = Moments.empty(TAPS, WIDTH, len(present), first_class_tap=2)
    moments.add_(features, number)
    absent = torch.ones(CLASSES)
    absent[present], absent[9] = 0.0, -1.0
    distances = global_distance(moments), class_distance(moments)
    measures = Measures(*distances, 2, absent=absent)
    rows = torch.arange(60)
    found = measures(unit(features.double()), probability, rows=rows, classes=number)[:, -1]
    expected = probability[:, [4, 6, 7, 8]].sum(1)
    expected[7] += probability[7, 5]
    assert measures.terms[-1] == ("absent", -1)
    torch.testing.assert_close(found, expected.double())


def test_the_choice_is_deterministic_and_saved() -> None:
    novelty = fitted()
    features, logits, _ = examples(50, 5)
    expected = novelty(features, logits)[1]
    assert torch.equal(fitted()(features, logits)[1], expected)
    twin = from_tensors(novelty.tensors(), novelty.facts())
    assert torch.equal(twin(features, logits)[1], expected) and str(twin) == str(novelty)


def test_batches_do_not_matter() -> None:
    features, logits, labels = examples(300, 0)
    fit = empty()
    for rows in torch.arange(300).split(7):
        fit.add_(features[rows], logits[rows], labels[rows])
    novelty = fit.finish()
    assert novelty.chosen == fitted().chosen
    torch.testing.assert_close(novelty.sums.values, fitted().sums.values)


def test_the_choice_keeps_the_rate_of_false_alarms() -> None:
    """Half of the known data chooses, the other half gives the ranks."""
    rates, chosen = [], 0
    for seed in range(200):
        novelty = fitted(200, seed)
        chosen += joined(novelty)
        assert novelty.sums.values.shape[1] in (100, 200)
        features, logits, _ = examples(300, 1000 + seed)
        rates.append(float((novelty(features, logits)[0] > 0.95).float().mean()))
    assert chosen > 100
    assert 0.045 < sum(rates) / len(rates) < 0.055


def test_training_data_chooses_and_known_data_is_ranked_in_full() -> None:
    fit = empty()
    fit.add_train_(*examples(400, 3))
    fit.add_(*examples(80, 4)[:2])
    novelty = fit.finish()
    assert joined(novelty) and novelty.sums.values.shape[1] == 80
    assert auroc(novelty) > auroc(fitted(choose=False)) + 1


def test_known_data_chooses_where_it_can_beside_training_data() -> None:
    novelty = {}
    for labels in (True, False):
        fit = empty()
        fit.add_train_(*examples(400, 3))
        features, logits, classes = examples(300, 0)
        fit.add_(features, logits, classes if labels else None)
        novelty[labels] = fit.finish()
    alone = fitted()  # the same known data without training data
    assert novelty[True].choice == alone.choice != novelty[False].choice
    assert [novelty[labels].sums.values.shape[1] for labels in (True, False)] == [150, 300]


def test_labels_that_some_batches_lack_are_left_out() -> None:
    features, logits, labels = examples(300, 0)
    fit = empty()
    fit.add_(features[:150], logits[:150], labels[:150])
    fit.add_(features[150:], logits[150:])
    assert fit.finish().choice == fitted(labels=False).choice


def test_far_families_have_a_veto() -> None:
    features, logits, labels = examples(300, 0)
    far = examples(150, 8)[0]
    far[:, 0] += 0.6  # the trunk finds them, but the tap that knows the classes calls them known
    far[:, 2] = features[labels == 0, 2].mean(0) + 0.2 * (far[:, 2] - far[:, 2].mean(0))

    def fit(number: int) -> Novelty:
        found = empty()
        found.add_(features, logits, labels)
        asked = []

        def add_proxies() -> None:
            asked.append(True)
            if number == 2:
                raise DataError("none can be made")
            found.add_ood_("far", far[:80], logits[:80])
            found.add_ood_("far", far[80:], logits[80:150])

        novelty = found.finish(add_proxies=add_proxies if number else None)
        assert bool(asked) == bool(number)
        return novelty

    without, with_far, refused = (fit(number) for number in range(3))
    assert joined(without) and not joined(refused)
    assert "no far outliers" in refused.choice
    assert "checked on far outliers" in with_far.choice
    known = examples(2000, 78)

    def lost(novelty: Novelty) -> float:
        usual = fitted(choose=False)
        scores = [[n(*x[:2])[1] for x in (known, (far, logits[:150]))] for n in (usual, novelty)]
        before, after = (shares_below(a[:, None], b[:, None]).mean() for a, b in scores)
        return 100 * float(before - after)

    assert lost(with_far) < lost(without) - 0.5


def test_held_out_terms_leave_the_example_out() -> None:
    features, logits, labels = examples(40, 1)
    rows = unit(features.double())
    probability = logits[:, 0].softmax(-1)

    def measures(kept: Tensor) -> tuple[Measures, Tensor]:
        present, number = labels[kept].unique(return_inverse=True)
        moments = Moments.empty(TAPS, WIDTH, len(present), first_class_tap=2)
        moments.add_(features[kept], number)
        near = rows[kept][:, 2:].transpose(0, 1)
        totals = moments.class_totals.transpose(0, 1)
        distances = global_distance(moments), class_distance(moments)
        return Measures(*distances, 2, near, (2, 3), totals, (2, 3)), number

    every = torch.arange(40)
    whole, number = measures(every)
    found = whole(rows, probability, rows=every, classes=number)
    for row in (0, 11, 39):
        alone = measures(every[every != row])[0](rows[row : row + 1], probability[row : row + 1])
        for place, (kind, _) in enumerate(whole.terms):
            if kind in ("neighbour", "cosine", "gen", "entropy"):
                torch.testing.assert_close(found[row, place], alone[0, place])


def test_sums_are_built_step_by_step() -> None:
    draw = torch.Generator().manual_seed(0)
    known, near, far = torch.randn(3, 400, 4, generator=draw).unbind()
    near = near + torch.tensor([0.0, 1.0, 0.5, 0.0])
    far = far + torch.tensor([3.0, -3.0, 0.0, 0.0])
    columns = [torch.cat([one, torch.zeros(400, 1)], 1) for one in (known, near, far)]
    fold = Fold(columns[0], columns[1], torch.zeros(400), lambda _: columns[2])
    steps = select([fold], [1, 2, 3])
    assert steps[0] == 1 and {1, 2} == set(steps)
    veto = Fold(*columns[:2], torch.zeros(400), fold.columns, [columns[2]])
    assert 1 not in select([veto], [1, 2, 3])


def test_shares_below_count_ties_as_one_half() -> None:
    known = torch.tensor([[1.0], [2.0], [2.0], [3.0]])
    shares = shares_below(known, torch.tensor([[0.0], [2.0], [9.0]]))[:, 0]
    assert shares.tolist() == [0.0, 0.5, 1.0]


def test_kept_examples_lie_evenly_in_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(novelty_fit, "KEPT", 1)
    kept = KeptExamples()
    for first in range(0, 10_000, 97):
        count = min(97, 10_000 - first)
        kept.add_(torch.zeros(count, 2, 3), torch.zeros(count, 1, 2), None)
    assert 1024 <= kept.count <= 2048
    assert kept.positions.diff().unique().tolist() == [8]


def test_clusters_follow_the_data() -> None:
    draw = torch.Generator().manual_seed(0)
    centres = 10 * torch.eye(3)
    labels = torch.arange(60) % 3
    rows = centres[labels] + torch.randn(60, 3, generator=draw)
    found = clusters(rows, 3)
    assert all(len(found[labels == label].unique()) == 1 for label in range(3))
