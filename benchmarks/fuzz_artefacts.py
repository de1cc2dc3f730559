"""Ways to damage an exported artefact, and what happens then (see `fuzz.py`)."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from fuzz_folders import (
    AS_SAID,
    LATE,
    OTHER,
    OUTSIDE,
    RAW,
    REFUSED,
    SAME,
    VALUES,
    files_of,
    lead_away,
    lose_file,
    make_ensembles,
    places,
)

import hydra_ensembles as hydra
from hydra_ensembles import runtime
from hydra_ensembles._records import SEAL, sealed, sha256_of_file
from hydra_ensembles.errors import HydraError
from hydra_ensembles.runtime.contract import CONTRACT

PROGRAM = "model.onnx"
READ = (CONTRACT, PROGRAM, "tokenizer.json")
"""What the runtime opens; a link in the place of another file leads nowhere."""

SECRET = b"the content of a file outside"


def sign_files(folder: Path) -> None:
    """Write the digests of the files as they are."""
    contract = json.loads((folder / CONTRACT).read_text())
    contract["files"] = {
        name: {"sha256": sha256_of_file(folder / name), "bytes": (folder / name).stat().st_size}
        for name in contract["files"]
    }
    (folder / CONTRACT).write_text(json.dumps(sealed(contract)))


def change_contract(folder: Path, draw: random.Random, *, sign: bool, remove: bool = False) -> bool:
    """Replace (or remove) a random value of the contract."""
    contract = json.loads((folder / CONTRACT).read_text())
    found = [place for place in places(contract) if place[0] != SEAL]
    field = draw.choice(sorted({place[0] for place in found}))
    *path, last = draw.choice([place for place in found if place[0] == field])
    holder = contract
    for key in path:
        holder = holder[key]
    if remove:
        del holder[last]
    else:
        holder[last] = copy.deepcopy(draw.choice(VALUES))
    (folder / CONTRACT).write_text(json.dumps(sealed(contract) if sign else contract))
    return sign


def damage_bytes(folder: Path, draw: random.Random, *, sign: bool = False) -> bool:
    """Flip, cut, add or clear bytes of a file; sign it anew where asked for."""
    names = [p for p in files_of(folder) if p.name != CONTRACT] if sign else files_of(folder)
    path = draw.choice(names)
    content = bytearray(path.read_bytes())
    way = draw.choice(["flip", "cut", "add", "clear", "empty", "head"])
    spot = draw.randrange(len(content))
    if way == "flip":
        for _ in range(draw.choice([1, 1, 10, 100])):
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    elif way == "cut":
        del content[spot:]
    elif way == "add":
        content[spot:spot] = draw.randbytes(draw.choice([1, 100]))
    elif way == "clear":
        content[spot : spot + 64] = bytes(len(content[spot : spot + 64]))
    elif way == "head":  # of the protocol buffer: the graph, its names, its types
        for _ in range(draw.choice([1, 5])):
            content[draw.randrange(min(len(content), 4096))] = draw.randrange(256)
    else:
        content.clear()
    path.write_bytes(content)
    if sign:
        sign_files(folder)
    return sign


def change_graph(folder: Path, draw: random.Random) -> bool:
    """Change the ONNX program as a program: operators, weights, names, files outside; sign it."""
    import onnx

    path = folder / PROGRAM
    model = onnx.load(path)
    graph = model.graph
    way = draw.choice(
        ["operator", "drop", "weight", "outside", "absolute", "input", "shape", "big"]
    )
    node = draw.choice(list(graph.node))
    weight = draw.choice(list(graph.initializer))
    if way == "operator":
        node.op_type = draw.choice(["Relu", "Nothing", "Add", "Loop", "Reshape"])
        node.domain = draw.choice(["", "", "some.where", "com.microsoft"])
    elif way == "drop":
        graph.node.remove(node)
    elif way == "weight":
        weight.raw_data = weight.raw_data[: len(weight.raw_data) // 2]
    elif way in ("outside", "absolute"):
        outside = folder.parent / "outside" / "weights.bin"
        size = len(weight.raw_data)
        outside.write_bytes((SECRET * (size // len(SECRET) + 1))[:size])
        weight.ClearField("raw_data")
        weight.data_location = onnx.TensorProto.EXTERNAL
        place = str(outside) if way == "absolute" else "../outside/weights.bin"
        for key, value in (("location", place), ("length", str(size)), ("offset", "0")):
            entry = weight.external_data.add()
            entry.key, entry.value = key, value
    elif way == "input":
        draw.choice([graph.input[0], graph.output[0]]).name = "another"
    elif way == "shape":
        weight.dims.append(draw.choice([2, 0, -1, 2**40]))
    else:
        weight.dims[:] = [2**20, 2**20]
    path.write_bytes(model.SerializeToString())
    sign_files(folder)
    return True


def lead_out(folder: Path, draw: random.Random) -> bool:
    """Let a file lead out of the folder: by a link, by its name, in a circle, to a pipe."""
    outside = folder.parent / "outside"
    for path in files_of(folder):
        shutil.copy(path, outside / path.name)
    path = draw.choice([path for path in files_of(folder) if path.name in READ])
    way = draw.choice(["link", "relative", "circle", "pipe", "device", "name"])
    if way == "name":
        contract = json.loads((folder / CONTRACT).read_text())
        name = draw.choice(["../outside/model.onnx", str(outside / PROGRAM), "a/../../outside/x"])
        contract["files"][name] = contract["files"][PROGRAM]
        contract["programs"]["onnx"] = name
        (folder / CONTRACT).write_text(json.dumps(sealed(contract)))
        return False
    lead_away(path, outside, way, draw, devices=["/dev/zero", "/dev/urandom"])
    return False


WAYS: dict[str, Callable[[Path, random.Random], bool]] = {
    "contract, stale digest": lambda f, d: change_contract(f, d, sign=False),
    "contract, new digest": lambda f, d: change_contract(f, d, sign=True),
    "contract's key removed, new digest": lambda f, d: change_contract(
        f, d, sign=True, remove=True
    ),
    "bytes of a file": damage_bytes,
    "bytes of a file, new digest": lambda f, d: damage_bytes(f, d, sign=True),
    "ONNX graph, new digest": change_graph,
    "links and names that lead out": lead_out,
    "files lost or exchanged": lose_file,
}
WEIGHT = {"contract, new digest": 3, "bytes of a file, new digest": 2, "ONNX graph, new digest": 3}


class Artefacts:
    """Damages exported folders by number: the same number and seed give the same folder.

    Args:
        place: Where to make them.
        seed: Of all draws.
    """

    def __init__(self, place: Path, seed: int) -> None:
        self.place, self.seed = place, seed
        self.ways = [way for way in WAYS for _ in range(WEIGHT.get(way, 1))]
        self.made: dict[str, tuple[Path, Any]] = {}
        for name, (folder, batch) in make_ensembles(place / "ensembles").items():
            if name == "hosted":  # it traces like the others
                continue
            ensemble = hydra.HydraEnsemble.from_pretrained(folder)
            ensemble.export(place / name)
            arrays = (
                {key: value.numpy() for key, value in batch.items()}
                if isinstance(batch, dict)
                else {"pixel_values": batch.numpy()}
            )
            loaded = runtime.load(place / name, threads=1)
            wanted = [port["name"] for port in loaded.contract.inputs]
            self.made[name] = (place / name, {key: arrays[key][:4] for key in wanted})
        self.expected = {
            name: self._answer(folder, arrays) for name, (folder, arrays) in self.made.items()
        }

    def _answer(self, folder: Path, arrays: dict[str, np.ndarray]) -> Any:
        return runtime.load(folder, threads=1).predict(arrays)

    def one(self, number: int) -> tuple[str, str, str]:
        """Damage a folder and run it; return the way, the kind of outcome and the error."""
        draw = random.Random(f"{self.seed} artefact {number}")
        way, name = self.ways[number % len(self.ways)], draw.choice(sorted(self.made))
        folder = self.place / "damaged" / "folder"
        shutil.rmtree(folder.parent, ignore_errors=True)
        shutil.copytree(self.made[name][0], folder)
        (folder.parent / "outside").mkdir()
        sign = WAYS[way](folder, draw)
        outside = (folder.parent / "outside" / "weights.bin").exists()
        kind, error = self._outcome(folder, name, sign=sign)
        if kind not in (REFUSED, RAW) and (outside or way == "links and names that lead out"):
            kind, error = OUTSIDE, f"{way}: {error}"
        return way, kind, error

    def _outcome(self, folder: Path, name: str, *, sign: bool) -> tuple[str, str]:
        arrays, expected = self.made[name][1], self.expected[name]
        try:
            loaded = runtime.load(folder, threads=1)
        except HydraError as error:
            return REFUSED, str(error)
        except Exception as error:
            return RAW, f"{type(error).__name__}: {error}"
        try:
            answer = loaded.predict(arrays)
        except HydraError as error:  # a signed program may refuse what the contract says
            return (REFUSED if sign else LATE), str(error)
        except Exception as error:
            return LATE, f"{type(error).__name__}: {error}"
        if sign:
            return AS_SAID, ""
        same = np.array_equal(answer.member_logits, expected.member_logits)
        return (SAME, "") if same else (OTHER, "another answer from an unsigned folder")
