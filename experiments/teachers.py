"""What cheap teachers cost and give: every way of `make_teachers` on the digits, in one command.

    python experiments/teachers.py --hosts HOSTS --cache CACHE

Each way makes three teachers of one host; they are distilled into three members, one each. Time is
processor time against one training of the host. Answers are kept in CACHE, so
that a stopped run goes on. Writes docs/results/teachers.json and the page beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from lab import plainly
from lab.page import grid
from lab.records import PAGES, this_commit
from lab.tasks import Task, open_task

import hydra_ensembles as hydra
from hydra_ensembles._records import write_whole
from hydra_ensembles.hosts.tiny_vit import TinyViT
from hydra_ensembles.research import MemberStack
from hydra_ensembles.training import DISTILL, finetune

WAYS: dict[str, dict[str, Any]] = {
    "branch": {"learning_rate": 1e-3},
    "lora": {"learning_rate": 2e-3},
    "snapshots": {"learning_rate": 1e-3},
}
EPOCHS = 10
DISTIL: dict[str, Any] = {
    "settings": replace(DISTILL, epochs=30, learning_rate=2e-3, trunk_rate=1.0),
    "calibrate": False,
    "novelty": False,
}
FIGURES = {
    "cls/NLL": "NLL raw",
    "post/cls/NLL": "NLL scaled",
    "fail/AUROC": "error AUROC",
    "ood/mean/AUROC": "AUROC by MSP",
    "ood/mean/mutual-information/AUROC": "AUROC by MI",
    "div/Disagreement": "disagreement",
}
SEPARATE = "three trainings"


def judged(task: Task, model: Any, name: str) -> dict[str, float]:
    """Evaluate on the test digits."""
    found = hydra.evaluate(
        model,
        task.test,
        ood=task.ood,
        score=["msp", "mutual-information"],
        temperature=task.held_out,
        progress=False,
        name=name,
    )
    return {figure: round(found[figure], 5) for figure in FIGURES if figure in found.figures}


def teachers_by(task: Task, how: str, folder: Path) -> list[Any]:
    """Make three teachers of the host, or take the hosts of three seeds."""
    if how == SEPARATE:
        return [task.host(seed) for seed in (0, 1, 2)]
    return hydra.make_teachers(
        task.host(0),
        task.training("train"),
        how=how,  # type: ignore[arg-type]
        epochs=EPOCHS,
        folder=folder / "teachers",
        progress=False,
        **WAYS[how],
    )


def made(task: Task, how: str, folder: Path) -> dict[str, Any]:
    """Make teachers, with their processor time, and judge them as an ensemble."""
    begun = time.process_time()
    teachers = teachers_by(task, how, folder)
    seconds = time.process_time() - begun
    return {"seconds": seconds, "teachers": judged(task, MemberStack(teachers).eval(), how)}


def distilled(task: Task, how: str, draws: int, folder: Path) -> dict[str, float]:
    """Distil the teachers and judge the students: means over draws."""
    students = []
    for draw in range(draws):
        student = hydra.distill(
            task.host(0),
            teachers_by(task, how, folder),
            task.training("train"),
            validation=task.held_out,
            seed=draw,
            progress=False,
            folder=folder / f"student-{draw}",
            **DISTIL,
        )
        students.append(judged(task, student, how))
    return {k: round(sum(s[k] for s in students) / draws, 5) for k in students[0]}


def host_seconds(task: Any) -> float:
    """Return the processor time of one training of the host."""
    begun = time.process_time()
    finetune(
        TinyViT(task.shape, seed=0),
        task.training("train"),
        epochs=task.epochs,
        learning_rate=task.learning_rate,
        seed=0,
        progress=False,
    )
    return time.process_time() - begun


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure every way; ways that are in the cache are not measured again."""
    task = open_task("digits", None, args.hosts)
    place = args.cache / "teachers"
    place.mkdir(parents=True, exist_ok=True)

    def kept(name: str, make: Any) -> Any:
        path = place / f"{name.replace(' ', '-')}.json"
        if not path.exists():
            write_whole(path, json.dumps(make()))
            print(name, path.read_text(), flush=True)
        return json.loads(path.read_text())

    one = kept("host", lambda: {"seconds": host_seconds(task)})["seconds"]
    names = (*WAYS, SEPARATE)
    work = {how: place / "work" / how.replace(" ", "-") for how in names}
    ways = {
        how: kept(f"{how} teachers", lambda how=how: made(task, how, work[how])) for how in names
    }
    for how, found in ways.items():
        spent = found.pop("seconds")
        found["trainings of the host"] = 3.0 if how == SEPARATE else round(spent / one, 2)
    for how in names:
        if how in args.distil:
            ways[how]["distilled"] = kept(
                f"{how} distilled", lambda how=how: distilled(task, how, args.draws, work[how])
            )
    return {
        "command": "python experiments/teachers.py",
        "commit": this_commit(),
        "draws of the distillation": args.draws,
        "epochs of each teacher": EPOCHS,
        "host": kept("single", lambda: judged(task, task.host(0), "host")),
        "ways": ways,
    }


