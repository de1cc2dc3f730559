"""Zero-shot: a dual encoder of DeiT-tiny and MiniLM, towers locked, linear projections trained.

Image: class token of DeiT-tiny. Text: masked mean of MiniLM's last states. Logits are
exp(logit_scale) times cosines (Radford et al., 2021; locked towers: Zhai et al., 2022, "LiT"). The
projections learn from images and names of one half of the ImageNet classes (even or odd numbers:
the host's seed); the other half is tested. The image tower itself learned all 1,000 classes from
labels, so what is zero-shot is the way from image to *name*.

A search sees no image and no name of the tested classes. It rehearses: projections trained on 250
of the training classes meet the other 250.
"""

from __future__ import annotations

import math
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hydra_ensembles import ZeroShotClassifier
from hydra_ensembles.data.eval_mode import evaluating

from . import sets
from .sets import ImageSet
from .tasks import Data, Task, deit_tiny, minilm_folder

PROMPT = "a photo of a {}."
# names that stand for two classes each in the index that comes with the images
NAMES = {
    134: "crane bird",
    264: "Cardigan Welsh corgi",
    474: "cardigan sweater",
    517: "construction crane",
    638: "maillot one-piece swimsuit",
    639: "maillot tank suit",
}
# chosen by cross-validation over training classes, the same for both halves
WIDTH, RIDGE, STEPS, RATE, BATCH = 192, 10.0, 30, 1e-4, 200


class DualEncoder(nn.Module):
    """Two locked towers and their projections; `ZeroShotClassifier` takes it as it is."""

    def __init__(self, vision_model: nn.Module, projections: dict[str, Tensor]) -> None:
        super().__init__()
        self.vision_model = vision_model.requires_grad_(False)
        self.visual_projection = _linear(projections, "image")
        self.text_projection = _linear(projections, "text")
        self.logit_scale = nn.Parameter(projections["log_scale"].clone())


def _linear(tensors: dict[str, Tensor], name: str) -> nn.Linear:
    weight, bias = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.load_state_dict({"weight": weight, "bias": bias})
    return layer.requires_grad_(False)


def image_tower(root: Path) -> nn.Module:
    """Return DeiT-tiny without its classifier."""
    model = deit_tiny(root)
    model.reset_classifier(0)
    return model.eval()


def name_states(root: Path) -> Tensor:
    """Return MiniLM's mean states of all classes' names in the prompt, `[1000, 384]`."""
    from transformers import AutoTokenizer, BertModel

    model = BertModel.from_pretrained(minilm_folder()).eval()
    tokenizer = AutoTokenizer.from_pretrained(minilm_folder())
    names = [PROMPT.format(name) for name in class_names(root)]
    parts = []
    for start in range(0, len(names), 200):
        tokens = tokenizer(names[start : start + 200], padding=True, return_tensors="pt")
        with torch.no_grad():
            states = model(**tokens).last_hidden_state
        real = tokens["attention_mask"][..., None].float()
        parts.append((states * real).sum(1) / real.sum(1))
    return torch.cat(parts)


def class_names(root: Path) -> list[str]:
    """Return 1,000 different names."""
    names = sets.imagenet_class_names(root)
    return [NAMES.get(number, name) for number, name in enumerate(names)]


def train_projections(images: Tensor, labels: Tensor, texts: Tensor) -> dict[str, Tensor]:
    """Train both projections: ridge regression of names on image means, then cross-entropy.

    From a random start, cross-entropy learns the training classes by heart and reads 7 % of 100
    unseen classes; regression reads 16 to 19 %.

    Args:
        images: Class tokens `[example, 192]`.
        labels: Rows of `texts`, `[example]`.
        texts: States of the training classes' names, `[class, 384]`.
    """
    sizes = [(inputs - inputs.mean(0)).norm(dim=-1).mean() for inputs in (images, texts)]
    seen, read = (images - images.mean(0)) / sizes[0], (texts - texts.mean(0)) / sizes[1]
    counts = torch.bincount(labels, minlength=len(texts))[:, None]
    means = torch.zeros(len(texts), seen.shape[1]).index_add_(0, labels, seen) / counts
    directions = torch.linalg.eigh(seen.t() @ seen).eigenvectors.flip(1)[:, :WIDTH]
    shift = RIDGE * read.square().sum() / read.shape[1] * torch.eye(read.shape[1])
    start = torch.linalg.solve(read.t() @ read + shift, read.t() @ F.normalize(means, dim=-1))
    image = nn.Parameter(directions.t().contiguous())
    text = nn.Parameter((start @ directions).t().contiguous())
    with torch.no_grad():
        text.div_((read @ text.t()).norm(dim=-1).mean())
    log_scale = nn.Parameter(torch.tensor(math.log(10.0)))
    optimizer = torch.optim.Adam(
        [{"params": [image, text], "lr": RATE}, {"params": [log_scale], "lr": 100 * RATE}]
    )
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        some = torch.randint(len(seen), (BATCH,), generator=generator)
        mine, names = F.normalize(seen[some] @ image.t()), F.normalize(read @ text.t())
        loss = F.cross_entropy(log_scale.exp() * mine @ names.t(), labels[some])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found = {"log_scale": log_scale.detach()}
    for name, weight, inputs, size in zip(
        ("image", "text"), (image, text), (images, texts), sizes, strict=True
    ):  # the dual encoder reads features as they are
        found[f"{name}.weight"] = weight.detach() / size
        found[f"{name}.bias"] = -found[f"{name}.weight"] @ inputs.mean(0)
    return found


