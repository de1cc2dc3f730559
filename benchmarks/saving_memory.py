"""Peak memory of saving and of loading an ensemble, as multiples of its weights (Linux).

    python benchmarks/saving_memory.py --name now

Each step runs in a process of its own, on models with random weights. The peak is the kernel's
high-water mark of resident memory (`VmHWM`), reset before the step, minus what was resident then;
`kept` is what is resident after the step and a collection of garbage. Files that are mapped count.
Writes `benchmarks/results/saving-memory.json` under `--name`; run it with another tree on
`PYTHONPATH` and another name to compare.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "saving-memory.json"
MODELS = ("bert", "llama")


def host(name: str) -> Any:
    """Build a classifier of 110 (BERT) or 134 (Llama) million parameters with random weights."""
    import transformers

    if name == "bert":
        config: Any = transformers.BertConfig(num_labels=5)
        return transformers.BertForSequenceClassification(config).eval()
    config = transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=12,
        pad_token_id=0,
        num_labels=5,
    )
    return transformers.LlamaForSequenceClassification(config).eval()


def resident(key: str = "VmRSS") -> float:
    """Return the resident memory (or, by `VmHWM`, its peak) in megabytes."""
    text = Path("/proc/self/status").read_text()
    found = re.search(rf"{key}:\s+(\d+) kB", text)
    assert found is not None
    return int(found[1]) / 1024


def settle() -> float:
    """Give free memory back to the system, reset the peak, return what is resident."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident()


def work(step: str, name: str, folder: str) -> None:
    """Save or load one ensemble and print what memory it took."""
    import shapes
    import torch

    from hydra_ensembles import HydraEnsemble, fuse

    torch.manual_seed(0)
    if step == "save":
        model = host(name)
        ensemble = fuse(model, shapes.masks(model, blocks=2, keep=1 / 3)).eval()
        del model
    else:
        import transformers

        # what any first use brings into memory, by a small host
        small = getattr(
            transformers,
            "BertForSequenceClassification" if name == "bert" else "LlamaForSequenceClassification",
        )
        sizes = {
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "vocab_size": 100,
        }
        small = small(small.config_class(**sizes, pad_token_id=0)).eval()
        with tempfile.TemporaryDirectory() as other:
            fuse(small, shapes.masks(small, blocks=2, keep=0.5, members=2)).save_pretrained(other)
            HydraEnsemble.from_pretrained(other)
    before = settle()
    if step == "save":
        ensemble.save_pretrained(folder)
    else:
        ensemble = HydraEnsemble.from_pretrained(folder)
    peak, kept = resident("VmHWM") - before, settle() - before
    weights = sum(p.numel() * p.element_size() for p in ensemble.parameters()) / 2**20
    found = {"weights_MB": round(weights), "peak_MB": round(peak), "kept_MB": round(kept)}
    found |= {"peak": round(peak / weights, 2), "kept": round(kept / weights, 2)}
    print("@", json.dumps(found))


def measure() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            for step in ("save", "load"):
                command = [sys.executable, __file__, "--step", step]
                command += ["--model", name, "--folder", folder]
                ran = subprocess.run(command, capture_output=True, text=True)
                if ran.returncode:
                    raise RuntimeError(ran.stderr[-2000:])
                found[f"{step} {name}"] = json.loads(ran.stdout.rpartition("@")[2])
                print(f"{step} {name:>6}  {found[f'{step} {name}']}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", default="now")
    parser.add_argument("--step", choices=("save", "load"))
    parser.add_argument("--model", choices=MODELS)
    parser.add_argument("--folder")
    options = parser.parse_args()
    if options.step:
        work(options.step, options.model, options.folder)
        return
    kept = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    kept[options.name] = measure()
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
