"""Read what a client sends: at most so much, within so much time."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import TYPE_CHECKING, Any

from .limits import Limits, Refusal

if TYPE_CHECKING:
    from starlette.requests import Request


async def read_body(request: Request, limits: Limits) -> bytes:
    """Read the body of a request, or refuse it.

    The length that the client names is checked before anything is read, and the bytes are counted
    as they come. A packed body is not unpacked: it could hold a thousand times its size.
    """
    packed = request.headers.get("content-encoding", "identity").lower()
    if packed != "identity":
        raise Refusal(415, f"The body is packed ({packed:.40}); send it as it is.")
    told = request.headers.get("content-length")
    if told is not None and told.isdigit() and int(told) > limits.body:
        raise _too_large(limits)
    try:
        return await asyncio.wait_for(_collect(request, limits), limits.read_seconds)
    except asyncio.TimeoutError:
        raise Refusal(
            408,
            f"The request did not arrive within {limits.read_seconds:g} seconds. Send it faster, "
            "or in smaller parts.",
        ) from None


async def _collect(request: Request, limits: Limits) -> bytes:
    from starlette.requests import ClientDisconnect

    chunks, size = [], 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limits.body:
                raise _too_large(limits)
            chunks.append(chunk)
    except ClientDisconnect:
        raise Refusal(400, "The connection ended before the request did.") from None
    return b"".join(chunks)


def _too_large(limits: Limits) -> Refusal:
    return Refusal(413, f"The request is larger than {limits.body} bytes. Send fewer inputs.")


def parse_json(body: bytes) -> dict[str, Any]:
    """Read a JSON object; refuse everything else."""
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
    raise ValueError(f"{name} is no number in JSON")


def from_base64(value: Any) -> bytes:
    """Return the bytes of a picture that came in JSON."""
    if not isinstance(value, (str, bytes)):
        raise Refusal(422, "In JSON a picture is a string of base64.")
    try:
        return base64.b64decode(value, validate=True)
    except ValueError:
        raise Refusal(422, "In JSON a picture is a string of base64; this one is not.") from None
