"""How many passes of the plain model over its data a default `build` costs, in processor time.

    python benchmarks/build_passes.py --data DATA --sst2 HOSTS/sst2/seed0 --search 24

One process, one thread. A pass is the plain model over all calibration examples; the ratio of
processor times is what counts, since both run on the same machine. `search` is the long search: it
takes more than a hundred passes, so with `--search N` both methods are timed on the first N
examples, beside the quick selection on all of them. Peak memory is that of the process so far.
"""

from __future__ import annotations

import argparse
import csv
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import hydra_ensembles as hydra
from hydra_ensembles._records import write_whole
from hydra_ensembles.data import load_data
from hydra_ensembles.data.model_runs import collect_logits

RESULT = Path(__file__).parent / "results" / "build-passes.json"


def image_task(data: Path, examples: int) -> tuple[Any, Any]:
    """Return DeiT-tiny and ImageNet validation images."""
    import timm
    from PIL import Image
    from timm.data import create_transform, resolve_model_data_config

    weights = data / "deit-tiny" / "model.safetensors"
    model = timm.create_model(
        "deit_tiny_patch16_224", pretrained=True, pretrained_cfg_overlay={"file": str(weights)}
    ).eval()
    transform = create_transform(**resolve_model_data_config(model), is_training=False)
    folder = data / "imagenet-val-3k"
    with (folder / "labels.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))[:examples]
    name, label = _columns(rows[0])
    batches = []
    for start in range(0, len(rows), 24):
        part = rows[start : start + 24]
        images = [Image.open(folder / "images" / Path(r[name]).name).convert("RGB") for r in part]
        pixels = torch.stack([transform(image) for image in images])
        batches.append((pixels, torch.tensor([int(r[label]) for r in part])))
    return model, batches


def _columns(row: dict[str, str]) -> tuple[str, str]:
    file = next(key for key, value in row.items() if value.lower().endswith((".jpg", ".jpeg")))
    return file, next(key for key, value in row.items() if key != file and value.isdigit())


def text_task(data: Path, host: Path, examples: int) -> tuple[Any, Any]:
    """Return a fine-tuned MiniLM and SST-2 sentences."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(host).eval()
    tokenizer = AutoTokenizer.from_pretrained(host)
    rows = load_data(data / "text" / "sst2" / "dev.tsv", tokenizer=tokenizer)
    return model, list(rows.subset(range(examples), batch_size=min(examples, 32)))


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the processor seconds of some work, and its result."""
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def measure(model: Any, batches: Any, methods: list[str]) -> dict[str, Any]:
    """Time one pass, before and after, and each method of `build`."""
    collect_logits(model, batches[:1])
    record: dict[str, Any] = {
        "examples": sum(len(b[1]) if isinstance(b, tuple) else len(b["labels"]) for b in batches)
    }
    first, _ = timed(lambda: collect_logits(model, batches))
    for method in methods:
        seconds, ensemble = timed(
            lambda m=method: hydra.build(model, batches, method=m, progress=False)
        )
        again, _ = timed(lambda: collect_logits(model, batches))
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        record[method] = {
            "passes": round(2 * seconds / (first + again), 2),
            "cost": round(ensemble.record["cost"], 4),
            "peak_memory_gib": round(memory, 2),
        }
    return record


def main() -> None:
    """Measure both tasks and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sst2", type=Path, required=True, help="A fine-tuned MiniLM.")
    parser.add_argument("--examples", type=int, default=120)
    parser.add_argument("--search", type=int, help="Time both methods on so many examples, too.")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, Any] = {
        "command": "python benchmarks/build_passes.py --data DATA --sst2 HOST"
    }
    sizes = {args.examples: ["select"]}
    if args.search:
        record["command"] += f" --search {args.search}"
        sizes[args.search] = ["select", "search"]
    for name in ("deit-tiny", "minilm"):
        record[name] = []
        for size, methods in sizes.items():
            task = (
                image_task(args.data, size)
                if name == "deit-tiny"
                else text_task(args.data, args.sst2, size)
            )
            record[name].append(measure(*task, methods))
            print(name, record[name][-1], flush=True)
    write_whole(args.out, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
