"""The contract of an exported folder: what goes in, what comes out, and the files it is made of.

`contract.json` is plain data. It holds the SHA-256 of every other file and of its own content, so a
file that was truncated, replaced or mixed up is found before it is opened. A checksum finds damage,
not intent: whoever can write the folder can write a new contract too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._records import SEAL, check_version, inside, read_sealed, sha256_of_file
from ..errors import FormatError
from ..prediction_sets import Sets

FORMAT = "hydra-ensembles-export"
FORMAT_VERSION = (2, 1)
CONTRACT = "contract.json"
ADVICE = "Export the ensemble again."

OUTPUTS: dict[str, tuple[str, str, str]] = {
    "class": ("int64", "each", "the most probable class, the lower one on a tie"),
    "active": ("bool", "each class", "whether a label is predicted"),
    "start": ("int64", "example", "first token of the most probable span; 0 for no answer"),
    "end": ("int64", "example", "last token of the most probable span; 0 for no answer"),
    "values": ("float32", "each class", "mean of the members' numbers, or the student's"),
    "embedding": ("float32", "each class", "mean of the members' vectors"),
    "spread": ("float32", "each class", "standard deviation of the members"),
    "probabilities": ("float32", "each class", "mean of the members', or the student's"),
    "label_uncertainty": ("float32", "each class", "binary entropy of each label, in nats"),
    "confidence": ("float32", "example", "the span's probability among all that can be answers"),
    "no_answer": ("float32", "example", "probability that the text has no answer"),
    "uncertainty": ("float32", "each", "the score that `score` names; higher when less sure"),
    "mutual_information": ("float32", "each", "how far the members disagree, in nats"),
    "disagreement": ("float32", "example", "share of member pairs that decide differently"),
    "able": ("bool", "tokens", "which tokens may be part of an answer"),
    "member_logits": ("float32", "members", "the members' logits, temperatures applied"),
    "member_values": ("float32", "members", "the members' numbers"),
    "member_embeddings": ("float32", "members", "the members' vectors"),
    "student_logits": ("float32", "each class", "the student's logits, temperature applied"),
    "student_values": ("float32", "each class", "the student's numbers"),
    "novelty": ("float32", "example", "share of the known data that is less novel, in [0, 1]"),
    "novelty_score": ("float32", "example", "what `novelty` ranks; unbounded"),
    "decision": ("int64", "each", "0 answer, 1 unsure, 2 new, 3 unsure and new, by `policies`"),
}
"""Outputs by name: type, shape ("each": per example, or per token of a token classifier), meaning.

