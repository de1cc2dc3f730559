"""`SHA256SUMS` beside an exported ensemble: are its files as they were written?

The file has the form of `sha256sum`, so `sha256sum --check SHA256SUMS` reads it without this
library.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from .._records import PARTIAL, inside, sha256_of_file, write_whole
from ..errors import FormatError

SUMS = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  ([A-Za-z0-9][A-Za-z0-9._-]*(?:/[A-Za-z0-9][A-Za-z0-9._-]*)*)")


def write_sums(folder: str | os.PathLike[str]) -> None:
    """Write the SHA-256 of every file of a folder; hidden and unfinished files are left out."""
    home = Path(folder)
    lines = []
    for path in sorted(home.rglob("*")):
        name = path.relative_to(home)
        hidden = any(part.startswith(".") for part in name.parts)
        if path.is_file() and not hidden and path.suffix != PARTIAL and name != Path(SUMS):
            lines.append(f"{sha256_of_file(inside(home, name.as_posix()))}  {name.as_posix()}\n")
    write_whole(home / SUMS, "".join(lines))


def check_sums(folder: str | os.PathLike[str]) -> dict[str, str | None]:
    """Compare every file with `SHA256SUMS`; return what is wrong with each, or None.

    Raises:
        FormatError: The list cannot be read, or names a file outside the folder.
    """
    path = inside(folder, SUMS)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (UnicodeDecodeError, OSError) as error:
        raise FormatError(f"Cannot read {path} ({error}). Copy or export it again.") from None
    problems: dict[str, str | None] = {}
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise FormatError(
                f"{path}: line {number} is {line!r:.60}, expected a SHA-256, two spaces and the "
                "name of a file in the folder. Copy or export it again."
            )
        digest, name = match.groups()
        problems[name] = None
        try:
            file = inside(folder, name)
            if not file.is_file():
                problems[name] = "is missing"
            elif sha256_of_file(file) != digest:
                problems[name] = f"is not the file in {SUMS}: truncated, replaced or changed"
        except (FormatError, OSError) as error:
            problems[name] = str(error)
    return problems
