"""The Open Inference Protocol v2 (KServe, Triton): metadata, health, inference.

A request gives either the raw input (`text`, with `text_pair` for two texts; `question` and
`context`; or `image`; of BYTES: texts, or files of images, in JSON as base64) or the tensors that
the model itself reads (`input_ids`, `pixel_values` ...).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from .answer_types import ARRAYS, tensor_of, tensor_type
from .backends import ASKS, TensorSpec
from .batch_queue import Row
from .limits import Refusal
from .protocol_tensors import HEADER, read_inputs, split_request, wanted_outputs, write_response
from .requests import from_base64, read_body
from .service import Service

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

VERSION = "1"


class ProtocolV2:
    """The endpoints under `/v2`."""

    def __init__(self, service: Service, version: str) -> None:
        self.service, self.version = service, version
        backend = service.backend
        names = ASKS.get(backend.asks, ("text",)) if backend.reads == "text" else ("image",)
        self.raw = tuple(TensorSpec(name, "BYTES", (-1,)) for name in names)

    @property
    def outputs(self) -> dict[str, TensorSpec]:
        """The tensors of an answer, by name: the fields of a row, probabilities and logits."""
        backend = self.service.backend
        absent = set()
        if not backend.has_novelty:
            absent |= {"novelty", "novelty_score"}
        if not backend.has_policy:
            absent |= {"decision", "why"}
        if backend.sets is None:
            absent |= {"set"}
        specs = [
            TensorSpec(name, *tensor_type(backend.kind, name, backend.classes))
            for name in backend.kind.FIELDS
            if name not in absent
        ]
        shapes = {"probabilities": (-1,), "member_logits": (-1, backend.members)}
        shapes |= dict.fromkeys(("member_values", "member_embeddings"), (-1, backend.members))
        ends = {"tokens": (-1, backend.classes), "question": (2, -1)}
        end = ends.get(backend.asks, (backend.classes,))
        columns = {field.name for field in fields(backend.kind)}
        specs += [
            TensorSpec(name, "FP32", (*shapes[name], *end)) for name in ARRAYS if name in columns
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
                "inputs": [spec.as_record() for spec in (*self.raw, *backend.tensors)],
                "outputs": [spec.as_record() for spec in self.outputs.values()],
                "parameters": {
                    "give": self._give(),
                    "class_names": backend.class_names,
                    "uncertainty": backend.score,
                    "alarm": backend.alarm,
                    "rule": backend.rule,
                    "sets": None if backend.sets is None else str(backend.sets),
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
            (name, specs[name].datatype, tensor_of(answers, name, specs[name].datatype), binary)
            for name, binary in wanted
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
        names = [spec.name for spec in self.raw]
        texts = [name for name in names if name in inputs]
        # a second text may be absent, half of a question may not
        if not texts or set(inputs) != set(texts) or (texts != names and texts != ["text"]):
            return given, self._tensor_rows(inputs), wanted
        columns = []
        for name in texts:
            if inputs[name].dtype != object:
                raise Refusal(422, f"The input {name!r} is not a tensor of BYTES.")
            columns.append(self.service.counted(inputs[name].reshape(-1).tolist()))
        if names == ["image"]:
            return given, columns[0] if binary else list(map(from_base64, columns[0])), wanted
        if len({len(column) for column in columns}) > 1:
            raise Refusal(422, f"The inputs {texts} have different numbers of texts.")
        try:
            rows = [[value.decode("utf-8") for value in row] for row in zip(*columns, strict=True)]
        except UnicodeDecodeError:
            raise Refusal(422, "A text is not UTF-8.") from None
        single = len(texts) == 1
        found = [row[0] if single else dict(zip(texts, row, strict=True)) for row in rows]
        return given, self.service.rows_of_texts(found), wanted

    def _give(self) -> str:
        first, *second = (spec.name for spec in self.raw)
        also = "".join(f" ({name} for two texts)" for name in second if name == "text_pair")
        also = also or "".join(f" and {name}" for name in second)
        return f"either {first}{also}, or the tensors after it"

    def _tensor_rows(self, inputs: Mapping[str, np.ndarray]) -> list[Row]:
        specs = {spec.name: spec for spec in self.service.backend.tensors}
        first = next(iter(specs))
        unknown = [name for name in inputs if name not in specs]
        if unknown or first not in inputs:
            raw = " and ".join(repr(spec.name) for spec in self.raw if spec.name != "text_pair")
            expected = f"either {raw} or {', '.join(map(repr, specs))}"
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
