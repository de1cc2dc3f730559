"""`finetune_branch`: train the members of a fused model above a trunk that is computed once."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.modes import in_eval
from ..data.running import progress_bar
from ..errors import HydraError
from ..fusion.ensemble import HydraEnsemble
from ..fusion.structure import split_classifier_
from ..hosts import host_model
from ..hosts.probe import modules_after_blocks
from .finetuning import _accelerator
from .loop import FinetunedMember, Run, Settings, StepInfo
from .numbered import is_numbered, keys_of, numbered
from .outliers import Cycle, Outliers, outlier_stream
from .stream import Stream, _take, derive_seed, generator


def finetune_branch(
    ensemble: HydraEnsemble,
    data: Iterable[Any],
    *,
    epochs: int = 1,
    learning_rate: float = 5e-5,
    seed: int = 0,
    bootstrap: bool = True,
    label_smoothing: float = 0.0,
    towards_host: float = 0.0,
    distill: float = 0.0,
    outliers: Outliers | None = None,
    outlier_weight: float = 0.2,
    cache_bytes: int = 2 * 2**30,
    trunk_states: dict[Any, Tensor] | None = None,
    shuffle: bool = True,
    warmup: float = 0.1,
    weight_decay: float = 0.01,
    max_grad_norm: float | None = 1.0,
    mixed_precision: str = "no",
    validation: Iterable[Any] | None = None,
    keep: str = "last",
    folder: str | Path | None = None,
    save_every: int = 200,
    progress: bool = True,
    on_step: Callable[[StepInfo], None] | None = None,
) -> FinetunedMember:
    """Fine-tune the branch of a copy of a fused ensemble; its trunk stays as it is, to the bit.

    Every member gets its own heads, norms, output biases and classifier (`untie_`); the merged MLPs
    of the branch stay shared and learn from all members, and so does the norm through which members
    read the trunk, where the host normalises first. Members with equal masks remain equal. The
    trunk runs without dropout and gradients, once a sample.

    Objective: mean over samples b and members m of w_bm * cross-entropy(logits_bm, label_b), plus
    towards_host / 2 * sum (w - w_start)^2, with w_bm ~ Poisson(1), fixed for all epochs: the online
    form of the bootstrap (Oza and Russell, 2001), so that members see different data in one pass.
    With `distill` = a the label becomes (1 - a) * label_b + a * p_b, where p_b is what the given
    ensemble predicts (with its temperatures): few examples then do not cost accuracy. With
    `outliers` the mean over them and the members of w * KL(uniform || prediction) is added,
    `outlier_weight` times (Outlier Exposure, Hendrycks et al., 2019).

    Args:
        ensemble: What `fuse` or `build` made. It is not changed.
        data: A list of batches, a `DataLoader` over a map-style data set, or what `load_data`
            returns; labels as in `finetune`. Each sample is remembered by its place: random
            augmentations are drawn once (`cache_bytes=0` draws them anew). Samples that a loader
            pads to another length than the first time run through the trunk again.
        epochs: Passes over the data.
        learning_rate: Peak of the schedule.
        seed: Decides order, dropout and the members' bootstraps.
        bootstrap: Whether each member weighs the samples by its own draw; otherwise all count one.
        label_smoothing: Share of the label given to all classes.
        towards_host: Strength of the pull towards the starting weights (L2-SP).
        distill: Share of the labels that is the given ensemble's own prediction, in [0, 1].
        outliers: What members learn to be unsure about: batches, batches by family, or "auto",
            proxies made of `data` (see `make_proxies`), so that no real outliers are needed. They
            are held in memory. Each step takes one batch of them.
        outlier_weight: Weight of the outliers' loss.
        cache_bytes: Memory for the trunk's outputs, beside the data. What does not fit is computed
            each time it is needed, with the same result (up to rounding).
        trunk_states: A dict to keep the trunk's outputs in, filled by the first of several runs and
            read by the next. Only for the same trunk and the same data: neither is checked.
        shuffle, warmup, weight_decay, max_grad_norm, mixed_precision, validation, keep, folder,
            save_every, progress, on_step: As in `finetune`.

    Returns:
        A `FinetunedMember` whose `model` is the trained `HydraEnsemble`, its trunk still frozen and
        its temperatures removed: they were fitted to other weights.
    """
    settings = Settings(
        epochs=epochs,
        learning_rate=learning_rate,
        label_smoothing=label_smoothing,
        towards_host=towards_host,
        bootstrap=bootstrap,
        shuffle=shuffle,
        warmup=warmup,
        weight_decay=weight_decay,
        max_grad_norm=max_grad_norm,
        mixed_precision=mixed_precision,
        keep=keep,
        distill=distill,
        outlier_weight=outlier_weight if outliers is not None else 0.0,
    )
    if keep == "best" and validation is None:
        raise ValueError('keep="best" needs validation data: pass validation=..., or keep="last".')
    model = CachedTrunk(_untied(ensemble), cache_bytes, trunk_states)
    odd = None if outliers is None else outlier_stream(outliers, data, seed=seed)
    with _accelerator(mixed_precision) as accelerator:
        result = BranchRun(
            model=model,
            stream=Stream(numbered(data), seed=seed, shuffle=shuffle),
            settings=settings,
            seed=seed,
            member=0,
            is_trained=lambda name, parameter: parameter.requires_grad,
            loss=None,
            validation=validation,
            folder=None if folder is None else Path(folder),
            save_every=save_every,
            progress=progress,
            on_step=on_step,
            accelerator=accelerator,
            outliers=None if odd is None else Cycle(odd),
            teacher=CachedTrunk(_still(ensemble), cache_bytes, model._rows) if distill else None,
        ).train()
    result.model = model.ensemble
    model.ensemble.mode = ensemble.mode
    model.ensemble.record = {**ensemble.record, "finetune_branch": result.to_dict()}
    return result


def _untied(ensemble: HydraEnsemble) -> HydraEnsemble:
    """Return a copy in which all that members may own is their own, and nothing else trains."""
    if not isinstance(ensemble, HydraEnsemble) or not ensemble.is_classifier:
        raise HydraError(
            f"finetune_branch trains a fused classifier, not {type(ensemble).__name__} "
            f"({type(getattr(ensemble, 'host', ensemble)).__name__}). Make one with fuse(model, "
            "masks), or train a plain model with finetune."
        )
    if len(ensemble.plan.ends) == 1 or not len(ensemble.body.branch):
        raise HydraError(
            "The members' masks are all equal, so they have no branch of their own to train. "
            "Give fuse masks that differ."
        )
    result = copy.deepcopy(ensemble).untie_().freeze_trunk_()
    result.mode, result.temperature, result.member_temperatures = "fused", None, None
    # probed on a member: a plain host, whatever was split by member before
    member = host_model(result.member(0), family=result.body.family)
    streams = len(result.plan.ends)
    for path in modules_after_blocks(member):
        name = f"classifier.{path}"
        if result.readout.folds and streams > 1 and name not in result.copies:
            split_classifier_(result.host, {name: streams})
            result.copies[name] = streams
        result.host.get_submodule(path).requires_grad_(True)
    return result


def _still(ensemble: HydraEnsemble) -> HydraEnsemble:
    """Return a copy that only predicts."""
    result = copy.deepcopy(ensemble).eval().requires_grad_(False)
    result.mode = "fused"
    return result


class _Reached(Exception):
    """Carries the trunk's output out of the host, whose other half need not run."""