A program gives those of its task. `novelty` and `novelty_score` are there when novelty was fitted,
`student_...` where one output answers for the members."""
OPTIONAL = {"student_logits", "student_values", "novelty", "novelty_score"}

_SURE = {"uncertainty", "decision", "novelty", "novelty_score"}
_CLASSES = {"class", "probabilities", "mutual_information", "member_logits", "student_logits"}
_SPANS = {"start", "end", "confidence", "no_answer", "able", "disagreement", "member_logits"}
TASK_OUTPUTS: dict[str, set[str]] = {
    **dict.fromkeys(
        ("image-classification", "text-classification", "token-classification", "classification"),
        _CLASSES | _SURE,
    ),
    "multi-label": (_CLASSES - {"class"}) | {"active", "label_uncertainty", "disagreement"} | _SURE,
    "regression": {"values", "spread", "member_values", "student_values"} | _SURE,
    "question-answering": _SPANS | {"mutual_information"} | _SURE,
    "embedding": {"embedding", "spread", "member_embeddings"} | _SURE,
}
"""What a program of a task gives."""


@dataclass(frozen=True)
class Contract:
    """A checked contract and the folder that it belongs to.

    Attributes:
        folder: Where the files are.
        data: The content of `contract.json`.
    """

    folder: Path
    data: Mapping[str, Any]

    @property
    def inputs(self) -> list[dict[str, Any]]:
        """Name, type and shape of every input; a string in a shape is a free size."""
        return list(self.data["inputs"])

    @property
    def outputs(self) -> list[dict[str, Any]]:
        """Name, type, shape and meaning of every output, in the programs' order."""
        return list(self.data["outputs"])

    @property
    def programs(self) -> dict[str, str]:
        """Names of the programs' files by kind: `onnx`, `int8`."""
        return dict(self.data["programs"])

    def policy(self, program: str) -> dict[str, Any]:
        """Return when a program abstains: one with 8-bit weights has its own thresholds."""
        return dict(self.data["policies"][program])

    def sets(self, program: str) -> Sets | None:
        """Return what makes a program's sets; None without, and in older contracts."""
        record = (self.data.get("sets") or {}).get(program)
        return None if record is None else Sets.from_dict(record)

    def file(self, name: str) -> Path:
        """Return the path of a file after checking its size and SHA-256."""
        expected = self.data["files"].get(name)
        if expected is None:
            raise FormatError(f"{CONTRACT} in {self.folder} does not list a file {name!r:.60}.")
        path = inside(self.folder, name)
        try:
            if not path.is_file():
                raise FormatError(
                    f"{self.folder} has a {CONTRACT} but no {name}: the folder is incomplete. Copy "
                    "it again, or export the ensemble again."
                )
            size = path.stat().st_size
            if size != expected["bytes"] or sha256_of_file(path) != expected["sha256"]:
                raise FormatError(
                    f"{path} is not the file that was exported: it was truncated, replaced or "
                    "changed. Copy the folder again, or export the ensemble again."
                )
        except OSError as error:
            raise FormatError(f"Cannot read {path}: {error}.") from error
        return path


def read_contract(folder: Any) -> Contract:
    """Read and check the contract of an exported folder; its other files are not opened.

    Raises:
        FormatError: There is none, it is damaged, of another version, or not ours.
    """
    folder = Path(folder)
    path = inside(folder, CONTRACT)
    if not path.is_file():
        raise FormatError(
            f"No {CONTRACT} in {folder}: expected a folder written by ensemble.export() or "
            "`hydra-ensembles export`."
        )
    data = read_sealed(path, "a contract", ADVICE)
    if data.get("format") != FORMAT:
        raise FormatError(f"{path} is not the contract of an exported ensemble.")
    major, minor = check_version(data.get("format_version"), FORMAT_VERSION, path)
    if major < FORMAT_VERSION[0]:
        raise FormatError(
            f"{path} has format {major}.{minor}, older than {FORMAT_VERSION[0]}.0 which this "
            f"library reads. {ADVICE}"
        )
    if problem := problem_of(data):
        raise FormatError(f"{path}: {problem}. {ADVICE}")
    return Contract(folder, data)


def problem_of(data: Mapping[str, Any]) -> str | None:
    """Say what is wrong with a contract, or return None."""
    if missing := FIELDS.keys() - data.keys():
        return f"it lacks {', '.join(sorted(missing))}"
    for name, spec in FIELDS.items():
        try:
            good = fits(data[name], spec)
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, OverflowError):
            good = False
        if not good:
            return f"{name} has an invalid value: {data[name]!r:.80}"
    ports = {port["name"] for port in (*data["inputs"], *data["outputs"])}
    if len(ports) < len(data["inputs"]) + len(data["outputs"]):
        return "two inputs or outputs have the same name"
    if needed := TASK_OUTPUTS[data["task"]] - OPTIONAL - ports:
        return f"its outputs lack {', '.join(sorted(needed))}"
    if not data["programs"] or data["programs"].keys() != data["policies"].keys():
        return "programs and policies must name the same programs, at least one"
    if unknown := set(data["programs"].values()) - set(data["files"]):
        return f"the program {sorted(unknown)[0]!r:.60} is not among its files"
    try:
        for record in (data.get("sets") or {}).values():
            Sets.from_dict(record)
    except (FormatError, AttributeError, TypeError) as error:
        return f"its sets are not readable: {error}".rstrip(".")
    if data["class_names"] is not None and len(data["class_names"]) != data["classes"]:
        return f"{len(data['class_names'])} class names for {data['classes']} classes"
    preparation = data["preprocessing"]
    if preparation and preparation["kind"] == "text":
        if preparation.get("reads", "text") not in READS:
            return f"its texts are {preparation['reads']!r:.40}; expected {', '.join(READS)}"
        return None if preparation["file"] in data["files"] else "its tokenizer is not a file of it"
    if preparation and not len(preparation["mean"]) == len(preparation["std"]) in (1, 3):
        return "preprocessing needs one mean and one std per channel, for 1 or 3 channels"
    return None


