"""Load an exported folder and run it with ONNX Runtime: images, texts or arrays to predictions."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from .._records import read_steady
from ..errors import DataError, FormatError
from ..prediction import ClassPrediction, Prediction, join
from ..registry import imported, unknown_name
from ..task_predictions import (
    EmbeddingPrediction,
    MultiLabelPrediction,
    RegressionPrediction,
    SpanPrediction,
    TokenPrediction,
)
from .contract import Contract, read_contract
from .images import ImageReader
from .texts import PLACES, Texts


def load(
    folder: Any,
    *,
    program: str | None = None,
    threads: int | None = None,
    providers: Sequence[str] = ("CPUExecutionProvider",),
) -> ExportedEnsemble:
    """Load a folder that `ensemble.export` wrote; every file that is read is checked first.

    Args:
        folder: The exported folder.
        program: `"onnx"`, or `"int8"` where it was exported too; by default the first there is.
        threads: Threads of ONNX Runtime; None lets it take the machine's cores.
        providers: ONNX Runtime's execution providers, the preferred one first.

    Raises:
        FormatError: The folder is incomplete, damaged, newer than this library, or not ours.
    """
    return read_steady(
        Path(folder),
        lambda: ExportedEnsemble(
            read_contract(folder), program=program, threads=threads, providers=providers
        ),
    )


class ExportedEnsemble:
    """An exported ensemble: the same answers as the ensemble's own, without torch.

    Any number of threads may call `predict`. Made by `load`.

    Attributes:
        contract: What goes in and what comes out.
        program: Which program runs: `onnx` or `int8`.
        sets: What makes the sets with a guarantee; None without.
    """

    def __init__(
        self,
        contract: Contract,
        *,
        program: str | None = None,
        threads: int | None = None,
        providers: Sequence[str] = ("CPUExecutionProvider",),
    ) -> None:
        self.contract = contract
        self.program = next(iter(contract.programs)) if program is None else program
        if self.program not in contract.programs:
            raise unknown_name("program", self.program, contract.programs)
        self._session = _session(contract, contract.programs[self.program], threads, providers)
        found = {port.name for port in self._session.get_inputs()}
        made = {port.name for port in self._session.get_outputs()}
        wanted = {port["name"] for port in contract.inputs}
        if found != wanted or not {port["name"] for port in contract.outputs} <= made:
            raise FormatError(
                f"The program in {contract.folder} takes {sorted(found)} and gives "
                f"{sorted(made)}, which its contract does not say. Export the ensemble again."
            )
        self._prepare = _preparation(contract)
        self.sets = contract.sets(self.program)

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Names of the classes by number, or None."""
        names = self.contract.data["class_names"]
        return None if names is None else tuple(names)

    @property
    def has_policy(self) -> bool:
        """Whether the program decides; without thresholds, predictions have no decisions."""
        policy = self.contract.policy(self.program)
        return policy["uncertainty_above"] is not None or policy["novelty_score_above"] is not None

    @property
    def task(self) -> str:
        """What the model does, such as `image-classification`."""
        return str(self.contract.data["task"])

    def predict(self, inputs: Any, *, batch_size: int = 32) -> Prediction:
        """Predict images, texts or arrays: the ensemble's own answers, in numpy columns.

        Args:
            inputs: Images (PIL, paths, or pixels `[H, W, 3]` of uint8) or texts, one or a list
                of them, by the exported preprocessing (two texts are `{"text": ..., "text_pair":
                ...}`, questions `{"question": ..., "context": ...}`); or prepared arrays: a mapping
                of input names to arrays, or one array for a model with one input.
            batch_size: So many examples run at once.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: expected at least 1.")
        return join([self.answer(arrays) for arrays in self._batches(inputs, batch_size)])

    def answer(self, arrays: Mapping[str, Any]) -> Prediction:
        """Predict prepared arrays, named as the contract names them, in one run."""
        ports = {port["name"] for port in self.contract.inputs}
        places = {n: v for n, v in arrays.items() if n in _BESIDE and n not in ports}
        places |= {n: arrays[n] for n in ("sequence_ids", "attention_mask") if n in arrays}
        outputs = self.run({n: v for n, v in arrays.items() if n in ports or n not in _BESIDE})
        code = outputs.pop("decision")
        columns: dict[str, Any] = {_COLUMN_OF.get(n, n): v for n, v in outputs.items()}
        kind = PREDICTIONS.get(self.task, ClassPrediction)
        if issubclass(kind, ClassPrediction):
            columns["disagreement"] = _disagreement(columns["member_logits"])
        if issubclass(kind, TokenPrediction):
            columns |= {"real": _real(columns["class_index"].shape, places)}
            columns["words"] = places.get("word_ids")
        if "offsets" in {field.name for field in fields(kind)}:
            columns |= {"offsets": places.get("offset_mapping"), "texts": places.get("texts")}
        return kind(
            **columns,
            score=self.contract.data["score"],
            code=code if self.has_policy else None,
            class_names=self.class_names,
            sets=self.sets,
        )

    def prepare(self, items: Sequence[Any]) -> dict[str, np.ndarray]:
        """Turn images or texts into the program's inputs, by the exported preprocessing."""
        if not items:
            raise DataError("There is nothing to predict: give at least one example.")
        if self._prepare is None:
            raise DataError(
                "This folder was exported without preprocessing: give arrays named "
                f"{', '.join(port['name'] for port in self.contract.inputs)}, or export it again "
                "from an ensemble that has a transform or a tokenizer."
            )
        made: Any = self._prepare(items)
        return made if isinstance(made, dict) else {self.contract.inputs[0]["name"]: made}

    def run(self, arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Run the program once on prepared arrays; return its outputs by name."""
        checked = self._checked(arrays)
        names = [port["name"] for port in self.contract.outputs]
        try:
            outputs = self._session.run(names, checked)
        except Exception as error:  # ONNX Runtime has its own kinds of errors, all plain
            shapes = {name: list(array.shape) for name, array in checked.items()}
            raise DataError(
                f"The program failed on inputs of shapes {shapes}: {str(error)[:300]}"
            ) from error
        return dict(zip(names, outputs, strict=True))

    def _batches(self, inputs: Any, batch_size: int) -> Iterator[dict[str, Any]]:
        several = isinstance(inputs, (list, tuple))
        if all(map(_is_one, inputs)) if several else _is_one(inputs):
            items = list(inputs) if several else [inputs]
            for start in range(0, max(1, len(items)), batch_size):
                yield self.prepare(items[start : start + batch_size])
            return
        ports = self.contract.inputs
        if not isinstance(inputs, Mapping):
            if len(ports) > 1:
                raise DataError(
                    f"This model takes {len(ports)} inputs: give a mapping of "
                    f"{', '.join(port['name'] for port in ports)} to arrays."
                )
            inputs = {ports[0]["name"]: inputs}
        checked = self._checked(inputs)
        count = len(next(iter(checked.values())))
        for start in range(0, count, batch_size):
            yield {name: array[start : start + batch_size] for name, array in checked.items()}

    def _checked(self, arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Return the arrays in the program's types, or raise when they do not fit the contract."""
        ports = {port["name"]: port for port in self.contract.inputs}
        if arrays.keys() != ports.keys():
            raise DataError(
                f"Found the inputs {', '.join(map(str, arrays))}; this model takes exactly "
                f"{', '.join(ports)}."
            )
        free: dict[str, int] = {}
        limits = self.contract.data["limits"]
        checked = {}
        for name, port in ports.items():
            array = _array(name, arrays[name], port["dtype"])
            expected = port["shape"]
            if array.ndim != len(expected):
                raise DataError(f"{name} has shape {list(array.shape)}; expected {expected}.")
            for size, wanted in zip(array.shape, expected, strict=True):
                wanted = free.setdefault(wanted, size) if isinstance(wanted, str) else wanted
                if size != wanted:
                    raise DataError(f"{name} has shape {list(array.shape)}; expected {expected}.")
            if not array.size:
                raise DataError(f"There is nothing to predict: {name} is empty.")
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise DataError(f"{name} holds NaN or infinite values. Leave those examples out.")
            checked[name] = array
        for size, most in limits.items():
            if free.get(size, 0) > most:
                raise DataError(f"{free[size]} {size} are more than {most}, which the model takes.")
        return checked

    def __repr__(self) -> str:
        data = self.contract.data
        return (
            f"ExportedEnsemble({data['host']}, {data['task']}, members={data['members']}, "
            f"classes={data['classes']}, program={self.program!r})"
        )


PREDICTIONS: dict[str, type[Prediction]] = {
    "token-classification": TokenPrediction,
    "multi-label": MultiLabelPrediction,
    "regression": RegressionPrediction,
    "question-answering": SpanPrediction,
    "embedding": EmbeddingPrediction,
}
"""Classes of answers by task; the others are those of a classifier."""

_COLUMN_OF = {"class": "class_index"}
_BESIDE = ("texts", *PLACES)
"""What is made of texts beside the program's inputs."""


def _disagreement(logits: np.ndarray) -> np.ndarray:
    """Return the share of member pairs with different classes."""
    votes, members = logits.argmax(-1), logits.shape[1]
    differing = (votes[:, :, None] != votes[:, None, :]).sum((1, 2))
    return (differing / max(members * (members - 1), 1)).astype(np.float32)


def _real(shape: tuple[int, ...], places: Mapping[str, Any]) -> np.ndarray:
    """Return which tokens are neither padding nor special, bool `[batch, token]`."""
    real = np.ones(shape, dtype=bool)
    for name, kept in (("attention_mask", 1), ("sequence_ids", 0)):
        given = places.get(name)
        if given is not None and np.shape(given) == shape:
            real &= np.asarray(given) >= kept
    return real


def _session(contract: Contract, name: str, threads: int | None, providers: Sequence[str]) -> Any:
    onnxruntime = imported("onnxruntime", "An exported ensemble", "export")
    path = contract.file(name)
    for other in contract.data["files"]:  # weights beside a large program, read along with it
        if other.startswith(f"{name}."):
            contract.file(other)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if threads is not None:
        options.intra_op_num_threads = threads
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=list(providers))
    except Exception as error:  # ONNX Runtime has its own kinds of errors, all plain
        raise FormatError(f"Cannot load {path}: {str(error)[:300]}") from error


