"""One, two and three processes: equal masks and figures, and rows a second.

    python benchmarks/processes.py --data DATA

DeiT-tiny and ImageNet validation images under `torchrun`, one thread per process, gloo. Each number
of processes scores heads, builds an ensemble, distils a small one and evaluates; what they find is
compared to the last digit. Then `evaluate` is timed several times, the numbers of processes by
turns: wall time, and processor time, which other work on the machine disturbs less.
`results/processes.json` says how busy the machine was.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "processes.json"
COUNTS = (1, 2, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=os.environ.get("HYDRA_DATA"))
    parser.add_argument("--examples", type=int, default=192)
    parser.add_argument("--rows", type=int, default=512, help="of the timed evaluations")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path("processes-work"))
    parser.add_argument("--job", choices=["equal", "timed"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.job:
        work(given)
        return
    given.work.mkdir(parents=True, exist_ok=True)
    said = {count: launch(given, count, "equal", f"equal-{count}") for count in COUNTS}
    rounds = [
        {count: launch(given, count, "timed", f"timed-{count}-{turn}") for count in COUNTS}
        for turn in range(given.rounds)
    ]
    from hydra_ensembles._records import write_whole

    record = {**compare(said), **speeds(rounds), "examples": given.examples, "rows": given.rows}
    write_whole(RESULT, json.dumps(record, indent=1) + "\n")
    print(json.dumps({k: v for k, v in record.items() if k != "found"}, indent=1))


def launch(given: argparse.Namespace, count: int, job: str, name: str) -> Any:
    """Run a job in some processes, unless its result is there; return what every process said."""
    paths = [given.work / f"{name}-{rank}.json" for rank in range(count)]
    if not all(path.exists() for path in paths):
        before = os.getloadavg()[0]
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(count), __file__, "--job", job),
            *("--data", str(given.data), "--work", str(given.work / name)),
            *("--examples", str(given.examples), "--rows", str(given.rows)),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        subprocess.run(command, check=True, env=environment)
        for rank, path in enumerate(paths):
            found = json.loads((given.work / name / f"{rank}.json").read_text())
            path.write_text(json.dumps({**found, "load_before": before}))
    return [json.loads(path.read_text()) for path in paths]


def work(given: argparse.Namespace) -> None:
    """Do a job in one of the processes."""
    from hydra_ensembles.data import processes

    rank = processes.rank()
    given.work.mkdir(parents=True, exist_ok=True)
    found = equal(given) if given.job == "equal" else timed(given)
    (given.work / f"{rank}.json").write_text(json.dumps(found))
    processes.wait()


def task(data: Path, examples: int) -> tuple[Any, Any, Any]:
    """Return DeiT-tiny, labelled ImageNet images and textures."""
    import timm

    from hydra_ensembles.data import image_folder, sample

    weights = data / "deit-tiny" / "model.safetensors"
    model = timm.create_model(
        "deit_tiny_patch16_224", pretrained=True, pretrained_cfg_overlay={"file": str(weights)}
    ).eval()
    folder = data / "imagenet-val-3k"
    known = image_folder(folder / "images", model, labels=folder / "labels.csv", key=None)
    odd = image_folder(data / "textures", model, labels=False, key=None)
    return model, sample(known, examples), sample(odd, examples // 3)


def equal(given: argparse.Namespace) -> dict[str, Any]:
    """Score, build, distil and evaluate; return all that they find."""
    import hydra_ensembles as hydra
    from hydra_ensembles._tensors import model_fingerprint
    from hydra_ensembles.training import Settings

    model, known, odd = task(given.data, given.examples)
    found: dict[str, Any] = {"seconds": {}}

    def step(name: str, start: float) -> None:
        found["seconds"][name] = time.perf_counter() - start

    start = time.perf_counter()
    tables = hydra.score_heads(model, known, criterion=["taylor", "hies"], progress=False)
    found["scores"] = {name: table.tolist() for name, table in tables.items()}
    step("score", start)

    start = time.perf_counter()
    ensemble = hydra.build(model, known, ood={"textures": odd}, method="select", progress=False)
    record = ensemble.record
    found["masks"] = record["masks"]
    found["calibration"] = record["calibration"]
    found["gains"] = {key: record[key] for key in ("gain", "held_out_gain", "intervals")}
    step("build", start)

    start = time.perf_counter()
    results = hydra.evaluate(ensemble, known, ood={"textures": odd}, bootstrap=50, progress=False)
    found["figures"], found["intervals"] = results.figures, results.intervals
    step("evaluate", start)

    start = time.perf_counter()
    settings = Settings(epochs=1, learning_rate=1e-4, views=1, distill=1.0, parts=6)
    student = hydra.distill(model, [ensemble], known, members=3, settings=settings, progress=False)
    found["student"] = model_fingerprint(student)
    found["training"] = student.record["training"]["history"]
    step("distill", start)
    return found


def timed(given: argparse.Namespace) -> dict[str, Any]:
    """Evaluate; return wall time and this process's processor time."""
    import hydra_ensembles as hydra
    from hydra_ensembles.data import processes

    model, known, _ = task(given.data, given.rows)
    hydra.evaluate(model, known.subset(range(32 * processes.size())), progress=False)
    processes.wait()
    start, spent = time.perf_counter(), time.process_time()
    results = hydra.evaluate(model, known, progress=False)
    return {
        "wall": time.perf_counter() - start,
        "processor": time.process_time() - spent,
        "accuracy": results["cls/Acc"],
        "load": os.getloadavg()[0],
    }


