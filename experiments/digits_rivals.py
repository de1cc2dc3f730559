"""Evaluate every rival on the digits with a small ViT trained on the spot; print one table.

    python experiments/digits_rivals.py            # about 6 minutes of one core's work

Writes experiments/results/digits_rivals.{json,md}. Every rival starts from the same trained host
(Packed-Ensembles cannot and says so), sees the same training, validation and outlier data, and is
judged on the same test data, outliers of other kinds, and shifts.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hydra_ensembles._records import write_whole
from hydra_ensembles.baselines import make_baseline, relative_cost
from hydra_ensembles.data.corruptions import corrupted
from hydra_ensembles.data.demo import Demo, digits
from hydra_ensembles.evaluation import Results, compare_table, evaluate
from hydra_ensembles.hosts.tiny_vit import TinyViT, TinyViTConfig
from hydra_ensembles.training import finetune

RESULTS = Path(__file__).parent / "results"
SHAPE = TinyViTConfig(image_size=16, patch_size=4, width=64, layers=4, heads=8, mlp_width=128)
# 1.5 times as wide (alpha = 1.5), so that width and heads divide by three members
PACKED = TinyViTConfig(image_size=16, patch_size=4, width=96, layers=4, heads=12, mlp_width=192)
HOST_EPOCHS, HOST_RATE = 30, 2e-3
RIVAL_EPOCHS, RIVAL_RATE = 6, 5e-4
RIVALS = (
    *("single", "temperature", "mc-dropout", "laplace", "outlier-exposure"),
    *("batch-ensemble", "lora-ensemble", "packed-ensemble", "deep-ensemble"),
    *("taylor-single", "circavg-single", "hydra-taylor", "hydra-circuit", "hydra-select"),
)
NOT_HERE = {"vilu": "needs class texts: a zero-shot classifier, which the digits have none of"}
KEYS = (
    *("cls/Acc", "cls/NLL", "cal/ECE", "post/cls/NLL", "post/cal/ECE"),
    *("ood/mean/AUROC", "ood/mean/FPR95", "sc/AURC"),
    *("shift/mean/cls/Acc", "shift/mean/cls/NLL", "div/Disagreement"),
)


def main() -> None:
    arguments = read_arguments()
    data = digits(SHAPE.image_size, seed=arguments.seed)
    host, trained = train_host(data, arguments)
    names = arguments.only or RIVALS
    records = [run_once(name, host, data, arguments) for name in names]
    results = [Results.from_json(json.dumps(record["results"])) for record in records]
    extra = {record["results"]["name"]: record["rival"] for record in records}
    parts = [trained, *(record["seconds"] for record in records)]
    seconds = {kind: sum(part[kind] for part in parts) for kind in ("wall", "processor")}
    table = tell(results, extra)
    print(table)
    spent = ", ".join(f"{kind} {value / 60:.1f}" for kind, value in seconds.items())
    print(f"{len(results)} rivals in minutes: {spent}")
    if arguments.only is None:
        write(records, table, arguments, seconds)


def spent_since(wall: float, processor: float) -> dict[str, float]:
    """Return the seconds that have passed, and those that the processor worked for us."""
    return {"wall": time.monotonic() - wall, "processor": time.process_time() - processor}


def run_once(
    name: str, host: nn.Module, data: Demo, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Return one rival's record; read it if a run that was stopped has left it."""
    path = None if arguments.folder is None else arguments.folder / f"{name}.json"
    if path is not None and path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    begun = time.monotonic(), time.process_time()
    result, rival = run(name, host, data, arguments)
    seconds = spent_since(*begun)
    record = {"results": json.loads(result.to_json()), "rival": rival, "seconds": seconds}
    if path is not None:
        put(path, json.dumps(record))
    print(f"{name:<18} {seconds['wall']:5.0f} s", flush=True)
    return record


