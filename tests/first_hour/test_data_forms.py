"""Data as people have it: every form becomes the batches that one would have made by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import hydra_ensembles as hydra
from hydra_ensembles.data.batches import labels_of, split_batch
from hydra_ensembles.errors import DataError
from hydra_ensembles.hosts.host_data import data_for
from tests.first_hour.small import COUNT, Images, Texts, texts, timm_images, vit_images

datasets = pytest.importorskip("datasets")
pandas = pytest.importorskip("pandas")


class Items(Dataset[Any]):
    """A map-style data set, as those of torchvision are."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    return texts(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module", params=[vit_images, timm_images], ids=["transformers", "timm"])
def photos(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Images:
    return request.param(tmp_path_factory.mktemp("images"))


def named(of: Texts | Images) -> list[str]:
    return [of.names[label] for label in of.labels]


def raw(t: Texts) -> Any:
    return datasets.Dataset.from_dict(
        {"text": t.texts, "label": t.labels, "idx": list(range(COUNT))}
    )


def tokenised(t: Texts) -> Any:
    return raw(t).map(lambda rows: t.tokenizer(rows["text"]), batched=True)


def csv(t: Texts) -> Path:
    path = t.folder / "reviews.csv"
    pandas.DataFrame({"text": t.texts, "label": named(t)}).to_csv(path, index=False)
    return path


def rows(t: Texts) -> list[dict[str, Any]]:
    return [{**t.tokenizer(text), "label": t.labels[i]} for i, text in enumerate(t.texts)]


def lists(t: Texts) -> list[dict[str, Any]]:
    return [
        {**t.tokenizer(t.texts[i : i + 16]), "labels": t.labels[i : i + 16]}
        for i in range(0, COUNT, 16)
    ]


def without_mask(t: Texts) -> Any:
    return tokenised(t).remove_columns(["attention_mask"])


def transformed(p: Images) -> Any:
    pixels = {image.tobytes(): row for image, row in zip(p.images, p.pixels, strict=True)}

    def prepare(rows: dict[str, Any]) -> dict[str, Any]:
        made = [pixels[image.tobytes()] for image in rows["image"]]
        return {"pixel_values": made, "labels": rows["label"]}

    columns = {"image": p.images, "label": p.labels}
    return datasets.Dataset.from_dict(columns).with_transform(prepare)


TEXTS: dict[str, Callable[[Texts], Any]] = {
    "batches": lambda t: t.batches,
    "a data set": raw,
    "a tokenised data set": tokenised,
    "tokenised without a mask": without_mask,
    "a data set of tensors": lambda t: tokenised(t).with_format("torch"),
    "a loader of texts": lambda t: DataLoader(raw(t), batch_size=16),
    "a loader of unpadded rows": lambda t: DataLoader(
        tokenised(t).remove_columns("text").with_format("torch"), batch_size=16
    ),
    "(texts, labels)": lambda t: (t.texts, t.labels),
    "(texts, names)": lambda t: (t.texts, named(t)),
    "(arrays)": lambda t: (np.array(t.texts), np.array(t.labels)),
    "pairs": lambda t: list(zip(t.texts, t.labels, strict=True)),
    "mappings": lambda t: [{"text": x, "label": y} for x, y in zip(t.texts, named(t), strict=True)],
    "columns": lambda t: {"text": t.texts, "label": t.labels},
    "a frame": lambda t: pandas.DataFrame({"text": t.texts, "label": named(t)}),
    "mappings of lists": rows,
    "batches of lists": lists,
    "a torch data set": lambda t: Items(list(zip(t.texts, named(t), strict=True))),
    "a file": csv,
}
IMAGES: dict[str, Callable[[Images], Any]] = {
    "(images, labels)": lambda p: (p.images, p.labels),
    "pairs": lambda p: list(zip(p.images, named(p), strict=True)),
    "(paths, names)": lambda p: (p.paths, named(p)),
    "pairs of paths": lambda p: [(Path(x), y) for x, y in zip(p.paths, p.labels, strict=True)],
    "a frame": lambda p: pandas.DataFrame({"path": p.paths, "label": named(p)}),
    "a data set": lambda p: datasets.Dataset.from_dict({"image": p.images, "label": p.labels}),
    "a data set in torch's format": lambda p: datasets.Dataset.from_dict(
        {"image": p.images, "label": p.labels}
    ).with_format("torch"),
    "a data set with a transform": transformed,
    "a torch data set": lambda p: Items(list(zip(p.images, p.labels, strict=True))),
    "a loader of images": lambda p: DataLoader(
        Items(list(zip(p.images, p.labels, strict=True))), batch_size=16
    ),
    "pixels": lambda p: ([np.asarray(image) for image in p.images], p.labels),
    "tensors": lambda p: (p.pixels, p.labels),
    "arrays": lambda p: (p.pixels.numpy(), np.array(p.labels)),
    "pairs of tensors": lambda p: list(zip(p.pixels, p.labels, strict=True)),
    "batches by name": lambda p: [{"pixel_values": p.pixels, "labels": torch.tensor(p.labels)}],
    "batches by place": lambda p: [(p.pixels, torch.tensor(p.labels))],
}


@pytest.mark.parametrize("form", TEXTS)
def test_texts(form: str, reviews: Texts) -> None:
    batches = list(data_for(reviews.model, TEXTS[form](reviews)))
    assert torch.cat([labels_of(batch) for batch in batches]).tolist() == reviews.labels
    with torch.no_grad():
        outputs = [reviews.model(**split_batch(batch)[1]).logits for batch in batches]
        expected = [reviews.model(**split_batch(batch)[1]).logits for batch in reviews.batches]
    torch.testing.assert_close(torch.cat(outputs), torch.cat(expected), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("form", IMAGES)
def test_images(form: str, photos: Images) -> None:
    batches = list(data_for(photos.model, IMAGES[form](photos)))
    assert torch.cat([labels_of(batch) for batch in batches]).tolist() == photos.labels
    found = [value for batch in batches for value in (*split_batch(batch)[0],
             *split_batch(batch)[1].values())]  # fmt: skip
    torch.testing.assert_close(torch.cat(found), photos.pixels)
    photos.model(*split_batch(batches[0])[0], **split_batch(batches[0])[1])  # by its own names


def test_a_folder_of_images(photos: Images) -> None:
    results = hydra.evaluate(photos.model, photos.folder, bootstrap=0, progress=False)
    order = sorted(range(COUNT), key=lambda row: photos.paths[row])
    labels = torch.tensor([photos.labels[row] for row in order])
    expected = hydra.evaluate(photos.model, (photos.pixels[order], labels), bootstrap=0)
    assert results["cls/NLL"] == pytest.approx(expected["cls/NLL"])


@pytest.fixture(scope="module")
def ensemble(reviews: Texts) -> hydra.HydraEnsemble:
    full = hydra.HeadMask.full(reviews.model)
    made = hydra.fuse(reviews.model, [full, full])
    return made.fit_novelty_(reviews.batches, choose=False, progress=False)


FUNCTIONS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "evaluate": lambda m, e, d: hydra.evaluate(m, d, bootstrap=0, progress=False)["cls/NLL"],
    "evaluate, ood": lambda m, e, d: hydra.evaluate(
        m, d, ood={"far": d}, bootstrap=0, progress=False
    )["ood/far/AUROC"],
    "score_heads": lambda m, e, d: hydra.score_heads(m, d, criterion="taylor", progress=False),
    "find_circuit": lambda m, e, d: hydra.find_circuit(m, id=d, progress=False),
    "build": lambda m, e, d: hydra.build(
        m, d, ood=d, method="random", max_cost=None, members=2, novelty=False, progress=False
    ).record["masks"],
    "fit_novelty_": lambda m, e, d: hydra.fuse(m, [hydra.HeadMask.full(m)]).fit_novelty_(
        d, choose=False, progress=False
    ).novelty.sums.values,
    "fit_policy": lambda m, e, d: hydra.fit_policy(m, d, risk=0.9, alarm=None, progress=False),
    "prune": lambda m, e, d: hydra.prune(m, d, max_cost=0.9, progress=False).hydra_record["heads"],
    "fold": lambda m, e, d: hydra.fold([m, m], d, max_cost=3.0, progress=False).record["examples"],
    "finetune": lambda m, e, d: hydra.finetune(m, d, epochs=1, progress=False)[0].model,
}  # fmt: skip


def plain(found: Any) -> Any:
    """Return numbers to compare."""
    if isinstance(found, torch.nn.Module):
        return sum(float(p.detach().double().abs().sum()) for p in found.parameters())
    if isinstance(found, hydra.HeadScores | hydra.HeadMask):
        return [value for row in found for value in row.tolist()]
    if isinstance(found, hydra.Policy):
        return found.threshold
    return found.flatten().tolist() if isinstance(found, torch.Tensor) else found


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_function_takes_texts_as_it_takes_batches(
    function: str, reviews: Texts, ensemble: hydra.HydraEnsemble
) -> None:
    run = FUNCTIONS[function]
    expected = plain(run(reviews.model, ensemble, reviews.batches))
    found = plain(run(reviews.model, ensemble, raw(reviews)))
    if function in ("build", "prune", "fold"):
        assert found == expected
    else:
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_why_novel_takes_rows_of_a_data_set(reviews: Texts, ensemble: hydra.HydraEnsemble) -> None:
    expected = ensemble.why_novel(reviews.texts[:4])
    for batch in (raw(reviews)[:4], {"text": reviews.texts[:4]}, rows(reviews)[:4]):
        found = ensemble.why_novel(batch)
        torch.testing.assert_close(found.novelty, expected.novelty)


def test_an_ensemble_remembers_the_tokenizer_of_its_host(reviews: Texts, tmp_path: Path) -> None:
    made = hydra.build(
        reviews.model, (reviews.texts, reviews.labels), method="random", members=2, max_cost=None,
        novelty=False, progress=False,
    )  # fmt: skip
    made.save_pretrained(tmp_path / "saved")
    again = hydra.load(tmp_path / "saved")
    expected = made.predict(reviews.texts[:3]).probabilities
    torch.testing.assert_close(again.predict(reviews.texts[:3]).probabilities, expected)


REFUSED: dict[str, tuple[Callable[[Texts], Any], str]] = {
    "an empty list": (lambda t: [], "empty"),
    "a number": (lambda t: 3, r"found 3 \(int\)"),
    "None": (lambda t: None, "found None"),
    "a model": (lambda t: t.model, "another argument"),
    "a generator": (lambda t: iter(t.batches), "read only once"),
    "other columns": (
        lambda t: pandas.DataFrame({"tweet": t.texts, "mood": t.labels}),
        "tweet, mood.*Rename",
    ),
    "splits": (lambda t: datasets.DatasetDict({"train": raw(t)}), r"data\['train'\]"),
    "unknown names": (lambda t: (t.texts, ["fair"] * COUNT), "'fair'.*neg, pos"),
    "labels outside the classes": (lambda t: (t.texts, [7] * COUNT), "Label 7.*2 classes"),
    "too few labels": (lambda t: (t.texts, [0]), f"{COUNT} inputs, 1 labels"),
    "a missing label": (lambda t: (t.texts, [None] * COUNT), "Row 0"),
    "images": (lambda t: [np.zeros((4, 4, 3), np.uint8)] * 2, "takes texts"),
    "a missing file": (lambda t: "nowhere.csv", "nowhere.csv"),
    "mixed rows": (lambda t: [{"text": "a", "label": 0}, {"text": "a"}], "Example 1"),
    "no text": (lambda t: [{"text": "a", "label": 0}, {"text": None, "label": 1}], "Text 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_data_is_refused_by_what_was_found(case: str, reviews: Texts) -> None:
    make, words = REFUSED[case]
    with pytest.raises(DataError, match=f"(?s){words}"):
        hydra.build(reviews.model, make(reviews), method="random", members=2, progress=False)


def test_a_host_without_a_tokenizer_says_how_to_give_one(reviews: Texts) -> None:
    from tests import zoo

    host = zoo._bert(num_labels=2).eval()
    with pytest.raises(DataError, match=r"model\.tokenizer = AutoTokenizer"):
        hydra.evaluate(host, (reviews.texts, reviews.labels), progress=False)
    host.tokenizer = reviews.tokenizer
    hydra.evaluate(host, (reviews.texts, reviews.labels), bootstrap=0, progress=False)


@pytest.mark.parametrize("door", ["build", "evaluate", "score_heads", "fit_novelty_", "why_novel"])
def test_what_the_model_cannot_run_on_is_refused_at_every_door(door: str, photos: Images) -> None:
    full = hydra.HeadMask.full(photos.model)
    ensemble = hydra.fuse(photos.model, [full])
    ensemble.fit_novelty_(photos.images, choose=False, progress=False)
    wrong = (torch.zeros(COUNT, 3, 20, 20), torch.tensor(photos.labels))
    run = FUNCTIONS.get(door) or (lambda m, e, d: e.why_novel(d[0]))
    with pytest.raises(DataError, match=r"failed on .*20, 20\].*prepared as the model expects"):
        run(photos.model, ensemble, wrong)


def test_one_file_is_not_a_folder_of_images(photos: Images) -> None:
    with pytest.raises(DataError, match=r"is one file.*a folder, or a list of paths"):
        hydra.evaluate(photos.model, photos.paths[0], progress=False)


def test_texts_are_no_images(photos: Images) -> None:
    with pytest.raises(DataError, match="are not files, such as 'a fine film'"):
        hydra.evaluate(photos.model, ["a fine film"], progress=False)
