"""Known data, outliers and shifts of the novelty tables, by task.

`known-*` and `test` are known data that no host was trained on; `mild-*` are changes that cost no
accuracy, `shift-*` corruptions by severity. `train` is what the hosts were trained on, for rivals
that ask for its statistics. `proxy-*` are far outliers made of known data.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hydra_ensembles.data.corruptions import corrupt, corrupt_texts
from hydra_ensembles.data.proxies import proxies as PROXIES
from hydra_ensembles.fusion.known_data import proxies_of

from . import sets
from .recipes import part_of, read_recipe
from .sets import ImageSet, TextSet
from .tasks import CIFAR8, Cifar8, Cifar10, Digits, Task, TextTask

Makers = dict[str, Callable[[], Iterable[Any]]]
SEVERITIES = (1, 3, 5)
IMAGE_SHIFTS = (
    *("gaussian_noise", "defocus_blur", "motion_blur", "fog", "contrast"),
    *("elastic_transform", "pixelate", "jpeg_compression"),
)
TEXT_SHIFTS = ("typos", "keyboard", "swap_letters", "drop_letters", "drop_words", "swap_words")


def trained_on(task: Task) -> Any:
    """Return what the hosts of a task were trained on."""
    return part_of(task, read_recipe(task.name), "train")


# --- images


def floats(images: ImageSet, size: int) -> Tensor:
    """Return images `[N, 3, size, size]` in [0, 1]."""
    pixels = (images.pixels.float() / 255).expand(-1, 3, -1, -1)
    if pixels.shape[-1] == size:
        return pixels
    return F.interpolate(
        pixels, size=size, mode="bicubic", antialias=pixels.shape[-1] > size
    ).clamp(0, 1)


def as_set(pixels: Tensor, labels: Tensor | None = None) -> ImageSet:
    """Return images in [0, 1] as bytes."""
    return ImageSet((pixels.clamp(0, 1) * 255).round().to(torch.uint8), labels)


def light_blur(pixels: Tensor) -> Tensor:
    """Blur with a kernel of 3 x 3."""
    kernel = torch.tensor([1.0, 2.0, 1.0])
    kernel = (kernel[:, None] * kernel / 16).expand(3, 1, 3, 3)
    return F.conv2d(F.pad(pixels, (1,) * 4, mode="replicate"), kernel, groups=3)


def jpeg(pixels: Tensor, quality: int = 40) -> Tensor:
    """Encode and decode an image `[3, H, W]` in [0, 1]."""
    from PIL import Image

    file = io.BytesIO()
    array = (pixels.permute(1, 2, 0) * 255).round().byte().numpy()
    Image.fromarray(array).save(file, "JPEG", quality=quality)
    with Image.open(file) as image:
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


MILD: dict[str, Callable[[Tensor], Tensor]] = {
    "mild-mirrored": lambda pixels: pixels.flip(-1),
    "mild-brighter": lambda pixels: pixels * 1.15,
    "mild-jpeg40": lambda pixels: torch.stack([jpeg(image) for image in pixels]),
    "mild-blur": light_blur,
}


def changed_images(test: ImageSet, size: int, mild: int) -> dict[str, Callable[[], ImageSet]]:
    """Return mild changes of some test images and corruptions of 100 of them."""
    few = test.subset(range(0, len(test), len(test) // mild)[:mild])
    hundred = test.subset(range(0, len(test), len(test) // 100)[:100])
    made: dict[str, Callable[[], ImageSet]] = {
        name: lambda change=change: as_set(change(floats(few, size)), few.labels)
        for name, change in MILD.items()
    }
    for severity in SEVERITIES:
        for name in IMAGE_SHIFTS:
            made[f"shift-{name}-{severity}"] = lambda name=name, severity=severity: as_set(
                corrupt(floats(hundred, size), name, severity=severity), hundred.labels
            )
    return made


def letters(count: int, *, size: int) -> ImageSet:
    """Draw lines of random letters with PIL's own font, dark on light."""
    from PIL import Image, ImageDraw, ImageFont

    draw = torch.Generator().manual_seed(0)
    pictures = []
    for _ in range(count):
        grey, ink, points, lines = torch.rand(4, generator=draw).tolist()
        picture = Image.new("L", (size, size), int(255 - 90 * grey))
        font = ImageFont.load_default(size=int(size * (0.1 + 0.35 * points)))
        rows = []
        for _ in range(1 + int(3 * lines)):
            codes = torch.randint(65, 91, (8,), generator=draw).tolist()
            rows.append("".join(map(chr, codes)))
        ImageDraw.Draw(picture).text((4, 4), "\n".join(rows), fill=int(90 * ink), font=font)
        pictures.append(torch.from_numpy(np.array(picture))[None])
    return ImageSet(torch.stack(pictures))


