"""What is left of a Deep Ensemble's gain after `fold`, and what closes the gap: ways, one by one.

    python experiments/fold_gap.py cifar10 --examples 1200
    python experiments/fold_gap.py cifar10 --examples 1200 --steps

Each way changes one thing of the folded student: how it is fitted, what it is fitted on, or a few
gradient steps afterwards. All are judged on validation data, by NLL at one temperature that is
fitted on other validation data; nothing here sees test data. Adds to docs/results/fold-gap.json.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from lab import plainly
from lab.answers import ask
from lab.records import PAGES, this_commit
from lab.tasks import Task, open_task
from torch import Tensor, nn

import hydra_ensembles as hydra
from hydra_ensembles._records import write_whole
from hydra_ensembles.data.batches import split_batch
from hydra_ensembles.data.proxies import make_proxies
from hydra_ensembles.evaluation.intervals import bootstrap
from hydra_ensembles.evaluation.metrics import negative_log_likelihood
from hydra_ensembles.hosts import host_model
from hydra_ensembles.refit.fold_rows import FoldRows, Rows
from hydra_ensembles.refit.logistic import SoftRows
from hydra_ensembles.refit.readout_states import Parting, Reader
from hydra_ensembles.refit.ridge import Linear, solve
from hydra_ensembles.refit.token_sums import judges_among
from hydra_ensembles.training import average_weights
from hydra_ensembles.uncertainty import find_temperature

RECORD = PAGES / "fold-gap.json"
RIDGES = (1e-3, 1e-2, 1e-1, 1.0)
SHARES = (0.0, 0.5, 1.0)
"""Of the fit to probabilities, among which the divergence may choose."""


@dataclass
class Seen:
    """Features of the trunk [example, n] and logits of the hosts [example, host, class]."""

    features: Tensor
    logits: Tensor
    labels: Tensor | None

    def __add__(self, other: Seen) -> Seen:
        pairs = ((self.features, other.features), (self.logits, other.logits))
        return Seen(*(torch.cat(pair) for pair in pairs), None)


@dataclass
class Hosts:
    """Hosts of one start and the mean of their weights, run once over each set."""

    models: list[nn.Module]
    readers: list[Reader] = field(init=False)

    def __post_init__(self) -> None:
        parting = Parting.of(host_model(self.models[0]))
        trunk = average_weights(self.models).eval()
        self.readers = [Reader(model, parting) for model in (trunk, *self.models)]

    def see(self, data: Any) -> Seen:
        """Run everything over a set."""
        features, logits, labels = [], [], []
        for batch in data:
            own, *others = (reader(batch) for reader in self.readers)
            features.append(own.readout)
            logits.append(torch.stack([one.logits for one in others], 1))
            known = split_batch(batch)[2]
            labels += [] if known is None else [known]
        return Seen(torch.cat(features), torch.cat(logits), torch.cat(labels) if labels else None)


def fits(seen: Seen) -> tuple[Linear, SoftRows, Rows]:
    """Return the student as `fold` fits it, and the rows that its two parts are fitted to."""
    mean, soft, rows = seen.logits.mean(1), SoftRows(), Rows()
    rows.add_(seen.features, mean, judges_among(0, len(mean), 0))
    soft.add_(seen.features, seen.logits.softmax(-1).mean(1, keepdim=True))
    both = FoldRows(len(mean), {}, {"mean": rows}, {"mean": soft}).fit_readouts("mean", 1)[0]
    return both.linear, soft, rows


def mixed(ridge: Linear, soft: Linear, share: float) -> Linear:
    """Return a fit to logits with a share of a fit to probabilities in it."""
    assert ridge.bias is not None and soft.bias is not None
    return Linear(
        (1 - share) * ridge.weight + share * soft.weight,
        (1 - share) * ridge.bias + share * soft.bias,
    )


def divergence(linear: Linear, seen: Seen) -> float:
    """Return the mean divergence of the hosts' mean probabilities from a fit at one temperature."""
    target = seen.logits.double().softmax(-1).mean(1)
    logits = seen.features.double() @ linear.weight + linear.bias
    entropy = -torch.special.xlogy(target, target).sum(-1).mean()
    factors = torch.logspace(-0.5, 0.5, 21).tolist()
    said = [-(target * (logits * by).log_softmax(-1)).sum(-1).mean() for by in factors]
    return float(min(said) - entropy)


def chosen_by_divergence(seen: Seen, rows: Rows, soft: SoftRows) -> tuple[str, Linear]:
    """Choose the ridge and the mix by the divergence on the held-out fifth, without labels."""
    judges = judges_among(0, len(seen.logits), 0)
    held = Seen(seen.features[judges], seen.logits[judges], None)
    fitted = SoftRows()
    fitted.add_(seen.features[~judges], seen.logits[~judges].softmax(-1).mean(1, keepdim=True))
    part, whole = fitted.fit()[0].linear, soft.fit()[0].linear
    assert rows.fitted is not None and rows.judging is not None
    found = {}
    for ridge in (1e-4, *RIDGES):
        linear = solve(rows.fitted, ridge)
        for share in SHARES:
            found[ridge, share] = divergence(mixed(linear, part, share), held)
    ridge, share = min(found, key=lambda pair: found[pair])
    linear = solve(rows.fitted + rows.judging, ridge)
    return f"ridge {ridge:g}, {share:g} of the fit to probabilities", mixed(linear, whole, share)


