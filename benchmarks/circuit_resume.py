"""Kill searches with SIGKILL at ten random moments each; compare what resuming gives, bit by bit.

    python benchmarks/circuit_resume.py [--data DATA] [--kills 10] [--seed 0]

Two searches: `find_circuit` (with --data on DeiT-tiny with real images, else on a small random
host), and that of members, `build(method="select")`, on a small random host. For every moment the
search starts anew in an empty folder, in a process of its own that is killed after a random part of
the time that a whole search takes; a second process goes on from the folder, and its result must
equal that of a search that nobody stopped. Writes `benchmarks/results/circuit-resume.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import circuit_data
import timm
import torch

from hydra_ensembles import build
from hydra_ensembles.hosts import HostModel, host_model
from hydra_ensembles.search.headmap import find_effects

Search = Callable[[Path | None], str]


def small_host(depth: int, heads: int) -> HostModel:
    """Return a random vision transformer."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = timm.models.vision_transformer.VisionTransformer(
            img_size=16,
            patch_size=4,
            embed_dim=12 * heads,
            depth=depth,
            num_heads=heads,
            num_classes=5,
        )
    host = host_model(model.eval())
    _ = host.readout
    return host


def small_images(count: int) -> circuit_data.Data:
    """Return labelled noise."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 3, 16, 16, generator=generator)
    y = torch.randint(5, (count,), generator=generator)
    return list(zip(x.split(16), y.split(16), strict=True))


def circuit_search(host: HostModel, data: circuit_data.Data) -> Search:
    """Search a circuit with several objectives, over outliers too."""
    ood = [(x.flip(0) * 2,) for x, _ in data]

    def search(folder: Path | None) -> str:
        found = find_effects(
            host, id=data, ood=ood, objective="average", keep=1, folder=folder, progress=False
        )
        plain = json.loads(found.to_json())
        del plain["settings"]  # without a folder nothing is fingerprinted
        return json.dumps(plain)

    return search


def member_search(host: HostModel, data: circuit_data.Data) -> Search:
    """Search members by selection."""

    def search(folder: Path | None) -> str:
        ensemble = build(host, data, members=2, max_cost=1.5, folder=folder, progress=False)
        return json.dumps(ensemble.record)

    return search


def in_a_process(search: Search, folder: Path, answer: Path) -> int:
    """Start a process that searches and writes its result."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            answer.write_text(search(folder))
            code = 0
        finally:
            os._exit(code)
    return child


def kept(folder: Path) -> int:
    """Count what a killed search left: finished steps, and tensors."""
    steps = sum(len(json.loads(path.read_text())["steps"]) for path in folder.glob("*.json"))
    return steps + len(list((folder / "candidates").glob("*.safetensors")))


def kill_and_resume(name: str, search: Search, kills: int, seed: int) -> dict[str, Any]:
    """Kill a search at random moments; resume each time."""
    search(None)  # warm
    start = time.perf_counter()
    whole = search(None)
    length = time.perf_counter() - start
    moments = random.Random(seed)
    parts: list[float] = []
    left: list[int] = []
    equal: list[bool] = []
    missed = 0
    while len(parts) < kills:
        part = moments.random()
        with tempfile.TemporaryDirectory() as scratch:
            folder, answer = Path(scratch) / "state", Path(scratch) / "answer.json"
            child = in_a_process(search, folder, answer)
            time.sleep(part * length)
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            if not os.WIFSIGNALED(status):
                missed += 1  # it was done before
                continue
            parts.append(round(part, 3))
            left.append(kept(folder))
            answer.unlink(missing_ok=True)
            _, status = os.waitpid(in_a_process(search, folder, answer), 0)
            equal.append(status == 0 and answer.read_text() == whole)
    return {
        "search": name,
        "killed at (part of a whole search)": parts,
        "steps and tensors left": left,
        "ended before it was killed": missed,
        "bit-equal": sum(equal),
        "of": kills,
    }


def main() -> None:
    """Run, print and write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("HYDRA_DATA"))
    parser.add_argument("--images", type=int, default=4, help="of DeiT-tiny")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=circuit_data.RESULTS / "circuit-resume.json")
    args = parser.parse_args()
    torch.set_num_threads(1)  # forks of a threaded process may hang
    if args.data is None:
        searches = {"find_circuit, small host": circuit_search(small_host(8, 4), small_images(128))}
    else:
        data = Path(args.data)
        images = circuit_data.images(data, args.images, args.images)
        searches = {"find_circuit, DeiT-tiny": circuit_search(circuit_data.deit(data), images)}
    searches['build(method="select"), small host'] = member_search(
        small_host(3, 3), small_images(64)
    )
    runs = [kill_and_resume(name, s, args.kills, args.seed) for name, s in searches.items()]
    circuit_data.write(
        {
            "command": "python benchmarks/circuit_resume.py --data DATA",
            "what": "searches killed by SIGKILL at random moments, resumed, compared bit by bit",
            "machine": circuit_data.machine(),
            "runs": runs,
        },
        args.out,
    )
    if any(run["bit-equal"] != args.kills for run in runs):
        raise SystemExit("a resumed search differs")


if __name__ == "__main__":
    main()
