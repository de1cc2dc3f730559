"""Models and data by name, as the command line takes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import DataError, FormatError, MissingDependencyError, UnsupportedModelError
from .class_names import check_labels, check_order, read_names
from .errors import Stop
from .hub_cache import hub_access, not_cached
from .options import DATA_HELP
from .output import say, waiting
from .timm_models import is_timm_name

SAFE = {"trust_remote_code": False, "use_safetensors": True}
"""How weights of transformers are loaded: no code of the hub, no pickle."""

FILES = (".csv", ".json", ".jsonl", ".ndjson", ".tab", ".tsv", ".txt")


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

    from ..data.class_names import class_count, first_spellings, model_names

    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise Stop(f"Unknown --dtype {dtype!r}: expected float32, bfloat16, float16 or float64.", 2)
    names = read_names(class_names)
    if name.startswith("timm:"):
        loaded = _timm(name)
    elif is_timm_name(name):
        loaded = _timm(f"timm:{name}")
    elif (config := _config_of(Path(name))).get("format") == "hydra-ensembles":
        loaded = _ensemble(name)
    elif "architecture" in config and "pretrained_cfg" in config:  # written by timm's save_for_hf
        loaded = _timm(f"timm:local-dir:{name}")
    else:
        loaded = _transformers(name, names)
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
    labels = options.pop("labels", None)
    names, folder = loaded.spellings or loaded.class_names, Path(source).expanduser()
    if outliers and options.get("text_column") and folder.is_file():
        from ..data.text_files import read_table

        if options["text_column"] not in read_table(folder):  # it may be the labelled data's
            options["text_column"] = None
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
                **options,
            )
    except DataError as error:
        if folder.exists():
            raise
        raise DataError(f"There is no file or folder {source} here. {error}") from error
    classes = class_count(loaded.model)
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


def _config_of(folder: Path) -> dict[str, Any]:
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

    import_tiny_vit()
    model = HydraEnsemble.from_pretrained(folder)
    loaded = Loaded(model, folder, tokenizer=model.tokenizer, transform=model.transform)
    loaded.key = image_key(model)
    if loaded.tokenizer is None and loaded.transform is None:
        # saved without: nothing is read or fetched from where the host is said to come from
        if model.config is None:
            loaded.transform = _by_host(model.host)
        elif not hasattr(model.config, "vocab_size"):
            loaded.transform = _by_config(model)
            say(
                f"{folder} was saved without an image transform: images are scaled to "
                f"{loaded.transform.size} pixels and normalised to -1 ... 1. If the model was "
                "trained otherwise, set ensemble.transform and save it again.",
                json=True,
            )
        if loaded.transform is not None:  # orientation was not recorded, as in older folders
            loaded.transform = replace(loaded.transform, exif_orientation=False)
    return loaded


def _by_host(host: Any) -> Any:
    """Return how a host that nobody has told about wants its images: by its shape."""
    from ..data import ImageTransform

    shape = getattr(host, "shape", None)
    if type(host).__name__ == "TinyViT" and shape is not None:
        return tiny_vit_transform(shape)
    try:
        return _timm_transform(host)
    except DataError:
        size = getattr(getattr(host, "patch_embed", None), "img_size", 224)
        return ImageTransform(size=size)


def tiny_vit_transform(shape: Any) -> Any:
    """Return how the demo's model wants its images."""
    from ..data import ImageTransform

    normal = (0.5,) * shape.channels
    return ImageTransform(
        size=shape.image_size, crop=None, interpolation="bilinear", mean=normal, std=normal
    )


def import_tiny_vit() -> None:
    """Make the family of the demo's model known."""
    from ..hosts import tiny_vit  # noqa: F401


def _timm(name: str) -> Loaded:
    from .timm_models import load_timm

    model = load_timm(name)
    return Loaded(model, name, transform=_timm_transform(model), key=None)


def _timm_transform(model: Any) -> Any:
    from ..data import image_transform

    return image_transform(model)


def _transformers(name: str, names: list[str] | None) -> Loaded:
    folder = Path(name).expanduser()
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local and not folder.is_dir():
        raise DataError(f"There is no model folder {name}. Give a hub name, a folder or timm:NAME.")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise UnsupportedModelError(
            f"The folder {name} holds no config.json: expected what save_pretrained() of "
            "transformers or of hydra-ensembles writes."
        )
    try:
        import transformers
    except ImportError as error:
        raise MissingDependencyError(
            f"{name} needs transformers: pip install 'hydra-ensembles[transformers]'."
        ) from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if folder.is_dir():
        return _classifier(transformers, name, names)
    with hub_access() as reached:
        try:
            return _classifier(transformers, name, names)
        except UnsupportedModelError as error:
            if reached or _in_cache(name):
                raise
            raise UnsupportedModelError(not_cached(name)) from error


def _in_cache(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "config.json"), str)


def _classifier(transformers: Any, name: str, names: list[str] | None) -> Loaded:
    """Load a transformers classifier, or a dual encoder as one."""
    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        dual = hasattr(config, "vision_config") and hasattr(config, "text_config")
        built = " ".join(getattr(config, "architectures", None) or ())
        if dual and "Classification" not in built:
            return _zero_shot(transformers, name, names)
        text = hasattr(config, "vocab_size") and "ImageClassification" not in built
        kind = "AutoModelForSequenceClassification" if text else "AutoModelForImageClassification"
        model, info = getattr(transformers, kind).from_pretrained(
            name, output_loading_info=True, **SAFE
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UnsupportedModelError(
            f"Cannot load {name} as a classifier: {reason[:400]}"
        ) from error
    loaded = Loaded(model, name, untrained=tuple(sorted(info["missing_keys"])))
    _processors(loaded, name, text=text)
    return loaded


def _processors(loaded: Loaded, source: str, *, text: bool) -> None:
    """Find how the model wants its texts or images; what is missing is told when it is needed."""
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
        loaded.transform = None if text else _by_config(loaded.model)


def _by_config(model: Any) -> Any:
    from ..data import ImageTransform

    size = getattr(getattr(model, "config", None), "image_size", 224)
    channels = getattr(getattr(model, "config", None), "num_channels", 3)
    return ImageTransform(size=size, mean=(0.5,) * channels, std=(0.5,) * channels)


def _zero_shot(transformers: Any, name: str, names: list[str] | None) -> Loaded:
    from ..hosts import ZeroShotClassifier

    if names is None:
        raise Stop(
            f"{name} is a dual encoder: give the classes to choose from with --class-names.", 2
        )
    encoder = transformers.AutoModel.from_pretrained(name, **SAFE).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    model = ZeroShotClassifier(encoder, names, tokenizer=tokenizer)
    loaded = Loaded(model, name)
    _processors(loaded, name, text=False)
    return loaded
