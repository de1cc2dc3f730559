"""Load the real data of the experiments from a folder given by argument or by HYDRA_DATA.

(Not called `datasets.py`: beside the scripts it would hide the package of that name.)

Images come as bytes `[N, C, H, W]` with labels, texts as strings with labels; `.batches(...)` makes
data for a host of either. With `cache=FOLDER` (outside the project) decoded images are kept there.

Splits, the same in every experiment:

- ImageNet (`imagenet-val-3k`, three images a class): `calibration`, `validation`, `test` are the
  first, second and third image of a class by sorted file name. The files have 224 x 224 pixels and
  are taken as they are: resizing them to 248 and cropping, as timm's recipe for larger files
  does, gives DeiT-tiny 69.0 % on all 3,000 in place of 69.3 %.
- Textures: `banded`, `braided` are for validation, `bumpy`, `crosshatched` for test; `cobwebbed` is
  left out beside ImageNet, which has a class spider web.
- TinyImageNet beside CIFAR-10: without the classes of `CIFAR10_OVERLAP`.
- SST-2: the parts of `splits/sst2.json`, and `dev` for test. Outliers: TREC.train for validation;
  TREC.test, AG News and Multi30k for test; movie reviews are a near shift.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hydra_ensembles.data import Batches, ImageTransform, text_data
from hydra_ensembles.data.folders import image_batch
from hydra_ensembles.data.table_files import read_table
from hydra_ensembles.data.texts import TextBatches
from hydra_ensembles.data.transforms import IMAGENET_MEAN, IMAGENET_STD
from hydra_ensembles.errors import DataError

SPLITS = Path(__file__).parent / "splits"
IMAGENET_PARTS = ("calibration", "validation", "test")
TEXTURES = {"validation": ("banded", "braided"), "test": ("bumpy", "crosshatched")}
CIFAR10_CLASSES = [
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
]  # in the labels' order
CIFAR10_OVERLAP = {
    "n01641577": "bullfrog",
    "n01644900": "tailed frog",
    "n01855672": "goose",
    "n02002724": "black stork",
    "n02056570": "king penguin",
    "n02058221": "albatross",
    "n02085620": "Chihuahua",
    "n02094433": "Yorkshire terrier",
    "n02099601": "golden retriever",
    "n02099712": "Labrador retriever",
    "n02106662": "German shepherd",
    "n02113799": "standard poodle",
    "n02123045": "tabby",
    "n02123394": "Persian cat",
    "n02124075": "Egyptian cat",
    "n02423022": "gazelle",
    "n02814533": "beach wagon",
    "n03100240": "convertible",
    "n03447447": "gondola",
    "n03662601": "lifeboat",
    "n03670208": "limousine",
    "n03796401": "moving van",
    "n03977966": "police van",
    "n04285008": "sports car",
}
"""TinyImageNet's birds, cats, dogs, frogs, gazelle, cars, vans, boats; lion and cougar stay."""


@dataclass(frozen=True)
class ImageSet:
    """Images as bytes `[N, C, H, W]`, with labels if they have any."""

    pixels: Tensor
    labels: Tensor | None = None

    def __len__(self) -> int:
        return len(self.pixels)

    def subset(self, rows: Sequence[int] | Tensor) -> ImageSet:
        """Return some of the images."""
        rows = torch.as_tensor(rows, dtype=torch.long)
        return ImageSet(self.pixels[rows], None if self.labels is None else self.labels[rows])

    def unlabelled(self) -> ImageSet:
        """Return the images without labels, as outliers need them."""
        return ImageSet(self.pixels)

    def floats(
        self, rows: Sequence[int] | slice = slice(None), *, size: int | None = None
    ) -> Tensor:
        """Return images in [0, 1], three channels, resized bicubically where `size` asks for it."""
        images = self.pixels[rows].float() / 255
        images = images.expand(-1, 3, -1, -1)
        if size is not None and images.shape[-2:] != (size, size):
            shrinks = images.shape[-1] > size
            images = F.interpolate(
                images, size=size, mode="bicubic", align_corners=False, antialias=shrinks
            )
        return images.clamp(0, 1)

    def batches(
        self,
        *,
        size: int | None = None,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        batch_size: int = 50,
        key: str | None = None,
    ) -> Batches:
        """Make normalised data for a host: `(images, labels)`, or a mapping under `key`."""
        transform = ImageTransform(size=size or self.pixels.shape[-1], mean=mean, std=std)
        shift = torch.tensor(mean).view(1, 3, 1, 1)
        scale = torch.tensor(std).view(1, 3, 1, 1)

        def load(rows: Sequence[int]) -> Any:
            images = (self.floats(list(rows), size=size) - shift) / scale
            return image_batch(
                images, None if self.labels is None else self.labels[list(rows)], key
            )

        info = {"transform": transform}
        return Batches(load, range(len(self)), batch_size=batch_size, labels=self.labels, info=info)


