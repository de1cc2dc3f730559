"""Criteria as a whole: the contract on every family, HIES and its alpha, a user's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from hydra_ensembles.criteria import (
    AttentionEntropy,
    CombinedScore,
    Criterion,
    GateGradient,
    HeadImportanceEntropy,
    RandomOrder,
    Setting,
    as_criterion,
    choose_alpha,
    criteria,
    mix,
    ranked,
    score_heads,
)
from hydra_ensembles.criteria import head_scoring as module
from hydra_ensembles.data.batches import take
from hydra_ensembles.errors import DataError, HydraError, UnknownNameError
from hydra_ensembles.heads.gates import prune_heads_
from hydra_ensembles.heads.head_mask import HeadMask, HeadScores
from hydra_ensembles.hosts import host_model

from .. import zoo
from ..zoo import SHARP, images, labelled, sharp, texts

NAMES = ["random", "magnitude", "taylor", "his", "entropy", "hies", "fisher"]


@pytest.mark.parametrize("name", list(SHARP))
def test_every_criterion_works_on_every_family(name):
    model, batch = zoo.with_classes(name), labelled(name)
    assert set(NAMES) <= set(criteria)
    tables = score_heads(model, [batch], criterion=list(NAMES))
    assert list(tables) == NAMES
    for key, scores in tables.items():
        assert scores.shape == host_model(model).head_counts and scores.name.startswith(key)
        assert float(scores.flat().min()) >= 0 and float(scores.flat().std()) > 0
        single = score_heads(model, [batch], criterion=key)
        torch.testing.assert_close(single.flat(), scores.flat(), atol=1e-6, rtol=1e-5)
    for key in ("entropy", "hies"):
        assert float(tables[key].flat().max()) <= 1


@pytest.mark.parametrize("name", zoo.MAKERS)
def test_every_registered_criterion_on_the_whole_zoo(name):
    """Without labels, by a loss of one's own: also towers, zero-shot hosts and language models."""
    model = zoo.host(name)

    def size(logits, labels):
        return logits.flatten(1).square().sum(1)

    tables = score_heads(model, [zoo.batch(name)], criterion=list(criteria), loss=size)
    for key, scores in tables.items():
        assert scores.shape == host_model(model).head_counts
        assert float(scores.flat().std()) > 0, key
    entropy = tables["entropy"].flat()
    assert float(entropy.min()) >= 0 and float(entropy.max()) <= 1
    eager = zoo.host(name)
    if hasattr(eager, "set_attn_implementation") and hasattr(eager, "config"):
        eager = zoo.make(name)
        eager.set_attn_implementation("eager")
        slow = score_heads(eager, [zoo.batch(name)], criterion="entropy")
        torch.testing.assert_close(slow.flat(), entropy, atol=1e-5, rtol=0)


def test_all_scores_cost_one_pass(monkeypatch):
    calls = []
    original = module.call_model
    monkeypatch.setattr(module, "call_model", lambda *a: calls.append(1) or original(*a))
    batches = [take(texts(), slice(0, 3)), take(texts(), slice(3, 6))]
    score_heads(sharp("bert"), batches, criterion=list(NAMES))
    assert len(calls) == 2
    score_heads(sharp("bert"), None, criterion=["random", "magnitude"])
    assert len(calls) == 2


def test_already_pruned_models_are_scored():
    model = prune_heads_(sharp("bert"), HeadMask([[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]]))
    tables = score_heads(model, [texts()], criterion=list(NAMES))
    assert all(scores.shape == (2, 0, 4) for scores in tables.values())


def test_random_is_seeded():
    model = sharp("vit")
    same = [score_heads(model, None, criterion="random") for _ in range(2)]
    assert same[0] == same[1] != score_heads(model, None, criterion=RandomOrder(seed=1))


def test_magnitude_is_the_norm_of_all_four_weights():
    model = sharp("vit")
    scores = score_heads(model, None, criterion="magnitude")
    attention = model.vit.layers[1].attention
    rows = slice(8, 16)  # head 1
    parts = [getattr(attention, f"{name}_proj").weight[rows] for name in "qkv"]
    parts.append(attention.o_proj.weight[:, rows])
    expected = torch.cat([part.detach().flatten() for part in parts]).norm()
    assert float(scores[1][1]) == pytest.approx(float(expected), rel=1e-6)


def test_hies_is_its_formula():
    model, batch = sharp("bert"), texts()
    tables = score_heads(
        model,
        [batch],
        criterion=["his", "entropy", *(HeadImportanceEntropy(a) for a in (0.0, 0.3, 1.0))],
    )
    his, entropy = (tables[name].flat() for name in ("his", "entropy"))
    his = (his - his.min()) / (his.max() - his.min())
    entropy = (entropy - entropy.min()) / (entropy.max() - entropy.min())
    for alpha in (0.0, 0.3, 1.0):
        found = tables[f"hies(alpha={alpha})"].flat()
        torch.testing.assert_close(found, alpha * his + (1 - alpha) * (1 - entropy))
    assert tables["hies(alpha=1.0)"].ranking() == tables["his"].ranking()
    low = ranked("entropy", tables["entropy"])
    assert tables["hies(alpha=0.0)"].ranking() == low.ranking()


def test_hies_of_constant_scores_and_of_bad_alphas():
    flat, steep = HeadScores([[2.0, 2.0], [2.0, 2.0]]), HeadScores([[0.0, 1.0], [2.0, 4.0]])
    assert mix(flat, steep, 1.0).tolist() == [[0, 0], [0, 0]]
    assert mix(flat, steep, 0.0).tolist() == [[1, 0.75], [0.5, 0]]
    for alpha in (-0.1, 1.1, "best"):
        with pytest.raises(HydraError, match="alpha"):
            HeadImportanceEntropy(alpha)


