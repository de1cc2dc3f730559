"""Hugging Face datasets: by name from the hub, or a folder that `save_to_disk` wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import DataError, MissingDependencyError
from .batches import Batch
from .class_names import Names
from .image_data import image_batch
from .labels import encode_labels, pick_column
from .loaders import Batches
from .text_files import LABEL_COLUMNS, TEXT_COLUMNS, text_data
from .transforms import ImageTransform, image_transform

IMAGE_COLUMNS = ("image", "img", "images", "picture", "pixel_values")
LABELS = (*LABEL_COLUMNS, "fine_label", "coarse_label")


def hub_dataset(
    name: str | Path,
    *,
    split: str | None = None,
    config: str | None = None,
    revision: str | None = None,
    tokenizer: Callable[..., Any] | None = None,
    transform: Any = None,
    text_column: str | None = None,
    pair_column: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    labels: bool = True,
    class_names: Names | None = None,
    max_length: int | None = None,
    batch_size: int = 32,
    key: str | None = "pixel_values",
) -> Batches:
    """Read a Hugging Face dataset as data: texts if a tokenizer is given, otherwise images.

    Args:
        name: name on the hub, or a folder written by `save_to_disk`.
        split: for example `test`; required if there is more than one.
        config: the dataset's configuration, such as `sst2` of `glue`.
        revision: a branch, tag or commit of the hub.
        tokenizer: the host's tokenizer, for text data.
        transform: what `image_transform` takes; see `image_folder`.
        text_column, pair_column, image_column, label_column: by default found under their usual
            names.
        labels: False leaves them out, as for outliers.
        class_names: see `image_folder`; by default those of the dataset, in its order.
        max_length: most tokens per text; by default the tokenizer's limit.
        batch_size: examples per batch.
        key: the host's name for images; None gives `(images, labels)`.
    """
    dataset = _open(name, split, config, revision)
    where = f"The dataset {name}"
    numbers, facts = None, {"class_names": None}
    if labels:
        column = pick_column(label_column, dataset.column_names, LABELS, "label", where)
        stored = getattr(dataset.features.get(column), "names", None)
        numbers, facts = encode_labels(
            list(dataset[column]), class_names, where=f"the dataset {name}", stored=stored
        )
    if tokenizer is not None:
        column = pick_column(text_column, dataset.column_names, TEXT_COLUMNS, "text", where)
        pairs = None
        if pair_column is not None:
            pairs = list(dataset[pick_column(pair_column, dataset.column_names, (), "text", where)])
        data = text_data(
            list(dataset[column]),
            tokenizer,
            pairs=pairs,
            labels=numbers,
            max_length=max_length,
            batch_size=batch_size,
        )
        data.info |= facts
        return data
    column = pick_column(image_column, dataset.column_names, IMAGE_COLUMNS, "image", where)
    prepare = image_transform(ImageTransform() if transform is None else transform)
    pictures = dataset.select_columns([column])

    def load(rows: Sequence[int]) -> Batch:
        images = []
        for row in rows:
            try:
                images.append(prepare(pictures[int(row)][column]))
            except (OSError, SyntaxError) as error:
                raise DataError(f"{where}: the image of row {row} is broken: {error}.") from error
        return image_batch(
            torch.stack(images), None if numbers is None else numbers[list(rows)], key
        )

    info = {**facts, "transform": prepare}
    return Batches(load, range(len(dataset)), batch_size=batch_size, labels=numbers, info=info)


def is_saved_dataset(folder: Path) -> bool:
    """Return whether a folder was written by `save_to_disk`."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def _open(name: str | Path, split: str | None, config: str | None, revision: str | None) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise MissingDependencyError(
            "Hugging Face datasets need the package datasets: pip install 'hydra-ensembles[data]'."
        ) from error
    folder = Path(name).expanduser()
    try:
        if folder.is_dir() and is_saved_dataset(folder):
            dataset = datasets.load_from_disk(str(folder))
        else:
            dataset = datasets.load_dataset(str(name), config, revision=revision)
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(
            f"Cannot load the dataset {name}: {' '.join(str(error).split())}. "
            "Check its name and the network, or pass a folder that save_to_disk wrote."
        ) from error
    if isinstance(dataset, datasets.DatasetDict):
        if split is None and len(dataset) == 1:
            split = next(iter(dataset))
        if split not in dataset:
            problem = f"no split {split!r}" if split else "several splits"
            raise DataError(
                f"The dataset {name} has {problem}; pass split=... of: {', '.join(dataset)}."
            )
        return dataset[split]
    return dataset
