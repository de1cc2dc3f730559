"""Which class a name of the data is: asked for, named by the model, or assumed and checked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import hydra_ensembles as hydra
from hydra_ensembles.cli.class_names import read_names
from hydra_ensembles.cli.main import main
from hydra_ensembles.cli.models import load_model, load_set
from hydra_ensembles.errors import DataError

pytest.importorskip("transformers")
WORDS = [f"word{number}" for number in range(40)]
LINE = "Class order assumed: "


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tiny BERT of two classes without names, with its tokenizer."""
    folder = tmp_path_factory.mktemp("texts") / "model"
    tokenizer, model = tiny_bert(folder.parent)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def tiny_bert(place: Path, classes: int = 2) -> tuple[Any, Any]:
    """Return a tokenizer of some words, and a random BERT that calls about as many each class."""
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (place / "vocab.txt").write_text("\n".join(vocabulary))
    tokenizer = BertTokenizer(str(place / "vocab.txt"))
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=16,
        initializer_range=0.5,
        num_labels=classes,
    )
    torch.manual_seed(0)
    model = BertForSequenceClassification(config).eval()
    centre(model.classifier, lambda: text_logits(model, tokenizer, sentences(200)))
    return tokenizer, model


def centre(classifier: Any, logits: Any) -> None:
    """Shift a classifier's bias until each class is the answer to about as many examples."""
    with torch.no_grad():
        for _ in range(200):
            share = logits().softmax(-1).argmax(-1).bincount(minlength=len(classifier.bias))
            classifier.bias -= 0.05 * (share / share.sum() - 1 / len(classifier.bias)).sign()


def sentences(count: int, seed: int = 0) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(len(WORDS), (count, 4), generator=generator).tolist()
    return [" ".join(WORDS[word] for word in row) for row in rows]


@torch.no_grad()
def text_logits(model: Any, tokenizer: Any, texts: list[str]) -> torch.Tensor:
    return model(**tokenizer(texts, padding=True, return_tensors="pt")).logits


