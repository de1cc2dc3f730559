"""Novelty of fused models: one pass, every host, saved with it, the same from threads."""

from __future__ import annotations

import copy
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from hydra_ensembles import HeadMask, HydraEnsemble, fuse
from hydra_ensembles._records import sealed
from hydra_ensembles.data.batches import join, take
from hydra_ensembles.errors import DataError, FormatError, HydraError
from hydra_ensembles.fusion.call_options import SummaryCollector
from hydra_ensembles.fusion.folder_schema import DIGEST
from hydra_ensembles.fusion.known_data import features_of
from hydra_ensembles.hosts import host_model
from hydra_ensembles.hosts.block_calls import states_of
from tests import zoo


def masks(name: str, members: int = 2) -> list[HeadMask]:
    """Return members that differ in the last block."""
    full = HeadMask.full(zoo.host(name))
    heads = range(zoo.HEADS)
    last = zoo.LAYERS - 1
    return [full.with_layer(last, [head != member for head in heads]) for member in range(members)]


def ensemble_of(name: str, members: int = 2) -> HydraEnsemble:
    return fuse(zoo.make(name), masks(name, members)).eval()


def known(name: str, batches: int = 6) -> list[Any]:
    return [zoo.batch(name, size=4, seed=10 + i) for i in range(batches)]


def labelled(name: str) -> list[Any]:
    found = []
    for number, batch in enumerate(known(name, 12)):
        labels = (torch.arange(4) + number) % 3
        is_text = isinstance(batch, dict)
        found.append({**batch, "labels": labels} if is_text else (batch, labels))
    return found


@pytest.mark.parametrize("name", zoo.CLASSIFIERS)
def test_every_classifier_learns_what_it_knows(name: str) -> None:
    ensemble = ensemble_of(name)
    batch = zoo.batch(name, seed=99)
    before = ensemble.predict(batch)
    assert before.novelty is None and before.novelty_score is None
    assert "not fitted" in str(ensemble)
    ensemble.fit_novelty_(known(name), progress=False)
    after = ensemble.predict(batch)
    assert after.novelty is not None and after.novelty_score is not None
    assert after.novelty.shape == after.novelty_score.shape == (4,)
    assert bool(((after.novelty >= 0) & (after.novelty <= 1)).all())
    torch.testing.assert_close(after.probabilities, before.probabilities)
    assert "fitted on 24 known examples" in str(ensemble)
    assert "nearest known" in str(ensemble.why_novel(batch))
    assert torch.equal(ensemble.why_novel(batch).novelty, after.novelty)