def _preparation(contract: Contract) -> Any:
    settings = contract.data["preprocessing"]
    if settings is None:
        return None
    if settings["kind"] == "image":
        return ImageReader.from_contract(settings)
    try:
        content = contract.file(settings["file"]).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise FormatError(f"Cannot read the tokenizer in {contract.folder}: {error}.") from error
    return Texts(content, settings, [port["name"] for port in contract.inputs])


def _is_one(item: Any) -> bool:
    """Tell whether an input is an image, a path or a text."""
    pixels = isinstance(item, np.ndarray) and item.dtype == np.uint8 and item.ndim in (2, 3)
    picture = hasattr(item, "convert") and hasattr(item, "getbands")  # PIL's
    texts = isinstance(item, Mapping) and isinstance(item.get("text", item.get("question")), str)
    return pixels or picture or texts or isinstance(item, (str, os.PathLike))


def _array(name: str, value: Any, dtype: str) -> np.ndarray:
    """Return a value as an array of a type, or raise when its kind is another one."""
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise DataError(f"{name} cannot be read as an array: {error}.") from error
    kinds = {"float32": "f", "int64": "iu", "int32": "iu", "bool": "b"}[dtype]
    if array.dtype.kind not in kinds + ("iu" if dtype == "float32" else ""):
        raise DataError(f"{name} is of type {array.dtype}; expected {dtype}.")
    return np.ascontiguousarray(array, dtype=dtype)