@dataclass(frozen=True)
class TextSet:
    """Strings, with labels if they have any."""

    texts: list[str]
    labels: list[int] | None = None

    def __len__(self) -> int:
        return len(self.texts)

    def subset(self, rows: Sequence[int]) -> TextSet:
        """Return some of the texts."""
        labels = None if self.labels is None else [self.labels[row] for row in rows]
        return TextSet([self.texts[row] for row in rows], labels)

    def sample(self, count: int, *, seed: int = 0) -> TextSet:
        """Return `count` texts drawn at random, in their order."""
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        return self.subset(order[:count].sort().values.tolist())

    def by_length(self) -> TextSet:
        """Return the texts from the shortest to the longest: batches then need little padding."""
        return self.subset(sorted(range(len(self)), key=lambda row: len(self.texts[row])))

    def unlabelled(self) -> TextSet:
        """Return the texts without labels, as outliers need them."""
        return TextSet(self.texts)

    def batches(self, tokenizer: Any, *, max_length: int = 64, batch_size: int = 50) -> TextBatches:
        """Make data for a host."""
        return text_data(
            self.texts,
            tokenizer,
            labels=self.labels,
            max_length=max_length,
            batch_size=batch_size,
        )


def data_root(path: str | Path | None = None) -> Path:
    """Return the folder of the real data: the argument, or the environment's HYDRA_DATA."""
    found = path or os.environ.get("HYDRA_DATA")
    if not found:
        raise DataError("Say where the real data is: pass its folder, or set HYDRA_DATA.")
    root = Path(found).expanduser()
    if not root.is_dir():
        raise DataError(f"The data folder {root} does not exist.")
    return root


# --- images


def imagenet(root: Path, part: str, *, cache: Path | None = None) -> ImageSet:
    """Load 1,000 ImageNet validation images, one a class in the order of the classes."""
    if part not in IMAGENET_PARTS:
        raise DataError(f"Unknown part {part!r} of ImageNet; expected {', '.join(IMAGENET_PARTS)}.")
    folder = _need(root / "imagenet-val-3k")
    table = read_table(_need(folder / "labels.csv"))
    by_class: dict[int, list[str]] = {}
    for name, label in sorted(zip(table["file"], table["label"], strict=True)):
        by_class.setdefault(int(label), []).append(name)
    place = IMAGENET_PARTS.index(part)
    files = [folder / "images" / by_class[label][place] for label in sorted(by_class)]
    return _decoded(files, sorted(by_class), 224, cache, f"imagenet-{part}")


def imagenet_class_names(root: Path) -> list[str]:
    """Return the 1,000 class names in the order of the labels."""
    index = json.loads(_need(root / "imagenet-val-3k" / "imagenet_class_index.json").read_text())
    return [index[str(number)][1].replace("_", " ") for number in range(len(index))]


def textures(
    root: Path, classes: str | Sequence[str] = "test", *, size: int = 224, cache: Path | None = None
) -> ImageSet:
    """Load textures: a part (`validation`, `test`: two classes each), or classes by name."""
    names = TEXTURES[classes] if isinstance(classes, str) and classes in TEXTURES else classes
    names = [names] if isinstance(names, str) else list(names)
    files = [file for name in names for file in sorted(_need(root / "textures" / name).iterdir())]
    return _decoded(files, None, size, cache, f"textures-{'-'.join(names)}")


