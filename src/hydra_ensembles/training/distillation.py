"""`distill`: one teacher per member, into one fused model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .._records import SEAL, check_same_run, read_sealed, sealed, write_whole
from .._tensors import model_fingerprint
from ..costs.budget import budgeted_masks, counter_of, fit_budget
from ..costs.formula import cost
from ..criteria import Criterion, score_heads
from ..data import processes
from ..data.batches import batch_length, labels_of, take
from ..data.class_names import check_class_order
from ..data.eval_mode import evaluating
from ..data.loaders import check_reiterable, count
from ..data.memory import in_plain_words
from ..data.model_runs import check_data, collect_logits, expect_batches, member_logits
from ..data.progress import length_of
from ..data.splits import fingerprint, split
from ..errors import DataError, HydraError, MaskError, check_number
from ..evaluation.cross_fit import fit_answer
from ..fusion.ensemble import HydraEnsemble
from ..fusion.fuse_members import fuse
from ..heads.head_mask import HeadMask
from ..hosts import HostModel, host_model
from ..hosts.host_data import data_for, sets_for
from ..registry import check_name
from ..tasks import Embedding, Task
from .accelerator import accelerator
from .branch_run import BranchRun
from .finetune_run import TRAINING_PASSES
from .loop import StepInfo
from .sample_order import Stream, generator, keys_of
from .settings import DISTILL, Settings
from .teacher_answers import TeacherLogits, assign
from .teacher_losses import check_labels, taught_losses
from .teachers import Teacher, read_teachers
from .trunk_cache import CachedTrunk, folded_start, untied
from .views import DistillationData

RUN_FILE = "distill.json"
"""File in the run's folder that records what the run is made of."""

HELD_OUT = 0.1
KNOWN = 100
"""Fewest validation examples to fit novelty on; with fewer, the training data is used."""


