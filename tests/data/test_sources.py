"""Image folders, text files, Hugging Face datasets: what they read and how they fail."""

from __future__ import annotations

import csv
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from hydra_ensembles.data import (
    ImageTransform,
    corrupted,
    count,
    fingerprint,
    image_folder,
    image_transform,
    load_data,
    make_proxies,
    split,
    text_file,
)
from hydra_ensembles.data.text_files import read_table
from hydra_ensembles.errors import DataError, UnknownNameError

SMALL = ImageTransform(size=8, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))


def picture(seed: int, size: tuple[int, int] = (12, 10)) -> Image.Image:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (size[1], size[0], 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three classes of four pictures in various formats and modes."""
    root = tmp_path / "pictures"
    for number, name in enumerate(("10", "9", "cat")):
        (root / name).mkdir(parents=True)
        for index in range(4):
            suffix = ("png", "jpg", "png", "webp")[index]
            image = picture(10 * number + index)
            if index == 2:
                image = image.convert("P" if number else "LA")
            image.save(root / name / f"{index}.{suffix}")
    (root / "cat" / "notes.md").write_text("not a picture")
    return root


class Tokenizer:
    """A real, tiny tokenizer: one id a word of a fixed list."""

    def __new__(cls) -> Any:
        from tokenizers import Tokenizer as Inner
        from tokenizers import models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        words = ["[PAD]", "[UNK]", "good", "bad", "film", "a", "the", "very", '"']
        inner = Inner(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
        inner.pre_tokenizer = pre_tokenizers.Whitespace()
        return PreTrainedTokenizerFast(
            tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", model_max_length=6
        )


ROWS = [("0", "a bad film"), ("1", 'the very good "film'), ("1", "good"), ("0", "bad , bad")]


def write_tsv(path: Path) -> Path:
    path.write_text("label\tcontent\n" + "".join(f"{a}\t{b}\n" for a, b in ROWS))
    return path


# --- images


def test_class_folders(folder: Path) -> None:
    data = image_folder(folder, SMALL, batch_size=5)
    assert data.class_names == ["10", "9", "cat"]  # names, though two are numbers
    assert data.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    batches = list(data)
    assert [b["pixel_values"].shape for b in batches] == [(5, 3, 8, 8), (5, 3, 8, 8), (2, 3, 8, 8)]
    assert torch.cat([b["labels"] for b in batches]).tolist() == data.labels.tolist()
    assert fingerprint(data) == fingerprint(data)
    parts = split(data, {"a": 0.5, "b": 0.5})
    assert parts["a"].labels.bincount().tolist() == [2, 2, 2]
    assert parts["a"].transform is SMALL
    shifted = next(iter(corrupted(data, "contrast", severity=5)))  # mean and std are known
    assert shifted["pixel_values"].std() < batches[0]["pixel_values"].std()


def test_batches_as_tuples_and_without_labels(folder: Path) -> None:
    images, labels = next(iter(image_folder(folder, SMALL, key=None)))
    assert (len(images), len(labels)) == (12, 12)
    outliers = image_folder(folder, SMALL, labels=False)
    assert set(next(iter(outliers))) == {"pixel_values"}
    assert outliers.labels is None
    flat = image_folder(folder / "cat", SMALL)
    assert flat.labels is None
    assert count(flat) == 4


def test_class_names_of_the_host_decide_the_numbers(folder: Path) -> None:
    data = image_folder(folder, SMALL, class_names=["cat", "dog", "9", "10"])
    assert sorted(set(data.labels.tolist())) == [0, 2, 3]
    with pytest.raises(DataError, match=r"'10'.*2 class names"):
        image_folder(folder, SMALL, class_names=["cat", "9"])


def test_a_table_of_labels(folder: Path, tmp_path: Path) -> None:
    table = tmp_path / "labels.csv"
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([("file", "label"), ("cat/1.jpg", 7), ("9/0.png", 3)])
    data = image_folder(folder, SMALL, labels=table)
    assert data.labels.tolist() == [7, 3]
    assert [f.name for f in data.files] == ["1.jpg", "0.png"]
    with pytest.raises(DataError, match=r"'lable'.*'label'.*file, label"):
        image_folder(folder, SMALL, labels=table, label_column="lable")
    table.write_text("file,label\nnone.png,1\n")
    with pytest.raises(DataError, match=r"Row 1 .*none\.png"):
        image_folder(folder, SMALL, labels=table)
    table.write_text("file,label\n0.png,1\n")
    with pytest.raises(DataError, match="3 times"):
        image_folder(folder, SMALL, labels=table)


def test_a_broken_picture_is_named_or_left_out(folder: Path) -> None:
    (folder / "9" / "1.jpg").write_bytes((folder / "9" / "1.jpg").read_bytes()[:200])
    (folder / "cat" / "0.png").write_bytes(b"no picture at all")
    with pytest.raises(DataError, match=r"9/1\.jpg.*skip_broken=True"):
        list(image_folder(folder, SMALL, batch_size=4))
    with pytest.warns(UserWarning, match=r"2 broken.*12 .*9/1\.jpg, cat/0\.png"):
        data = image_folder(folder, SMALL, batch_size=4, skip_broken=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once, not at every pass
        assert sum(len(b["labels"]) for b in data) == count(data) == 10
    assert data.labels.bincount().tolist() == [4, 3, 3]


def test_missing_and_empty_folders_say_so(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere does not exist"):
        image_folder(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no images"):
        image_folder(tmp_path / "empty")
    picture(1).save(folder / "stray.png")
    with pytest.raises(DataError, match=r"stray\.png"):
        image_folder(folder, SMALL)


@pytest.mark.parametrize("size", [(300, 200), (224, 224), (97, 260)])
def test_the_transform_equals_timms(size: tuple[int, int]) -> None:
    from timm import create_model
    from timm.data import create_transform, resolve_model_data_config

    model = create_model("vit_tiny_patch16_224", num_classes=2, depth=1)
    theirs = create_transform(**resolve_model_data_config(model), is_training=False)
    ours = image_transform(model)
    image = picture(3, size)
    torch.testing.assert_close(ours(image), theirs(image), rtol=0, atol=1e-6)
    assert tuple(ours.mean) == (0.5, 0.5, 0.5)
    smaller = create_model("vit_tiny_patch16_224", num_classes=2, depth=1, img_size=64)
    assert image_transform(smaller)(image).shape == (3, 64, 64)


def test_the_transform_of_a_processor_is_the_processor() -> None:
    from transformers import ViTImageProcessor

    processor = ViTImageProcessor(size={"height": 20, "width": 20}, image_mean=[0.1, 0.2, 0.3])
    ours = image_transform(processor)
    image = picture(3, (40, 30))
    expected = processor(images=image, return_tensors="pt")["pixel_values"][0]
    assert torch.equal(ours(image), expected)
    assert list(ours.mean) == [0.1, 0.2, 0.3]


def test_transforms_grey_squeezed_and_refused() -> None:
    grey = ImageTransform(size=(6, 4), crop=None, interpolation="bilinear", mean=(0.5,), std=(0.5,))
    assert grey(picture(1)).shape == (1, 6, 4)
    double = image_transform(lambda image: torch.ones(1, 2, 2))
    assert double(picture(1)).shape == (1, 2, 2)
    with pytest.raises(DataError, match="image processor"):
        image_transform(torch.nn.Linear(2, 2))
    with pytest.raises(UnknownNameError, match="bicubic"):
        ImageTransform(interpolation="cubic")(picture(1))


# --- text


def test_tsv_with_stray_quotes(tmp_path: Path) -> None:
    data = text_file(write_tsv(tmp_path / "a.tsv"), Tokenizer(), batch_size=2)
    batches = list(data)
    assert count(data) == 4
    assert data.texts[1] == ROWS[1][1]
    assert data.labels.tolist() == [0, 1, 1, 0]
    assert [b["input_ids"].shape[1] for b in batches] == [5, 3]  # padded batch by batch
    assert batches[1]["attention_mask"].tolist() == [[1, 0, 0], [1, 1, 1]]
    assert fingerprint(data) == fingerprint(data.subset(range(4), batch_size=4))


def test_csv_jsonl_json_and_lines_agree(tmp_path: Path) -> None:
    tokenizer = Tokenizer()
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("sentiment", "words"), *ROWS])
    entries = [{"sentiment": int(a), "words": b} for a, b in ROWS]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, entries)) + "\n\n")
    (tmp_path / "a.json").write_text(json.dumps(entries))
    prints = {
        fingerprint(
            text_file(tmp_path / name, tokenizer, text_column="words", label_column="sentiment")
        )
        for name in ("a.csv", "a.jsonl", "a.json")
    }
    assert len(prints) == 1
    (tmp_path / "a.txt").write_text("\n".join(b for _, b in ROWS))
    lines = text_file(tmp_path / "a.txt", tokenizer)
    assert lines.texts == [b for _, b in ROWS]
    assert "labels" not in next(iter(lines))


def test_pairs_names_limits_and_headerless_files(tmp_path: Path) -> None:
    path = tmp_path / "pairs.csv"
    lines = "yes,a good film,the film\nno,bad,very very very very bad film\n"
    path.write_text(lines)
    assert read_table(path, columns=["a", "b", "c"])["a"] == ["yes", "no"]
    path.write_text("label,text,second\n" + lines)
    data = text_file(path, Tokenizer(), pair_column="second", max_length=5)
    assert data.class_names == ["no", "yes"]
    assert data.labels.tolist() == [1, 0]
    assert next(iter(data))["input_ids"].shape == (2, 5)
    turned = text_file(path, Tokenizer(), class_names=["yes", "no"])
    assert turned.labels.tolist() == [0, 1]


def test_text_errors_help(tmp_path: Path) -> None:
    tokenizer = Tokenizer()
    path = write_tsv(tmp_path / "a.tsv")
    with pytest.raises(DataError, match=r"'labels'.*'label'.*label, content"):
        text_file(path, tokenizer, label_column="labels")
    with pytest.raises(DataError, match=r"b\.tsv does not exist"):
        text_file(tmp_path / "b.tsv", tokenizer)
    (tmp_path / "c.csv").write_text("id,words\n1,a\n")
    with pytest.raises(DataError, match=r"label column.*id, words"):
        text_file(tmp_path / "c.csv", tokenizer)
    (tmp_path / "d.csv").write_text("label,text\n1,a\n0,b,c\n")
    with pytest.raises(DataError, match=r"Line 3 .*3 fields.*2 columns"):
        text_file(tmp_path / "d.csv", tokenizer)
    (tmp_path / "e.csv").write_text("label,text\n")
    with pytest.raises(DataError, match="no rows"):
        text_file(tmp_path / "e.csv", tokenizer)
    (tmp_path / "f.jsonl").write_text('{"label": 1, "text": "a"}\n{"label": 1\n')
    with pytest.raises(DataError, match=r"Line 2 .*not JSON"):
        text_file(tmp_path / "f.jsonl", tokenizer)
    (tmp_path / "g.jsonl").write_text('{"label": 1, "text": "a"}\n{"label": 1}\n')
    with pytest.raises(DataError, match=r"Line 2 .*lacks text"):
        text_file(tmp_path / "g.jsonl", tokenizer)
    for odd in ("[" * 100_000, '{"text": "a", "label": ' + "9" * 5000 + "}"):
        (tmp_path / "g.jsonl").write_text(f'{{"label": 1, "text": "a"}}\n{odd}\n')
        with pytest.raises(DataError, match=r"Line 2 .*not JSON"):
            text_file(tmp_path / "g.jsonl", tokenizer)
    (tmp_path / "h.csv").write_bytes(b"label,text\n1,\xff\xfe\n")
    with pytest.raises(DataError, match="not UTF-8"):
        text_file(tmp_path / "h.csv", tokenizer)
    (tmp_path / "i.jsonl").write_text('{"label": 1, "text": null}\n')
    with pytest.raises(DataError, match="not a string"):
        text_file(tmp_path / "i.jsonl", tokenizer)
    (tmp_path / "j.xls").write_text("x")
    with pytest.raises(DataError, match=r"\.jsonl"):
        read_table(tmp_path / "j.xls")


def test_very_long_fields_are_read_and_the_limit_is_put_back(tmp_path: Path) -> None:
    before = csv.field_size_limit()
    (tmp_path / "long.csv").write_text("label,text\n1," + "a " * 100_000 + "\n")
    assert len(read_table(tmp_path / "long.csv")["text"][0]) == 200_000
    assert csv.field_size_limit() == before


def test_corrupted_text_and_proxies_of_text_files(tmp_path: Path) -> None:
    data = text_file(write_tsv(tmp_path / "a.tsv"), Tokenizer(), batch_size=2)
    worse = corrupted(data, "drop_words", severity=5, seed=1)
    assert worse.texts != data.texts
    assert worse.labels.tolist() == data.labels.tolist()
    assert worse.subset([1]).texts == [worse.texts[1]]
    assert data.texts[0] == ROWS[0][1]  # untouched
    made = make_proxies(data)
    assert set(made) == {"shuffle_words", "token_noise", "foreign", "halves"}
    assert [b["input_ids"].shape for b in made["halves"]] == [(2, 5), (2, 3)]


# --- Hugging Face datasets and the one door


def test_saved_datasets_of_text_and_images(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "sentence": datasets.Value("string"),
            "label": datasets.ClassLabel(names=["negative", "positive"]),
        }
    )
    rows = {"sentence": [b for _, b in ROWS], "label": [int(a) for a, _ in ROWS]}
    text = datasets.Dataset.from_dict(rows, features=features)
    text.save_to_disk(str(tmp_path / "text"))
    data = load_data(tmp_path / "text", tokenizer=Tokenizer(), batch_size=3)
    assert data.class_names == ["negative", "positive"]
    assert data.labels.tolist() == [0, 1, 1, 0]
    swapped = load_data(
        tmp_path / "text", tokenizer=Tokenizer(), class_names=["positive", "negative"]
    )
    assert swapped.labels.tolist() == [1, 0, 0, 1]
    with pytest.raises(DataError, match=r"'y'.*sentence, label"):
        load_data(tmp_path / "text", tokenizer=Tokenizer(), label_column="y")

    both = {"image": [picture(i) for i in range(5)], "label": [0, 1, 0, 1, 1]}
    images = datasets.Dataset.from_dict(both).cast_column("image", datasets.Image())
    datasets.DatasetDict({"train": images, "test": images.select([0, 1])}).save_to_disk(
        str(tmp_path / "images")
    )
    data = load_data(tmp_path / "images", split="train", transform=SMALL, batch_size=2)
    assert [len(b["labels"]) for b in data] == [2, 2, 1]
    torch.testing.assert_close(next(iter(data))["pixel_values"][1], SMALL(picture(1)))
    for split_name in (None, "validation"):
        with pytest.raises(DataError, match="train, test"):
            load_data(tmp_path / "images", split=split_name, transform=SMALL)
    assert "labels" not in next(iter(load_data(tmp_path / "images", split="test", labels=False)))


def test_one_door_for_all(folder: Path, tmp_path: Path) -> None:
    assert count(load_data(folder, transform=SMALL)) == 12
    path = write_tsv(tmp_path / "a.tsv")
    assert count(load_data(str(path), tokenizer=Tokenizer())) == 4
    with pytest.raises(DataError, match="tokenizer"):
        load_data(path)
    for missing in ("missing.csv", "./missing", "/no/such/folder"):
        with pytest.raises(DataError, match="does not exist"):
            load_data(missing)
