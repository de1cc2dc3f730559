"""The hub, when it cannot be reached: the local cache at once, not a minute of retries."""

from __future__ import annotations

import logging
import os
import socket
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as TooSlow
from contextlib import contextmanager
from urllib.parse import urlsplit

PATIENCE = 5.0


@contextmanager
def hub_access() -> Iterator[bool]:
    """Yield whether the hub can be reached; where it cannot, downloads look in the cache only.

    The hub's client would retry every file for half a minute and log every try.
    """
    from huggingface_hub import constants

    log = logging.getLogger("huggingface_hub")
    level, offline = log.level, constants.HF_HUB_OFFLINE
    reached = not offline and reachable(constants.ENDPOINT)
    constants.HF_HUB_OFFLINE = not reached
    log.setLevel(logging.ERROR)
    try:
        yield reached
    finally:
        constants.HF_HUB_OFFLINE = offline
        log.setLevel(level)


def reachable(endpoint: str) -> bool:
    """Tell whether an address has a known host; behind a proxy only the proxy knows, so yes."""
    address = urlsplit(endpoint)
    if address.scheme in urllib.request.getproxies() or not address.hostname:
        return True
    port = address.port or (443 if address.scheme == "https" else 80)
    # a thread, for looking up a name has no time limit of its own
    pool = ThreadPoolExecutor(1)
    try:
        pool.submit(socket.getaddrinfo, address.hostname, port).result(timeout=PATIENCE)
    except (OSError, TooSlow):
        return False
    finally:
        pool.shutdown(wait=False)
    return True


def not_cached(name: str) -> str:
    """Say that a model is neither reachable nor here, and what helps."""
    from huggingface_hub import constants

    why = (
        "HF_HUB_OFFLINE is set"
        if constants.HF_HUB_OFFLINE and os.environ.get("HF_HUB_OFFLINE")
        else f"{urlsplit(constants.ENDPOINT).hostname} cannot be reached"
    )
    return (
        f"Cannot load {name}: {why}, and it is not in the cache "
        f"{constants.HF_HUB_CACHE}. Give a folder with the model, or connect and try again."
    )