def test_hies_with_another_entropy():
    model, batch = sharp("bert"), texts()
    renyi = HeadImportanceEntropy(0.5, entropy=AttentionEntropy("renyi", 3.0))
    tables = score_heads(model, [batch], criterion=["hies", renyi])
    assert tables["hies"] != tables[renyi.label]


def planted() -> tuple[torch.nn.Module, list[tuple[Tensor, Tensor]]]:
    """Return a model and data that it labels itself, so that the whole model is always right."""
    model = sharp("vit")
    pixels = torch.randn(60, 3, 16, 16, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        labels = model(pixels).logits.argmax(-1)
    return model, [(pixels[:30], labels[:30]), (pixels[30:], labels[30:])]


def test_alpha_is_the_best_by_the_weighted_area():
    model, data = planted()
    tables = score_heads(model, data, criterion=["his", "entropy"])
    importance, entropy = tables["his"], tables["entropy"]
    ratios, weights = (0.2, 0.4, 0.6), (1.0, 2.0, 5.0)
    choice = choose_alpha(
        model,
        importance,
        entropy,
        data,
        alphas=(0.0, 0.5, 1.0),
        ratios=ratios,
        weights=weights,
        progress=False,
    )
    for alpha in (0.0, 0.5, 1.0):
        area = 0.0
        for ratio, weight in zip(ratios, weights, strict=True):
            mask = mix(importance, entropy, alpha).top_k(1 - ratio, scope="model")
            with torch.no_grad():
                pruned = prune_heads_(planted()[0], mask)
                right = [(pruned(x).logits.argmax(-1) == y).float() for x, y in data]
            area += weight * float(torch.cat(right).mean()) / 8
        assert choice.areas[alpha] == pytest.approx(area, abs=1e-6)
    assert choice.areas[choice.alpha] == max(choice.areas.values())
    assert len(choice.quality[0.5]) == 3


def test_alpha_auto_reads_held_out_data():
    model, data = planted()
    auto = HeadImportanceEntropy("auto")
    with pytest.raises(DataError, match="held_out"):
        score_heads(model, data, criterion=auto)
    scores = score_heads(model, data[:1], criterion=auto, held_out=data[1:], progress=False)
    tables = score_heads(model, data[:1], criterion=["his", "entropy"])
    choice = choose_alpha(model, tables["his"], tables["entropy"], data[1:], progress=False)
    assert scores == mix(tables["his"], tables["entropy"], choice.alpha)
    assert scores.name == f"hies(alpha={choice.alpha:g})"
    with pytest.raises(DataError, match="only once"):
        choose_alpha(model, tables["his"], tables["entropy"], iter(data[1:]))
    with pytest.raises(HydraError, match="weights"):
        choose_alpha(model, tables["his"], tables["entropy"], data, weights=(1.0,))


def test_a_users_own_criterion():
    @criteria.register("worst-case")
    @dataclass(frozen=True)
    class Cubed(GateGradient):
        """E_x |dL(x)/dg_h|^p: heads that matter much to few samples."""

        power: float = 3.0

        def accumulate(self, gradients: Tensor) -> Tensor:
            return gradients.abs().pow(self.power).sum(0)

        def finish(self, mean: HeadScores) -> HeadScores:
            return mean.map(lambda row: row.pow(1 / self.power))

    @dataclass(frozen=True)
    class Product(CombinedScore):
        @property
        def parts(self) -> tuple[Criterion, ...]:
            return as_criterion("magnitude"), Cubed()

        def combine(self, tables: Sequence[HeadScores], setting: Setting) -> HeadScores:
            return tables[0] * tables[1]

    try:
        model, batch = sharp("bert"), texts()
        own = score_heads(model, [batch], criterion="worst-case")
        tables = score_heads(model, [batch], criterion=["his", Cubed(power=1.0), Product()])
        torch.testing.assert_close(tables["worst-case(power=1.0)"].flat(), tables["his"].flat())
        assert bool((own.flat() >= tables["his"].flat() - 1e-9).all())
        magnitude = score_heads(model, None, criterion="magnitude")
        torch.testing.assert_close(tables["Product"].flat(), (magnitude * own).flat())
    finally:
        del criteria._entries["worst-case"]


def test_unknown_names_and_kinds_are_explained():
    with pytest.raises(UnknownNameError, match="hies"):
        score_heads(sharp("bert"), [texts()], criterion="heis")

    @dataclass(frozen=True)
    class Nothing(Criterion):
        pass

    with pytest.raises(TypeError, match="WeightScore"):
        score_heads(sharp("bert"), [texts()], criterion=Nothing())
    with pytest.raises(DataError, match="no tensor"):
        score_heads(sharp("bert"), [{"labels": torch.zeros(0)}])


def test_entropy_keeps_low_and_the_rest_keep_high():
    scores = HeadScores([[0.1, 0.9]])
    assert ranked("entropy", scores).top_k(1).tolist() == [[True, False]]
    assert ranked("his", scores).top_k(1).tolist() == [[False, True]]


def test_images_in_a_mapping():
    pixels, labels = images()
    model = sharp("vit")
    assert score_heads(model, [{"pixel_values": pixels, "labels": labels}]) == score_heads(
        model, [(pixels, labels)]
    )
