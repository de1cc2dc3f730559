"""The service in OpenAPI 3.1 (`/openapi.json`), and as a page without scripts (`/docs`)."""

from __future__ import annotations

import dataclasses
import html
import json
from collections.abc import Iterator
from typing import Any

from ..prediction import Prediction
from ..task_predictions import TokenPrediction
from .answer_types import KINDS, SHARE, json_type
from .protocol_tensors import TYPES

Json = dict[str, Any]

PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'none'"
)

REFUSALS = {
    400: "The body is not JSON, not a form, or cut off.",
    401: "The service wants a token and got no valid one.",
    404: "There is no such model or path.",
    405: "The method is not for this path.",
    408: "The body did not arrive in time.",
    413: "The body, an image, a text or the number of inputs is too large.",
    415: "The content type is not read, or the body is compressed.",
    422: "The body was read, but it is not an input of this model.",
    429: "The queue is full. Try again a little later.",
    431: "The path and the headers are too large.",
    500: "Something failed inside the service; its log says what.",
    503: "There was no answer in time, or the service is starting or stopping.",
}
"""Statuses of refusals. Every one has the body `{"error": "what was found, what to do"}`."""

GREY = (
    "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAAAAADhZOFXAAAAEElEQVR42mOsZ4AAJgaKGAAlwQCP3Y1YdgAAAABJRU5E"
    "rkJggg=="
)
"""A grey image of 8 x 8 pixels: a PNG file in base64."""

TEXT = "a quiet little film"

EXAMPLES: dict[str, dict[str, Any]] = {
    "application/json": {
        "text": {"text": TEXT},
        "texts": {"texts": [TEXT, "bad"]},
        "image": {"image": GREY},
        "images": {"images": [GREY, GREY]},
        "text pair": {"text": TEXT, "text_pair": "a calm film"},
        "text inputs": {"inputs": [{"text": TEXT, "text_pair": "a calm film"}]},
        "question": {"question": "which film?", "context": TEXT},
    },
    "multipart/form-data": {"text": {"text": [TEXT]}},
    "text/plain": {"text": TEXT},
}
"""Bodies of `POST /predict`, by content type and by what the model must read."""

TENSORS = {
    "text": {
        "id": "1",
        "inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": [TEXT]}],
    },
    "image": {
        "inputs": [{"name": "image", "datatype": "BYTES", "shape": [1], "data": [GREY]}],
        "outputs": [{"name": "label"}, {"name": "probabilities"}],
    },
}
"""Bodies of `POST /v2/models/{model}/infer`."""


