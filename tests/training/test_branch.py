"""Fine-tuning a fused branch: the trunk once and untouched, members apart, resumable."""

from __future__ import annotations

import copy
import math
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import hydra_ensembles as hydra
from hydra_ensembles import HeadMask
from hydra_ensembles.data import as_data
from hydra_ensembles.errors import DataError, HydraError
from hydra_ensembles.training import BRANCH, finetune_branch
from hydra_ensembles.training.branch_run import bootstrap_weights
from hydra_ensembles.training.sample_order import numbered
from hydra_ensembles.training.trunk_cache import CachedTrunk
from tests import zoo
from tests.training.arguments import arguments

MASKS = [
    HeadMask([[1, 1, 1, 1], [1, 0, 1, 1], last])
    for last in ([1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1])
]
RATE = 1e-2


@cache
def fused(name: str) -> hydra.HydraEnsemble:
    return hydra.fuse(zoo.make(name), MASKS)


@cache
def samples(name: str, count: int = 4, size: int = 4) -> tuple[Any, ...]:
    labels = torch.randint(5, (count, size), generator=torch.Generator().manual_seed(0))
    inputs = [zoo.batch(name, size, seed=i) for i in range(count)]
    if name in zoo.TEXTS:
        return tuple({**x, "labels": y} for x, y in zip(inputs, labels, strict=True))
    return tuple(zip(inputs, labels, strict=True))


def train(ensemble: hydra.HydraEnsemble, data: Any, **options: Any) -> Any:
    given = {"epochs": 2, "learning_rate": RATE, "progress": False, **options}
    return finetune_branch(ensemble, data, **arguments(BRANCH, given))


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def largest_difference(a: torch.nn.Module, b: torch.nn.Module) -> float:
    ours, theirs = weights(a), weights(b)
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_cached_equals_uncached(name):
    # in doubles: AdamW turns the rounding of a zero gradient (the keys' biases) into steps
    ensemble, data = copy.deepcopy(fused(name)).double(), samples(name)
    if name == "vit":
        data = [(images.double(), labels) for images, labels in data]
    whole = train(ensemble, data)
    tokens = 7 if name == "bert" else 17
    half = 2 * 4 * tokens * 32 * 8
    for bound in (0, half, half + 1):
        assert (
            largest_difference(whole.model, train(ensemble, data, cache_bytes=bound).model) < 1e-6
        )
    # the same batches each time: the same bits
    fixed = [train(fused(name), samples(name), shuffle=False, cache_bytes=b) for b in (0, 2**30)]
    assert largest_difference(fixed[0].model, fixed[1].model) == 0


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_the_cache_keeps_to_its_bound_and_recomputes_the_same(name):
    data = numbered(samples(name))
    one = CachedTrunk(fused(name), 2**30)
    one.remember(data[:1])
    sizes = {}
    for bound in (0, one.used_bytes - 1, 2 * one.used_bytes + 1, 2**30):
        model = CachedTrunk(fused(name), bound)
        model.remember(data)
        assert model.used_bytes <= bound
        assert sum(r.numel() * r.element_size() for r in model._rows.values()) == model.used_bytes
        sizes[bound] = len(model._rows)
        mixed = {k: torch.cat([d[k] for d in data]) for k in ("samples", "labels")}
        first = data[0]["batch"]
        joined = (
            {k: torch.cat([d["batch"][k] for d in data]) for k in first}
            if isinstance(first, dict)
            else tuple(torch.cat([d["batch"][i] for d in data]) for i in range(2))
        )
        with torch.no_grad():
            remembered = model.member_logits({**mixed, "batch": joined})
            torch.testing.assert_close(
                remembered, fused(name).member_logits(joined), atol=1e-5, rtol=1e-5
            )
            torch.testing.assert_close(  # what was remembered is of that call only
                model.ensemble.member_logits(joined), remembered, atol=1e-5, rtol=1e-5
            )
    assert list(sizes.values()) == [0, 0, 8, 16]


def test_the_trunk_runs_once_a_sample_when_it_is_cached():
    ensemble = copy.deepcopy(fused("vit"))
    rows: list[int] = []
    ensemble.body.trunk[0].register_forward_hook(lambda m, i, o: rows.append(len(i[0])))
    train(ensemble, samples("vit"), epochs=3)
    assert sum(n for n in rows if n == 4) == 16  # probes of the host run on two samples
    rows.clear()
    train(ensemble, samples("vit"), epochs=3, cache_bytes=0)
    assert sum(n for n in rows if n == 4) == 3 * 16


