"""An ensemble's inputs and outputs: its host's signature and its host's kind of output."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..errors import UnsupportedModelError


@dataclass
class HydraOutput:
    """An ensemble's output with labels when its host returns plain tensors."""

    logits: Tensor
    loss: Tensor | None = None


def with_signature_of(original: Callable[..., Any], host: type[nn.Module]) -> Callable[..., Any]:
    """Return `original` with the signature of a host's forward, and `labels`: trainers read it."""
    parameters = list(inspect.signature(host.forward).parameters.values())
    if "labels" not in {p.name for p in parameters}:
        label = inspect.Parameter("labels", inspect.Parameter.KEYWORD_ONLY, default=None)
        rest = [p for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
        more = [p for p in parameters if p.kind is inspect.Parameter.VAR_KEYWORD]
        parameters = [*rest, label, *more]

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs)

    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return forward


def with_logits(output: Any, logits: Tensor, loss: Tensor | None, return_dict: Any) -> Any:
    """Put the ensemble's logits where the host's were; drop what belongs to single streams."""
    if isinstance(output, Tensor):
        return logits if loss is None else HydraOutput(logits=logits, loss=loss)
    fields = {"logits": logits} if loss is None else {"loss": loss, "logits": logits}
    if isinstance(output, tuple) and not hasattr(output, "_fields"):
        return tuple(fields.values())
    result = type(output)(**fields)
    return tuple(fields.values()) if return_dict is False else result


def with_embedding(output: Any, embedding: Tensor) -> Any:
    """Put the members' mean embedding where the host's was."""
    if isinstance(output, Tensor):
        return embedding
    for name in ("image_embeds", "text_embeds", "pooler_output", "last_hidden_state"):
        if getattr(output, name, None) is not None:
            return type(output)(**{name: embedding})
    raise UnsupportedModelError(f"{type(output).__name__} holds neither logits nor embeddings.")
