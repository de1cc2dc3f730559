"""Ways to damage the folder of an ensemble, and what happens then (see `fuzz.py`)."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fuzz_records import text_tokenizer

import hydra_ensembles as hydra
from hydra_ensembles._records import sealed, sha256_of_file
from hydra_ensembles.data import ImageTransform
from hydra_ensembles.errors import HydraError
from hydra_ensembles.fusion.folder_schema import CONFIG, DIGEST, NOVELTY, WEIGHTS

REFUSED, SAME, AS_SAID = "refused with our error", "the same answers", "what the new config says"
RAW, LATE, OTHER = "raw Python error", "fails only at predict", "something else, silently"
OUTSIDE = "read outside the folder"
HUNG, CRASHED = "hung", "crashed the interpreter"
GOOD, BAD = (REFUSED, SAME, AS_SAID), (RAW, LATE, OTHER, OUTSIDE, HUNG, CRASHED)

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "num_labels": 4,
}
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 7, 3000, 10**9, -(10**9), 0.5, -0.5, 1e-300, 1e300),
    *(float("nan"), float("inf"), "", "x", "fused", "../../etc/passwd", "\x00", "é" * 50),
    *([], {}, [[]], [0], [1, 2, 3], {"a": 1}, [None], {"0": "zero"}, [[[1]]], "0" * 64),
]


def make_ensembles(place: Path) -> dict[str, tuple[Path, Any]]:
    """Save three whole ensembles; return their folders and a batch each."""
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        ViTConfig,
        ViTForImageClassification,
    )

    torch.manual_seed(0)
    tokenizer = text_tokenizer()
    pictures = ViTForImageClassification(ViTConfig(**SIZES, image_size=16, patch_size=4)).eval()
    texts = BertForSequenceClassification(
        BertConfig(**SIZES, vocab_size=len(tokenizer), max_position_embeddings=40)
    ).eval()
    images = torch.randn(24, 3, 16, 16)
    words = ["good film", "bad", "a dull film", "not bad", "very good", "the story"] * 4
    batches = {"images": images, "texts": dict(tokenizer(words, padding=True, return_tensors="pt"))}
    result = {}
    batches["hosted"] = images
    for name, host in (("images", pictures), ("texts", texts), ("hosted", pictures)):
        if name != "hosted":
            for parameter in host.parameters():
                parameter.data.mul_(8)  # heads and members matter
        masks = [hydra.HeadMask.random(host, keep=0.5, seed=seed) for seed in range(3)]
        masks = [hydra.HeadMask([[1] * 4, *mask.tolist()[1:]]) for mask in masks]
        engine = "host" if name == "hosted" else "fused"
        ensemble = hydra.fuse(host, masks, engine=engine).eval()
        ensemble.temperature, ensemble.member_temperatures = 1.5, [0.9, 1.0, 1.2]
        ensemble.score = "entropy"
        ensemble.id2label = ["one", "two", "three", "four"]
        labels = torch.arange(24) % 4
        batch = batches[name]
        labelled = {**batch, "labels": labels} if isinstance(batch, dict) else (batch, labels)
        ensemble.fit_novelty_([labelled], progress=False)
        hydra.fit_policy(ensemble, [labelled], risk=0.9, alarm=0.3, progress=False)
        if name != "texts":
            ensemble.transform = ImageTransform(size=16, mean=(0.5,) * 3, std=(0.2,) * 3)
        else:
            ensemble.tokenizer = tokenizer
        ensemble.save_pretrained(place / name)
        result[name] = (place / name, batch)
    return result


# --- ways to damage a folder: each changes it in place and says whether it was signed anew --------


def change_value(
    folder: Path,
    draw: random.Random,
    *,
    sign: bool,
    remove: bool = False,
    field: str | None = None,
) -> bool:
    """Replace (or remove) a random value of the config, or of one field of it."""
    config = json.loads((folder / CONFIG).read_text())
    found = [place for place in places(config) if place[0] != "config_sha256"]
    # by top-level field first: a record has more leaves than all the others
    field = field or draw.choice(sorted({place[0] for place in found}))
    *path, last = draw.choice([place for place in found if place[0] == field])
    holder = config
    for key in path:
        holder = holder[key]
    if remove:
        del holder[last]
    elif isinstance(holder[last], (int, float)) and draw.random() < 0.5:
        step = draw.choice([1, -1, 2, 100, 0.1])
        holder[last] = holder[last] + step if draw.random() < 0.5 else holder[last] * step
    else:
        holder[last] = copy.deepcopy(draw.choice(VALUES))
    (folder / CONFIG).write_text(json.dumps(sealed(config, DIGEST) if sign else config))
    return sign


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """List the path of every value in nested data."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    found = [at] if at else []
    for key, inner in items:
        found += places(inner, (*at, key))
    return found


