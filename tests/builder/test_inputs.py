"""Inputs that cannot be used are named before any search starts."""

from __future__ import annotations

import math

import pytest
import torch

from hydra_ensembles import HeadMask, build, find_circuit, fuse, score_heads
from hydra_ensembles.data.model_runs import collect_logits
from hydra_ensembles.errors import DataError

from ..zoo import sharp
from .test_building import pictures, sentences


def with_labels(labels):
    images = torch.cat([x for x, _ in pictures(30)])
    return [(images[:15], labels[:15]), (images[15:], labels[15:])]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.rand(30), "class number"),
        (torch.full((30,), 1000), "Label 1000.*calibration"),
        (torch.full((30,), -100), "Label -100.*calibration"),
        (torch.zeros(30, 3).long(), "class number"),
    ],
)
def test_labels_that_are_no_classes(labels, message):
    with pytest.raises(DataError, match=message):
        build(sharp("timm"), with_labels(labels), progress=False)


def test_missing_labels():
    with pytest.raises(DataError, match=r"no labels.*calibration"):
        build(sharp("timm"), [(x,) for x, _ in pictures(30)], progress=False)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_inputs_that_are_not_finite(value):
    model = sharp("timm")
    data = pictures(30)
    ensemble = fuse(model, [HeadMask.full(model)])
    data[1][0][3, 0, 0, 0] = value
    kind = "NaN" if math.isnan(value) else "infinite"
    with pytest.raises(DataError, match=f"{kind}.*1 of 15.*example 3"):
        ensemble.predict(data[1])
    with pytest.raises(DataError, match=kind):
        collect_logits(ensemble, data)
    with pytest.raises(DataError, match=f"{kind}.*calibration"):
        build(model, data, progress=False)
    with pytest.raises(DataError, match=f"{kind}.*noise"):
        build(model, pictures(30), ood={"noise": [(x,) for x, _ in data]}, progress=False)


def test_an_empty_batch_of_text():
    model = sharp("bert")
    ensemble = fuse(model, [HeadMask.full(model)])
    batch = sentences(15)[0]
    with pytest.raises(DataError, match="nothing to predict"):
        ensemble.predict({key: value[:0] for key, value in batch.items()})
    with pytest.raises(DataError, match="one token"):
        ensemble.predict({"input_ids": torch.empty(2, 0, dtype=torch.long)})
    with pytest.raises(DataError, match="empty"):
        build(model, [{key: value[:0] for key, value in batch.items()}], progress=False)


def test_the_siblings_of_build_name_them_too():
    model = sharp("timm")
    bad = pictures(30)
    bad[1][0][3, 0, 0, 0] = math.nan
    with pytest.raises(DataError, match=r"NaN.*1 of 15"):
        score_heads(model, bad, criterion="taylor", progress=False)
    with pytest.raises(DataError, match=r"NaN.*batch 1 .*'id'"):
        find_circuit(model, id=bad, progress=False)
    for labels, message in ((torch.rand(30), "class number"), (torch.full((30,), 7), "7")):
        with pytest.raises(DataError, match=message):
            find_circuit(model, id=with_labels(labels), progress=False)
