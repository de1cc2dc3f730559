"""Peak memory of preparing extreme images, which a few hundred bytes can hold.

    python benchmarks/image_memory.py

Every image is prepared in a process of its own with a limit on its memory (`RLIMIT_AS`), by the
exported runtime and by an image processor of transformers. The figure is the growth of the peak
resident memory over what the process held before the image was opened. Writes
`benchmarks/results/image-memory.json` under `--name`; run it with another tree on `PYTHONPATH`
and another name to compare.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "image-memory.json"
SIZES = {
    "photo": (4000, 3000),
    "strip of 50:1": (10_000, 200),
    "10,000 x 1": (10_000, 1),
    "1 x 10,000": (1, 10_000),
    "100,000 x 1": (100_000, 1),
}
DOORS = ("runtime", "processor")


def prepare(door: str, path: str, gigabytes: int) -> None:
    """Prepare one image as a door does, and print the peak memory in MB and what happened."""
    if door == "runtime":
        from hydra_ensembles.runtime import ImageReader

        normal = (0.5, 0.5, 0.5)
        reader = ImageReader((224, 224), 0.875, "bicubic", normal, normal)
        work: Any = lambda file: reader([file])  # noqa: E731
    else:
        from PIL import Image
        from transformers import CLIPImageProcessor

        from hydra_ensembles.data import image_transform

        transform = image_transform(CLIPImageProcessor())
        work = lambda file: transform(Image.open(file))  # noqa: E731
    with tempfile.TemporaryDirectory() as folder:
        from PIL import Image

        small = Path(folder) / "warm.png"  # what the first image of any size brings into memory
        Image.new("RGB", (64, 64)).save(small)
        work(str(small))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    resource.setrlimit(resource.RLIMIT_AS, (gigabytes * 2**30, gigabytes * 2**30))
    try:
        work(path)
        outcome = "answered"
    except Exception as error:  # the kind of error is the result
        outcome = f"{type(error).__name__}: {str(error)[:160]}".replace(path, Path(path).name)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print("@", json.dumps({"MB": round((peak - before) / 1024), "outcome": outcome}))


def measure(gigabytes: int) -> dict[str, Any]:
    from PIL import Image

    found: dict[str, Any] = {"limit": f"{gigabytes} GB of address space"}
    with tempfile.TemporaryDirectory() as folder:
        for name, size in SIZES.items():
            path = Path(folder) / "image.png"
            Image.new("RGB", size, (200, 30, 90)).save(path)
            for door in DOORS:
                command = [sys.executable, __file__, "--door", door, "--file", str(path)]
                command += ["--gigabytes", str(gigabytes)]
                told = subprocess.run(command, capture_output=True, text=True)
                row = {"outcome": f"the process ended with {told.returncode}"}
                if "@" in told.stdout:
                    row = json.loads(told.stdout.rpartition("@")[2])
                row = {"bytes": path.stat().st_size, **row}
                found[f"{name}, {door}"] = row
                print(f"{name:>14}  {door:>9}  {row}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", default="now")
    parser.add_argument("--gigabytes", type=int, default=8)
    parser.add_argument("--door")
    parser.add_argument("--file")
    options = parser.parse_args()
    if options.door:
        prepare(options.door, options.file, options.gigabytes)
        return
    kept = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    kept[options.name] = measure(options.gigabytes)
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
