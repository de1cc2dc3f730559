"""Does a choice of heads that saw one family of outliers still detect others by MSP?

    python experiments/given_outliers.py after --data DATA        # about 3 minutes of one core

DeiT-tiny, `build(model, 200 ImageNet images, ood=200 textures)`; judged on ImageNet images and on
outliers that took no part: other textures, MNIST, CIFAR-10. AUROC by MSP in percent of the host and
of the ensemble, before temperatures and after them, and of the ensemble by the score that `build`
chose. Writes experiments/results/given_outliers.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from lab import plainly, sets
from lab.records import this_commit
from lab.tasks import deit_tiny

import hydra_ensembles as hydra
from hydra_ensembles._records import write_whole
from hydra_ensembles.data.model_runs import collect_logits
from hydra_ensembles.evaluation.metrics import negative_log_likelihood, ood_figures
from hydra_ensembles.uncertainty import find_temperature, score_logits

OUT = Path(__file__).parent / "results" / "given_outliers.json"


def main() -> None:
    """Build once, judge on what the choice did not see, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="key of this run in the file, such as before or after")
    parser.add_argument("--data", default=None)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    root, seed = sets.data_root(options.data), options.seed
    torch.manual_seed(seed)
    model = deit_tiny(root)
    known = sets.imagenet(root, "calibration").sample(200, seed=seed).batches()
    given = sets.textures(root, "validation").sample(200, seed=seed).unlabelled().batches()
    ensemble = hydra.build(model, known, ood=given, seed=seed, novelty=False, progress=False)
    judged = {
        "id": sets.imagenet(root, "test").sample(400, seed=1).batches(),
        "textures": sets.textures(root, "test").unlabelled().batches(),
        "mnist": sets.mnist(root).sample(200, seed=1).batches(size=224),
        "cifar10": sets.cifar10(root).sample(200, seed=1).unlabelled().batches(size=224),
    }
    fitted = find_temperature(*_known(model, known)).temperature
    found: dict[str, Any] = {"seed": seed, "commit": this_commit(), "summary": str(ensemble)}
    runs = {part: collect_logits(model, data) for part, data in judged.items()}
    found["host"] = _figures(runs)
    found["host with temperature"] = _figures(runs, temperature=fitted)
    runs = {part: collect_logits(ensemble, data) for part, data in judged.items()}
    found["ensemble with temperature"] = _figures(runs)
    found["ensemble by its score"] = {"score": ensemble.score, **_figures(runs, ensemble.score)}
    ensemble.temperature = ensemble.member_temperatures = None
    runs = {part: collect_logits(ensemble, data) for part, data in judged.items()}
    found["ensemble"] = _figures(runs)
    records = json.loads(OUT.read_text()) if OUT.exists() else {}
    records[f"{options.name}, seed {seed}"] = found
    write_whole(OUT, json.dumps(records, indent=1) + "\n")
    print(json.dumps({key: value for key, value in found.items() if key != "summary"}, indent=1))
    print(found["summary"])


def _known(model: torch.nn.Module, data: Any) -> tuple[torch.Tensor, torch.Tensor]:
    logits, labels = collect_logits(model, data, need_labels=True)
    assert labels is not None
    return logits.float(), labels


def _figures(
    runs: dict[str, Any], score: str = "msp", temperature: float = 1.0
) -> dict[str, float]:
    """Return NLL and the AUROC of every family by a score, in percent."""
    logits = {part: said.float() / temperature for part, (said, _) in runs.items()}
    scored = {part: score_logits(values, score) for part, values in logits.items()}
    nll = float(negative_log_likelihood(logits["id"], runs["id"][1]).mean())
    aurocs = {
        part: round(100 * float(ood_figures(scored["id"], values)["AUROC"]), 2)
        for part, values in scored.items()
        if part != "id"
    }
    return {"NLL": round(nll, 4), **aurocs}


if __name__ == "__main__":
    plainly(main)
