"""`finetune_branch`: train the members of a fused model above a trunk that is computed once."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data import processes
from ..data.progress import progress_bar
from ..fusion.ensemble import HydraEnsemble
from ..hosts.host_data import data_for, sets_for
from ..tasks import task_of
from .accelerator import accelerator, logits_and_labels
from .loop import FinetunedMember, Run, StepInfo
from .outlier_exposure import Cycle, Outliers, outlier_stream
from .sample_order import Stream, derive_seed, generator, keys_of, numbered
from .settings import BRANCH, Settings
from .trunk_cache import CachedTrunk, untied


@processes.holds("folder")
def finetune_branch(
    ensemble: HydraEnsemble,
    data: Iterable[Any],
    *,
    ood: Outliers | None = None,
    settings: Settings = BRANCH,
    epochs: int | None = None,
    learning_rate: float | None = None,
    seed: int = 0,
    validation: Iterable[Any] | None = None,
    cache_bytes: int = 2 * 2**30,
    trunk_states: dict[Any, Tensor] | None = None,
    folder: str | Path | None = None,
    save_every: int = 200,
    progress: bool = True,
    on_step: Callable[[StepInfo], None] | None = None,
) -> FinetunedMember:
    """Fine-tune the branch of a copy of a fused ensemble; its trunk stays as it is, to the bit.

    Every member gets its own heads, norms, output biases and classifier (`untie_`); the merged MLPs
    of the branch stay shared and learn from all members, and so does the norm through which members
    read the trunk, where the host normalises first. Members with equal masks stay equal. The trunk
    runs once per sample, without dropout or gradients.

    Objective: mean over samples b and members m of w_bm * cross-entropy(logits_bm, label_b), of
    another task its own loss, plus
    towards_host / 2 * sum (w - w_start)^2, with w_bm ~ Poisson(1), fixed for all epochs: the online
    form of the bootstrap (Oza and Russell, 2001), so that members see different data in one pass.
    With `Settings.distill` = a the label becomes (1 - a) * label_b + a * p_b, where p_b is what the
    given ensemble predicts (with its temperatures); this protects accuracy when there are few
    examples. With `ood`, `Settings.outlier_weight` times the mean of w * KL(uniform || prediction)
    over outliers and members is added (Outlier Exposure, Hendrycks et al., 2019, arXiv 1812.04606).

    Args:
        ensemble: What `fuse` or `build` made. It is not changed.
        data: A list of batches, a `DataLoader` over a map-style data set, or what `load_data`
            returns; labels as in `finetune`. The trunk's output is cached per sample, so random
            augmentations are drawn only once (`cache_bytes=0` draws them in every epoch). A sample
            that a loader pads to a new length runs through the trunk again.
        ood: What members learn to be unsure about: batches, batches by family, or "auto", proxies
            made from `data` (see `make_proxies`), so that no real outliers are needed. They are
            kept in memory; each step uses one batch of them.
        settings: How to train; see `Settings`. Start from the defaults: `replace(BRANCH, ...)`.
        epochs, learning_rate: Override the fields of `settings`.
        seed: Determines the order, dropout and the members' bootstraps.
        cache_bytes: Memory for the trunk's outputs, in addition to the data. What does not fit is
            recomputed when needed, with the same result (up to rounding).
        trunk_states: A dict for the trunk's outputs, filled by the first of several runs and read
            by the next ones. All runs must have the same trunk and data: neither is checked.
        validation, folder, save_every, progress, on_step: As in `finetune`.

    Returns:
        A `FinetunedMember` whose `model` is the trained `HydraEnsemble`, its trunk still frozen and
        its temperatures removed: they were fitted to other weights.

    Example:
        >>> trained = finetune_branch(ensemble, held_out, ood="auto", epochs=2)
        >>> trained.model.predict(batch)
    """
    settings = settings.updated(epochs, learning_rate)
    if ood is None:
        settings = replace(settings, outlier_weight=0.0)
    settings.check_validation(validation)
    fused = untied(ensemble)
    task = fused.task
    if (task.by_token or not task.classifies) and (settings.distill or ood is not None):
        raise ValueError(
            f"distill and ood are for classes; this is {task.title}. Pass "
            "settings=replace(BRANCH, distill=0.0) without ood."
        )
    data = data_for(ensemble, data, name="training")
    if validation is not None:
        validation = data_for(ensemble, validation, name="validation")
    if ood is not None and not isinstance(ood, str):
        ood = sets_for(ensemble, ood, name="outliers")
    model = CachedTrunk(fused, cache_bytes, trunk_states)
    teacher = None
    if settings.distill:
        teacher = CachedTrunk(copy.deepcopy(ensemble).eval(), cache_bytes, model._rows)
        teacher.ensemble.mode = "fused"
    with accelerator(settings.mixed_precision) as group:
        result = BranchRun(
            model=model,
            stream=Stream(numbered(data), seed=seed, shuffle=settings.shuffle),
            settings=settings,
            seed=seed,
            accelerator=group,
            validation=validation,
            folder=None if folder is None else Path(folder),
            save_every=save_every,
            progress=progress,
            on_step=on_step,
            action="fine-tune branch",
            outliers=None if ood is None else Cycle(outlier_stream(ood, data, seed=seed)),
            teacher=teacher,
        ).train()
    result.model = model.ensemble
    model.ensemble.mode = ensemble.mode
    model.ensemble.record = {**ensemble.record, "finetune_branch": result.to_dict()}
    return result


@dataclass
class BranchRun(Run):
    """A run whose batches are numbered: trunk states and bootstrap weights follow the samples."""

    model: CachedTrunk
    outliers: Cycle | None = None
    teacher: CachedTrunk | None = None
    _targets: dict[Any, Tensor] = field(default_factory=dict)

    def _run_epochs(self) -> None:
        # in the data's own order, so that a resumed run computes the same bits
        shown = self.progress and processes.is_first()
        torch.manual_seed(derive_seed("trunk", self.seed))
        with self.accelerator.autocast():
            self.model.remember(
                progress_bar(self._remembered(), description="trunk", enabled=shown)
            )
        super()._run_epochs()

    def _remembered(self) -> Iterable[Any]:
        """Return the batches whose trunk states are cached, in a fixed order."""
        in_order = Stream(self.stream.data, seed=self.seed, shuffle=False)
        return chain(in_order.epoch(0), () if self.outliers is None else self.outliers.stream.data)

    def _loss(self, batch: Any, part: int) -> Tensor:
        loss = super()._loss(batch, part)
        if self.outliers is None:
            return loss
        outliers, share = self._part(self.outliers.at(self.step), part)
        if not share:
            return loss
        return loss + share * self.settings.outlier_weight * self._outlier_loss(outliers)

    def _outlier_loss(self, batch: Any) -> Tensor:
        answers = self.wrapped(batch).float().log_softmax(-1)
        kl = -answers.mean(-1) - math.log(answers.shape[-1])  # KL(uniform || answer)
        return self._weighted(kl, batch).mean()

    def _data_loss(self, batch: Any) -> Tensor:
        task = task_of(self.model.ensemble)
        logits, labels = logits_and_labels(self.wrapped, batch, task)
        members = logits.shape[1]
        if task.by_token or not task.classifies:
            return self._weighted(
                torch.stack([task.losses(m, labels) for m in logits.unbind(1)], 1), batch
            ).mean()
        losses = F.cross_entropy(
            logits.transpose(1, 2),
            labels[..., None].expand(*labels.shape, members),
            reduction="none",
            label_smoothing=self.settings.label_smoothing,
        )
        share = self.settings.distill
        if share:
            assert self.teacher is not None  # what the ensemble predicted before training
            teacher, keys = self.teacher.to(self.accelerator.device), keys_of(batch)
            if any(key not in self._targets for key in keys):
                with torch.no_grad():
                    said = teacher.ensemble.calibrated(teacher.member_logits(batch).float())
                self._targets.update(zip(keys, said.softmax(-1).mean(1).cpu(), strict=True))
            soft = torch.stack([self._targets[key] for key in keys]).to(logits.device)
            soft_losses = -(soft[:, None] * logits.log_softmax(-1)).sum(-1)
            losses = (1 - share) * losses + share * soft_losses
        return self._weighted(losses, batch).mean()

    def _weighted(self, losses: Tensor, batch: Any) -> Tensor:
        if not self.settings.bootstrap:
            return losses
        weights = bootstrap_weights(batch["samples"], losses.shape[1], self.seed)
        return losses * weights.to(losses)


def bootstrap_weights(samples: Tensor, members: int, seed: int) -> Tensor:
    """Draw w ~ Poisson(1) [samples, members], a pure function of the seed and sample number."""
    one = torch.ones(members)
    draws = [
        torch.poisson(one, generator=generator("bootstrap", seed, i)) for i in samples.tolist()
    ]
    return torch.stack(draws)
