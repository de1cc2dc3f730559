"""One way to open an image: every door turns it upright, bounds it and reads the same formats."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import hydra_ensembles as hydra
from hydra_ensembles import runtime
from hydra_ensembles._records import sealed
from hydra_ensembles.cli.main import main
from hydra_ensembles.data import ImageTransform, image_folder, image_transform
from hydra_ensembles.errors import DataError, FormatError
from hydra_ensembles.fusion import folder_schema as folder_format
from hydra_ensembles.fusion.row_function import RowAnswers
from hydra_ensembles.runtime import contract
from hydra_ensembles.runtime.images import FORMATS, open_image
from tests import zoo
from tests.serving.conftest import client_of
from tests.serving.export.conftest import images, late_masks

STORED = {  # orientation: how an upright image is stored under it
    1: None,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
}


def photo(size: tuple[int, int] = (40, 28)) -> Image.Image:
    """Return an image without any symmetry."""
    rows, columns = np.mgrid[0 : size[1], 0 : size[0]]
    waves = [rows * 5 + columns, columns * 6, 255 - rows * 3]
    return Image.fromarray((np.stack(waves, -1) % 256).astype(np.uint8))


def stored(path: Path, orientation: int, kind: str = "PNG") -> Path:
    """Write the photo as a camera that was held in another way stores it."""
    turn, exif = STORED[orientation], Image.Exif()
    exif[0x0112] = orientation
    image = photo() if turn is None else photo().transpose(turn)
    image.save(path, kind, exif=exif)
    return path


class Shelf:
    """A saved ensemble, loaded again, and its export."""

    def __init__(self, root: Path, transform: Any) -> None:
        ensemble = hydra.fuse(zoo.make("vit"), late_masks(zoo.host("vit"), members=2)).eval()
        ensemble.transform = transform
        self.saved, self.exported = root / "saved", root / "exported"
        ensemble.save_pretrained(self.saved)
        ensemble.export(self.exported, example=images(3, 9))

    def make_old(self) -> None:
        """Rewrite both folders as they were before orientation was recorded."""
        path = self.saved / "config.json"
        config = json.loads(path.read_text())
        transform = config["image_transform"]
        assert transform.pop("exif_orientation") is True
        config["image_transform"] = None if "processor" in transform else transform
        path.write_text(json.dumps(sealed(config, folder_format.DIGEST)))
        path = self.exported / "contract.json"
        data = json.loads(path.read_text())
        data["preprocessing"]["exif_orientation"] = False  # the contract always says it
        path.write_text(json.dumps(sealed(data)))


def ours() -> ImageTransform:
    return ImageTransform(size=16, crop=0.875, mean=(0.5,) * 3, std=(0.3,) * 3)


def processor() -> Any:
    from transformers import CLIPImageProcessor

    size = {"height": 16, "width": 16}
    return CLIPImageProcessor(size={"shortest_edge": 18}, crop_size=size)


@pytest.fixture(scope="module", params=["transform", "processor"])
def shelf(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    made = ours() if request.param == "transform" else processor()
    return Shelf(tmp_path_factory.mktemp(request.param), made)


@pytest.fixture(scope="module", params=["transform", "processor"])
def old_shelf(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    made = ours() if request.param == "transform" else processor()
    shelf = Shelf(tmp_path_factory.mktemp(request.param), made)
    shelf.make_old()
    return shelf


def by_path(shelf: Shelf, file: Path) -> Any:
    return hydra.HydraEnsemble.from_pretrained(shelf.saved).predict(str(file)).probabilities[0]


def by_pil(shelf: Shelf, file: Path) -> Any:
    ensemble = hydra.HydraEnsemble.from_pretrained(shelf.saved)
    with Image.open(file) as image:
        return ensemble.predict([image]).probabilities[0]


def by_rows(shelf: Shelf, file: Path) -> Any:
    answers = RowAnswers(
        hydra.HydraEnsemble.from_pretrained(shelf.saved), prefix="", probabilities=True
    )({"image": [{"bytes": file.read_bytes(), "path": None}]})
    if answers["error"] != [None]:
        raise DataError(answers["error"][0])
    return answers["probabilities"][0]


def by_folder(shelf: Shelf, file: Path) -> Any:
    ensemble = hydra.HydraEnsemble.from_pretrained(shelf.saved)
    (batch,) = image_folder(file.parent, ensemble.transform, labels=False)
    return ensemble.predict(batch).probabilities[0]


def by_command_line(shelf: Shelf, file: Path) -> Any:
    output = file.with_suffix(".jsonl")
    main(["predict", str(shelf.saved), str(file), "--probabilities", "-o", str(output)])
    answer = json.loads(output.read_text())
    if "error" in answer:
        raise DataError(answer["error"])
    return answer["probabilities"]


def by_service(shelf: Shelf, file: Path) -> Any:
    with client_of(hydra.HydraEnsemble.from_pretrained(shelf.saved)) as client:
        file_part = {"file": ("x", file.read_bytes())}
        answer = client.post("/predict?probabilities=1", files=file_part)
    if answer.status_code != 200:
        assert answer.status_code == 422, answer.text
        raise DataError(answer.json()["error"])
    return answer.json()["answers"][0]["probabilities"]


def by_runtime(shelf: Shelf, file: Path) -> Any:
    return runtime.load(shelf.exported, threads=1).predict(file).probabilities[0]


def by_pipeline(shelf: Shelf, file: Path) -> Any:
    found = hydra.pipeline("image-classification", shelf.saved)(str(file), top_k=5)
    return [entry["score"] for entry in sorted(found, key=lambda entry: entry["label"])]


Door = Callable[[Shelf, Path], Any]
DOORS: list[Door] = [by_path, by_pil, by_rows, by_folder, by_command_line, by_service, by_runtime]


@pytest.mark.parametrize("door", [*DOORS, by_pipeline])
def test_a_rotated_photo_is_answered_as_the_upright_one(
    shelf: Shelf, door: Door, tmp_path: Path
) -> None:
    answers = []
    for orientation in STORED:
        (tmp_path / str(orientation)).mkdir()
        file = stored(tmp_path / str(orientation) / "photo.png", orientation)
        answers.append(np.asarray(door(shelf, file)))
    np.testing.assert_array_equal(answers[0], answers[1])
    np.testing.assert_array_equal(answers[0], answers[2])
    plain = np.asarray(by_path(shelf, stored(tmp_path / "1" / "again.png", 1)))
    np.testing.assert_allclose(answers[0], plain, atol=2e-3)


@pytest.mark.parametrize("door", DOORS)
def test_an_old_folder_answers_for_the_pixels_as_they_are_stored(
    old_shelf: Shelf, door: Door, tmp_path: Path
) -> None:
    for name in ("turned", "plain"):
        (tmp_path / name).mkdir()
    file = stored(tmp_path / "turned" / "photo.png", 6)
    plain = tmp_path / "plain" / "photo.png"
    photo().transpose(Image.Transpose.ROTATE_90).save(plain)
    answer = np.asarray(door(old_shelf, file))
    np.testing.assert_array_equal(answer, np.asarray(door(old_shelf, plain)))
    upright = stored(tmp_path / "plain" / "upright.png", 1)
    assert np.abs(answer - np.asarray(by_path(old_shelf, upright))).max() > 1e-3


@pytest.mark.parametrize("door", [*DOORS, by_pipeline])
@pytest.mark.parametrize("size", [(10_000, 1), (3, 900)])
def test_a_strip_is_refused_at_every_door(
    shelf: Shelf, door: Door, size: tuple[int, int], tmp_path: Path
) -> None:
    Image.new("RGB", size).save(tmp_path / "strip.png")
    with pytest.raises(DataError, match="aspect ratio"):
        door(shelf, tmp_path / "strip.png")


def test_arrays_and_transforms_of_ones_own_are_bounded_too(tmp_path: Path) -> None:
    pictures = runtime.ImageReader((8, 8), 1.0, "bilinear", (0.5,), (0.5,))
    with pytest.raises(DataError, match="aspect ratio"):
        pictures([np.zeros((2, 900, 3), np.uint8)])
    (tmp_path / "a").mkdir()
    Image.new("RGB", (900, 2)).save(tmp_path / "a" / "0.png")
    with pytest.raises(DataError, match="aspect ratio"):
        list(image_folder(tmp_path / "a", lambda image: np.zeros(1)))
    photo().save(tmp_path / "a" / "1.png")
    with pytest.warns(UserWarning, match="Left out 1"):
        image_folder(tmp_path / "a", ours(), skip_broken=True)


@pytest.mark.parametrize("size", [(64, 4), (300, 20), (4000, 41), (41, 4000)])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_a_long_image_is_resized_only_where_it_is_kept(
    size: tuple[int, int], interpolation: str
) -> None:
    """The whole image resized, then cropped, is the reference."""
    image = photo(size)
    short, edge = 18, 16
    scale = short / min(size)
    wide, high = (int(side * scale + 1e-6) for side in size)
    left, top = round((wide - edge) / 2), round((high - edge) / 2)
    how = Image.Resampling[interpolation.upper()]
    kept = image.resize((wide, high), how).crop((left, top, left + edge, top + edge))
    found = ImageTransform(edge, 16 / 18, interpolation, mean=(0,) * 3, std=(1,) * 3)(image)
    apart = np.abs(found.numpy() * 255 - np.asarray(kept, float).transpose(2, 0, 1))
    ordinary = max(size) / min(size) < 20
    assert apart.max() < (1e-4 if ordinary else 2.5)


@pytest.mark.parametrize("door", [*DOORS, by_pipeline])
def test_formats_outside_the_list_are_refused_at_every_door(
    shelf: Shelf, door: Door, tmp_path: Path
) -> None:
    file = tmp_path / "photo.jpg"
    for kind in ("PCX", "EPS"):  # the second would start Ghostscript
        photo().save(file, kind)
        if door is by_pil:  # whoever opens a file chooses the decoder
            continue
        with pytest.raises(DataError, match="JPEG, PNG") as refusal:
            door(shelf, file)
        assert "hostscript" not in str(refusal.value)


@pytest.mark.parametrize("kind", FORMATS)
def test_formats_of_the_list_are_read_from_paths_and_bytes(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "photo"
    photo().save(file, kind)
    with Image.open(file) as reference:
        expected = np.asarray(reference.convert("RGB"))
    for source in (file, str(file), file.read_bytes()):
        assert np.array_equal(open_image(source).convert("RGB"), expected)


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "TIFF", "MPO"])
def test_orientation_in_the_formats_of_cameras(kind: str, tmp_path: Path) -> None:
    turned = stored(tmp_path / "turned", 6, kind)
    with Image.open(turned) as image:
        pixels = np.asarray(image)
    if kind != "TIFF":  # which Pillow turns when it decodes
        pixels = np.rot90(pixels, -1)
    expected = ours()(Image.fromarray(np.ascontiguousarray(pixels)))
    assert np.array_equal(ours()(open_image(turned)), expected)


def test_a_damaged_orientation_leaves_the_pixels_as_they_are(tmp_path: Path) -> None:
    photo().save(tmp_path / "plain.png", exif=b"Exif\0\0nonsense")
    expected = ours()(photo())
    assert np.array_equal(ours()(open_image(tmp_path / "plain.png")), expected)
    for orientation in (0, 9, 4000):
        exif = Image.Exif()
        exif[0x0112] = orientation
        photo().save(tmp_path / "odd.png", exif=exif)
        assert np.array_equal(ours()(open_image(tmp_path / "odd.png")), expected)


def odd_images() -> dict[str, tuple[Image.Image, dict[str, Any]]]:
    sixteen = Image.fromarray((np.arange(40 * 28).reshape(28, 40) * 50).astype(np.uint16))
    palette = photo().quantize(16)
    return {
        "16 bits.png": (sixteen, {}),
        "cmyk.jpg": (photo().convert("CMYK"), {}),
        "palette.png": (palette, {"transparency": 3}),
        "palette.gif": (palette, {"save_all": True, "append_images": [photo().rotate(180)]}),
        "frames.tif": (photo(), {"save_all": True, "append_images": [photo().rotate(180)]}),
        "alpha.png": (photo().convert("RGBA"), {}),
        "one bit.png": (photo().convert("1"), {}),
    }


@pytest.mark.parametrize("name", odd_images())
def test_unusual_images_are_read_as_pillow_converts_them(name: str, tmp_path: Path) -> None:
    image, options = odd_images()[name]
    image.save(tmp_path / name, **options)
    for channels in (1, 3):
        transform = ImageTransform(16, None, mean=(0.5,) * channels, std=(0.5,) * channels)
        with Image.open(tmp_path / name) as reference:
            first = reference.convert("RGB" if channels == 3 else "L")
        assert np.array_equal(transform(open_image(tmp_path / name)), transform(first))


def test_a_cut_file_is_broken_and_a_function_gets_the_file_as_it_is(tmp_path: Path) -> None:
    turned = stored(tmp_path / "photo.png", 6)
    seen = image_transform(lambda image: np.asarray(image))(open_image(turned))
    assert seen.shape[:2] == (40, 28)  # a transform of one's own turns images itself
    turned.write_bytes(turned.read_bytes()[:-60])
    with pytest.raises(DataError, match=r"photo\.png"):
        open_image(turned)
    with pytest.raises(DataError, match="Cannot"):
        open_image(b"")


def test_the_orientation_is_recorded(shelf: Shelf, tmp_path: Path) -> None:
    recorded = json.loads((shelf.saved / "config.json").read_text())["image_transform"]
    assert recorded["exif_orientation"] is True
    ensemble = hydra.HydraEnsemble.from_pretrained(shelf.saved)
    assert ensemble.transform.exif_orientation is True
    ensemble.transform = type(ensemble.transform)(
        **{**vars(ensemble.transform), "exif_orientation": False}
    )
    ensemble.save_pretrained(tmp_path)
    again = hydra.HydraEnsemble.from_pretrained(tmp_path)
    assert again.transform.exif_orientation is False


@pytest.mark.parametrize(
    "recorded",
    [
        {**ours().to_dict(), "exif_orientation": 1},
        {"processor": "elsewhere.json", "exif_orientation": True},
        {"processor": "preprocessor_config.json"},
        {"processor": "preprocessor_config.json", "exif_orientation": True, "size": 3},
    ],
)
def test_a_wrong_record_is_refused(shelf: Shelf, recorded: Any, tmp_path: Path) -> None:
    config = json.loads((shelf.saved / "config.json").read_text())
    with pytest.raises(FormatError, match="image_transform"):
        folder_format.check_config({**config, "image_transform": recorded}, "here")
    data = json.loads((shelf.exported / "contract.json").read_text())
    preparation = {**data["preprocessing"], "exif_orientation": "yes"}
    assert "preprocessing" in str(contract.problem_of({**data, "preprocessing": preparation}))


def test_a_lazy_broken_image_and_a_mode_without_a_conversion(shelf: Shelf, tmp_path: Path) -> None:
    file = tmp_path / "photo.png"
    photo().save(file)
    file.write_bytes(file.read_bytes()[:-60])
    for door in (by_path, by_pil, by_service, by_runtime):
        with pytest.raises(DataError, match="Cannot read the image"):
            door(shelf, file)
    grey = ImageTransform(16, mean=(0.5,), std=(0.5,))
    with pytest.raises(DataError, match="mode LAB to L"):
        grey(Image.new("LAB", (20, 20)))
