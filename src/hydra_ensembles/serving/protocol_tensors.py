"""Tensors of the Open Inference Protocol v2, as JSON and in the binary form of Triton's clients.

In the binary form the JSON comes first, its length in the header `Inference-Header-Content-Length`,
then the raw bytes of each tensor that says `binary_data_size`, in order, little-endian. A tensor of
BYTES is a sequence of elements, each with its length in four bytes before it.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .limits import Refusal
from .requests import parse_json, whole_number

HEADER = "Inference-Header-Content-Length"
TYPES: dict[str, Any] = {
    "BOOL": np.dtype("?"),
    **{
        f"{sign}INT{bits}": np.dtype(f"<{kind}{bits // 8}")
        for sign, kind in (("", "i"), ("U", "u"))
        for bits in (8, 16, 32, 64)
    },
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
}
"""Datatypes with their numpy form; BYTES are lists of bytes and have none."""

Tensor = np.ndarray


def split_request(body: bytes, header_length: str | None) -> tuple[dict[str, Any], bytes]:
    """Return the JSON of a request and the binary data after it."""
    if header_length is None:
        return parse_json(body), b""
    length = whole_number(header_length)
    if length is None or length > len(body):
        raise Refusal(
            400,
            f"{HEADER} is {header_length:.40}; expected the length of the JSON at the start of the "
            f"body, which has {len(body)} bytes.",
        )
    return parse_json(body[:length]), body[length:]


def read_inputs(given: Mapping[str, Any], binary: bytes) -> dict[str, Tensor]:
    """Return the input tensors of a request by name; BYTES have object elements of `bytes`."""
    inputs = given.get("inputs")
    if not isinstance(inputs, list) or not inputs:
        raise Refusal(422, "The request has no list of 'inputs'.")
    found: dict[str, Tensor] = {}
    start = 0
    for entry in inputs:
        name, datatype, shape, parameters = _head(entry)
        if name in found:
            raise Refusal(422, f"Two inputs are called {name!r:.80}.")
        size = parameters.get("binary_data_size")
        if size is None:
            if "data" not in entry:
                raise Refusal(422, f"The input {name!r:.80} has no 'data'.")
            found[name] = _from_json(entry["data"], datatype, shape, name)
            continue
        if type(size) is not int or not 0 <= size <= len(binary) - start:
            raise Refusal(
                400,
                f"The input {name!r:.80} says binary_data_size {size!r:.40}, but "
                f"{len(binary) - start} bytes are left in the body.",
            )
        found[name] = _from_binary(binary[start : start + size], datatype, shape, name)
        start += size
    if start != len(binary):
        raise Refusal(
            400, f"{len(binary) - start} bytes at the end of the body belong to no input."
        )
    return found


def _head(entry: Any) -> tuple[str, str, tuple[int, ...], dict[str, Any]]:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise Refusal(422, "An input is not an object with a 'name'.")
    name, datatype = entry["name"], entry.get("datatype")
    if datatype not in (*TYPES, "BYTES"):
        known = ", ".join((*TYPES, "BYTES"))
        raise Refusal(
            422, f"The input {name!r:.80} has the datatype {datatype!r:.40}; expected {known}."
        )
    shape = entry.get("shape")
    if (
        not isinstance(shape, list)
        or not 0 < len(shape) <= 8
        or not all(type(side) is int and 0 <= side < 2**31 for side in shape)
    ):
        raise Refusal(
            422,
            f"The input {name!r:.80} has the shape {shape!r:.80}; expected a list of one to eight "
            "whole numbers.",
        )
    parameters = entry.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise Refusal(422, f"The parameters of the input {name!r:.80} are not an object.")
    if "shared_memory_region" in parameters:
        raise Refusal(422, "Shared memory is not supported: send the data in the request.")
    return name, datatype, tuple(shape), parameters


def _from_json(data: Any, datatype: str, shape: tuple[int, ...], name: str) -> Tensor:
    try:
        array = np.array(data) if datatype != "BYTES" else np.array(data, dtype=object)
    except (ValueError, OverflowError, RecursionError):
        raise Refusal(
            422, f"The input {name!r:.80} is a ragged list; expected a rectangular array."
        ) from None
    _check_count(array.size, shape, name)
    array = array.reshape(shape)
    if datatype == "BYTES":
        flat = array.reshape(-1)
        if not all(isinstance(value, str) for value in flat):
            raise Refusal(422, f"The input {name!r:.80} is of BYTES: expected a list of strings.")
        try:
            flat[:] = [value.encode("utf-8") for value in flat]
        except UnicodeEncodeError:
            raise Refusal(422, f"The input {name!r:.80} is not valid Unicode.") from None
        return array
    kinds = "iufb" if datatype.startswith("FP") else "b" if datatype == "BOOL" else "iu"
    if array.size and array.dtype.kind not in kinds:
        raise Refusal(422, f"The data of the input {name!r:.80} are not values of {datatype}.")
    with np.errstate(over="ignore"):
        made = array.astype(TYPES[datatype])
    if array.size and kinds == "iu" and not (made == array).all():
        raise Refusal(422, f"The data of the input {name!r:.80} do not fit into {datatype}.")
    return made


def _from_binary(data: bytes, datatype: str, shape: tuple[int, ...], name: str) -> Tensor:
    if datatype == "BYTES":
        elements, place = [], 0
        while place + 4 <= len(data):
            end = place + 4 + int.from_bytes(data[place : place + 4], "little")
            if end > len(data):
                break
            elements.append(data[place + 4 : end])
            place = end
        if place != len(data):
            raise Refusal(422, f"The BYTES of the input {name!r:.80} are cut off.")
        _check_count(len(elements), shape, name)
        array = np.empty(len(elements), dtype=object)
        array[:] = elements
        return array.reshape(shape)
    kind = TYPES[datatype]
    if len(data) % kind.itemsize:
        raise Refusal(
            422, f"The input {name!r:.80} has {len(data)} bytes, not a multiple of {datatype}."
        )
    _check_count(len(data) // kind.itemsize, shape, name)
    if datatype == "BOOL":
        return (np.frombuffer(data, dtype=np.uint8) != 0).reshape(shape)
    return np.frombuffer(data, dtype=kind).reshape(shape)


def _check_count(count: int, shape: tuple[int, ...], name: str) -> None:
    if count != math.prod(shape):
        raise Refusal(
            422,
            f"The input {name!r:.80} has {count} values; its shape {list(shape)} says "
            f"{math.prod(shape)}.",
        )


def wanted_outputs(given: Mapping[str, Any], known: Sequence[str]) -> list[tuple[str, bool]]:
    """Return the outputs that a request asks for, and whether in binary form."""
    parameters = given.get("parameters") or {}
    everything = isinstance(parameters, dict) and parameters.get("binary_data_output") is True
    outputs = given.get("outputs")
    if outputs is None:
        return [(name, everything) for name in known]
    if not isinstance(outputs, list):
        raise Refusal(422, "'outputs' is not a list.")
    found = []
    for entry in outputs:
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(name, str) or name not in known:
            raise Refusal(
                422, f"There is no output {name!r:.80}; expected some of {', '.join(known)}."
            )
        options = entry.get("parameters") or {}
        if not isinstance(options, dict):
            raise Refusal(422, f"The parameters of the output {name!r:.80} are not an object.")
        if options.get("classification") or "shared_memory_region" in options:
            raise Refusal(
                422,
                "Classification strings and shared memory are not supported: ask for the "
                "outputs label and confidence.",
            )
        found.append((name, options.get("binary_data", everything) is True))
    return found


def write_response(
    head: Mapping[str, Any], outputs: Sequence[tuple[str, str, Tensor, bool]]
) -> tuple[bytes, int | None]:
    """Return the body of a response, and the length of its JSON when binary data follow.

    Args:
        head: `model_name` and the like.
        outputs: Name, datatype, tensor, and whether in binary form.
    """
    records, tail = [], []
    for name, datatype, array, binary in outputs:
        record: dict[str, Any] = {"name": name, "datatype": datatype, "shape": list(array.shape)}
        if binary:
            if datatype == "BYTES":
                texts = [str(value).encode("utf-8") for value in array.reshape(-1)]
                data = b"".join(struct.pack("<I", len(text)) + text for text in texts)
            else:
                data = np.ascontiguousarray(array, dtype=TYPES[datatype]).tobytes()
            record["parameters"] = {"binary_data_size": len(data)}
            tail.append(data)
        else:
            record["data"] = array.reshape(-1).tolist()
        records.append(record)
    head_text = json.dumps({**head, "outputs": records}, allow_nan=False).encode()
    return b"".join([head_text, *tail]), len(head_text) if tail else None