@in_plain_words()
@processes.holds("folder")
def distill(
    model: nn.Module | HostModel,
    teachers: Any,
    data: Any,
    *,
    members: int = 3,
    max_cost: float = 1.07,
    masks: Sequence[HeadMask] | None = None,
    branch_layer: int | None = None,
    criterion: str | Criterion = "magnitude",
    at_most: float = 0.5,
    own_mlps: bool = False,
    start: Literal["host", "folded"] = "host",
    ood: Any = "auto",
    validation: Any = None,
    settings: Settings = DISTILL,
    epochs: int | None = None,
    learning_rate: float | None = None,
    seed: int = 0,
    calibrate: bool = True,
    novelty: bool = True,
    folder: str | Path | None = None,
    cache_bytes: int = 2 * 2**30,
    save_every: int = 200,
    progress: bool = True,
    on_step: Callable[[StepInfo], None] | None = None,
) -> HydraEnsemble:
    """Distil teachers into one fused model: member m learns teacher m's own probabilities.

    Members that share one loss, or learn the mean of an ensemble, agree almost everywhere. Here
    each member has its own teacher and its own loss,

        L = sum_m E_x [-sum_c q_m(c | x) log p_m(c | x)],

    never only that of the mean (Tran et al., 2020, arXiv 2001.04694; arXiv 2301.11323;
    `Settings.joint` adds a share of it). The loss runs over lightly augmented data, and over
    variants of it whose label is destroyed, where teachers disagree most. Labels are not needed.

    The teachers answer first, one after another, and their answers are saved in `folder`; then the
    members train. A run that was stopped and is started again with the same arguments ends with
    bit-identical weights. Under `torchrun` or `accelerate launch` the processes share each batch
    (`Settings.parts`); call `distill` in all of them.

    Args:
        model: The host: the trunk and every member start from its weights, unless `start` says
            otherwise. It is not changed.
        teachers: One teacher, or a list. A teacher is a model; an ensemble, whose members all
            teach; a callable, called as the host is, that returns logits or probabilities (a
            resumed run identifies it only by its position and name); a table of probabilities
            `[example, class]` in the data's order (a tensor, an array, a `.npy` or `.safetensors`
            file); a path to a checkpoint of a `finetune` run of this model, or to a folder of
            `save_pretrained`, which is opened when its turn comes. With as many teachers as
            members, each member has one; with more, member m learns from the mean of teachers m,
            m + M, m + 2 M, ... (one member: the mean of all); with fewer, from teacher m mod T.
        data: Batches with or without labels, the same at each pass: a list of batches, a
            `DataLoader` over a map-style data set or what `load_data` returns.
        members: Number of members M. One gives a single student.
        max_cost: Bound on counted multiply-adds relative to the plain host: it decides where
            members branch and how many heads each keeps.
        masks: The members' heads, instead of those that the budget and `criterion` choose.
        branch_layer: The block at which members branch, instead of the one the budget chooses.
        criterion: Scores the heads that members take turns to pick; all but `magnitude` and
            `random` need labelled data.
        at_most: Largest share of a branched block's heads that a member keeps, where the budget
            would allow more.
        own_mlps: Whether members also own the MLPs above the branch. They run one by one anyway, so
            copies cost memory, not arithmetic.
        start: `"host"`, members start as the host with their heads; or `"folded"`, as
            `fold(teachers, data)`, one fine-tuning of the host per member. Members then keep all
            heads and share them, so that `masks` and the options on heads do not apply.
        ood: Unlabelled inputs on which to learn the teachers' answers: `"auto"` for variants of the
            data whose label is destroyed; batches, or batches by family; or None.
        validation: Labelled data for the temperature, and for each epoch's NLL when the best epoch
            is kept (`Settings.keep`). By default a tenth of the data is held out if it has labels;
            without labels nothing is calibrated.
        settings: How to train; see `Settings`. Start from the defaults: `replace(DISTILL, ...)`.
        epochs, learning_rate: Override the fields of `settings`.
        seed: Determines the order, the views, dropout and what is held out.
        calibrate: Fit a temperature on validation data, and more where its gain is clear.
        novelty: Fit novelty (`fit_novelty_`), on the validation data if it has a hundred examples,
            otherwise on the training data.
        folder: Where answers and checkpoints go.
        cache_bytes: Memory for outputs of a frozen trunk.
        save_every: Steps between checkpoints.
        progress: Show bars on a terminal.
        on_step: Called after each step with a `StepInfo`.

    Returns:
        The ensemble in evaluation mode; `.record` says what was done.

    Example:
        >>> student = distill(model, [first, second, third], train, folder="runs/student")
        >>> student.predict(batch).mutual_information
    """
    check_number("members", members, least=1, whole=True)
    check_number("max_cost", max_cost, above=0)
    settings = settings.updated(epochs, learning_rate)
    # epoch e sees view e mod views: teachers are not asked for views that no epoch sees
    settings = replace(settings, views=min(settings.views, settings.epochs))
    if not settings.distill:
        raise ValueError(
            "distill is 0 in the settings, so no member would learn from its teacher. Start from "
            "the defaults: replace(DISTILL, ...)."
        )
    host = host_model(model)
    data = data_for(host, data)
    if validation is not None:
        validation = data_for(host, validation, name="validation")
    if isinstance(ood, Iterator):
        check_reiterable(ood, name="ood")
    if ood is not None and not isinstance(ood, str):
        ood = sets_for(host, ood, name="outliers")
    check_data(host.model, data)
    check_class_order(host.model, data, seed=seed)
    place = None if folder is None else Path(folder)
    sources = read_teachers(teachers, host.model)
    train, held_out = _parts(data, validation, seed, host.task)
    if any(teacher.table is not None for teacher in sources):
        # a table covers the data itself: no other view, no outliers
        if validation is None and held_out is not None:
            train, held_out = data, None
        ood = None if isinstance(ood, str) and ood == "auto" else ood
        if ood is not None:
            raise DataError("A table of probabilities does not answer ood data: pass ood=None.")
        settings = replace(settings, views=1)
    if ood is None:
        settings = replace(settings, outlier_weight=0.0)
    settings.check_validation(held_out)
    batch = _first_batch(train)
    if settings.distill < 1 and host.task.classifies:
        check_labels(labels_of(batch), settings.distill)
    views = settings.views if settings.augment else 1
    passes = len(sources) * views + TRAINING_PASSES * settings.epochs
    batches = passes * (2 if ood is not None else 1) * (length_of(train) or 0)
    expect_batches(host.model, train, batches, "distilling", enabled=progress)
    if start == "folded":
        if masks is not None or branch_layer is not None or own_mlps:
            raise ValueError('start="folded" has no masks, no branch_layer and no own_mlps.')
        begun = folded_start(
            teachers, train, members=members, max_cost=max_cost, seed=seed, progress=progress
        )
    else:
        check_name("start", start, ("host", "folded"))
        chosen_masks = masks
        if masks is None and members > 1:
            chosen_masks = budgeted_masks(
                counter_of(host, batch),
                score_heads(host, train, criterion=criterion, progress=progress),
                members=members,
                max_cost=max_cost,
                batch=batch,
                branch_layer=branch_layer,
                at_most=at_most,
                untied=True,
            )
        begun = _start(host, batch, members, max_cost, chosen_masks, branch_layer, own_mlps)
    ratio = cost(begun, batch).relative_to(cost(host.model, batch)).multiply_adds
    if start == "host" and masks is None and ratio > max_cost + 1e-6:
        raise MaskError(f"The members cost {ratio:.3f} x, more than max_cost={max_cost}.")
    training_data = DistillationData(train, ood, settings, seed=seed)
    if place is not None:
        processes.on_first(lambda: _check_folder(place, training_data, sources, begun, settings))
    folded = begun.record  # empty without folding
    trained = CachedTrunk(begun, cache_bytes, frozen=settings.trunk_rate == 0)
    trunk_names = {n for n, p in trained.named_parameters() if not p.requires_grad}
    if settings.trunk_rate:
        trained.requires_grad_(True)
    with evaluating(begun):
        classes = member_logits(begun, batch).shape[-1]
    with accelerator(settings.mixed_precision) as group:
        answers = TeacherLogits(
            sources,
            training_data.sets.values(),
            classes=classes,
            folder=None if place is None else place / "answers",
            progress=progress,
        )
        shares = assign(answers.teachers, members)
        result = DistillRun(
            model=trained,
            stream=Stream(training_data.sets["data"].source, seed=seed, shuffle=settings.shuffle),
            settings=settings,
            seed=seed,
            accelerator=group,
            validation=held_out if settings.keep == "best" else None,
            folder=place,
            save_every=save_every,
            progress=progress,
            on_step=on_step,
            action="distil",
            outliers=training_data.outlier_cycle(),
            training_data=training_data,
            answers=answers,
            shares=shares,
            task=begun.task,
            slow=frozenset(trunk_names),
        ).train()
    ensemble = trained.ensemble.eval()
    ensemble.record = {
        "made_by": "distill",
        "settings": asdict(settings),
        "seed": seed,
        "teachers": [teacher.name for teacher in sources],
        "shares": shares.tolist(),
        "examples": {name: examples.count for name, examples in training_data.sets.items()},
        "outliers": training_data.kinds,
        "masks": [mask.tolist() for mask in ensemble.masks],
        "cost": ratio,
        "training": result.to_dict(),
        **({"fold": folded} if folded else {}),
    }
    if calibrate and held_out is not None and ensemble.task.calibrators:
        logits, labels = collect_logits(ensemble, held_out, name="validation", need_labels=True)
        assert labels is not None
        fitted, ensemble.record["calibration"] = fit_answer(ensemble.task, logits, labels)
        ensemble.temperature, ensemble.calibrator = fitted.temperature, fitted.calibrator
    if novelty:
        enough = held_out is not None and count(held_out) >= KNOWN
        ensemble.fit_novelty_(held_out if enough else train, progress=progress)
    return ensemble


