"""The page at `/`: try the model by hand."""

from __future__ import annotations

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


async def page(request: Request) -> Response:
    """Return the page, which knows nothing of the model until it has read the facts."""
    from starlette.responses import HTMLResponse

    return HTMLResponse(_page(), headers={"content-security-policy": POLICY})


async def facts(service: Service, request: Request) -> Response:
    """`GET /facts`: what the page must know of the model."""
    from starlette.responses import JSONResponse

    backend = service.backend
    return JSONResponse(
        {
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
    )


@cache
def _page() -> str:
    return files(__package__).joinpath("page.html").read_text(encoding="utf-8")
