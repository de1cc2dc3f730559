"""Guides: their code runs as it is printed, on small models; the refusals they quote exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import hydra_ensembles as hydra

ROOT = Path(__file__).parents[1]
NAMES = ["north", "south", "west", "east"]
TIMM_NAME = "deit_tiny_patch16_224"


def blocks(page: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    found = re.findall(r"^( *)```python\n(.*?)^ *```", text, flags=re.M | re.S)
    return [re.sub(f"^{indent}", "", code, flags=re.M) for indent, code in found]


def write_photos(folder: Path, count: int, *, seed: int = 0) -> list[Image.Image]:
    """Write a folder per class with images whose brightness tells the class."""
    draw = torch.Generator().manual_seed(seed)
    images = []
    for number, name in enumerate(NAMES):
        (folder / name).mkdir(parents=True)
        for index in range(count // len(NAMES)):
            pixels = torch.randint(0, 100, (32, 32, 3), generator=draw) + 40 * number
            images.append(Image.fromarray(pixels.to(torch.uint8).numpy()))
            images[-1].save(folder / name / f"{index}.png")
    return images


@pytest.fixture
def small_timm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A real timm model, small and without pretrained weights."""
    timm = pytest.importorskip("timm")
    make = timm.create_model

    def create(name: str, *, pretrained: bool = False) -> Any:
        assert name == TIMM_NAME and pretrained
        torch.manual_seed(0)
        return make(name, pretrained=False, num_classes=len(NAMES), depth=3, img_size=32)

    monkeypatch.setattr(timm, "create_model", create)
    return create(TIMM_NAME, pretrained=True).eval()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_page_on_timm(
    tmp_path: Path, small_timm: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    image = write_photos(tmp_path / "photos", 120)[0]
    monkeypatch.chdir(tmp_path)
    names = {"names": NAMES, "image": image}
    for code in blocks("timm.md"):
        exec(code, names)
    assert "can be fused" in capsys.readouterr().out
    assert names["answer"].labels[0] in NAMES and float(names["answer"].novelty[0]) >= 0  # type: ignore[attr-defined]
    assert (tmp_path / "deit-hydra" / "config.json").is_file()
    photos = names["photos"]
    single = hydra.fuse(small_timm, [hydra.HeadMask.full(small_timm)])
    write_photos(tmp_path / "photos2", 40, seed=1)
    more: dict[str, Any] = {
        **{"hydra": hydra, "model": small_timm, "ensemble": single, "image": image},
        **{"known": photos, "names": NAMES},
        "outliers": [(torch.rand(20, 3, 32, 32), torch.zeros(20, dtype=torch.long))],
    }
    single.transform = hydra.data.image_transform(small_timm)
    for code in blocks("faq.md"):
        exec(code, more)
    assert 0 <= more["results"]["ood/new/novelty/AUROC"] <= 1


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_page_on_choosing(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    from tests import zoo
    from tests.test_readme import batches

    for name in ("make_teachers", "distill"):  # fewer epochs than when it is read
        whole = getattr(hydra, name)
        monkeypatch.setattr(
            hydra, name, lambda *a, whole=whole, **o: whole(*a, **o, epochs=1, progress=False)
        )
    model = zoo._vit(num_labels=4)
    names: dict[str, Any] = {
        "hydra": hydra,
        "model": model,
        "known": batches(100, seed=4),
        "calibration": batches(100, seed=2),
        "batch": batches(20, seed=6)[0],
    }
    code = blocks("which.md")
    assert len(code) == 4
    for block in code:
        exec(block, names)
    assert names["new"].shape == (20,)
    for made in ("ensemble", "folded", "student"):
        assert names[made].members >= 1
    assert type(names["smaller"]) is type(model)


def test_refusals_that_are_quoted_exist() -> None:
    text = (ROOT / "docs" / "faq.md").read_text(encoding="utf-8")
    table = text.partition("| it says |")[2].partition("\n## ")[0]
    quoted = re.findall(r"^\| `([^`]+)`", table, flags=re.M)
    sources = [file.read_text(encoding="utf-8") for file in (ROOT / "src").rglob("*.py")]
    source = re.sub(r"[\"\s]*\n\s*f?[\"\']|\{[^{}\n]*\}", "", "\n".join(sources))
    missing = [words for words in quoted if re.sub(r"\d+", "", words) not in source]
    assert len(quoted) > 8 and not missing


def test_the_glossary_is_in_order_and_names_things_once() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    terms = re.findall(r"^\*\*([^*]+)\*\*:", text, flags=re.M)
    assert terms == sorted(set(terms), key=str.lower)
    wanted = {"host", "trunk", "branch", "readout", "stream", "member", "novelty", "known data"}
    assert wanted | {"calibration data", "policy"} <= set(terms)