def damage_bytes(folder: Path, draw: random.Random) -> bool:
    """Flip, cut, add or clear bytes of a random file."""
    path = draw.choice(files_of(folder))
    content = bytearray(path.read_bytes())
    way = draw.choice(["flip", "cut", "add", "clear", "double", "empty"])
    spot = draw.randrange(len(content))
    if way == "flip":
        for _ in range(draw.choice([1, 1, 10])):
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    elif way == "cut":
        del content[spot:]
    elif way == "add":
        content[spot:spot] = draw.randbytes(draw.choice([1, 100]))
    elif way == "clear":
        content[spot : spot + 64] = bytes(len(content[spot : spot + 64]))
    elif way == "double":
        content += bytes(content)
    else:
        content.clear()
    path.write_bytes(content)
    return False


def lose_file(folder: Path, draw: random.Random) -> bool:
    """Remove a file, put a folder in its place, or exchange two."""
    path, other = draw.sample(files_of(folder), 2)
    way = draw.choice(["remove", "folder", "exchange"])
    if way == "exchange":
        one, two = path.read_bytes(), other.read_bytes()
        path.write_bytes(two)
        other.write_bytes(one)
        return False
    path.unlink()
    if way == "folder":
        path.mkdir()
    return False


def files_of(folder: Path) -> list[Path]:
    """List the files of a folder, its card left out."""
    return sorted(path for path in folder.iterdir() if path.is_file() and path.suffix != ".md")


