"""The inputs that an ensemble is exported with: names, shapes, and some rows to try it on."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..data.batches import split_batch
from ..errors import DataError
from ..fusion import HydraEnsemble
from ..fusion.inputs import READ_BY_ANSWERS, is_raw, prepare, token_limit
from ..hosts.example_inputs import examples
from ..hosts.prompt_classifier import PromptClassifier
from ..tasks import Spans
from ..tasks.spans import answer_tokens

TEXT_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "sequence_ids")
"""Inputs `[batch, tokens]`, of any number of tokens."""

ROWS = 17
"""The largest batch that an export is checked on."""


@dataclass(frozen=True)
class Example:
    """Real or made-up inputs of an ensemble.

    Attributes:
        tensors: Inputs by name, `[rows, ...]`, at least `ROWS` rows (repeated when there are less).
        by_name: Whether the host takes them by name, not by position.
        real: Whether they were given, not made up.
        host: Name of the host's class.
        most_tokens: The most tokens that a text may have; None where there are no tokens.
    """

    tensors: dict[str, Tensor]
    by_name: bool
    real: bool
    host: str
    most_tokens: int | None

    @property
    def names(self) -> list[str]:
        """Names of the inputs when the host takes them by name, else none."""
        return list(self.tensors) if self.by_name else []

    def rows(self, count: int, *, start: int = 0) -> dict[str, Tensor]:
        """Return some rows of every input."""
        return {name: tensor[start : start + count] for name, tensor in self.tensors.items()}

    def batch(self, rows: dict[str, Tensor]) -> Any:
        """Return rows as a batch of the host."""
        return rows if self.by_name else tuple(rows.values())

    def dims(self, name: str) -> list[str | int]:
        """Return the shape of an input, with names for what is free."""
        shape = list(self.tensors[name].shape)
        free = ["batch", "tokens"] if name in TEXT_INPUTS and self.most_tokens else ["batch"]
        return [*free, *shape[len(free) :]]


def example_of(ensemble: HydraEnsemble, given: Any) -> Example:
    """Return inputs to export an ensemble with: those given, or some that the host takes.

    Args:
        ensemble: What is exported.
        given: A batch of the host, images or texts; or None.
    """
    host, real = type(ensemble.host).__name__, given is not None
    if (
        not real
        and ensemble.tokenizer is not None
        and not isinstance(ensemble.host, PromptClassifier)
    ):
        given = ["a joy to watch", "no", "the longest made-up sentence, by far"]
        if "answer" in ensemble.task.prediction.FIELDS:
            given = [{"question": "who saw it?", "context": text} for text in given]
    if given is not None:
        args, kwargs, _ = split_batch(prepare(ensemble, given) if is_raw(given) else given)
    elif made := examples(ensemble.host):
        args, kwargs = made[-1]
    else:
        raise DataError(
            f"The inputs of {host} are not known. Give export(..., example=batch), a batch of real "
            "inputs."
        )
    values = named(ensemble, args, kwargs)
    if isinstance(ensemble.task, Spans):  # an input of its own: which tokens are the context's
        values["sequence_ids"] = _context_of(values)
    wrong = [n for n, v in values.items() if not isinstance(v, Tensor) or not v.ndim]
    if wrong or not values:
        raise DataError(
            f"The example has no tensor under {', '.join(wrong) or 'any name'}: only tensors "
            "[batch, ...] can be inputs of an exported program."
        )
    rows = {len(value) for value in values.values()}
    if len(rows) > 1 or rows == {0}:
        raise DataError(f"The inputs of the example have {sorted(rows)} rows; expected one size.")
    index = torch.arange(max(ROWS, rows.pop()))
    tensors = {
        name: value.detach().cpu()[index % len(value)].contiguous()
        for name, value in values.items()
    }
    tensors = {n: t.float() if t.is_floating_point() else t for n, t in tensors.items()}
    limit = None
    if "input_ids" in tensors:
        config = ensemble.config
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        is_prompt = isinstance(ensemble.host, PromptClassifier)
        limit = ensemble.host.max_length if is_prompt else token_limit(config, ensemble.tokenizer)
        limit = limit or 4096
    return Example(tensors, not args, real, host, limit)


def _context_of(values: dict[str, Any]) -> Tensor:
    """Return 1 for tokens that may be part of an answer, else -1, `[batch, token]`."""
    if isinstance(given := values.get("sequence_ids"), Tensor):
        return given
    size, tokens = values["input_ids"].shape
    able = answer_tokens(torch.zeros(size, 1, 2, tokens), values)
    return able.long() * 2 - 1


def named(ensemble: HydraEnsemble, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs of a batch under the names that they have in exported programs."""
    names = list(inspect.signature(type(ensemble.host).forward).parameters)[1:]
    values = {**dict(zip(names, args, strict=False)), **kwargs}
    kept = {"sequence_ids"} if isinstance(ensemble.task, Spans) else set()
    absent = set(READ_BY_ANSWERS) - kept
    values = {n: value for n, value in values.items() if value is not None and n not in absent}
    if len(values) == 1 and args:  # timm and open_clip take images as x or image
        (value,) = values.values()
        if isinstance(value, Tensor) and value.ndim == 4:
            return {"pixel_values": value}
    return values