def small_digits(count: int) -> ImageSet:
    """Return scikit-learn's handwritten digits of 8 x 8."""
    from sklearn.datasets import load_digits

    return as_set(torch.tensor(load_digits().images[:count])[:, None] / 16)


def batched(made: dict[str, Callable[[], ImageSet]], size: int) -> Makers:
    """Make batches of image sets when they are asked for."""
    return {
        name: lambda make=make: make().batches(size=size, batch_size=25)
        for name, make in made.items()
    }


def imagenet(task: Task) -> Makers:
    """Known images are the first and second of every class."""
    root = task.data
    test = sets.imagenet(root, "test")
    made: dict[str, Callable[[], ImageSet]] = {
        "known-0": lambda: sets.imagenet(root, "calibration"),
        "known-1": lambda: sets.imagenet(root, "validation"),
        "test": lambda: test,
        "textures-validation": lambda: sets.textures(root, "validation"),
        "mnist": lambda: sets.mnist(root).subset(range(300)),
        "textures-test": lambda: sets.textures(root, "test"),
        "cifar10": lambda: sets.cifar10(root).subset(range(600)),
        "letters": lambda: letters(300, size=224),
        "digits8": lambda: small_digits(300),
        "noise": lambda: sets.noise(150),
    }
    return batched({**made, **changed_images(test, 224, 250)}, 224)


def cifar10(task: Task) -> Makers:
    """Known images are test images beyond the first 2,000; outliers are brought to 32 x 32."""
    assert isinstance(task, Cifar10)
    root = task.data
    whole = sets.cifar10(root)
    test = whole.subset(range(1000))

    def small(images: ImageSet) -> ImageSet:
        return as_set(floats(images, 32))

    made: dict[str, Callable[[], ImageSet]] = {
        "known-0": lambda: whole.subset(range(2000, 7000)),
        "train": lambda: trained_on(task),
        "test": lambda: test,
        "textures-validation": lambda: small(sets.textures(root, "validation")),
        "mnist": lambda: small(sets.mnist(root).subset(range(500))),
        "textures-test": lambda: small(sets.textures(root, "test")),
        "tinyimagenet": lambda: small(sets.tinyimagenet(root).subset(range(800))),
        "letters": lambda: small(letters(300, size=96)),
        "digits8": lambda: small(small_digits(300)),
        "noise": lambda: sets.noise(150, size=32),
    }
    return batched({**made, **changed_images(test, 32, 300)}, task.size)


def cifar8(task: Task) -> Makers:
    """Known images are of eight classes; outliers are the two that the host never saw."""
    assert isinstance(task, Cifar8)
    whole, pair = sets.cifar10(task.data), task.left_out
    test = whole.subset(range(2000))
    made: dict[str, Callable[[], ImageSet]] = {
        "known-0": lambda: whole.subset(range(2000, 3500)).without(pair),
        "train": lambda: trained_on(task),
        "test": lambda: test.subset(range(1000)).without(pair),
        "left-out": lambda: test.without([c for c in range(10) if c not in pair]),
        "textures-validation": lambda: as_set(floats(sets.textures(task.data, "validation"), 32)),
    }
    return batched(made, task.size)


# --- texts


def arc(root: Path) -> TextSet:
    """Load the questions of ARC-Easy without their answers."""
    rows = json.loads(sets.need(root / "text" / "arc" / "ARC-Easy-test.json").read_text())
    tails = [row["instruction"].split("question: ", 1)[1] for row in rows]
    return TextSet([tail.split("\n\nAnswer1")[0] for tail in tails])


