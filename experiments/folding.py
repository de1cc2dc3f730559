"""What `fold` keeps of a Deep Ensemble: three fine-tunings as one model, by least squares.

    python experiments/folding.py sst2 clinc150 --hosts HOSTS      # docs/results/folding.json, .md
    python experiments/folding.py --page                           # the page only

Hosts are those of seeds 0 to 2. `fold` sees training inputs of the task without their labels. The
temperature of every row is fitted on the task's held-out data; figures are made on its test data.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from lab import plainly
from lab.answers import Answers, ask, evaluate_answers
from lab.page import grid
from lab.records import PAGES, this_commit
from lab.tasks import Task, open_task

import hydra_ensembles as hydra
from hydra_ensembles._records import write_whole
from hydra_ensembles.training import average_weights

SEEDS, EXAMPLES = (0, 1, 2), 6000
SCORES = ("msp", "mutual-information")
FIGURES = {
    "cls/Acc": "accuracy",
    "cls/NLL": "NLL raw",
    "post/cls/NLL": "NLL scaled",
    "cal/ECE": "ECE raw",
    "fail/AUROC": "error AUROC",
}
SINGLE, DEEP, SOUP, FOLDED = "single (mean of three)", "Deep Ensemble", "soup", "folded"
BY_LOGITS, STUDENT = "folded, by logits", "folded, student"
MI = "/mutual-information/"
OWN = "error of the host's own layer"


def answers_of(task: Task, model: Any) -> Answers:
    """Ask a model about every set of a task, corrupted ones left out."""
    sets = {k: data for k, data in task.evaluated().items() if not k.startswith("shift/")}
    return Answers({name: ask(model, data) for name, data in sets.items()})


def measured(task: Task) -> dict[str, Any]:
    """Fold the hosts of a task and evaluate all rows."""
    hosts = [task.host(seed) for seed in SEEDS]
    inputs = task.training("train", EXAMPLES)
    begun = time.process_time()
    folded = hydra.fold(hosts, inputs, student=False, progress=False)
    seconds = time.process_time() - begun
    check = hydra.verify(folded, next(iter(task.test)))
    linear = hydra.fold(hosts, inputs, readout="logits", student=False, progress=False)
    answered = hydra.fold(hosts, inputs, student=True, progress=False)
    for one in (linear, answered):
        hydra.verify(one, next(iter(task.test)))
    singles = [answers_of(task, host) for host in hosts]
    first = singles[0].sets
    together = {name: ask_all(name, singles) for name in first}
    rows = {
        SINGLE: singles,
        DEEP: [Answers(together)],
        SOUP: [answers_of(task, average_weights(hosts).eval())],
        FOLDED: [answers_of(task, folded)],
        BY_LOGITS: [answers_of(task, linear)],
        STUDENT: [answers_of(task, answered)],
    }
    results = {
        name: [evaluate_answers(one, scores=SCORES, name=name) for one in answers]
        for name, answers in rows.items()
    }
    keys = [key for key in results[FOLDED][0] if key in FIGURES or key.endswith("/AUROC")]
    figures = {
        name: {key: sum(one[key] for one in found) / len(found) for key in keys}
        for name, found in results.items()
    }
    differences = {}
    for other in (DEEP, SINGLE):
        compared = hydra.compare(results[FOLDED], results[other])
        differences[other] = {
            key: [compared[key].difference, compared[key].low, compared[key].high]
            for key in keys
            if key in compared
        }
    costs = {
        name: hydra.cost(one, task.one).relative_to(hydra.cost(hosts[0], task.one)).multiply_adds
        for name, one in ((FOLDED, folded), (BY_LOGITS, linear), (STUDENT, answered))
    }
    return {
        "examples": folded.record["examples"],
        "members": folded.record["members"],
        "seconds of one core": round(seconds, 1),
        "cost": {SINGLE: 1.0, DEEP: float(len(SEEDS)), SOUP: 1.0, **costs},
        "fused against members": check.largest,
        "figures": figures,
        "folded minus": differences,
    }


def ask_all(name: str, singles: list[Answers]) -> dict[str, Any]:
    """Put the answers of several hosts to one set side by side."""
    import torch

    logits = torch.cat([one.sets[name]["logits"] for one in singles], 1)
    return {**singles[0].sets[name], "logits": logits}


def shown(key: str, value: float) -> str:
    """Show a figure: NLL as it is, all else in percent."""
    return f"{value:.3f}" if key.endswith("NLL") else f"{100 * value:.1f}"


def outlier_keys(figures: dict[str, float]) -> list[str]:
    """Return the AUROC by MSP of every single set of outliers."""
    keys = [k for k in figures if k.startswith("ood/") and MI not in k and "mean/" not in k]
    return [k for k in keys if k.replace("/AUROC", f"{MI}AUROC") in figures]


def page(record: dict[str, Any]) -> str:
    """Return the page of all tasks that ran."""
    lines = [
        "# Folding",
        "",
        "Three fine-tunings of one model against what [`fold`](../concepts/folding.md) makes of "
        "them: the mean of their weights as the trunk, and a last linear layer per member, fitted "
        "by ridge regression to training inputs without labels. "
        "`python experiments/folding.py clinc150 sst2 cola` makes this page. There is one trio of "
        "hosts per task, so intervals are over test examples only, not over hosts. Accuracy, ECE "
        "and AUROC are in percent. Outlier columns are AUROC by MSP and by mutual information; a "
        "single model has no mutual information, and below 50 outliers look surer than test data. "
        "NLL is raw and at one temperature, which is fitted on held-out data.",
    ]
    for name, task in record.items():
        figures = task["figures"]
        outliers = outlier_keys(figures[FOLDED])
        head = ["", "cost", *FIGURES.values()]
        head += [f"{key.split('/')[-2]}: MSP, MI" for key in outliers]
        rows = []
        for row, found in figures.items():
            cells = [row, f"{task['cost'][row]:.2f}", *(shown(k, found[k]) for k in FIGURES)]
            for key in outliers:
                other = key.replace("/AUROC", f"{MI}AUROC")
                several = row not in (SINGLE, SOUP)
                cells.append(
                    shown(key, found[key]) + (f", {shown(key, found[other])}" if several else "")
                )
            rows.append(cells)
        lines += ["", f"## {name}", "", *grid(head, rows), ""]
        lines += [told(task), "", kept(figures), ""]
        lines += ["Folded minus the other row, with 95 % intervals; bold where they exclude 0:", ""]
        both = [k for key in outliers for k in (key, key.replace("/AUROC", f"{MI}AUROC"))]
        table = []
        for key in [*FIGURES, *both]:
            cells = [FIGURES.get(key) or f"{key.split('/')[2]}, {'MI' if MI in key else 'MSP'}"]
            for other, found in task["folded minus"].items():
                none = key not in found or (MI in key and other == SINGLE)
                cells.append("–" if none else difference(key, *found[key]))
            table.append(cells)
        lines += grid(["", *(f"minus {other}" for other in task["folded minus"])], table)
    return "\n".join(lines) + "\n"


def told(task: dict[str, Any]) -> str:
    """Say how the fold went."""
    errors = " / ".join(f"{m['error']:.3f}" for m in task["members"])
    own = " / ".join(f"{m[OWN]:.3f}" for m in task["members"])
    ridges = [m["ridge"] for m in task["members"]]
    chosen = " / ".join("kept" if ridge is None else f"{ridge:g}" for ridge in ridges)
    return (
        f"Folded on {task['examples']:,} inputs in {task['seconds of one core']:.0f} s of one core "
        f"(running the hosts included). Chosen ridges: {chosen}. Held-out error of the members' "
        f"states, relative to their variance: {errors}; with the hosts' own layers {own}. Made at "
        f"commit {task['commit']}."
    )


def kept(figures: dict[str, dict[str, float]]) -> str:
    """Say how much of the Deep Ensemble's gain is kept, and what the soup has."""
    key = "post/cls/NLL"
    gains = {row: found[key] - figures[SINGLE][key] for row, found in figures.items()}
    del gains[SINGLE]
    listed = ", ".join(f"{row} {gain:+.4f}" for row, gain in gains.items())
    shares = ", ".join(
        f"{gains[row] / gains[DEEP]:.0%} ({row})"
        for row in (FOLDED, BY_LOGITS, STUDENT)
        if row in gains
    )
    return (
        f"NLL at one temperature, minus that of the mean host: {listed}. Folding keeps {shares} of "
        "the Deep Ensemble's gain."
    )


