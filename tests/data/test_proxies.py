"""OOD proxies of images and token ids."""

from __future__ import annotations

import pytest
import torch

from hydra_ensembles.data import as_data, make_proxies, proxies
from hydra_ensembles.data.proxies import Proxy
from hydra_ensembles.errors import DataError, UnknownNameError

IMAGE_KINDS = {"corrupt", "shuffle", "mix", "blur", "tile", "sketch", "noise"}
TEXT_KINDS = {"shuffle_words", "token_noise", "foreign", "halves"}
MEAN, STD = 0.5, 0.25


def pictures(n: int = 12, size: int = 24) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    x = torch.rand((n, 3, size, size), generator=generator)
    x[:, :, 0, 0], x[:, :, -1, -1] = 0.0, 1.0  # black and white are there
    return x


def normalised(n: int = 12, size: int = 24) -> dict[str, torch.Tensor]:
    return {"pixel_values": (pictures(n, size) - MEAN) / STD, "labels": torch.arange(n)}


def sentences(n: int = 20) -> dict[str, torch.Tensor]:
    """Begin with 101, end with 102, pad with 0; contents are 1000 and above."""
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(4, 12, (n,), generator=generator).tolist()
    ids = torch.zeros(n, max(lengths) + 2, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, 0], ids[row, length + 1] = 101, 102
        ids[row, 1 : length + 1] = torch.randint(1000, 1400, (length,), generator=generator)
        mask[row, : length + 2] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.arange(n) % 2}


def gather(data: object, key: str) -> torch.Tensor:
    return torch.cat([batch[key] for batch in data])


@pytest.mark.parametrize("kind", sorted(IMAGE_KINDS))
def test_image_proxies_are_fixed_and_in_range(kind: str) -> None:
    made = make_proxies(as_data(normalised(), batch_size=5), kind, seed=3)[kind]
    first, again = gather(made, "pixel_values"), gather(made, "pixel_values")
    assert torch.equal(first, again)
    assert len(made) == 3
    assert all(set(batch) == {"pixel_values"} for batch in made)  # no labels
    small = make_proxies(list(as_data(normalised(), batch_size=1)), kind, seed=3)[kind]
    torch.testing.assert_close(gather(small, "pixel_values"), first, rtol=0, atol=1e-5)
    other = make_proxies(as_data(normalised(), batch_size=5), kind, seed=4)[kind]
    assert not torch.equal(gather(other, "pixel_values"), first)
    pixels = first * STD + MEAN
    assert float(pixels.min()) > -1e-4
    assert float(pixels.max()) < 1 + 1e-4
    assert float((first - normalised()["pixel_values"]).abs().mean()) > 0.1


def test_auto_takes_all_that_fit() -> None:
    assert set(make_proxies([normalised()])) == IMAGE_KINDS
    assert set(make_proxies([sentences()])) == TEXT_KINDS
    assert set(make_proxies([(pictures(), torch.arange(12))])) == IMAGE_KINDS
    images_alone = make_proxies([(pictures(), torch.arange(12))], ["mix"])["mix"]
    assert [len(batch) for batch in images_alone] == [1]  # (images,)


def test_a_kind_is_the_same_beside_others() -> None:
    alone = make_proxies([normalised()], ["tile"])["tile"]
    beside = make_proxies([normalised()])["tile"]
    assert torch.equal(gather(alone, "pixel_values"), gather(beside, "pixel_values"))


@pytest.mark.parametrize("size", [24, 31])
def test_shuffle_moves_patches(size: int) -> None:
    made = next(iter(make_proxies([pictures(4, size)], "shuffle")["shuffle"]))
    assert made.shape == (4, 3, size, size)
    if size == 24:  # nothing is lost
        assert torch.equal(made.flatten(2).sort().values, pictures(4).flatten(2).sort().values)


def test_tile_repeats_a_crop_of_the_same_image() -> None:
    x = pictures(3)
    made = next(iter(make_proxies([x], "tile")["tile"]))
    for original, tiled in zip(x, made, strict=True):
        colours = {tuple(colour) for colour in original.flatten(1).T.tolist()}
        found = {tuple(colour) for colour in tiled.flatten(1).T.tolist()}
        assert found < colours
        assert len(found) < 0.15 * len(colours)


def test_sketch_draws_few_strokes_on_an_empty_ground() -> None:
    made = next(iter(make_proxies([pictures(8)], "sketch")["sketch"]))
    assert set(made.unique().tolist()) == {0.0, 1.0}
    rare = torch.minimum(made.mean((1, 2, 3)), 1 - made.mean((1, 2, 3)))
    assert bool((rare > 0.03).all()) and bool((rare < 0.15).all())
    assert len({float(image[0, 0, 0]) for image in made}) == 2  # some white, some black grounds


