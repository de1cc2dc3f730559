"""Any data as batches that a host takes: one place for every function that reads data.

Raw inputs go through the host's own tokenizer or image transform (`input_tools`), rows of token ids
are padded, labels become class numbers by the model's class names. Batches stay as they are.
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..data.batches import LABEL_KEYS, SPAN_KEYS, Batch
from ..data.class_names import encode_labels, model_names
from ..data.examples import (
    INPUT,
    PREPARED,
    Examples,
    examples_of,
    is_image,
    is_one_set,
    is_path,
    is_prepared,
    rows_of,
    tensor_column,
)
from ..data.image_data import FILE_COLUMNS, IMAGE_COLUMNS, image_batch
from ..data.loaders import Batches, Chained, EachBatch, Mapped, as_data, check_reiterable
from ..data.padding import IGNORED
from ..data.proxies import ProxyData
from ..data.sources import load_data
from ..data.text_files import LABEL_COLUMNS, TEXT_COLUMNS, TextBatches
from ..errors import DataError, HydraError
from ..runtime.images import open_image
from ..tasks import task_of
from .example_inputs import pad_token
from .host import HostModel
from .input_tools import find_tokenizer, find_transform, prompted, token_limit

LABELS = (*LABEL_COLUMNS, "fine_label", "coarse_label")
TEXTS: tuple[tuple[str, ...], ...] = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("question", "context"),
    ("text", "text_pair"),
    *((name,) for name in (*TEXT_COLUMNS, INPUT)),
)
"""Columns of texts, and of texts that are read together, as GLUE and others name them."""
READ_BY_ANSWERS = ("offset_mapping", "sequence_ids", "word_ids", "texts")
"""Inputs that the host does not take: by them answers name places in texts."""
NO_LABELS: dict[str, Any] = {"class_names": None}


def data_for(
    model: Any,
    source: Any,
    *,
    name: str = "data",
    labels: bool = True,
    once: bool = False,
    batch_size: int = 32,
) -> Any:
    """Return any data as batches that a model takes; data that is so already stays as it is.

    Args:
        model: A host, an ensemble, or anything that is called on a batch.
        source: Batches, a `DataLoader`, a data set of `datasets` or torch, a frame, texts, images
            or paths, with labels or without, or the path of a folder or file (see `load_data`).
        name: Of the data, in errors.
        labels: False leaves labels of examples out: those of outliers mean nothing here.
        once: Whether the data is read once, so that a generator will do.
        batch_size: Examples per batch, where batches are made here.
    """
    if not once and isinstance(source, Iterator):
        check_reiterable(source, name=name)
    return HostData(model, name, labels=labels, batch_size=batch_size).data(source)


def batch_for(model: Any, batch: Any, *, name: str = "batch") -> Any:
    """Return one batch in any form as a model takes it; a prepared batch stays as it is."""
    made = HostData(model, name)
    found = made.batch(batch)
    known = isinstance(found, (Tensor, Mapping, tuple, list))
    if not known and isinstance(made.host, nn.Module):
        raise DataError(
            f"Expected one {name} for {type(made.host).__name__}; found a {type(found).__name__}. "
            "Give a batch, such as next(iter(data)), or a few texts or images."
        )
    return found


def sets_for(model: Any, sets: Any, *, name: str = "given") -> dict[str, Any]:
    """Return outliers by family: of data, or of a mapping of data by family."""
    families = sets if isinstance(sets, Mapping) and not is_one_set(sets) else {name: sets}
    return {
        family: data_for(model, data, name=family, labels=False)
        for family, data in families.items()
    }


class HostData:
    """Makes data for one model.

    Args:
        model, name, labels, batch_size: See `data_for`.
    """

    def __init__(self, model: Any, name: str, *, labels: bool = True, batch_size: int = 32) -> None:
        self.model = model.model if isinstance(model, HostModel) else model
        self.host = getattr(self.model, "host", self.model)
        self.name, self.labelled, self.batch_size = name, labels, batch_size

    def data(self, source: Any) -> Any:
        """Return data; see `data_for`."""
        is_stream = isinstance(source, Iterator)
        if isinstance(source, (Mapped, Chained, EachBatch, ProxyData)):
            return source
        if isinstance(source, (str, os.PathLike)):
            return self._of_path(Path(source).expanduser())
        if isinstance(source, (HostModel, nn.Module, type)) or not (
            hasattr(source, "__iter__") or hasattr(source, "__getitem__")
        ):
            shown = " ".join(repr(source).split())[:60]
            raise self._error(f"{shown} ({type(source).__name__})", "Is it another argument?")
        if isinstance(source, Batches):
            return source if self.key else source.mapped(self.batch)
        if not isinstance(self.host, nn.Module):  # only the caller knows what it takes
            return source if isinstance(source, list) or is_stream else as_data(source)
        examples = examples_of(source, self.name)
        if examples is not None:
            return self.examples(examples)
        if isinstance(source, (Tensor, Mapping)) or _is_one_batch(source):
            return as_data(self.batch(source), batch_size=self.batch_size)
        if isinstance(source, (list, tuple)):
            made = [self.batch(batch) for batch in source]
            same = all(new is old for new, old in zip(made, source, strict=True))
            return source if same and isinstance(source, list) else made
        if isinstance(source, DataLoader):
            loader: Any = copy.copy(source)
            loader._iterator = None
            loader.collate_fn = functools.partial(self._collate, source.collate_fn)
            return loader
        return map(self.batch, source) if is_stream else EachBatch(source, self.batch)

    def batch(self, batch: Any) -> Batch:
        """Return a batch as the host takes it."""
        if isinstance(batch, Tensor):
            return batch
        if isinstance(batch, (tuple, list)) and len(batch) == 2 and isinstance(batch[0], Tensor):
            return batch if isinstance(batch[1], Tensor) else (batch[0], self._numbers(batch[1]))
        if isinstance(batch, Mapping) and is_prepared(batch):
            return self._fitting(batch)
        examples = examples_of(batch, self.name)
        if examples is None and not isinstance(batch, (list, tuple)):
            examples = examples_of([batch], self.name)
        return batch if examples is None else self._whole_batch(examples)

    def examples(self, examples: Examples) -> Batches:
        """Return batches of examples that are read by row."""
        names = set(examples.names)
        label = next((n for n in LABELS if n in names), None) if self.labelled else None
        numbers, info = None, NO_LABELS
        if label is not None and examples.column is not None:
            numbers, info = self._labels(examples, label)
        load: Callable[[dict[str, list[Any]]], Batch] = self._stacked
        if not names & set(PREPARED) and not self._takes(names):
            first = {name: values[0] for name, values in examples.read([0]).items()}
            texts = next((c for c in TEXTS if all(isinstance(first.get(n), str) for n in c)), None)
            if texts is not None and not self._reads_images:
                if label is not None and numbers is None:
                    numbers, info = self._labels(examples, label)
                return self._texts(examples, texts, numbers, info)
            image = next((n for n in (*IMAGE_COLUMNS, *FILE_COLUMNS, INPUT) if n in first), None)
            if image is not None and (is_image(first[image]) or is_path(first[image])):
                info = {**info, **self._check_images(examples, image)}
                load = functools.partial(self._images, image)
            elif not hasattr(first.get(INPUT), "shape"):
                raise self._error(examples.what, self._advice(examples))

        def batch(rows: Sequence[int]) -> Batch:
            columns = examples.read(rows)
            made = load(columns)
            if label is None:
                return made
            found = self._numbers(columns[label]) if numbers is None else numbers[list(rows)]
            return {**made, "labels": found} if isinstance(made, dict) else (*made, found)

        rows = range(examples.count)
        return Batches(batch, rows, batch_size=self.batch_size, labels=numbers, info=info)

    # --- what the host reads ---------------------------------------------------------------------

    @functools.cached_property
    def key(self) -> str | None:
        """The host's name for images; None where they are positional."""
        takes = self._parameters
        return "pixel_values" if takes is None or "pixel_values" in takes else None

    @functools.cached_property
    def _parameters(self) -> frozenset[str] | None:
        """Names that the host's forward takes; None where it takes any."""
        try:
            parameters = inspect.signature(self.host.forward).parameters.values()
        except (AttributeError, TypeError, ValueError):
            return None
        more = any(p.kind is p.VAR_KEYWORD for p in parameters)
        names = {p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
        return None if more and not names & set(PREPARED) else frozenset(names)

    @property
    def _reads_images(self) -> bool:
        main = getattr(self.host, "main_input_name", None)
        return self.tokenizer is None if main is None else main == "pixel_values"

    @functools.cached_property
    def tokenizer(self) -> Any:
        """What turns texts into inputs, in the host's prompt if it has one; or None."""
        found = getattr(self.model, "tokenizer", None) or find_tokenizer(self.host)
        return prompted(self.host, found)

    @functools.cached_property
    def transform(self) -> Any:
        """What turns an image into an input, or None."""
        return getattr(self.model, "transform", None) or find_transform(self.host)

    def _takes(self, names: set[str]) -> bool:
        """Return whether a host with its own names of inputs takes one of these columns."""
        takes = self._parameters or frozenset()
        return not takes & set(PREPARED) and bool(names & takes)

    # --- one kind of example each ----------------------------------------------------------------

    def _texts(
        self, examples: Examples, names: Sequence[str], labels: Tensor | None, info: Any
    ) -> Batches:
        if self.tokenizer is None:
            raise self._error(
                examples.what,
                "It has no tokenizer here: set model.tokenizer = "
                "AutoTokenizer.from_pretrained(...), or pass data.text_data(texts, tokenizer).",
            )
        columns = [examples.whole(name) for name in names]
        for texts in columns:
            row = next((row for row, text in enumerate(texts) if not isinstance(text, str)), None)
            if row is not None:
                raise self._error(examples.what, f"Text {row} is {texts[row]!r:.60}.")
        return TextBatches(
            columns[0],
            self.tokenizer,
            pairs=columns[1] if len(columns) > 1 else None,
            labels=labels,
            info=info,
            max_length=token_limit(getattr(self.host, "config", None), self.tokenizer),
            batch_size=self.batch_size,
        )

    def _check_images(self, examples: Examples, name: str) -> dict[str, Any]:
        """Raise where images cannot be read; return what the data says about them."""
        if not self._reads_images:
            raise self._error(examples.what, "Give texts, or batches of token ids.")
        if self.transform is None:
            raise self._error(
                examples.what,
                "It has no image transform here: set model.transform = data.image_transform("
                "AutoImageProcessor.from_pretrained(...)), or pass batches of tensors.",
            )
        info = {"transform": self.transform}
        if examples.column is None or not is_path(examples.read([0])[name][0]):
            return info
        files = examples.column(name)
        missing = [file for file in files if not is_path(file) or not Path(file).is_file()]
        if missing:
            raise self._error(
                examples.what,
                f"{len(missing)} of {len(files)} are not files, such as {str(missing[0])[:60]!r}: "
                "give paths of images.",
            )
        return {**info, "files": [Path(file) for file in files]}

    def _images(self, name: str, columns: Mapping[str, list[Any]]) -> Batch:
        made = []
        for value in columns[name]:
            if isinstance(value, Mapping):  # as the library `datasets` stores images
                value = value.get("bytes") or value.get("path")
            try:
                made.append(self.transform(open_image(value)))
            except DataError as error:
                raise DataError(f"An image of the {self.name} data: {error}") from error
        return image_batch(torch.stack(made), None, self.key)

    def _stacked(self, columns: Mapping[str, list[Any]]) -> Batch:
        """Stack and pad prepared rows: token ids, pixels, tensors."""
        takes = self._parameters
        made: dict[str, Tensor] = {}
        for name, values in columns.items():
            known = name in (INPUT, *PREPARED) or (takes is not None and name in takes)
            if name in LABELS or not known or (name in SPAN_KEYS and not self.labelled):
                continue
            ids = name in ("input_ids", INPUT)
            made[name], lengths = tensor_column(values, pad=self._pad if ids else 0, name=name)
            if lengths is not None and ids and "attention_mask" not in columns:
                ends = torch.tensor(lengths)[:, None]
                made["attention_mask"] = (torch.arange(max(lengths)) < ends).long()
        return (made[INPUT],) if INPUT in made else self._fitting(made)

    @property
    def _pad(self) -> int:
        found = pad_token(self.host)
        return int((getattr(self.tokenizer, "pad_token_id", None) if found is None else found) or 0)

    def _fitting(self, batch: Mapping[str, Any]) -> Batch:
        """Return a prepared mapping with what the host takes, as tensors and by its own names."""
        parts = [value for name, value in batch.items() if name in (*PREPARED, *LABEL_KEYS)]
        if not all(isinstance(part, Tensor) for part in parts):
            examples = examples_of({name: rows_of(v) for name, v in batch.items()}, self.name)
            return batch if examples is None else self._whole_batch(examples)
        takes = self._parameters
        if takes is None:
            return batch
        if "pixel_values" in batch and "pixel_values" not in takes:
            labels = next((batch[key] for key in LABEL_KEYS if key in batch), None)
            return image_batch(batch["pixel_values"], labels, None)
        known = {*takes, *READ_BY_ANSWERS, *LABEL_KEYS, *SPAN_KEYS}
        if all(name in known for name in batch):
            return batch
        return {name: value for name, value in batch.items() if name in known}

    def _whole_batch(self, examples: Examples) -> Batch:
        made = self.examples(examples)
        return made.subset(range(made.count), batch_size=made.count).batch(0)

    # --- labels ----------------------------------------------------------------------------------

    def _labels(self, examples: Examples, column: str) -> tuple[Tensor | None, dict[str, Any]]:
        """Return the labels of all rows as numbers, and what they say about the classes."""
        values = [v.item() if getattr(v, "ndim", 1) == 0 else v for v in examples.whole(column)]
        first = values[0]
        for row, value in enumerate(values):
            if value is None or (isinstance(value, float) and value != value):
                raise DataError(f"Row {row} of the {self.name} data has no label: {value}.")
        if isinstance(first, (list, tuple)) or getattr(first, "ndim", False):
            return tensor_column(values, pad=IGNORED, name=column)[0], NO_LABELS
        if all(isinstance(value, int) and value == -1 for value in values):
            return None, NO_LABELS  # how public test sets hide their labels
        if not isinstance(first, str) and not task_of(self.model).classifies:
            return torch.tensor(values), NO_LABELS
        names, stored = model_names(self.model), examples.class_names(column)
        where = f"the {self.name} data"
        if isinstance(first, float) and any(value != int(value) for value in values):
            return torch.tensor(values), NO_LABELS
        return encode_labels(values, names, where=where, stored=stored)

    def _numbers(self, labels: Any) -> Tensor:
        """Return the labels of one batch as numbers."""
        if isinstance(labels, Tensor):
            return labels
        values = rows_of(labels)
        if not isinstance(values, list):
            raise self._error(f"the labels {labels!r:.60}", "Give one label per example.")
        if values and isinstance(values[0], str) and model_names(self.model) is None:
            raise DataError(
                f"The labels of the {self.name} data are names, such as {values[0]!r:.60}, but "
                f"{type(self.host).__name__} has no class names. Give numbers, or set "
                "model.config.id2label."
            )
        examples = examples_of({"labels": values}, self.name)
        assert examples is not None
        found = self._labels(examples, "labels")[0]
        return torch.full((examples.count,), -1) if found is None else found

    # --- reading ---------------------------------------------------------------------------------

    def _collate(self, collate: Callable[[Any], Any], rows: Any) -> Batch:
        """Join rows as a loader does or, where it cannot, as examples."""
        try:
            made = collate(rows)
        except (TypeError, ValueError, RuntimeError, KeyError, AttributeError) as error:
            try:
                return self.batch(rows)
            except HydraError as why:
                raise DataError(
                    f"The loader of the {self.name} data cannot join its rows "
                    f"({str(error).splitlines()[0][:200]}), nor can we: {why}"
                ) from error
        return self.batch(made)

    def _of_path(self, path: Path) -> Any:
        if not path.exists():
            raise self._error(
                f"the string {str(path)[:60]!r}",
                "No file or folder has this name. Give the path of one, or a list of texts.",
            )
        return load_data(
            path,
            tokenizer=None if self._reads_images else self.tokenizer,
            transform=self.transform if self._reads_images else None,
            labels=self.labelled,
            class_names=model_names(self.model) if self.labelled else None,
            batch_size=self.batch_size,
            key=self.key,
        )

    def _advice(self, examples: Examples) -> str:
        named = [name for name in examples.names if name not in (INPUT, *LABELS)]
        wanted = "image" if self._reads_images else "text"
        return f"Rename one of the columns {', '.join(named)} to {wanted!r}." if named else ""

    def _error(self, found: str, advice: str) -> DataError:
        kinds = ("images", "image (or path)") if self._reads_images else ("texts", "text")
        return DataError(
            f"Cannot read the {self.name} data: found {found}. {type(self.host).__name__} takes "
            f"{kinds[0]}: a list, (inputs, labels), pairs, a frame or data set with the columns "
            f"{kinds[1]} and label; or batches of tensors. {advice}".strip()
        )


def _is_one_batch(source: Any) -> bool:
    """Return whether a tuple is `(inputs, labels)`, and not several batches."""
    if not isinstance(source, tuple) or len(source) not in (1, 2):
        return False
    if not isinstance(source[0], (Tensor, Mapping)):
        return False
    return len(source) == 1 or not isinstance(source[1], Mapping)