def test_runs_share_the_states_of_one_trunk():
    states: dict[Any, torch.Tensor] = {}
    first = train(fused("vit"), samples("vit"), trunk_states=states)
    assert len(states) == 16
    kept = dict(states)
    again = train(fused("vit"), samples("vit"), trunk_states=states)
    assert all(states[key] is kept[key] for key in kept)
    assert largest_difference(first.model, again.model) == 0


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_members_part_and_the_trunk_stays(name):
    ensemble, data = fused(name), samples(name)
    before = copy.deepcopy(ensemble.state_dict())
    trained = train(ensemble, data, epochs=3, validation=data, keep="best")
    model = trained.model
    assert all(torch.equal(value, before[key]) for key, value in ensemble.state_dict().items())
    after = model.state_dict()
    for key, value in before.items():
        if ".trunk." in key or "embeddings" in key:
            assert torch.equal(value, after[key]), key
    assert any(".branch." in name and p.requires_grad for name, p in model.named_parameters())
    classifiers = model.host.classifier.each
    assert len(classifiers) == 3
    assert not torch.equal(classifiers[0].weight, classifiers[1].weight)
    heads = model.body.branch[0].bank  # head 1 is in members 0 and 1: no longer the same
    assert not torch.equal(heads.qkv[:, 1], heads.qkv[:, 2])
    assert trained.history[-1]["nll"] > 0 and not model.training
    assert model.record["finetune_branch"]["steps"] == trained.steps == 12


@pytest.mark.parametrize("name", ["bert", "vit", "timm-unusual", "zero-shot-clip", "distilbert"])
def test_it_equals_its_members_and_survives_saving(name, tmp_path):
    trained = train(fused(name), samples(name), epochs=1).model
    hydra.verify(trained, zoo.batch(name))
    again = train(trained, samples(name), epochs=1).model  # classifiers are split already
    hydra.verify(again, zoo.batch(name))
    assert largest_difference(trained, again) > 0
    if name in ("bert", "vit"):
        trained.save_pretrained(tmp_path)
        loaded = hydra.HydraEnsemble.from_pretrained(tmp_path)
        with torch.no_grad():
            ours, theirs = (m.member_logits(zoo.batch(name)) for m in (trained, loaded))
        assert torch.equal(ours, theirs)


class Stop(Exception):
    pass


@pytest.mark.parametrize("bound", [0, 2**30])
@pytest.mark.parametrize("step", [3, 4, 7])
def test_resumed_equals_uninterrupted(tmp_path, step, bound):
    options = {"save_every": 1, "cache_bytes": bound}

    def stop(info: Any) -> None:
        if info.step == step:
            raise Stop

    with pytest.raises(Stop):
        train(fused("bert"), samples("bert"), folder=tmp_path, on_step=stop, **options)
    resumed = train(fused("bert"), samples("bert"), folder=tmp_path, **options)
    whole = train(fused("bert"), samples("bert"), **options)
    assert largest_difference(resumed.model, whole.model) == 0
    assert resumed.history == whole.history


def test_bootstraps_are_the_members_own_and_fixed():
    drawn = bootstrap_weights(torch.arange(4000), 3, 0)
    assert torch.equal(drawn[7:9], bootstrap_weights(torch.tensor([7, 8]), 3, 0))
    assert not torch.equal(drawn, bootstrap_weights(torch.arange(4000), 3, 1))
    assert drawn.mean(0).sub(1).abs().max() < 0.06 and drawn.var(0).sub(1).abs().max() < 0.1
    assert torch.corrcoef(drawn.T).triu(1).abs().max() < 0.06
    data = samples("vit")
    plain = train(fused("vit"), data, bootstrap=False).model
    assert largest_difference(train(fused("vit"), data).model, plain) > 0
    assert largest_difference(train(fused("vit"), data, bootstrap=False, seed=1).model, plain) > 0


def test_a_pull_holds_members_near_their_start():
    def moved(pull: float) -> float:
        model = train(fused("vit"), samples("vit"), towards_host=pull, max_grad_norm=math.inf).model
        start = train(fused("vit"), samples("vit"), learning_rate=0.0).model
        return largest_difference(model, start)

    assert moved(1e3) < moved(0.0)


def test_loaders_and_batches_train_as_lists_do():
    data = samples("vit")
    images, labels = (torch.cat(parts) for parts in zip(*data, strict=True))
    whole = train(fused("vit"), data).model
    loader = DataLoader(list(zip(images, labels, strict=True)), batch_size=4, shuffle=True)
    assert largest_difference(train(fused("vit"), loader).model, whole) == 0
    ours = as_data((images, labels), batch_size=4)
    assert largest_difference(train(fused("vit"), ours).model, whole) == 0


def test_padding_that_changes_is_computed_again():
    rows = [zoo.batch("bert", 1, seed=i)["input_ids"][0][: 3 + i % 4] for i in range(12)]

    def collate(items: Any) -> Any:
        ids = torch.nn.utils.rnn.pad_sequence(items, batch_first=True)
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids[:, 0] % 5}

    ensemble = copy.deepcopy(fused("bert")).double()
    loader = DataLoader(rows, batch_size=4, collate_fn=collate)  # type: ignore[arg-type]
    cached, plain = (train(ensemble, loader, cache_bytes=b).model for b in (2**30, 0))
    assert largest_difference(cached, plain) < 1e-6


