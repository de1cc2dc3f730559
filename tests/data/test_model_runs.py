"""Any classifier over any data: batches in, member logits out, errors that name the data set."""

from __future__ import annotations

from collections import UserDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hydra_ensembles.data import model_runs as inf
from hydra_ensembles.errors import DataError
from hydra_ensembles.prediction import Prediction
from hydra_ensembles.uncertainty import predict_from_logits

X, Y = torch.randn(10, 4), torch.arange(10) % 3


class Host(nn.Module):
    """A host in the manner of transformers: keyword inputs, an output with logits."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.dropout = nn.Dropout(0.5)
        self.seen: dict = {}

    def forward(self, pixel_values=None, *, mask=None, labels=None):
        self.seen = {"mask": mask, "labels": labels, "training": self.training}
        return SimpleNamespace(loss=None, logits=self.dropout(self.linear(pixel_values)))


@pytest.mark.parametrize(
    "batch",
    [
        {"pixel_values": X, "labels": Y},
        {"pixel_values": X, "label": Y},
        UserDict(pixel_values=X, labels=Y),  # what a tokenizer's BatchEncoding is
        ({"pixel_values": X}, Y),
        (X, Y),
        [X, Y],
        (X, Y.tolist()),
    ],
)
def test_batches_of_any_form_give_the_same_logits(batch):
    host = Host()
    logits, labels = inf.collect_logits(host, [batch, batch])
    expected = host.linear(X).detach()
    torch.testing.assert_close(logits, torch.cat([expected, expected])[:, None])
    assert labels.tolist() == Y.tolist() * 2
    assert host.seen["labels"] is None


def test_batches_without_labels():
    for batch in ({"pixel_values": X}, (X,), X):
        logits, labels = inf.collect_logits(Host(), [batch])
        assert logits.shape == (10, 1, 3)
        assert labels is None


def test_other_inputs_reach_the_host():
    host = Host()
    inf.call_model(host, {"pixel_values": X, "mask": "m", "labels": Y})
    assert host.seen["mask"] == "m"


def test_modes_and_gradients_are_given_back():
    host = Host().train()
    host.dropout.eval()
    logits, _ = inf.collect_logits(host, [(X, Y)])
    assert host.seen["training"] is False
    assert (host.training, host.linear.training, host.dropout.training) == (True, True, False)
    assert not logits.requires_grad


def test_modes_are_given_back_after_an_error():
    host = Host().train()
    with pytest.raises(DataError):
        inf.collect_logits(host, [(torch.randn(2, 5), Y[:2])])
    assert host.training
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("output", "shape"),
    [
        (torch.randn(2, 3), (2, 1, 3)),
        (torch.randn(2, 4, 3), (2, 4, 3)),
        ({"logits": torch.randn(2, 3)}, (2, 1, 3)),
        (SimpleNamespace(logits=torch.randn(2, 3)), (2, 1, 3)),
        (SimpleNamespace(logits=torch.randn(2, 3), member_logits=torch.randn(2, 5, 3)), (2, 5, 3)),
        ((torch.randn(2, 3), "hidden"), (2, 1, 3)),
        (predict_from_logits(torch.randn(2, 4, 3)), (2, 4, 3)),
    ],
)
def test_outputs_of_any_form(output, shape):
    assert inf.member_logits_of(output).shape == shape


def test_an_output_without_logits_is_refused():
    with pytest.raises(DataError, match=r"expected a tensor or an object with \.logits"):
        inf.member_logits_of(SimpleNamespace(hidden=torch.randn(2, 3)))


class Announced(Host):
    def predict(self, batch) -> Prediction:
        assert "labels" not in batch
        return predict_from_logits(torch.ones(10, 2, 3), temperature=2.0)


class Unannounced(Host):
    def predict(self, batch):
        return predict_from_logits(torch.ones(10, 2, 3), temperature=2.0)


class Bare:
    def predict(self, batch):
        return predict_from_logits(torch.ones(10, 2, 3), temperature=2.0)


@pytest.mark.parametrize("model", [Announced(), Unannounced(), Bare()])
def test_predictions_are_preferred(model):
    logits, _ = inf.collect_logits(model, [{"pixel_values": X, "labels": Y}])
    torch.testing.assert_close(logits, torch.full((10, 2, 3), 0.5))


class OfItsOwn(Host):
    def predict(self, images, threshold):
        return "cat"


class Classes(Host):
    def predict(self, batch):
        return batch["pixel_values"].argmax(-1)


@pytest.mark.parametrize("model", [OfItsOwn(), Classes()])
def test_another_kind_of_predict_is_left_alone(model):
    logits, _ = inf.collect_logits(model, [{"pixel_values": X, "labels": Y}])
    torch.testing.assert_close(logits[:, 0], model.linear(X).detach())


def collect(batches, model=None, **options):
    return inf.collect_logits(model or Host(), batches, name="svhn", **options)


def test_bad_data_is_named():
    with pytest.raises(DataError, match=r"'svhn' is empty"):
        collect([])
    used = iter([(X, Y)])
    collect(used)
    with pytest.raises(DataError, match=r"'svhn' is empty.*generator"):
        collect(used)
    bad = X.clone()
    bad[0] = torch.nan
    with pytest.raises(DataError, match=r"NaN.*1 of 10.*batch 1 .*'svhn'"):
        collect([(X, Y), (bad, Y)])
    with pytest.raises(DataError, match=r"Label 7.*batch 0 .*'svhn'.*3 classes"):
        collect([(X, torch.full((10,), 7))])
    with pytest.raises(DataError, match=r"Label -100.*batch 0 .*'svhn'"):
        collect([(X, torch.full((10,), -100))])
    with pytest.raises(DataError, match=r"failed.*batch 0 .*'svhn'.*\[2, 5\]"):
        collect([(torch.randn(2, 5), Y[:2])])
    with pytest.raises(DataError, match=r"no labels.*batch 0 .*'svhn'"):
        collect([X], need_labels=True)
    with pytest.raises(DataError, match=r"Some batches.*'svhn'"):
        collect([(X, Y), (X,)])
    with pytest.raises(DataError, match=r"4 labels.*10 examples.*batch 0 .*'svhn'"):
        collect([(X, Y[:4])])
    with pytest.raises(DataError, match="one whole class number per example"):
        collect([(X, torch.rand(10))])
    with pytest.raises(DataError, match=r"batch 0 .*'svhn'.*tuple of 3"):
        collect([(X, Y, X)])


def test_infinite_logits_are_refused_but_masked_classes_are_not():
    class Fixed(nn.Module):
        def __init__(self, value):
            super().__init__()
            self.value = value

        def forward(self, x):
            out = torch.zeros(len(x), 3)
            out[:, 0] = self.value
            return out

    collect([(X, Y)], Fixed(-torch.inf))
    with pytest.raises(DataError, match="infinite values"):
        collect([(X, Y)], Fixed(torch.inf))


def test_members_may_not_change_between_batches():
    class Growing:
        members = 0

        def __call__(self, x):
            self.members += 1
            return torch.zeros(len(x), self.members, 3)

    with pytest.raises(DataError, match=r"2 members.*1 x 3"):
        collect([X, X], Growing())


def test_other_numbers_of_classes_are_refused():
    with pytest.raises(DataError, match=r"3 classes.*'svhn'.*10"):
        list(inf.run_model(Host(), [X], name="svhn", classes=10))


def test_labels_of_another_task_can_be_ignored():
    batches = [(X, torch.full((10,), 99))]
    [answers] = inf.run_model(Host(), batches, ignore_labels=True)
    assert answers.labels is None
