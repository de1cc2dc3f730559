"""What a classifier reads: its last linear layer, found by looking, and that layer's input."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ...data.batches import split_batch
from ...data.eval_mode import evaluating
from ...data.model_runs import call_model, member_logits_of
from ...data.progress import progress_bar
from ...errors import DataError, UnsupportedModelError


def first_batch(data: Iterable[Any]) -> Any:
    """Return the first batch of a data set."""
    for batch in data:
        return batch
    raise DataError("The data set is empty: it gave no batches. Check the loader or the filter.")


def find_classifier(host: nn.Module, batch: Any) -> str | None:
    """Return the path of the linear layer whose output is the host's logits, or None."""
    outputs: dict[str, Tensor] = {}

    def note(name: str) -> Any:
        return lambda module, inputs, output: outputs.update({name: output})

    linears = [(n, m) for n, m in host.named_modules() if isinstance(m, nn.Linear)]
    handles = [module.register_forward_hook(note(name)) for name, module in linears]
    try:
        with evaluating(host):
            logits = member_logits_of(call_model(host, batch))[:, 0]
    finally:
        for handle in handles:
            handle.remove()
    found = [n for n, o in outputs.items() if o.shape == logits.shape and torch.equal(o, logits)]
    return found[-1] if found else None


def need_classifier(host: nn.Module, data: Iterable[Any], rival: str) -> str:
    """Return the path of the last linear layer, or raise for hosts that end otherwise."""
    path = find_classifier(host, first_batch(data))
    if path is None:
        raise UnsupportedModelError(
            f"{type(host).__name__} does not end in a linear layer whose output is the logits, but "
            f"{rival!r} works on that layer. Choose another rival, or fold what follows into it."
        )
    return path


class Featured(nn.Module):
    """A host that answers with its logits `[batch, class]` and what they were made of.

    The features `[batch, width]` are the input of the last linear layer, else the image embeddings
    (zero-shot), else the logits themselves.
    """

    def __init__(self, host: nn.Module, classifier: str | None) -> None:
        super().__init__()
        self.host = host
        self.classifier = classifier

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Answer with `(logits, features)`."""
        seen: list[Tensor] = []
        handle = None
        if self.classifier is not None:
            layer = self.host.get_submodule(self.classifier)
            handle = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            output = self.host(*args, **kwargs)
        finally:
            if handle is not None:
                handle.remove()
        logits = member_logits_of(output)[:, 0]
        embeds = getattr(output, "image_embeds", None)
        features = seen[0] if seen else embeds if isinstance(embeds, Tensor) else logits
        return logits, features.float()


def collect(
    host: Featured, data: Iterable[Any], *, name: str, labels: bool, progress: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return all logits, features and labels (None unless wanted) of a data set."""
    logits, features, targets = [], [], []
    with evaluating(host):
        for batch in progress_bar(data, description=name, enabled=progress):
            answer = call_model(host, batch)
            logits.append(answer[0])
            features.append(answer[1])
            target = split_batch(batch)[2] if labels else None
            if labels and target is None:
                raise DataError(f"A batch of the data set {name!r} has no labels.")
            if target is not None:
                targets.append(target.to(answer[0].device))
    if not logits:
        raise DataError(f"The data set {name!r} is empty: it gave no examples.")
    found = torch.cat(features)
    if not bool(found.isfinite().all()):
        raise DataError(f"The host's features on the data set {name!r} hold NaN or infinity.")
    return torch.cat(logits), found, torch.cat(targets).long() if labels else None
