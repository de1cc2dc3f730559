"""Load data from a folder of images, a text file or a Hugging Face dataset."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import DataError
from ..registry import imported
from ..runtime.images import open_image
from ..tasks import Task
from .class_names import Names, encode_labels, pick_column
from .image_data import IMAGE_COLUMNS, image_batches, image_folder
from .loaders import Batches
from .task_data import has_own_labels, task_file, task_table
from .text_files import LABEL_COLUMNS, SUFFIXES, read_texts, text_file


def load_data(
    source: str | Path,
    *,
    tokenizer: Callable[..., Any] | None = None,
    transform: Any = None,
    split: str | None = None,
    text_column: str | None = None,
    pair_column: str | None = None,
    label_column: str | None = None,
    labels: bool | str | Path = True,
    class_names: Names | None = None,
    max_length: int | None = None,
    batch_size: int = 32,
    key: str | None = "pixel_values",
    skip_broken: bool = False,
    task: Task | None = None,
    classes: int | None = None,
) -> Batches:
    """Load data; what `source` is decides how it is read.

        photos = load_data("photos", transform=processor)
        reviews = load_data("reviews.csv", tokenizer=tokenizer)
        sst2 = load_data("glue:sst2", split="validation", tokenizer=tokenizer)

    Args:
        source: a folder of images; a `.csv`, `.tsv`, `.jsonl`, `.json` or `.txt` file of texts; a
            folder written by `datasets.save_to_disk`; or the name of a dataset on the Hugging Face
            hub, where `name:config` chooses a configuration.
        tokenizer: the host's tokenizer, for text; a dataset without one is read as images.
        transform: how the host wants its images, see `image_transform`.
        split: of a dataset, for example `test`; required if there is more than one.
        text_column, pair_column, label_column: by default found under their usual names.
        class_names: see `image_folder`; by default those of a dataset, in its order.
        labels, max_length, batch_size, key, skip_broken: see `image_folder` and `text_file`.
        task: what the labels of texts are (`ensemble.task`); by default one class per text. The
            page on tasks has the forms of labels.
        classes: number of the model's labels or numbers, for a task that has several.
    """
    own: dict[str, Any] = {"labels": bool(labels), "class_names": class_names, "classes": classes}
    own |= {"text_column": text_column, "pair_column": pair_column, "label_column": label_column}
    own |= {"max_length": max_length, "batch_size": batch_size}
    path = Path(source).expanduser()
    saved = is_saved_dataset(path)
    if path.is_dir() and not saved:
        return image_folder(
            path,
            transform,
            labels=labels,
            label_column=label_column,
            class_names=class_names,
            batch_size=batch_size,
            key=key,
            skip_broken=skip_broken,
        )
    is_table = path.is_file() or path.suffix.lower() in SUFFIXES
    if is_table and tokenizer is not None and task is not None and has_own_labels(task):
        return task_file(path, tokenizer, task, **own)
    if is_table and tokenizer is not None:
        return text_file(
            path,
            tokenizer,
            text_column=text_column,
            pair_column=pair_column,
            label_column=label_column,
            labels=bool(labels),
            class_names=class_names,
            max_length=max_length,
            batch_size=batch_size,
        )
    if path.is_file():
        raise DataError(
            f"{path} is one file. A model of texts reads a table of them and needs tokenizer=...; "
            "a model of images reads a folder, or a list of paths."
        )
    name, _, config = str(source).partition(":")
    local = is_table or name.startswith((".", os.sep, "~")) or name.count("/") > 1
    if local and not saved:
        raise DataError(
            f"{path} does not exist. Give a folder of images, a text file or a dataset."
        )
    dataset = _open(path if saved else name, split, config or None)
    where, columns = f"The dataset {source}", dataset.column_names
    if tokenizer is not None and task is not None and has_own_labels(task):
        return task_table(
            columns,
            lambda column: list(dataset[column]),
            tokenizer,
            task,
            where=where,
            stored=partial(_stored_names, dataset),
            **own,
        )
    numbers: Tensor | None = None
    info: dict[str, Any] = {"class_names": None}
    if labels:
        usual = (*LABEL_COLUMNS, "fine_label", "coarse_label")
        column = pick_column(label_column, columns, usual, "label", where)
        stored = getattr(dataset.features.get(column), "names", None)
        numbers, info = encode_labels(
            list(dataset[column]), class_names, where=f"the dataset {source}", stored=stored
        )
    if tokenizer is not None:
        return read_texts(
            columns,
            dataset.__getitem__,
            tokenizer,
            where=where,
            text_column=text_column,
            pair_column=pair_column,
            labels=numbers,
            info=info,
            max_length=max_length,
            batch_size=batch_size,
        )
    column = pick_column(None, columns, IMAGE_COLUMNS, "image", where)
    images = dataset.select_columns([column])

    def image(row: int) -> Any:
        try:
            return open_image(images[row][column])
        except (DataError, OSError, SyntaxError) as error:
            raise DataError(f"{where}: the image of row {row} is broken: {error}") from error

    return image_batches(image, len(dataset), numbers, info, transform, batch_size, key)


def _stored_names(dataset: Any, column: str) -> list[str] | None:
    """Return the names of a column's numbers, also where a row holds a list of them."""
    feature = dataset.features.get(column)
    names = getattr(feature, "names", None) or getattr(
        getattr(feature, "feature", None), "names", None
    )
    return None if names is None else list(names)


def is_saved_dataset(folder: Path) -> bool:
    """Return whether a folder was written by `save_to_disk`."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def _open(name: str | Path, split: str | None, config: str | None) -> Any:
    """Open a dataset of the hub, or a folder that `save_to_disk` wrote."""
    datasets = imported("datasets", "A dataset of Hugging Face", "data")
    try:
        if isinstance(name, Path):
            dataset = datasets.load_from_disk(str(name))
        else:
            dataset = datasets.load_dataset(name, config)
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
