"""The real data sets, read from one folder (`--data`, or the environment's HYDRA_DATA).

Images are bytes `[N, C, H, W]`, texts are strings; `.batches(...)` makes data for a host of either.

Splits, the same in every table:

- ImageNet (three images per class): `calibration`, `validation`, `test` are the first, second and
  third image of a class by file name.
- Textures: `banded`, `braided` for validation, `bumpy`, `crosshatched` for test; `cobwebbed` is
  left out, since ImageNet has a class spider web.
- CIFAR-10: `splits/cifar10.json`. TinyImageNet beside it: without the classes of `CIFAR10_OVERLAP`.
- SST-2: the parts of `splits/sst2.json`, and `dev` for test.
- CLINC150: the parts of its own file.
- CoLA: `dev` for test; of the training file every 17th sentence is `calibration`, the ones half way
  between them are `validation`, and the others are `train`.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hydra_ensembles.data import Batches, ImageTransform, text_data
from hydra_ensembles.data.image_data import image_batch
from hydra_ensembles.data.text_files import read_table
from hydra_ensembles.data.transforms import IMAGENET_MEAN, IMAGENET_STD
from hydra_ensembles.errors import DataError

SPLITS = Path(__file__).parents[1] / "splits"
IMAGENET_PARTS = ("calibration", "validation", "test")
TEXTURES = {"validation": ("banded", "braided"), "test": ("bumpy", "crosshatched")}
CIFAR10_OVERLAP = {
    *("n01641577", "n01644900", "n01855672", "n02002724", "n02056570", "n02058221"),  # frogs, birds
    *("n02085620", "n02094433", "n02099601", "n02099712", "n02106662", "n02113799"),  # dogs
    *("n02123045", "n02123394", "n02124075", "n02423022"),  # cats, gazelle
    *("n02814533", "n03100240", "n03447447", "n03662601", "n03670208"),  # cars, boats
    *("n03796401", "n03977966", "n04285008"),  # vans, cars
}
"""TinyImageNet classes that CIFAR-10 has too; lion and cougar stay."""


@dataclass(frozen=True)
class ImageSet:
    """Images as bytes `[N, C, H, W]`, with labels if they have any."""

    pixels: Tensor
    labels: Tensor | None = None

    def __len__(self) -> int:
        return len(self.pixels)

    def subset(self, rows: Sequence[int]) -> ImageSet:
        """Return some of the images."""
        index = torch.as_tensor(rows, dtype=torch.long)
        return ImageSet(self.pixels[index], None if self.labels is None else self.labels[index])

    def sample(self, count: int, *, seed: int = 0) -> ImageSet:
        """Return `count` images drawn at random."""
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        return self.subset(order[:count].tolist())

    def without(self, classes: Sequence[int]) -> ImageSet:
        """Return the images of all other classes."""
        if not classes:
            return self
        assert self.labels is not None
        left = ~torch.isin(self.labels, torch.tensor(classes))
        return self.subset(left.nonzero().flatten().tolist())

    def unlabelled(self) -> ImageSet:
        """Return the images without labels, as outliers need them."""
        return ImageSet(self.pixels)

    def batches(
        self, *, size: int | None = None, batch_size: int = 50, key: str | None = None
    ) -> Batches:
        """Make normalised data for a host: `(images, labels)`, or a mapping under `key`."""
        mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (IMAGENET_MEAN, IMAGENET_STD))

        def load(rows: Sequence[int]) -> Any:
            images = (self.pixels[list(rows)].float() / 255).expand(-1, 3, -1, -1)
            if size is not None and images.shape[-1] != size:
                images = F.interpolate(
                    images, size=size, mode="bicubic", antialias=images.shape[-1] > size
                )
            labels = None if self.labels is None else self.labels[list(rows)]
            return image_batch((images.clamp(0, 1) - mean) / std, labels, key)

        info = {"transform": ImageTransform(size=size or self.pixels.shape[-1])}
        return Batches(load, range(len(self)), batch_size=batch_size, labels=self.labels, info=info)


@dataclass(frozen=True)
class TextSet:
    """Strings, or pairs of strings, with labels if they have any."""

    texts: list[str]
    labels: list[Any] | None = None
    pairs: list[str] | None = None

    def __len__(self) -> int:
        return len(self.texts)

    def __add__(self, other: TextSet) -> TextSet:
        labels = None if self.labels is None else [*self.labels, *(other.labels or [])]
        pairs = None if self.pairs is None else [*self.pairs, *(other.pairs or [])]
        return replace(self, texts=[*self.texts, *other.texts], labels=labels, pairs=pairs)

    def subset(self, rows: Sequence[int]) -> TextSet:
        """Return some of the texts."""
        columns = {"texts": self.texts, "labels": self.labels, "pairs": self.pairs}
        found = {name: [c[row] for row in rows] for name, c in columns.items() if c is not None}
        return replace(self, **found)

    def sample(self, count: int, *, seed: int = 0) -> TextSet:
        """Return `count` texts drawn at random, in their order."""
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        return self.subset(order[:count].sort().values.tolist())

    def by_length(self) -> TextSet:
        """Return the texts from the shortest to the longest: batches then need little padding."""
        size = [len(text) for text in self.texts]
        if self.pairs is not None:
            size = [length + len(other) for length, other in zip(size, self.pairs, strict=True)]
        return self.subset(sorted(range(len(self)), key=size.__getitem__))

    def unlabelled(self) -> TextSet:
        """Return the texts without labels, as outliers need them."""
        return replace(self, labels=None)

    def tokens(self, tokenizer: Any) -> list[int]:
        """Count the tokens of each text."""
        columns = [self.texts] if self.pairs is None else [self.texts, self.pairs]
        found = tokenizer(*columns, truncation=True, max_length=64)["input_ids"]
        return [len(tokens) for tokens in found]

    def batches(self, tokenizer: Any, *, batch_size: int = 50, max_length: int = 64) -> Batches:
        """Make data for a host."""
        return text_data(
            self.texts,
            tokenizer,
            pairs=self.pairs,
            labels=self.labels,
            max_length=max_length,
            batch_size=batch_size,
        )


def data_root(path: str | Path | None = None) -> Path:
    """Return the folder of the real data: the argument, or the environment's HYDRA_DATA."""
    found = path or os.environ.get("HYDRA_DATA")
    if not found:
        raise DataError("Say where the real data is: pass --data, or set HYDRA_DATA.")
    return need(Path(found).expanduser())


