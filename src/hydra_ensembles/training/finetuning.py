"""`finetune`: train a host, pruned members or rivals, each on its own seed."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import HydraError, MissingDependencyError
from .loop import FinetunedMember, Run, Settings, StepInfo
from .stream import Stream

ParameterChoice = str | Callable[[str, nn.Parameter], bool] | None

__all__ = ["FinetunedMember", "StepInfo", "finetune"]


def finetune(
    model_or_members: nn.Module | Sequence[nn.Module],
    data: Iterable[Any],
    *,
    epochs: int = 1,
    learning_rate: float = 5e-5,
    seed: int | Sequence[int] = 0,
    parameters: ParameterChoice = None,
    label_smoothing: float = 0.0,
    towards_host: float = 0.0,
    bootstrap: bool = False,
    shuffle: bool = True,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
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
) -> list[FinetunedMember]:
    """Fine-tune copies of classifiers with AdamW and a linear schedule.

    One model and a list of seeds give the members of a Deep Ensemble (Lakshminarayanan et al.,
    2017); a list of pruned members trains each on its own seed. The result depends on the
    arguments alone, not on global random state, and a run that was stopped and resumed from
    `folder` ends with bit-identical weights (on the same machine, with the same threads). Random
    augmentations take part if they draw from torch's generator.

    Objective of a member: loss(logits, labels) + towards_host / 2 * sum (w - w_start)^2, the
    second term as in L2-SP (Li, Grandvalet and Davoine, 2018).

    Args:
        model_or_members: A classifier, or one per member. Anything that returns logits `[B, C]`
            or member logits `[B, M, C]` (the loss is then the members' mean), bare or as `.logits`.
        data: Re-iterable batches: dicts with `labels`, or `(inputs, labels)`. Labels are class
            numbers `[B]` or probabilities `[B, C]`: a teacher's answers, to distil it. A list of
            batches of equal shapes is shuffled by sample, other lists by batch, a `DataLoader` by
            its data set; anything else keeps its own order (see `Stream`).
        epochs: Passes over the data.
        learning_rate: Peak of the schedule.
        seed: One number, or one per member. Members of a list get `seed`, `seed + 1`, ... .
        parameters: What is trained: a regular expression searched in the parameters' names, or a
            function `(name, parameter) -> bool`; None trains all that require gradients.
        label_smoothing: Share of the label given to all classes, for the default loss.
        towards_host: Strength of the pull towards the starting weights.
        bootstrap: Whether each member resamples the data with its seed.
        shuffle: Whether to shuffle at all.
        loss: Replaces cross-entropy: `(logits [B, M, C], labels) -> scalar`; M is 1 for a
            plain classifier.
        warmup: Share of the steps in which the learning rate rises.
        weight_decay: Decoupled decay of matrices (not of biases and norms).
        max_grad_norm: Gradients are clipped to this norm; None for no limit.
        mixed_precision: "no", "bf16" or "fp16".
        validation: Data for NLL and accuracy after each epoch.
        keep: "last" weights, or the "best" epoch's by validation NLL.
        folder: Where checkpoints go, one sub-folder a member. Start again with the same arguments
            to resume. Nothing is pickled.
        save_every: Steps between checkpoints; epochs are always saved.
        progress: Whether to show a bar on a terminal.
        on_step: Called after each step with a `StepInfo`.

    Returns:
        One `FinetunedMember` for each member, with the trained `model` in evaluation mode.
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
    )
    if keep == "best" and validation is None:
        raise ValueError('keep="best" needs validation data: pass validation=..., or keep="last".')
    members = _members_and_seeds(model_or_members, seed)
    trained = []
    for index, (model, member_seed) in enumerate(members):
        with _accelerator(mixed_precision) as accelerator:
            run = Run(
                model=copy.deepcopy(model),
                stream=Stream(data, seed=member_seed, shuffle=shuffle, bootstrap=bootstrap),
                settings=settings,
                seed=member_seed,
                member=index,
                is_trained=_chooser(parameters),
                loss=loss,
                validation=validation,
                folder=None if folder is None else Path(folder) / f"member-{index}",
                save_every=save_every,
                progress=progress,
                on_step=on_step,
                accelerator=accelerator,
            )
            trained.append(run.train())
    return trained


def _members_and_seeds(
    model_or_members: nn.Module | Sequence[nn.Module], seed: int | Sequence[int]
) -> list[tuple[nn.Module, int]]:
    if isinstance(model_or_members, nn.Module):
        seeds = [seed] if isinstance(seed, int) else list(seed)
        models = [model_or_members] * len(seeds)
    else:
        models = list(model_or_members)
        seeds = [seed + i for i in range(len(models))] if isinstance(seed, int) else list(seed)
    if len(seeds) != len(models) or not models:
        raise ValueError(
            f"There are {len(models)} members but {len(seeds)} seeds. "
            "Give one seed for each member, or a single number."
        )
    return list(zip(models, seeds, strict=True))


def _chooser(parameters: ParameterChoice) -> Callable[[str, nn.Parameter], bool]:
    if parameters is None:
        return lambda name, parameter: parameter.requires_grad
    if callable(parameters):
        return parameters
    pattern = re.compile(parameters)
    return lambda name, parameter: pattern.search(name) is not None


@contextlib.contextmanager
def _accelerator(mixed_precision: str) -> Iterator[Any]:
    """Yield an `Accelerator`, leaving accelerate's process-wide state as it was found."""
    try:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState
    except ImportError as error:
        raise MissingDependencyError(
            "Fine-tuning needs accelerate. Install it with: pip install 'hydra-ensembles[train]'."
        ) from error
    known = ("no", "bf16", "fp16")
    if mixed_precision not in known:
        raise ValueError(f"mixed_precision is {mixed_precision!r}, but must be one of {known}.")
    # the precision is fixed for the whole process once a state exists: never touch a user's own
    foreign = AcceleratorState._shared_state.get("_mixed_precision")
    if foreign is not None and foreign != mixed_precision:
        raise HydraError(
            f"This process already runs accelerate with mixed_precision={foreign!r}, "
            f"but {mixed_precision!r} was asked for. Pass mixed_precision={foreign!r}."
        )
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield Accelerator(mixed_precision=mixed_precision)
    finally:
        if foreign is None:
            AcceleratorState._reset_state()
