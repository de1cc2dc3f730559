"""Images, paths and texts as inputs, by the ensemble's transform or tokenizer.

Both belong to the ensemble: set in Python or taken from the data that built it, and saved with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._records import sha256_of_file
from ..data.class_names import real_names
from ..data.examples import is_image
from ..data.examples import is_raw as is_raw
from ..data.image_data import image_batch
from ..data.transforms import PROCESSOR_FILE, ImageTransform, ProcessorTransform
from ..errors import DataError, FormatError
from ..hosts.host_data import READ_BY_ANSWERS as READ_BY_ANSWERS
from ..hosts.host_data import batch_for
from ..hosts.input_tools import find_tokenizer, find_transform
from ..hosts.input_tools import prompted as prompted
from ..hosts.input_tools import token_limit as token_limit
from ..hosts.prompt_classifier import PromptClassifier, PromptTokenizer
from ..registry import imported
from ..runtime.images import open_image
from ..tasks import Task, task_of

if TYPE_CHECKING:
    from .host_interface import HostInterface


class Preparation:
    """How an ensemble prepares its inputs; files in its folder are read when first needed.

    Args:
        folder: Where a tokenizer or an image processor was saved.
        files: Their files' names, with the SHA-256 that they had when the ensemble was loaded.
        recorded: The image transform in the folder's config; None in older folders that have an
            image processor.
    """

    def __init__(
        self,
        folder: Path | None = None,
        files: Mapping[str, str] | None = None,
        recorded: Mapping[str, Any] | None = None,
    ) -> None:
        self.transform: Callable[[Any], Tensor] | None = None
        if recorded is not None and "processor" not in recorded:
            self.transform = ImageTransform.from_dict(recorded)
        self._exif_orientation = bool((recorded or {}).get("exif_orientation"))
        self.tokenizer: Any = None
        self._folder, self._files = folder, dict(files or {})

    def find_transform(self, host: Any) -> Callable[[Any], Tensor] | None:
        """Return the transform: the one that was set, the saved one, or the host's."""
        if self.transform is None and PROCESSOR_FILE in self._files:
            processor = self._saved("AutoImageProcessor")
            self.transform = ProcessorTransform(processor, self._exif_orientation)
        if self.transform is None and self._folder is None:
            self.transform = find_transform(host)
        return self.transform

    def find_tokenizer(self, host: Any) -> Any:
        """Return the tokenizer that was set or saved, or the prompted host's; or None."""
        if self.tokenizer is None and "tokenizer_config.json" in self._files:
            self.tokenizer = self._saved("AutoTokenizer")
        if self.tokenizer is None and (self._folder is None or isinstance(host, PromptClassifier)):
            self.tokenizer = find_tokenizer(host)
        return self.tokenizer

    def _saved(self, kind: str) -> Any:
        transformers = imported("transformers", "Preparing this ensemble's inputs", "transformers")
        folder = self._folder
        assert folder is not None
        try:
            made = getattr(transformers, kind).from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except BaseException as error:  # the library may refuse its own file with any error
            panic = (
                type(error).__name__ == "PanicException"
            )  # raised by Rust code; not an Exception
            if not isinstance(error, Exception) and not panic:
                raise
            raise FormatError(
                f"Cannot load the {kind.removeprefix('Auto').lower()} in {self._folder}: "
                f"{str(error)[:200]}. Set it in Python, or save the ensemble again."
            ) from error
        for name, digest in self._files.items():
            if not (folder / name).is_file() or sha256_of_file(folder / name) != digest:
                raise FormatError(
                    f"{folder / name} has changed since the ensemble was loaded: load it again."
                )
        return made


def remember_inputs(ensemble: HostInterface, data: Any) -> None:
    """Store the transform, tokenizer and class names of the data that built an ensemble."""
    transform, tokenizer = getattr(data, "transform", None), getattr(data, "tokenizer", None)
    tokenizer = getattr(tokenizer, "plain", tokenizer)  # without the prompt, which the host adds
    if isinstance(transform, (ImageTransform, ProcessorTransform)):
        ensemble.transform = transform
    if hasattr(tokenizer, "save_pretrained"):
        ensemble.tokenizer = tokenizer
    names = getattr(data, "class_names", None)
    if names and real_names(ensemble.id2label) is None:
        ensemble.id2label = dict(enumerate(map(str, names)))