def test_mix_blends_two_images() -> None:
    x = pictures(12)
    made = next(iter(make_proxies([x], "mix")["mix"]))
    for image in made:  # the two sources are those that correlate
        correlation = [
            float(torch.corrcoef(torch.stack([image.flatten(), o.flatten()]))[0, 1]) for o in x
        ]
        top = sorted(correlation, reverse=True)
        assert top[0] > 0.3
        assert top[0] < 0.95
    alone = next(iter(make_proxies([x[:1]], "mix")["mix"]))
    assert not torch.allclose(alone, x[:1])  # its own mirror image


def test_mean_and_std_are_read_off_the_data_or_given() -> None:
    guessed = make_proxies([normalised()], "corrupt")["corrupt"]
    told = make_proxies([normalised()], "corrupt", mean=MEAN, std=STD)["corrupt"]
    torch.testing.assert_close(
        gather(guessed, "pixel_values"), gather(told, "pixel_values"), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("kind", sorted(TEXT_KINDS))
def test_text_proxies_change_content_alone(kind: str) -> None:
    batch = sentences()
    made = make_proxies(as_data(batch, batch_size=6), kind, seed=1)[kind]
    ids = gather(made, "input_ids")
    assert torch.equal(ids, gather(made, "input_ids"))
    again = make_proxies(as_data(batch, batch_size=20), kind, seed=1)[kind]
    assert torch.equal(ids, gather(again, "input_ids"))
    assert torch.equal(gather(made, "attention_mask"), batch["attention_mask"])
    kept = (batch["input_ids"] < 1000) | (batch["attention_mask"] == 0)
    assert torch.equal(ids[kept], batch["input_ids"][kept])  # special tokens and padding
    changed = (ids != batch["input_ids"]).any(1)
    assert float(changed.float().mean()) > 0.9
    assert all("labels" not in b for b in made)


def test_text_kinds_do_what_they_say() -> None:
    batch = sentences()
    made = {kind: gather(data, "input_ids") for kind, data in make_proxies([batch]).items()}
    seen = set(batch["input_ids"].flatten().tolist())
    for row, ids in enumerate(batch["input_ids"]):
        assert sorted(made["shuffle_words"][row].tolist()) == sorted(ids.tolist())
        length = int(batch["attention_mask"][row].sum()) - 2
        half = (length + 1) // 2
        assert torch.equal(made["halves"][row, 1 : 1 + half], ids[1 : 1 + half])
    assert set(made["token_noise"].flatten().tolist()) <= seen
    foreign = made["foreign"][made["foreign"] != batch["input_ids"]]
    assert not set(foreign.tolist()) & seen


def test_words_stay_whole_with_a_tokenizer() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "un", "##der", "##go", "well", "done", "ж", "и"]
    inner = Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        unk_token="[UNK]",
    )
    ids = torch.tensor([[1, 4, 5, 6, 7, 8, 7, 2], [1, 8, 4, 5, 2, 0, 0, 0]])
    batch = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    for seed in range(8):
        made = make_proxies([batch], seed=seed, tokenizer=tokenizer)
        row = next(iter(made["shuffle_words"]))["input_ids"][0].tolist()
        start = row.index(4)
        assert row[start : start + 3] == [4, 5, 6]
        foreign = next(iter(made["foreign"]))["input_ids"]
        assert set(foreign[foreign != ids].tolist()) <= {9, 10}


def test_a_users_own_proxy_and_what_is_refused() -> None:
    proxies.register("test_black")(Proxy("image", lambda pixels, draws, context: pixels * 0))
    black = make_proxies([normalised()], "test_black")["test_black"]
    torch.testing.assert_close(
        gather(black, "pixel_values"), torch.full((12, 3, 24, 24), -MEAN / STD)
    )
    with pytest.raises(UnknownNameError, match="shuffle"):
        make_proxies([normalised()], "shufle")
    with pytest.raises(DataError, match=r"halves.*tile"):
        make_proxies([normalised()], "halves")
    with pytest.raises(DataError, match="empty"):
        make_proxies([])
    with pytest.raises(DataError, match="outliers"):
        make_proxies([{"features": torch.ones(2, 3)}])
    with pytest.raises(DataError, match="only once"):
        make_proxies(iter([normalised()]))
    del proxies._entries["test_black"]