def test_taps_are_the_hidden_states_of_the_host() -> None:
    batch = zoo.batch("bert")
    _, summaries = features_of(ensemble_of("bert"), batch)
    with torch.no_grad():
        states = zoo.host("bert")(**batch, output_hidden_states=True).hidden_states
    weight = batch["attention_mask"].float()
    for block in range(zoo.LAYERS - 1):
        state = states[block + 1]
        mean = (state * weight[..., None]).sum(1) / weight.sum(1, keepdim=True)
        torch.testing.assert_close(summaries[:, 2 * block], state[:, 0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(summaries[:, 2 * block + 1], mean, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["bert", "dinov2", "clip-classifier"])
@pytest.mark.parametrize("engine", ["fused", "host"])
def test_the_last_tap_is_the_mean_of_the_members_ends(name: str, engine: str) -> None:
    batch = zoo.batch(name)
    ensemble = fuse(zoo.make(name), masks(name, 3), engine=engine).eval()
    ends: list[torch.Tensor] = []
    for member in range(3):
        host = ensemble.member(member)
        last = host_model(host).blocks[-1].module
        last.register_forward_hook(lambda *given: ends.append(states_of(given[-1])[0]))
        with torch.no_grad():
            host(**batch) if isinstance(batch, dict) else host(batch)
    state = torch.stack(ends).mean(0)
    expected = state[:, 0] if ensemble.readout.has_token else state.mean(1)
    _, summaries = features_of(ensemble, batch)
    torch.testing.assert_close(summaries[:, -1], expected, atol=1e-5, rtol=1e-5)


def test_padding_does_not_count() -> None:
    ensemble = ensemble_of("bert").fit_novelty_(known("bert"), progress=False)
    batch = zoo.batch("bert")
    wider = {key: torch.nn.functional.pad(value, (0, 5)) for key, value in batch.items()}
    ours, padded = ensemble.predict(batch), ensemble.predict(wider)
    assert ours.novelty_score is not None and padded.novelty_score is not None
    torch.testing.assert_close(ours.novelty_score, padded.novelty_score, atol=1e-2, rtol=1e-3)


@pytest.mark.parametrize("name", ["vit", "bert"])
def test_statistics_do_not_depend_on_batches_or_order(name: str) -> None:
    rows = join(known(name))
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0)).tolist()
    ensemble = ensemble_of(name)
    whole = ensemble.fit_novelty_([rows], progress=False).novelty
    single = [take(rows, [row]) for row in order]
    apart = ensemble.fit_novelty_(single, progress=False).novelty
    assert whole is not None and apart is not None
    torch.testing.assert_close(
        whole.measures.distance.mean, apart.measures.distance.mean, atol=1e-6, rtol=0
    )
    every = torch.eye(whole.measures.distance.mean.shape[1]).expand(len(whole.taps), -1, -1)
    white = [n.measures.distance.whitening(every).double() for n in (whole, apart)]
    sigma = [torch.linalg.inv(one @ one.mT) for one in white]
    torch.testing.assert_close(*sigma, atol=1e-6, rtol=0)
    torch.testing.assert_close(whole.ranks.values, apart.ranks.values, atol=1e-2, rtol=1e-3)


def test_the_trunk_runs_once() -> None:
    ensemble = ensemble_of("vit").fit_novelty_(known("vit"), progress=False)
    runs: list[int] = []
    ensemble.body.trunk[0].register_forward_hook(lambda *_: runs.append(1))
    ensemble.predict(zoo.batch("vit"))
    assert len(runs) == 1


def test_no_hidden_states_are_kept() -> None:
    hidden = torch.randn(2, 50, 8)
    for positions in (None, torch.tensor([3, 4])):
        collector = SummaryCollector(positions=positions)
        collector.take(0, hidden)
        kept = collector._rows[0]
        assert len(kept) == 2  # two summaries of two examples, and nothing else
        assert all(row.untyped_storage().nbytes() == 2 * 2 * 8 * 4 for row in kept)


def test_one_member_is_enough() -> None:
    ensemble = fuse(zoo.make("vit"), [HeadMask.full(zoo.host("vit"))]).eval()
    ensemble.fit_novelty_(known("vit"), progress=False)
    assert ensemble.novelty is not None
    # the last block runs for the readout token only
    assert len(ensemble.novelty.taps) == 2 * (zoo.LAYERS - 1) + 1
    assert ensemble.predict(zoo.batch("vit")).novelty is not None


@pytest.mark.parametrize("name", ["vit", "bert", "dinov2"])
def test_members_without_a_trunk_are_heard_too(name: str) -> None:
    full = HeadMask.full(zoo.host(name))
    apart = [full.with_layer(0, [head != member for head in range(4)]) for member in range(2)]
    ensemble = fuse(zoo.make(name), apart).eval()
    assert not len(ensemble.body.trunk)
    ensemble.fit_novelty_(known(name), progress=False)
    assert ensemble.novelty is not None and len(ensemble.novelty.taps) == 2
    answer = ensemble.predict(zoo.batch(name))
    alone = [ensemble.predict(take(zoo.batch(name), [row])).novelty_score for row in range(4)]
    assert answer.novelty_score is not None
    torch.testing.assert_close(answer.novelty_score, torch.cat(alone), atol=1e-2, rtol=1e-3)