def flipped(data: Any) -> Iterator[Tensor]:
    """Mirror images."""
    for batch in data:
        yield split_batch(batch)[0][0].flip(-1)


def students(task: Task, hosts: Hosts, examples: int, *, every: bool) -> dict[str, Linear]:
    """Fit a student as `fold` does, and in every other way."""
    train = task.training("train", examples)
    seen = hosts.see(train)
    usual, soft, rows = fits(seen)
    if not every:
        return {"as fold does it": usual}
    found = {"as fold does it": usual, "probabilities only": soft.fit()[0].linear}
    chosen, found["chosen by divergence"] = chosen_by_divergence(seen, rows, soft)
    print(f"Chosen by divergence: {chosen}", flush=True)
    assert rows.fitted is not None and rows.judging is not None
    for ridge in RIDGES:
        found[f"logits only, ridge {ridge:g}"] = solve(rows.fitted + rows.judging, ridge)
    other = {"cifar10": "unlabelled", "sst2": "reserve"}.get(task.name)
    if other is not None:
        more = seen + hosts.see(task.training(other, examples))
        found["twice the data: inputs that no host saw"] = fits(more)[0]
    if task.name == "cifar10":
        found["twice the data: mirrored"] = fits(seen + hosts.see(flipped(train)))[0]
    few = [inputs for kind in make_proxies(train).values() for inputs in islice(kind, 2)]
    found["inputs without a label besides"] = fits(seen + hosts.see(few))[0]
    return found


def stepped(task: Task, models: list[nn.Module], examples: int) -> dict[str, nn.Module]:
    """Fold members by states, as they are and after an epoch of gradient steps."""
    train = task.training("train", examples)
    folded = hydra.fold(models, train, student=False, progress=False)
    options = {"calibrate": False, "novelty": False, "ood": None, "progress": False}
    found: dict[str, nn.Module] = {"members by states": folded}
    for rate in (1e-4, 5e-4):
        found[f"members by states, an epoch of steps at {rate:g}"] = hydra.distill(
            models[0], models, train, start="folded", epochs=1, learning_rate=rate, **options
        ).eval()
    return found


def losses(held: Tensor, known: Tensor, judged: Tensor, labels: Tensor) -> Tensor:
    """Return each example's NLL at a temperature fitted on other examples."""
    temperature = find_temperature(held, known).temperature
    return negative_log_likelihood(judged.double() / temperature, labels)


def compared(task: Task, examples: int, *, steps: bool) -> dict[str, Any]:
    """Judge every way."""
    models = [task.host(seed) for seed in (0, 1, 2)]
    hosts = Hosts(models)
    held, judged = hosts.see(task.held_out), hosts.see(task.calibration)
    assert held.labels is not None and judged.labels is not None

    def of(a: Tensor, b: Tensor) -> Tensor:
        assert held.labels is not None and judged.labels is not None
        return losses(a, held.labels, b, judged.labels)

    alone = [of(held.logits[:, [i]], judged.logits[:, [i]]) for i in range(len(models))]
    nll = {"one host": torch.stack(alone).mean(0), "Deep Ensemble": of(held.logits, judged.logits)}
    for name, linear in students(task, hosts, examples, every=not steps).items():
        said = [
            (x @ linear.weight + linear.bias)[:, None] for x in (held.features, judged.features)
        ]
        nll[name] = of(*said)
    for name, model in (stepped(task, models, examples) if steps else {}).items():
        nll[name] = of(*(ask(model, data)["logits"] for data in (task.held_out, task.calibration)))
    one, deep = (float(nll[name].mean()) for name in ("one host", "Deep Ensemble"))
    rows = {}
    for name, values in nll.items():
        span = bootstrap((values - nll["as fold does it"]).tolist(), lambda x: x.mean(-1))
        rows[name] = {
            "NLL": round(float(values.mean()), 4),
            "minus fold": [round(span.value, 4), round(span.low, 4), round(span.high, 4)],
            "gain kept": round((float(values.mean()) - one) / (deep - one), 2),
        }
    return {"commit": this_commit(), "examples": examples, "judged": len(judged.labels), **rows}


def main() -> None:
    """Judge the ways on a task and keep the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("task", choices=["cifar10", "sst2", "clinc150", "cola"])
    parser.add_argument("--data", type=Path, default=os.environ.get("HYDRA_DATA"))
    parser.add_argument("--hosts", type=Path, default=os.environ.get("HYDRA_HOSTS"))
    parser.add_argument("--examples", type=int, default=4000, help="unlabelled inputs to fit to")
    parser.add_argument(
        "--steps", action="store_true", help="judge gradient steps instead of the other fits"
    )
    parser.add_argument("--out", type=Path, default=RECORD)
    args = parser.parse_args()
    found = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    task = open_task(args.task, args.data, args.hosts)
    rows = compared(task, args.examples, steps=args.steps)
    found[args.task] = {**found.get(args.task, {}), **rows}
    write_whole(args.out, json.dumps(found, indent=1) + "\n")
    for name, row in found[args.task].items():
        if isinstance(row, dict):
            print(f"{name}: NLL {row['NLL']}, gain kept {row['gain kept']}", flush=True)


if __name__ == "__main__":
    plainly(main)
