"""How many passes of the plain model over its data a default `build` costs, in processor time.

    python benchmarks/build_passes.py --data DATA --sst2 HOSTS/sst2/seed0

One process, one thread. A pass is the plain model over all calibration examples; the ratio of
processor times is what counts, since both run on the same machine. Reads are how often an example
is loaded. Peak memory is that of the process so far.
"""

from __future__ import annotations

import argparse
import csv
import json
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import hydra_ensembles as hydra
from hydra_ensembles._records import write_whole
from hydra_ensembles.data import load_data
from hydra_ensembles.data.loaders import Batches, indexable
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


def measure(model: Any, batches: Any) -> dict[str, Any]:
    """Time a default `build`, and one pass before and after; count how often examples are read."""
    source, reads = indexable(batches), 0

    def load(rows: Sequence[int]) -> Any:
        nonlocal reads
        reads += len(rows)
        return next(iter(source.subset(rows, batch_size=len(rows))))

    lazy = Batches(load, range(source.count), batch_size=source.batch_size, labels=source.labels)
    collect_logits(model, batches[:1])
    first, _ = timed(lambda: collect_logits(model, batches))
    seconds, ensemble = timed(lambda: hydra.build(model, lazy, progress=False))
    again, _ = timed(lambda: collect_logits(model, batches))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {
        "examples": source.count,
        "passes": round(2 * seconds / (first + again), 2),
        "reads": round(reads / source.count, 2),
        "cost": round(ensemble.record["cost"], 4),
        "peak_memory_gib": round(memory, 2),
    }


def main() -> None:
    """Measure both tasks and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sst2", type=Path, help="A fine-tuned MiniLM; images only without.")
    parser.add_argument("--examples", type=int, default=120)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, Any] = {
        "command": "python benchmarks/build_passes.py --data DATA",
        "deit-tiny": measure(*image_task(args.data, args.examples)),
    }
    if args.sst2 is not None:
        record["command"] += " --sst2 HOST"
        record["minilm"] = measure(*text_task(args.data, args.sst2, args.examples))
    print(json.dumps(record, indent=1))
    write_whole(args.out, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
