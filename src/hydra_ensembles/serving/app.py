"""The endpoints as one ASGI application: what comes in is counted, what fails is said plainly."""

from __future__ import annotations

import logging
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from ..errors import HydraError
from ..registry import imported
from . import openapi
from .limits import Refusal
from .protocol_v2 import ProtocolV2
from .requests import Incoming, Message, Receive, predict
from .service import Service
from .tokens import is_allowed

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

log = logging.getLogger(__name__)

Send = Callable[[Message], Awaitable[None]]

PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'none'"
)

UNEXPECTED = "Something went wrong inside the service. Its log says what; the request was not kept."

LITTLE = 64 * 2**10
"""Bytes of a body that are always taken, however much the service holds."""

OPEN = ("/", "/docs", "/openapi.json", "/v2/health/live", "/v2/health/ready")
"""Paths that need no token: the page, which asks for one, what describes the service without its
model, and what a platform probes."""


def make_app(service: Service, *, version: str, tokens: Sequence[bytes] = ()) -> Gate:
    """Return the ASGI application of a service; with tokens, clients need one of them."""
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.responses import HTMLResponse, JSONResponse, Response
    from starlette.routing import Route

    v2 = ProtocolV2(service, version)

    html = files(__package__).joinpath("page.html").read_text(encoding="utf-8")

    async def page(request: Request) -> Response:
        return HTMLResponse(html, headers={"content-security-policy": PAGE_POLICY})

    described = openapi.document(version)
    docs_html = openapi.page(described)

    async def docs(request: Request) -> Response:
        return HTMLResponse(docs_html, headers={"content-security-policy": openapi.PAGE_POLICY})

    async def description(request: Request) -> Response:
        return JSONResponse(described)

    async def facts(request: Request) -> Response:
        return JSONResponse(service.facts())

    async def metrics(request: Request) -> Response:
        content, media_type = service.metrics.page()
        return Response(content, headers={"content-type": media_type})

    def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, Refusal)
        return refusal(error.status, str(error))

    def no_route(request: Request, error: Exception) -> Response:
        status = getattr(error, "status_code", 404)
        if status == 405:
            return refusal(405, f"{request.method} is not for this path.")
        return refusal(status, "There is nothing here. See /, /docs, /predict, /v2 and /metrics.")

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.stop()

    routes = [
        Route("/", page),
        Route("/docs", docs),
        Route("/openapi.json", description),
        Route("/facts", facts),
        Route("/predict", partial(predict, service), methods=["POST"]),
        Route("/metrics", metrics),
        Route("/v2", v2.server),
        Route("/v2/health/live", v2.live),
        Route("/v2/health/ready", v2.server_ready),
    ]
    for base in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        routes += [
            Route(base, v2.model),
            Route(f"{base}/ready", v2.model_ready),
            Route(f"{base}/infer", v2.infer, methods=["POST"]),
        ]
    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        exception_handlers={
            Refusal: refused,
            HTTPException: no_route,
            Exception: lambda request, error: refusal(500, UNEXPECTED),
        },
    )
    return Gate(app, service, tokens)


def refusal(status: int, text: str) -> Response:
    """Return a refusal in plain words, as `{"error": ...}`."""
    from starlette.responses import JSONResponse

    headers = {"retry-after": "1"} if status in (429, 503) else {}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if status == 431:
        headers["connection"] = "close"
    return JSONResponse({"error": text}, status, headers)


