"""Write and read `model.pt2`, a `torch.export` archive, without pickle.

`torch.export.load` warns that it may unpickle. It does so for sample inputs, for tensors of
unusual classes and for script objects; and it turns the expressions and names of operators in the
program's JSON into code. So an archive is written without any of the former, and before one is
read everything in it is held against lists of what an exported ensemble can hold.
"""

from __future__ import annotations

import io
import json
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .._records import read_steady
from ..errors import DataError, FormatError
from ..runtime.contract import Contract, read_contract

_ENTRIES = re.compile(
    r"(archive_format|archive_version|byteorder|version|models/model\.json|"
    r"\.data/(serialization_id|version)|\.format_version|\.storage_alignment|"
    r"data/(weights|constants)/(model_(weights|constants)_config\.json|(weight|tensor)_\d+)|"
    r"data/sample_inputs/model\.pt)"
)
_OPERATORS = re.compile(
    r"torch\.ops\.aten\.\w+(\.\w+)?|_operator\.\w+|torch\.(sym_\w+|_sym_sqrt)|math\.\w+|"
    r"torch\.ops\.higher_order\.wrap_with_set_grad_enabled|"
    r"torch\._higher_order_ops\.wrap\.wrap_with_set_grad_enabled"
)
_WORDS = re.compile(
    r"[su]\d+|\d+|oo|int_oo|True|False|Max|Min|Mod|PythonMod|FloorDiv|CleanDiv|CeilDiv|"
    r"ModularIndexing|Where|Eq|Ne|Lt|Le|Gt|Ge|And|Or|Not|Identity|Symbol|Integer|Rational|Add|Mul|"
    r"Pow|positive|nonnegative|integer"
)


def save_program(program: Any, path: Path) -> None:
    """Write an exported program; its example inputs, which would be pickled, are left out."""
    kept, program._example_inputs = program._example_inputs, None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.export.*")
            torch.export.save(program, str(path))
    finally:
        program._example_inputs = kept
    check_archive(path.read_bytes(), path)


def load_program(folder: Any) -> Program:
    """Load `model.pt2` of an exported folder: checked by its SHA-256, then piece by piece."""
    return read_steady(Path(folder), lambda: _loaded(folder))


def _loaded(folder: Any) -> Program:
    contract = read_contract(folder)
    name = contract.programs.get("torch")
    if name is None:
        raise FormatError(
            f"{contract.folder} holds no torch program, only {', '.join(contract.programs)}. "
            'Export it with formats=["torch"].'
        )
    path = contract.file(name)
    content = path.read_bytes()
    check_archive(content, path)
    try:
        module = torch.export.load(io.BytesIO(content)).module()
    except Exception as error:  # torch has many kinds of errors for a file it cannot read
        raise FormatError(
            f"Cannot load {path}: {str(error)[:200]}. It was exported with torch "
            f"{contract.data['libraries'].get('torch')}; installed is {torch.__version__}."
        ) from error
    return Program(contract, module)


class Program:
    """A `.pt2` program: prepared arrays or tensors in, the contract's outputs as arrays out.

    Attributes:
        contract: What goes in and what comes out.
        module: The exported module; it takes the inputs by place, in the contract's order.
    """

    def __init__(self, contract: Contract, module: Any) -> None:
        self.contract = contract
        self.module = module

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Run the program once."""
        names = [port["name"] for port in self.contract.inputs]
        if set(inputs) != set(names):
            raise DataError(
                f"Found the inputs {', '.join(map(str, inputs))}; this model takes exactly "
                f"{', '.join(names)}."
            )
        with torch.no_grad():
            outputs = self.module(*(torch.as_tensor(inputs[name]) for name in names))
        made = [port["name"] for port in self.contract.outputs]
        return {n: tensor.numpy() for n, tensor in zip(made, outputs, strict=True)}


def check_archive(content: bytes, path: Path) -> None:
    """Raise `FormatError` when an archive holds anything that loading would turn into code."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for entry in archive.infolist():
                _check_entry(archive, entry, path)
    except FormatError:
        raise
    except (zipfile.BadZipFile, ValueError, KeyError, EOFError, RecursionError) as error:
        raise FormatError(f"{path} is no program that was exported here: {error}.") from error


def _check_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, path: Path) -> None:
    name = entry.filename.partition("/")[2]
    if not _ENTRIES.fullmatch(name):
        raise FormatError(f"{path} holds {entry.filename!r:.80}, which no exported program has.")
    if name.startswith("data/sample_inputs/") and entry.file_size:
        raise FormatError(f"{path} holds sample inputs, which are pickled: it is not loaded.")
    if name.endswith("_config.json"):
        for fact in json.loads(archive.read(entry))["config"].values():
            plain = re.fullmatch(r"(weight|tensor)_\d+", str(fact["path_name"]))
            if fact.get("use_pickle") is not False or not plain:
                raise FormatError(f"{path} holds a pickled tensor: it is not loaded.")
    if name == "models/model.json":
        for key, value in _pairs(json.loads(archive.read(entry))):
            _check_text(key, value, path)


def _pairs(value: Any) -> Iterator[tuple[str, Any]]:
    """Walk through JSON; yield every key with its value."""
    stack = [value]
    while stack:
        here = stack.pop()
        if isinstance(here, dict):
            yield from here.items()
            stack.extend(here.values())
        elif isinstance(here, list):
            stack.extend(here)


def _check_text(key: str, value: Any, path: Path) -> None:
    if key == "target" and isinstance(value, str) and not _OPERATORS.fullmatch(value):
        raise FormatError(f"{path} calls {value!r:.80}, which no exported program does.")
    if key in ("expr_str", "as_expr") and isinstance(value, str):
        words = re.findall(r"\w+", value)
        strange = re.sub(r"[\w\s+\-*/%(),.<>=&|~']", "", value)
        if strange or "__" in value or not all(_WORDS.fullmatch(word) for word in words):
            raise FormatError(f"{path} holds the expression {value!r:.80}: it is not loaded.")
