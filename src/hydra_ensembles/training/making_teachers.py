"""`make_teachers`: cheap teachers from one model, for those who have no ensemble."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..costs.budget import fit_budget
from ..data import processes
from ..errors import DataError
from ..fusion.fusing import fuse
from ..heads.masks import HeadMask
from ..hosts import HostModel, host_model
from ..hosts.probe import modules_after_blocks
from ..registry import Registry
from .branch import finetune_branch
from .finetuning import finetune
from .settings import Settings
from .stream import generator

How = Literal["lora", "branch", "snapshots", "full"]


@dataclass(frozen=True)
class Job:
    """What each way of making teachers receives."""

    host: HostModel
    data: Iterable[Any]
    seeds: list[int]
    settings: Settings
    rank: int
    branch_layer: int | None
    folder: Path | None
    progress: bool

    def place(self, name: str) -> Path | None:
        """Return the folder for the checkpoints of one run, or None."""
        return None if self.folder is None else self.folder / name

    def tune(self, model: nn.Module, seed: int, choose: Any = None) -> nn.Module:
        """Fine-tune one copy: all parameters, or those that `choose` selects."""
        return finetune(
            model,
            self.data,
            settings=self.settings,
            seed=seed,
            parameters=choose,
            folder=self.place(f"teacher-{seed}"),
            progress=self.progress,
        )[0].model


ways: Registry[tuple[Callable[[Job], list[nn.Module]], Settings]] = Registry("way to make teachers")


@processes.holds("folder")
def make_teachers(
    model: nn.Module | HostModel,
    data: Iterable[Any],
    *,
    count: int = 3,
    how: How = "lora",
    settings: Settings | None = None,
    epochs: int | None = None,
    learning_rate: float | None = None,
    rank: int = 4,
    branch_layer: int | None = None,
    seed: int = 0,
    folder: str | Path | None = None,
    progress: bool = True,
) -> list[nn.Module]:
    """Make teachers for `distill` out of one model and labelled data.

    Ways, from the cheapest to the most expensive:

    * `"branch"`: the last blocks and the classifier, each teacher on its own bootstrap, above one
      trunk that runs once;
    * `"lora"`: low-rank updates of the attention projections and the classifier, each teacher from
      its own random start on its own bootstrap (Muehlematter et al., 2024, arXiv 2405.14438);
    * `"snapshots"`: one run with as many cycles of the learning rate as teachers; each cycle starts
      where the last one ended, and its end is a teacher (Huang et al., 2017);
    * `"full"`: all weights, each teacher on its own bootstrap (a Deep Ensemble of one start).

    Args:
        model: A trained classifier; it is not changed.
        data: Labelled batches, as `finetune` takes them. For `"branch"`, as `finetune_branch`.
        count: Number of teachers.
        how: One of the ways above.
        settings: How to train; each way has its own default. `epochs` (of each teacher) and
            `learning_rate` override its fields.
        rank: Rank of the low-rank updates.
        branch_layer: First block that `"branch"` trains; by default the one at which three members
            would branch within 1.07 x the cost.
        seed: Teacher t has the seed `seed + t`.
        folder: Where checkpoints go; start again with the same arguments to resume.
        progress: Show bars on a terminal.

    Returns:
        Plain host models in evaluation mode.

    Example:
        >>> teachers = make_teachers(model, train, how="branch", epochs=3)
        >>> student = distill(model, teachers, train)
    """
    make, default = ways[how]
    if count < 1 or rank < 1:
        raise ValueError(f"count={count}, rank={rank}: expected at least 1 of each.")
    job = Job(
        host=host_model(model),
        data=data,
        seeds=[seed + place for place in range(count)],
        settings=(settings or default).updated({"epochs": epochs, "learning_rate": learning_rate}),
        rank=rank,
        branch_layer=branch_layer,
        folder=None if folder is None else Path(folder),
        progress=progress,
    )
    return [teacher.eval() for teacher in make(job)]


def _register(
    name: str, default: Settings
) -> Callable[[Callable[[Job], list[nn.Module]]], Callable[[Job], list[nn.Module]]]:
    def add(make: Callable[[Job], list[nn.Module]]) -> Callable[[Job], list[nn.Module]]:
        ways.register(name)((make, default))
        return make

    return add


@_register("full", Settings(epochs=3, learning_rate=1e-4, bootstrap=True))
def _full(job: Job) -> list[nn.Module]:
    return [job.tune(job.host.model, seed) for seed in job.seeds]


@_register("snapshots", Settings(epochs=3, learning_rate=2e-4))
def _snapshots(job: Job) -> list[nn.Module]:
    teachers, model = [], job.host.model
    for seed in job.seeds:
        model = job.tune(model, seed)
        teachers.append(model)
    return teachers


@_register("branch", Settings(epochs=3, learning_rate=5e-4, bootstrap=True))
def _branch(job: Job) -> list[nn.Module]:
    layer = job.branch_layer
    if layer is None:
        first = next(iter(job.data), None)
        if first is None:
            raise DataError("The data has no batches. Check the loader or the filter.")
        option = fit_budget(job.host, members=3, max_cost=1.07, batch=first, untied=True)
        layer = option.branch_layer
    start = fuse(job.host.model, [HeadMask.full(job.host)], branch_layer=layer)
    states: dict[Any, Tensor] = {}  # all teachers share one trunk
    teachers = []
    for seed in job.seeds:
        trained = finetune_branch(
            start,
            job.data,
            settings=job.settings,
            seed=seed,
            trunk_states=states,
            folder=job.place(f"teacher-{seed}"),
            progress=job.progress,
        ).model
        teachers.append(trained.member(0))  # type: ignore[operator]
    return teachers


@_register("lora", Settings(epochs=3, learning_rate=1e-3, weight_decay=0.0, bootstrap=True))
def _lora(job: Job) -> list[nn.Module]:
    after = tuple(f"{path}." for path in modules_after_blocks(job.host))

    def is_trained(name: str, parameter: nn.Parameter) -> bool:
        if ".parametrizations." in name:
            return not name.endswith(".original")
        return name.startswith(after)

    teachers = []
    for seed in job.seeds:
        model = _with_updates(job.host, job.rank, seed)
        trained = job.tune(model, seed, is_trained)
        teachers.append(_merged(trained))
    return teachers


class LowRank(nn.Module):
    """A weight W becomes W + B A with A [rank, in] random and B [out, rank] zero at the start."""

    def __init__(self, weight: Tensor, rank: int, draw: torch.Generator) -> None:
        super().__init__()
        out, inner = weight.shape
        start = torch.randn(rank, inner, generator=draw) / inner**0.5
        self.first = nn.Parameter(start.to(weight))
        self.second = nn.Parameter(weight.new_zeros(out, rank))

    def forward(self, weight: Tensor) -> Tensor:
        """Add the update."""
        return weight + 2.0 * self.second @ self.first


def _with_updates(host: HostModel, rank: int, seed: int) -> nn.Module:
    """Return a copy whose attention projections have low-rank updates."""
    result = host_model(copy.deepcopy(host.model), family=host.family)
    draw = generator("lora", seed)
    for site in result.sites:
        for part in (site.packed, site.query, site.key, site.value, site.output):
            weight = getattr(part, "weight", None)
            if isinstance(weight, nn.Parameter) and weight.ndim == 2:
                update = LowRank(weight.detach(), rank, draw)
                parametrize.register_parametrization(part, "weight", update)  # type: ignore[arg-type]
    return result.model


def _merged(model: nn.Module) -> nn.Module:
    """Merge the low-rank updates into plain weights, in place."""
    for module in list(model.modules()):
        if parametrize.is_parametrized(module, "weight"):
            parametrize.remove_parametrizations(module, "weight")
    return model
