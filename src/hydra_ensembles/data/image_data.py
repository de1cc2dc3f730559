"""Image folders: one subfolder per class, or flat, with a table of labels or without labels."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError
from ..runtime.images import open_image
from .batches import Batch
from .class_names import Names, encode_labels, pick_column
from .loaders import Batches
from .progress import progress_bar
from .text_files import LABEL_COLUMNS, read_table
from .transforms import ImageTransform, image_transform

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm"})
FILE_COLUMNS = ("file", "file_name", "filename", "path", "image")
IMAGE_COLUMNS = ("image", "img", "images", "picture", "pixel_values")


def image_folder(
    folder: str | Path,
    transform: Any = None,
    *,
    labels: bool | str | Path = True,
    label_column: str | None = None,
    class_names: Names | None = None,
    batch_size: int = 32,
    key: str | None = "pixel_values",
    skip_broken: bool = False,
) -> Batches:
    """Read a folder of images as data; images are decoded batch by batch in every pass.

        data = image_folder("flowers/train", AutoImageProcessor.from_pretrained(name))

    Args:
        folder: a folder with one subfolder per class, or with the images themselves.
        transform: what `image_transform` takes: the host's image processor, a timm model, an
            `ImageTransform`, a function; by default 224 pixels with ImageNet's normalisation.
        labels: True: the subfolders' names, if there are any; a CSV, TSV or JSONL file with one row
            per image (paths relative to the folder, or anywhere below it); False: no labels, as
            for outliers.
        label_column: column of that file; by default the usual names.
        class_names: names in the order of the host's classes, or spellings of each; by default
            those found, sorted: that order is assumed, and checked with the first model that meets
            the data (`check_class_order`).
        batch_size: images per batch.
        key: the host's name for images (a batch is a mapping); None gives `(images, labels)`.
        skip_broken: check every image first and leave broken ones out with one warning; by
            default the first broken one raises an error that names it.
    """
    root = Path(folder).expanduser()
    if not root.is_dir():
        kind = "is a file" if root.exists() else "does not exist"
        raise DataError(f"The image folder {root} {kind}. Give a folder of images.")
    files = sorted(
        path for path in root.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file()
    )
    if not files:
        raise DataError(
            f"There are no images in {root} or below it; expected files ending in "
            f"{', '.join(sorted(SUFFIXES))}."
        )
    values: list[Any] | None = None
    if not isinstance(labels, bool):
        files, values = _labelled(root, files, Path(labels), label_column)
    elif labels and any(path.parent != root for path in files):
        stray = [path for path in files if path.parent == root]
        if stray:
            raise DataError(
                f"{root} holds class subfolders and also {len(stray)} images beside them, such "
                f"as {stray[0].name}. Move those into their class, or pass labels=False."
            )
        values = [path.relative_to(root).parts[0] for path in files]
    if skip_broken:
        files, values = _unbroken(root, files, values)
    numbers: Tensor | None = None
    info: dict[str, Any] = {"class_names": None}
    if values is not None:
        where = f"the subfolders of {root}" if isinstance(labels, bool) else str(labels)
        numbers, info = encode_labels(
            values, class_names, where=where, numbers_stay=not isinstance(labels, bool)
        )

    def image(row: int) -> Any:
        try:
            return open_image(files[row])
        except DataError as error:
            raise DataError(
                f"{error} Replace or remove it, or pass skip_broken=True to leave broken images "
                "out."
            ) from error

    info["files"] = files
    return image_batches(image, len(files), numbers, info, transform, batch_size, key)


def image_batches(
    image: Callable[[int], Any],
    count: int,
    labels: Tensor | None,
    info: Mapping[str, Any],
    transform: Any,
    batch_size: int,
    key: str | None,
) -> Batches:
    """Make data from `count` images; `image` opens one by its number."""
    prepare = image_transform(ImageTransform() if transform is None else transform)

    def load(rows: Sequence[int]) -> Batch:
        images = torch.stack([prepare(image(int(row))) for row in rows])
        return image_batch(images, None if labels is None else labels[list(rows)], key)

    return Batches(
        load,
        range(count),
        batch_size=batch_size,
        labels=labels,
        info={**info, "transform": prepare},
    )


def image_batch(images: Tensor, labels: Tensor | None, key: str | None) -> Batch:
    """Make a batch of images: a mapping under `key`, or a tuple when `key` is None."""
    if key is None:
        return (images,) if labels is None else (images, labels)
    return {key: images} if labels is None else {key: images, "labels": labels}


def _unbroken(
    root: Path, files: list[Path], values: list[Any] | None
) -> tuple[list[Path], list[Any] | None]:
    """Drop broken images, with one warning that counts and names them."""
    broken = []
    for row, file in enumerate(progress_bar(files, description="checking images", unit="images")):
        try:
            open_image(file, draft=True)
        except DataError:
            broken.append(row)
    if len(broken) == len(files):
        raise DataError(f"All {len(files)} images in {root} are broken. Is it the right folder?")
    if broken:
        named = ", ".join(str(files[row].relative_to(root)) for row in broken[:5])
        warnings.warn(
            f"Left out {len(broken)} broken of {len(files)} images in {root}: {named}"
            + (", ..." if len(broken) > 5 else "."),
            stacklevel=3,
        )
    good = sorted(set(range(len(files))) - set(broken))
    return [files[row] for row in good], None if values is None else [values[row] for row in good]


def _labelled(
    root: Path, files: list[Path], table: Path, label_column: str | None
) -> tuple[list[Path], list[Any]]:
    """Return the files in a table of labels, with their labels, in the table's order."""
    rows = read_table(table)
    where = f"The table {table}"
    names = rows[pick_column(None, rows, FILE_COLUMNS, "file", where)]
    labels = rows[pick_column(label_column, rows, LABEL_COLUMNS, "label", where)]
    by_path = {path.relative_to(root).as_posix(): path for path in files}
    by_name: dict[str, list[Path]] = {}
    for path in files:
        by_name.setdefault(path.name, []).append(path)
    images = []
    for number, name in enumerate(names):
        same = by_name.get(str(name), [])
        match = by_path.get(Path(str(name)).as_posix()) or (same[0] if len(same) == 1 else None)
        if match is None:
            why = f"is there {len(same)} times" if same else "is not there"
            raise DataError(
                f"Row {number + 1} of {table} names the image {name!r}, which {why} in {root}. "
                "Give paths relative to that folder."
            )
        images.append(match)
    return images, labels