def prepare(ensemble: HostInterface, batch: Any) -> Any:
    """Make a batch of images, paths or texts with the ensemble's transform or tokenizer.

    Other forms, such as a frame, go the way of all data (`batch_for`); a batch stays as it is.
    """
    if not is_raw(batch):
        return batch_for(ensemble, batch)
    items = list(batch) if isinstance(batch, (list, tuple)) else [batch]
    tokenize = prompted(ensemble.host, ensemble.tokenizer)
    if tokenize is not None:
        return prepare_texts(ensemble.host, tokenize, ensemble.config, task_of(ensemble), items)
    transform = ensemble.transform
    if transform is None:
        what = "an image" if is_image(items[0]) else repr(items[0])[:60]
        raise DataError(
            f"Cannot turn {what} into inputs: this ensemble was saved without a transform or "
            "tokenizer. Set ensemble.transform = hydra_ensembles.data.image_transform(processor), "
            "or ensemble.tokenizer; or give it a batch of tensors."
        )
    images = torch.stack([transform(open_image(item)) for item in items])
    return image_batch(images, None, image_key(ensemble))


def prepare_texts(
    host: Any, tokenize: Any, config: Any, task: Task, items: Sequence[Any]
) -> dict[str, Any]:
    """Tokenize texts, pairs or questions for a host as its task reads them.

    Args:
        host: The model.
        tokenize: Its tokenizer, or what `prompted` returned.
        config: The host's config, which may limit the tokens.
        task: The host's task.
        items: Texts, pairs or questions; all of one kind.
    """
    options: dict[str, Any] = {
        "padding": True,
        "max_length": token_limit(config, tokenize),
        "return_tensors": "pt",
        "truncation": True,
    }
    if "answer" in task.prediction.FIELDS:
        questions, contexts = _columns(host, items, ("question", "context"))
        options["truncation"] = "only_second"
        return _with_places(tokenize, contexts, (questions, contexts), options)
    if any(isinstance(item, Mapping) for item in items):
        if task.by_token or isinstance(tokenize, PromptTokenizer):
            raise DataError(f"{type(host).__name__} reads one text per input, not two.")
        texts, pairs = _columns(host, items, ("text", "text_pair"))
        return dict(tokenize(texts, pairs, **options))
    texts = list(items)
    _check_texts(host, texts)
    if task.by_token:
        return _with_places(tokenize, texts, (texts,), options)
    return dict(tokenize(texts, **options))


def _with_places(
    tokenize: Any, texts: list[str], given: tuple[list[str], ...], options: dict[str, Any]
) -> dict[str, Any]:
    """Tokenize; add where tokens are in their texts, if the tokenizer knows."""
    if not getattr(tokenize, "is_fast", False):
        return dict(tokenize(*given, **options))
    found = tokenize(*given, **options, return_offsets_mapping=True)
    rows = range(len(texts))
    places = {
        name: torch.tensor([[-1 if i is None else i for i in which(row)] for row in rows])
        for name, which in (("sequence_ids", found.sequence_ids), ("word_ids", found.word_ids))
    }
    return {**found, **places, "texts": texts}


def _columns(host: Any, items: Sequence[Any], names: tuple[str, str]) -> tuple[list[str], ...]:
    """Return two columns of texts."""
    first, second = names
    what = "a question" if first == "question" else "two texts"
    for item in items:
        given = [item.get(name) for name in names] if isinstance(item, Mapping) else [None]
        if not all(isinstance(value, str) for value in given):
            raise DataError(
                f"Found a {type(item).__name__} where {what} was expected: {type(host).__name__} "
                f"reads {{'{first}': ..., '{second}': ...}}, both of them strings."
            )
    return tuple([item[name] for item in items] for name in names)


def image_key(ensemble: HostInterface) -> str | None:
    """Return the host's keyword for images, or None when they are positional."""
    name = ensemble.main_input_name
    return name if name == "pixel_values" else None


def _check_texts(host: Any, items: Sequence[Any]) -> None:
    for item in items:
        if not isinstance(item, str):
            raise DataError(
                f"Found a {type(item).__name__} where a text was expected: "
                f"{type(host).__name__} reads strings."
            )
