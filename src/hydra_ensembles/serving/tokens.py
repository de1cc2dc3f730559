"""Tokens that clients of the service send: `Authorization: Bearer TOKEN`."""

from __future__ import annotations

import hmac
import ipaddress
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import DataError

log = logging.getLogger(__name__)

SHORTEST = 16
MAKE_ONE = "python -c 'import secrets; print(secrets.token_urlsafe(32))' > FILE && chmod 600 FILE"


def read_tokens(file: Path) -> tuple[bytes, ...]:
    """Read a file of tokens, one per line; each of them is valid.

    Raises:
        DataError: When the file cannot be read or holds no token, or one that is short or that a
            header cannot carry.
    """
    try:
        mode = file.stat().st_mode
        lines = [line.strip() for line in file.read_bytes().splitlines()]
    except OSError as error:
        raise DataError(
            f"Cannot read the token file {file}: {error.strerror}. Make one: {MAKE_ONE}."
        ) from None
    tokens = tuple(line for line in lines if line)
    if not tokens:
        raise DataError(f"The token file {file} is empty. Make a token: {MAKE_ONE}.")
    for number, token in enumerate(tokens, 1):
        if len(token) < SHORTEST or not all(33 <= byte <= 126 for byte in token):
            raise DataError(
                f"Token {number} of {file} is not usable: expected at least {SHORTEST} visible "
                f"ASCII characters without spaces. Make one: {MAKE_ONE}."
            )
    # the secrets of a container can be read by everybody in it, which is the service only
    if os.name == "posix" and mode & 0o077 and file.parent != Path("/run/secrets"):
        log.warning("Other users can read the token file %s: chmod 600 %s", file, file)
    return tokens


def is_allowed(scope: Mapping[str, Any], tokens: Sequence[bytes]) -> bool:
    """Return whether a request carries one of the tokens, in a time that does not tell which."""
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    scheme, _, token = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
    matches = [hmac.compare_digest(token.strip(), valid) for valid in tokens]
    return scheme.lower() == b"bearer" and any(matches)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # another name, which may be anywhere
        return False
