"""The Open Inference Protocol v2 (KServe, Triton): metadata, health, inference.

A request gives either the raw input (`text` or `image`, of BYTES: texts, or files of images, in
JSON as base64) or the tensors that the model itself reads (`input_ids`, `pixel_values` ...).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..prediction import FIELDS, Prediction
from .backends import Row, TensorSpec
from .limits import Refusal
from .protocol_tensors import HEADER, read_inputs, split_request, wanted_outputs, write_response
from .requests import from_base64, read_body
from .service import Service

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

VERSION = "1"
DATATYPES = {"label": "BYTES", "class": "INT64", "decision": "BYTES", "why": "BYTES"}
"""Datatypes of the fields that are not FP32."""


class ProtocolV2:
    """The endpoints under `/v2`."""

    def __init__(self, service: Service, version: str) -> None:
        self.service, self.version = service, version
        self.raw = TensorSpec(service.backend.reads, "BYTES", (-1,))

    @property
    def outputs(self) -> dict[str, TensorSpec]:
        """The tensors of an answer, by name: the fields of a row, probabilities and logits."""
        backend = self.service.backend
        absent = set()
        if not backend.has_novelty:
            absent |= {"novelty", "novelty_score"}
        if not backend.has_policy:
            absent |= {"decision", "why"}
        specs = [TensorSpec(n, DATATYPES.get(n, "FP32")) for n in FIELDS if n not in absent]
        specs += [
            TensorSpec("probabilities", "FP32", (-1, backend.classes)),
            TensorSpec("member_logits", "FP32", (-1, backend.members, backend.classes)),
        ]
        return {spec.name: spec for spec in specs}

    async def server(self, request: Request) -> Response:
        """`GET /v2`: who answers."""
        return _json(
            {
                "name": "hydra-ensembles",
                "version": self.version,
                "extensions": ["binary_tensor_data"],
            }
        )

    async def live(self, request: Request) -> Response:
        """`GET /v2/health/live`: the process answers."""
        return _json({"live": True})

    async def server_ready(self, request: Request) -> Response:
        """`GET /v2/health/ready`: the model answers."""
        return _json({"ready": self.service.ready}, 200 if self.service.ready else 503)

    async def model_ready(self, request: Request) -> Response:
        """`GET /v2/models/<m>/ready`: this model answers."""
        self._check_model(request)
        ready = self.service.ready
        return _json({"name": self.service.name, "ready": ready}, 200 if ready else 503)

    async def model(self, request: Request) -> Response:
        """`GET /v2/models/<m>`: inputs, outputs, classes and the rule to abstain."""
        self._check_model(request)
        backend = self.service.backend
        return _json(
            {
                "name": self.service.name,
                "versions": [VERSION],
                "platform": backend.platform,
                "inputs": [spec.as_record() for spec in (self.raw, *backend.tensors)],
                "outputs": [spec.as_record() for spec in self.outputs.values()],
                "parameters": {
                    "give": f"either {self.raw.name}, or the tensors after it",
                    "class_names": backend.class_names,
                    "uncertainty": backend.score,
                    "alarm": backend.alarm,
                    "rule": backend.rule,
                },
            }
        )

    async def infer(self, request: Request) -> Response:
        """`POST /v2/models/<m>/infer`: answer tensors with tensors."""
        from starlette.responses import Response

        self._check_model(request)
        body = await read_body(request, self.service.limits)
        header = request.headers.get(HEADER)
        given, inputs, wanted = await self.service.read(len(body), lambda: self._read(body, header))
        if isinstance(inputs[0], bytes):
            rows = await self.service.rows_of_images(inputs)
        else:
            rows = inputs
        answers = await self.service.answer(rows)
        head = {"model_name": self.service.name, "model_version": VERSION}
        if isinstance(given.get("id"), str):
            head["id"] = given["id"]
        specs = self.outputs
        columns = [
            (name, specs[name].datatype, _column(answers, name), binary) for name, binary in wanted
        ]
        content, length = write_response(head, columns)
        if length is None:
            return Response(content, media_type="application/json")
        return Response(
            content, media_type="application/octet-stream", headers={HEADER: str(length)}
        )

    def _read(
        self, body: bytes, header: str | None
    ) -> tuple[Mapping[str, Any], list[Any], list[tuple[str, bool]]]:
        """Return the request's JSON, its inputs (rows, or files of images) and wanted outputs."""
        given, binary = split_request(body, header)
        wanted = wanted_outputs(given, list(self.outputs))
        inputs = read_inputs(given, binary)
        if set(inputs) != {self.raw.name}:
            return given, self._tensor_rows(inputs), wanted
        array = inputs[self.raw.name]
        if array.dtype != object:
            raise Refusal(422, f"The input {self.raw.name!r} is not a tensor of BYTES.")
        values = self.service.counted(array.reshape(-1).tolist())
        if self.raw.name == "image":
            return given, values if binary else [from_base64(value) for value in values], wanted
        try:
            texts = [value.decode("utf-8") for value in values]
        except UnicodeDecodeError:
            raise Refusal(422, "A text is not UTF-8.") from None
        return given, self.service.rows_of_texts(texts), wanted

    def _tensor_rows(self, inputs: Mapping[str, np.ndarray]) -> list[Row]:
        specs = {spec.name: spec for spec in self.service.backend.tensors}
        first = next(iter(specs))
        unknown = [name for name in inputs if name not in specs]
        if unknown or first not in inputs:
            expected = f"either {self.raw.name!r} or {', '.join(map(repr, specs))}"
            raise Refusal(422, f"The inputs are {sorted(inputs)!r:.200}; expected {expected}.")
        arrays = {name: _checked(array, specs[name]) for name, array in inputs.items()}
        shape = arrays[first].shape
        for name, array in arrays.items():
            if array.shape != shape:
                raise Refusal(
                    422,
                    f"The inputs {first!r} and {name!r} have the shapes {list(shape)} and "
                    f"{list(array.shape)}; expected equal ones.",
                )
        return [{name: array[row] for name, array in arrays.items()} for row in range(shape[0])]

    def _check_model(self, request: Request) -> None:
        name, version = request.path_params["model"], request.path_params.get("version", VERSION)
        if name != self.service.name:
            raise Refusal(
                404, f"There is no model {name!r:.80}; this service answers as {self.service.name}."
            )
        if version != VERSION:
            raise Refusal(404, f"There is no version {version!r:.40}; expected {VERSION}.")


