"""Run any classifier over any data: batches in, member logits `[batch, member, class]` out.

A *model* is anything that is called on a batch and returns a tensor, an object or mapping with
`logits`, or that has `predict(batch) -> Prediction`.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import DataError, HydraError, UnsupportedModelError
from ..prediction import Prediction
from ..tasks import IGNORED, MultiClass, Task, task_of
from ..uncertainty import as_member_logits
from .batches import check_inputs, describe, main_output, move, refused_inputs, split_batch
from .eval_mode import evaluating
from .memory import Halving
from .padding import joined_rows
from .processes import in_order
from .progress import expect, expects, length_of, progress_bar

_CLASSES = MultiClass()
FAILED = "failed on its inputs"
NO_LABELS = "Give batches as (inputs, labels) or as mappings with 'labels'."


class ModelRun(NamedTuple):
    """What a model gave on one batch, on the CPU, with the batch's labels.

    Attributes:
        logits: The members' logits, `[batch, member, class]`.
        labels: `[batch]`, or None.
        novelty, novelty_score: As in `Prediction`, `[batch]`; None when novelty is not fitted.
        code: As in `Prediction`, `[batch]`; None without a policy.
        student_logits: As in `Prediction`, `[batch, class]`; None without a student.
        sigma: As in `RegressionPrediction`; None where it is not fitted.
        text: Where examples are tokens: the text of each in the batch, `[token]`.
        covered: What share of what is true is in the set, `[batch]`; None without sets or labels.
        set_size: Classes, labels or spans in the set, or the width of the interval, `[batch]`.
    """

    logits: Tensor
    labels: Tensor | None
    novelty: Tensor | None = None
    novelty_score: Tensor | None = None
    code: Tensor | None = None
    student_logits: Tensor | None = None
    sigma: Tensor | None = None
    text: Tensor | None = None
    covered: Tensor | None = None
    set_size: Tensor | None = None

    @property
    def answering_logits(self) -> Tensor:
        """Logits behind the probabilities, `[batch, member, class]`; a student is one member."""
        return self.logits if self.student_logits is None else self.student_logits[:, None]


def check_data(model: Any, data: Any) -> None:
    """Raise when a host says that data is not made for it (`PromptClassifier.check_data`)."""
    check = getattr(getattr(model, "host", model), "check_data", None)
    if callable(check):
        check(data)


def device_of(model: Any) -> torch.device | None:
    """Return the device of a module's first parameter or buffer; None when it has neither."""
    if isinstance(model, nn.Module):
        for tensors in (model.parameters(), model.buffers()):
            for tensor in tensors:
                return tensor.device
    return None


def call_model(model: Callable[..., Any], batch: Any, *, device: Any = None) -> Any:
    """Call a model on a batch without its labels, on the model's device; return its raw output."""
    args, kwargs, _ = split_batch(batch)
    where = device_of(model) if device is None else device
    args, kwargs = move(args, where), move(kwargs, where)
    try:
        return model(*args, **kwargs)
    except Exception as error:
        raise refused_inputs(model, batch, error) from error


def expect_batches(
    model: Any, data: Iterable[Any], batches: float, what: str, *, enabled: bool = True
) -> None:
    """Say how long work will take that costs as much as some batches through a model.

    One batch is timed, if somebody wants to know (`expects`).

    Args:
        model, data: The model, and data whose first batch is timed.
        batches: How many such batches the work costs; 0 where that is not known.
        what: Name of the work.
        enabled: Whether progress is reported at all.
    """
    if not expects(enabled) or not batches or isinstance(data, Iterator):
        return
    try:
        with evaluating(model), torch.no_grad(), torch.random.fork_rng(devices=[]):
            batch = next(iter(data))
            start = time.perf_counter()
            call_model(model, batch)
            seconds = time.perf_counter() - start
    except (HydraError, StopIteration):  # the work itself says what is wrong
        return
    expect(what, seconds * batches, enabled=enabled)


def output_of(model: Callable[..., Any], batch: Any) -> Tensor:
    """Call a host on a batch without its labels; return what its task reads, `[batch, ...]`."""
    return main_output(call_model(model, batch), task_of(model).fields)


def member_outputs_of(output: Any, task: Task) -> Tensor:
    """Find the members' outputs `[batch, member, ...]` in what a model returned.

    Reads `member_logits` of an object or a mapping, else what the task reads in an output; that of
    one model is one member.
    """
    if isinstance(output, Prediction):
        members: Tensor = output.member_outputs
        return members
    held = output.get("member_logits") if isinstance(output, Mapping) else None
    held = getattr(output, "member_logits", None) if held is None else held
    if not isinstance(held, Tensor):
        try:
            held = main_output(output, task.fields)
        except UnsupportedModelError as error:
            raise DataError(
                f"The model returned a {type(output).__name__}; expected a tensor [batch, class] "
                f"or [batch, member, class], or something with what {task.title} reads. {error}"
            ) from None
    return task.member_outputs(held)


