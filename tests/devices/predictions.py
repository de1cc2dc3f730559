"""Predictions on the pretended device: what is copied and waited for, case by case, as JSON.

    python -m tests.devices.predictions

Every model predicts once before it is counted, as heads are packed and statistics are moved then.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import hydra_ensembles as hydra
from hydra_ensembles.data.batches import move
from tests import zoo
from tests.devices.pretended_device import DEVICE, PretendedDevice
from tests.fusion.test_fusion import EQUAL, LATE, TREE
from tests.refit.test_linear_readouts import batch_of, folded, hosts_of, inputs_of

Case = tuple[hydra.HydraEnsemble, nn.Module, Any]
"""An ensemble, its host, a batch."""


def fused(
    name: str,
    masks: Any = LATE,
    *,
    engine: str = "fused",
    mode: str = "fused",
    temperatures: bool = False,
    novelty: bool = False,
    policy: bool = False,
) -> Case:
    """Fuse a host, with what is asked for."""
    host = zoo.make(name)
    ensemble = hydra.fuse(host, masks, engine=engine, mode=mode)
    if temperatures:
        ensemble.temperature = 1.7
        ensemble.member_temperatures = [0.9, 1.1, 1.3, 0.8][: ensemble.members]
    return with_rules(ensemble, zoo.batch(name, size=64), novelty, policy), host, zoo.batch(name)


def with_rules(
    ensemble: hydra.HydraEnsemble, known: Any, novelty: bool, policy: bool
) -> hydra.HydraEnsemble:
    """Fit novelty and set a policy, if they are asked for."""
    alarm = None
    if novelty:
        labels = torch.arange(64) % 5
        given = {**known, "labels": labels} if isinstance(known, dict) else (known, labels)
        ensemble.fit_novelty_([given], progress=False)
        alarm = 0.05
    if policy:
        ensemble.policy = hydra.Policy(threshold=0.5, novelty_threshold=9.0, alarm=alarm)
    return ensemble


def readouts(name: str, *, novelty: bool = False) -> Case:
    """Fold hosts to linear readouts and a student."""
    ensemble = copy.deepcopy(folded(name))
    if novelty:
        ensemble.fit_novelty_(inputs_of(name), progress=False)
    return ensemble, copy.deepcopy(hosts_of(name)[0]), batch_of(name)


def chosen() -> Case:
    """Fuse a host whose novelty also measures neighbours and cosines."""
    from dataclasses import replace

    ensemble, host, batch = fused("vit", novelty=True, policy=True)
    novelty = ensemble.novelty
    assert novelty is not None and novelty.classes is not None
    taps, width = len(novelty.taps), novelty.bank.shape[1]
    generator = torch.Generator().manual_seed(0)
    measures = replace(
        novelty.measures,
        neighbours=torch.randn(2, 30, width, generator=generator),
        neighbour_taps=(1, taps - 1),
        totals=torch.randn(1, 5, width, generator=generator),
        cosine_taps=(taps - 1,),
    )
    ensemble.novelty = replace(novelty, measures=measures)
    return ensemble, host, batch


CASES: dict[str, Callable[[], Case]] = {
    "plain": lambda: fused("vit"),
    "members that part one by one": lambda: fused("vit", TREE),
    "equal members": lambda: fused("vit", EQUAL),
    "temperatures": lambda: fused("vit", temperatures=True),
    "novelty": lambda: fused("vit", novelty=True),
    "policy": lambda: fused("vit", policy=True),
    "novelty and policy": lambda: fused("vit", novelty=True, policy=True),
    "all": lambda: fused("vit", temperatures=True, novelty=True, policy=True),
    "terms of neighbours and cosines": chosen,
    "all, on text": lambda: fused("bert", temperatures=True, novelty=True, policy=True),
    "all, by the host engine": lambda: fused(
        "vit", engine="host", temperatures=True, novelty=True, policy=True
    ),
    "all, on text by the host engine": lambda: fused(
        "bert", TREE, engine="host", temperatures=True, novelty=True, policy=True
    ),
    "folded": lambda: readouts("vit"),
    "folded, novelty": lambda: readouts("vit", novelty=True),
    "folded, text": lambda: readouts("bert", novelty=True),
    "folded, a decoder": lambda: readouts("llama", novelty=True),
}


def tensors_of(batch: Any) -> int:
    """Count the tensors of a batch."""
    return len(batch) if isinstance(batch, dict) else 1


def counts(name: str) -> dict[str, Any]:
    """Return what one case copies and waits for, and how far its numbers are off."""
    ensemble, host, batch = CASES[name]()
    expected = ensemble.predict(batch)
    with PretendedDevice() as device, torch.no_grad():
        ensemble.to(DEVICE)
        host.to(DEVICE)
        there = move(batch, DEVICE)
        ensemble.predict(there)
        passes = len(ensemble.plan.ends) if not ensemble.body.folds else 1
        with device.counting() as by_host:
            for _ in range(passes):
                zoo.run(host, there)
        with device.counting() as from_device:
            ensemble.predict(there)
        with device.counting() as from_host:
            answer = ensemble.predict(batch)
        with device.counting() as by_rows:
            answer.rows(probabilities=True)
        found = answer.cpu()
        pairs = [(a, b) for a, b in zip(columns(found), columns(expected), strict=True)]
        off = max(float((a - b).abs().max()) for a, b in pairs)
        return {
            "places": sorted({str(column.device) for column in columns(answer)}),
            "inputs": tensors_of(batch),
            "host": by_host,
            "from device": from_device,
            "from host": from_host,
            "rows": by_rows,
            "off": off,
        }


def columns(answer: hydra.Prediction) -> list[Tensor]:
    """Return what two runs of an answer can be compared by; novelty counts little.

    Novelty is made of ranks, and a rank jumps where two distances are nearly equal.
    """
    found = [answer.probabilities, answer.uncertainty, answer.mutual_information]
    return found if answer.novelty is None else [*found, 1e-4 * answer.novelty]


def known_counts() -> dict[str, Any]:
    """Count calls whose counts are known, and see that tensors of two places do not mix."""
    x, mask = torch.arange(6.0), torch.arange(6) % 2 == 0
    calls: dict[str, Callable[[Tensor, Tensor], Any]] = {
        "item": lambda x, mask: x[0].item(),
        "bool": lambda x, mask: bool(mask.any()),
        "list": lambda x, mask: x.tolist(),
        "copy": lambda x, mask: x.cpu(),
        "nonzero": lambda x, mask: mask.nonzero(),
        "mask": lambda x, mask: x[mask],
        "numbers": lambda x, mask: torch.tensor([1.0, 2.0], device=x.device),
        "index": lambda x, mask: x[[1, 2]],
        "filled": lambda x, mask: x.new_full((), 2.0) * x + torch.arange(6, device=x.device),
    }
    found: dict[str, Any] = {}
    with PretendedDevice() as device:
        there = x.to(DEVICE), mask.to(DEVICE)
        for name, call in calls.items():
            with device.counting() as moves:
                call(*there)
            found[name] = {key: count for key, count in moves.items() if count}
        try:
            there[0] + x
        except RuntimeError as error:
            found["mixed"] = str(error)
    return found


if __name__ == "__main__":
    print("@" + json.dumps({"known": known_counts(), **{name: counts(name) for name in CASES}}))