def need(path: Path) -> Path:
    """Return the path, or say what is missing."""
    if not path.exists():
        raise DataError(f"{path} is missing. Name the folder of the data: --data or HYDRA_DATA.")
    return path


# --- images


def imagenet(root: Path, part: str) -> ImageSet:
    """Load 1,000 ImageNet validation images, one per class in the order of the classes."""
    if part not in IMAGENET_PARTS:
        raise DataError(f"Unknown part {part!r} of ImageNet; expected {', '.join(IMAGENET_PARTS)}.")
    folder = need(root / "imagenet-val-3k")
    table = read_table(need(folder / "labels.csv"))
    by_class: dict[int, list[str]] = {}
    for name, label in sorted(zip(table["file"], table["label"], strict=True)):
        by_class.setdefault(int(label), []).append(name)
    place = IMAGENET_PARTS.index(part)
    files = [folder / "images" / by_class[label][place] for label in sorted(by_class)]
    return _decoded(files, 224, sorted(by_class))


def imagenet_class_names(root: Path) -> list[str]:
    """Return the 1,000 class names in the order of the labels."""
    index = json.loads(need(root / "imagenet-val-3k" / "imagenet_class_index.json").read_text())
    return [index[str(number)][1].replace("_", " ") for number in range(len(index))]


def textures(root: Path, classes: str | Sequence[str] = "test", *, size: int = 224) -> ImageSet:
    """Load textures: a part (`validation`, `test`: two classes each), or classes by name."""
    names = TEXTURES.get(classes, (classes,)) if isinstance(classes, str) else classes
    files = [file for name in names for file in sorted(need(root / "textures" / name).iterdir())]
    return _decoded(files, size)


def cifar10(root: Path, part: str = "test") -> ImageSet:
    """Load 32 x 32 images: `test`, or the parts `train` and `validation` of the first batch."""
    from PIL import Image

    name, kind = ("test_batch", "test") if part == "test" else ("data_batch_1", "train")
    with Image.open(need(root / "cifar10" / f"{name}.png")) as file:
        pixels = np.asarray(file.convert("RGB")).reshape(-1, 32, 32, 3)
    labels = json.loads(need(root / "cifar10" / f"{kind}_lables.json").read_text())[: len(pixels)]
    tensor = torch.from_numpy(pixels.copy()).permute(0, 3, 1, 2).contiguous()
    found = ImageSet(tensor, torch.tensor(labels))
    if part == "test":
        return found
    validation = json.loads((SPLITS / "cifar10.json").read_text())["validation"]
    train = sorted(set(range(len(found))) - set(validation))
    return found.subset({"validation": validation, "train": train}[part])


def tinyimagenet(root: Path, *, size: int = 64) -> ImageSet:
    """Load TinyImageNet's validation images without the classes that CIFAR-10 has too."""
    folder = root / "tinyimagenet"
    lines = need(folder / "val_annotations.txt").read_text().splitlines()
    wnids = dict(line.split("\t")[:2] for line in lines)
    files = [
        f for f in sorted((folder / "images").iterdir()) if wnids[f.name] not in CIFAR10_OVERLAP
    ]
    return _decoded(files, size)


