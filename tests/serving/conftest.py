"""Small ensembles that read digits and texts, behind the service, made once for all tests here."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from starlette.testclient import TestClient

import hydra_ensembles as hydra
from hydra_ensembles.data import digits
from hydra_ensembles.data.transforms import ImageTransform
from hydra_ensembles.fusion.ensemble import HydraEnsemble
from hydra_ensembles.hosts.tiny_vit import TinyViT, TinyViTConfig
from hydra_ensembles.serving.app import make_app
from hydra_ensembles.serving.service import Service
from hydra_ensembles.serving.torch_backend import TorchBackend
from tests import zoo

DIGITS = TinyViTConfig(width=24, heads=4, layers=2, mlp_width=24)
WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "a",
    "good",
    "bad",
    "film",
    "##s",
    "story",
    "very",
    "dull",
    "great",
]
KNOWN = ["a good film", "bad film", "a very good story", "dull films", "great story", "very bad"]


def masks(host: Any) -> list[hydra.HeadMask]:
    """Return two members that keep different heads of the last block."""
    full = [[True] * n for n in (len(row) for row in hydra.HeadMask.full(host))]
    first, second = [list(row) for row in full], [list(row) for row in full]
    first[-1][0], second[-1][-1] = False, False
    return [hydra.HeadMask(first), hydra.HeadMask(second)]


@pytest.fixture(scope="session")
def image_ensemble() -> HydraEnsemble:
    """An untrained ensemble of two members that knows 64 digits."""
    host = TinyViT(DIGITS, seed=1).eval()
    with torch.no_grad():
        for parameter in host.parameters():
            if parameter.ndim == 2:
                parameter.mul_(3.0)  # members that differ, answers that are not all alike
    ensemble = hydra.fuse(host, masks(host))
    ensemble.id2label = [f"digit {number}" for number in range(10)]
    ensemble.transform = ImageTransform(
        size=host.shape.image_size, crop=None, interpolation="bilinear", mean=(0.5,), std=(0.5,)
    )
    ensemble.temperature = 1.7
    known = digits(16, seed=0).test.subset(range(64))
    ensemble.fit_novelty_(known, names=[f"known {i}" for i in range(64)], progress=False)
    return ensemble


@pytest.fixture(scope="session")
def text_ensemble(tmp_path_factory: pytest.TempPathFactory) -> HydraEnsemble:
    """An untrained ensemble of two members that knows sixty short texts."""
    from transformers import BertTokenizer

    vocabulary = tmp_path_factory.mktemp("words") / "vocab.txt"
    vocabulary.write_text("\n".join(WORDS))
    host = zoo.sharp("bert")
    with torch.no_grad():
        host.classifier.weight.mul_(30.0)
        host.bert.pooler.dense.weight.mul_(10.0)
    ensemble = hydra.fuse(host, masks(host))
    ensemble.tokenizer = BertTokenizer(str(vocabulary))
    ensemble.id2label = ["awful", "good", "mixed"][: host.config.num_labels]
    texts = [" ".join([a, b]) for a in KNOWN for b in KNOWN]
    batches = [dict(ensemble.tokenizer([text], return_tensors="pt")) for text in texts]
    ensemble.fit_novelty_(batches, names=texts, progress=False)
    return ensemble


@contextmanager
def client_of(ensemble: HydraEnsemble, *, alarm: float | None = None, **options: Any) -> Any:
    """Serve an ensemble within this process."""
    service = Service(TorchBackend(ensemble, alarm=alarm), "tiny", **options)
    with TestClient(make_app(service, version="0"), raise_server_exceptions=False) as client:
        client.service = service  # type: ignore[attr-defined]
        yield client


@pytest.fixture(scope="session")
def images(image_ensemble: HydraEnsemble) -> Iterator[TestClient]:
    """A service that reads digits."""
    with client_of(image_ensemble) as client:
        yield client


@pytest.fixture(scope="session")
def texts(text_ensemble: HydraEnsemble) -> Iterator[TestClient]:
    """A service that reads texts."""
    with client_of(text_ensemble) as client:
        yield client


def picture(seed: int = 0, size: tuple[int, int] = (20, 24)) -> Image.Image:
    """Return a grey picture of noise."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def png(image: Image.Image) -> bytes:
    """Return a picture as the bytes of a PNG file."""
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture(scope="session")
def saved(
    tmp_path_factory: pytest.TempPathFactory,
    image_ensemble: HydraEnsemble,
    text_ensemble: HydraEnsemble,
) -> Path:
    """A folder with the saved ensembles `digits` and `films`."""
    root = tmp_path_factory.mktemp("saved")
    image_ensemble.save_pretrained(root / "digits")
    text_ensemble.save_pretrained(root / "films")
    return root
