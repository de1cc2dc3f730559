"""Corruptions of images and of text."""

from __future__ import annotations

import pytest
import torch

from hydra_ensembles.data import as_data
from hydra_ensembles.data.corruptions import (
    COMMON,
    corrupt,
    corrupt_texts,
    corrupted,
    corruptions,
    text_corruptions,
)
from hydra_ensembles.errors import DataError, UnknownNameError


def pictures(
    n: int = 3, size: tuple[int, int] = (32, 32), channels: int = 3, detail: int = 6
) -> torch.Tensor:
    """Smooth colourful shapes: noise alone would hide what blurs do."""
    generator = torch.Generator().manual_seed(7)
    coarse = torch.rand((n, channels, detail, detail), generator=generator)
    return torch.nn.functional.interpolate(coarse, size=size, mode="bilinear").clamp(0, 1)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).square().mean().sqrt())


def test_the_fifteen_are_there() -> None:
    assert len(COMMON) == 15
    assert set(COMMON) < set(corruptions)


@pytest.mark.parametrize("name", list(corruptions))
@pytest.mark.parametrize(
    ("size", "channels"), [((8, 8), 1), ((32, 32), 3), ((37, 51), 3), ((96, 96), 3), ((40, 28), 4)]
)
def test_any_size_gives_images_in_range(name: str, size: tuple[int, int], channels: int) -> None:
    x = pictures(2, size, channels)
    if name == "jpeg_compression" and channels == 4:
        with pytest.raises(DataError, match="channels"):
            corrupt(x, name)
        return
    for severity in (1, 5):
        y = corrupt(x, name, severity=severity)
        assert y.shape == x.shape
        assert y.dtype == x.dtype
        assert bool(y.isfinite().all())
        assert float(y.min()) >= 0
        assert float(y.max()) <= 1


@pytest.mark.parametrize("name", list(corruptions))
def test_severity_five_changes_more_than_one(name: str) -> None:
    x = pictures(4, (96, 96), detail=30)
    changes = [distance(x, corrupt(x, name, severity=severity)) for severity in range(1, 6)]
    assert min(changes) > 1e-3
    if name not in ("elastic_transform", "saturate"):  # the originals are not ordered
        assert changes[4] > changes[0]


