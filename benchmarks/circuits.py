"""Time of the circuit search relative to the plain algorithm of L * H passes, one interleaved run.

    python benchmarks/circuits.py [--data DATA] [--images 16] [--batch 16]

Both search the same circuits of DeiT-tiny (real weights and images with --data, random ones
without) and must find the same heads. The plain algorithm runs the whole model once for every head,
and once a layer for the objective that effects are compared with; the ratio to its passes for heads
alone is given too. Multiply-adds are counted as well, on one image: a busy machine does not disturb
them. Writes `benchmarks/results/circuits.json`.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import circuit_data
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from hydra_ensembles.heads.gates import gate
from hydra_ensembles.heads.head_mask import HeadMask
from hydra_ensembles.hosts import HostModel
from hydra_ensembles.search.headmap import find_circuit
from hydra_ensembles.search.objectives import as_objective
from hydra_ensembles.search.trunk_cache import Outputs

Clock = Callable[[], Tensor]


def clocks() -> Tensor:
    """Read the time, and the time that the processor gave us."""
    return torch.tensor([time.perf_counter(), time.process_time()], dtype=torch.float64)


def plain_pass(host: HostModel, mask: HeadMask, data: circuit_data.Data) -> Outputs:
    """Run the whole model with some heads off."""
    with torch.no_grad(), gate(host, mask):
        logits = torch.cat([host.model(x) for x, _ in data])
    return Outputs({"id": logits[:, None]}, {"id": torch.cat([y for _, y in data])})


def plain_search(
    host: HostModel, data: circuit_data.Data, keep: int, now: Clock
) -> tuple[HeadMask, dict[str, Tensor]]:
    """Search as published, and measure passes for heads and for baselines apart."""
    goal = as_objective("id-loss")
    rows = list(HeadMask.full(host))
    selected, spent = [], {"heads": 0 * now(), "baselines": 0 * now()}
    for layer, heads in enumerate(host.head_counts):
        start = now()
        base = goal.value(plain_pass(host, HeadMask(rows), data))
        spent["baselines"] += now() - start
        start = now()
        harms = []
        for head in range(heads):
            mask = HeadMask(rows).with_layer(layer, torch.arange(heads) != head)
            harms.append(goal.value(plain_pass(host, mask, data)) - base)
        spent["heads"] += now() - start
        order = torch.sort(torch.tensor(harms), descending=True, stable=True).indices[:keep]
        kept = torch.zeros(heads, dtype=torch.bool)
        kept[order] = True
        selected.append(kept)
        rows[layer] = ~kept
    return HeadMask(selected), spent


def both(
    host: HostModel, data: circuit_data.Data, keep: int, names: list[str], now: Clock
) -> dict[str, Any]:
    """Run the searches once, one after the other; return ratios by what the clock reads."""
    start = now()
    circuit = find_circuit(host, id=data, keep=keep, progress=False)
    fast = now() - start
    start = now()
    effects = find_circuit(host, id=data, keep=keep, effects=True, progress=False).mask
    slower = now() - start
    theirs, spent = plain_search(host, data, keep, now)
    plain = spent["heads"] + spent["baselines"]
    found: dict[str, Any] = {"same circuit": circuit == theirs == effects}
    for place, name in enumerate(names):
        found[name] = {
            "find_circuit to the plain search": round(float(fast[place] / plain[place]), 3),
            "find_circuit to its passes for heads alone": round(
                float(fast[place] / spent["heads"][place]), 3
            ),
            "with effects, to the plain search": round(float(slower[place] / plain[place]), 3),
        }
    return found


def main() -> None:
    """Measure, print and write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("HYDRA_DATA"))
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--keep", type=int, nargs="+", default=[1, 2], help="heads kept a layer")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, default=circuit_data.RESULTS / "circuits.json")
    args = parser.parse_args()
    data = None if args.data is None else Path(args.data)
    host = circuit_data.deit(data)
    batches = circuit_data.images(data, args.images, args.batch)
    one = [(x[:1], y[:1]) for x, y in batches[:1]]
    names = ["time", "processor time"]
    both(host, one, 1, names, clocks)  # warm
    cases = []
    for keep in args.keep:
        timed = [both(host, batches, keep, names, clocks) for _ in range(args.repeats)]
        with FlopCounterMode(display=False) as counter:
            now = lambda: torch.tensor([counter.get_total_flops()]).double()  # noqa: E731
            counted = both(host, one, keep, ["multiply-adds"], now)
        cases.append({"heads kept a layer": keep, "repeats": timed, "counted": counted})
    circuit_data.write(
        {
            "command": "python benchmarks/circuits.py --data DATA",
            "what": "HeadMap (id-loss, knockout) on DeiT-tiny: time and multiply-adds of the "
            "library's search over those of the plain algorithm; repeats one after the other",
            "images": args.images,
            "weights": "random" if data is None else "real",
            "machine": circuit_data.machine(),
            "cases": cases,
        },
        args.out,
    )
    if not all(run["same circuit"] for case in cases for run in case["repeats"]):
        raise SystemExit("the two searches disagree")


if __name__ == "__main__":
    main()
