"""What the host's library and its tools expect of a model: names, device, classes, inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..data.transforms import image_transform
from ..errors import UnsupportedModelError
from ..hosts import device_of
from ..hosts.task import NEXT_TOKENS, is_language_model, predicts_next_token
from .inputs import Preparation


class Citizen(nn.Module):
    """A model that trainers and pipelines accept as one of its host's library.

    Attributes:
        host: The model whose library's conventions it follows.
    """

    host: Any

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[int, str] | None = None
        self._preparation = Preparation()

    @property
    def config(self) -> Any:
        """The host's config, where it has one."""
        return getattr(self.host, "config", None)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return device_of(self)

    @property
    def dtype(self) -> torch.dtype:
        """The parameters' data type."""
        return next(p.dtype for p in self.parameters())

    @property
    def main_input_name(self) -> str:
        """Name of the host's main input."""
        return getattr(self.host, "main_input_name", "x")

    @property
    def input_modalities(self) -> Any:
        """What the host reads, as transformers calls it: text, image ..."""
        return getattr(self.host, "input_modalities", ())

    @property
    def name_or_path(self) -> str:
        """Where the host came from."""
        return getattr(self.host, "name_or_path", "")

    def can_generate(self) -> bool:
        """Tell pipelines that this is a classifier."""
        return False

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse with what works instead: an ensemble scores texts, it does not write them."""
        name = type(self.host).__name__
        why = NEXT_TOKENS if predicts_next_token(self.host) else f"{name} does not write text"
        raise UnsupportedModelError(f"An ensemble cannot generate(): {why}.")

    @property
    def id2label(self) -> dict[int, str] | None:
        """Class names by number: those that were set, or the host's; None without either."""
        if self._names is not None:
            return dict(self._names)
        if is_language_model(self.host):  # its config names two classes that it does not have
            return None
        labels = getattr(self.config, "id2label", None) or getattr(self.host, "id2label", None)
        return None if labels is None else {int(k): str(v) for k, v in labels.items()}

    @id2label.setter
    def id2label(self, names: Mapping[int, str] | Sequence[str] | None) -> None:
        if names is not None:
            pairs = names.items() if isinstance(names, Mapping) else enumerate(names)
            named = {int(number): str(name) for number, name in pairs}
            if not named or set(named) != set(range(len(named))):
                raise ValueError(
                    f"Class names for {sorted(named)[:5]} ...: expected one for every class from 0."
                )
            names = dict(sorted(named.items()))
            if hasattr(self.config, "id2label"):  # pipelines read it there
                self.config.id2label = dict(names)
                self.config.label2id = {name: number for number, name in names.items()}
        self._names = names

    @property
    def transform(self) -> Any:
        """Turns a PIL image into a tensor `[C, H, W]`; None when unknown."""
        return self._preparation.find_transform(self.host)

    @transform.setter
    def transform(self, source: Any) -> None:
        self._preparation.transform = None if source is None else image_transform(source)

    @property
    def tokenizer(self) -> Any:
        """Turns texts into inputs; None when unknown."""
        return self._preparation.find_tokenizer(self.host)

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self._preparation.tokenizer = tokenizer

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None) -> None:
        """Trade time for memory in the trunk, where the host can."""
        self.host.gradient_checkpointing_enable(gradient_checkpointing_kwargs)

    def gradient_checkpointing_disable(self) -> None:
        """Undo `gradient_checkpointing_enable`."""
        self.host.gradient_checkpointing_disable()