def _column(answers: Prediction, name: str) -> np.ndarray:
    """Return an output as an array; texts that are null in a row are empty."""
    if name in ("label", "decision", "why"):
        texts = answers.labels if name == "label" else getattr(answers, name)
        return np.array([text or "" for text in texts], dtype=object)
    return getattr(answers, "class_index" if name == "class" else name)


def _checked(array: np.ndarray, spec: TensorSpec) -> np.ndarray:
    """Return a tensor as the model takes it, or refuse its type or shape."""
    fits = array.ndim == len(spec.shape) and all(
        side in (-1, got) for got, side in zip(array.shape, spec.shape, strict=True)
    )
    if not fits or 0 in array.shape:
        raise Refusal(
            422,
            f"The input {spec.name!r} has the shape {list(array.shape)}; expected "
            f"{list(spec.shape)}, where -1 is any number from 1 on.",
        )
    kinds = "f" if spec.datatype.startswith("FP") else "iub"
    if array.dtype.kind not in kinds:
        raise Refusal(422, f"The input {spec.name!r} is not a tensor of {spec.datatype}.")
    made = array.astype(np.float32 if kinds == "f" else np.int64)  # a copy that torch may hold
    if kinds == "f" and not np.isfinite(made).all():
        raise Refusal(422, f"The input {spec.name!r} holds NaN or infinite values.")
    return made


def _json(content: Any, status: int = 200) -> Response:
    from starlette.responses import JSONResponse

    return JSONResponse(content, status)
