"""Run any classifier over any data: batches in, member logits `[batch, member, class]` out.

A *batch* is what the host takes: a mapping with an optional `labels`, `(inputs, labels)`, or the
inputs only. *Data* is an iterable of batches. A *model* is anything that is called on a batch and
answers with a tensor, an object or mapping with `logits`, or has `predict(batch) -> Prediction`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import DataError, HydraError
from ..prediction import Prediction
from ..uncertainty import as_member_logits
from .answers import Answers, answers_from, flat_tokens, join_answers
from .batches import LABEL_KEYS
from .batches import move as move
from .eval_mode import evaluating as evaluating
from .memory import Halving
from .padding import IGNORED as IGNORED
from .progress import length_of as length_of
from .progress import progress_bar as progress_bar
from .sharing import in_order


def split_batch(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Tensor | None]:
    """Split a batch into positional inputs, keyword inputs and labels (None without).

    Labels never reach the model: a host with labels would compute a loss that nobody needs.
    """
    labels: Any = None
    if isinstance(batch, (tuple, list)):
        if not 1 <= len(batch) <= 2:
            raise DataError(
                f"A batch is a {type(batch).__name__} of {len(batch)} things; expected "
                "(inputs, labels), (inputs,) or a mapping with an optional 'labels'."
            )
        if len(batch) == 2:
            labels = batch[1]
        batch = batch[0]
    if not isinstance(batch, Mapping):
        return (batch,), {}, _as_labels(labels)
    inputs = {str(key): value for key, value in batch.items() if key not in LABEL_KEYS}
    for key in LABEL_KEYS:
        if labels is None:
            labels = batch.get(key)
    return (), inputs, _as_labels(labels)


def read_batch(
    batch: Any, device: Any = None, *, where: str = "the batch"
) -> tuple[tuple[Any, ...], dict[str, Any], Tensor | None]:
    """Split a batch, check its inputs and move them to a device, each once."""
    check_inputs(batch, where)
    args, kwargs, labels = split_batch(batch)
    return move(args, device), move(kwargs, device), labels


def check_data(model: Any, data: Any) -> None:
    """Raise when a host says that data is not made for it (`PromptClassifier.check_data`)."""
    check = getattr(getattr(model, "host", model), "check_data", None)
    if callable(check):
        check(data)


def _as_labels(labels: Any) -> Tensor | None:
    return None if labels is None else torch.as_tensor(labels)


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
    return model(*move(args, where), **move(kwargs, where))


def member_logits_of(output: Any) -> Tensor:
    """Find member logits `[batch, member, class]` in a model's output.

    Reads `member_logits`, else `logits`, of an object or a mapping; a tensor; or the first tensor
    of a tuple. `[batch, class]` becomes one member.
    """
    logits = output
    for name in ("member_logits", "logits"):
        value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(value, Tensor):
            logits = value
            break
    else:
        if isinstance(output, (tuple, list)) and output and isinstance(output[0], Tensor):
            logits = output[0]
    if not isinstance(logits, Tensor):
        raise DataError(
            f"The model answered with a {type(output).__name__}; expected a tensor [batch, class] "
            "or [batch, member, class], or something with .logits. Is it a classifier?"
        )
    return as_member_logits(logits)


def member_logits(model: Any, batch: Any, *, device: Any = None) -> Tensor:
    """Return a model's member logits on a batch, `[batch, member, class]`.

    `predict` is preferred when it answers with a `Prediction`: only there does an ensemble apply
    its temperatures.
    """
    return member_logits_of(_answer(model, batch, device))


def _answer(model: Any, batch: Any, device: Any) -> Any:
    """Return the model's `Prediction` on a batch if it gives one, else its raw output."""
    predict = getattr(model, "predict", None)
    if not callable(predict):
        return call_model(model, batch, device=device)
    promised = _promised(predict)
    args, kwargs, _ = split_batch(batch)
    inputs = move(kwargs or args[0], device_of(model) if device is None else device)
    if promised in (Prediction, "Prediction") or not callable(model):
        return predict(inputs)
    if promised is inspect.Signature.empty:  # not annotated: look at what it returns
        try:
            answer = predict(inputs)
        except (TypeError, AttributeError, KeyError):  # not a predict of batches: call instead
            answer = None
        if isinstance(answer, Prediction):
            return answer
    return call_model(model, batch, device=device)


def _promised(function: Callable[..., Any]) -> Any:
    try:
        return inspect.signature(function).return_annotation
    except (TypeError, ValueError):
        return inspect.Signature.empty