@pytest.mark.parametrize("name", ["vit", "bert", "timm"])
@pytest.mark.parametrize("layer", [0, zoo.LAYERS - 1])
def test_the_host_engine_is_heard_too(name: str, layer: int) -> None:
    full = HeadMask.full(zoo.host(name))
    apart = [full.with_layer(layer, [head != member for head in range(4)]) for member in range(2)]
    scores = []
    for engine in ("fused", "host"):
        ensemble = fuse(zoo.make(name), apart, engine=engine).eval()
        assert ensemble.engine == engine
        ensemble.fit_novelty_(known(name), progress=False)
        scores.append(ensemble.predict(zoo.batch(name)).novelty_score)
    assert scores[0] is not None and scores[1] is not None
    torch.testing.assert_close(scores[0], scores[1], atol=1e-2, rtol=1e-3)


@pytest.mark.parametrize("layer", [0, zoo.LAYERS - 1])
def test_members_one_by_one_say_the_same(layer: int) -> None:
    full = HeadMask.full(zoo.host("bert"))
    apart = [full.with_layer(layer, [head != member for head in range(4)]) for member in range(2)]
    ensemble = fuse(zoo.make("bert"), apart).eval().fit_novelty_(known("bert"), progress=False)
    batch = zoo.batch("bert", seed=5)
    fused = ensemble.predict(batch).novelty_score
    ensemble.mode = "loop"
    looped = ensemble.predict(batch).novelty_score
    assert fused is not None and looped is not None
    torch.testing.assert_close(fused, looped, atol=1e-2, rtol=1e-3)


def test_labels_add_distances_to_classes() -> None:
    ensemble = ensemble_of("bert").fit_novelty_(labelled("bert"), progress=False)
    assert ensemble.novelty is not None and ensemble.novelty.classes is not None
    assert ensemble.novelty.classes.counts.tolist() == [16, 16, 16]
    assert "3 classes" in str(ensemble.novelty)
    assert any("nearest class" in term for term in ensemble.novelty.terms)


def test_training_data_gives_the_distances(tmp_path: Path) -> None:
    ensemble = ensemble_of("bert")
    alone = ensemble.fit_novelty_(labelled("bert"), progress=False).novelty
    ensemble.fit_novelty_(known("bert"), train=labelled("bert"), progress=False)
    both = ensemble.novelty
    assert alone is not None and both is not None and both.classes is not None
    assert torch.equal(both.measures.distance.mean, alone.measures.distance.mean)
    assert torch.equal(both.classes.means, alone.classes.means)
    assert (both.examples, both.trained, both.ranks.values.shape[1]) == (24, 48, 24)
    ensemble.save_pretrained(tmp_path)
    loaded = HydraEnsemble.from_pretrained(tmp_path)
    ours, theirs = (m.predict(zoo.batch("bert", seed=5)).novelty_score for m in (ensemble, loaded))
    assert ours is not None and theirs is not None and torch.equal(ours, theirs)
    with pytest.raises(DataError, match="'training' is empty"):
        ensemble.fit_novelty_(known("bert"), train=[], progress=False)


def test_training_mode_predicts_the_same() -> None:
    ensemble = ensemble_of("bert").fit_novelty_(known("bert"), progress=False)
    batch = zoo.batch("bert", seed=5)
    expected = ensemble.predict(batch).novelty_score
    found = ensemble.train().predict(batch).novelty_score
    assert expected is not None and found is not None and torch.equal(expected, found)


def test_threads_do_not_mix() -> None:
    ensemble = ensemble_of("bert").fit_novelty_(known("bert"), progress=False)
    batches = [zoo.batch("bert", size=2 + i % 3, seed=i) for i in range(12)]
    alone = [ensemble.predict(batch).novelty_score for batch in batches]
    twin = copy.deepcopy(ensemble)  # its hooks are its own
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda b: twin.predict(b).novelty_score, batches))
    for one, other in zip(alone, together, strict=True):
        assert one is not None and other is not None and torch.equal(one, other)