@pytest.mark.parametrize("name", list(corruptions))
def test_the_result_does_not_depend_on_the_batch(name: str) -> None:
    x = pictures(5)
    whole = corrupt(x, name, severity=4, generator=torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(3)
    apart = torch.cat(
        [corrupt(part, name, severity=4, generator=generator) for part in x.split([1, 3, 1])]
    )
    torch.testing.assert_close(whole, apart, rtol=0, atol=1e-6)


def test_examples_and_seeds_differ() -> None:
    x = pictures(1).expand(2, -1, -1, -1)
    y = corrupt(x, "gaussian_noise", generator=torch.Generator().manual_seed(0))
    assert not torch.equal(y[0], y[1])
    other = corrupt(x, "gaussian_noise", generator=torch.Generator().manual_seed(1))
    assert not torch.equal(y, other)
    state = torch.random.get_rng_state()
    corrupt(x, "snow")
    assert torch.equal(state, torch.random.get_rng_state())  # the global state is left alone


def test_published_parameters_hold() -> None:
    grey = torch.full((1, 3, 224, 224), 0.5)
    assert abs(float(corrupt(grey, "gaussian_noise", severity=1).std()) - 0.08) < 0.002
    small = torch.full((1, 3, 32, 32), 0.5)
    assert abs(float(corrupt(small, "gaussian_noise", severity=1).std()) - 0.04) < 0.002
    shot = corrupt(grey, "shot_noise", severity=1)
    assert abs(float(shot.std()) - (0.5 / 60) ** 0.5) < 0.005
    impulse = corrupt(grey, "impulse_noise", severity=5)
    assert abs(float((impulse != 0.5).float().mean()) - 0.27) < 0.01
    flat = corrupt(pictures(1, (224, 224)), "contrast", severity=5)
    assert distance(flat, flat.mean((2, 3), keepdim=True)) < 0.02
    assert torch.allclose(corrupt(grey, "brightness", severity=3), torch.tensor(0.8), atol=1e-6)


def test_blurs_keep_a_constant_image() -> None:
    grey = torch.full((2, 3, 48, 48), 0.3)
    for name in (
        "defocus_blur",
        "glass_blur",
        "motion_blur",
        "zoom_blur",
        "gaussian_blur",
        "pixelate",
    ):
        torch.testing.assert_close(corrupt(grey, name, severity=5), grey)


def test_corrupted_data_is_reiterable_and_undoes_normalisation() -> None:
    x, mean, std = pictures(7), (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)
    shift, scale = (torch.tensor(v).view(1, 3, 1, 1) for v in (mean, std))
    batch = {"pixel_values": (x - shift) / scale, "labels": torch.arange(7)}
    data = corrupted(as_data(batch, batch_size=3), "fog", severity=2, seed=5, mean=mean, std=std)
    first, second = list(data), list(data)
    assert len(data) == 3
    for one, two in zip(first, second, strict=True):
        assert torch.equal(one["pixel_values"], two["pixel_values"])
    assert torch.cat([b["labels"] for b in first]).tolist() == list(range(7))
    plain = corrupt(x, "fog", severity=2, generator=torch.Generator().manual_seed(5))
    got = torch.cat([b["pixel_values"] for b in first]) * scale + shift
    torch.testing.assert_close(got, plain, rtol=0, atol=1e-5)


def test_what_is_wrong_is_said() -> None:
    x = pictures(2)
    with pytest.raises(DataError, match="mean and std"):
        list(corrupted([x * 4 - 2], "fog"))
    with pytest.raises(DataError, match="1 to 5"):
        corrupt(x, "fog", severity=6)
    with pytest.raises(UnknownNameError, match="gaussian_noise"):
        corrupted([x], "gausian_noise")
    with pytest.raises(DataError, match="batch of images"):
        list(corrupted([{"input_ids": torch.ones(2, 3, dtype=torch.long)}], "fog"))
    with pytest.raises(DataError, match="raw strings"):
        corrupted([{"input_ids": torch.ones(2, 3, dtype=torch.long)}], "typos")
    with pytest.raises(DataError, match="2 channels"):
        list(corrupted([x], "fog", mean=(0, 0), std=(1, 1)))
    with pytest.raises(DataError, match="in \\[0, 1\\]"):
        corrupt(x.masked_fill(x > 0.9, float("nan")), "fog")


SENTENCES = [
    "The quick brown fox jumps over the lazy dog again and again",
    "a masterpiece , full of warmth and humour",
    "Bad",
    "",
    "Größe und Ärger : 42 !",
]


@pytest.mark.parametrize("name", list(text_corruptions))
def test_text_corruptions_are_seeded_and_grow(name: str) -> None:
    texts = SENTENCES * 20
    assert corrupt_texts(texts, name, seed=1) == corrupt_texts(texts, name, seed=1)
    assert corrupt_texts(texts, name, seed=1) != corrupt_texts(texts, name, seed=2)
    changed = [
        sum(a != b for a, b in zip(texts, corrupt_texts(texts, name, severity=s), strict=True))
        for s in (1, 5)
    ]
    assert 0 < changed[0] < changed[1]
    assert len(corrupt_texts(SENTENCES, name)) == len(SENTENCES)


def test_text_corruptions_do_what_they_say() -> None:
    text = [SENTENCES[0]] * 30
    words = SENTENCES[0].split()
    for changed in corrupt_texts(text, "drop_words", severity=5):
        assert changed
        assert len(changed.split()) <= len(words)
    for changed in corrupt_texts(text, "swap_words", severity=5):
        assert sorted(changed.split()) == sorted(words)
    for changed in corrupt_texts(text, "keyboard", severity=5):
        assert len(changed) == len(SENTENCES[0])
    for changed in corrupt_texts(text, "swap_letters", severity=5):
        assert sorted(changed) == sorted(SENTENCES[0])
    assert all(len(t) <= len(SENTENCES[0]) for t in corrupt_texts(text, "drop_letters"))
    assert all(len(t) >= len(SENTENCES[0]) for t in corrupt_texts(text, "insert_letters"))
    with pytest.raises(DataError, match="1 to 5"):
        corrupt_texts(text, "typos", severity=0)