def check_inputs(batch: Any, where: str = "the batch") -> None:
    """Raise when a batch holds no examples, or NaN or infinite inputs.

    Attention masks and biases may be infinite; labels are not checked here.
    """
    args, kwargs, _ = split_batch(batch)
    for name, value in [*(("inputs", arg) for arg in args), *kwargs.items()]:
        if not isinstance(value, Tensor) or not value.ndim:
            continue
        if not value.numel():
            raise DataError(
                f"There is nothing to predict in {where}: {name} has shape {list(value.shape)}. "
                "Give at least one example, and texts of at least one token."
            )
        if not value.is_floating_point() or "mask" in name or "bias" in name:
            continue
        if bool(value.detach().float().sum().isfinite()):  # then every value is finite
            continue
        finite = value.detach().isfinite().reshape(len(value), -1).all(1)
        bad = (~finite).nonzero().flatten().tolist()
        if bad:
            kind = "NaN" if bool(value.isnan().any()) else "infinite values"
            raise DataError(
                f"The inputs hold {kind} for {len(bad)} of {len(value)} examples in {where} "
                f"({name}; example {bad[0]} is the first). Mend or leave out these examples; check "
                "how they were scaled."
            )


def checked(
    data: Iterable[Any], *, name: str, classes: int | None = None, labelled: bool = False
) -> Iterator[Any]:
    """Yield the batches of data, checked: finite inputs and, if `labelled`, valid labels.

    Args:
        data: an iterable of batches.
        name: name of the data set in errors.
        classes: number of classes, to check labels against.
        labelled: raise if labels are missing or are not class numbers.
    """
    for batch in data:
        where = f"the {name} data"
        check_inputs(batch, where)
        if labelled:
            labels = split_batch(batch)[2]
            if labels is None:
                raise DataError(
                    f"There are no labels in {where}. Give batches as (inputs, labels) or as "
                    "mappings with 'labels'."
                )
            check_labels(labels, where, classes=classes)
        yield batch


