"""A fused model's trunk, computed once per sample, and its branch, ready for training."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batches import take
from ..data.eval_mode import in_eval
from ..data.processes import in_order
from ..errors import DataError, HydraError
from ..fusion.ensemble import HydraEnsemble
from ..fusion.structure import split_classifier_
from ..hosts import host_model
from ..hosts.probes import modules_after_blocks
from ..registry import public_function
from ..tasks import Embedding
from .sample_order import is_numbered, keys_of


def untied(ensemble: HydraEnsemble, *, mlps: bool = False, heads: bool = True) -> HydraEnsemble:
    """Return a copy whose members own all parts they may own; only the branch is trained.

    Without `heads`, members share what they share now, and train it together.
    """
    if not isinstance(ensemble, HydraEnsemble) or isinstance(ensemble.task, Embedding):
        raise HydraError(
            f"finetune_branch trains a fused model with labels, not {type(ensemble).__name__} "
            f"({type(getattr(ensemble, 'host', ensemble)).__name__}). Make one with fuse(model, "
            "masks), or train a plain model with finetune."
        )
    alike = len(ensemble.plan.streams) > 1 and len(ensemble.plan.ends) == 1
    if alike or not len(ensemble.body.branch):
        raise HydraError(
            "The members' masks are all equal, so they have no branch of their own to train. "
            "Give fuse masks that differ."
        )
    result = copy.deepcopy(ensemble)
    if heads:
        result.untie_(mlps=mlps)
    result.freeze_trunk_()
    # temperatures, calibrator and novelty were fitted to the old weights
    result.mode, result.temperature, result.member_temperatures = "fused", None, None
    result.calibrator, result.novelty = None, None
    # probe a member: it is a plain host even where the classifier is split by member
    member = host_model(result.member(0), family=result.body.family)
    streams = len(result.plan.ends)
    for path in modules_after_blocks(member):
        name = f"classifier.{path}"
        if result.readout.folds and streams > 1 and name not in result.copies:
            split_classifier_(result.host, {name: streams})
            result.copies[name] = streams
        result.host.get_submodule(path).requires_grad_(True)
    return result


def folded_start(
    teachers: Any, data: Any, *, members: int, max_cost: float, seed: int, progress: bool
) -> HydraEnsemble:
    """Fold teachers, and return the ensemble ready for training; its answers are the same.

    Members share the heads and the first linear layer of the last block, so that training does not
    raise the cost.
    """
    models = [teachers] if isinstance(teachers, nn.Module) else list(teachers)
    plain = [isinstance(m, nn.Module) and not isinstance(m, HydraEnsemble) for m in models]
    if len(models) != members or not all(plain):
        kinds = ", ".join(type(model).__name__ for model in models)
        raise DataError(
            f'start="folded" needs one model per member, fine-tuned from the host: {members} '
            f"members, and found {kinds}. Load the teachers, or pass members={len(models)}."
        )
    fold = public_function("fold")
    folded = fold(models, data, student=False, max_cost=max_cost, seed=seed, progress=progress)
    result = untied(folded, heads=False)
    result.record = folded.record
    return result


class _Reached(Exception):
    """Carries the trunk's output out of the host, whose later blocks need not run."""

    def __init__(self, states: Tensor) -> None:
        self.states = states


class CachedTrunk(nn.Module):
    """An ensemble that remembers its trunk's output for numbered batches (see `numbered`)."""

    def __init__(
        self,
        ensemble: HydraEnsemble,
        cache_bytes: int,
        states: dict[Any, Tensor] | None = None,
        *,
        frozen: bool = True,
    ) -> None:
        super().__init__()
        self.ensemble = ensemble
        self.cache_bytes = cache_bytes if frozen else 0
        self.frozen = frozen
        self._rows: dict[Any, Tensor] = {} if states is None else states
        self.used_bytes = sum(row.numel() * row.element_size() for row in self._rows.values())

    def member_logits(self, batch: Any) -> Tensor:
        """Return the members' logits [batch, member, class] of a numbered or a plain batch."""
        if not is_numbered(batch):
            return self.ensemble.member_logits(batch)
        if not self.frozen:  # its output changes, and gradients flow through it
            return self.ensemble.member_logits(batch["batch"])
        with self.ensemble.body.options(trunk_states=self.trunk_states(batch)):
            return self.ensemble.member_logits(batch["batch"])

    def knows(self, keys: Iterable[Any]) -> bool:
        """Return whether the trunk's output is cached for all given samples."""
        return self.frozen and all(key in self._rows for key in keys)

    def remember(self, batches: Iterable[Any]) -> None:
        """Compute and cache the trunk's output of numbered batches, up to `cache_bytes`.

        Several processes share the work; each of them caches everything.
        """
        if self.cache_bytes <= 0:
            return

        def work(index: int, batch: Any) -> dict[str, Tensor]:
            keys = keys_of(batch)
            if all(key in self._rows for key in keys):
                return {}
            shapes = {f"shape {i}": torch.tensor(shape) for i, shape in enumerate(keys[0][1])}
            return {"states": self._compute(batch["batch"]), "samples": batch["samples"], **shapes}

        for result in in_order(batches, work, name="trunk", ahead=2):
            if not result:
                continue
            states = result["states"]
            size = states.numel() * states.element_size()
            if self.used_bytes + size > self.cache_bytes:
                return
            self.used_bytes += size
            shapes = [result[f"shape {i}"] for i in range(len(result) - 2)]
            shape = tuple(torch.Size(sizes.tolist()) for sizes in shapes)
            keys = [(number, shape) for number in result["samples"].tolist()]
            self._rows.update(zip(keys, states.cpu(), strict=True))

    def trunk_states(self, batch: Any) -> Tensor:
        """Return the trunk's output [batch, tokens, width]; compute only what is not cached."""
        rows = [self._rows.get(key) for key in keys_of(batch)]
        missing = [place for place, row in enumerate(rows) if row is None]
        if len(missing) == len(rows):
            return self._compute(batch["batch"])
        if missing:
            states = self._compute(take(batch["batch"], torch.tensor(missing))).cpu()
            for place, row in zip(missing, states, strict=True):
                rows[place] = row
        return torch.stack(rows).to(self.ensemble.device)  # type: ignore[arg-type]

    def _compute(self, batch: Any) -> Tensor:
        def stop(states: Tensor) -> None:
            raise _Reached(states)

        model = in_eval(self.ensemble)
        try:
            with torch.no_grad(), model.body.options(at_branch=stop):
                model.member_logits(batch)
        except _Reached as reached:
            return reached.states
        raise HydraError("The host ran without its blocks. Please report this.")
