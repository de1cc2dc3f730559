"""The page at `/`: try the model by hand."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from .service import Service

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'none'"
)


async def page(service: Service, request: Request) -> Response:
    """Return the page, with what it must know of the model."""
    from starlette.responses import HTMLResponse

    backend = service.backend
    facts = {
        "name": service.name,
        "reads": backend.reads,
        "members": backend.members,
        "classes": backend.classes,
        "classNames": list(backend.class_names or []),
        "novelty": backend.has_novelty,
        "alarm": backend.alarm,
        "score": backend.score,
        "rule": backend.rule.partition("\n")[0],
        "maxText": service.limits.text,
    }
    # "</script>" in a class name must not end the script
    text = json.dumps(facts).replace("<", "\\u003c")
    return HTMLResponse(
        _template().replace("/*FACTS*/ {}", text), headers={"content-security-policy": POLICY}
    )


@cache
def _template() -> str:
    return files(__package__).joinpath("page.html").read_text(encoding="utf-8")