def reviews(
    path: Path, model: Path, names: Sequence[str], *, right: float = 0.8, count: int = 200
) -> Path:
    """Write texts with the model's answers by name, a share of them right."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    host = AutoModelForSequenceClassification.from_pretrained(model, trust_remote_code=False)
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    texts = sentences(count, seed=1)
    answers = text_logits(host.eval(), tokenizer, texts).argmax(-1).tolist()
    lines = [
        f"{text},{names[answer if row % 100 < 100 * right else (answer + 1) % len(names)]}"
        for row, (text, answer) in enumerate(zip(texts, answers, strict=True))
    ]
    path.write_text("\n".join(["text,label", *lines]) + "\n")
    return path


def accuracy(
    capsys: pytest.CaptureFixture[str], model: object, data: Path, out: Path, *more: str
) -> tuple[float, str]:
    """Return the accuracy that `eval --json` prints, and what is on standard error."""
    options = ["--data", str(data), "-o", str(out), "--no-report", "--json", *more]
    assert main(["eval", f"m={model}", *options]) == 0
    told = capsys.readouterr()
    return json.loads(told.out)["m"]["cls/Acc"], told.err


def test_an_assumed_order_is_told_and_right_when_it_fits(
    text_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = reviews(tmp_path / "data.csv", text_model, ["negative", "positive"])
    found, told = accuracy(capsys, text_model, data, tmp_path / "out")
    assert found == pytest.approx(0.8)
    assert f"{LINE}negative=0, positive=1 (sorted names of {data}" in told
    assert told.count(LINE) == 1 and "--class-names" in told


@pytest.mark.parametrize(
    "command", ["eval", "build", "try", "score", "circuit", "distill", "sweep"]
)
def test_an_assumed_order_that_does_not_fit_is_refused_with_the_one_that_does(
    command: str, text_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = reviews(tmp_path / "data.csv", text_model, ["positive", "negative"])
    more = {"distill": ["--make", "branch"], "score": ["--limit", "100"]}.get(command, [])
    given = [command, str(text_model), "--data", str(data), "-o", str(tmp_path / "out"), *more]
    assert main(given) == 3
    told = capsys.readouterr().err
    assert "--class-names positive,negative" in told and LINE in told
    if command == "eval":
        found, told = accuracy(
            capsys, text_model, data, tmp_path / "out", "--class-names", "positive,negative"
        )
        assert found == pytest.approx(0.8) and LINE not in told


def test_policies_are_not_fitted_to_an_order_that_does_not_fit(
    text_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = reviews(tmp_path / "data.csv", text_model, ["positive", "negative"])
    ensemble = _fused(text_model)
    ensemble.save_pretrained(tmp_path / "saved")
    assert main(["policy", str(tmp_path / "saved"), "--data", str(data), "--alarm", "0"]) == 3
    assert "--class-names positive,negative" in capsys.readouterr().err
    given = ["predict", str(text_model), str(data), "--held-out", str(data), "--risk", "0.3"]
    assert main(given) == 3
    assert "--class-names positive,negative" in capsys.readouterr().err


def _fused(folder: Path, **settings: Any) -> Any:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    host = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=False)
    host.config.update(settings)
    ensemble = hydra.fuse(host.eval(), [hydra.HeadMask.full(host)])
    ensemble.tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    return ensemble


def test_few_examples_are_not_judged(
    text_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = reviews(tmp_path / "data.csv", text_model, ["positive", "negative"], right=1, count=8)
    found, told = accuracy(capsys, text_model, data, tmp_path / "out")
    assert found == 0 and LINE in told


def test_a_random_model_is_not_called_misordered(
    text_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = reviews(tmp_path / "data.csv", text_model, ["positive", "negative"], right=0.5)
    found, told = accuracy(capsys, text_model, data, tmp_path / "out")
    assert found == pytest.approx(0.5) and LINE in told


def test_names_of_the_model_come_before_sorted_ones(
    text_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["positive", "negative"]
    _named(text_model, names, tmp_path / "named")
    data = reviews(tmp_path / "data.csv", text_model, ["Positive", "NEGATIVE"])
    found, told = accuracy(capsys, tmp_path / "named", data, tmp_path / "out")
    assert found == pytest.approx(0.8) and LINE not in told
    swapped = ["--class-names", "negative,positive"]  # wins, also where it is wrong
    found, told = accuracy(capsys, tmp_path / "named", data, tmp_path / "out", *swapped)
    assert found == pytest.approx(0.2) and LINE not in told
    ensemble = _fused(text_model)
    ensemble.id2label = names
    ensemble.save_pretrained(tmp_path / "saved")
    found, told = accuracy(capsys, tmp_path / "saved", data, tmp_path / "out")
    assert found == pytest.approx(0.8) and LINE not in told


def _named(source: Path, names: Sequence[str], folder: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    host = AutoModelForSequenceClassification.from_pretrained(source, trust_remote_code=False)
    host.config.id2label = dict(enumerate(names))
    host.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, trust_remote_code=False).save_pretrained(folder)


def test_names_that_the_model_does_not_have(
    text_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _named(text_model, ["sad", "glad"], tmp_path / "named")
    data = reviews(tmp_path / "data.csv", text_model, ["negative", "positive"])
    given = ["--data", str(data), "-o", str(tmp_path / "out")]
    assert main(["eval", str(tmp_path / "named"), *given]) == 3
    told = capsys.readouterr().err
    assert "sad, glad" in told and "--class-names" in told
    assert main(["eval", str(text_model), *given, "--class-names", "a,b,c"]) == 3
    assert "3 class names" in capsys.readouterr().err


def test_fewer_names_than_classes_are_not_numbered(tmp_path: Path, text_model: Path) -> None:
    tokenizer, model = tiny_bert(tmp_path, classes=3)
    tokenizer.save_pretrained(tmp_path / "three")
    model.save_pretrained(tmp_path / "three")
    data = reviews(tmp_path / "data.csv", text_model, ["negative", "positive"])
    with pytest.raises(DataError, match=r"2 class names.* has 3 classes"):
        load_set(load_model(str(tmp_path / "three")), str(data))


def test_numbers_and_made_up_names_are_numbers(
    text_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = load_model(str(text_model))
    for names in (["0", "1"], ["LABEL_0", "LABEL_1"]):
        data = load_set(loaded, str(reviews(tmp_path / "data.csv", text_model, names)))
        assert data.class_names is None
    assert LINE not in capsys.readouterr().err


def test_a_saved_dataset_keeps_to_the_same_rule(
    text_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    datasets = pytest.importorskip("datasets")
    table = reviews(tmp_path / "data.csv", text_model, ["positive", "negative"]).read_text()
    rows = [line.split(",") for line in table.splitlines()[1:]]
    columns = {"text": [row[0] for row in rows], "label": [row[1] for row in rows]}
    plain = datasets.Dataset.from_dict(columns)
    stored = datasets.ClassLabel(names=["negative", "positive"])
    for name, dataset in {"texts": plain, "numbers": plain.cast_column("label", stored)}.items():
        dataset.save_to_disk(tmp_path / name)
        with pytest.raises(DataError, match="--class-names positive,negative"):
            load_set(load_model(str(text_model)), str(tmp_path / name))
        assert LINE + "negative=0, positive=1" in capsys.readouterr().err
        given = load_model(str(text_model), class_names="positive,negative")
        data = load_set(given, str(tmp_path / name))
        first = ["positive", "negative"].index(columns["label"][0])
        assert int(data.labels[0]) == first


@pytest.mark.parametrize("door", ["timm:local-dir:", ""])
def test_names_of_a_timm_folder(
    door: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    timm = pytest.importorskip("timm")
    names = ["zebra", "ant", "monkey"]
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=24, num_heads=2, num_classes=3
    ).eval()
    torch.nn.init.normal_(model.head.weight, std=1.0)
    loaded = tmp_path / "model"
    images = [_image(seed) for seed in range(60)]
    from hydra_ensembles.data import image_transform

    batch = torch.stack([image_transform(model)(image) for image in images])
    centre(model.head, lambda: model(batch).detach())
    answers = model(batch).argmax(-1).tolist()
    assert len(set(answers)) == 3
    described = {name: f"a large {name}" for name in names}
    timm.models.save_for_hf(
        model,
        loaded,
        safe_serialization=True,
        model_config={"label_names": names, "label_descriptions": described},
    )
    for number, (image, answer) in enumerate(zip(images, answers, strict=True)):
        path = tmp_path / "images" / names[answer] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)
    found, told = accuracy(capsys, f"{door}{loaded}", tmp_path / "images", tmp_path / "out")
    assert found == pytest.approx(1.0) and LINE not in told
    assert load_model(f"{door}{loaded}").class_names == names
    if door:
        (tmp_path / "images" / "ant").rename(tmp_path / "images" / "A large ant")
        data = load_set(load_model(f"{door}{loaded}"), str(tmp_path / "images"))
        assert sorted(data.labels.tolist()) == sorted(answers)


def _image(seed: int) -> Image.Image:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (2, 2, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy()).resize((32, 32), Image.Resampling.NEAREST)


def test_class_names_with_commas() -> None:
    assert read_names('"tench, Tinca tinca",dog') == ["tench, Tinca tinca", "dog"]
    assert read_names("cat, dog") == ["cat", "dog"]


def test_more_data_is_read_in_the_order_that_was_assumed_first(
    text_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = load_model(str(text_model))
    load_set(loaded, str(reviews(tmp_path / "one.csv", text_model, ["negative", "positive"])))
    (tmp_path / "two.csv").write_text("text,label\nword1,positive\n")
    assert load_set(loaded, str(tmp_path / "two.csv")).labels.tolist() == [1]
    assert capsys.readouterr().err.count(LINE) == 1
    (tmp_path / "two.csv").write_text("text,label\nword1,mixed\n")
    with pytest.raises(DataError, match="'mixed'"):
        load_set(loaded, str(tmp_path / "two.csv"))
