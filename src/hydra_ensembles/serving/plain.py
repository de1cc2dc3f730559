"""`POST /predict`: pictures and texts in, plain JSON out, without knowing any protocol.

| content type | what the body is |
|---|---|
| `multipart/form-data` | one or several `file` (pictures) or `text` |
| `application/json` | an object with `text`, `texts` (a list), `image` (base64) or `images` |
| `text/plain` | one text |
| `image/*` | one picture |
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from .bodies import from_base64, parse_json, read_body
from .limits import Refusal
from .service import Service

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

KINDS = "multipart/form-data, application/json, text/plain, image/* or application/octet-stream"


async def predict(service: Service, request: Request) -> Response:
    """Answer what was sent; with `?why=1` also say what speaks for the novelty of the first."""
    from starlette.responses import Response

    body = await read_body(request, service.limits)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        texts, pictures = await _parts(request, body, service)
    elif kind in ("application/json", ""):
        texts, pictures = await service.read(len(body), lambda: _of_json(parse_json(body)))
    elif kind == "text/plain":
        texts, pictures = [_decoded(body)], []
    elif kind.startswith("image/") or kind == "application/octet-stream":
        texts, pictures = [], [body]
    else:
        raise Refusal(415, f"The content type {kind!r:.80} is not read; expected {KINDS}.")
    service.counted(texts or pictures)
    if texts and pictures:
        raise Refusal(422, "The request holds pictures and texts; expected one kind.")
    rows = await service.rows_of_pictures(pictures) if pictures else service.rows_of_texts(texts)
    answers = await service.answer(rows)
    records = answers.as_records(service.backend.class_names, service.backend.score)
    if request.query_params.get("probabilities") in ("1", "true"):
        for row, record in enumerate(records):
            record["probabilities"] = [round(p, 6) for p in answers.probabilities[row].tolist()]
    if request.query_params.get("why") in ("1", "true"):
        records[0]["evidence"] = await service.explain(rows[0])
    content = {"model": service.name, "answers": records}
    return Response(
        json.dumps(content, ensure_ascii=False, allow_nan=False), media_type="application/json"
    )


def _of_json(given: dict[str, Any]) -> tuple[list[Any], list[bytes]]:
    """Return the texts and images of a JSON object."""
    keys = [key for key in ("text", "texts", "image", "images") if key in given]
    if len(keys) != 1:
        raise Refusal(
            422, "Expected an object with one of 'text', 'texts', 'image' or 'images' (base64)."
        )
    value = given[keys[0]]
    values = value if keys[0].endswith("s") else [value]
    if not isinstance(values, list):
        raise Refusal(422, f"{keys[0]!r} is no list.")
    if keys[0].startswith("text"):
        return values, []
    return [], [from_base64(value) for value in values]


async def _parts(request: Request, body: bytes, service: Service) -> tuple[list[str], list[bytes]]:
    """Return the texts and files of a form; names of files are not looked at."""
    from starlette.formparsers import MultiPartException, MultiPartParser

    class InMemory(MultiPartParser):
        spool_max_size = service.limits.body  # nothing is written to the disk

    async def stream() -> AsyncIterator[bytes]:
        yield body

    rows = service.limits.rows
    try:
        form = await InMemory(
            request.headers,
            stream(),  # type: ignore[arg-type]
            max_files=rows,
            max_fields=rows,
            max_part_size=service.limits.body,
        ).parse()
    except MultiPartException as error:
        status = 413 if "Too many" in error.message else 400
        raise Refusal(status, f"The form cannot be read: {error.message[:120]}") from None
    except Exception:  # whatever a malformed form does to its parser
        raise Refusal(400, "The form cannot be read: it is no multipart/form-data.") from None
    texts: list[str] = []
    pictures: list[bytes] = []
    for name, value in form.multi_items():
        if isinstance(value, str):
            if name == "text":
                texts.append(value)
        elif name == "text":
            texts.append(_decoded(await value.read()))
        elif name in ("file", "image"):
            pictures.append(await value.read())
    await form.close()
    if not texts and not pictures:
        raise Refusal(422, "The form has no field 'file' and no field 'text'.")
    return texts, pictures


def _decoded(content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise Refusal(422, "The text is not UTF-8.") from None
