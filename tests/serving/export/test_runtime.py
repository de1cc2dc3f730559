"""The runtime: no torch, every file checked, wrong inputs named."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hydra_ensembles import runtime
from hydra_ensembles._records import sealed
from hydra_ensembles.data import ImageTransform
from hydra_ensembles.errors import DataError, FormatError, UnknownNameError

Copy = Callable[[], Path]


def change(folder: Path, **fields: Any) -> None:
    """Rewrite a contract with other fields, its digest renewed: what an attacker can do."""
    path = folder / "contract.json"
    path.write_text(json.dumps(sealed({**json.loads(path.read_text()), **fields})))


def test_it_runs_without_torch(exported: Any) -> None:
    ensemble, folder = exported
    code = f"""
import sys
class Nobody:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "onnx", "scipy", "sklearn"):
            raise ImportError(name + " is not installed")
sys.meta_path.insert(0, Nobody())
import hydra_ensembles.runtime as runtime
assert "onnxruntime" not in sys.modules
import numpy as np
answer = runtime.load({str(folder)!r}, threads=1).predict(np.full((20, 20, 3), 9, np.uint8))
print(answer.labels[0], float(answer.probabilities[0, 0]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    name, probability = done.stdout.split()
    expected = ensemble.predict([Image.fromarray(np.full((20, 20, 3), 9, np.uint8))])
    assert name == ensemble.id2label[int(expected.class_index)]
    assert float(probability) == pytest.approx(float(expected.probabilities[0, 0]), abs=1e-4)


def test_answers_are_rows_for_json(exported: Any) -> None:
    answer = runtime.load(exported[1]).predict(np.zeros((2, 3, 16, 16), np.float32))
    first, second = json.loads(json.dumps(answer.rows()))
    assert first == second and first["label"] == answer.labels[0]
    assert len(answer[0]) == 1 and len(list(answer)) == 2 and "2 inputs" in repr(answer)
    with pytest.raises(IndexError):
        answer[2]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], "nothing to predict"),
        (np.zeros((0, 3, 16, 16), np.float32), "is empty"),
        (np.zeros((1, 3, 16, 15), np.float32), "expected .*batch"),
        (np.zeros((3, 16, 16), np.float32), "has shape"),
        (np.full((1, 3, 16, 16), np.nan, np.float32), "NaN"),
        (np.zeros((1, 3, 16, 16), np.complex64), "expected float32"),
        ({"pixels": np.zeros((1, 3, 16, 16), np.float32)}, "takes exactly pixel_values"),
        ("no-such-file.png", "Cannot read the image no-such-file.png"),
        (np.zeros((4, 4, 7), np.uint8), "Cannot read the image"),
    ],
)
def test_wrong_inputs_are_named(exported: Any, inputs: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        runtime.load(exported[1], threads=1).predict(inputs)


def test_a_bomb_of_pixels_is_not_decoded(tmp_path: Path) -> None:
    reader = runtime.ImageReader((8, 8), 1.0, "bilinear", (0.5,), (0.5,), most_pixels=10_000)
    Image.new("1", (200, 200)).save(tmp_path / "bomb.png")
    with pytest.raises(DataError, match="200 x 200 pixels"):
        reader([tmp_path / "bomb.png"])
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nno")
    with pytest.raises(DataError, match=r"broken\.png"):
        reader([tmp_path / "broken.png"])


def test_damage_is_found_before_a_file_is_opened(copied: Copy) -> None:
    folder = copied()
    with pytest.raises(UnknownNameError, match="Unknown program 'int4'"):
        runtime.load(folder, program="int4")
    model = folder / "model.onnx"
    whole = model.read_bytes()
    model.write_bytes(whole[:-1])
    with pytest.raises(FormatError, match="truncated, replaced or changed"):
        runtime.load(folder)
    model.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(FormatError, match="truncated, replaced or changed"):
        runtime.load(folder)
    model.unlink()
    with pytest.raises(FormatError, match=r"no model\.onnx"):
        runtime.load(folder)
    (folder / "contract.json").unlink()
    with pytest.raises(FormatError, match=r"No contract\.json"):
        runtime.load(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": "other"}, "not the contract"),
        ({"format_version": [3, 0]}, "Upgrade"),
        ({"format_version": [1, 1]}, "older than"),
        ({"format_version": "1"}, "expected two numbers"),
        ({"classes": 6}, "5 class names"),
        ({"members": -1}, "members has"),
        ({"task": "chat"}, "task has"),
        ({"inputs": []}, "inputs has"),
        ({"outputs": [{"name": "class", "dtype": "int64", "shape": ["batch"]}]}, "outputs lack"),
        ({"outputs": [{"name": "class", "dtype": "int64", "shape": []}]}, "outputs has"),
        ({"programs": {"onnx": "other.onnx", "int8": "model.int8.onnx"}}, "among its files"),
        ({"programs": {"onnx": "model.onnx"}}, "same programs"),
        ({"programs": {"torch": "model.onnx"}}, "programs has"),
        ({"programs": {"onnx": "../model.onnx"}}, "programs has"),
        ({"files": {"../contract.json": {"sha256": "0" * 64, "bytes": 1}}}, "files has"),
        ({"policies": {"onnx": {"words": "none"}}}, "policies has"),
        ({"preprocessing": {"kind": "image", "size": [10**9, 1]}}, "preprocessing has"),
        ({"preprocessing": {"kind": "text"}}, "preprocessing has"),
        ({"temperature": "warm"}, "temperature has"),
    ],
)
def test_a_contract_that_cannot_be_is_refused(copied: Copy, fields: Any, message: str) -> None:
    folder = copied()
    change(folder, **fields)
    with pytest.raises(FormatError, match=message):
        runtime.load(folder)


def test_a_contract_changed_by_hand_is_refused(copied: Copy) -> None:
    folder = copied()
    path = folder / "contract.json"
    path.write_text(path.read_text().replace('"ant"', '"cow"'))
    with pytest.raises(FormatError, match="SHA-256"):
        runtime.load(folder)
    path.write_text('{"format": NaN}')
    with pytest.raises(FormatError, match="not the contract"):
        runtime.load(folder)
    path.write_text('{"format": ')
    with pytest.raises(FormatError, match="not a contract"):
        runtime.load(folder)


def test_nothing_outside_the_folder_is_read(copied: Copy, tmp_path: Path) -> None:
    folder = copied()
    (folder / "model.onnx").rename(tmp_path / "elsewhere.onnx")
    (folder / "model.onnx").symlink_to(tmp_path / "elsewhere.onnx")
    with pytest.raises(FormatError, match="leads out of its folder"):
        runtime.load(folder)


def test_a_program_that_is_none_is_refused(copied: Copy) -> None:
    from hydra_ensembles._records import sha256_of

    folder = copied()
    files = json.loads((folder / "contract.json").read_text())["files"]
    for content in (b"", b"not a program", (folder / "model.onnx").read_bytes()[:2000]):
        (folder / "model.onnx").write_bytes(content)
        entry = {"sha256": sha256_of(content), "bytes": len(content)}
        change(folder, files={**files, "model.onnx": entry})
        with pytest.raises(FormatError, match="Cannot load"):
            runtime.load(folder)


def test_images_are_those_of_the_transform() -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (37, 53, 3), dtype=np.uint8)
    for crop in (None, 0.875, 1.0):
        mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)
        transform = ImageTransform(size=(24, 20), crop=crop, mean=mean, std=std)
        ours = runtime.ImageReader((24, 20), crop, "bicubic", mean, std)([pixels])
        np.testing.assert_array_equal(ours[0], transform(Image.fromarray(pixels)).numpy())