def change_tensors(folder: Path, draw: random.Random, *, file: str = WEIGHTS) -> bool:
    """Drop, add, reshape, retype or spoil a tensor, and sign the file anew."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / file)
    name = draw.choice(sorted(tensors))
    ways = ["drop", "rename", "shape", "half", "integers", "more", "empty"]
    way = draw.choice([*ways, "nan"] if file == NOVELTY else ways)
    if way == "drop":
        del tensors[name]
    elif way == "rename":
        tensors[name + "x"] = tensors.pop(name)
    elif way == "shape":
        tensors[name] = torch.zeros(*tensors[name].shape, 2)
    elif way == "half":
        tensors = {key: value.half() for key, value in tensors.items()}
    elif way == "integers":
        tensors[name] = tensors[name].to(torch.int8)
    elif way == "empty":
        tensors[name] = tensors[name][:0].clone()
    elif way == "nan":
        tensors[name] = torch.full(tensors[name].shape, float("nan"))
    else:
        tensors["more"] = torch.zeros(3)
    save_file(tensors, folder / file)
    sign_files(folder)
    return True


def sign_files(folder: Path) -> None:
    """Write the digests of the files as they are, as somebody would who makes a folder by hand."""
    config = json.loads((folder / CONFIG).read_text())
    config["sha256"] = sha256_of_file(folder / WEIGHTS)
    config["files"] = {name: sha256_of_file(folder / name) for name in config["files"]}
    (folder / CONFIG).write_text(json.dumps(sealed(config, DIGEST)))


def change_header(folder: Path, draw: random.Random) -> bool:
    """Change the header of a safetensors file: lengths, types, shapes, places; sign it anew."""
    path = folder / draw.choice([WEIGHTS, NOVELTY])
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header, rest = content[8 : 8 + length], content[8 + length :]
    way = draw.choice(["length", "value", "value", "text", "nested", "twice", "bytes"])
    if way == "length":
        length = draw.choice([0, 1, length - 1, length + 1, 2**31, 2**40, 2**63, 2**64 - 1])
        path.write_bytes(struct.pack("<Q", length) + header + rest)
    else:
        if way == "value":
            table = json.loads(header)
            name = draw.choice(sorted(key for key in table if key != "__metadata__"))
            field = draw.choice(["dtype", "shape", "data_offsets"])
            table[name][field] = draw.choice(
                [
                    *("F64", "F8", "I64", "BOOL", [], [0], [-1], [2**63], [1] * 4, None, "x", {}),
                    *([0, 2**40], [8, 0], [0, len(rest) + 1], [0, 0], [2**62, 2**63 - 1]),
                ]
            )
            header = json.dumps(table).encode()
        elif way == "text":
            header = draw.choice([b"", b"{}", b"[]", b"null", b"{" * 2000, b"\xff" * 40])
        elif way == "nested":
            header = b'{"a":' * 5000 + b"0" + b"}" * 5000
        elif way == "twice":
            header = header.rstrip(b" }") + b"," + header.lstrip(b"{")
        else:
            changed = bytearray(header)
            for _ in range(draw.choice([1, 3, 20])):
                changed[draw.randrange(len(changed))] = draw.randrange(256)
            header = bytes(changed)
        path.write_bytes(struct.pack("<Q", len(header)) + header + rest)
    sign_files(folder)
    return True


def change_preparation(folder: Path, draw: random.Random) -> bool:
    """Change a value of the tokenizer's or transform's files; sign them anew."""
    files = [path for path in files_of(folder) if path.suffix == ".json" and path.name != CONFIG]
    if not files:
        return change_value(folder, draw, sign=True)
    path = draw.choice(files)
    content = json.loads(path.read_text())
    named = {
        "auto_map": {"AutoTokenizer": ["code.Mine", None]},
        "tokenizer_file": "../outside/tokenizer.json",
        "vocab_file": "/etc/passwd",
        "tokenizer_class": "Nothing",
        "added_tokens_decoder": {"0": {"content": "x"}},
    }
    if path.name == "tokenizer_config.json" and draw.random() < 0.5:
        key = draw.choice(sorted(named))
        content[key] = named[key]
    else:
        *way, last = draw.choice(places(content))
        holder = content
        for key in way:
            holder = holder[key]
        holder[last] = copy.deepcopy(draw.choice(VALUES))
    path.write_text(json.dumps(content))
    sign_files(folder)
    return True


def lead_out(folder: Path, draw: random.Random) -> bool:
    """Let a file lead out of the folder: by a link, by its name, in a circle, to a pipe."""
    outside = folder.parent / "outside"
    shutil.rmtree(outside, ignore_errors=True)
    shutil.copytree(folder, outside)
    path = draw.choice(files_of(folder))
    way = draw.choice(["link", "relative", "folder", "circle", "pipe", "device", "name"])
    if way == "name":
        config = json.loads((folder / CONFIG).read_text())
        name = draw.choice(["../outside/config.json", str(outside / CONFIG), "a/../../outside/x"])
        config["files"][name] = sha256_of_file(outside / CONFIG)
        (folder / CONFIG).write_text(json.dumps(sealed(config, DIGEST)))
        return False
    if way == "folder":  # the whole folder is a link: that is the user's own business
        moved = folder.rename(folder.parent / "moved")
        folder.symlink_to(moved)
        return False
    devices = ["/dev/zero", "/dev/urandom", "/proc/self/mem"]
    lead_away(path, outside, way, draw, devices=devices)
    return False


def lead_away(
    path: Path, outside: Path, way: str, draw: random.Random, *, devices: list[str]
) -> None:
    """Put a link to somewhere else, or a pipe, in the place of a file."""
    path.unlink()
    if way == "link":
        path.symlink_to(outside / path.name)
    elif way == "relative":
        path.symlink_to(f"../outside/{path.name}")
    elif way == "circle":
        path.symlink_to(path.name)
    elif way == "device":
        path.symlink_to(draw.choice(devices))
    else:
        os.mkfifo(path)


def add_file(folder: Path, draw: random.Random) -> bool:
    """Put a file beside the others that some library might read."""
    names = ["added_tokens.json", "special_tokens_map.json", "vocab.txt", "merges.txt"]
    names += ["processor_config.json", "chat_template.jinja", "code.py", "pytorch_model.bin"]
    names += ["preprocessor_config.json", "tokenizer.json", "generation_config.json"]
    path = folder / draw.choice(names)
    if not path.exists():
        path.write_text(draw.choice(['{"zzz": 5}', "", "[1, 2]", "import os\n", "\x00\x01"]))
    return False


WAYS: dict[str, Callable[[Path, random.Random], bool]] = {
    "value, stale digest": lambda f, d: change_value(f, d, sign=False),
    "value, new digest": lambda f, d: change_value(f, d, sign=True),
    "key removed, stale digest": lambda f, d: change_value(f, d, sign=False, remove=True),
    "key removed, new digest": lambda f, d: change_value(f, d, sign=True, remove=True),
    "bytes of a file": damage_bytes,
    "files lost or exchanged": lose_file,
    "tensors, new digest": change_tensors,
    "novelty, new digest": lambda f, d: change_tensors(f, d, file=NOVELTY),
    "policy, new digest": lambda f, d: change_value(f, d, sign=True, field="policy"),
    "safetensors header, new digest": change_header,
    "tokenizer or transform, new digest": change_preparation,
    "links and names that lead out": lead_out,
    "files added": add_file,
}
WEIGHT = {"value, new digest": 5, "bytes of a file": 2, "safetensors header, new digest": 3}
"""How often the richest ways are drawn; all others once."""


# --- what happens --------------------------------------------------------------------------------


def outcome(folder: Path, batch: Any, expected: Any, *, sign: bool) -> tuple[str, str]:
    """Load a folder and predict; return the kind of outcome and the error."""
    try:
        ensemble = hydra.HydraEnsemble.from_pretrained(folder)
    except HydraError as error:
        return REFUSED, str(error)
    except Exception as error:
        return RAW, f"{type(error).__name__}: {error}"
    try:
        answer = ensemble.predict(batch)
        numbers = torch.cat([answer.uncertainty, answer.probabilities.flatten()])
        if not bool(numbers.isfinite().all()):
            return LATE, "the answer is no number"
        assert ensemble.policy is None or len(answer.decision) == len(answer.uncertainty)
        _ = str(ensemble)
        try:
            _ = ensemble.transform, ensemble.tokenizer  # opened when first asked for
        except HydraError as error:
            return REFUSED, str(error)
    except Exception as error:
        return LATE, f"{type(error).__name__}: {error}"
    if not sign:
        same = torch.equal(answer.uncertainty, expected.uncertainty) and torch.equal(
            answer.member_logits, expected.member_logits
        )
        return (SAME, "") if same else (OTHER, "another answer from an unsigned folder")
    config = json.loads((folder / CONFIG).read_text())
    said = {
        "temperature": ensemble.temperature,
        "member_temperatures": ensemble.member_temperatures,
        "score": ensemble.score,
        "mode": ensemble.mode,
        "masks": [[[int(v) for v in row] for row in m.tolist()] for m in ensemble.masks],
        "plan": ensemble.plan.to_dict(),
        "labels": {str(k): v for k, v in (ensemble.id2label or {}).items()} or None,
        "record": ensemble.record,
        "policy": None if ensemble.policy is None else ensemble.policy.to_dict(),
    }
    for key, value in said.items():
        if key == "labels" and config[key] is None:
            continue  # the host's own names then
        if json.dumps(value) != json.dumps(config[key]) and value != config[key]:
            return OTHER, f"{key} is not what the config says"
    return AS_SAID, ""


class Folders:
    """Damages folders by number: the same number and seed give the same folder.

    Args:
        place: Where to make them.
        seed: Of all draws.
    """

    def __init__(self, place: Path, seed: int) -> None:
        self.place, self.seed = place, seed
        self.made = make_ensembles(place)
        self.expected = {
            name: hydra.HydraEnsemble.from_pretrained(folder).predict(batch)
            for name, (folder, batch) in self.made.items()
        }
        self.ways = [way for way in WAYS for _ in range(WEIGHT.get(way, 1))]

    def one(self, number: int) -> tuple[str, str, str]:
        """Damage a folder and load it; return the way, the kind of outcome and the error."""
        draw = random.Random(f"{self.seed} {number}")
        way, name = self.ways[number % len(self.ways)], draw.choice(sorted(self.made))
        folder = self.place / "damaged" / "folder"
        shutil.rmtree(folder.parent, ignore_errors=True)
        shutil.copytree(self.made[name][0], folder)
        sign = WAYS[way](folder, draw)
        kind, error = outcome(folder, self.made[name][1], self.expected[name], sign=sign)
        if way == "links and names that lead out" and kind != REFUSED and not folder.is_symlink():
            kind = OUTSIDE
        return way, kind, error