def shown(figure: str, value: float | None) -> str:
    """Return a figure: rates in percent."""
    if value is None:
        return "–"
    return f"{value:.3f}" if figure.endswith("NLL") else f"{100 * value:.1f}"


def write_page(record: dict[str, Any], said: str, folder: Path) -> None:
    """Write the page."""
    head = ["", "cost of the teachers", *FIGURES.values()]
    rows = [["the host", "–", *(shown(f, record["host"].get(f)) for f in FIGURES)]]
    for how, found in record["ways"].items():
        price = f"{found['trainings of the host']:.2f}"
        for kind in ("teachers", "distilled"):
            if kind not in found:
                continue
            name = f"`{how}`" if how in WAYS else how
            cells = [shown(f, found[kind].get(f)) for f in FIGURES]
            rows.append([f"{name}: {kind}", price if kind == "teachers" else "", *cells])
    lines = [
        "# What cheap teachers cost and give",
        "",
        "`make_teachers` makes three teachers of one model where nobody has an ensemble. What does "
        "each way cost, and what do members learn from it?",
        "",
        "## Setup",
        "",
        f"- Host: the ViT of the [digits](digits.md), seed 0. Each way trains "
        f"{record['epochs of each teacher']} epochs per teacher; `{SEPARATE}` are hosts of three "
        "seeds, the Deep Ensembles of the other pages.",
        "- Cost: processor time of all three teachers, in trainings of the host (30 epochs), "
        "on a busy machine, in several processes, since stopped runs went on. `three "
        "trainings` are rows of "
        "[what members are for](members.md), draw 0.",
        "- `teachers`: the three as an ensemble, at 3 x the cost of an answer. `distilled`: three "
        f"members, one teacher each, mean over {record['draws of the distillation']} draws; trunk "
        "trained, 30 epochs. Raw but for `NLL scaled`. 359 test digits.",
        "",
        "## Figures",
        "",
        *grid(head, rows),
        "",
        "## What it says",
        "",
        said.strip(),
        "",
        f"`{record['command']}` · [teachers.json](teachers.json) · made at commit "
        f"{record['commit']}",
        "",
    ]
    write_whole(folder / "teachers.md", "\n".join(lines))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hosts", type=Path, default=os.environ.get("HYDRA_HOSTS"))
    parser.add_argument("--cache", type=Path, default=os.environ.get("HYDRA_CACHE", "work/answers"))
    parser.add_argument("--draws", type=int, default=1)
    parser.add_argument("--distil", nargs="*", default=[*WAYS, SEPARATE], help="ways to distil")
    parser.add_argument("--out", type=Path, default=PAGES)
    parser.add_argument("--page", action="store_true", help="write the page only")
    args = parser.parse_args()
    path = args.out / "teachers.json"
    if not args.page:
        write_whole(path, json.dumps(run(args), indent=1) + "\n")
    said = Path(__file__).parent / "tables" / "teachers.md"
    text = said.read_text(encoding="utf-8") if said.exists() else ""
    write_page(json.loads(path.read_text(encoding="utf-8")), text, args.out)


if __name__ == "__main__":
    plainly(main)