class CachedTrunk(nn.Module):
    """An ensemble that remembers its trunk's output for numbered batches (see `numbered`)."""

    def __init__(
        self,
        ensemble: HydraEnsemble,
        cache_bytes: int,
        states: dict[Any, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.ensemble = ensemble
        self.cache_bytes = cache_bytes
        self._rows: dict[Any, Tensor] = {} if states is None else states
        self.used_bytes = sum(row.numel() * row.element_size() for row in self._rows.values())

    def member_logits(self, batch: Any) -> Tensor:
        """Return the members' logits [batch, member, class] of a numbered or a plain batch."""
        if not is_numbered(batch):
            return self.ensemble.member_logits(batch)
        with self.ensemble.body.told(trunk_states=self.trunk_states(batch)):
            return self.ensemble.member_logits(batch["batch"])

    def remember(self, batches: Iterable[Any]) -> None:
        """Compute and keep the trunk's output of numbered batches, as many as the bound allows."""
        for batch in batches if self.cache_bytes > 0 else ():
            if all(key in self._rows for key in keys_of(batch)):
                continue
            states = self._compute(batch["batch"])
            size = states.numel() * states.element_size()
            if self.used_bytes + size > self.cache_bytes:
                return
            self.used_bytes += size
            self._rows.update(zip(keys_of(batch), states.cpu(), strict=True))

    def trunk_states(self, batch: Any) -> Tensor:
        """Return the trunk's output [batch, tokens, width]; compute only what is not known."""
        rows = [self._rows.get(key) for key in keys_of(batch)]
        missing = [place for place, row in enumerate(rows) if row is None]
        if len(missing) == len(rows):
            return self._compute(batch["batch"])
        if missing:
            states = self._compute(_take(batch["batch"], torch.tensor(missing))).cpu()
            for place, row in zip(missing, states, strict=True):
                rows[place] = row
        return torch.stack(rows).to(self.ensemble.device)  # type: ignore[arg-type]

    def _compute(self, batch: Any) -> Tensor:
        def stop(states: Tensor) -> None:
            raise _Reached(states)

        model = in_eval(self.ensemble)
        try:
            with torch.no_grad(), model.body.told(at_branch=stop):
                model.member_logits(batch)
        except _Reached as reached:
            return reached.args[0]
        raise HydraError("The host ran without its blocks. Please report this.")


@dataclass
class BranchRun(Run):
    """A run whose batches are numbered: trunk states and bootstrap weights follow the samples."""

    model: CachedTrunk
    outliers: Cycle | None = None
    teacher: CachedTrunk | None = None
    _targets: dict[Any, Tensor] = field(default_factory=dict)

    def _run_epochs(self) -> None:
        # In the data's own order, whatever was trained before: a resumed run gets the same bits.
        in_order = Stream(self.stream.data, seed=self.seed, shuffle=False)
        shown = self.progress and self.accelerator.is_main_process
        torch.manual_seed(derive_seed("trunk", self.seed))
        with self.accelerator.autocast():
            self.model.remember(
                progress_bar(
                    in_order.epoch(0), description="trunk", enabled=shown, total=len(in_order)
                )
            )
            if self.outliers is not None:
                odd = self.outliers.stream.data
                self.model.remember(progress_bar(odd, description="outliers", enabled=shown))
        super()._run_epochs()

    def _loss(self, batch: Any) -> Tensor:
        logits, labels = self._answer(batch)
        members = logits.shape[1]
        losses = F.cross_entropy(
            logits.transpose(1, 2),
            labels[..., None].expand(*labels.shape, members),
            reduction="none",
            label_smoothing=self.settings.label_smoothing,
        )
        share = self.settings.distill
        if share:
            own = -(self._soft_labels(batch)[:, None] * logits.log_softmax(-1)).sum(-1)
            losses = (1 - share) * losses + share * own
        loss = self._weighted(losses, batch).mean()
        if self.outliers is None:
            return loss
        group = self.accelerator
        odd = self.outliers.at(self.step * group.num_processes + group.process_index)
        answers = self.wrapped(odd).float().log_softmax(-1)
        sure = -answers.mean(-1) - math.log(answers.shape[-1])  # KL(uniform || answer)
        return loss + self.settings.outlier_weight * self._weighted(sure, odd).mean()

    def _weighted(self, losses: Tensor, batch: Any) -> Tensor:
        if not self.settings.bootstrap:
            return losses
        weights = bootstrap_weights(batch["samples"], losses.shape[1], self.seed)
        return losses * weights.to(losses)

    @torch.no_grad()
    def _soft_labels(self, batch: Any) -> Tensor:
        """Return what the ensemble predicted before training [batch, class]; remembered."""
        assert self.teacher is not None
        teacher, keys = self.teacher.to(self.accelerator.device), keys_of(batch)
        if any(key not in self._targets for key in keys):
            logits = teacher.ensemble._scaled(teacher.member_logits(batch).float())
            self._targets.update(zip(keys, logits.softmax(-1).mean(1).cpu(), strict=True))
        rows = torch.stack([self._targets[key] for key in keys])
        return rows.to(self.accelerator.device)


def bootstrap_weights(samples: Tensor, members: int, seed: int) -> Tensor:
    """Draw w ~ Poisson(1) [samples, members], a pure function of the seed and each number."""
    one = torch.ones(members)
    draws = [
        torch.poisson(one, generator=generator("bootstrap", seed, i)) for i in samples.tolist()
    ]
    return torch.stack(draws)
