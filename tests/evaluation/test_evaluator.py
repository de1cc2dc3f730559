"""`evaluate` from models to figures, against references computed from the same logits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hydra_ensembles.data.model_runs import collect_logits
from hydra_ensembles.errors import DataError, UnknownNameError
from hydra_ensembles.evaluation import Results, evaluate
from hydra_ensembles.evaluation.metrics import (
    AdaptiveError,
    brier,
    expected_calibration_error,
    figures_of_scores,
    negative_log_likelihood,
    once,
)
from hydra_ensembles.prediction import Prediction
from hydra_ensembles.uncertainty import (
    disagreement,
    energy,
    fit_temperature,
    msp,
    mutual_information,
    pairwise_kl,
    predict_from_logits,
)
from tests.evaluation.test_metrics_selective import figures as selective


class Ensemble(nn.Module):
    """Three linear members around one teacher."""

    def __init__(self, members: int = 3, *, seed: int = 0, sharp: float = 4.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        teacher = torch.randn(5, 8, generator=generator)
        generator.manual_seed(seed)
        noise = torch.randn(members, 5, 8, generator=generator)
        self.weight = nn.Parameter(teacher + 0.4 * noise)
        self.sharp = sharp

    def forward(self, x):
        return self.sharp * torch.einsum("bd,mcd->bmc", x, self.weight)


def inputs(size: int, *, seed: int, scale: float = 1.0):
    return scale * torch.randn(size, 8, generator=torch.Generator().manual_seed(seed))


def batches(x, y=None, size=32):
    if y is None:
        return [{"x": part} for part in x.split(size)]
    pairs = zip(x.split(size), y.split(size), strict=True)
    return [{"x": part, "labels": label} for part, label in pairs]


X = inputs(300, seed=1)
Y = Ensemble(1, seed=99)(X)[:, 0].argmax(-1).detach()
TEST = batches(X, Y)
OOD = {"noise": batches(inputs(200, seed=2, scale=0.3)), "far": batches(inputs(90, seed=3) + 2)}
SHIFTS = {"blur": batches(X + inputs(300, seed=4, scale=0.5), Y)}


@pytest.fixture(scope="module")
def results():
    return evaluate(
        Ensemble(),
        TEST,
        ood=OOD,
        shifts=SHIFTS,
        score=["msp", "energy"],
        temperature=batches(X[:100], Y[:100]),
        name="three",
    )


def test_figures_equal_the_metrics(results):
    logits, labels = collect_logits(Ensemble(), TEST)
    confidence, predicted = logits.double().softmax(-1).mean(1).max(-1)
    confidence, right = confidence.float(), predicted == labels
    for key, value in {
        "cls/Acc": right.double().mean(),
        "cls/NLL": negative_log_likelihood(logits.double(), labels).mean(),
        "cls/Brier": brier(logits.double(), labels).mean(),
        "cal/ECE": expected_calibration_error(confidence, right),
        "cal/aECE": AdaptiveError(confidence, right).figure(once(300)),
    }.items():
        assert results[key] == pytest.approx(float(value), abs=1e-7), key
    for key, function in {
        "div/MI": mutual_information,
        "div/Disagreement": disagreement,
        "div/PairwiseKL": pairwise_kl,
    }.items():
        assert results[key] == pytest.approx(float(function(logits.double()).mean())), key
    unsure = msp(logits.double())
    for key, value in selective(unsure, ~right).items():
        assert results[f"sc/{key}"] == pytest.approx(float(value), abs=1e-9), key
    failures = figures_of_scores(unsure, ~right)
    for key in ("AUROC", "AUPR", "FPR95"):
        assert results[f"fail/{key}"] == pytest.approx(failures[key], abs=1e-9), key


@pytest.mark.parametrize("name", list(OOD))
def test_ood_figures_equal_the_metrics_and_scikit_learn(results, name):
    from sklearn.metrics import average_precision_score, roc_auc_score

    inside, _ = collect_logits(Ensemble(), TEST)
    outside, _ = collect_logits(Ensemble(), OOD[name])
    kind = torch.cat([torch.zeros(len(inside)), torch.ones(len(outside))])
    for prefix, score in ((f"ood/{name}", msp), (f"ood/{name}/energy", energy)):
        values = torch.cat([score(inside.double()), score(outside.double())])
        assert results[f"{prefix}/AUROC"] == pytest.approx(roc_auc_score(kind, values), abs=1e-9)
        expected = average_precision_score(kind, values)
        assert results[f"{prefix}/AUPR"] == pytest.approx(expected, abs=1e-9)
        for key, value in figures_of_scores(values, kind).items():
            assert results[f"{prefix}/{key}"] == pytest.approx(value, abs=1e-12)


def test_means_over_sets(results):
    for key in ("AUROC", "AUPR", "FPR95", "FPR95_ID_positive", "energy/AUROC"):
        mean = (results[f"ood/noise/{key}"] + results[f"ood/far/{key}"]) / 2
        assert results[f"ood/mean/{key}"] == pytest.approx(mean)
    assert results["shift/mean/cls/Acc"] == results["shift/blur/cls/Acc"]


def test_groups_of_sets_have_means_of_their_own(results):
    groups = {"near": {"noise": OOD["noise"], "far": OOD["far"]}, "other": OOD["far"]}
    found = evaluate(Ensemble(), TEST, ood=groups, score=["msp", "energy"])
    for key in ("AUROC", "FPR95", "energy/AUROC"):
        near, far = results[f"ood/noise/{key}"], results[f"ood/far/{key}"]
        assert found[f"ood/near/noise/{key}"] == near
        assert found[f"ood/near/mean/{key}"] == pytest.approx((near + far) / 2)
        assert found[f"ood/mean/{key}"] == pytest.approx((near + 2 * far) / 3)
    with pytest.raises(DataError, match="'mean'"):
        evaluate(Ensemble(), TEST, ood={"near": {"mean": OOD["far"]}})


def test_stored_logits_are_evaluated_like_their_model(results):
    def labelled(data):
        return [collect_logits(Ensemble(), data)]

    replayed = evaluate(
        lambda logits: logits,
        labelled(TEST),
        ood={name: [(collect_logits(Ensemble(), data)[0],)] for name, data in OOD.items()},
        shifts={name: labelled(data) for name, data in SHIFTS.items()},
        score=["msp", "energy"],
        temperature=labelled(batches(X[:100], Y[:100])),
    )
    assert replayed.figures == pytest.approx(results.figures, abs=1e-12)


def test_shifts_are_evaluated_like_the_data(results):
    alone = evaluate(Ensemble(), SHIFTS["blur"], name="blur")
    for key, value in alone.items():
        assert results[f"shift/blur/{key}"] == pytest.approx(value), key


def test_temperature_adds_columns_and_leaves_the_others(results):
    logits, labels = collect_logits(Ensemble(), batches(X[:100], Y[:100]))
    degrees = fit_temperature(logits, labels)
    assert results.settings["temperature"] == pytest.approx(degrees)
    cooled = evaluate(Ensemble(sharp=4.0 / degrees), TEST, ood=OOD, shifts=SHIFTS)
    plain = evaluate(Ensemble(), TEST, ood=OOD, shifts=SHIFTS)
    for key, value in cooled.items():
        assert results[f"post/{key}"] == pytest.approx(value, abs=2e-3), key
    for key, value in plain.items():
        assert results[key] == pytest.approx(value), key
    given = evaluate(Ensemble(), TEST, temperature=2.0)
    assert given["post/cls/NLL"] == pytest.approx(
        evaluate(Ensemble(sharp=2.0), TEST)["cls/NLL"], abs=1e-6
    )


def test_batch_size_does_not_matter(results):
    one = evaluate(Ensemble(), batches(X, Y, size=1), ood={"far": batches(inputs(90, seed=3) + 2)})
    for key in ("cls/NLL", "cal/ECE", "cal/aECE", "sc/AURC", "ood/far/AUROC"):
        assert one[key] == pytest.approx(results[key], abs=1e-6)


def test_unknown_lengths_work(results):
    """Generators are read once, which is enough."""
    streamed = evaluate(Ensemble(), (b for b in TEST), ood={"far": iter(OOD["far"])})
    assert streamed["ood/far/AUROC"] == results["ood/far/AUROC"]


class Predicting(Ensemble):
    def predict(self, batch) -> Prediction:
        return predict_from_logits(self(batch["x"]), temperature=2.0)


class LikeAHost(Ensemble):
    def forward(self, x, labels=None):
        assert labels is None
        return SimpleNamespace(logits=super().forward(x).mean(1), loss=None)


def test_models_of_every_kind():
    assert evaluate(Predicting(), TEST)["cls/NLL"] == pytest.approx(
        evaluate(Ensemble(sharp=2.0), TEST)["cls/NLL"], abs=1e-6
    )
    host = evaluate(LikeAHost(), TEST)
    assert host.settings["members"] == 1
    assert host["div/MI"] == 0.0
    model = Ensemble()
    plain = evaluate(lambda x: {"logits": model(x)}, TEST, name="function")
    assert plain["cls/Acc"] == evaluate(model, TEST)["cls/Acc"]
    assert plain.name == "function"
    assert evaluate(model, [(x["x"], x["labels"]) for x in TEST])["cls/Acc"] == plain["cls/Acc"]


def test_a_transformers_model_with_a_data_loader():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        num_labels=4,
    )
    model = transformers.BertForSequenceClassification(config)
    ids = torch.randint(50, (20, 7), generator=torch.Generator().manual_seed(0))
    rows = [
        {"input_ids": row, "attention_mask": torch.ones(7).long(), "labels": i % 4}
        for i, row in enumerate(ids)
    ]
    loader = torch.utils.data.DataLoader(rows, batch_size=6)
    encoded = transformers.BatchEncoding({"input_ids": ids, "attention_mask": torch.ones(20, 7)})
    figures = evaluate(model, loader, ood={"same": [encoded]}, progress=False)
    with torch.no_grad():
        logits = model.eval()(input_ids=ids).logits
    right = (logits.argmax(-1) == torch.arange(20) % 4).double().mean()
    assert figures["cls/Acc"] == pytest.approx(float(right))
    assert figures["ood/same/AUROC"] == pytest.approx(0.5, abs=0.01)


def test_a_fused_ensemble_is_read_through_predict():
    transformers = pytest.importorskip("transformers")
    import hydra_ensembles as hydra

    config = transformers.ViTConfig(
        image_size=8,
        patch_size=4,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=32,
        num_labels=3,
    )
    host = transformers.ViTForImageClassification(config).eval()
    masks = [hydra.HeadMask([[1, 1, 1, 1], row]) for row in ([1, 1, 0, 0], [0, 0, 1, 1])]
    ensemble = hydra.fuse(host, masks)
    generator = torch.Generator().manual_seed(0)
    data = [
        {
            "pixel_values": torch.randn(8, 3, 8, 8, generator=generator),
            "labels": torch.arange(8) % 3,
        }
        for _ in range(3)
    ]
    plain = evaluate(ensemble, data, ood={"same": data})
    assert plain.settings["members"] == 2
    assert plain["div/MI"] > 0
    logits = torch.cat([ensemble.predict(batch).member_logits for batch in data])
    again = evaluate(lambda x: logits, [(torch.zeros(24), torch.arange(8).repeat(3) % 3)])
    for key, value in again.items():
        assert plain[key] == pytest.approx(value, abs=1e-6), key
    ensemble.temperature = 0.01
    assert evaluate(ensemble, data)["cls/NLL"] > plain["cls/NLL"]


def test_names_are_found_by_their_other_spelling(results):
    assert results["ood/noise/msp/AUROC"] == results["ood/noise/AUROC"]
    assert "ood/mean/msp/FPR95" in results
    assert results.get("ood/noise/entropy/AUROC") is None
    with pytest.raises(UnknownNameError, match=r"'cls/Accuracy'.*cls/Acc"):
        results["cls/Accuracy"]


def test_a_perfect_model_has_no_failures_to_rank():
    model = Ensemble(1, seed=99)
    perfect = evaluate(model, TEST)
    assert perfect["cls/Acc"] == 1.0
    assert perfect["sc/AURC"] == 0.0
    assert "fail/AUROC" not in perfect
    with pytest.raises(UnknownNameError, match="is right"):
        perfect["fail/AUROC"]


def test_mcm_divides_by_the_logit_scale():
    model = Ensemble(1)
    with pytest.raises(DataError, match="logit_scale"):
        evaluate(model, TEST, score="mcm")
    model.register_buffer("logit_scale", torch.tensor(4.0))
    scored = evaluate(model, TEST, ood=OOD, score=["mcm", "msp"], temperature=3.0)
    cosines = evaluate(Ensemble(1, sharp=1.0), TEST, ood=OOD, score="msp")
    assert scored["ood/noise/AUROC"] == pytest.approx(cosines["ood/noise/AUROC"], abs=1e-6)
    assert scored["post/ood/noise/AUROC"] == pytest.approx(scored["ood/noise/AUROC"], abs=1e-6)
    assert scored["ood/noise/msp/AUROC"] != scored["ood/noise/AUROC"]
    cooled = Ensemble(1, sharp=2.0)  # an ensemble that divides its logits by 2 itself
    cooled.register_buffer("logit_scale", torch.tensor(4.0))
    cooled.member_temperatures = [2.0]
    again = evaluate(cooled, TEST, ood=OOD, score="mcm")
    assert again["ood/noise/AUROC"] == pytest.approx(scored["ood/noise/AUROC"], abs=1e-6)


def test_bad_input_names_the_data_set():
    model, bad = Ensemble(), X.clone()
    bad[3] = torch.nan
    with pytest.raises(DataError, match=r"NaN .*'id'"):
        evaluate(model, batches(bad, Y))
    with pytest.raises(DataError, match=r"NaN .*'ood/holes'"):
        evaluate(model, TEST, ood={"holes": batches(bad)})
    with pytest.raises(DataError, match=r"Label 5.*'shift/fog'.*5 classes"):
        evaluate(model, TEST, shifts={"fog": batches(X, Y + 1)})
    with pytest.raises(DataError, match=r"'ood/svhn' is empty"):
        evaluate(model, TEST, ood={"svhn": []})
    with pytest.raises(DataError, match=r"failed.*batch 0 .*'ood/wide'.*\[4, 9\]"):
        evaluate(model, TEST, ood={"wide": [{"x": torch.randn(4, 9)}]})
    with pytest.raises(DataError, match=r"no labels.*batch 0 .*'id'"):
        evaluate(model, batches(X))
    with pytest.raises(DataError, match=r"no labels.*batch 0 .*'temperature'"):
        evaluate(model, TEST, temperature=batches(X))
    with pytest.raises(DataError, match="'mean'"):
        evaluate(model, TEST, ood={"mean": TEST})
    with pytest.raises(UnknownNameError, match="Did you mean 'energy'"):
        evaluate(model, TEST, score=["msp", "enrgy"])


def test_other_classes_on_ood_data_are_refused():
    class Changing(nn.Module):
        def forward(self, x):
            return x[:, : 5 if x.shape[0] == 32 else 4]

    with pytest.raises(DataError, match=r"4 classes.*'ood/other'.*5"):
        evaluate(Changing(), batches(X[:32], Y[:32]), ood={"other": batches(X[:8])})


def test_labels_of_ood_data_are_ignored():
    labelled = evaluate(Ensemble(), TEST, ood={"far": batches(X + 2, Y + 1000)})
    plain = evaluate(Ensemble(), TEST, ood={"far": batches(X + 2)})
    assert labelled.figures == plain.figures
    assert "ood/far/AUROC" in labelled and "ood/far/cls/Acc" not in labelled


def test_ood_data_without_a_name():
    assert "ood/ood/AUROC" in evaluate(Ensemble(), TEST, ood=OOD["far"])


def test_results_print_well(results):
    text = repr(results)
    assert text.startswith("Results of three on 300 examples, score msp")
    assert "ood/far (90): AUROC" in text
    assert isinstance(results, Results)