def changed_texts(texts: TextSet, count: int = 400) -> dict[str, TextSet]:
    """Return mild changes of labelled texts, and corruptions by severity."""
    some = texts.sample(count, seed=1)

    def noisy(name: str, severity: int) -> TextSet:
        return TextSet(corrupt_texts(some.texts, name, severity=severity), some.labels)

    found = {
        "mild-upper": TextSet([text.upper() for text in some.texts], some.labels),
        "mild-no-stop": TextSet([text.rstrip(" .?!") for text in some.texts], some.labels),
        "mild-typo": noisy("typos", 1),
        "mild-word-order": noisy("swap_words", 1),
    }
    for name in TEXT_SHIFTS:
        for severity in SEVERITIES:
            found[f"shift-{name}-{severity}"] = noisy(name, severity)
    return found


def tokenized(task: TextTask, found: dict[str, TextSet]) -> Makers:
    """Make batches of texts."""
    return {name: lambda texts=texts: task.batches(texts) for name, texts in found.items()}


def sst2(task: Task) -> Makers:
    """Known sentences were kept aside from the hosts' training."""
    root = task.data
    parts = [sets.sst2(root, part) for part in ("calibration", "validation", "reserve")]
    test = sets.sst2(root)
    found = {
        "known-0": parts[0] + parts[1] + parts[2],
        "train": trained_on(task),
        "test": test,
        "trec": sets.trec(root, "train").sample(500).unlabelled(),
        "ag-news": sets.ag_news(root).sample(500).unlabelled(),
        "multi30k": sets.multi30k(root).sample(500).unlabelled(),
        "intents": sets.clinc150(root, "test").sample(500).unlabelled(),
        "arc": arc(root).sample(400),
        "movie-reviews": sets.movie_reviews(root).sample(400).unlabelled(),
        **changed_texts(test),
    }
    assert isinstance(task, TextTask)
    return tokenized(task, found)


def clinc150(task: Task) -> Makers:
    """Known questions are the validation part; `test` joins it (see `novelty.py`)."""
    root = task.data
    test = sets.clinc150(root, "test")
    out = sets.clinc150(root, "oos_train") + sets.clinc150(root, "oos_val")
    found = {
        "known-0": sets.clinc150(root, "val"),
        "train": trained_on(task),
        "test": test.sample(1500),
        "trec": sets.trec(root, "train").sample(500).unlabelled(),
        "oos-validation": out.unlabelled(),
        "oos-test": sets.clinc150(root, "oos_test").unlabelled(),
        "ag-news": sets.ag_news(root).sample(500).unlabelled(),
        "multi30k": sets.multi30k(root).sample(500).unlabelled(),
        "sst2": sets.sst2(root).sample(500).unlabelled(),
        **changed_texts(test),
    }
    assert isinstance(task, TextTask)
    return tokenized(task, found)


def digits(task: Task) -> Makers:
    """Known digits are the validation part."""
    assert isinstance(task, Digits)
    found = {"known-0": task.held_out, "test": task.test, "train": task.training("train")}
    found |= {**task.outliers, **task.ood["unseen"]}
    return {name: lambda data=data: data for name, data in found.items()}


def with_proxies(maker: Callable[[Task], Makers]) -> Callable[[Task], Makers]:
    """Add far outliers that are made of known data, as `fit_novelty_` makes them."""

    def makers(task: Task) -> Makers:
        found = maker(task)
        made = cache(lambda: proxies_of(found["known-0"]()))
        modality = "text" if isinstance(task, TextTask) else "image"
        kinds = [name for name in PROXIES if PROXIES[name].modality == modality]
        return found | {
            f"proxy-{kind}": lambda kind=kind: made()[f"{kind} proxies"] for kind in kinds
        }

    return makers


MAKERS: dict[str, Callable[[Task], Makers]] = {
    "imagenet": with_proxies(imagenet),
    "cifar10": with_proxies(cifar10),
    **dict.fromkeys(CIFAR8, with_proxies(cifar8)),
    "sst2": with_proxies(sst2),
    "clinc150": with_proxies(clinc150),
    "digits": with_proxies(digits),
}
