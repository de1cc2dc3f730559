"""What is timed side by side: the single model, Hydra at several branches, and the rivals."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import shapes
import torch
from torch import Tensor, nn

import hydra_ensembles as hydra
from hydra_ensembles import HeadMask
from hydra_ensembles.costs import choose_units
from hydra_ensembles.criteria import score_units
from hydra_ensembles.heads import prune_units_

KEEP: dict[str, float | int] = {
    **{"vit-s": 1 / 3, "vit-b": 1 / 3, "smoke": 1 / 3},
    **{"deit-tiny": 1, "minilm": 0.5},
}
"""Heads that a member keeps of a branched block: a third; one of three; half."""

CORE = ("single", "single readout", "hydra last 1", "hydra last 2", "hydra last 3")
RIVALS = (
    "single",
    "hydra first",
    "hydra first all tokens",
    "loop",
    "deep ensemble",
    "deep ensemble vmap",
    "mc dropout",
    "packed ensemble",
    "batch ensemble",
)
NOVELTY = ("predict", "predict novelty")
LEAST_SQUARES = ("single", "single readout", "folded", "pruned 0.75", "pruned 0.5", "uniform 0.5")


class DeepEnsemble(nn.Module):
    """M copies, one after another."""

    def __init__(self, host: nn.Module, members: int) -> None:
        super().__init__()
        self.members = nn.ModuleList([copy.deepcopy(host) for _ in range(members)])

    def forward(self, **batch: Tensor) -> Tensor:
        """Return [batch, member, class]."""
        return torch.stack([member(**batch).logits for member in self.members], 1)


class VmapEnsemble(nn.Module):
    """M copies by `torch.func.vmap` over stacked parameters."""

    def __init__(self, host: nn.Module, members: int) -> None:
        super().__init__()
        copies = [copy.deepcopy(host) for _ in range(members)]
        parameters, buffers = torch.func.stack_module_state(copies)
        state = {**parameters, **buffers}
        self.names = list(state)
        self.stacked = nn.ParameterList(
            [nn.Parameter(t.detach(), requires_grad=False) for t in state.values()]
        )
        self.__dict__["shell"] = copy.deepcopy(host).to("meta")  # no part of this module

    def forward(self, **batch: Tensor) -> Tensor:
        """Return [batch, member, class]."""

        def one(tensors: list[Tensor]) -> Tensor:
            state = dict(zip(self.names, tensors, strict=True))
            return torch.func.functional_call(self.shell, state, (), batch).logits

        return torch.func.vmap(one, out_dims=1)(list(self.stacked))


class Predict(nn.Module):
    """`predict` of members that part in the last block, with novelty and a policy or without."""

    def __init__(self, ensemble: hydra.HydraEnsemble) -> None:
        super().__init__()
        self.ensemble = ensemble

    def forward(self, **batch: Tensor) -> Tensor:
        """Return probabilities [batch, class]; `predict` computes the rest of the answer too."""
        return self.ensemble.predict(batch).probabilities


def entry(name: str, shape: str, host: nn.Module, batch: Any, members: int = 3) -> nn.Module:
    """Make one entry by name."""
    keep, layers = KEEP[shape], len(HeadMask.full(host))

    def masks(blocks: int) -> list[HeadMask]:
        return shapes.masks(host, members=members, blocks=blocks, keep=keep)

    if name.startswith("hydra last "):
        return hydra.fuse(host, masks(int(name.rpartition(" ")[2])))
    if name.startswith(("pruned ", "uniform ")):
        kind, _, max_cost = name.partition(" ")
        return pruned(host, batch, float(max_cost), uniform=kind == "uniform")
    makers: dict[str, Callable[[], nn.Module]] = {
        "predict": lambda: Predict(hydra.fuse(host, masks(1))),
        "predict novelty": lambda: Predict(with_novelty(hydra.fuse(host, masks(1)), shape, batch)),
        "single": lambda: host,
        "single readout": lambda: hydra.fuse(host, [HeadMask.full(host)]),
        "hydra first": lambda: hydra.fuse(host, masks(layers)),
        "hydra first all tokens": lambda: hydra.fuse(host, masks(layers), readout_only=False),
        "folded": lambda: folded(shape, members),
        "loop": lambda: hydra.fuse(host, masks(layers), mode="loop"),
        "deep ensemble": lambda: DeepEnsemble(host, members),
        "deep ensemble vmap": lambda: VmapEnsemble(host, members),
        "mc dropout": lambda: rival("mc-dropout", host, batch, members),
        "packed ensemble": lambda: rival("packed-ensemble", host, batch, members),
        "batch ensemble": lambda: rival("batch-ensemble", host, batch, members, train=False),
    }
    return makers[name]().eval()


def with_novelty(ensemble: hydra.HydraEnsemble, shape: str, batch: Any) -> hydra.HydraEnsemble:
    """Give an ensemble statistics of labelled known data, and a policy."""
    from novelty_cost import Case, fitted

    with torch.no_grad():
        classes = ensemble.eval()(**batch).logits.shape[-1]
        ensemble.novelty = fitted(ensemble, Case(shape, classes, labels=True), batch)
    alarms = ensemble.novelty.threshold(0.05)
    ensemble.policy = hydra.Policy(threshold=0.5, novelty_threshold=alarms, alarm=0.05)
    return ensemble


def folded(shape: str, members: int) -> nn.Module:
    """Fold hosts that lie close together, on a few random inputs."""
    hosts = [shapes.host(shape) for _ in range(members)]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in (p for one in hosts for p in one.parameters()):
            parameter += 1e-3 * torch.randn(parameter.shape, generator=generator)
    return hydra.fold(hosts, [shapes.batch(shape, size=32)], student=False, progress=False)


def pruned(host: nn.Module, batch: Any, max_cost: float, *, uniform: bool) -> nn.Module:
    """Prune to a counted cost by the weights' size; a refit does not change the speed."""
    scores = score_units(host, [batch], criterion="magnitude", progress=False)
    mask = choose_units(host, scores, max_cost=max_cost, batch=batch, uniform=uniform)
    return prune_units_(copy.deepcopy(host), mask)


def rival(name: str, host: nn.Module, batch: Any, members: int, **options: Any) -> nn.Module:
    """Make one of the library's baselines; one training step, where it wants one, is enough."""
    from hydra_ensembles.research.rivals import make_baseline

    labelled = {**batch, "labels": torch.zeros(len(next(iter(batch.values()))), dtype=torch.long)}
    return make_baseline(
        name, host, train=[labelled], members=members, epochs=1, options=options, progress=False
    )


def entries(
    names: tuple[str, ...], shape: str, host: nn.Module, batch: Any, members: int = 3
) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Make entries, try each once, and say why those that do not run do not."""
    made, failed = {}, {}
    for name in names:
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                with torch.enable_grad():
                    model = entry(name, shape, host, batch, members)
                model(**batch)
            made[name] = model
        except Exception as error:  # a rival's library may not run on this host: report it
            if name.startswith(("single", "hydra", "loop")):
                raise
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
    return made, failed
