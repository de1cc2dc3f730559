"""Read what a client sends: at most so much, within so much time.

What the service takes at most, and how it refuses the rest: in plain words.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any

from .limits import Limits, Refusal
from .service import Service

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response


Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]

READ_AWAY, PAUSE, LONGEST = 64 * 2**20, 2.0, 30.0
"""Of a refused body so many bytes are still read, as long as the client does not pause for so many
seconds, and for so many seconds in all."""


MOST_LISTS = 200_000
"""Lists and objects in JSON (brackets in texts count too): nobody else runs while Python reads it,
and 16 MB of short lists take over half a second and 400 MB."""


class Incoming:
    """The body of one request, on its way.

    Attributes:
        size: Bytes that have come.
        complete: Whether that is all of it.
    """

    def __init__(self, scope: Message, receive: Receive) -> None:
        names = dict(scope["headers"])
        self._receive, self.size = receive, 0
        self.complete = (
            names.get(b"content-length", b"0") == b"0" and b"transfer-encoding" not in names
        )

    async def receive(self) -> Message:
        """Return the next message of the client."""
        message = await self._receive()
        self.size += len(message.get("body", b""))
        self.complete = not message.get("more_body", False)
        return message

    async def read_away(self) -> None:
        """Read the rest and forget it, within limits.

        Who closes a connection while the other side still sends resets it, and the other side may
        lose the answer that it had been sent.
        """
        end, most = time.monotonic() + LONGEST, self.size + READ_AWAY
        while not self.complete and self.size < most and time.monotonic() < end:
            try:
                await asyncio.wait_for(self.receive(), PAUSE)
            except asyncio.TimeoutError:
                return


async def read_body(request: Request, limits: Limits) -> bytes:
    """Read the body of a request, or refuse it.

    The length that the client names is checked before anything is read, and the bytes are counted
    as they come. A packed body is not unpacked: it could hold a thousand times its size.
    """
    from starlette.requests import ClientDisconnect

    too_large = f"The request is larger than {limits.body} bytes. Send fewer inputs."

    async def collect() -> bytes:
        body = bytearray()
        try:
            async for chunk in request.stream():
                body += chunk
                if len(body) > limits.body:
                    raise Refusal(413, too_large)
        except ClientDisconnect:
            raise Refusal(400, "The connection ended before the request did.") from None
        return bytes(body)

    packed = request.headers.get("content-encoding", "identity").lower()
    if packed != "identity":
        raise Refusal(415, f"The body is packed ({packed:.40}); send it as it is.")
    told = whole_number(request.headers.get("content-length", "0"))
    if told is not None and told > limits.body:
        raise Refusal(413, too_large)
    try:
        return await asyncio.wait_for(collect(), limits.read_seconds)
    except asyncio.TimeoutError:
        raise Refusal(
            408,
            f"The request did not arrive within {limits.read_seconds:g} seconds. Send it faster, "
            "or in smaller parts.",
        ) from None


def whole_number(text: str) -> int | None:
    """Return the number in a header; None for anything else, such as superscript digits."""
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def parse_json(body: bytes) -> dict[str, Any]:
    """Read a JSON object; refuse everything else."""
    if body.count(b"[") + body.count(b"{") > MOST_LISTS:
        raise Refusal(
            413, f"The JSON has more than {MOST_LISTS} lists and objects. Send fewer inputs."
        )
    try:
        given = json.loads(body, parse_constant=_no_number)
    except RecursionError:
        raise Refusal(400, "The JSON is nested too deeply.") from None
    except ValueError as error:  # not JSON, not UTF-8, or a number of a million digits
        raise Refusal(400, f"The body is not JSON: {str(error)[:120]}.") from None
    if not isinstance(given, dict):
        raise Refusal(422, f"The body is a JSON {type(given).__name__}; expected an object.")
    return given


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not valid JSON")


def from_base64(value: Any) -> bytes:
    """Return the bytes of a image that came in JSON."""
    if not isinstance(value, (str, bytes)):
        raise Refusal(422, "In JSON a image is a string of base64.")
    try:
        return base64.b64decode(value, validate=True)
    except ValueError:
        raise Refusal(422, "In JSON a image is a string of base64; this one is not.") from None


# `POST /predict`: images and texts in, plain JSON out, without knowing any protocol.
#
# | content type | what the body is |
# |---|---|
# | `multipart/form-data` | one or several `file` (images) or `text` |
# | `application/json` | an object with `text` (and `text_pair`), `texts` (a list), `question` and |
# | | `context`, `inputs` (a list of such objects), `image` (base64) or `images` |
# | `text/plain` | one text |
# | `image/*` | one image |
KINDS = "multipart/form-data, application/json, text/plain, image/* or application/octet-stream"


async def predict(service: Service, request: Request) -> Response:
    """Answer what was sent; with `?why=1` also say what speaks for the novelty of the first."""
    from starlette.responses import Response

    body = await read_body(request, service.limits)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        texts, images = await _parts(request, body, service)
    elif kind in ("application/json", ""):
        texts, images = await service.read(len(body), lambda: _of_json(parse_json(body)))
    elif kind == "text/plain":
        texts, images = [_decoded(body)], []
    elif kind.startswith("image/") or kind == "application/octet-stream":
        texts, images = [], [body]
    else:
        raise Refusal(415, f"The content type {kind!r:.80} is not read; expected {KINDS}.")
    service.counted(texts or images)
    if texts and images:
        raise Refusal(422, "The request holds images and texts; expected one kind.")
    rows = await service.rows_of_images(images) if images else service.rows_of_texts(texts)
    prediction = await service.answer(rows)
    wanted = {name for name, value in request.query_params.items() if value in ("1", "true")}
    answers = prediction.rows(probabilities="probabilities" in wanted)
    if "why" in wanted:
        answers[0]["evidence"] = await service.explain(rows[0])
    content = {"model": service.name, "answers": answers}
    return Response(
        json.dumps(content, ensure_ascii=False, allow_nan=False), media_type="application/json"
    )


SHAPES = (
    "'text' (with 'text_pair' for two texts), 'texts', 'question' and 'context', 'inputs' (a list "
    "of such objects), 'image' or 'images' (base64)"
)


def _of_json(given: dict[str, Any]) -> tuple[list[Any], list[bytes]]:
    """Return the texts and images of a JSON object; two texts, or a question, are a mapping."""
    keys = [
        key for key in ("text", "texts", "question", "inputs", "image", "images") if key in given
    ]
    if len(keys) != 1:
        raise Refusal(422, f"Expected an object with one of {SHAPES}.")
    (key,) = keys
    if key in ("text", "question"):
        return [_named_texts(given)], []
    value = given[key]
    values = value if key.endswith("s") else [value]
    if not isinstance(values, list):
        raise Refusal(422, f"{key!r} is not a list.")
    if key == "inputs":
        return [_named_texts(one) for one in values], []
    if key == "texts":
        return values, []
    return [], [from_base64(value) for value in values]


def _named_texts(given: Any) -> Any:
    """Return the text of an object, or its two texts by name."""
    names = {"text", "text_pair", "question", "context"}
    found = (
        {name: given[name] for name in given if name in names} if isinstance(given, dict) else {}
    )
    if not found:
        raise Refusal(422, f"An input is {type(given).__name__}; expected an object with texts.")
    return found["text"] if set(found) == {"text"} else found


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
        raise Refusal(400, "The body is not valid multipart/form-data.") from None
    texts: list[str] = []
    images: list[bytes] = []
    for name, value in form.multi_items():
        if isinstance(value, str):
            if name == "text":
                texts.append(value)
        elif name == "text":
            texts.append(_decoded(await value.read()))
        elif name in ("file", "image"):
            images.append(await value.read())
    await form.close()
    if not texts and not images:
        raise Refusal(422, "The form has no field 'file' and no field 'text'.")
    return texts, images


def _decoded(content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise Refusal(422, "The text is not UTF-8.") from None
