"""What an ensemble is unsure about, from member logits alone."""

from __future__ import annotations

import math

import pytest
import torch

from hydra_ensembles import uncertainty as u
from hydra_ensembles.errors import DataError, UnknownNameError


def logits(batch=6, members=3, classes=5, *, scale=3.0, seed=0):
    return scale * torch.randn(
        batch, members, classes, generator=torch.Generator().manual_seed(seed)
    )


def test_probability_is_the_mean_of_the_members_softmax():
    z = logits()
    expected = torch.stack([m.softmax(-1) for m in z.unbind(1)]).mean(0)
    torch.testing.assert_close(u.mean_probability(z), expected)
    torch.testing.assert_close(u.log_mean_probability(z), expected.log())
    torch.testing.assert_close(u.log_mean_probability(z).softmax(-1), expected)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4, 1e30])
def test_every_function_is_finite_for_logits_of_any_size(scale):
    z = logits(scale=scale)
    functions = [u.scores[name] for name in u.scores if name != "neglabel"]
    assert u.neglabel(z.log_softmax(-1) - scale).isfinite().all()
    for function in [*functions, u.disagreement, u.pairwise_kl, u.log_mean_probability]:
        assert function(z).isfinite().all(), function
    assert u.predict_from_logits(z).probabilities.sum(-1).tolist() == pytest.approx([1.0] * 6)


def test_masked_classes_are_allowed():
    z = logits()
    z[:, :, 2] = -math.inf
    answer = u.predict_from_logits(z)
    assert (answer.probabilities[:, 2] == 0).all()
    assert answer.uncertainty.isfinite().all()
    assert u.pairwise_kl(z).isfinite().all()
    assert u.energy(z).isfinite().all()


def test_scores_by_their_formulas():
    z = logits()
    p = z.softmax(-1)
    mean = p.mean(1)
    entropy = -(mean * mean.log()).sum(-1)
    torch.testing.assert_close(u.msp(z), 1 - mean.amax(-1))
    torch.testing.assert_close(u.entropy(z), entropy)
    torch.testing.assert_close(u.max_logit(z), -z.mean(1).amax(-1))
    torch.testing.assert_close(u.energy(z), -z.exp().sum(-1).log().mean(1))
    inner = -(p * p.log()).sum(-1).mean(1)
    torch.testing.assert_close(u.mutual_information(z), entropy - inner)
    cosine = z / 100
    torch.testing.assert_close(u.mcm(z, logit_scale=100.0), u.msp(cosine))


@pytest.mark.parametrize("name", list(u.scores))
def test_higher_is_less_sure(name):
    """A sure ensemble against one whose members are flat or contradict each other."""
    sure = torch.tensor([[[6.0, 0.0, 0.0]] * 3])
    unsure = torch.tensor([[[0.5, 0.0, 0.0], [0.0, 0.5, 0.0], [0.0, 0.0, 0.5]]])
    # neglabel reads masses of at most 1; the others do not mind a number less for all classes
    assert u.scores[name](unsure - 10) > u.scores[name](sure - 10)


def test_msp_ranks_what_float32_would_tie():
    z = torch.tensor([[20.0, 0.0], [25.0, 0.0], [30.0, 0.0]])
    assert len((1 - u.mean_probability(z).amax(-1)).unique()) < 3
    values = u.msp(z).tolist()
    assert values == sorted(values, reverse=True)
    assert len(set(values)) == 3


def test_energy_and_max_logit_read_member_logits():
    """On log mean probabilities energy would be zero for every input."""
    z = logits()
    assert u.energy(z + 7).tolist() == pytest.approx((u.energy(z) - 7).tolist(), abs=1e-5)
    assert u.max_logit(z + 7).tolist() == pytest.approx((u.max_logit(z) - 7).tolist(), abs=1e-5)


def test_one_member_and_equal_members_do_not_disagree():
    z = logits(members=1)
    for same in (z, z[:, 0], z.expand(-1, 4, -1)):
        for function in (u.disagreement, u.mutual_information, u.pairwise_kl):
            assert function(same).tolist() == pytest.approx([0.0] * 6, abs=1e-6)


