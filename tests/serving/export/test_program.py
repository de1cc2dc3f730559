"""An archive of torch is held against lists of what an exported ensemble can hold."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hydra_ensembles.errors import DataError, FormatError
from hydra_ensembles.serving.program import check_archive, load_program


def entries(folder: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(folder / "model.pt2") as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def packed(parts: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def edited(parts: dict[str, bytes], ending: str, edit: Callable[[Any], None]) -> dict[str, bytes]:
    (name,) = [name for name in parts if name.endswith(ending)]
    content = json.loads(parts[name])
    edit(content)
    return {**parts, name: json.dumps(content).encode()}


def first_node(program: Any) -> dict[str, Any]:
    return program["graph_module"]["graph"]["nodes"][0]


def test_an_archive_holds_no_pickle(exported: Any) -> None:
    for name, content in entries(exported[1]).items():
        if not name.endswith(".json"):
            assert not content.startswith((b"PK", b"\x80")), name
        if name.endswith("sample_inputs/model.pt"):
            assert not content


def test_what_loading_would_turn_into_code_is_refused(exported: Any) -> None:
    parts = entries(exported[1])
    root = next(iter(parts)).partition("/")[0]
    path = Path("model.pt2")
    check_archive(packed(parts), path)
    buffer = io.BytesIO()
    torch.save((torch.zeros(1),), buffer)

    def pickled(config: Any) -> None:
        next(iter(config["config"].values()))["use_pickle"] = True

    def custom(config: Any) -> None:
        next(iter(config["config"].values()))["path_name"] = "custom_obj_0"

    def call(program: Any) -> None:
        first_node(program)["target"] = "torch.hub.load"

    def expression(program: Any) -> None:
        program["range_constraints"] = {"s0": {"expr_str": "exec(chr(97))"}}

    for wrong, message in (
        ({**parts, f"{root}/data/sample_inputs/model.pt": buffer.getvalue()}, "sample inputs"),
        ({**parts, f"{root}/data/weights/model.pt": buffer.getvalue()}, "no exported program has"),
        ({**parts, f"{root}/data/aotinductor/model/run.so": b""}, "no exported program has"),
        (edited(parts, "weights_config.json", pickled), "pickled tensor"),
        (edited(parts, "constants_config.json", custom), "pickled tensor"),
        (edited(parts, "models/model.json", call), "calls 'torch.hub.load'"),
        (edited(parts, "models/model.json", expression), "holds the expression"),
    ):
        with pytest.raises(FormatError, match=message):
            check_archive(packed(wrong), path)
    with pytest.raises(FormatError, match="no program that was exported here"):
        check_archive(b"not a zip", path)


def test_a_changed_archive_is_not_loaded(copied: Callable[[], Path]) -> None:
    folder = copied()
    with pytest.raises(DataError, match="takes exactly pixel_values"):
        load_program(folder)({"x": torch.zeros(1)})
    with (folder / "model.pt2").open("ab") as file:
        file.write(b"more")
    with pytest.raises(FormatError, match="truncated, replaced or changed"):
        load_program(folder)
