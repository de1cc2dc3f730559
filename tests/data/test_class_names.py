"""Class names of models, and the check of an order that was assumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hydra_ensembles as hydra
from hydra_ensembles.data import Batches, check_class_order, text_file
from hydra_ensembles.data.class_names import (
    ClassOrderError,
    better_order,
    class_finder,
    model_names,
)
from hydra_ensembles.errors import DataError


def shuffled(share: float, count: int, classes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return answers and labels that agree on about a share, else are drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    drawn = torch.randint(classes, (count,), generator=generator)
    return torch.where(torch.rand(count, generator=generator) < share, labels, drawn), labels


def test_a_permuted_order_is_found() -> None:
    for classes, order in ((2, [1, 0]), (5, [3, 0, 4, 1, 2])):
        answers, labels = shuffled(0.7, 200, classes, seed=0)
        assert better_order(answers, labels, classes) is None
        found = better_order(torch.tensor(order)[answers], labels, classes)
        assert found is not None and found.after - found.before > 0.5
        assert [order.index(number) for number in range(classes)] == found.order


@pytest.mark.parametrize("classes", [2, 3, 10])
@pytest.mark.parametrize("count", [10, 30, 200])
def test_a_bad_model_is_not_misordered(classes: int, count: int) -> None:
    for seed in range(100):
        answers, labels = shuffled(0.0, count, classes, seed)
        assert better_order(answers, labels, classes, seed=seed) is None
    everything_one = torch.ones(count, dtype=torch.long)
    assert better_order(everything_one, labels, classes) is None


def test_nineteen_percent_of_two_classes_are_misordered() -> None:
    labels = torch.arange(200) % 2
    wrong = torch.arange(200) % 200 >= 39
    assert float((~wrong).double().mean()) == pytest.approx(0.195)
    found = better_order(torch.where(wrong, 1 - labels, labels), labels, 2)
    assert found is not None and found.order == [1, 0]


class Words(nn.Module):
    """A classifier of the first token, with class names or without."""

    def __init__(self, names: list[str] | None = None, classes: int = 2) -> None:
        super().__init__()
        self.num_classes = classes
        if names is not None:
            self.id2label = dict(enumerate(names))

    def forward(self, input_ids: Tensor, **_: Any) -> Tensor:
        return nn.functional.one_hot(input_ids[:, 0] % self.num_classes, self.num_classes).float()


def tokenizer(texts: list[str], **_: object) -> dict[str, Tensor]:
    return {"input_ids": torch.tensor([[int(text == "good")] for text in texts])}


@pytest.fixture
def data(tmp_path: Path) -> Callable[..., Batches]:
    def read(good: str, bad: str, **options: Any) -> Batches:
        path = tmp_path / "data.csv"
        path.write_text("text,label\n" + f"good,{good}\nbad,{bad}\n" * 20)
        return text_file(path, tokenizer, **options)

    return read


def test_readers_of_python_keep_to_the_rule(data: Callable[..., Batches]) -> None:
    fine, turned = ("positive", "negative"), ("a good one", "some other")
    given = data(*turned, class_names=["Some other", "a good one"])
    assert given.labels is not None and given.labels[:2].tolist() == [1, 0]
    for model in (Words(), Words(["negative", "positive"])):
        assert hydra.evaluate(model, data(*fine), progress=False)["cls/Acc"] == 1
        assert hydra.evaluate(model, data("1", "0"), progress=False)["cls/Acc"] == 1
    assert hydra.evaluate(Words(), given, progress=False)["cls/Acc"] == 1
    for run in (hydra.evaluate, hydra.fit_policy):
        with pytest.raises(ClassOrderError, match="'some other,a good one'"):
            run(Words(), data(*turned), progress=False)
    with pytest.raises(ClassOrderError, match="positive=0, negative=1"):
        check_class_order(Words(["positive", "negative"]), data(*fine))
    with pytest.raises(ClassOrderError, match="Pass class_names"):
        check_class_order(Words(["glad", "sad"]), data(*fine))
    with pytest.raises(DataError, match="3 classes"):
        check_class_order(Words(classes=3), data(*fine))


def test_data_is_checked_once(data: Callable[..., Batches]) -> None:
    known = data("positive", "negative")
    check_class_order(Words(), known)
    pruned = Words()
    pruned.forward = lambda input_ids: Words.forward(pruned, 1 - input_ids)  # type: ignore
    assert hydra.evaluate(pruned, known, progress=False)["cls/Acc"] == 0
    with pytest.raises(ClassOrderError, match="positive=0"):  # names are compared every time
        hydra.evaluate(Words(["positive", "negative"]), known, progress=False)


def test_a_name_is_found_by_any_spelling() -> None:
    find = class_finder([("tench, Tinca tinca", "n01440764"), "crane", "crane", "Cat", "cat"])
    assert find("tench") == find("Tench") == find("n01440764") == [0]
    assert find("cat") == [4] and find("crane") == [1, 2] and find("unicorn") == []


def test_names_of_timm_models() -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model("vit_tiny_patch16_224", depth=1, embed_dim=12, num_heads=1)
    names = model_names(model)
    assert names is not None and len(names) == 1000 and names[1] == ("goldfish", "n01443537")
    small = timm.create_model(
        "vit_tiny_patch16_224", depth=1, embed_dim=12, num_heads=1, num_classes=3
    )
    assert model_names(small) is None
    small.pretrained_cfg = {**small.pretrained_cfg, "label_names": {"0": "b", "2": "a"}}
    assert model_names(small) == [("b",), ("class 1",), ("a",)]
    small.pretrained_cfg = {
        **small.pretrained_cfg,
        "label_names": ["z", "a", "m"],
        "label_descriptions": {"z": "zebra"},
    }
    assert model_names(small) == [("z", "zebra"), ("a",), ("m",)]
    masks = [hydra.HeadMask.full(small)]
    assert model_names(hydra.fuse(small, masks)) == model_names(small)


def test_labels_of_a_dataset_that_are_left_out(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    from hydra_ensembles.data import load_data

    columns = {"text": ["good", "bad"], "label": [1, -1]}
    names = datasets.ClassLabel(names=["negative", "positive"])
    plain = datasets.Dataset.from_dict(columns).cast_column("label", names)
    plain.save_to_disk(tmp_path / "set")
    for given in (None, ["negative", "positive"]):
        with pytest.raises(DataError, match="'-1'"):
            load_data(tmp_path / "set", tokenizer=tokenizer, class_names=given)