def _object(properties: Json, *optional: str) -> Json:
    """Return the schema of an object with these keys and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


TEXT_TYPE, WHOLE, TRUTH = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
NUMBER = {"type": "number"}
NAMES, FILE = _list(TEXT_TYPE), {"contentMediaType": "image/*"}


def _schemas() -> Json:
    near = {"position": WHOLE, "name": {"type": ["string", "null"]}, "similarity": NUMBER}
    evidence = _object(
        {
            "terms": _list(_object({"term": TEXT_TYPE, "p": SHARE})),
            "nearest": _list(_object(near)),
            "facts": NAMES,
            "note": {"type": ["string", "null"]},
        }
    )
    facts = {
        "name": TEXT_TYPE,
        "reads": {"enum": ["text", "image"]},
        "asks": {"enum": ["text", "tokens", "question"]},
        "members": WHOLE,
        "classes": WHOLE,
        "gives": TEXT_TYPE,
        "classNames": NAMES,
        "novelty": TRUTH,
        "alarm": SHARE,
        "score": TEXT_TYPE,
        "rule": TEXT_TYPE,
        "example": {"type": ["string", "null"]},
        "maxText": WHOLE,
    }
    datatype = {"enum": [*TYPES, "BYTES"]}
    shape = _list(WHOLE)
    spec = _object({"name": TEXT_TYPE, "datatype": datatype, "shape": shape})
    tensor = _object(
        {
            "name": TEXT_TYPE,
            "datatype": datatype,
            "shape": shape,
            "data": {"type": "array"},
            "parameters": {"type": "object"},
        },
        "data",
        "parameters",
    )
    wanted = _object({"name": TEXT_TYPE, "parameters": {"type": "object"}}, "parameters")
    parameters = {
        "give": TEXT_TYPE,
        "class_names": {"type": ["array", "null"], "items": TEXT_TYPE},
        "uncertainty": TEXT_TYPE,
        "alarm": SHARE,
        "rule": TEXT_TYPE,
        "sets": {"type": ["string", "null"]},
    }
    more = {"evidence": {"anyOf": [evidence, {"type": "null"}]}}
    answers = {kind.__name__: _answer(kind, more) for kind in KINDS}
    texts = dict.fromkeys(("text", "text_pair", "question", "context"), TEXT_TYPE)
    single = {**_object(texts), "required": [], "minProperties": 1}
    return {
        "Error": _object({"error": TEXT_TYPE}),
        **answers,
        "Answer": {"anyOf": [_ref(name) for name in answers]},
        "Answers": _object({"model": TEXT_TYPE, "answers": _list(_ref("Answer"))}),
        "Inputs": {
            **_object(
                {
                    **texts,
                    "texts": NAMES,
                    "inputs": _list(_ref("Input")),
                    "image": TEXT_TYPE,
                    "images": NAMES,
                }
            ),
            "required": [],
            "minProperties": 1,
            "description": "One of: text (with text_pair for two texts), texts, question and "
            "context, inputs, image, images. Images are files in base64.",
        },
        "Input": single,
        "Form": _object({"text": NAMES, "file": _list(FILE)}, "text", "file"),
        "Facts": _object(facts),
        "Server": _object({"name": TEXT_TYPE, "version": TEXT_TYPE, "extensions": NAMES}),
        "Live": _object({"live": TRUTH}),
        "Ready": _object({"name": TEXT_TYPE, "ready": TRUTH}, "name"),
        "Tensor": tensor,
        "Model": _object(
            {
                "name": TEXT_TYPE,
                "versions": NAMES,
                "platform": TEXT_TYPE,
                "inputs": _list(spec),
                "outputs": _list(spec),
                "parameters": _object(parameters),
            }
        ),
        "InferRequest": _object(
            {
                "id": TEXT_TYPE,
                "inputs": _list(_ref("Tensor")),
                "outputs": _list(wanted),
                "parameters": {"type": "object"},
            },
            *("id", "outputs", "parameters"),
        ),
        "InferResponse": _object(
            {
                "model_name": TEXT_TYPE,
                "model_version": TEXT_TYPE,
                "id": TEXT_TYPE,
                "outputs": _list(_ref("Tensor")),
            },
            "id",
        ),
    }


def _answer(kind: type[Prediction], more: Json) -> Json:
    """Return the schema of the answers of a task."""
    fields = {
        name: {**json_type(kind, name), "description": said} for name, said in kind.FIELDS.items()
    }
    if "probabilities" in {field.name for field in dataclasses.fields(kind)}:
        share = _list(SHARE)
        more = {**more, "probabilities": _list(share) if kind is TokenPrediction else share}
    return {
        **_object({**fields, **more}, *more),
        "description": (kind.__doc__ or "").split("\n")[0],
    }


def _operation(summary: str, schema: Json | str, *statuses: int, **more: Any) -> Json:
    """Return an operation; a schema that is a string is a media type without a schema."""
    content = {schema: {}} if isinstance(schema, str) else {"application/json": {"schema": schema}}
    responses: Json = {"200": {"description": "The answer.", "content": content}}
    for status in sorted(statuses):
        refusal = {"application/json": {"schema": _ref("Error")}}
        responses[str(status)] = {"description": REFUSALS[status], "content": refusal}
    return {"summary": summary, "responses": responses, **more}


def _body(schemas: dict[str, Json], examples: dict[str, Json]) -> Json:
    """Return a request body from its schemas and examples by media type."""
    content: Json = {kind: {"schema": schema} for kind, schema in schemas.items()}
    for kind, values in examples.items():
        content[kind]["examples"] = {name: {"value": value} for name, value in values.items()}
    return {"required": True, "content": content}


def _switch(name: str, said: str) -> Json:
    schema = {"enum": ["0", "1", "true", "false"]}
    return {"name": name, "in": "query", "description": said, "schema": schema}


def _paths() -> Json:
    open_to_all: Json = {"security": []}
    get = (431, 500)
    told = (*get, 401)
    work = (*told, 400, 408, 413, 415, 422, 429, 503)
    schemas: dict[str, Json] = {
        "application/json": _ref("Inputs"),
        "multipart/form-data": _ref("Form"),
        "text/plain": TEXT_TYPE,
        "image/*": {},
    }
    not_ready: Json = {
        "description": "The model does not answer yet, or no longer.",
        "content": {"application/json": {"schema": _ref("Ready")}},
    }

    def ready(summary: str, *statuses: int, **more: Any) -> Json:
        operation = _operation(summary, _ref("Ready"), *statuses, **more)
        operation["responses"]["503"] = not_ready
        return {"get": operation}

    paths: Json = {
        "/": {
            "get": _operation("A page to try the model by hand", "text/html", *get, **open_to_all)
        },
        "/docs": {"get": _operation("This page", "text/html", *get, **open_to_all)},
        "/openapi.json": {
            "get": _operation("This document", {"type": "object"}, *get, **open_to_all)
        },
        "/facts": {"get": _operation("What the page shows of the model", _ref("Facts"), *told)},
        "/predict": {
            "post": _operation(
                "Texts or images in, one answer per input out",
                _ref("Answers"),
                *work,
                parameters=[
                    _switch("probabilities", "Add the probabilities of all classes."),
                    _switch("why", "Add the evidence for the novelty of the first input."),
                ],
                requestBody=_body(schemas, EXAMPLES),
            )
        },
        "/metrics": {"get": _operation("Metrics for Prometheus", "text/plain", *told)},
        "/v2": {"get": _operation("Who answers", _ref("Server"), *told)},
        "/v2/health/live": {
            "get": _operation("Whether the process answers", _ref("Live"), *get, **open_to_all)
        },
        "/v2/health/ready": ready("Whether the model answers", *get, **open_to_all),
    }
    for base in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        names = [name for name in ("model", "version") if f"{{{name}}}" in base]
        given: Json = {
            "parameters": [
                {"name": name, "in": "path", "required": True, "schema": TEXT_TYPE}
                for name in names
            ]
        }
        model = _operation("Inputs, outputs, class names and the rule", _ref("Model"), *told, 404)
        infer = _operation(
            "Tensors in, tensors out (Open Inference Protocol v2)",
            _ref("InferResponse"),
            *(*work, 404),
            requestBody=_body(
                {"application/json": _ref("InferRequest")}, {"application/json": TENSORS}
            ),
        )
        paths[base] = {**given, "get": model}
        paths[f"{base}/ready"] = {**given, **ready("Whether this model answers", *told, 404)}
        paths[f"{base}/infer"] = {**given, "post": infer}
    return paths


def document(version: str) -> Json:
    """Return the OpenAPI document. It reveals nothing about the model that is served."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "hydra-ensembles",
            "version": version,
            "description": "One fused ensemble that says how sure it is and whether an input is "
            "new. A model reads either texts or images and has one kind of answer; GET /facts says "
            "which.",
        },
        "security": [{"token": []}],
        "paths": _paths(),
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {
                "token": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "Asked for when the service was started with --token-file.",
                }
            },
        },
    }