def member_logits_of(output: Any) -> Tensor:
    """Find member logits `[batch, member, class]` in a model's output (see `member_outputs_of`)."""
    return as_member_logits(member_outputs_of(output, _CLASSES))


def member_logits(model: Any, batch: Any, *, device: Any = None) -> Tensor:
    """Return a model's member logits on a batch, `[batch, member, class]`.

    `predict` is preferred when it returns a `Prediction`: only there does an ensemble apply its
    temperatures.

        member_logits(ensemble, {"pixel_values": images}).softmax(-1).mean(1)
    """
    return member_outputs_of(_answer(model, batch, device), task_of(model))


def answering_logits(model: Any, batch: Any) -> Tensor:
    """Return the logits behind a model's probabilities, `[batch, member, class]`.

    They are `member_logits`, but a student, which answers for the members, is one member.
    """
    answer = _answer(model, batch, None)
    if isinstance(answer, Prediction):
        outputs: Tensor = answer.answering_outputs
        return outputs
    return member_outputs_of(answer, task_of(model))


def _answer(model: Any, batch: Any, device: Any) -> Any:
    """Return the model's `Prediction` on a batch if it gives one, else its raw output."""
    predict = getattr(model, "predict", None)
    if not callable(predict):
        return call_model(model, batch, device=device)
    try:
        returned = inspect.signature(predict).return_annotation
    except (TypeError, ValueError):
        returned = inspect.Signature.empty
    args, kwargs, _ = split_batch(batch)
    inputs = move(kwargs or args[0], device_of(model) if device is None else device)
    if returned in (Prediction, "Prediction") or not callable(model):
        return predict(inputs)
    if returned is inspect.Signature.empty:  # not annotated: look at what it returns
        try:
            answer = predict(inputs)
        except (TypeError, AttributeError, KeyError):  # not a predict of batches: call instead
            answer = None
        if isinstance(answer, Prediction):
            return answer
    return call_model(model, batch, device=device)


def checked(
    data: Iterable[Any],
    *,
    name: str,
    task: Task = _CLASSES,
    classes: int | None = None,
    labelled: bool = False,
) -> Iterator[Any]:
    """Yield the batches of data, checked: finite inputs and, if `labelled`, valid labels.

    Args:
        data: an iterable of batches.
        name: name of the data set in errors.
        task: what the labels mean.
        classes: number of classes, to check labels against.
        labelled: raise if labels are missing or do not fit the task.
    """
    where = f"the {name} data"
    for batch in data:
        check_inputs(batch, where)
        if labelled:
            labels = split_batch(batch)[2]
            if labels is None:
                raise DataError(f"There are no labels in {where}. {NO_LABELS}")
            task.check_labels(labels, where, size=classes)
        yield batch


