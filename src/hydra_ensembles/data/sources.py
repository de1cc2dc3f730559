"""Load data from a folder of images, a text file or a Hugging Face dataset."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import DataError
from . import table_files as tables
from .class_names import Names
from .hub import hub_dataset, is_saved_dataset
from .image_data import image_folder
from .loaders import Batches
from .text_files import text_file


def load_data(
    source: str | Path,
    *,
    tokenizer: Callable[..., Any] | None = None,
    transform: Any = None,
    split: str | None = None,
    text_column: str | None = None,
    pair_column: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    labels: bool | str | Path = True,
    class_names: Names | None = None,
    max_length: int | None = None,
    batch_size: int = 32,
    key: str | None = "pixel_values",
    skip_broken: bool = False,
) -> Batches:
    """Load data; what `source` is decides how it is read.

    Args:
        source: a folder of images; a `.csv`, `.tsv`, `.jsonl`, `.json` or `.txt` file of texts; a
            folder written by `datasets.save_to_disk`; or the name of a dataset on the Hugging Face
            hub, where `name:config` chooses a configuration.
        tokenizer: needed for text.
        transform: how the host wants its images, see `image_transform`.
        split, text_column, pair_column, image_column, label_column, labels, class_names,
            max_length, batch_size, key, skip_broken: see `image_folder`, `text_file` and
            `hub_dataset`.
    """
    path = Path(source).expanduser()
    if path.is_dir() and not is_saved_dataset(path):
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
    if path.is_file() or path.suffix.lower() in tables.SUFFIXES:
        if tokenizer is None and path.is_file():
            raise DataError(f"{path} is a text file, which needs the host's tokenizer=....")
        return text_file(
            path,
            tokenizer or _unused,
            text_column=text_column,
            pair_column=pair_column,
            label_column=label_column,
            labels=bool(labels),
            class_names=class_names,
            max_length=max_length,
            batch_size=batch_size,
        )
    name, _, config = str(source).partition(":")
    if not path.is_dir() and (name.startswith((".", os.sep, "~")) or name.count("/") > 1):
        raise DataError(
            f"{path} does not exist. Give a folder of images, a text file or a dataset."
        )
    return hub_dataset(
        path if path.is_dir() else name,
        config=None if path.is_dir() else config or None,
        split=split,
        tokenizer=tokenizer,
        transform=transform,
        text_column=text_column,
        pair_column=pair_column,
        image_column=image_column,
        label_column=label_column,
        labels=bool(labels),
        class_names=class_names,
        max_length=max_length,
        batch_size=batch_size,
        key=key,
    )


def _unused(*texts: Any) -> Any:  # a missing file is reported before any tokenizer is called
    raise AssertionError