STYLE = """
body { margin: 0 auto; padding: 28px 20px; max-width: 860px; font: 16px/1.5 system-ui, sans-serif;
  color-scheme: light dark; }
h2 { margin: 34px 0 6px; font: 600 17px ui-monospace, monospace; overflow-wrap: anywhere; }
pre { padding: 12px; border: 1px solid #8886; border-radius: 8px; white-space: pre-wrap;
  overflow-wrap: anywhere; font-size: 13px; }
table { border-collapse: collapse; } td { padding: 3px 14px 3px 0; vertical-align: top; }
"""


def page(found: Json) -> str:
    """Return the document as one HTML page that loads nothing."""
    info = found["info"]
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>API of {info['title']}</title><style>{STYLE}</style><body>",
        f"<h1>API of {info['title']} {html.escape(info['version'])}</h1>",
        f"<p>{html.escape(info['description'])} For programs: <a href='openapi.json'>"
        "openapi.json</a> (OpenAPI 3.1). To try the model by hand: <a href='.'>the page</a>.</p>",
    ]
    for path, methods in found["paths"].items():
        for method in ("get", "post"):
            if method in methods:
                parts += _section(path, method, methods[method])
    parts.append("<h2>Fields of an answer</h2>")
    for kind in KINDS:
        schema = found["components"]["schemas"][kind.__name__]
        parts.append(f"<p>{html.escape(schema['description'])}</p><table>")
        for name, said in kind.FIELDS.items():
            parts.append(f"<tr><td><code>{name}</code><td>{html.escape(said)}")
        parts.append("</table>")
    parts.append("<h2>Refusals</h2>")
    parts.append('<p>A refusal is <code>{"error": "what was found, what to do"}</code>.</p><table>')
    parts += [f"<tr><td>{status}<td>{html.escape(said)}" for status, said in REFUSALS.items()]
    return "\n".join([*parts, "</table></body></html>\n"])


def _section(path: str, method: str, operation: Json) -> Iterator[str]:
    """Yield the HTML of one operation."""
    free = " No token is needed." if operation.get("security") == [] else ""
    yield f"<h2>{method.upper()} {html.escape(path)}</h2><p>{operation['summary']}.{free}</p>"
    for parameter in operation.get("parameters", []):
        yield f"<p><code>?{parameter['name']}=1</code> {html.escape(parameter['description'])}</p>"
    for kind, content in operation.get("requestBody", {"content": {}})["content"].items():
        yield f"<p>Body: <code>{html.escape(kind)}</code></p>"
        for example in content.get("examples", {}).values():
            value = example["value"]
            text = value if isinstance(value, str) else json.dumps(value)
            yield f"<pre>{html.escape(text)}</pre>"
    statuses = ", ".join(operation["responses"])
    yield f"<p>Answers: {statuses}</p>"