def cifar10(root: Path, part: str = "test") -> ImageSet:
    """Load 32 x 32 images: `train` (the first batch), `test`, or a part of its split file."""
    folder, rows = root / "cifar10", None
    if part not in ("train", "test"):
        rows = json.loads(_need(SPLITS / "cifar10.json").read_text())[part]
    kind = "test" if part == "test" else "train"
    from PIL import Image

    with Image.open(
        _need(folder / ("test_batch.png" if kind == "test" else "data_batch_1.png"))
    ) as f:
        pixels = np.asarray(f.convert("RGB")).reshape(-1, 32, 32, 3)
    labels = json.loads(_need(folder / f"{kind}_lables.json").read_text())[: len(pixels)]
    tensor = torch.from_numpy(pixels.copy()).permute(0, 3, 1, 2).contiguous()
    found = ImageSet(tensor, torch.tensor(labels))
    return found if rows is None else found.subset(rows)


def tinyimagenet(root: Path, *, size: int = 64, cache: Path | None = None) -> ImageSet:
    """Load TinyImageNet's validation images without the classes that CIFAR-10 has too."""
    folder = root / "tinyimagenet"
    lines = _need(folder / "val_annotations.txt").read_text().splitlines()
    wnids = dict(line.split("\t")[:2] for line in lines)
    files = [
        file
        for file in sorted(_need(folder / "images").iterdir())
        if wnids[file.name] not in CIFAR10_OVERLAP
    ]
    return _decoded(files, None, size, cache, "tinyimagenet")


def mnist(root: Path) -> ImageSet:
    """Load MNIST's 10,000 test images of 28 x 28, one channel."""
    with gzip.open(_need(root / "mnist" / "t10k-images-idx3-ubyte.gz")) as file:
        pixels = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 1, 28, 28)
    with gzip.open(_need(root / "mnist" / "t10k-labels-idx1-ubyte.gz")) as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8)
    return ImageSet(torch.from_numpy(pixels.copy()), torch.from_numpy(labels.copy()).long())


