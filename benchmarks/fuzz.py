"""Damage saved folders and prediction records in every way we know; count what happens, by kind.

    python benchmarks/fuzz.py [--folders 1000] [--records 1000] [--seed 0]

Folders: of a small image and a small text ensemble and of one that runs the host's own blocks,
whole (calibrated, with novelty, a rule to abstain, a transform or a tokenizer). Values and keys of
`config.json` are changed, with the digest left stale and with a new one, as somebody would who
writes a folder by hand; bytes of every file are flipped, cut or exchanged; tensors are dropped,
reshaped or retyped. Records: lines for `hydra-ensembles predict`, texts and pictures, by
`fuzz_records.py`. All seeded. Writes `benchmarks/results/fuzz.json`.

Wanted: no error that is not ours, none that shows at predict only, nothing loaded that the folder
does not say, no record without its line.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import random
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fuzz_records import fuzz_records, text_tokenizer

import hydra_ensembles as hydra
from hydra_ensembles._records import write_whole
from hydra_ensembles.data import ImageTransform
from hydra_ensembles.errors import HydraError
from hydra_ensembles.fusion.folder_format import CONFIG, WEIGHTS, signed

RESULTS = Path(__file__).parent / "results" / "fuzz.json"
REFUSED, SAME, AS_SAID = "refused with our error", "the same answers", "what the new config says"
RAW, LATE, OTHER = "raw Python error", "fails only at predict", "something else, silently"
GOOD, BAD = (REFUSED, SAME, AS_SAID), (RAW, LATE, OTHER)

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
        ensemble.fit_abstention_([labelled], risk=0.7)
        if name != "texts":
            ensemble.transform = ImageTransform(size=16, mean=(0.5,) * 3, std=(0.2,) * 3)
        else:
            ensemble.tokenizer = tokenizer
        ensemble.save_pretrained(place / name)
        result[name] = (place / name, batch)
    return result


# --- ways to damage a folder: each changes it in place and says whether it was signed anew --------


def change_value(folder: Path, draw: random.Random, *, sign: bool, remove: bool = False) -> bool:
    """Replace (or remove) a random value of the config."""
    config = json.loads((folder / CONFIG).read_text())
    places = [place for place in _places(config) if place[0] != "config_sha256"]
    # by top-level field first: a record has more leaves than all the others
    field = draw.choice(sorted({place[0] for place in places}))
    *path, last = draw.choice([place for place in places if place[0] == field])
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
    (folder / CONFIG).write_text(json.dumps(signed(config) if sign else config))
    return sign


def _places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """List the path of every value in nested data."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    found = [at] if at else []
    for key, inner in items:
        found += _places(inner, (*at, key))
    return found


def damage_bytes(folder: Path, draw: random.Random) -> bool:
    """Flip, cut, add or clear bytes of a random file."""
    path = draw.choice(_files(folder))
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
    path, other = draw.sample(_files(folder), 2)
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


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and path.suffix != ".md")


def change_tensors(folder: Path, draw: random.Random) -> bool:
    """Drop, add, reshape or retype a tensor, and sign the weights anew."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / WEIGHTS)
    name = draw.choice(sorted(tensors))
    way = draw.choice(["drop", "rename", "shape", "half", "integers", "more"])
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
    else:
        tensors["more"] = torch.zeros(3)
    save_file(tensors, folder / WEIGHTS)
    config = json.loads((folder / CONFIG).read_text())
    config["sha256"] = hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
    (folder / CONFIG).write_text(json.dumps(signed(config)))
    return True


WAYS: dict[str, Callable[[Path, random.Random], bool]] = {
    "value, stale digest": lambda f, d: change_value(f, d, sign=False),
    "value, new digest": lambda f, d: change_value(f, d, sign=True),
    "key removed, stale digest": lambda f, d: change_value(f, d, sign=False, remove=True),
    "key removed, new digest": lambda f, d: change_value(f, d, sign=True, remove=True),
    "bytes of a file": damage_bytes,
    "files lost or exchanged": lose_file,
    "tensors, new digest": change_tensors,
}
WEIGHT = {"value, new digest": 5, "bytes of a file": 2}
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
        assert ensemble.abstention is None or len(ensemble.abstention.abstains(answer.uncertainty))
        _ = ensemble.transform, ensemble.tokenizer, str(ensemble)
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
        "abstention": None if ensemble.abstention is None else ensemble.abstention.to_dict(),
    }
    for key, value in said.items():
        if key == "labels" and config[key] is None:
            continue  # the host's own names then
        if json.dumps(value) != json.dumps(config[key]) and value != config[key]:
            return OTHER, f"{key} is not what the config says"
    return AS_SAID, ""


def fuzz_folders(count: int, seed: int) -> dict[str, Any]:
    """Damage folders; return figures by way and by kind of outcome."""
    draw = random.Random(seed)
    ways = [way for way in WAYS for _ in range(WEIGHT.get(way, 1))]
    table: dict[str, Counter[str]] = {way: Counter() for way in WAYS}
    failures: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory() as place:
        made = make_ensembles(Path(place))
        expected = {
            name: hydra.HydraEnsemble.from_pretrained(folder).predict(batch)
            for name, (folder, batch) in made.items()
        }
        for number in range(count):
            way, name = ways[number % len(ways)], draw.choice(sorted(made))
            folder = Path(place) / "damaged"
            shutil.copytree(made[name][0], folder)
            sign = WAYS[way](folder, draw)
            kind, error = outcome(folder, made[name][1], expected[name], sign=sign)
            table[way][kind] += 1
            if kind in BAD:
                failures.append({"number": str(number), "way": way, "kind": kind, "error": error})
            shutil.rmtree(folder)
    total = sum(table.values(), Counter())
    return {
        "count": count,
        "total": {kind: total[kind] for kind in (*GOOD, *BAD)},
        "by_way": {way: dict(sorted(kinds.items())) for way, kinds in table.items()},
        "failures": failures,
    }


def main() -> int:
    """Run both parts, print the figures and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folders", type=int, default=1000)
    parser.add_argument("--records", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # keys that are not known are told by a warning
    import transformers

    transformers.logging.set_verbosity(100)  # it talks about odd configs before we refuse
    result: dict[str, Any] = {"seed": arguments.seed}
    result["folders"] = fuzz_folders(arguments.folders, arguments.seed)
    with tempfile.TemporaryDirectory() as place:
        made = {name: folder for name, (folder, _) in make_ensembles(Path(place)).items()}
        result["records"] = fuzz_records(made, arguments.records, arguments.seed)
    for part in ("folders", "records"):
        print(part, json.dumps(result[part]["total"], indent=2))
        for failure in result[part]["failures"][:20]:
            print("  ", failure)
    write_whole(RESULTS, json.dumps(result, indent=1) + "\n")
    return int(bool(result["folders"]["failures"] or result["records"]["failures"]))


if __name__ == "__main__":
    sys.exit(main())