def mnist(root: Path) -> ImageSet:
    """Load MNIST's 10,000 test images of 28 x 28, one channel."""
    with gzip.open(need(root / "mnist" / "t10k-images-idx3-ubyte.gz")) as file:
        pixels = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 1, 28, 28)
    return ImageSet(torch.from_numpy(pixels.copy()))


def noise(count: int, *, size: int = 224) -> ImageSet:
    """Draw images of noise: every other one uniform, the rest normal about grey."""
    images = []
    for row in range(count):
        generator = torch.Generator().manual_seed(10_000 + row)
        kind = torch.rand if row % 2 else torch.randn
        pixels = kind(3, size, size, generator=generator)
        images.append(pixels if row % 2 else (0.5 + 0.25 * pixels).clamp(0, 1))
    return ImageSet((torch.stack(images) * 255).round().to(torch.uint8))


def _decoded(files: Sequence[Path], size: int, labels: Sequence[int] | None = None) -> ImageSet:
    """Decode images as bytes, the shorter side resized to `size` and the centre cropped."""
    from PIL import Image

    plain = ImageTransform(size=size, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    images = []
    for file in files:
        with Image.open(need(file)) as picture:
            images.append((plain(picture) * 255).round().to(torch.uint8))
    return ImageSet(torch.stack(images), None if labels is None else torch.tensor(labels))


# --- texts


def sst2(root: Path, part: str = "dev") -> TextSet:
    """Load SST-2: `dev`, `phrases` (all of train.tsv), or a part of its split file."""
    table = read_table(need(root / "text" / "sst2" / f"{'dev' if part == 'dev' else 'train'}.tsv"))
    text = table["content"] if "content" in table else table["sentence"]
    found = TextSet([line.strip() for line in text], [int(label) for label in table["label"]])
    if part in ("dev", "phrases"):
        return found
    parts = json.loads((SPLITS / "sst2.json").read_text())
    if part not in parts:
        raise DataError(
            f"Unknown part {part!r} of SST-2; expected dev, phrases, {', '.join(parts)}."
        )
    return found.subset(parts[part])


def clinc150(root: Path, part: str) -> TextSet:
    """Load CLINC150: `train`, `val`, `test` with intents as labels; `oos_test` has none."""
    record = json.loads(need(root / "text" / "clinc150" / "data.json").read_text())
    intents = sorted({intent for _, intent in record["train"]})
    texts = [text for text, _ in record[part]]
    if part.startswith("oos"):
        return TextSet(texts)
    return TextSet(texts, [intents.index(intent) for _, intent in record[part]])


def cola(root: Path, part: str = "dev") -> TextSet:
    """Load CoLA's sentences (label 1: acceptable): `dev`, or a part of the training file."""
    name = "in_domain_dev" if part == "dev" else "in_domain_train"
    columns = ("source", "label", "mark", "sentence")
    table = read_table(need(root / "text" / "cola" / f"{name}.tsv"), columns=columns)
    found = TextSet([line.strip() for line in table["sentence"]], [int(x) for x in table["label"]])
    if part == "dev":
        return found
    places = {"calibration": {0}, "validation": {8}, "train": set(range(17)) - {0, 8}}
    return found.subset([row for row in range(len(found)) if row % 17 in places[part]])


def trec(root: Path, part: str = "test") -> TextSet:
    """Load TREC questions: 5,452 of `train` (OOD validation), 500 of `test`."""
    # one train question has a Latin-1 letter
    lines = need(root / "text" / "ood" / f"TREC.{part}.all").read_text(encoding="latin-1")
    return TextSet([line.split(" ", 1)[1].strip() for line in lines.splitlines() if line.strip()])


def ag_news(root: Path) -> TextSet:
    """Load 7,600 news: title and description."""
    path = need(root / "text" / "ood" / "ag_news_test.csv")
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    # the file writes line breaks as backslashes and lost the & of HTML's #36; and the like
    texts = [f"{title}. {text}".replace("\\", " ") for _, title, text in rows]
    return TextSet([" ".join(text.split()) for text in texts])


def multi30k(root: Path) -> TextSet:
    """Load 3,532 captions of photographs."""
    files = sorted(need(root / "text" / "ood").glob("multi30k_*.en.txt"))
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return TextSet([line.strip() for line in lines if line.strip()])


def movie_reviews(root: Path) -> TextSet:
    """Load 2,000 long movie reviews: a near shift of SST-2."""
    texts = []
    with zipfile.ZipFile(need(root / "text" / "ood" / "nltk_movie_reviews.zip")) as archive:
        for name in sorted(n for n in archive.namelist() if n.endswith(".txt")):
            texts.append(" ".join(archive.read(name).decode("latin-1").split()))
    return TextSet(texts)