def _first_batch(data: Any) -> Any:
    """Return the first batch, after checking that a second pass over the data starts with it."""
    first, again = next(iter(check_reiterable(data)), None), next(iter(data), None)
    if first is None:
        raise DataError("The data has no batches. Check the loader or the filter.")
    if fingerprint([first]) != fingerprint([again]):
        raise DataError(
            "The data differs when it is read again (random augmentation or a shuffling loader?), "
            "but the teachers' answers belong to fixed examples. Pass the data without either: "
            "distill makes its own views."
        )
    return first


def _parts(data: Any, validation: Any, seed: int, task: Task) -> tuple[Any, Any]:
    """Return training and validation data; by default a tenth of labelled data is held out."""
    if validation is not None:
        return data, validation
    first = next(iter(check_reiterable(data)), None)
    labels = None if first is None else labels_of(first)
    if labels is None or (task.classifies and labels.is_floating_point()):
        return data, None
    if not isinstance(data, (list, tuple)):
        both = split(data, {"train": 1 - HELD_OUT, "held": HELD_OUT}, seed=seed)
        return both["train"], both["held"]
    kept, held_out = [], []  # split batch by batch: each keeps its own padding
    for place, batch in enumerate(data):
        order = torch.randperm(batch_length(batch), generator=generator("held", seed, place))
        share = round(HELD_OUT * (place + 1) * len(order)) - round(HELD_OUT * place * len(order))
        if 0 < share < len(order):
            held_out.append(take(batch, order[:share].sort().values.tolist()))
        kept.append(take(batch, order[share:].sort().values.tolist()))
    return kept, held_out or None


