"""Small models as people have them after `from_pretrained`: with a tokenizer or processor saved."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from torch import nn

from tests import zoo

WORDS = (
    "a", "good", "bad", "film", "joy", "plot", "the", "very", "dull", "fine", "story", "no", "not",
    "at", "all",
)  # fmt: skip
COUNT = 48


def tokenizer() -> Any:
    """Return a tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=32,
    )


@dataclass
class Texts:
    """A classifier of texts that was loaded from a folder, and labelled texts."""

    folder: Path
    model: Any
    tokenizer: Any
    texts: list[str]
    labels: list[int]
    names: list[str]

    @property
    def batches(self) -> list[dict[str, torch.Tensor]]:
        """The texts, tokenized and padded by hand."""
        made = []
        for start in range(0, COUNT, 32):
            rows = slice(start, start + 32)
            encoded = self.tokenizer(self.texts[rows], padding=True, return_tensors="pt")
            made.append({**encoded, "labels": torch.tensor(self.labels[rows])})
        return made


def texts(folder: Path) -> Texts:
    """Save a classifier with its tokenizer, and load it as users do."""
    names = {0: "neg", 1: "pos"}
    config = transformers.BertConfig(
        **{**zoo.SMALL, "vocab_size": 20}, id2label=names, label2id={"neg": 0, "pos": 1}
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.BertForSequenceClassification(config).save_pretrained(folder)
    words = tokenizer()
    words.save_pretrained(folder)
    model = transformers.BertForSequenceClassification.from_pretrained(folder).eval()
    draw = np.random.default_rng(0)
    lines = [" ".join(draw.choice(WORDS, draw.integers(2, 9))) for _ in range(COUNT)]
    labels = [row % 2 for row in range(COUNT)]
    return Texts(folder, model, words, lines, labels, ["neg", "pos"])


@dataclass
class Images:
    """A classifier of images that was loaded from a folder, and labelled images in folders."""

    model: Any
    folder: Path
    images: list[Any]
    paths: list[str]
    labels: list[int]
    names: list[str]
    pixels: torch.Tensor


def images(folder: Path, model: nn.Module, transform: Any) -> Images:
    """Write images in class folders; `transform` makes of them what the model takes."""
    names, draw = ["cat", "dog", "owl"], np.random.default_rng(0)
    made = [Image.fromarray(draw.integers(0, 255, (20, 24, 3), np.uint8)) for _ in range(COUNT)]
    labels = [row % 3 for row in range(COUNT)]
    paths = []
    for row, image in enumerate(made):
        path = folder / "images" / names[labels[row]] / f"{row}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)
        paths.append(str(path))
    pixels = torch.stack([transform(image) for image in made])
    return Images(model, folder / "images", made, paths, labels, names, pixels)


def vit_images(folder: Path) -> Images:
    """Save a ViT of transformers with its image processor, and load it as users do."""
    names = {0: "cat", 1: "dog", 2: "owl"}
    config = transformers.ViTConfig(
        **zoo.SMALL, **zoo.IMAGE, id2label=names, label2id={n: i for i, n in names.items()}
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.ViTForImageClassification(config).save_pretrained(folder / "vit")
    processor = transformers.ViTImageProcessor(size={"height": 16, "width": 16})
    processor.save_pretrained(folder / "vit")
    model = transformers.ViTForImageClassification.from_pretrained(folder / "vit").eval()
    return images(
        folder, model, lambda image: processor(image, return_tensors="pt").pixel_values[0]
    )


def timm_images(folder: Path) -> Images:
    """Return a ViT of timm, whose images are positional."""
    import timm

    from hydra_ensembles.data import image_transform

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = timm.create_model(
            "deit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=3,
            num_classes=3,
        ).eval()  # fmt: skip
    return images(folder, model, image_transform(model))