def test_disagreement_counts_pairs():
    votes = torch.tensor([[0, 0, 0], [0, 0, 1], [0, 1, 2]])
    z = torch.nn.functional.one_hot(votes, 3).float()
    assert u.disagreement(z).tolist() == pytest.approx([0, 2 / 3, 1])


def test_half_precision_is_computed_in_float32():
    z = logits().half()
    assert u.mean_probability(z).dtype == torch.float32
    assert u.predict_from_logits(z.bfloat16()).probabilities.dtype == torch.float32
    assert u.mean_probability(z.double()).dtype == torch.float64


def test_gradients_pass_through():
    z = logits().requires_grad_()
    u.log_mean_probability(z).sum().backward()
    assert z.grad.isfinite().all()


def test_temperatures_divide_logits():
    z = logits()
    torch.testing.assert_close(u.scale_logits(z, temperature=2.0), z / 2)
    by_member = u.scale_logits(z, temperature=2.0, member_temperatures=[1.0, 2.0, 4.0])
    torch.testing.assert_close(by_member, z / torch.tensor([2.0, 4.0, 8.0])[:, None])
    with pytest.raises(ValueError, match="3 members"):
        u.scale_logits(z, member_temperatures=[1.0, 2.0])
    with pytest.raises(ValueError, match="positive"):
        u.scale_logits(z, temperature=0.0)


def test_prediction_holds_together():
    z = logits()
    answer = u.predict_from_logits(z, score="entropy", temperature=1.5)
    torch.testing.assert_close(answer.member_logits, z / 1.5)
    torch.testing.assert_close(answer.probabilities, u.mean_probability(z / 1.5))
    torch.testing.assert_close(answer.uncertainty, u.entropy(z / 1.5))
    torch.testing.assert_close(answer.logits.softmax(-1), answer.probabilities)
    assert answer.class_index.tolist() == answer.probabilities.argmax(-1).tolist()
    # what it holds is enough to make it again
    again = u.predict_from_logits(answer.member_logits, score=answer.score)
    torch.testing.assert_close(again.uncertainty, answer.uncertainty)


def test_mcm_reads_cosines_whatever_the_temperature():
    z = logits()
    answer = u.predict_from_logits(z, score="mcm", temperature=3.0, logit_scale=100.0)
    torch.testing.assert_close(answer.uncertainty, u.mcm(z, logit_scale=100.0))


def test_prediction_is_indexed_like_a_batch():
    answer = u.predict_from_logits(logits())
    assert len(answer) == 6
    assert answer[2].member_logits.shape == (1, 3, 5)
    assert answer[-1].class_index.tolist() == answer.class_index[-1:].tolist()
    assert answer[1:3].uncertainty.tolist() == answer.uncertainty[1:3].tolist()
    assert len(answer[answer.uncertainty > 2]) == 0
    assert sum(len(one) for one in answer) == 6
    assert answer.cpu().to("cpu").score == "msp"
    with pytest.raises(IndexError):
        answer[6]


def test_prediction_prints_well():
    text = repr(u.predict_from_logits(logits(batch=20), score="energy"))
    assert text.startswith("Prediction of 3 members on 20 inputs, 5 classes")
    assert "energy" in text
    assert "12 more" in text
    assert repr(u.predict_from_logits(logits(batch=0)))


def test_a_users_score():
    def margin(z):
        top = u.mean_probability(z).topk(2, dim=-1).values
        return top[:, 1] - top[:, 0]

    answer = u.predict_from_logits(logits(), score=margin)
    torch.testing.assert_close(answer.uncertainty, margin(logits()))
    assert answer.score == "margin"


def test_unknown_scores_and_shapes_are_clear():
    with pytest.raises(UnknownNameError, match=r"'mps'.*'msp'"):
        u.predict_from_logits(logits(), score="mps")
    with pytest.raises(DataError, match=r"\[batch, member, class\]"):
        u.msp(torch.randn(3))
    with pytest.raises(DataError):
        u.msp(torch.randn(3, 0, 4))