def iterate_logits(
    model: Any,
    data: Iterable[Any],
    *,
    name: str = "data",
    need_labels: bool = False,
    ignore_labels: bool = False,
    device: Any = None,
    progress: bool = False,
    classes: int | None = None,
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield `(member_logits [batch, member, class], labels [batch] or None)` on the CPU, checked.

    See `iterate_answers` for the arguments.
    """
    for answers in iterate_answers(
        model,
        data,
        name=name,
        need_labels=need_labels,
        ignore_labels=ignore_labels,
        device=device,
        progress=progress,
        classes=classes,
    ):
        yield answers.logits, answers.labels


def iterate_answers(
    model: Any,
    data: Iterable[Any],
    *,
    name: str = "data",
    need_labels: bool = False,
    ignore_labels: bool = False,
    device: Any = None,
    progress: bool = False,
    classes: int | None = None,
) -> Iterator[Answers]:
    """Yield a model's checked answers to every batch.

    A batch that does not fit in memory is run in halves, with a warning. Several processes share
    the batches; all of them get all answers, in order (`sharing`). Each token of a token classifier
    is an example; padding and tokens with label -100 are left out.

    Args:
        model: see `member_logits`.
        data: an iterable of batches, read once.
        name: name of the data set in errors.
        need_labels: raise when a batch has no labels.
        ignore_labels: do not read labels (those of another task mean nothing here).
        device: device of the inputs; by default the model's.
        progress: show a bar on a terminal.
        classes: number of classes on another data set, to compare with.
    """
    check_data(model, data)
    shape: tuple[int, int] | None = None
    labelled: bool | None = None
    examples = 0
    runs_in_eval = getattr(model, "keeps_modes", False)
    halving = Halving(name)

    def answer(part: Any) -> Answers:
        labels = None if ignore_labels else split_batch(part)[2]
        output = _answer(model, part, device)
        logits = member_logits_of(output).detach().cpu()
        mask = split_batch(part)[1].get("attention_mask")
        logits, labels = flat_tokens(model, mask, logits, labels)
        return answers_from(output, logits, labels)

    def work(index: int, batch: Any) -> dict[str, Tensor]:
        output = _answers_of(halving, answer, batch, _where(index, name), name)
        return {key: value for key, value in output._asdict().items() if value is not None}

    with torch.no_grad() if runs_in_eval else evaluating(model):
        for index, columns in enumerate(
            progress_bar(
                in_order(data, work, name=name),
                description=name,
                enabled=progress,
                total=length_of(data),
            )
        ):
            where = _where(index, name)
            answers = Answers(**{"labels": None, **columns})
            logits, labels = answers.logits, answers.labels
            _check_logits(logits, where)
            if shape is None:
                shape = (logits.shape[1], logits.shape[2])
                if classes is not None and shape[1] != classes:
                    raise DataError(
                        f"The model gave {shape[1]} classes on the data set {name!r} but {classes} "
                        "on the in-distribution data. Both must run through the same classifier."
                    )
            elif shape != logits.shape[1:]:
                raise DataError(
                    f"In {where} the model gave {logits.shape[1]} members x {logits.shape[2]} "
                    f"classes, but {shape[0]} x {shape[1]} before."
                )
            if labels is None and need_labels:
                raise DataError(
                    f"There are no labels in {where}. Give batches as (inputs, labels) or as "
                    "mappings with 'labels'."
                )
            if labelled is None:
                labelled = labels is not None
            elif labelled != (labels is not None):
                raise DataError(
                    f"Some batches of the data set {name!r} have labels, some have none."
                )
            examples += len(logits)
            if labels is not None:
                labels = _check_labels(labels, logits, where)
            yield answers._replace(labels=labels)
    if not examples:
        raise DataError(
            f"The data set {name!r} is empty: it gave no examples. If it is a generator, it may "
            "have been used up before: pass a DataLoader or a list."
        )


def _where(index: int, name: str) -> str:
    return f"batch {index} of the data set {name!r}"


def _answers_of(
    halving: Halving, answer: Callable[[Any], Answers], batch: Any, where: str, name: str
) -> Answers:
    """Run a model on one batch, in halves if need be; errors name the batch."""
    try:
        check_inputs(batch, where)
        return join_answers([answers for _, answers in halving(answer, batch)])
    except DataError as error:
        if where in str(error) or f"data set {name!r}" in str(error):
            raise
        raise DataError(f"In {where}: {error}") from error
    except HydraError:
        raise
    except Exception as error:
        raise DataError(
            f"The model failed on {where}, with inputs {_shapes(batch)}: {error}. "
            "Every data set must be prepared as the model expects it."
        ) from error


def collect_logits(
    model: Any,
    data: Iterable[Any],
    *,
    name: str = "data",
    need_labels: bool = False,
    device: Any = None,
    progress: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return all member logits `[example, member, class]` and labels `[example]`, on the CPU.

    See `iterate_logits` for the arguments. Labels are None when the data has none; memory grows
    with examples x members x classes.
    """
    pairs = list(
        iterate_logits(
            model, data, name=name, need_labels=need_labels, device=device, progress=progress
        )
    )
    labels = [label for _, label in pairs if label is not None]
    return torch.cat([logits for logits, _ in pairs]), torch.cat(labels) if labels else None


def _shapes(batch: Any) -> str:
    """Describe the inputs of a batch and their shapes, for errors."""
    args, kwargs, _ = split_batch(batch)
    inputs = {**{str(i): value for i, value in enumerate(args)}, **kwargs}
    shown = [
        f"{key} {list(value.shape)}" if hasattr(value, "shape") else f"{key} {type(value).__name__}"
        for key, value in inputs.items()
    ]
    return "(" + ", ".join(shown) + ")"


def _check_logits(logits: Tensor, where: str) -> None:
    # a class may be masked with -inf, but every row needs a finite maximum
    bad = ~logits.amax(-1).isfinite()
    if bool(bad.any()):
        kind = "NaN" if bool(logits.isnan().any()) else "infinite values"
        raise DataError(
            f"The model's logits hold {kind} for {int(bad.any(1).sum())} of {len(logits)} examples "
            f"in {where}. Check the inputs (scale, missing values) and the model's precision."
        )


def _check_labels(labels: Tensor, logits: Tensor, where: str) -> Tensor:
    if labels.ndim == 1 and len(labels) != len(logits):
        raise DataError(f"{len(labels)} labels for {len(logits)} examples in {where}.")
    return check_labels(labels, where, classes=logits.shape[-1])


def _by_token(labels: Tensor) -> bool:
    """Tell labels of tokens from several yes or no labels of one example."""
    if labels.ndim != 2 or labels.is_floating_point():
        return False
    return bool(((labels == IGNORED) | (labels > 1)).any())


def check_labels(labels: Tensor, where: str, *, classes: int | None = None) -> Tensor:
    """Return labels as whole numbers on the CPU; raise when they are not classes of the model."""
    labels = labels.detach().cpu()
    if _by_token(labels):
        raise DataError(
            f"Labels of shape {list(labels.shape)} in {where} are one for each token, and members "
            "are searched by one label for each example. For token classification choose heads by "
            "score_heads(model, data).top_k(0.5), one mask for each member, and fuse() them."
        )
    if labels.is_floating_point() or labels.ndim != 1:
        raise DataError(
            f"Labels of shape {list(labels.shape)} and type {labels.dtype} in {where}; expected "
            "one whole class number per example. Multi-label and regression are refused."
        )
    labels = labels.long()
    outside = labels[labels < 0] if classes is None else labels[(labels < 0) | (labels >= classes)]
    if len(outside):
        known = "" if classes is None else f": the model has {classes} classes, 0 to {classes - 1}"
        raise DataError(f"Label {int(outside[0])} in {where} is out of range{known}.")
    return labels
