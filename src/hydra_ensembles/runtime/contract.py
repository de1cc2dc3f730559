"""The contract of an exported folder: what goes in, what comes out, and the files it is made of.

`contract.json` is plain data. It names the SHA-256 of every other file and of its own content, so
a file that was truncated, replaced or mixed up is found before it is opened. A checksum tells
damage, not intent: whoever can write the folder can write a new contract too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._records import check_seal, check_version, inside, read_json, sha256_of_file
from ..errors import FormatError

FORMAT = "hydra-ensembles-export"
FORMAT_VERSION = (1, 1)
CONTRACT = "contract.json"
DIGEST = "contract_sha256"
ADVICE = "Export the ensemble again."

TASKS = ("image-classification", "text-classification", "token-classification", "classification")
PROGRAMS = ("onnx", "int8", "torch")
DTYPES = ("float32", "int64", "int32", "bool")

OUTPUTS: dict[str, tuple[str, str, str]] = {
    "label": ("int64", "each", "the most probable class, the lower one on a tie"),
    "probabilities": ("float32", "each class", "mean of the members' softmax"),
    "uncertainty": ("float32", "each", "the score that `score` names; higher when less sure"),
    "mutual_information": ("float32", "each", "how far the members disagree, in nats"),
    "novelty": ("float32", "example", "share of the known data that is less novel, in [0, 1]"),
    "novelty_score": ("float32", "example", "what `novelty` ranks; unbounded"),
    "decision": ("int64", "each", "0 answer, 1 abstain as unsure, 2 abstain as new, by `rule`"),
    "abstain": ("bool", "each", "True where `decision` is not 0"),
    "member_logits": ("float32", "members", "the members' logits, temperatures applied"),
}
"""Outputs by name: type, shape ("each": per example, or per token of a token classifier), meaning.

`novelty` and `novelty_score` are there when novelty was fitted."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,120}")


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
    def task(self) -> str:
        """What the model does, one of `TASKS`."""
        return str(self.data["task"])

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Names of the classes by number, or None when nobody named them."""
        names = self.data["class_names"]
        return None if names is None else tuple(names)

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
        """Names of the programs' files by kind: `onnx`, `int8`, `torch`."""
        return dict(self.data["programs"])

    def rule(self, program: str) -> dict[str, Any]:
        """Return when a program abstains: one with 8-bit weights has thresholds of its own."""
        return dict(self.data.get("rules", {}).get(program) or self.data["rule"])

    def file(self, name: str) -> Path:
        """Return the path of a file, once its content is what the contract says."""
        expected = self.data["files"].get(name)
        if expected is None:
            raise FormatError(f"{CONTRACT} in {self.folder} names no file {name!r:.60}.")
        path = inside(self.folder, name)
        try:
            size = path.stat().st_size if path.is_file() else None
        except OSError as error:
            raise FormatError(f"Cannot read {path}: {error}.") from error
        if size is None:
            raise FormatError(
                f"{self.folder} has a {CONTRACT} but no {name}: the folder is incomplete. Copy it "
                "again, or export the ensemble again."
            )
        if size != expected["bytes"] or sha256_of_file(path) != expected["sha256"]:
            raise FormatError(
                f"{path} is not the file that was exported: it was truncated, replaced or changed. "
                "Copy the folder again, or export the ensemble again."
            )
        return path


def read_contract(folder: Any) -> Contract:
    """Read and check the contract of an exported folder; its other files are not opened.

    Raises:
        FormatError: There is none, it is damaged, newer than this library, or not ours.
    """
    folder = Path(folder)
    path = inside(folder, CONTRACT)
    if not path.is_file():
        raise FormatError(
            f"No {CONTRACT} in {folder}: expected a folder written by ensemble.export() or "
            "`hydra-ensembles export`."
        )
    data = read_json(path, "the contract of an exported ensemble", ADVICE)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise FormatError(f"{path} is not the contract of an exported ensemble.")
    check_version(data.get("format_version"), FORMAT_VERSION, path)
    problem = problem_of(data)
    if problem:
        raise FormatError(f"{path}: {problem}. {ADVICE}")
    check_seal(data, path, ADVICE, DIGEST)
    return Contract(folder, data)