def put(path: Path, text: str) -> None:
    """Write a file whole, in a folder that need not be there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--members", type=int, default=3)
    parser.add_argument("--bootstrap", type=int, default=200, help="draws of the intervals")
    parser.add_argument("--only", nargs="*", help="names of rivals; prints, writes nothing")
    parser.add_argument("--folder", type=Path, help="keep checkpoints here, to go on after a stop")
    return parser.parse_args()


def train_host(data: Demo, arguments: argparse.Namespace) -> tuple[nn.Module, dict[str, float]]:
    """Train the small ViT that all rivals start from; return it and the seconds that it took."""
    path = None if arguments.folder is None else arguments.folder / "host.json"
    begun = time.monotonic(), time.process_time()
    host = finetune(
        TinyViT(SHAPE, seed=arguments.seed),
        list(data.train),  # a list is shuffled by sample
        epochs=HOST_EPOCHS,
        learning_rate=HOST_RATE,
        seed=arguments.seed,
        folder=None if arguments.folder is None else arguments.folder / "host",
        progress=False,
    )[0].model
    seconds = spent_since(*begun)
    if path is not None and path.exists():  # it was read, not trained
        return host, json.loads(path.read_text(encoding="utf-8"))
    if path is not None:
        put(path, json.dumps(seconds))
    print(f"host trained       {seconds['wall']:5.0f} s", flush=True)
    return host, seconds


def run(
    name: str, host: nn.Module, data: Demo, arguments: argparse.Namespace
) -> tuple[Results, dict[str, Any]]:
    """Make one rival and judge it."""
    packed = name == "packed-ensemble"
    rival = make_baseline(
        name,
        TinyViT(PACKED, seed=arguments.seed) if packed else host,
        train=list(data.train),
        validation=data.validation,
        ood=data.outliers,
        members=arguments.members,
        seed=arguments.seed,
        # from scratch, it gets what the host got and what the others got on top
        epochs=HOST_EPOCHS + RIVAL_EPOCHS if packed else RIVAL_EPOCHS,
        learning_rate=HOST_RATE if packed else RIVAL_RATE,
        folder=arguments.folder,
        progress=False,
    )
    score = getattr(rival, "score", "msp")
    shifts = {
        f"{kind}-{severity}": corrupted(
            data.test, kind, severity=severity, mean=data.mean, std=data.std
        )
        for kind in ("gaussian_noise", "defocus_blur", "contrast")
        for severity in (2, 4)
    }
    result = evaluate(
        rival,
        data.test,
        ood=data.ood,
        shifts=shifts,
        score=list(dict.fromkeys([score, "msp"])),
        temperature=data.validation,
        bootstrap=arguments.bootstrap,
        progress=False,
        name=name,
        seed=arguments.seed,
    )
    cost = relative_cost(rival, host, next(iter(data.test)))
    return result, {"score": score, **vars(cost)}


def tell(results: list[Results], extra: dict[str, dict[str, Any]]) -> str:
    """Return the table: figures, then score and cost."""
    lines = compare_table(results, keys=KEYS, intervals=False).split("\n")
    added = [("score", "cost", "parameters"), ("---", "---:", "---:")]
    for result in results:
        mine = extra[result.name]
        added.append(
            (mine["score"], f"{mine['multiply_adds']:.2f} x", f"{mine['parameters']:.2f} x")
        )
    return "\n".join(
        f"{line} {' | '.join(cells)} |" for line, cells in zip(lines, added, strict=True)
    )


def write(
    records: list[dict[str, Any]],
    table: str,
    arguments: argparse.Namespace,
    seconds: dict[str, float],
) -> None:
    """Write the record and the page."""
    sizes = records[0]["results"]["settings"]["examples"]
    page = f"""# Rivals on the digits

`python experiments/digits_rivals.py`: a TinyViT ({SHAPE.layers} layers, {SHAPE.heads} heads, width
{SHAPE.width}) trained for {HOST_EPOCHS} epochs, every rival made from it with {arguments.members}
members and {RIVAL_EPOCHS} epochs where it trains, seed {arguments.seed}.
{sizes["id"]} test digits; the mean over {", ".join(k[4:] for k in sizes if k.startswith("ood/"))};
shifts: {", ".join(k[6:] for k in sizes if k.startswith("shift/"))}.
`post/` is after one temperature fitted on validation data. Scribbles are the outliers that a rival
may see. Cost is counted in multiply-adds of one batch against the host.

This run took {seconds["processor"] / 60:.1f} minutes of processor time on
{torch.get_num_threads()} thread(s), {seconds["wall"] / 60:.1f} minutes by the clock, on a shared
machine.

Read with care: one seed, few test examples (intervals are in the JSON), no rival was tuned.

- `packed-ensemble` is no member of the family: it cannot start from the host, so it is another
  network, {PACKED.width / SHAPE.width:.1f} times as wide, trained from scratch for
  {HOST_EPOCHS + RIVAL_EPOCHS} epochs at the host's learning rate. Its gains may come from there.
- `deep-ensemble` starts new last layers, for which {RIVAL_EPOCHS} epochs are short: it is
  under-confident as it stands, so judge it by `post/`.
- `hydra-circuit` and `hydra-select` come with temperatures and a score that `build` chose on the
  validation data; the others are raw with MSP. Compare their likelihood and calibration by `post/`,
  and their OOD figures with MSP by `ood/mean/msp/AUROC` in the JSON.

{table}

"""
    page += "".join(f"Not here: {name}: {why}.\n" for name, why in NOT_HERE.items())
    record = {
        "command": "python experiments/digits_rivals.py",
        "seed": arguments.seed,
        "members": arguments.members,
        "epochs": {"host": HOST_EPOCHS, "rival": RIVAL_EPOCHS},
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "seconds": {kind: round(value) for kind, value in seconds.items()},
        "rivals": records,
    }
    put(RESULTS / "digits_rivals.md", page)
    put(RESULTS / "digits_rivals.json", json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