def test_listening_does_not_break_graphs() -> None:
    ensemble = ensemble_of("vit").fit_novelty_(known("vit"), progress=False)
    batch = zoo.batch("vit")
    ensemble.predict(batch)
    graph = torch.export.export(ensemble, (batch,), strict=False)
    with torch.no_grad():
        torch.testing.assert_close(graph.module()(batch).logits, ensemble(batch).logits)


def test_saved_and_loaded_to_the_bit(tmp_path: Path) -> None:
    names = [f"file {i}" for i in range(24)]
    ensemble = ensemble_of("vit").fit_novelty_(known("vit"), names=names, progress=False)
    ensemble.save_pretrained(tmp_path)
    loaded = HydraEnsemble.from_pretrained(tmp_path)
    batch = zoo.batch("vit", seed=7)
    ours, theirs = ensemble.predict(batch), loaded.predict(batch)
    assert ours.novelty_score is not None and theirs.novelty_score is not None
    assert torch.equal(ours.novelty_score, theirs.novelty_score)
    assert str(loaded.why_novel(batch)) == str(ensemble.why_novel(batch))
    loaded.novelty = None
    loaded.save_pretrained(tmp_path)
    assert not (tmp_path / "novelty.safetensors").exists()
    old = HydraEnsemble.from_pretrained(tmp_path)
    assert old.novelty is None and "not fitted" in str(old)


def test_damaged_statistics_are_refused(tmp_path: Path) -> None:
    ensemble_of("vit").fit_novelty_(known("vit"), progress=False).save_pretrained(tmp_path)
    path = tmp_path / "novelty.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-4] + b"1234")
    with pytest.raises(FormatError, match="SHA-256"):
        HydraEnsemble.from_pretrained(tmp_path)
    path.unlink()
    with pytest.raises(FormatError, match="incomplete"):
        HydraEnsemble.from_pretrained(tmp_path)
    path.write_bytes(content)
    config = json.loads((tmp_path / "config.json").read_text())
    config["novelty"]["format_version"] = 99
    (tmp_path / "config.json").write_text(json.dumps(sealed(config, DIGEST)))
    with pytest.raises(FormatError, match="format 99"):
        HydraEnsemble.from_pretrained(tmp_path)


def test_refusals_say_what_to_do() -> None:
    ensemble = ensemble_of("vit")
    with pytest.raises(HydraError, match="fit_novelty_"):
        ensemble.why_novel(zoo.batch("vit"))
    with pytest.raises(DataError, match="empty"):
        ensemble.fit_novelty_([], progress=False)
    labels = torch.tensor([0, 1, 77, 2])
    with pytest.raises(DataError, match="Remove the labels"):
        ensemble.fit_novelty_([(zoo.batch("vit"), labels)], progress=False)
    with pytest.raises(DataError, match="batch 0 of the known data"):
        ensemble.fit_novelty_([torch.zeros(2, 3, 5, 5)], progress=False)


@pytest.mark.parametrize("name", ["vit", "bert"])
def test_far_outliers_are_made_where_terms_would_join(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = [zoo.batch(name, size=16, seed=seed) for seed in range(14)]
    ensemble = ensemble_of(name).fit_novelty_(data, progress=False)
    assert ensemble.novelty is not None
    assert "of left-out clusters" in ensemble.novelty.choice
    alone = ensemble.fit_novelty_(data, choose=False, progress=False).novelty
    assert alone is not None and alone.choice == "the usual terms"
    zoo.any_longer_sum(monkeypatch)
    novelty = ensemble.fit_novelty_(data, progress=False).novelty
    assert novelty is not None and "checked on far outliers" in novelty.choice
    once = ensemble.fit_novelty_(iter(data), progress=False).novelty
    assert once is not None and "no far outliers to check others with" in once.choice