def fits(value: Any, spec: Any) -> bool:
    """Tell whether a value fits a specification, as they stand in `FIELDS`.

    A type or a function checks the value, a tuple lists alternatives, `[spec]` is a list,
    `{"name": spec}` a record with at least these fields, `{key spec: spec}` a mapping of any size;
    anything else must be equal.
    """
    if isinstance(spec, tuple):
        return any(fits(value, one) for one in spec)
    if isinstance(spec, list):
        return type(value) is list and all(fits(one, spec[0]) for one in value)
    if isinstance(spec, dict):
        if all(isinstance(name, str) for name in spec):
            return all(fits(value[name], one) for name, one in spec.items())
        ((key, one),) = spec.items()
        return all(fits(k, key) and fits(v, one) for k, v in value.items())
    if isinstance(spec, type):
        return type(value) is spec
    return bool(spec(value)) if callable(spec) else bool(value == spec)


def _name(value: Any) -> bool:
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,120}", value) is not None


def _count(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**31


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _shape(value: Any) -> bool:
    return value[0] == "batch" and len(value) < 10 and fits(value, [(_count, _name)])


_PORTS = [{"name": _name, "dtype": ("float32", "int64", "int32", "bool"), "shape": _shape}]
_PROGRAM, _SIDE = ("onnx", "int8"), ("left", "right")

READS = ("text", "tokens", "question")
"""What a program makes of texts: one answer each, one per token, or a span for a question; `reads`
in the preprocessing, "text" where it is absent."""

FIELDS: dict[str, Any] = {
    "libraries": dict,
    "task": tuple(TASK_OUTPUTS),
    "host": str,
    "members": _count,
    "classes": _count,
    "inputs": lambda value: 0 < len(value) < 100 and fits(value, _PORTS),
    "outputs": lambda value: len(value) < 100 and fits(value, _PORTS),
    "class_names": (None, [str]),
    "score": str,
    "temperature": (None, _number),
    "member_temperatures": (None, [_number]),
    "novelty": (None, {"examples": _count}),
    "policies": {
        _PROGRAM: {
            "uncertainty_above": (None, _number),
            "novelty_score_above": (None, _number),
            "risk": (None, _number),
            "alarm": (None, _number),
            "words": str,
        }
    },
    "limits": {_name: _count},
    "preprocessing": (
        None,
        {
            "kind": "image",
            "size": lambda size: len(size) == 2 and fits(size, [_count]) and max(size) <= 2**14,
            "crop": (None, lambda crop: _number(crop) and 0 < crop <= 8),
            "interpolation": str,
            "mean": [_number],
            "std": [lambda std: _number(std) and std > 0],
            "exif_orientation": bool,
        },
        {
            "kind": "text",
            "file": _name,
            "max_length": _count,
            "pad_id": lambda value: type(value) is int and value >= 0,
            "pad_token": str,
            "padding_side": _SIDE,
            "truncation_side": _SIDE,
            "template": (None, lambda text: text.count("{}") == 1),
        },
    ),
    "programs": {_PROGRAM: _name},
    "files": {
        _name: {
            "sha256": lambda value: re.fullmatch("[0-9a-f]{64}", value) is not None,
            "bytes": lambda value: type(value) is int and value >= 0,
        }
    },
    "agreement": dict,
    SEAL: str,
}
"""Specification of every field beside the format (see `fits`)."""
