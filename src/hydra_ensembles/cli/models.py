"""Models and data by name, as the command line takes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import DataError, FormatError
from ..tasks import task_of
from .class_names import check_labels, check_order, read_names
from .errors import Stop
from .hub_models import hub_access, is_timm_name, load_timm, load_timm_folder, load_transformers
from .options import DATA_HELP
from .output import waiting

FILES = (
    *(".csv", ".json", ".jsonl", ".ndjson", ".tab", ".tsv", ".txt"),
    *(".conll", ".bio", ".iob", ".iob2"),
)


@dataclass
class Loaded:
    """A model and what its data must look like.

    Attributes:
        model: A host model or a `HydraEnsemble`.
        transform: How it wants its images, or None.
        tokenizer: How it wants its texts, or None.
        class_names: By class number, or None when it has none.
        spellings: Of each class, its name and others that data may use; where it has no names,
            those of the data that was read first, or None.
        key: The name of its image input; None if the model takes just the images.
        untrained: Names of weights that its checkpoint did not hold: they are random.
    """

    model: Any
    name: str
    transform: Any = None
    tokenizer: Any = None
    class_names: list[str] | None = None
    spellings: list[tuple[str, ...]] | None = None
    key: str | None = "pixel_values"
    untrained: tuple[str, ...] = ()

    @property
    def host(self) -> Any:
        """The plain host model; a saved ensemble of one member is one."""
        from ..fusion.ensemble import HydraEnsemble

        if not isinstance(self.model, HydraEnsemble):
            return self.model
        if self.model.members == 1:
            return self.model.member(0)
        raise Stop(
            f"{self.name} is an ensemble of {self.model.members} members already. Give the host "
            "model that it was built from.",
            4,
        )

    @property
    def texts(self) -> Any:
        """What turns texts into inputs: the tokenizer, inside the prompt of a prompted model."""
        from ..fusion.inputs import prompted

        return prompted(getattr(self.model, "host", self.model), self.tokenizer)

    def class_name(self, number: int) -> str:
        """Return what a class is called."""
        names = self.class_names
        return names[number] if names and number < len(names) else str(number)


def load_model(
    name: str,
    *,
    device: str | None = None,
    dtype: str = "float32",
    class_names: str | None = None,
    trained: bool = True,
) -> Loaded:
    """Load a model by hub name, folder or `timm:NAME`, by default with a trained classifier."""
    with waiting(f"Loading {name}"):
        loaded = _load_model(name, device=device, dtype=dtype, class_names=class_names)
    if trained and loaded.untrained:
        raise Stop(
            f"{name} has no trained classifier: {', '.join(loaded.untrained[:3])} not in its "
            "weights. Give a fine-tuned checkpoint, or fine-tune it first "
            "(hydra_ensembles.finetune).",
            4,
        )
    return loaded


def _load_model(name: str, *, device: str | None, dtype: str, class_names: str | None) -> Loaded:
    import torch

    from ..data import image_transform
    from ..data.class_names import class_count, first_spellings, model_names

    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise Stop(f"Unknown --dtype {dtype!r}: expected float32, bfloat16, float16 or float64.", 2)
    names = read_names(class_names)
    config = config_of(Path(name).expanduser())
    if config.get("format") == "hydra-ensembles":
        loaded = _ensemble(name)
    else:
        if name.startswith("timm/") and not Path(name).exists():
            name = f"timm:hf-hub:{name}"  # the hub's models of timm
        elif is_timm_name(name):
            name = f"timm:{name}"
        timm_folder = "architecture" in config and "model_type" not in config
        if timm_folder or name.startswith("timm:"):
            folder = Path(name).expanduser()
            model = load_timm_folder(folder, config) if timm_folder else load_timm(name)
            loaded = Loaded(model, name, transform=image_transform(model), key=None)
        else:
            model, text, untrained = load_transformers(name, names)
            loaded = Loaded(model, name, untrained=untrained)
            _processors(loaded, name, text=text)
    count = class_count(loaded.model)
    if names is not None and count not in (None, len(names)):
        raise DataError(
            f"--class-names gives {len(names)} class names, but {name} has {count} classes."
        )
    loaded.spellings = [(n,) for n in names] if names is not None else model_names(loaded.model)
    if loaded.spellings is not None:
        loaded.class_names = first_spellings(loaded.spellings)
    try:
        loaded.model = loaded.model.to(device=device, dtype=kind).eval()
    except (RuntimeError, AssertionError) as error:
        raise Stop(f"--device {device}: {str(error).splitlines()[0]}", 2) from error
    return loaded


def load_set(loaded: Loaded, source: str, *, outliers: bool = False, **options: Any) -> Any:
    """Load one data set for a model.

    Args:
        loaded: The model that it is for.
        source: See `load_data`.
        outliers: Leave labels out.
        options: `limit` and `seed`, and what `load_data` takes.
    """
    from ..data import load_data, sample
    from ..data.class_names import class_count
    from ..data.sources import is_saved_dataset

    limit, seed = options.pop("limit", None), options.pop("seed", 0)
    labels, task = options.pop("labels", None), task_of(loaded.model)
    names, folder = loaded.spellings or loaded.class_names, Path(source).expanduser()
    if outliers and options.get("text_column") and folder.is_file():
        from ..data.text_files import read_table

        if options["text_column"] not in read_table(folder):  # it may be the labelled data's
            options["text_column"] = options["pair_column"] = None
    if not is_saved_dataset(folder):
        _check_kind(loaded, folder)
    try:
        with nullcontext() if folder.exists() else hub_access():
            data = load_data(
                source,
                tokenizer=loaded.texts,
                transform=loaded.transform,
                labels=False if outliers else labels or True,
                class_names=None if outliers else names,
                key=loaded.key,
                task=task,
                classes=class_count(loaded.model),
                **options,
            )
    except DataError as error:
        if folder.exists():
            raise
        raise DataError(f"There is no file or folder {source} here. {error}") from error
    classes = class_count(loaded.model)
    if task.classifies and not task.by_token:  # others are checked where they are read
        check_labels(getattr(data, "labels", None), classes, source=source, model=loaded.name)
    check_order(loaded, data)
    return data if limit is None else sample(data, limit, seed=seed)


def check_sources(data: str | None, ood: Sequence[str] | None = None) -> None:
    """Raise for data that is not there, before the time that loading a model takes."""
    outliers = [source.partition("=")[2] or source for source in ood or ()]
    expected = DATA_HELP[0].lower() + DATA_HELP[1:]
    for source in [*([] if data is None else [data]), *outliers]:
        path = Path(source).expanduser()
        text = str(path)
        # all else may be the name of a dataset
        local = path.suffix.lower() in FILES or text.startswith((".", "/")) or text.count("/") > 1
        if local and not path.exists():
            kind = "file" if path.suffix.lower() in FILES else "folder"
            raise DataError(f"The {kind} {path} does not exist. Data is {expected}")
        if path.is_dir() and not any(path.iterdir()):
            raise DataError(f"The folder {path} is empty. Data is {expected}")


def _check_kind(loaded: Loaded, path: Path) -> None:
    """Raise for texts given to a model of images, and images given to one of texts."""
    if path.is_file() and loaded.tokenizer is None:
        why = (
            "has no tokenizer: save it with the model (of an ensemble, set ensemble.tokenizer and "
            "save it again)"
            if loaded.transform is None
            else "reads images: give a folder of them"
        )
        raise DataError(f"{path} is a file of texts, but {loaded.name} {why}.")
    if path.is_dir() and loaded.tokenizer is None and loaded.transform is None:
        raise DataError(
            f"{loaded.name} was saved without an image transform, so how it wants its images is "
            "not known. Set ensemble.transform and save it again."
        )
    if path.is_dir() and loaded.tokenizer is not None:
        raise DataError(
            f"{path} is a folder, but {loaded.name} reads texts: give a CSV, TSV, JSONL or TXT "
            "file of them."
        )


def load_sets(loaded: Loaded, sources: Sequence[str] | None, **options: Any) -> dict[str, Any]:
    """Load outliers given as `NAME=DATA` or `DATA`."""
    sets: dict[str, Any] = {}
    for source in sources or ():
        name, equals, place = source.partition("=")
        if not equals:
            name, place = Path(source.partition(":")[0]).stem, source
        if name in sets:
            raise Stop(f"Two --ood sets are called {name!r}: name them, as in --ood near=DATA.", 2)
        sets[name] = load_set(loaded, place, outliers=True, **options)
    return sets


def config_of(folder: Path) -> dict[str, Any]:
    """Read the config of a model's folder; empty for all else."""
    path = folder / "config.json"
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, RecursionError, OSError):
        raise FormatError(f"{path} is damaged: it is not JSON. Copy the folder again.") from None