class Gate:
    """Count requests, refuse those beyond the limits, and turn every failure into plain words."""

    def __init__(self, app: Any, service: Service, tokens: Sequence[bytes] = ()) -> None:
        self.app, self.service, self.tokens = app, service, tokens
        self.requests = 0
        self.held = 0  # bytes of the bodies of requests under way
        self.when_ready: Callable[[], None] = lambda: None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":

            async def told(message: Message) -> None:
                await send(message)
                if message["type"] == "lifespan.startup.complete":
                    self.when_ready()

            await self.app(scope, receive, told)
            return
        metrics, start, status = self.service.metrics, time.perf_counter(), 0
        limits, path = self.service.limits, path_name(scope["path"])
        incoming, early = Incoming(scope, receive), False

        async def counted() -> Message:
            before = incoming.size
            message = await incoming.receive()
            self.held += incoming.size - before
            if self.held > limits.bodies and incoming.size > LITTLE:
                raise Refusal(
                    503, "The service holds as much data as it may. Try again a little later."
                )
            return message

        async def watched(message: Message) -> None:
            nonlocal status, early
            if message["type"] == "http.response.start":
                status, early = message["status"], not incoming.complete
                message["headers"] = [
                    *message["headers"],
                    (b"x-content-type-options", b"nosniff"),
                    *([(b"connection", b"close")] if early else []),
                ]
            elif early:  # the connection is closed below, not here
                message = {**message, "more_body": True}
            await send(message)

        self.requests += 1
        metrics["requests_in_flight"].set(self.requests)
        try:
            await (self._refusal(scope, path) or self.app)(scope, counted, watched)
        except Exception:  # the client has its answer: Starlette raises what it answered with 500
            log.exception("a request to /%s failed", path)
        finally:
            self.requests -= 1
            self.held -= incoming.size
            metrics["requests_in_flight"].set(self.requests)
            metrics["requests"].labels(path, str(status)).inc()
            metrics["request_seconds"].labels(path).observe(time.perf_counter() - start)
        if early:
            await incoming.read_away()
            await send({"type": "http.response.body"})

    def _refusal(self, scope: Message, path: str) -> Response | None:
        """Return the answer to a request that goes no further."""
        limits = self.service.limits
        size = len(scope["path"]) + len(scope["query_string"])
        if size + sum(len(name) + len(value) for name, value in scope["headers"]) > limits.headers:
            return refusal(431, f"The headers have more than {limits.headers} bytes.")
        if self.tokens and scope["path"] not in OPEN and not is_allowed(scope, self.tokens):
            return refusal(401, "Send a valid token: Authorization: Bearer TOKEN.")
        if self.requests > limits.requests and path in ("predict", "infer"):
            return refusal(
                429,
                f"More than {limits.requests} requests are under way. Try again a little later.",
            )
        return None


def path_name(path: str) -> str:
    """Return a name for a path, one of a few: a stranger's paths must not fill the metrics."""
    if path in ("/", "/predict", "/metrics"):
        return path.strip("/") or "page"
    if path.startswith("/v2/models/"):
        return "infer" if path.endswith("/infer") else "model"
    return "health" if path.startswith("/v2") else "other"


# Run the application by uvicorn.
def check_packages() -> None:
    """Raise when a package of the extra `serve` is missing."""
    for package in ("starlette", "uvicorn", "prometheus_client", "python_multipart"):
        imported(package, "The service", "serve")


def run(app: Gate, *, host: str, port: int, say: Callable[[str], None]) -> None:
    """Listen until SIGTERM or SIGINT, then answer what is under way, within 30 seconds.

    Args:
        app: What answers.
        host, port: Where to listen; port 0 takes a free one.
        say: Told where it listens, when it does.
    """
    with listening(host, port) as sock, quiet_signals():
        address, number = sock.getsockname()[:2]
        server = make_server(app)
        app.when_ready = lambda: say(f"Listening at http://{address}:{number}")
        server.run(sockets=[sock])
        if not server.started:
            raise HydraError("The service did not start; its log says why.")


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """Open a socket; if the port is taken, say so in plain words."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends answers without delay only for sockets that say they are TCP
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(512)  # who connects before the server accepts waits for it
    except (OSError, OverflowError) as error:
        sock.close()
        raise HydraError(
            f"Cannot listen at {host}:{port}: {error}. Choose another --port."
        ) from None
    try:
        yield sock
    finally:
        sock.close()


def make_server(app: Gate) -> Any:
    """Return a uvicorn server for an application."""
    import uvicorn

    config = uvicorn.Config(
        app,
        http="h11",  # httptools has no limit for headers
        h11_max_incomplete_event_size=app.service.limits.headers,
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=4 * app.service.limits.requests,  # connections, idle ones too
        timeout_keep_alive=15,
        timeout_graceful_shutdown=30,
        backlog=512,
    )
    return uvicorn.Server(config)


@contextmanager
def quiet_signals() -> Iterator[None]:
    """Let SIGTERM and SIGINT end the server, and nothing else.

    uvicorn raises the signal once more when it has shut down, which would end the process with the
    signal's code although everything was answered.
    """
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda *_: None) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