def run_model(
    model: Any,
    data: Iterable[Any],
    *,
    name: str = "data",
    need_labels: bool = False,
    ignore_labels: bool = False,
    device: Any = None,
    progress: bool = False,
    classes: int | None = None,
    task: Task | None = None,
) -> Iterator[ModelRun]:
    """Yield what a model gives on every batch, checked.

    A batch that does not fit in memory is run in halves, with a warning. Several processes share
    the batches; all of them get all results, in order (`in_order`). Each token of a token
    classifier is an example; padding and tokens with label -100 are left out.

    Args:
        model: see `member_logits`.
        data: an iterable of batches, read once.
        name: name of the data set in errors.
        need_labels: raise when a batch has no labels.
        ignore_labels: do not read labels (those of another task mean nothing here).
        device: device of the inputs; by default the model's.
        progress: show a bar on a terminal.
        classes: number of classes on another data set, to compare with.
        task: what the outputs and labels mean; by default the model's own task.
    """
    check_data(model, data)
    task = task or task_of(model)
    halving = Halving(name)

    def run(part: Any) -> ModelRun:
        _, kwargs, labels = split_batch(part)
        output = _answer(model, part, device)
        logits = member_outputs_of(output, task).detach().cpu()
        labels = None if ignore_labels else labels
        text = None
        if task.by_token and labels is not None:
            place = torch.arange(len(logits)).reshape(-1, 1, 1, 1)
            place = place.expand(-1, 1, logits.shape[-2], -1)
            text = task.examples(place, labels, kwargs)[0].flatten()
        given = labels
        logits, labels = task.examples(logits, labels, kwargs)
        if not isinstance(output, Prediction):
            return ModelRun(logits, labels, text=text)
        # novelty and decisions are of texts; where the examples are tokens, they do not apply
        sigma = getattr(output, "sigma", None)
        columns = (output.novelty, output.novelty_score, output.code, output.student_outputs, sigma)
        fitting = (None if c is None or len(c) != len(logits) else c.cpu() for c in columns)
        more = _set_columns(output, given, task)
        return ModelRun(logits, labels, *fitting)._replace(text=text, **more)

    def work(index: int, batch: Any) -> dict[str, Tensor]:
        where = f"batch {index} of the data set {name!r}"
        try:
            check_inputs(batch, where)
            parts = [part for _, part in halving(run, batch)]
        except DataError as error:
            if error.__cause__ is not None and FAILED in str(error):
                raise refused_inputs(model, batch, error.__cause__, where) from error.__cause__
            if where in str(error) or f"data set {name!r}" in str(error):
                raise
            raise DataError(f"In {where}: {error}") from error
        except HydraError:
            raise
        except Exception as error:
            raise DataError(
                f"The model failed on {where} ({describe(batch)}): {error}. Every data set must be "
                "prepared as the model expects it."
            ) from error
        for before, after in pairwise(range(len(parts))):  # texts of halves have other numbers
            last, here = parts[before].text, parts[after].text
            if last is not None and here is not None and len(last):
                parts[after] = parts[after]._replace(text=here + last[-1] + 1)
        columns = dict(zip(ModelRun._fields, zip(*parts, strict=True), strict=True))
        missing = [key for key, values in columns.items() if any(v is None for v in values)]
        return {key: torch.cat(columns[key]) for key in columns if key not in missing}

    shape: torch.Size | None = None
    labelled: bool | None = None
    results = in_order(data, work, name=name)
    bar = progress_bar(results, description=name, enabled=progress, total=length_of(data))
    with torch.no_grad() if getattr(model, "keeps_modes", False) else evaluating(model):
        for index, columns in enumerate(bar):
            where = f"batch {index} of the data set {name!r}"
            result = ModelRun(**{"labels": None, **columns})
            logits, labels = result.logits, result.labels
            # a class may be masked with -inf, but every row needs a finite maximum
            bad = ~(logits.amax(-1).isfinite() & result.answering_logits.amax(-1).isfinite())
            if bool(bad.any()):
                kind = "NaN" if bool(logits.isnan().any()) else "infinite values"
                raise DataError(
                    f"The model's logits hold {kind} for {int(bad.any(1).sum())} of {len(logits)} "
                    f"examples in {where}. Check the inputs (scale, missing values) and the "
                    "model's precision."
                )
            if shape is None:
                shape, labelled = logits.shape[1:], labels is not None
                if classes is not None and shape[1] != classes:
                    raise DataError(
                        f"The model gave {shape[1]} classes on the data set {name!r} but {classes} "
                        "on the in-distribution data. Both must run through the same classifier."
                    )
            elif shape != logits.shape[1:] and not task.ragged:
                raise DataError(
                    f"In {where} the model gave {logits.shape[1]} members x {logits.shape[2]} "
                    f"classes, but {shape[0]} x {shape[1]} before."
                )
            if labels is None and need_labels:
                raise DataError(f"There are no labels in {where}. {NO_LABELS}")
            if labelled != (labels is not None):
                raise DataError(
                    f"Some batches of the data set {name!r} have labels, some have none."
                )
            if labels is not None:
                if labels.ndim == 1 and len(labels) != len(logits):
                    raise DataError(f"{len(labels)} labels for {len(logits)} examples in {where}.")
                labels = task.check_labels(labels, where, size=logits.shape[-1])
            yield result._replace(labels=labels)
    if shape is None:
        raise DataError(
            f"The data set {name!r} is empty: it gave no examples. If it is a generator, it may "
            "have been used up before: pass a DataLoader or a list."
        )


def _set_columns(answer: Prediction, labels: Tensor | None, task: Task) -> dict[str, Tensor]:
    """Return what the sets of a batch cover and how large they are; nothing without sets."""
    if answer.sets is None or labels is None:
        return {}
    checked = task.check_labels(labels, "the data")
    covered, sizes = answer.sets.covered(answer, checked), answer.sets.sizes(answer)
    if task.by_token:
        answer = answer.to_numpy()
        sizes = sizes[checked.numpy()[answer.real] != IGNORED]
    return {"covered": torch.from_numpy(covered), "set_size": torch.from_numpy(sizes).double()}


def collect_logits(
    model: Any,
    data: Iterable[Any],
    *,
    name: str = "data",
    need_labels: bool = False,
    device: Any = None,
    progress: bool = False,
    task: Task | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return all logits `[example, member, class]` and labels `[example]`, on the CPU.

    They are the logits behind the model's probabilities: all members', or a student's as one
    member. Labels are None when the data has none. Memory grows with examples x members x classes.

        logits, labels = collect_logits(model, loader, need_labels=True)

    Args:
        model, data, name, need_labels, device, progress, task: see `run_model`.
    """
    options: dict[str, Any] = {"name": name, "need_labels": need_labels, "device": device}
    runs = list(run_model(model, data, progress=progress, task=task, **options))
    labels = [run.labels for run in runs if run.labels is not None]
    logits = joined_rows([run.answering_logits for run in runs])
    return logits, torch.cat(labels) if labels else None
