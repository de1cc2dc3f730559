"""Run the application: uvicorn, with a limit on how long a client may take to say what it wants."""

from __future__ import annotations

import asyncio
import importlib
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..errors import HydraError, MissingDependencyError

if TYPE_CHECKING:
    from .app import Gate

MOST_HEADER_BYTES = 64 * 2**10
LATE_WORDS = b'{"error": "The headers of the request are too long, or took too long to arrive."}'
LATE = (
    b"HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(LATE_WORDS), LATE_WORDS)
)


def check_packages() -> None:
    """Raise when a package of the extra `serve` is missing."""
    for package in ("starlette", "uvicorn", "httptools", "prometheus_client", "python_multipart"):
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise MissingDependencyError(
                f"The service needs {package}: pip install 'hydra-ensembles[serve]'."
            ) from error


def run(
    app: Gate,
    *,
    host: str,
    port: int,
    say: Callable[[str], None],
    header_seconds: float | None = None,
    drain_seconds: float = 30.0,
) -> None:
    """Listen until SIGTERM or SIGINT, then answer what is under way.

    Args:
        app: What answers.
        host, port: Where to listen; port 0 takes a free one.
        say: Told where it listens, when it does.
        header_seconds: A client that has not sent its headers by then is cut off; by default the
            limit for reading a request.
        drain_seconds: Requests under way have this long to finish.
    """
    with listening(host, port) as sock, quiet_signals():
        address, number = sock.getsockname()[:2]
        seconds = header_seconds or app.service.limits.read_seconds
        server = make_server(app, header_seconds=seconds, drain_seconds=drain_seconds)
        app.when_ready = lambda: say(f"Listening at http://{address}:{number}")
        server.run(sockets=[sock])
        if not server.started:
            raise HydraError("The service did not start; its log says why.")


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """Open a socket; a port that is taken is told in plain words."""
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


def make_server(app: Gate, *, header_seconds: float, drain_seconds: float) -> Any:
    """Return a uvicorn server for an application."""
    import uvicorn

    config = uvicorn.Config(
        app,
        http=_protocol(header_seconds),
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=4 * app.service.limits.requests,  # connections, idle ones too
        timeout_keep_alive=15,
        timeout_graceful_shutdown=int(drain_seconds),
        backlog=512,
    )
    return uvicorn.Server(config)


def _protocol(header_seconds: float) -> Any:
    """Return uvicorn's HTTP protocol, which cuts off clients that dribble or flood headers."""
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class ImpatientHttp(HttpToolsProtocol):
        """uvicorn limits neither how long headers take nor how long they are."""

        _late: asyncio.TimerHandle | None = None
        _header_bytes = 0

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._expect()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._expect()

        def on_headers_complete(self) -> None:
            self._forget()
            super().on_headers_complete()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._late is not None:
                self._header_bytes += len(data)
                if self._header_bytes > MOST_HEADER_BYTES:
                    self._cut_off()

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget()
            super().connection_lost(exc)

        def _expect(self) -> None:
            self._forget()
            self._late = self.loop.call_later(header_seconds, self._cut_off)

        def _forget(self) -> None:
            if self._late is not None:
                self._late.cancel()
            self._late, self._header_bytes = None, 0

        def _cut_off(self) -> None:
            self._forget()
            if not self.transport.is_closing():
                self.transport.write(LATE)
                self.transport.close()

    return ImpatientHttp


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