def compare(said: dict[int, list[dict[str, Any]]]) -> dict[str, Any]:
    """Compare what every process of every group found with what one process found."""
    one = said[1][0]
    keys = [key for key in one if key not in ("seconds", "load_before")]
    compared = {}
    for count, ranks in said.items():
        compared[str(count)] = {
            key: {
                "equal": all(found[key] == one[key] for found in ranks),
                "largest_difference": max(difference(found[key], one[key]) for found in ranks),
            }
            for key in keys
        }
    seconds = {str(count): ranks[0]["seconds"] for count, ranks in said.items()}
    return {"against_one_process": compared, "seconds": seconds, "masks": one["masks"]}


def difference(first: Any, second: Any) -> float:
    """Return the largest difference of two nests of numbers; infinite where they differ else."""
    if isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        return max((difference(first[key], second[key]) for key in first), default=0.0)
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        return max((difference(a, b) for a, b in zip(first, second, strict=True)), default=0.0)
    if isinstance(first, (int, float)) and isinstance(second, (int, float)):
        return abs(first - second)
    return 0.0 if first == second else float("inf")


def speeds(rounds: list[dict[int, list[dict[str, Any]]]]) -> dict[str, Any]:
    """Return rows a second by number of processes, the best round of each, and the ratios."""
    rows: dict[str, Any] = {}
    for count in COUNTS:
        walls = [max(rank["wall"] for rank in turn[count]) for turn in rounds]
        totals = [sum(rank["processor"] for rank in turn[count]) for turn in rounds]
        slowest = [max(rank["processor"] for rank in turn[count]) for turn in rounds]
        rows[str(count)] = {
            "wall_seconds": walls,
            "processor_seconds": totals,
            "slowest_process_seconds": slowest,
            "load": [turn[count][0]["load"] for turn in rounds],
        }
    best = {count: min(rows[str(count)]["wall_seconds"]) for count in COUNTS}
    own = {count: min(rows[str(count)]["slowest_process_seconds"]) for count in COUNTS}
    return {
        "timing": rows,
        "cores": os.cpu_count(),
        "speedup_wall": {str(count): best[1] / best[count] for count in COUNTS},
        "speedup_processor": {str(count): own[1] / own[count] for count in COUNTS},
    }


if __name__ == "__main__":
    main()