def problem_of(data: Mapping[str, Any]) -> str | None:
    """Say what is wrong with a contract, or return None."""
    missing = FIELDS.keys() - data.keys()
    if missing:
        return f"it lacks {', '.join(sorted(missing))}"
    for name, check in FIELDS.items():
        try:
            good = check(data[name])
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError):
            good = False
        if not good:
            return f"{name} is {data[name]!r:.80}, which cannot be"
    if not _are_rules(data.get("rules", {})):
        return f"rules is {data['rules']!r:.80}, which cannot be"
    names = [port["name"] for port in (*data["inputs"], *data["outputs"])]
    if len(set(names)) < len(names):
        return "two inputs or outputs have one name"
    if unknown := set(data["programs"].values()) - set(data["files"]):
        return f"the program {sorted(unknown)[0]!r:.60} is not among its files"
    if data["class_names"] is not None and len(data["class_names"]) != data["classes"]:
        return f"{len(data['class_names'])} names for {data['classes']} classes"
    preparation = data["preprocessing"]
    if preparation and preparation["kind"] == "text" and preparation["file"] not in data["files"]:
        return "its tokenizer is not among its files"
    return None


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**31


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _maybe_number(value: Any) -> bool:
    return value is None or _is_number(value)


def _are_ports(value: Any) -> bool:
    return (
        isinstance(value, list)
        and 0 < len(value) < 100
        and all(
            _is_name(port["name"])
            and port["dtype"] in DTYPES
            and 0 < len(port["shape"]) < 10
            and all(_is_name(size) or _is_count(size) for size in port["shape"])
            and port["shape"][0] == "batch"
            for port in value
        )
    )


def _are_outputs(value: Any) -> bool:
    needed = set(OUTPUTS) - {"novelty", "novelty_score"}
    return _are_ports(value) and needed <= {port["name"] for port in value}


def _are_files(value: Any) -> bool:
    return isinstance(value, dict) and all(
        _is_name(name)
        and re.fullmatch(r"[0-9a-f]{64}", entry["sha256"]) is not None
        and type(entry["bytes"]) is int
        and entry["bytes"] >= 0
        for name, entry in value.items()
    )


def _are_programs(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and bool(value)
        and all(kind in PROGRAMS and _is_name(name) for kind, name in value.items())
    )


def _is_rule(value: Any) -> bool:
    return (
        isinstance(value["kind"], str)
        and _maybe_number(value["uncertainty_above"])
        and _maybe_number(value["novelty_score_above"])
    )


def _are_rules(value: Any) -> bool:
    try:
        return isinstance(value, dict) and all(
            kind in PROGRAMS and _is_rule(rule) for kind, rule in value.items()
        )
    except (TypeError, KeyError):
        return False


def _is_preparation(value: Any) -> bool:
    if value is None:
        return True
    if value["kind"] == "image":
        sides = value["size"]
        return (
            len(sides) == 2
            and all(_is_count(side) and side <= 2**14 for side in sides)
            and (value["crop"] is None or 0 < float(value["crop"]) <= 8)
            and isinstance(value["interpolation"], str)
            and len(value["mean"]) == len(value["std"]) in (1, 3)
            and all(_is_number(v) for v in (*value["mean"], *value["std"]))
            and all(v > 0 for v in value["std"])
            and type(value.get("exif_orientation", False)) is bool
        )
    template = value["template"]
    return (
        value["kind"] == "text"
        and _is_name(value["file"])
        and _is_count(value["max_length"])
        and type(value["pad_id"]) is int
        and value["pad_id"] >= 0
        and isinstance(value["pad_token"], str)
        and value["padding_side"] in ("left", "right")
        and value["truncation_side"] in ("left", "right")
        and (template is None or (isinstance(template, str) and template.count("{}") == 1))
    )


def _are_names(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(n, str) for n in value))


FIELDS: dict[str, Any] = {
    "libraries": lambda v: isinstance(v, dict),
    "task": lambda v: v in TASKS,
    "host": lambda v: isinstance(v, str),
    "members": _is_count,
    "classes": _is_count,
    "inputs": _are_ports,
    "outputs": _are_outputs,
    "class_names": _are_names,
    "score": lambda v: isinstance(v, str),
    "temperature": _maybe_number,
    "member_temperatures": lambda v: v is None or all(_is_number(t) for t in v),
    "novelty": lambda v: v is None or _is_count(v["examples"]),
    "rule": _is_rule,
    "limits": lambda v: all(_is_name(size) and _is_count(most) for size, most in v.items()),
    "preprocessing": _is_preparation,
    "programs": _are_programs,
    "files": _are_files,
    "agreement": lambda v: isinstance(v, dict),
    DIGEST: lambda v: isinstance(v, str),
}
"""Fields of a contract beside its format: each value by itself."""
