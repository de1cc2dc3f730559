"""Names and facts of inputs: short, of the rows that were asked for, the same in all batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from hydra_ensembles.builder.data_parts import in_memory
from hydra_ensembles.data import ImageTransform, image_folder, sample, text_data
from hydra_ensembles.data.input_facts import (
    HEAD,
    LONGEST,
    decoded,
    described,
    excerpt,
    image_facts,
    image_scale,
    tensor_facts,
    text_facts,
    token_heads,
)
from tests.builder.test_repeating import tokenizer


def test_an_excerpt_is_short_and_on_one_line() -> None:
    assert excerpt("  a film,\n\tand  good ") == "a film, and good"
    long = excerpt("word " * 10_000)
    assert len(long) <= LONGEST and long.endswith("word…")


def test_texts_have_words_capitals_and_a_script() -> None:
    facts = text_facts(["A film", "КИНО день", "電影 ok", "123 !", ""])
    assert facts["words"] == [2, 2, 2, 2, 0]
    assert facts["capitals"] == [20.0, 50.0, 0.0, 0.0, 0.0]
    assert facts["script"][:2] == ["Latin", "Cyrillic"]
    assert facts["script"][2] in ("CJK", "Latin")  # two letters each
    assert facts["script"][3:] == ["no letters", "no letters"]
    assert text_facts(["電影は良い"])["script"] == ["CJK"]


def test_data_of_texts_names_the_rows_that_it_holds() -> None:
    texts = ["the film was good", "bad", "a very dull film"]
    part = text_data(texts, tokenizer(), labels=[0, 1, 0]).subset([2, 0])
    assert described(part)["names"] == [texts[2], texts[0]]
    assert described(part)["words"] == [4, 4]
    assert described([{"input_ids": torch.zeros(2, 3)}]) == {}


def test_images_keep_their_files_when_they_are_sampled_and_held_in_memory(tmp_path: Path) -> None:
    for number in range(8):
        folder = tmp_path / "photos" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (10 + number, 20), (30 * number, 0, 0)).save(folder / f"{number}.png")
    data = image_folder(tmp_path / "photos", ImageTransform(8), batch_size=3)
    part = sample(data, 5, seed=1)
    found = described(part)
    assert found == described(in_memory(part))  # decoded once, in another order of numbers
    widths = [10 + int(name.split("/")[1].removesuffix(".png")) for name in found["names"]]
    assert found["width"] == widths and found["height"] == [20] * 5
    with Image.open(data.files[0]) as image:
        assert image_facts([data.files[0], image]) == {"width": [10, 10], "height": [20, 20]}
    assert image_facts([tmp_path / "nothing.png"]) == {}


def test_facts_of_pixels_are_those_before_normalising() -> None:
    raw = torch.rand(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    raw[1] = 0.25  # grey, without contrast
    transform = ImageTransform(6)
    scale = image_scale(transform)
    assert scale is not None
    mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in scale)
    facts = tensor_facts({"pixel_values": (raw - mean) / deviation}, scale)
    torch.testing.assert_close(facts["brightness"], raw.mean((1, 2, 3)))
    torch.testing.assert_close(facts["colour"], (raw.amax(1) - raw.amin(1)).mean((1, 2)))
    assert float(facts["contrast"][1]) == pytest.approx(0, abs=1e-6)
    grey = tensor_facts({"x": raw[:, :1]})
    assert set(grey) == {"brightness", "contrast"} and image_scale(lambda image: image) is None


def test_tokens_are_counted_without_padding_and_decoded_to_names() -> None:
    tokens = tokenizer()
    texts = ["the film was good", "bad", "dull " * 100]
    inputs = dict(tokens(texts, padding=True, return_tensors="pt"))
    assert tensor_facts(inputs)["tokens"].tolist() == [4, 1, 100]
    heads = token_heads(inputs)
    assert heads is not None and heads.shape == (3, HEAD)
    names = decoded(heads, tokens)
    assert names[:2] == texts[:2] and names[2].startswith("dull dull") and len(names[2]) <= LONGEST
    assert token_heads({"pixel_values": torch.zeros(1, 3, 2, 2)}) is None