def difference(key: str, value: float, low: float, high: float) -> str:
    """Show a difference and its interval; bold where it excludes zero."""
    scale, digits = (1, 3) if key.endswith("NLL") else (100, 1)
    text = f"{scale * value:+.{digits}f} [{scale * low:+.{digits}f}, {scale * high:+.{digits}f}]"
    return f"**{text}**" if low > 0 or high < 0 else text


def main() -> None:
    """Run the tasks that are named; write the record and the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="*")
    parser.add_argument("--data", type=Path, default=os.environ.get("HYDRA_DATA"))
    parser.add_argument("--hosts", type=Path, default=os.environ.get("HYDRA_HOSTS"))
    parser.add_argument("--folder", type=Path, default=PAGES)
    parser.add_argument("--page", action="store_true", help="only write the page")
    given = parser.parse_args()
    path = given.folder / "folding.json"
    for name in [] if given.page else given.tasks:
        found = measured(open_task(name, given.data, given.hosts))
        record = json.loads(path.read_text()) if path.exists() else {}
        record[name] = {"commit": this_commit(), **found}
        write_whole(path, json.dumps(record, indent=1) + "\n")
        print(f"{name}: done", flush=True)
    write_whole(given.folder / "folding.md", page(json.loads(path.read_text())))


if __name__ == "__main__":
    plainly(main)
