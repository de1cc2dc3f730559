"""Exported programs against the ensemble in torch: difference, size, start, memory, speed, 8 bits.

    python benchmarks/export.py --data DATA --minilm FOLDER --decoder FOLDER

Three real models, each an ensemble of three members with novelty and a policy: DeiT-tiny on
ImageNet images (timm), MiniLM fine-tuned on SST-2 (BERT), and SmolLM2-135M as a prompted
classifier of SST-2 (a Llama). For each, in one run:

- the largest difference of every output to `ensemble.predict` at batches of 1, 3 and 17;
- sizes on disk;
- whole processes that load and answer one example, in turns: time as a ratio to torch, peak memory;
- time per batch of 1, 8 and 32, in turns, as ratios to `ensemble.predict` (median of the paired
  ratios with a bootstrap interval), one thread each;
- what 8-bit weights cost: accuracy, NLL, AUROC of outliers by uncertainty and by novelty.

Writes `benchmarks/results/export.json` after every part; parts that are there are not run again.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import shapes
import torch

import hydra_ensembles as hydra
from hydra_ensembles import runtime
from hydra_ensembles._records import write_whole
from hydra_ensembles.evaluation.benchmark_result import paired_ratio
from hydra_ensembles.evaluation.metrics import ood_figures

RESULTS = Path(__file__).parent / "results" / "export.json"
TEMPLATE = "Review: {}\nSentiment:"
SIZES = (1, 8, 32)
PARTS = {"start", "latency", "quality"}
START = """
import sys
import numpy as np
way, folder, saved, inputs = sys.argv[1:]
arrays = dict(np.load(inputs))
if way == "torch":
    import torch
    import hydra_ensembles as hydra
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    batch = tensors if "input_ids" in tensors else tuple(tensors.values())
    hydra.HydraEnsemble.from_pretrained(saved).predict(batch)
else:
    from hydra_ensembles import runtime
    runtime.load(folder, program=way, threads=1).run(arrays)
    assert "torch" not in sys.modules