def _ensemble(folder: str) -> Loaded:
    from ..fusion.ensemble import HydraEnsemble
    from ..fusion.inputs import image_key
    from ..hosts import tiny_vit  # noqa: F401  (makes the family of the demo's model known)

    model = HydraEnsemble.from_pretrained(folder)
    loaded = Loaded(model, folder, tokenizer=model.tokenizer, transform=model.transform)
    loaded.key = image_key(model)
    return loaded


def _processors(loaded: Loaded, source: str, *, text: bool) -> None:
    """Load the tokenizer or the transform; a missing tokenizer is reported when it is needed."""
    import transformers

    local = Path(source).is_dir()
    try:
        if text:
            loaded.tokenizer = transformers.AutoTokenizer.from_pretrained(
                source, local_files_only=local, trust_remote_code=False
            )
        else:
            from ..data import image_transform

            processor = transformers.AutoImageProcessor.from_pretrained(
                source, local_files_only=local, trust_remote_code=False
            )
            loaded.transform = image_transform(processor)
    except (OSError, ValueError, KeyError, ImportError):
        if not text:
            from ..data import ImageTransform

            config = getattr(loaded.model, "config", None)
            half = (0.5,) * getattr(config, "num_channels", 3)
            size = getattr(config, "image_size", 224)
            loaded.transform = ImageTransform(size=size, mean=half, std=half)
