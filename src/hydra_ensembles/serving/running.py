"""Run the application by uvicorn."""

from __future__ import annotations

import importlib
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..errors import HydraError, MissingDependencyError

if TYPE_CHECKING:
    from .app import Gate


def check_packages() -> None:
    """Raise when a package of the extra `serve` is missing."""
    for package in ("starlette", "uvicorn", "prometheus_client", "python_multipart"):
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
    drain_seconds: float = 30.0,
) -> None:
    """Listen until SIGTERM or SIGINT, then answer what is under way.

    Args:
        app: What answers.
        host, port: Where to listen; port 0 takes a free one.
        say: Told where it listens, when it does.
        drain_seconds: Requests under way have this long to finish.
    """
    with listening(host, port) as sock, quiet_signals():
        address, number = sock.getsockname()[:2]
        server = make_server(app, drain_seconds=drain_seconds)
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


def make_server(app: Gate, *, drain_seconds: float) -> Any:
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
        timeout_graceful_shutdown=int(drain_seconds),
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
