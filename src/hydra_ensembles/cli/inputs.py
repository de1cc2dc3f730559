"""How commands read a model and its data: options that are declared once, and what they load."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from . import options

if TYPE_CHECKING:
    from .models import Loaded


@dataclass(frozen=True)
class Reading:
    """How a model and its data are read: the options of every command that takes data."""

    limit: options.Limit = None
    split: options.Split = None
    text_column: options.TextColumn = None
    pair_column: options.PairColumn = None
    label_column: options.LabelColumn = None
    labels: options.Labels = None
    class_names: options.ClassNames = None
    batch_size: options.BatchSize = 32
    skip_broken: options.SkipBroken = False
    device: options.Device = None
    dtype: options.Dtype = "float32"
    seed: options.Seed = 0

    def load_model(self, place: str) -> Loaded:
        """Load a model by hub name, folder or `timm:NAME`."""
        from .models import load_model

        return load_model(place, device=self.device, dtype=self.dtype, class_names=self.class_names)

    def load(
        self, model: str, data: str, ood: Sequence[str] | None = None, *, fused: bool = False
    ) -> tuple[Loaded, Any, dict[str, Any]]:
        """Load a model, its labelled data and its outliers.

        Missing data is refused before the model is loaded, an ensemble (unless `fused`) before the
        data is.
        """
        from .models import check_sources

        check_sources(data, ood)
        loaded = self.load_model(model)
        if not fused:
            loaded.host  # noqa: B018  (raises for an ensemble)
        return loaded, self.load_known(loaded, data), self.load_outliers(loaded, ood)

    def load_known(self, loaded: Loaded, data: str) -> Any:
        """Load the labelled data of `--data`."""
        from .models import load_set

        return load_set(
            loaded, data, label_column=self.label_column, labels=self.labels, **self._shared()
        )

    def load_unlabelled(self, loaded: Loaded, data: str) -> Any:
        """Load data whose labels, if it has any, are not used."""
        from .models import load_set

        return load_set(loaded, data, outliers=True, **self._shared())

    def load_outliers(self, loaded: Loaded, ood: Sequence[str] | None) -> dict[str, Any]:
        """Load the sets of `--ood` by name."""
        from .models import load_sets

        return load_sets(loaded, ood, **self._shared())

    def _shared(self) -> dict[str, Any]:
        names = ("limit", "seed", "split", "text_column", "pair_column", "batch_size")
        names = (*names, "skip_broken")
        return {name: getattr(self, name) for name in names}


def named(model: str) -> tuple[str, str]:
    """Split `NAME=MODEL`; a plain MODEL is called after its last part."""
    name, equals, place = model.partition("=")
    return (name, place) if equals else (Path(model).name or model, model)


READING = Reading()
"""The default of a command's parameter `reading`; `reads_data` fills in what was given."""


def reads_data(
    *, leave_out: Sequence[str] = (), **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a command's parameter `reading` by the options of `Reading`.

    Args:
        leave_out: Options that the command does not have.
        defaults: Where the command's defaults differ from those of `Reading`.
    """
    hints = get_type_hints(Reading, include_extras=True)
    shared = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=defaults.get(field.name, field.default),
            annotation=hints[field.name],
        )
        for field in fields(Reading)
        if field.name not in leave_out
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**values: Any) -> None:
            reading = Reading(**{p.name: values.pop(p.name) for p in shared})
            command(**values, reading=reading)

        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(command, eval_str=True).parameters.values():
            keyword = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            parameters += shared if parameter.name == "reading" else [keyword]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate
