"""Kill a circuit search at ten random moments and compare the resumed result, bit by bit.

    python benchmarks/circuit_resume.py [--kills 10] [--seed 0]

The searching process is a fork that is ended by SIGKILL after a random part of the time that a
whole search takes; the next one goes on from the folder.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import timm
import torch

from hydra_ensembles.circuits.headmap import Circuit, find_effects
from hydra_ensembles.models import host_model


def search(host: Any, data: list, folder: Path | None) -> Circuit:
    """Search with several objectives over outliers too."""
    ood = [(x.flip(0) * 2,) for x, _ in data]
    return find_effects(host, id=data, ood=ood, objective="average", folder=folder, progress=False)


def main() -> None:
    """Run and print JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)  # forks of a threaded process may hang
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = timm.models.vision_transformer.VisionTransformer(
            img_size=16, patch_size=4, embed_dim=48, depth=8, num_heads=4, num_classes=5
        ).eval()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(128, 3, 16, 16, generator=generator)
    y = torch.randint(5, (128,), generator=generator)
    data = list(zip(x.split(16), y.split(16), strict=True))
    host = host_model(model)
    start = time.perf_counter()
    whole = search(host, data, None)
    length = time.perf_counter() - start
    moments = random.Random(args.seed)
    killed, kept = 0, []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        state = folder / "search.json"
        while killed < args.kills:
            child = os.fork()
            if child == 0:
                search(host, data, folder)
                os._exit(0)
            time.sleep(moments.random() * length)
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            killed += os.WIFSIGNALED(status)
            kept.append(len(json.loads(state.read_text())["steps"]) if state.exists() else 0)
            if kept[-1] == len(host):
                state.unlink()  # it was done: start over, so that the next kill hits a search
        resumed = search(host, data, folder)
    same = resumed.mask == whole.mask and resumed.effects.tolist() == whole.effects.tolist()
    errors = (resumed.effects.standard_error, whole.effects.standard_error)
    same = same and errors[0] == errors[1] and resumed.baseline == whole.baseline
    print(json.dumps({"killed": killed, "layers kept after each": kept, "bit-equal": same}))
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
