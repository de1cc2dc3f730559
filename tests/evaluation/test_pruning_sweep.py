"""The pruning sweep: figures of each mask, intervals, resumption, its JSON and its pictures."""

from __future__ import annotations

import json
import math

import matplotlib as mpl
import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

from hydra_ensembles.criteria import HeadImportanceEntropy, score_heads
from hydra_ensembles.data.model_runs import collect_logits
from hydra_ensembles.data.splits import sample
from hydra_ensembles.errors import DataError, FormatError, HydraError, UnknownNameError
from hydra_ensembles.evaluation.metrics import expected_calibration_error
from hydra_ensembles.heads.gates import gate
from hydra_ensembles.heads.head_mask import HeadMask, HeadScores
from hydra_ensembles.hosts import host_model
from hydra_ensembles.research import pruning_sweep as module
from hydra_ensembles.research.figures import (
    plot_head_scores,
    plot_prune_sweep,
    plot_rank_correlation,
)
from hydra_ensembles.research.pruning_sweep import prune_sweep, pruned
from hydra_ensembles.research.pruning_sweep_results import (
    Outcome,
    PruneSweep,
    SweepPoint,
    mask_key,
    pack,
    rank_correlation,
    regime,
    unpack,
)

mpl.use("Agg")


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=32,
        image_size=8,
        patch_size=4,
        num_labels=3,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = ViTForImageClassification(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(8 if parameter.dim() == 2 else 1)
    return model


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    config = LlamaConfig(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=16,
        num_labels=3,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForSequenceClassification(config).eval()


def images(count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(count, 3, 8, 8, generator=generator)
    with torch.no_grad():
        labels = vit()(pixels).logits.argmax(-1)
    labels[::7] = (labels[::7] + 1) % 3  # some are wrong before any pruning
    return list(zip(pixels.split(16), labels.split(16), strict=True))


TEST, CALIBRATION, HELD_OUT = images(60, 1), images(60, 2), images(30, 3)
OUTLIERS = [3 + torch.randn(20, 3, 8, 8, generator=torch.Generator().manual_seed(4))]


def small_sweep(**changes) -> PruneSweep:
    options = {
        "criteria": ["random", "magnitude", "his", "entropy", "hies"],
        "ratios": (0.25, 0.5),
        "calibration": CALIBRATION,
        "calibration_examples": 12,
        "draws": 3,
        "ood": {"far": OUTLIERS},
        "progress": False,
    }
    return prune_sweep(vit(), TEST, **{**options, **changes})


@pytest.fixture(scope="module")
def sweep() -> PruneSweep:
    return small_sweep()


def test_figures_are_those_of_the_pruned_model(sweep):
    model = vit()
    whole, labels = collect_logits(model, TEST)
    for draw in range(3):
        examples = sample(CALIBRATION, 12, seed=draw)
        tables = score_heads(model, examples, criterion=["his", "entropy"])
        masks = {
            "his": tables["his"].top_k(0.5, scope="model"),
            "entropy": (-tables["entropy"]).top_k(0.5, scope="model"),
        }
        for criterion, mask in masks.items():
            with gate(model, mask):
                logits, _ = collect_logits(model, TEST)
                outliers, _ = collect_logits(model, OUTLIERS)
            figures = sweep.at(criterion, 0.5)[draw].figures
            predicted = logits[:, 0].argmax(-1)
            right = predicted == labels
            same = predicted == whole[:, 0].argmax(-1)
            assert figures["cls/Acc"] == pytest.approx(float(right.float().mean()))
            assert figures["stability"] == pytest.approx(float(same.float().mean()))
            nll = nn.functional.cross_entropy(logits[:, 0], labels)
            assert figures["cls/NLL"] == pytest.approx(float(nll), abs=1e-5)
            ece = expected_calibration_error(logits[:, 0].softmax(-1).amax(-1), right)
            assert figures["cal/ECE"] == pytest.approx(float(ece), abs=1e-5)
            inner, outer = (x[:, 0].softmax(-1).amax(-1) for x in (logits, outliers))
            below = (outer[None] < inner[:, None]).double().mean()
            assert figures["ood/far/AUROC"] == pytest.approx(float(below), abs=1e-5)
            assert figures["ood/mean/AUROC"] == figures["ood/far/AUROC"]


def test_the_baseline_is_the_whole_model(sweep):
    assert sweep.baseline["stability"] == 1.0
    assert 0.8 < sweep.baseline["cls/Acc"] < 1.0
    whole = small_sweep(criteria=["his"], ratios=(0.0,), draws=1)
    assert whole.values("his", 0.0) == [sweep.baseline["cls/Acc"]]


def test_criteria_with_a_seed_differ_by_draw_and_others_share_masks(sweep):
    def masks(criterion):
        return {p.mask for p in sweep.points if p.criterion == criterion and p.ratio == 0.5}

    assert len(masks("random")) == 3 and len(masks("magnitude")) == 1
    assert len(sweep.outcomes) == len({p.mask for p in sweep.points}) < len(sweep.points)
    assert all(mask.replace(".", "").count("0") == 6 for mask in masks("his"))


def test_the_model_and_its_weights_are_left_alone():
    model = vit()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    prune_sweep(
        model,
        TEST,
        criteria=["his"],
        ratios=(0.5,),
        calibration=CALIBRATION,
        draws=1,
        progress=False,
    )
    assert all(torch.equal(before[name], p) for name, p in model.state_dict().items())


def test_heads_that_share_keys_are_gated():
    model = llama()
    ids = torch.randint(1, 20, (3, 5), generator=torch.Generator().manual_seed(0))
    mask = HeadMask([[1, 0, 1, 1], [0, 1, 0, 0]])
    with torch.no_grad():
        with gate(model, mask):
            expected = model(input_ids=ids).logits
        with pruned(host_model(model), mask) as cut:
            assert cut is model and torch.equal(cut(input_ids=ids).logits, expected)
        with pruned(host_model(vit()), HeadMask([[1, 0, 0, 0]] * 3)) as cut:
            assert cut.vit.layers[0].attention.q_proj.weight.shape[0] == 6


def test_without_calibration_data_a_quarter_is_split_off():
    result = small_sweep(calibration=None, criteria=["his"], draws=2)
    assert result.examples == 45


def test_alpha_can_be_chosen_on_held_out_data():
    auto = HeadImportanceEntropy("auto")
    result = small_sweep(criteria=["hies", auto], held_out=HELD_OUT, draws=2)
    assert result.criteria == ["hies", auto.label]
    names = result.score_names[auto.label]
    assert len(names) == 2 and all(name.startswith("hies(alpha=") for name in names)


def test_a_stopped_sweep_goes_on(tmp_path, monkeypatch, sweep):
    path = tmp_path / "measured.json"
    measured = []
    original = module.pruned

    def counting(host, mask):
        measured.append(mask_key(mask))
        if len(measured) == 4:
            raise KeyboardInterrupt
        return original(host, mask)

    monkeypatch.setattr(module, "pruned", counting)
    with pytest.raises(KeyboardInterrupt):
        small_sweep(folder=tmp_path)
    assert len(json.loads(path.read_text())["outcomes"]) == 3
    with monkeypatch.context() as patch:
        patch.setattr(module, "score_heads", None)  # scores are kept too: calling it would raise
        resumed = small_sweep(folder=tmp_path)
    assert len(set(measured)) == len(sweep.outcomes) and len(measured) == len(sweep.outcomes) + 1
    assert resumed.to_json() == sweep.to_json()
    other = [(pixels * 2, labels) for pixels, labels in TEST]
    with pytest.raises(FormatError, match="data has changed"):
        prune_sweep(
            vit(), other, criteria=["his"], calibration=CALIBRATION, folder=tmp_path, progress=False
        )


def test_json_and_back(tmp_path, sweep):
    path = tmp_path / "sweep.json"
    sweep.to_json(path)
    again = PruneSweep.from_json(path)
    assert again == sweep and PruneSweep.from_json(sweep.to_json()) == sweep
    with pytest.raises(FormatError, match="PruneSweep"):
        PruneSweep.from_json('{"kind": "HeadMask"}')


def planted(gain: float, draws: int = 5, examples: int = 400) -> PruneSweep:
    """Return a sweep in which `good` is right more often than `bad`, on the same examples."""
    generator = torch.Generator().manual_seed(0)
    luck = torch.rand(examples, generator=generator)
    points, outcomes = [], {}
    for draw in range(draws):
        noise = 0.02 * torch.randn(1, generator=generator)
        for name, level in (("good", 0.7 + gain), ("bad", 0.7)):
            hits = luck < level + noise
            key = f"{name}{draw}"
            points.append(SweepPoint(name, 0.3, draw, key))
            figures = {"cls/Acc": float(hits.double().mean()), "cls/NLL": float(level + noise)}
            outcomes[key] = Outcome(figures, pack(hits), pack(~hits))
    baseline = {"cls/Acc": 0.9, "cls/NLL": 0.5}
    return PruneSweep("planted", examples, 32, "model", baseline, points, outcomes, {})


def test_intervals_hold_the_mean_and_pairing_makes_them_narrow():
    result = planted(0.05)
    good = result.interval("good", 0.3)
    assert good.low < good.value < good.high
    assert good.value == pytest.approx(sum(result.values("good", 0.3)) / 5)
    gain = result.difference("good", "bad", 0.3)
    assert gain.low > 0 and gain.value == pytest.approx(0.05, abs=0.02)
    assert gain.high - gain.low < good.high - good.low
    assert result.difference("bad", "good", 0.3).high < 0
    none = planted(0.0).difference("good", "bad", 0.3)
    assert none.value == none.low == none.high == 0


def test_the_bootstrap_knows_both_sources_of_noise():
    wide = planted(0.0, examples=50).interval("good", 0.3)
    narrow = planted(0.0, examples=5000).interval("good", 0.3)
    assert wide.high - wide.low > 2 * (narrow.high - narrow.low) > 0
    # examples alone, from the binomial: the draws' noise comes on top
    assert narrow.high - narrow.low > 2 * 1.96 * math.sqrt(0.21 / 5000)


def test_students_interval_of_other_figures():
    result = planted(0.0)
    values = torch.tensor(result.values("good", 0.3, "cls/NLL"), dtype=torch.float64)
    found = result.interval("good", 0.3, "cls/NLL")
    half = 2.776 * float(values.std()) / math.sqrt(5)
    assert found.high - found.value == pytest.approx(half, rel=1e-3)
    single = planted(0.0, draws=1).interval("good", 0.3, "cls/NLL")
    assert single.low == single.value == single.high


def test_tables_name_the_regime(sweep):
    assert [regime(r) for r in (0.1, 0.2, 0.3, 0.5)] == ["redundancy"] * 2 + ["specialisation"] * 2
    text = sweep.markdown()
    assert text.count("\n") == 7 and "25% (specialisation)" in text and "*unpruned*" in text
    assert "PruneSweep" in str(sweep)


def test_flags_and_masks_as_text():
    flags = torch.tensor([False, True, True, False, False, True, False])
    assert torch.equal(unpack(pack(flags), 7), flags)
    with pytest.raises(FormatError, match="7 flags"):
        unpack(pack(flags), 8)
    assert mask_key(HeadMask([[1, 0], [1, 1, 0]])) == "10.110"


def test_rank_correlation_equals_scipy():
    a = HeadScores([[1.0, 2.0, 2.0], [5.0, 4.0, 0.0]])
    b = HeadScores([[0.3, 0.3, 0.1], [0.9, 0.2, 0.2]])
    names, matrix = rank_correlation({"a": a, "b": b})
    expected = spearmanr(a.flat().numpy(), b.flat().numpy()).statistic
    assert names == ["a", "b"] and float(matrix[0, 1]) == pytest.approx(expected)
    assert float(matrix[0, 0]) == pytest.approx(1.0)
    _, turned = rank_correlation({"a": a, "b": b}, lower_is_kept=["b"])
    assert float(turned[0, 1]) == pytest.approx(-expected)
    _, constant = rank_correlation({"a": a, "c": HeadScores([[1.0] * 3, [1.0] * 3])})
    assert float(constant[0, 1]) == 0


def test_what_cannot_be_swept_is_refused(sweep):
    with pytest.raises(HydraError, match="ratio 1"):
        small_sweep(ratios=(1.0,))
    with pytest.raises(HydraError, match="at least one"):
        small_sweep(criteria=[])
    with pytest.raises(DataError, match="only once"):
        prune_sweep(vit(), iter(TEST), calibration=CALIBRATION)
    with pytest.raises(UnknownNameError, match="magnitude"):
        sweep.at("fisher", 0.5)
    with pytest.raises(UnknownNameError):
        small_sweep(criteria=["hsi"])


def test_figures(sweep):
    axes = plot_prune_sweep(sweep, "stability")
    assert len(axes.get_lines()) >= 5 and "tability" in axes.get_ylabel()
    labels = {text.get_text() for text in axes.get_legend().get_texts()}
    assert set(sweep.criteria) <= labels
    same = plot_prune_sweep(sweep, "cls/Acc", ax=axes, criteria=["his"])
    assert same is axes
    heat = plot_head_scores(sweep.scores["his"])
    assert heat.images[0].get_array().shape == (3, 4) and heat.get_xlabel() == "head"
    ragged = plot_head_scores(HeadScores([[1.0, 2.0, 3.0], [1.0]]))
    assert ragged.images[0].get_array().mask.sum() == 2  # what is missing is NaN
    matrix = plot_rank_correlation(sweep.scores, lower_is_kept=sweep.lower_is_kept)
    assert matrix.images[0].get_array().shape == (5, 5)