class ZeroShot(Task):
    """The task of one half of the classes; `at(seed)` gives the other one."""

    name = "zeroshot"
    parity = 0

    def at(self, seed: int) -> ZeroShot:
        """Return the half whose training classes have this parity."""
        other = type(self)(self._data, self._hosts)
        other.parity = seed % 2
        return other

    @property
    def _classes(self) -> Tensor:
        return torch.arange(self.parity, 1000, 2)

    @property
    def _tested(self) -> Tensor:
        return torch.arange(1 - self.parity, 1000, 2)

    @cached_property
    def _images(self) -> dict[str, ImageSet]:
        return {part: sets.imagenet(self.data, part) for part in sets.IMAGENET_PARTS}

    def _projections(self, classes: Tensor, kind: str) -> dict[str, Tensor]:
        """Train projections the first time, on two images per class and their mirror images."""
        path = self.hosts / f"{kind}-{self.parity}.safetensors"
        if not path.exists():
            tower, tokens = image_tower(self.data), []
            for part in ("calibration", "test"):
                some = self._images[part].subset(classes.tolist())
                for pixels in (some.pixels, some.pixels.flip(-1)):
                    with evaluating(tower):
                        tokens += [tower(batch[0]) for batch in ImageSet(pixels).batches()]
            labels = torch.arange(len(classes)).repeat(4)
            texts = name_states(self.data)[classes]
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(train_projections(torch.cat(tokens), labels, texts), path)
        return load_file(path)

    def _classifier(self, projections: dict[str, Tensor], classes: Tensor) -> nn.Module:
        dual = DualEncoder(image_tower(self.data), projections)
        names = [class_names(self.data)[number] for number in classes]
        states = name_states(self.data)[classes]
        embed = {PROMPT.format(name): row for name, row in zip(names, states, strict=True)}

        def encode(texts: list[str]) -> Tensor:
            return dual.text_projection(torch.stack([embed[text] for text in texts]))

        return ZeroShotClassifier(dual, names, (PROMPT,), encode_text=encode).eval()

    def host(self, seed: int) -> nn.Module:
        """Return the classifier of the tested names."""
        half = self.at(seed)
        return half._classifier(half._projections(half._classes, "half"), half._tested)

    def search_host(self, seed: int) -> nn.Module:
        """Return the rehearsal: trained on every other training class, for the remaining names."""
        half = self.at(seed)
        found = half._projections(half._classes[::2], "rehearsal")
        return half._classifier(found, half._classes[1::2])

    @cached_property
    def calibration(self) -> Data:
        """All images of the rehearsed classes."""
        classes = self._classes[1::2].tolist()
        pixels = torch.cat([images.pixels[classes] for images in self._images.values()])
        return ImageSet(pixels, torch.arange(len(classes)).repeat(3)).batches()

    def _of_tested(self, part: str) -> Data:
        pixels = self._images[part].pixels[self._tested]
        return ImageSet(pixels, torch.arange(len(pixels))).batches()

    @cached_property
    def test(self) -> Data:
        """The third image of each tested class."""
        return self._of_tested("test")

    @cached_property
    def held_out(self) -> Data:
        """The second image of each: temperatures are the one thing that reads tested classes."""
        return self._of_tested("validation")

    @cached_property
    def outliers(self) -> dict[str, Data]:
        """Two texture classes."""
        return {"textures": sets.textures(self.data, "validation").batches()}

    @cached_property
    def ood(self) -> dict[str, dict[str, Data]]:
        """Two other texture classes; enlarged MNIST and CIFAR-10; noise."""
        small: dict[str, Any] = {
            "mnist": sets.mnist(self.data).subset(range(250)),
            "cifar10": sets.cifar10(self.data).subset(range(250)).unlabelled(),
            "noise": sets.noise(125),
        }
        return {
            "seen": {"textures": sets.textures(self.data).batches()},
            "unseen": {name: images.batches(size=224) for name, images in small.items()},
        }
