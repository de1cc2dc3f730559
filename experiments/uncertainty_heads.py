"""Are there heads that matter for uncertainty, and does pruning them hurt more?

    python experiments/uncertainty_heads.py --data DATA --hosts HOSTS

Each head of MiniLM is removed in turn, and its harm is how much worse outliers are told by MSP, on
calibration sentences and TREC's training questions. The ten most harmful heads are then pruned
together and measured on test sentences and on families that the ranking did not see, beside the
ten least harmful heads and five draws of ten heads at random. Writes
docs/results/uncertainty-heads.json.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from lab import plainly
from lab.records import this_commit
from lab.tasks import open_task
from torch import Tensor

import hydra_ensembles as hydra
from hydra_ensembles import HeadMask
from hydra_ensembles._records import write_whole
from hydra_ensembles.data.model_runs import collect_logits
from hydra_ensembles.data.splits import sample
from hydra_ensembles.evaluation.metrics import ood_figures
from hydra_ensembles.search.headmap import find_circuit

OUT = Path(__file__).parents[1] / "docs" / "results" / "uncertainty-heads.json"
PRUNED = 10
DRAWS = 5


def scores_of(model: Any, task: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return MSP and correctness on the test data, and MSP on every unseen family."""

    def uncertainty(logits: Tensor) -> Tensor:
        return 1 - logits[:, 0].softmax(-1).amax(-1)

    logits, labels = collect_logits(model, task.test, need_labels=True)
    right = logits[:, 0].argmax(-1) == labels
    families = task.ood["unseen"].items()
    return (
        uncertainty(logits),
        right,
        {name: uncertainty(collect_logits(model, data)[0]) for name, data in families},
    )


def auroc(known: Tensor, families: dict[str, Tensor]) -> float:
    """Return the mean AUROC over families."""
    found = [ood_figures(known, scores)["AUROC"] for scores in families.values()]
    return sum(found) / len(found)


def gap(one: Any, other: Any) -> list[float]:
    """Return the AUROC of one model minus another's, with a paired 95 % bootstrap interval."""
    generator = torch.Generator().manual_seed(0)
    draws = []
    for _ in range(300):
        rows = torch.randint(len(one[0]), (len(one[0]),), generator=generator)
        picks = {
            n: torch.randint(len(s), (len(s),), generator=generator) for n, s in one[2].items()
        }
        pair = [
            auroc(known[rows], {name: scores[picks[name]] for name, scores in families.items()})
            for known, _, families in (one, other)
        ]
        draws.append(pair[0] - pair[1])
    low, high = torch.tensor(draws).quantile(torch.tensor([0.025, 0.975])).tolist()
    return [auroc(one[0], one[2]) - auroc(other[0], other[2]), low, high]


def without(host: Any, heads: list[int]) -> HeadMask:
    """Return the mask without some heads, numbered over all layers."""
    full = HeadMask.full(host)
    flat = torch.ones(sum(full.shape), dtype=torch.bool)
    flat[heads] = False
    return HeadMask([row.tolist() for row in flat.split(list(full.shape))])


def measure(task: Any) -> dict[str, Any]:
    """Measure one task."""
    host = task.host(0)
    known = list(sample(task.calibration, 300, seed=0))
    effects = find_circuit(
        host,
        id=known,
        ood=task.outliers,
        objective="ood-auroc",
        condition="none",
        effects=True,
        progress=False,
    ).effects
    assert effects.standard_error is not None
    harms = effects.flat()
    errors = torch.cat([row.flatten() for row in effects.standard_error])
    order = harms.argsort(descending=True).tolist()
    generator = torch.Generator().manual_seed(0)
    chosen = {"most harmful": order[:PRUNED], "least harmful": order[-PRUNED:]}
    chosen |= {
        f"random {draw}": torch.randperm(len(order), generator=generator)[:PRUNED].tolist()
        for draw in range(DRAWS)
    }
    whole = scores_of(host, task)
    found: dict[str, Any] = {
        "heads": len(order),
        "harm above two standard errors": int((harms > 2 * errors).sum()),
        "unpruned": {
            "accuracy": float(whole[1].double().mean()),
            "AUROC": auroc(whole[0], whole[2]),
        },
        "pruned": {},
    }
    answers = {}
    for name, heads in chosen.items():
        with hydra.gate(host, without(host, heads)):
            answers[name] = scores_of(host, task)
        found["pruned"][name] = {
            "accuracy": float(answers[name][1].double().mean()),
            "AUROC": auroc(answers[name][0], answers[name][2]),
            "AUROC minus unpruned": gap(answers[name], whole),
        }
        print(task.name, name, found["pruned"][name], flush=True)
    found["most harmful minus each random draw"] = [
        gap(answers["most harmful"], answers[f"random {draw}"]) for draw in range(DRAWS)
    ]
    return found


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("HYDRA_DATA"))
    parser.add_argument("--hosts", type=Path, default=os.environ.get("HYDRA_HOSTS"))
    args = parser.parse_args()
    record: dict[str, Any] = {"commit": this_commit()}
    for name in ("sst2", "cola"):
        record[name] = measure(open_task(name, args.data, args.hosts))
        write_whole(OUT, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    plainly(main)
