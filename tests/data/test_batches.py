"""Batches, data, splits and fingerprints."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from hydra_ensembles.data.batches import (
    batch_length,
    images_of,
    join,
    labels_of,
    read_batch,
    take,
    with_images,
    without_labels,
)
from hydra_ensembles.data.loaders import (
    Batches,
    Mapped,
    as_data,
    check_reiterable,
    count,
    indexable,
)
from hydra_ensembles.data.splits import fingerprint, sample, split
from hydra_ensembles.errors import DataError


def images(n: int, *, seed: int = 0) -> torch.Tensor:
    return torch.rand((n, 3, 4, 4), generator=torch.Generator().manual_seed(seed))


def sentences(lengths: list[int], *, pad: int = 9) -> dict[str, torch.Tensor]:
    longest = max(lengths)
    ids = torch.full((len(lengths), longest), pad)
    mask = torch.zeros(len(lengths), longest, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.arange(length) + 10 * row
        mask[row, :length] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.arange(len(lengths)) % 2}


@pytest.mark.parametrize(
    "batch",
    [
        images(3),
        (images(3), torch.arange(3)),
        [images(3), torch.arange(3)],
        {"pixel_values": images(3), "labels": torch.arange(3)},
        ({"pixel_values": images(3)}, torch.arange(3)),
        (images(3),),
    ],
)
def test_every_kind_of_batch_is_understood(batch: object) -> None:
    assert batch_length(batch) == 3
    assert torch.equal(images_of(batch), images(3))
    assert batch_length(take(batch, [2, 0])) == 2
    assert torch.equal(images_of(take(batch, [2, 0])), images(3)[[2, 0]])
    doubled = with_images(batch, images(3) * 2)
    assert torch.equal(images_of(doubled), images(3) * 2)
    bare = without_labels(batch)
    assert labels_of(bare) is None
    assert torch.equal(images_of(bare), images(3))
    again = join([take(batch, [0]), take(batch, slice(1, 3))])
    assert torch.equal(images_of(again), images(3))


def test_texts_are_one_column() -> None:
    batch = {"text": ["a", "b", "c"], "labels": torch.tensor([0, 1, 2])}
    assert batch_length(batch) == 3
    assert take(batch, [1])["text"] == ["b"]
    assert join([batch, batch])["text"] == ["a", "b", "c"] * 2


def test_joining_sentences_pads_with_their_own_padding() -> None:
    short, long = sentences([1, 2]), sentences([4, 3], pad=9)
    whole = join([short, long])
    assert whole["input_ids"].shape == (4, 4)
    assert whole["input_ids"][0].tolist() == [0, 9, 9, 9]
    assert whole["attention_mask"][1].tolist() == [1, 1, 0, 0]


def test_padding_is_looked_for_in_all_batches() -> None:
    whole = indexable([sentences([2, 2]), sentences([3, 3]), sentences([5, 1], pad=9)])
    assert next(iter(whole.subset([0, 2])))["input_ids"][0].tolist() == [0, 1, 9]


def test_a_pad_token_is_used_where_no_text_is_padded() -> None:
    texts = [sentences([2, 2]), sentences([4, 4])]
    for pad_id, expected in ((None, 0), (7, 7)):
        batch = next(iter(indexable(texts, pad_id=pad_id).subset([0, 2])))
        assert batch["input_ids"][0].tolist() == [0, 1, expected, expected]
        assert batch["attention_mask"][0].tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("apart", [False, True])
def test_labels_of_padding_do_not_count(apart: bool) -> None:
    def tagged(lengths: list[int]) -> object:
        batch = sentences(lengths)
        labels = torch.ones_like(batch.pop("labels")[:, None] * batch["input_ids"])
        return (batch, labels) if apart else {**batch, "labels": labels}

    data = indexable([tagged([2, 2]), tagged([3, 3])])
    assert data.labels[0].tolist() == [1, 1, -100]
    whole = next(iter(data.subset([0, 2])))
    assert labels_of(whole).tolist() == [[1, 1, -100], [1, 1, 1]]


def test_boxes_of_words_are_padded_along() -> None:
    def boxed(length: int) -> dict[str, torch.Tensor]:
        return {**sentences([length]), "bbox": torch.ones(1, length, 4)}

    whole = join([boxed(2), boxed(3)])
    assert whole["bbox"].shape == (2, 3, 4)
    assert whole["bbox"][0].sum(-1).tolist() == [4, 4, 0]


def test_texts_of_two_lengths_need_a_mask() -> None:
    with pytest.raises(DataError, match="attention_mask"):
        join([{"input_ids": torch.ones(1, 2).long()}, {"input_ids": torch.ones(1, 3).long()}])


def test_joining_images_of_two_sizes_is_refused() -> None:
    with pytest.raises(DataError, match="one size"):
        join([torch.zeros(1, 3, 4, 4), torch.zeros(1, 3, 5, 5)])


def test_as_data_takes_what_people_have() -> None:
    x, y = images(7), torch.arange(7)
    loader = DataLoader(TensorDataset(x, y), batch_size=3)
    assert as_data(loader) is loader
    batches = [(x, y)]
    assert as_data(batches) is batches
    for source in ((x, y), TensorDataset(x, y)):
        data = as_data(source, batch_size=3)
        assert [batch_length(batch) for batch in data] == [3, 3, 1]
        assert count(data) == 7
        assert torch.equal(torch.cat([images_of(batch) for batch in data]), x)
        assert torch.equal(torch.cat([images_of(batch) for batch in data]), x)  # twice
    mapping = as_data({"pixel_values": x, "labels": y}, batch_size=4)
    assert [set(batch) for batch in mapping] == [{"pixel_values", "labels"}] * 2
    assert count(loader) == 7


def test_a_generator_is_refused_with_a_way_out() -> None:
    with pytest.raises(DataError, match=r"only once.*list"):
        check_reiterable(images(2) for _ in range(2))
    with pytest.raises(DataError, match="found int"):
        as_data(3)
    with pytest.raises(DataError, match="only once"):
        Mapped(iter([images(2)]), lambda: lambda batch: batch)


def test_info_goes_along_with_a_subset() -> None:
    data = Batches(lambda rows: torch.tensor(rows), range(9), info={"class_names": ["a"]})
    part = data.subset([8, 1])
    assert part.class_names == ["a"]
    assert next(iter(part)).tolist() == [8, 1]
    with pytest.raises(AttributeError, match="nothing"):
        _ = part.nothing


def test_indexable_reads_lists_across_batches() -> None:
    data = [sentences([2, 1, 3]), sentences([5]), sentences([1, 4])]
    part = indexable(data).subset([5, 3, 0, 1], batch_size=4)
    batch = next(iter(part))
    assert batch["attention_mask"].sum(1).tolist() == [4, 5, 2, 1]
    assert torch.equal(part.labels, batch["labels"])


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    seed=st.integers(0, 5),
    lot=st.integers(1, 7),
)
def test_split_is_a_partition_and_stratified(sizes: list[int], seed: int, lot: int) -> None:
    labels = torch.cat([torch.full((size,), number) for number, size in enumerate(sizes)])
    n = len(labels)
    x = torch.arange(n).float()[:, None]
    fractions = {"select": 0.6, "stop": 0.2, "temperature": 0.2}
    if n < 5:
        return
    parts = split(as_data((x, labels), batch_size=lot), fractions, seed=seed)
    rows = [torch.cat([batch[0][:, 0] for batch in part]) for part in parts.values()]
    assert sorted(torch.cat(rows).tolist()) == list(range(n))
    for (name, part), share in zip(parts.items(), fractions.values(), strict=True):
        assert abs(part.count - share * n) <= 1, name
        for number, size in enumerate(sizes):
            got = int((part.labels == number).sum())
            assert abs(got - share * size) < 2


def test_split_does_not_depend_on_batch_size_or_kind_of_data() -> None:
    x, y = images(40), torch.arange(40) % 4
    fractions = {"a": 0.5, "b": 0.25}
    one = split(as_data((x, y), batch_size=7), fractions, seed=3)
    two = split(DataLoader(TensorDataset(x, y), batch_size=40), fractions, seed=3)
    other = split(as_data((x, y)), fractions, seed=4)
    assert {name: fingerprint(part) for name, part in one.items()} == {
        name: fingerprint([tuple(batch) for batch in part]) for name, part in two.items()
    }
    assert one["a"].count == 20
    assert one["b"].count == 10  # a quarter is dropped
    assert fingerprint(other["a"]) != fingerprint(one["a"])


def test_split_spreads_classes_of_one_example() -> None:
    parts = split(as_data((images(100), torch.arange(100))), {"a": 0.6, "b": 0.4}, seed=0)
    assert (parts["a"].count, parts["b"].count) == (60, 40)
    assert 10 < parts["b"].labels.float().mean() < 90  # not the last classes


def test_bad_splits_are_refused() -> None:
    data = as_data((images(2), torch.arange(2)))
    with pytest.raises(DataError, match="too few"):
        split(data, {"a": 0.6, "b": 0.2, "c": 0.2})
    with pytest.raises(DataError, match="at most 1"):
        split(data, {"a": 0.9, "b": 0.2})
    with pytest.raises(DataError, match="empty"):
        split([], {"a": 1.0})


def test_sample_takes_every_class() -> None:
    data = as_data((images(100), torch.arange(100) // 10))
    part = sample(data, 20, seed=1)
    assert part.count == 20
    assert part.labels.bincount(minlength=10).tolist() == [2] * 10
    assert sample(data, 1000) is data


def test_fingerprint_tells_content_not_layout() -> None:
    x, y = images(10), torch.arange(10)
    base = fingerprint(as_data((x, y), batch_size=3))
    assert base == fingerprint(as_data((x, y), batch_size=10))
    assert base != fingerprint(as_data((x, y + 1), batch_size=3))
    assert base != fingerprint(as_data((x.flip(0), y), batch_size=3))
    assert base != fingerprint(as_data((x.double(), y), batch_size=3))
    changed = x.clone()
    changed[9, 2, 3, 3] += 1e-6
    assert base != fingerprint(as_data((changed, y), batch_size=3))
    assert fingerprint(as_data(x.bfloat16()))  # numpy has no such type


def test_fingerprint_ignores_padding() -> None:
    whole = sentences([2, 1, 5, 3])
    apart = [{k: v[:2, :2] if v.ndim == 2 else v[:2] for k, v in whole.items()}]
    apart.append(take(whole, [2, 3]))
    assert fingerprint([whole]) == fingerprint(apart)
    moved = {**whole, "attention_mask": whole["attention_mask"].roll(1, 0)}
    assert fingerprint([moved]) != fingerprint([whole])
    with pytest.raises(DataError, match="empty"):
        fingerprint([])


@pytest.mark.parametrize(
    "batch",
    [
        {"x": images(3), "mask": "m", "labels": [0, 1, 2]},
        ({"x": images(3), "mask": "m"}, torch.arange(3)),
    ],
)
def test_a_batch_is_split_checked_and_moved_at_once(batch: object) -> None:
    args, kwargs, labels = read_batch(batch, "meta")
    assert args == () and set(kwargs) == {"x", "mask"} and kwargs["mask"] == "m"
    assert kwargs["x"].device.type == "meta" and kwargs["x"].shape == (3, 3, 4, 4)
    assert labels is not None and labels.tolist() == [0, 1, 2]  # labels are not moved


def test_a_batch_that_cannot_be_read_is_refused() -> None:
    (inputs,), kwargs, labels = read_batch(images(2))
    assert torch.equal(inputs, images(2)) and kwargs == {} and labels is None
    with pytest.raises(DataError, match=r"NaN.*1 of 2"):
        read_batch((torch.tensor([[1.0], [float("nan")]]), torch.arange(2)))
    with pytest.raises(DataError, match=r"nothing.*test data"):
        read_batch(torch.zeros(0, 3), where="the test data")
    with pytest.raises(DataError, match="tuple of 3"):
        read_batch((1, 2, 3))