def noise(count: int = 500, *, size: int = 224, seed: int = 0) -> ImageSet:
    """Draw images of noise: half of them uniform, half normal about grey."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand((count // 2, 3, size, size), generator=generator)
    normal = 0.5 + 0.25 * torch.randn((count - count // 2, 3, size, size), generator=generator)
    return ImageSet((torch.cat([uniform, normal]).clamp(0, 1) * 255).round().to(torch.uint8))


# --- text


def sst2(root: Path, part: str = "dev") -> TextSet:
    """Load SST-2: `dev`, `phrases` (all of train.tsv), or a part of its split file."""
    folder = root / "text" / "sst2"
    file = _need(folder / ("dev.tsv" if part == "dev" else "train.tsv"))
    table = read_table(file)
    text = table["content"] if "content" in table else table["sentence"]
    found = TextSet([line.strip() for line in text], [int(label) for label in table["label"]])
    if part in ("dev", "phrases"):
        return found
    parts = json.loads(_need(SPLITS / "sst2.json").read_text())
    if part not in parts:
        raise DataError(
            f"Unknown part {part!r} of SST-2; expected dev, phrases, {', '.join(parts)}."
        )
    return found.subset(parts[part])


def trec(root: Path, part: str = "test") -> TextSet:
    """Load TREC questions: 5,452 of `train` (OOD validation), 500 of `test`."""
    # one train question has a Latin-1 letter
    lines = _need(root / "text" / "ood" / f"TREC.{part}.all").read_text(encoding="latin-1")
    return TextSet([line.split(" ", 1)[1].strip() for line in lines.splitlines() if line.strip()])


def ag_news(root: Path) -> TextSet:
    """Load 7,600 news: title and description."""
    with _need(root / "text" / "ood" / "ag_news_test.csv").open(
        encoding="utf-8", newline=""
    ) as file:
        rows = list(csv.reader(file))
    # the file writes line breaks as backslashes and lost the & of HTML's #36; and the like
    texts = [f"{title}. {text}".replace("\\", " ") for _, title, text in rows]
    return TextSet([" ".join(text.split()) for text in texts])


def multi30k(root: Path) -> TextSet:
    """Load 3,532 captions of photographs."""
    files = sorted((root / "text" / "ood").glob("multi30k_*.en.txt"))
    if not files:
        raise DataError(f"There is no multi30k_*.en.txt in {root / 'text' / 'ood'}.")
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return TextSet([line.strip() for line in lines if line.strip()])


def movie_reviews(root: Path) -> TextSet:
    """Load 2,000 long movie reviews with labels (1 is positive): a near shift of SST-2."""
    texts, labels = [], []
    with zipfile.ZipFile(_need(root / "text" / "ood" / "nltk_movie_reviews.zip")) as archive:
        for name in sorted(n for n in archive.namelist() if n.endswith(".txt")):
            texts.append(" ".join(archive.read(name).decode("latin-1").split()))
            labels.append(int("/pos/" in name))
    return TextSet(texts, labels)


def text_outliers(root: Path) -> dict[str, TextSet]:
    """Load the OOD test sets of SST-2 by name."""
    makers: dict[str, Callable[[Path], TextSet]] = {
        "trec": trec,
        "ag_news": ag_news,
        "multi30k": multi30k,
    }
    return {name: make(root).unlabelled() for name, make in makers.items()}


def sst2_sets(root: Path, *, count: int = 500, reviews: int = 400) -> dict[str, TextSet]:
    """Load all that a search on SST-2 needs, shortest texts first.

    Labelled: `calibration`, `validation`, `reserve` (no host has seen them) and `test` (dev). OOD
    validation: `trec-train`. OOD test: `trec-test`, of the seen family, and the others.
    """
    found = {part: sst2(root, part) for part in ("calibration", "validation", "reserve")}
    found["test"] = sst2(root)
    others = {
        "trec-train": trec(root, "train"),
        "trec-test": trec(root),
        "ag-news": ag_news(root),
        "multi30k": multi30k(root),
    }
    found |= {name: texts.sample(count).unlabelled() for name, texts in others.items()}
    found["movie-reviews"] = movie_reviews(root).sample(reviews).unlabelled()
    return {name: texts.by_length() for name, texts in found.items()}


def image_outliers(
    root: Path, *, count: int = 1000, cache: Path | None = None
) -> dict[str, ImageSet]:
    """Load the OOD test sets of ImageNet by name: one seen family (textures) and unseen ones."""
    rows = range(count)
    return {
        "textures": textures(root, "test", cache=cache),
        "mnist": mnist(root).subset(rows).unlabelled(),
        "cifar10": cifar10(root).subset(rows).unlabelled(),
        "noise": noise(min(count, 500)),
    }


def _decoded(
    files: Sequence[Path], labels: Sequence[int] | None, size: int, cache: Path | None, name: str
) -> ImageSet:
    """Decode images as bytes, the shorter side resized to `size` and the centre cropped."""
    from safetensors.torch import load_file, save_file

    targets = None if labels is None else torch.tensor(labels)
    kept = None if cache is None else Path(cache) / f"{name}-{len(files)}x{size}.safetensors"
    if kept is not None and kept.is_file():
        return ImageSet(load_file(kept)["pixels"], targets)
    from PIL import Image

    plain = ImageTransform(size=size, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    images = []
    for file in files:
        with Image.open(_need(file)) as picture:
            images.append((plain(picture) * 255).round().to(torch.uint8))
    pixels = torch.stack(images)
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        beside = kept.with_suffix(f".{os.getpid()}.tmp")
        save_file({"pixels": pixels}, beside)
        os.replace(beside, kept)
    return ImageSet(pixels, targets)


def _need(path: Path) -> Path:
    if not path.exists():
        raise DataError(
            f"{path} is missing. Pass the folder that holds the real data (HYDRA_DATA)."
        )
    return path
