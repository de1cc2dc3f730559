"""`finetune`: train a host, pruned members or baselines, each with its own seed."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..data import processes
from ..data.model_runs import check_data, expect_batches
from ..data.progress import length_of
from ..hosts.host import check_model
from ..hosts.host_data import data_for
from .accelerator import accelerator
from .loop import FinetunedMember, Run, StepInfo
from .sample_order import Stream
from .settings import FINETUNE, Settings

TRAINING_PASSES = 3
"""What a step of training costs, in passes without gradients."""
ParameterChoice = str | Callable[[str, nn.Parameter], bool] | None


@processes.holds("folder")
def finetune(
    model_or_members: nn.Module | Sequence[nn.Module],
    data: Iterable[Any],
    *,
    settings: Settings = FINETUNE,
    epochs: int | None = None,
    learning_rate: float | None = None,
    seed: int | Sequence[int] = 0,
    parameters: ParameterChoice = None,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    validation: Iterable[Any] | None = None,
    folder: str | Path | None = None,
    save_every: int = 200,
    progress: bool = True,
    on_step: Callable[[StepInfo], None] | None = None,
) -> list[FinetunedMember]:
    """Fine-tune copies of classifiers with AdamW and a linear schedule.

    One model and a list of seeds give the members of a Deep Ensemble (Lakshminarayanan et al.,
    2017); a list of pruned members trains each with its own seed. The result depends only on the
    arguments, not on global random state, and a run that was stopped and resumed from `folder` ends
    with bit-identical weights (on the same machine, with the same number of threads). This includes
    random augmentations that draw from torch's generator.

    Objective per member: the loss of the model's task (`hydra_ensembles.tasks`), of classes the
    cross-entropy: loss(logits, labels) + towards_host / 2 * sum (w - w_start)^2, the second
    term as in L2-SP (Li, Grandvalet and Davoine, 2018).

    Args:
        model_or_members: A classifier, or one per member. Anything that returns logits `[B, C]`
            or member logits `[B, M, C]` (the loss is then the members' mean), bare or as `.logits`.
        data: Re-iterable batches: dicts with `labels`, or `(inputs, labels)`. Labels are as the
            task has them: class numbers `[B]` or probabilities `[B, C]` (a teacher's answers),
            labels of 0 and 1 `[B, L]`, numbers, tags `[B, T]`, spans. A list
            of batches of equal shapes is shuffled by sample, other lists by batch, a `DataLoader`
            by its data set; anything else keeps its own order (see `Stream`).
        settings: How to train; see `Settings`.
        epochs, learning_rate: Override the fields of `settings`.
        seed: One number, or one per member. Members of a list get `seed`, `seed + 1`, ... .
        parameters: What is trained: a regular expression searched in the parameters' names, or a
            function `(name, parameter) -> bool`; None trains all parameters that require gradients.
        loss: Replaces the task's loss: `(logits [B, M, C], labels) -> scalar`; M is 1 for a
            plain classifier.
        validation: Data for NLL and accuracy after each epoch.
        folder: Where checkpoints go, one sub-folder per member. Start again with the same arguments
            to resume. Nothing is pickled.
        save_every: Steps between checkpoints; epochs are always saved.
        progress: Whether to show a bar on a terminal.
        on_step: Called after each step with a `StepInfo`.

    Returns:
        One `FinetunedMember` per member, with the trained `model` in evaluation mode.

    Example:
        >>> members = finetune(model, train, epochs=3, seed=[0, 1, 2], folder="runs/members")
        >>> student = distill(model, [member.model for member in members], train)
    """
    settings = settings.updated(epochs, learning_rate)
    settings.check_validation(validation)
    if isinstance(model_or_members, nn.Module):
        seeds = [seed] if isinstance(seed, int) else list(seed)
        models = [model_or_members] * len(seeds)
    else:
        models = list(model_or_members)
        for model in models:
            check_model(model)
        seeds = [seed + i for i in range(len(models))] if isinstance(seed, int) else list(seed)
    if len(seeds) != len(models) or not models:
        raise ValueError(
            f"There are {len(models)} members but {len(seeds)} seeds. "
            "Give one seed per member, or a single number."
        )

    def is_trained(name: str, parameter: nn.Parameter) -> bool:
        if callable(parameters):
            return parameters(name, parameter)
        return parameter.requires_grad if parameters is None else bool(re.search(parameters, name))

    data = data_for(models[0], data, name="training")
    if validation is not None:
        validation = data_for(models[0], validation, name="validation")
    batches = TRAINING_PASSES * settings.epochs * len(models) * (length_of(data) or 0)
    expect_batches(models[0], data, batches, "fine-tuning", enabled=progress)
    trained = []
    for index, (model, member_seed) in enumerate(zip(models, seeds, strict=True)):
        check_data(model, data)
        with accelerator(settings.mixed_precision) as group:
            run = Run(
                model=copy.deepcopy(model),
                stream=Stream(
                    data, seed=member_seed, shuffle=settings.shuffle, bootstrap=settings.bootstrap
                ),
                settings=settings,
                seed=member_seed,
                accelerator=group,
                member=index,
                is_trained=is_trained,
                loss=loss,
                validation=validation,
                folder=None if folder is None else Path(folder) / f"member-{index}",
                save_every=save_every,
                progress=progress,
                on_step=on_step,
                action="fine-tune" if len(models) == 1 else f"fine-tune member {index}",
            )
            trained.append(run.train())
    return trained