with open("/proc/self/status") as status:  # not getrusage: that counts the parent's memory too
    print(next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM")))
"""


class Subject:
    """A model with its data: raw inputs with labels, outliers, and how they become batches."""

    def __init__(
        self,
        ensemble: hydra.HydraEnsemble,
        known: tuple[list[Any], list[int]],
        test: tuple[list[Any], list[int]],
        outliers: list[Any],
        prepare: Callable[[list[Any]], dict[str, torch.Tensor]],
    ) -> None:
        self.ensemble, self.test, self.outliers, self.prepare = ensemble, test, outliers, prepare
        half = len(known[0]) // 2
        self.known = [self.batch(known[0][i : min(i + 16, half)]) for i in range(0, half, 16)]
        ensemble.fit_novelty_(self.known, progress=False)
        self.held_out = [
            self.labelled(known[0][i : i + 16], known[1][i : i + 16])
            for i in range(half, len(known[0]), 16)
        ]
        hydra.fit_policy(ensemble, self.held_out, risk=0.1, alarm=0.1, progress=False)

    def batch(self, raw: list[Any]) -> Any:
        """Return a batch of the host."""
        made = self.prepare(raw)
        return made if "input_ids" in made else tuple(made.values())

    def labelled(self, raw: list[Any], labels: list[int]) -> Any:
        """Return a labelled batch of the host."""
        batch, given = self.batch(raw), torch.tensor(labels)
        return {**batch, "labels": given} if isinstance(batch, dict) else (*batch, given)


def deit(data: Path) -> Subject:
    """DeiT-tiny on ImageNet validation pictures; textures are the outliers."""
    import timm
    from safetensors.torch import load_file

    host = timm.create_model("deit_tiny_patch16_224")
    host.load_state_dict(load_file(data / "deit-tiny" / "model.safetensors"))
    ensemble = hydra.fuse(host.eval(), shapes.masks(host, blocks=2, keep=1))
    folder = data / "imagenet-val-3k"
    with (folder / "labels.csv").open(newline="") as file:
        rows = [(folder / "images" / r["file"], int(r["label"])) for r in csv.DictReader(file)]
    textures = sorted((data / "textures").glob("[!c]*/*"))
    transform = ensemble.transform

    def prepare(paths: list[Any]) -> dict[str, torch.Tensor]:
        from PIL import Image

        return {"pixel_values": torch.stack([transform(Image.open(path)) for path in paths])}

    known, test = rows[:320], rows[1000:1240]
    return Subject(
        ensemble,
        ([str(p) for p, _ in known], [label for _, label in known]),
        ([str(p) for p, _ in test], [label for _, label in test]),
        [str(p) for p in textures[:: max(1, len(textures) // 100)]][:100],
        prepare,
    )


def sentences(data: Path, name: str, skip: int, count: int) -> tuple[list[str], list[int]]:
    """Return sentences of SST-2, whole ones (not phrases) of the training file."""
    with (data / "text" / "sst2" / name).open(newline="", encoding="utf-8") as file:
        rows = [r for r in csv.reader(file, delimiter="\t") if r[0] in "01" and len(r[1]) > 40]
    rows = rows[skip : skip + count]
    return [text for _, text in rows], [int(label) for label, _ in rows]


def captions(data: Path, count: int) -> list[str]:
    """Return captions of pictures: outliers for reviews."""
    path = data / "text" / "ood" / "multi30k_test_2016_flickr.en.txt"
    return path.read_text(encoding="utf-8").splitlines()[:count]


def minilm(data: Path, folder: Path) -> Subject:
    """MiniLM fine-tuned on SST-2; captions are the outliers."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    host = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ensemble = hydra.fuse(host, shapes.masks(host, blocks=1, keep=0.5))
    ensemble.tokenizer = tokenizer
    return Subject(
        ensemble,
        sentences(data, "train.tsv", 20000, 400),
        sentences(data, "dev.tsv", 0, 872),
        captions(data, 300),
        lambda raw: dict(
            tokenizer(raw, padding=True, truncation=True, max_length=64, return_tensors="pt")
        ),
    )


def decoder(data: Path, folder: Path) -> Subject:
    """SmolLM2-135M, prompted; captions are the outliers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    labels = {"negative": " negative", "positive": " positive"}
    host = hydra.PromptClassifier(model, tokenizer, TEMPLATE, labels, max_length=96)
    ensemble = hydra.fuse(host.eval(), shapes.masks(host, blocks=1, keep=3))
    ensemble.host.tokenizer = tokenizer
    return Subject(
        ensemble,
        sentences(data, "train.tsv", 20000, 96),
        sentences(data, "dev.tsv", 0, 96),
        captions(data, 48),
        lambda raw: host.encode(raw),
    )


def measure(
    subject: Subject, folder: Path, rounds: int, starts: int, found: dict[str, Any]
) -> Iterator[None]:
    """Export a model and compare every program with it; add what is not there, part by part."""
    ensemble = subject.ensemble
    example = subject.batch(subject.test[0][:17])
    made = ensemble.export(
        folder / "exported",
        example=example,
        int8=True,
        known=subject.known,
        held_out=subject.held_out,
    )
    ensemble.save_pretrained(folder / "saved")
    found["largest_difference"] = made.differences
    found["mebibytes"] = {
        "saved": size_of(folder / "saved" / "model.safetensors")
        + size_of(folder / "saved" / "novelty.safetensors"),
        **{kind: size_of(made.folder / name) for kind, name in made.programs.items()},
    }
    parts: dict[str, Callable[[], Any]] = {
        "start": lambda: cold_starts(subject, folder, starts),
        "latency": lambda: {str(n): latency(subject, made.folder, n, rounds) for n in SIZES},
        "quality": lambda: {
            kind: quality(subject, runtime.load(made.folder, program=kind, threads=1))
            for kind in ("onnx", "int8")
        },
    }
    for name, part in parts.items():
        if name not in found:
            found[name] = part()
            yield


def size_of(path: Path) -> float:
    return round(path.stat().st_size / 2**20, 2)


def cold_starts(subject: Subject, folder: Path, rounds: int) -> dict[str, Any]:
    """Time whole processes that load a program and answer one example, in turns."""
    inputs = folder / "one.npz"
    np.savez(inputs, **{k: v.numpy() for k, v in subject.prepare(subject.test[0][:1]).items()})
    ways = ("torch", "onnx", "int8")
    times: dict[str, list[float]] = {way: [] for way in ways}
    memory: dict[str, float] = {}
    for turn in range(rounds + 1):
        for way in ways[turn % 3 :] + ways[: turn % 3]:
            command = [sys.executable, "-c", START, way, *map(str, paths(folder)), str(inputs)]
            begin = time.perf_counter()
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            if turn:  # the first turn fills the disk cache for all
                times[way].append(time.perf_counter() - begin)
            memory[way] = max(memory.get(way, 0.0), float(done.stdout.split()[-1]))
    return {
        way: {"ratio": ratio(times[way], times["torch"]), "peak_mebibytes": round(memory[way])}
        for way in ways
    }


def paths(folder: Path) -> tuple[Path, Path]:
    return folder / "exported", folder / "saved"


def latency(subject: Subject, folder: Path, size: int, rounds: int) -> dict[str, Any]:
    """Time batches in turns; ratios to `ensemble.predict`."""
    raw = (subject.test[0] * 2)[:size]
    batch = subject.batch(raw)
    arrays = {name: tensor.numpy() for name, tensor in subject.prepare(raw).items()}
    programs = {kind: runtime.load(folder, program=kind, threads=1) for kind in ("onnx", "int8")}
    ways: dict[str, Callable[[], Any]] = {
        "torch": lambda: subject.ensemble.predict(batch),
        "onnx": lambda: programs["onnx"].run(arrays),
        "int8": lambda: programs["int8"].run(arrays),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for run in ways.values():
        run()
    order = list(ways)
    for turn in range(rounds):
        for way in order[turn % 3 :] + order[: turn % 3]:
            begin = time.perf_counter()
            ways[way]()
            times[way].append(time.perf_counter() - begin)
    return {way: ratio(times[way], times["torch"]) for way in ways}


def ratio(times: list[float], base: list[float]) -> list[float]:
    """Return the median of the paired ratios and its interval."""
    return [round(value, 3) for value in paired_ratio(times, base)]


def quality(subject: Subject, model: runtime.ExportedEnsemble) -> dict[str, float]:
    """Return accuracy, NLL and AUROC of outliers, from images and texts as they are."""
    inputs, labels = subject.test
    known, outliers = (
        model.predict(inputs, batch_size=16),
        model.predict(subject.outliers, batch_size=16),
    )
    right = known.class_index == np.array(labels)
    likelihood = known.probabilities[np.arange(len(labels)), labels]
    figures = {"Acc": float(right.mean()), "NLL": float(-np.log(likelihood.clip(1e-12)).mean())}
    for name in ("uncertainty", "novelty_score"):
        scores = [torch.from_numpy(getattr(part, name)) for part in (known, outliers)]
        figures[f"AUROC {name}"] = ood_figures(*scores)["AUROC"]
    figures["abstains"] = float(known.abstain.mean())
    figures["called new"] = float((known.code >= 2).mean())  # 0.1 is guaranteed
    figures["outliers called new"] = float((outliers.code >= 2).mean())
    figures["answered and wrong"] = float((~known.abstain & ~right).mean())  # 0.1 is guaranteed
    return {name: round(value, 4) for name, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("HYDRA_DATA"))
    parser.add_argument("--minilm", type=Path, help="MiniLM fine-tuned on SST-2")
    parser.add_argument("--decoder", type=Path, help="SmolLM2-135M as plain weights")
    parser.add_argument("--only", help="one model: deit-tiny, minilm or smollm2")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--starts", type=int, default=4)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.data is None:
        raise SystemExit("Say where the data is: pass --data, or set HYDRA_DATA.")
    torch.set_num_threads(1)
    makers: dict[str, Callable[[], Subject] | None] = {
        "deit-tiny": lambda: deit(Path(args.data)),
        "minilm": None if args.minilm is None else lambda: minilm(Path(args.data), args.minilm),
        "smollm2": None if args.decoder is None else lambda: decoder(Path(args.data), args.decoder),
    }
    record = json.loads(args.out.read_text()) if args.out.exists() else {"models": {}}
    record |= {
        "command": "python benchmarks/export.py --data DATA --minilm FOLDER --decoder FOLDER",
        "machine": f"{platform.machine()} CPU, one thread, torch {torch.__version__}",
        "rounds": args.rounds,
        "starts": args.starts,
    }
    for name, make in makers.items():
        done = record["models"].get(name, {}).keys() >= PARTS
        if make is None or done or args.only not in (None, name):
            print(f"{name}: {'is there' if done else 'not asked for'}")
            continue
        found = record["models"].setdefault(name, {})
        with tempfile.TemporaryDirectory() as folder:
            for _ in measure(make(), Path(folder), args.rounds, args.starts, found):
                write_whole(args.out, json.dumps(record, indent=1) + "\n")
        print(name, json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
