"""Options that commands share, so that they are called and explained alike everywhere."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from .loading import Loaded

MODEL_HELP = (
    "A hub name, a folder (of a host or of a saved ensemble), or timm:NAME "
    "(timm:NAME@FILE.safetensors for weights of your own)."
)
DATA_HELP = (
    "An image folder (one subfolder per class), a CSV/TSV/JSONL/TXT file of texts, or the name of "
    "a Hugging Face dataset (name:config)."
)

Model = Annotated[str, typer.Argument(help=MODEL_HELP, show_default=False)]
Data = Annotated[str, typer.Option("--data", help=DATA_HELP, show_default=False)]
Ood = Annotated[
    list[str] | None,
    typer.Option("--ood", help="Outliers, as NAME=DATA or DATA; may be repeated."),
]
Split = Annotated[str | None, typer.Option(help="Split of a Hugging Face dataset.")]
TextColumn = Annotated[str | None, typer.Option(help="Column of the texts.")]
LabelColumn = Annotated[str | None, typer.Option(help="Column of the labels.")]
Labels = Annotated[
    Path | None, typer.Option(help="Table with a label for each file of a flat image folder.")
]
ClassNames = Annotated[
    str | None,
    typer.Option(
        help="Names in the order of the model's classes: a file with one per line, or a,b,c. "
        "Makes a dual encoder (CLIP) a zero-shot classifier."
    ),
]
Limit = Annotated[
    int | None, typer.Option(min=1, help="Use this many examples of each set, stratified.")
]
BatchSize = Annotated[int, typer.Option(min=1, help="Examples per batch.")]
SkipBroken = Annotated[
    bool, typer.Option("--skip-broken", help="Leave broken images out, with a warning.")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps ...")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")]
Seed = Annotated[int, typer.Option(help="Of everything that is drawn.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="Folder for what is made.")]
Config = Annotated[
    Path | None,
    typer.Option("--config", help="YAML file of options; what is on the command line wins."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
Criteria = Annotated[
    list[str],
    typer.Option(
        "--criterion",
        help="random, magnitude, taylor, his, entropy, hies or fisher; may be repeated.",
    ),
]
Scope = Annotated[str, typer.Option(help="Rank heads within each 'layer' or over the 'model'.")]
Models = Annotated[
    list[str], typer.Argument(help="One or several, as MODEL or NAME=MODEL. " + MODEL_HELP)
]


@dataclass(frozen=True)
class Reading:
    """How a model and its data are read: the options of every command that takes data."""

    limit: Limit = None
    split: Split = None
    text_column: TextColumn = None
    label_column: LabelColumn = None
    labels: Labels = None
    class_names: ClassNames = None
    batch_size: BatchSize = 32
    skip_broken: SkipBroken = False
    device: Device = None
    dtype: Dtype = "float32"
    seed: Seed = 0

    def load_model(self, place: str) -> Loaded:
        """Load a model by hub name, folder or `timm:NAME`."""
        from .loading import load_model

        return load_model(place, device=self.device, dtype=self.dtype, class_names=self.class_names)

    def load_known(self, loaded: Loaded, data: str) -> Any:
        """Load the labelled data of `--data`."""
        from .loading import load_set

        return load_set(
            loaded, data, label_column=self.label_column, labels=self.labels, **self._shared()
        )

    def load_outliers(self, loaded: Loaded, ood: Sequence[str] | None) -> dict[str, Any]:
        """Load the sets of `--ood` by name."""
        from .loading import load_sets

        return load_sets(loaded, ood, **self._shared())

    def _shared(self) -> dict[str, Any]:
        names = ("limit", "seed", "split", "text_column", "batch_size", "skip_broken")
        return {name: getattr(self, name) for name in names}


READING = Reading()
"""The default of a command's parameter `reading`; `reads_data` fills in what was given."""


def reads_data(**defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of `Reading` in place of its parameter `reading`.

    Args:
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