def test_what_cannot_be_trained_is_refused():
    vit, data = fused("vit"), samples("vit")
    with pytest.raises(HydraError, match="not ViT"):
        train(zoo.host("vit"), data)  # type: ignore[arg-type]
    with pytest.raises(HydraError, match="no branch"):
        train(hydra.fuse(zoo.host("vit"), [MASKS[0]] * 2), data)
    with pytest.raises(DataError, match="read only once"):
        train(vit, (batch for batch in data))
    with pytest.raises(DataError, match="no labels"):
        train(vit, [zoo.batch("vit")])
    with pytest.raises(ValueError, match="validation"):
        train(vit, data, keep="best")


def uniform_gap(ensemble: hydra.HydraEnsemble, batches: Any) -> float:
    """Mean KL(uniform || member) over batches: how sure members are."""
    with torch.no_grad():
        logits = torch.cat([ensemble.member_logits(batch) for batch in batches])
    return float(-logits.log_softmax(-1).mean()) - float(torch.tensor(logits.shape[-1]).log())


def odd_ones(name: str, count: int = 2) -> list[Any]:
    if name in zoo.TEXTS:
        return [zoo.batch(name, 4, seed=90 + i) for i in range(count)]
    return [(3 + zoo.batch(name, 4, seed=90 + i),) for i in range(count)]


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_members_learn_to_be_unsure_about_outliers(name):
    data, odd = list(samples(name)), odd_ones(name)
    plain = train(fused(name), data, epochs=6, bootstrap=False).model
    aware = train(fused(name), data, epochs=6, bootstrap=False, ood=odd, outlier_weight=2.0)
    assert uniform_gap(aware.model, odd) < 0.3 * uniform_gap(plain, odd)
    families = train(
        fused(name), data, epochs=6, bootstrap=False, ood={"odd": odd}, outlier_weight=2.0
    )
    assert largest_difference(aware.model, families.model) == 0


def test_the_outlier_loss_is_the_divergence_from_uniform():
    data, odd = list(samples("vit"))[:1], odd_ones("vit", 1)
    seen = {}
    for weight in (0.0, 1.0):
        train(
            fused("vit"),
            data,
            epochs=1,
            bootstrap=False,
            ood=odd,
            outlier_weight=weight,
            on_step=lambda info, w=weight: seen.update({w: info.loss}),
        )
    ensemble = fused("vit").eval()
    assert seen[1.0] - seen[0.0] == pytest.approx(uniform_gap(ensemble, odd), abs=1e-5)


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_outliers_made_of_the_data_itself(name):
    trained = train(fused(name), list(samples(name)), ood="auto")
    assert largest_difference(trained.model, train(fused(name), list(samples(name))).model) > 1e-4
    assert trained.to_dict()["steps"] == 8


def test_distilling_keeps_the_given_predictions():
    data = list(samples("vit"))
    start = fused("vit")
    options: dict[str, Any] = {"epochs": 8, "bootstrap": False}
    free, held = (train(start, data, distill=share, **options).model for share in (0.0, 1.0))

    def moved(model: Any) -> float:
        with torch.no_grad():
            pairs = [(model.member_logits(x), start.member_logits(x)) for x, _ in data]
        return max(
            float((a.softmax(-1).mean(1) - b.softmax(-1).mean(1)).abs().max()) for a, b in pairs
        )

    assert moved(held) < 0.2 * moved(free)


def test_probabilities_as_labels_equal_class_numbers():
    hard = list(samples("vit"))
    soft = [(x, torch.nn.functional.one_hot(y, 5).double()) for x, y in hard]
    double = copy.deepcopy(fused("vit")).double()
    ours, theirs = (
        train(double, [(x.double(), y) for x, y in data], label_smoothing=0.1).model
        for data in (hard, soft)
    )
    assert largest_difference(ours, theirs) < 1e-6


def test_a_resumed_run_meets_the_same_outliers(tmp_path):
    data, odd = list(samples("vit")), odd_ones("vit", 3)
    options: dict[str, Any] = {"ood": odd, "distill": 0.5, "save_every": 1}
    whole = train(fused("vit"), data, **options)

    def stop(info: Any) -> None:
        if info.step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(fused("vit"), data, folder=tmp_path, on_step=stop, **options)
    resumed = train(fused("vit"), data, folder=tmp_path, **options)
    assert largest_difference(whole.model, resumed.model) == 0


def test_bad_outliers_are_told():
    with pytest.raises(ValueError, match='expected batches, a mapping, or "auto"'):
        train(fused("vit"), list(samples("vit")), ood="proxies")
    with pytest.raises(DataError, match="'empty' is empty"):
        train(fused("vit"), list(samples("vit")), ood={"empty": []})
    with pytest.raises(ValueError, match="distill is 2"):
        train(fused("vit"), list(samples("vit")), distill=2)