def _start(
    host: HostModel,
    batch: Any,
    members: int,
    max_cost: float,
    masks: Sequence[HeadMask] | None,
    branch_layer: int | None,
    own_mlps: bool,
) -> HydraEnsemble:
    """Return the fused model that will be trained, its members untied."""
    task = host.task
    if task.by_token or task.ragged or isinstance(task, Embedding):
        raise HydraError(
            f"{host.name} is made for {task.title}, which has more than one answer per input. "
            "Fine-tune it (finetune), fold fine-tuned hosts (fold), or distil a model of classes, "
            "labels or numbers."
        )
    if masks is not None and len(masks) != members:
        raise MaskError(f"{len(masks)} masks for {members} members: give one per member.")
    if masks is None:  # a single student keeps all heads and trains the blocks three would own
        masks = [HeadMask.full(host)]
        if branch_layer is None:
            option = fit_budget(host, members=3, max_cost=max_cost, batch=batch, untied=True)
            branch_layer = option.branch_layer
    if len(set(masks)) < members:
        raise MaskError(
            f"Only {len(set(masks))} of {members} members have heads of their own, and equal "
            "members stay equal. Take fewer members, a lower branch_layer or a higher max_cost."
        )
    ensemble = fuse(host.model, masks, branch_layer=branch_layer)
    return untied(ensemble, mlps=own_mlps and members > 1)


def _check_folder(
    folder: Path,
    training_data: DistillationData,
    teachers: Sequence[Teacher],
    start: HydraEnsemble,
    settings: Settings,
) -> None:
    """Write what the run is made of into its folder; raise if the folder holds another run."""
    now = {
        "settings": asdict(settings),
        "seed": training_data.seed,
        "teachers": [teacher.identify() for teacher in teachers],
        "start": model_fingerprint(start),
        "data": fingerprint(training_data.sets["data"].batches(0)),
        "outliers": training_data.kinds
        if training_data.made or "outliers" not in training_data.sets
        else fingerprint(training_data.sets["outliers"].batches(0)),
    }
    path = folder / RUN_FILE
    if path.exists():
        advice = f"Delete {folder} to start again, or give another folder."
        saved = read_sealed(path, "the record of a distillation", advice)
        saved.pop(SEAL, None)
        check_same_run(path, saved, now)
    else:
        write_whole(path, json.dumps(sealed(now), indent=1))


@dataclass
class DistillRun(BranchRun):
    """A run in which every member has its own teacher."""

    training_data: DistillationData = field(kw_only=True)
    answers: TeacherLogits = field(kw_only=True)
    shares: Tensor = field(kw_only=True)
    task: Task = field(kw_only=True)
    slow: frozenset[str] = field(kw_only=True)

    def _rate_of(self, name: str) -> float:
        return self.settings.trunk_rate if name in self.slow else 1.0

    def _remembered(self) -> Iterable[Any]:
        sets = self.training_data.sets.values()
        return chain.from_iterable(examples.numbered_views() for examples in sets)

    def _data_loss(self, batch: Any) -> Tensor:
        return self._taught("data", self.epoch, batch)

    def _outlier_loss(self, batch: Any) -> Tensor:
        assert self.outliers is not None
        return self._taught("outliers", self.outliers.turn(self.step), batch)

    def _taught(self, name: str, turn: int, batch: Any) -> Tensor:
        """Return the members' mean loss against their teachers on a view of a batch."""
        examples, samples = self.training_data.sets[name], batch["samples"]
        view, temperature = turn % examples.views, self.settings.teacher_temperature
        target = self.answers.rows(name, view, samples).to(self.accelerator.device)
        if self.task.classifies:
            target = target / temperature
        target = self.task.target(target)  # [batch, teacher, class], or labels, or numbers
        target = torch.einsum("mt,btc->bmc", self.shares.to(target), target)
        shown = {**batch, "samples": examples.numbers(view, samples)}
        if not self.model.knows(keys_of(shown)):
            shown["batch"] = examples.view_of(view, batch)
        logits = self.wrapped(shown).float()
        return self._weighted(self._losses(name, target, logits, batch), shown).mean()

    def _losses(self, name: str, target: Tensor, logits: Tensor, batch: Any) -> Tensor:
        """Return each member's loss, `[batch, member]`; outliers have no labels."""
        labels = batch["labels"] if name == "data" else None
        if name == "data" and labels is None and self.settings.distill < 1:
            check_labels(labels, self.settings.distill)
        return taught_losses(self.task, self.settings, target, logits, labels)
